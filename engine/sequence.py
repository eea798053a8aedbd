"""One request while the engine works on it: its tokens, and how many of them have keys and values in which blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.grammar import Mask, Matcher
from engine.request import FinishReason, GenerationRequest, TokenLogprob
from swapper.geometry import kv_blocks

if TYPE_CHECKING:
    from engine.kv_keeper import KeptKv


FORESIGHT = 4
"""Blocks of a sequence that memory is asked for ahead: 64 tokens take longer than a grant is on its way."""


class Sequence:
    """Prompt and answer so far. `tokens[:computed]` have their keys and values in `blocks`, the rest is yet to run."""

    __slots__ = (
        "answer_counts",
        "arrival",
        "blocks",
        "computed",
        "computing",
        "kept",
        "limit",
        "matcher",
        "paging",
        "prompt_logprobs",
        "request",
        "started",
        "submitted",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, context_length: int, arrival: int, submitted: float) -> None:
        self.request = request
        self.arrival = arrival
        self.tokens = [*request.prompt, *request.answer]
        self.limit = min(len(request.prompt) + request.sampling.max_tokens, context_length)  # tokens, at most
        self.blocks: tuple[int, ...] = ()
        self.computed = 0
        self.kept: KeptKv | None = None  # of a suspended sequence that waits: what `blocks` held
        self.started = False
        self.submitted = submitted
        self.computing = 0.0  # seconds, as in EngineTime
        self.paging = 0.0
        self.matcher: Matcher | None = None  # of the request's grammar; it has seen the answer so far
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt's tokens from the second on, if they are wanted
        self.answer_counts: dict[int, int] = {}  # how often each token stands in the answer, for the penalties
        for token in request.answer:
            self._count(token)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def answered(self) -> int:
        """Tokens of the answer, and so the index of the next one."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """Tokens that are yet to run: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def blocks_needed(self) -> int:
        """Blocks that hold all its tokens."""
        return kv_blocks(len(self.tokens))

    @property
    def blocks_wanted(self) -> int:
        """Blocks for its tokens and one more for those to come, but not more than it can ever fill."""
        return max(self.blocks_needed, min(self.blocks_needed + 1, kv_blocks(self.limit)))

    @property
    def blocks_foreseen(self) -> int:
        """Blocks that it will have filled in a while, at most: what to ask for, before it is short of any."""
        return max(self.blocks_needed, min(self.blocks_needed + FORESIGHT, kv_blocks(self.limit)))

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token; says whether the answer ends with it, or before it ("stop")."""
        if token in self.request.sampling.stop_tokens:
            return "stop"
        self.tokens.append(token)
        self._count(token)
        if self.matcher is not None:
            self.matcher.consume(token)
        return "length" if self.is_full else None

    @property
    def is_scored(self) -> bool:
        """Whether the prompt's log-probabilities are wanted. They go out with the first token, so once."""
        return self.request.sampling.score_prompt and not self.request.answer

    def unscored(self, context: int) -> range:
        """Which tokens before `context`, once they have run, tell the log-probability of a token of the prompt."""
        first = max(self.computed, len(self.prompt_logprobs))
        return range(first, min(context, len(self.request.prompt) - 1)) if self.is_scored else range(0)

    def mask(self) -> Mask | None:
        """Which tokens may come next, if there is a grammar."""
        return None if self.matcher is None else self.matcher.mask()

    @property
    def is_answered(self) -> bool:
        """Whether it has got a token since it was submitted."""
        return self.answered > len(self.request.answer)

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= self.limit

    def rewind(self) -> None:
        """Forget all keys and values: they are computed again, answer included, when there is room."""
        self.blocks = ()
        self.computed = 0

    def _count(self, token: int) -> None:
        self.answer_counts[token] = self.answer_counts.get(token, 0) + 1
