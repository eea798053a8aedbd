"""Batches of an encoder: which texts, of which requests, go through the next forward pass.

A text goes through one pass as a whole. Requests take turns, a text each, so that one with a thousand texts does not
hold up one with a single one. It has the methods of `Batcher` that `ModelRunner` calls, and needs no KV memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import torch

from engine.batch import SequenceSlice, StepBatch
from engine.request import (
    EmbeddingRequest,
    EngineReport,
    EngineTime,
    KvReleased,
    RequestFailed,
    Resumed,
    Started,
    Suspended,
    Tokens,
)


@dataclass(eq=False, slots=True)
class _Encoding:
    """One request under way."""

    request: EmbeddingRequest
    submitted: float
    vectors: list[bytes] = field(default_factory=list)  # of its first texts
    started: bool = False
    computing: float = 0.0
    paging: float = 0.0


@dataclass(frozen=True, slots=True)
class EncoderStep:
    """A planned pass: of each request, in the order of the batch, its next text."""

    batch: StepBatch
    encodings: tuple[_Encoding, ...]

    @property
    def is_awaited(self) -> bool:
        """Whether a request takes part that has not been in a pass before."""
        return any(not encoding.started for encoding in self.encodings)

    def choose(self, output: torch.Tensor, likeliest: torch.Tensor | None = None) -> Vectors:
        return Vectors(output)


class Vectors:
    """A pass's vectors, on their way to the host."""

    tokens = None
    revised = False

    def __init__(self, vectors: torch.Tensor) -> None:
        self._vectors = vectors

    def take(self) -> list[bytes | None]:
        """Each as little-endian float32; None where it is not finite."""
        host = self._vectors.cpu()
        finite = torch.isfinite(host).all(dim=1).tolist()
        return [row.numpy().tobytes() if good else None for row, good in zip(host, finite, strict=True)]


class EncoderBatcher:
    """The requests of one encoder. Every change leaves its reports in a list that `take_reports` empties."""

    def __init__(
        self,
        model: str,
        *,
        vocab_size: int,
        context_length: int,
        max_batch_tokens: int,
        max_batch_sequences: int,
        ended: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`ended` is told of each request that is over, before its last report goes out."""
        self._model = model
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_tokens = max_batch_tokens
        self._max_texts = max_batch_sequences
        self._ended = ended
        self._clock = clock
        self._encodings: dict[str, _Encoding] = {}  # in order of arrival
        self._reports: list[EngineReport] = []
        self._suspended = False

    @property
    def is_idle(self) -> bool:
        return not self._encodings or self._suspended

    def take_reports(self) -> list[EngineReport]:
        reports, self._reports = self._reports, []
        return reports

    # ---- what is asked from outside, between two passes

    def add(self, request: EmbeddingRequest, submitted: float) -> None:
        encoding = _Encoding(request, submitted)
        self._encodings[request.id] = encoding
        if complaint := self._complaint(request):
            self._fail(encoding, complaint)

    def cancel(self, request: str) -> None:
        encoding = self._encodings.get(request)
        if encoding is not None:
            self._forget(encoding)
            self._reports.append(Tokens(request, 0, (), finish="cancelled"))

    def grant(self, frames: int, epoch: int) -> None:
        self._reports.append(KvReleased(self._model, frames, epoch))

    def suspend(self, epoch: int) -> None:
        """Run nothing until `resume`. What was computed is vectors, and stays."""
        self._suspended = True
        self._reports.append(Suspended(self._model, 0, epoch, 0, 0, 0.0))

    def resume(self, frames: int, epoch: int) -> None:
        self._suspended = False
        self._reports.append(Resumed(self._model, epoch))

    def clear(self) -> None:
        """Drop every request without a word."""
        for encoding in list(self._encodings.values()):
            self._forget(encoding)
        self._suspended = False

    # ---- the forward pass

    def plan(self) -> EncoderStep | None:
        """The next forward pass; None if there is nothing to run. Asked again before `complete`, it says the same."""
        if self.is_idle:
            return None
        tokens: list[int] = []
        positions: list[int] = []
        slices: list[SequenceSlice] = []
        encodings: list[_Encoding] = []
        for round in count():
            begun = len(slices)
            for encoding in self._encodings.values():
                texts, place = encoding.request.inputs, len(encoding.vectors) + round
                if place >= len(texts) or len(slices) == self._max_texts:
                    continue
                text = texts[place]
                if slices and len(tokens) + len(text) > self._max_tokens:
                    # Nobody's shorter text goes before it: a long one would wait for ever.
                    return EncoderStep(StepBatch(tuple(tokens), tuple(positions), tuple(slices), ()), tuple(encodings))
                slices.append(SequenceSlice(len(tokens), len(text), len(text), ()))
                tokens += text
                positions += range(len(text))
                encodings.append(encoding)
            if len(slices) == begun:
                break
        return EncoderStep(StepBatch(tuple(tokens), tuple(positions), tuple(slices), ()), tuple(encodings))

    def plan_ahead(self, step: EncoderStep) -> None:
        """Passes are large: there is nothing to be won by launching one behind another."""

    def complete(self, step: EncoderStep, sampled: list[bytes | None], computing: float, paging: float) -> None:
        """The pass is done; `sampled` has a vector for each of its texts, None where it is not finite.

        It took `computing` seconds and `paging` seconds of waiting for pages.
        """
        for encoding in dict.fromkeys(step.encodings):
            encoding.computing += computing
            encoding.paging += paging
            if not encoding.started:
                encoding.started = True
                self._reports.append(Started(encoding.request.id))
        for encoding, vector in zip(step.encodings, sampled, strict=True):
            if vector is not None:
                encoding.vectors.append(vector)
            elif encoding.request.id in self._encodings:
                self._fail(encoding, "The model's vectors are not finite. Its weights or its dtype may be wrong.")
        for encoding in dict.fromkeys(step.encodings):
            if len(encoding.vectors) == len(encoding.request.inputs):
                self._finish(encoding)

    def fail(self, step: EncoderStep, message: str) -> None:
        """The pass had a defect: whoever took part in it is over."""
        for encoding in dict.fromkeys(step.encodings):
            self._fail(encoding, message)

    # ---- endings

    def _complaint(self, request: EmbeddingRequest) -> str | None:
        if not request.inputs or not all(request.inputs):
            return "There is no text, or one without tokens."
        longest = max(map(len, request.inputs))
        if longest > self._context_length:
            return f"A text has {longest} tokens, but the model takes {self._context_length}. Shorten it."
        if any(min(text) < 0 or max(text) >= self._vocab_size for text in request.inputs):
            return f"A text holds a token that is not in the model's vocabulary of {self._vocab_size}."
        return None

    def _finish(self, encoding: _Encoding) -> None:
        self._forget(encoding)
        time = EngineTime(self._clock() - encoding.submitted, encoding.computing, encoding.paging)
        vectors = tuple(encoding.vectors)
        self._reports.append(Tokens(encoding.request.id, 0, (), finish="stop", vectors=vectors, time=time))

    def _fail(self, encoding: _Encoding, message: str) -> None:
        self._forget(encoding)
        self._reports.append(RequestFailed(encoding.request.id, message))

    def _forget(self, encoding: _Encoding) -> None:
        del self._encodings[encoding.request.id]
        self._ended(encoding.request.id)
