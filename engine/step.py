"""One planned forward pass of a decoder: whose tokens it runs, packed into one row, and what becomes of its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.batch import SequenceSlice, StepBatch
from engine.sampling import Choice, SamplingRow
from engine.sequence import Sequence
from swapper.geometry import kv_blocks


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `length` tokens of a sequence."""

    sequence: Sequence
    length: int


@dataclass(frozen=True, slots=True)
class Step:
    """A planned forward pass. `sampled` are the sequences that get a token, in the order of the logits; behind them
    come rows that only score a prompt, `scored`: the sequence, and the place of the token to score.
    """

    batch: StepBatch
    chunks: tuple[Chunk, ...]
    sampled: tuple[Sequence, ...]
    scored: tuple[tuple[Sequence, int], ...] = ()
    ahead: int = 0
    """How many tokens of each sequence were not known when this was planned: 1 if it was planned by `plan_ahead`."""

    @staticmethod
    def of(chunks: list[Chunk]) -> Step:
        """Pack chunks into one row of tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        slices: list[SequenceSlice] = []
        rows: list[int] = []
        sampled: list[Sequence] = []
        scored_rows: list[int] = []
        scored: list[tuple[Sequence, int]] = []
        for chunk in chunks:
            sequence, start = chunk.sequence, len(tokens)
            context = sequence.computed + chunk.length
            tokens.extend(sequence.tokens[sequence.computed : context])
            positions.extend(range(sequence.computed, context))
            slices.append(SequenceSlice(start, chunk.length, context, sequence.blocks[: kv_blocks(context)]))
            if context == len(sequence.tokens):
                rows.append(start + chunk.length - 1)
                sampled.append(sequence)
            for place in sequence.unscored(context):
                scored_rows.append(start + place - sequence.computed)
                scored.append((sequence, place + 1))
        batch = StepBatch(tuple(tokens), tuple(positions), tuple(slices), (*rows, *scored_rows))
        return Step(batch, tuple(chunks), tuple(sampled), tuple(scored))

    def behind(self) -> Step:
        """One more token of each sequence of these decodes, which are under way; 0 stands for what is not known."""
        positions = tuple(position + 1 for position in self.batch.positions)
        slices = tuple(
            SequenceSlice(row, 1, position + 1, sequence.blocks[: kv_blocks(position + 1)])
            for row, (position, sequence) in enumerate(zip(positions, self.sampled, strict=True))
        )
        batch = StepBatch((0,) * len(positions), positions, slices, self.batch.sampled)
        return Step(batch, self.chunks, self.sampled, ahead=1)

    @property
    def is_awaited(self) -> bool:
        """Whether a request takes part whose client waits for its first token."""
        return any(not chunk.sequence.is_answered for chunk in self.chunks)

    def choose(self, logits: torch.Tensor, likeliest: torch.Tensor | None = None) -> Choice:
        """The next tokens, when the pass has been launched. Arguments are `Choice`'s."""
        return Choice(logits, self.rows(), likeliest)

    def rows(self) -> list[SamplingRow]:
        rows = [
            SamplingRow(s.request.sampling, len(s.tokens) + self.ahead, s.tokens, s.answer_counts, s.mask())
            for s in self.sampled
        ]
        return rows + [SamplingRow(s.request.sampling, at, given=s.tokens[at]) for s, at in self.scored]
