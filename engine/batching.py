"""Continuous batching of one model: which sequences take part in the next forward pass, and with which tokens.

Pure bookkeeping, no threads and no tensors; `engine/runner.py` runs it. Each pass holds at most `max_batch_tokens`
tokens: first one token of every sequence that is decoding, so that nobody's stream stalls behind a long prompt, then
chunks of prompts, oldest first. Sequences join and leave between any two passes.

A sequence is admitted, in order of arrival, when there are blocks for all its tokens and one more for each sequence
that runs. When a decode finds no block, the youngest sequence is preempted: its blocks are freed, it waits at the front
and is computed again later, answer included. Nobody fails for want of blocks: a sequence that is alone and still finds
none waits for a larger grant.

A suspended model runs nothing and holds no block. What its sequences had computed is kept by a `KvKeeper`, where that
pays, and is put into new blocks when they are admitted again.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from itertools import chain, count, islice

from engine.blocks import BlockManager
from engine.grammar import GrammarError, Grammars
from engine.kv_keeper import KvKeeper
from engine.request import (
    EngineReport,
    EngineTime,
    FinishReason,
    GenerationRequest,
    KvReleased,
    KvWanted,
    RequestFailed,
    Resumed,
    Started,
    Suspended,
    TokenLogprob,
    Tokens,
)
from engine.sampling import Sampled
from engine.sequence import Sequence
from engine.step import Chunk, Step
from swapper.geometry import kv_blocks

SCORED_TOKENS = 128
"""Tokens of one pass, at most, of a prompt whose log-probabilities are wanted: each makes a whole row of logits."""


class Batcher:
    """The sequences of one model. Every change leaves its reports in a list that `take_reports` empties.

    Invariants: `_running` and `_waiting` are in order of arrival; a sequence has blocks exactly while it runs.
    """

    def __init__(
        self,
        model: str,
        blocks: BlockManager,
        *,
        vocab_size: int,
        context_length: int,
        max_batch_tokens: int,
        max_batch_sequences: int,
        ended: Callable[[str], None],
        clock: Callable[[], float],
        grammars: Grammars | None = None,
        keeper: KvKeeper | None = None,
    ) -> None:
        """`ended` is told of each request that is over, before its last report goes out. Without `grammars`, requests
        that have one fail; without a `keeper`, suspended ones are computed again.
        """
        self._model = model
        self._blocks = blocks
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_tokens = max_batch_tokens
        self._max_sequences = min(max_batch_sequences, max_batch_tokens)
        self._ended = ended
        self._clock = clock
        self._grammars = grammars
        self._keeper = keeper
        self._arrivals = count()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._reports: list[EngineReport] = []
        self._short_of_blocks = False  # since planning began
        self._kv_wanted = 0  # what the last KvWanted under this grant said
        self._suspended = False

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to run until another command comes."""
        return not self._sequences or self._suspended

    def take_reports(self) -> list[EngineReport]:
        reports, self._reports = self._reports, []
        return reports

    # ---- what is asked from outside, between two passes

    def add(self, request: GenerationRequest, submitted: float) -> None:
        """Queue a request. One that cannot be run at all fails, one that is complete already ends."""
        sequence = Sequence(request, self._context_length, next(self._arrivals), submitted)
        complaint = self._complaint(request) or self._begin_grammar(sequence)
        self._sequences[request.id] = sequence
        if complaint:
            self._fail(sequence, complaint)
        elif sequence.is_full:
            self._finish(sequence, "length")
        else:
            self._waiting.append(sequence)

    def cancel(self, request: str) -> None:
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._finish(sequence, "cancelled")

    def grant(self, frames: int, epoch: int) -> None:
        """Change the KV grant. Sequences with blocks beyond a smaller one are preempted."""
        for sequence in reversed(self._running.copy()):
            if not self._blocks.fits(sequence.blocks, frames):
                self._preempt(sequence)
        self._blocks.grant(frames)
        self._kv_wanted = 0
        self._reports.append(KvReleased(self._model, frames, epoch))

    def suspend(self, epoch: int) -> None:
        """Run nothing until `resume`, and hold no block meanwhile. Requests may come and go."""
        began = self._clock()
        begun = [sequence for sequence in self._sequences.values() if sequence.blocks or sequence.started]
        wanted = sum(sequence.blocks_wanted for sequence in begun)
        kept_bytes = lost_tokens = 0
        for sequence in self._running.copy():
            done = sequence.computed
            kept = self._keeper.keep(sequence.blocks[: kv_blocks(done)], done) if self._keeper is not None else None
            self._preempt(sequence)
            sequence.kept = kept
            kept_bytes += kept.nbytes if kept is not None else 0
            lost_tokens += done if kept is None else 0
        self._suspended = True
        self._blocks.grant(0)
        self._kv_wanted = 0
        frames = self._blocks.frames_for(wanted)
        seconds = self._clock() - began
        self._reports.append(Suspended(self._model, frames, epoch, kept_bytes, lost_tokens, seconds))

    def resume(self, frames: int, epoch: int) -> None:
        """Go on, with a grant of `frames` frames: the oldest first, if that is not enough for all."""
        self._suspended = False
        self._blocks.grant(frames)
        self._reports.append(Resumed(self._model, epoch))

    def clear(self) -> None:
        """Drop every sequence without a word and give all blocks back."""
        for sequence in list(self._sequences.values()):
            self._forget(sequence)
        self._suspended = False

    # ---- the forward pass

    def plan(self) -> Step | None:
        """The next forward pass; None if there is nothing to run, or no block to run it with."""
        if self._suspended:
            return None
        self._short_of_blocks = False
        chunks = self._decodes()
        budget = self._max_tokens - len(chunks)
        for sequence in self._running:
            if sequence.pending > 1 and budget > 0:
                chunks.append(Chunk(sequence, _chunk_length(sequence, budget)))
                budget -= chunks[-1].length
        while budget > 0 and (newcomer := self._admit()) is not None:
            chunks.append(Chunk(newcomer, _chunk_length(newcomer, budget)))
            budget -= chunks[-1].length
        self._want_more()
        return Step.of(chunks) if chunks else None

    def plan_ahead(self, step: Step) -> Step | None:
        """The pass behind `step`, which is under way: the same sequences, each with the token that is being chosen.

        None unless that is what `plan` would say for all but certain, whatever those tokens are. A sequence that turns
        out to have ended with its token has a surplus one in this pass, which `complete` drops. Only decodes are
        followed: `plan` has let in whoever could be let in, so nobody waits for longer because of this.
        """
        sequences = step.sampled
        if step.scored or len(step.batch.tokens) != len(sequences) or list(sequences) != self._running:
            return None
        if any(len(s.tokens) + 1 >= s.limit or s.request.sampling.looks_back for s in sequences):
            return None
        self._want_more()
        for sequence in sequences:
            missing = kv_blocks(len(sequence.tokens) + 1) - len(sequence.blocks)
            if missing > 0:
                blocks = self._blocks.take(missing)
                if blocks is None:
                    return None
                sequence.blocks += blocks
        return step.behind()

    def complete(self, step: Step, sampled: list[Sampled | None], computing: float, paging: float) -> None:
        """The pass is done; `sampled` has the new token of each of `step.sampled`, then what is there of `step.scored`;
        None where logits are not finite.

        It took `computing` seconds and `paging` seconds of waiting for pages. Sequences that ended meanwhile, in a pass
        planned ahead, are left out.
        """
        if self._keeper is not None and len(step.batch.tokens) > len(step.chunks):  # not decodes alone
            self._keeper.computed(len(step.batch.tokens), computing)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if not self._has(sequence):
                continue
            sequence.computed += chunk.length
            sequence.computing += computing
            sequence.paging += paging
            if not sequence.started:
                sequence.started = True
                self._reports.append(Started(sequence.id))
        new = len(step.sampled)
        for (sequence, _), score in zip(step.scored, sampled[new:], strict=True):
            # Where logits are not finite, those of later tokens are not either: the sequence fails with them.
            known = score.logprob if score is not None else None
            sequence.prompt_logprobs.append(known or TokenLogprob(math.nan))
        for sequence, result in zip(step.sampled, sampled[:new], strict=True):
            if not self._has(sequence):
                continue
            if result is None:
                self._fail(sequence, "The model's logits are not finite. Its weights or its dtype may be wrong.")
            else:
                self._extend(sequence, result)

    def fail(self, step: Step, message: str) -> None:
        """The pass had a defect: whoever took part in it is over."""
        for chunk in step.chunks:
            if self._has(chunk.sequence):
                self._fail(chunk.sequence, message)

    def _has(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.id) is sequence

    # ---- planning

    def _decodes(self) -> list[Chunk]:
        """One token of each sequence that is decoding and has, or finds, a block for it; oldest first."""
        chunks = []
        for sequence in self._running.copy():
            if sequence.pending == 1 and sequence.blocks and self._grow(sequence):
                chunks.append(Chunk(sequence, 1))
        return chunks

    def _grow(self, sequence: Sequence) -> bool:
        """See that a sequence has blocks for all its tokens, at the cost of younger ones."""
        missing = sequence.blocks_needed - len(sequence.blocks)
        while missing:
            blocks = self._blocks.take(missing)
            if blocks is not None:
                sequence.blocks += blocks
                return True
            self._short_of_blocks = True
            youngest = self._running[-1]
            if len(self._running) > 1:
                self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> Sequence | None:
        """Let the longest waiter in, with blocks for all its tokens, if there is room for it."""
        if not self._waiting or len(self._running) >= self._max_sequences:
            return None
        sequence = self._waiting[0]
        # Without these spare blocks, a newcomer would be preempted by the next decode that needs one.
        spare = sum(running.blocks_wanted - len(running.blocks) for running in self._running)
        needed = sequence.blocks_needed
        blocks = self._blocks.take(needed) if needed + spare <= self._blocks.available else None
        if blocks is None:
            self._short_of_blocks = True
            return None
        sequence.blocks = blocks
        if sequence.kept is not None and self._keeper is not None:
            self._keeper.restore(sequence.kept, blocks)
            sequence.computed, sequence.kept = sequence.kept.tokens, None
        insort(self._running, self._waiting.popleft(), key=_arrival)
        return sequence

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._blocks.give_back(sequence.blocks)
        sequence.rewind()
        insort(self._waiting, sequence, key=_arrival)

    def _want_more(self) -> None:
        """When blocks are short, or soon will be, say how many frames would do for all for a while.

        Once for each number, if that is more than the grant. A decode that finds no block costs a sequence its place.
        """
        if not self._short_of_blocks and self._blocks.available >= 2 * len(self._running):
            return
        candidates = islice(chain(self._running, self._waiting), self._max_sequences)
        blocks = sum(sequence.blocks_foreseen for sequence in candidates)
        frames = self._blocks.frames_for(blocks)
        if frames > self._blocks.granted and frames != self._kv_wanted:
            self._kv_wanted = frames
            self._reports.append(KvWanted(self._model, frames))

    # ---- endings

    def _complaint(self, request: GenerationRequest) -> str | None:
        tokens = request.prompt
        if not tokens:
            return "The prompt has no tokens."
        if len(tokens) >= self._context_length:
            return (
                f"The prompt has {len(tokens)} tokens, which leaves no room for an answer in the model's context of "
                f"{self._context_length}. Shorten it."
            )
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            return f"The prompt holds a token that is not in the model's vocabulary of {self._vocab_size}."
        return None

    def _begin_grammar(self, sequence: Sequence) -> str | None:
        """Give a sequence its matcher; says why it cannot have one."""
        sampling = sequence.request.sampling
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            return "This model's answers cannot be held to a grammar."
        try:
            sequence.matcher = self._grammars.matcher(sampling.grammar, sampling.stop_tokens)
            for token in sequence.request.answer:
                sequence.matcher.consume(token)
        except GrammarError as error:
            return str(error)
        return None

    def _extend(self, sequence: Sequence, result: Sampled) -> None:
        index = sequence.answered
        try:
            finish = sequence.append(result.token)
        except GrammarError as error:
            self._fail(sequence, str(error))
            return
        delivered = finish != "stop"
        if finish is not None:
            self._forget(sequence)
        wants_logprobs = sequence.request.sampling.logprobs is not None
        logprobs = (result.logprob,) if delivered and result.logprob is not None else ()
        self._reports.append(
            Tokens(
                sequence.id,
                index,
                (result.token,) if delivered else (),
                logprobs if wants_logprobs else None,
                finish,
                tuple(sequence.prompt_logprobs) if sequence.is_scored and not index else None,
                None if finish is None else self._time(sequence),
            )
        )

    def _time(self, sequence: Sequence) -> EngineTime:
        return EngineTime(self._clock() - sequence.submitted, sequence.computing, sequence.paging)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._forget(sequence)
        self._reports.append(Tokens(sequence.id, sequence.answered, (), None, reason))

    def _fail(self, sequence: Sequence, message: str) -> None:
        self._forget(sequence)
        self._reports.append(RequestFailed(sequence.id, message))

    def _forget(self, sequence: Sequence) -> None:
        """Take a sequence out and give its blocks back."""
        del self._sequences[sequence.id]
        if sequence.blocks:
            self._running.remove(sequence)
            self._blocks.give_back(sequence.blocks)
            sequence.rewind()
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            if sequence.kept is not None and self._keeper is not None:
                self._keeper.drop(sequence.kept)
        self._ended(sequence.id)


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


def _chunk_length(sequence: Sequence, budget: int) -> int:
    length = min(sequence.pending, budget)
    return min(length, SCORED_TOKENS) if sequence.is_scored else length
