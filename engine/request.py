"""What the engine is asked and what it answers: plain data, no torch, so that every room may import it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Defaults are the OpenAI API's; a `temperature` under 1e-5 is greedy.

    Sampling is a pure function of `(seed, position)`: a rerun or a resumption repeats it exactly.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and answer
    presence_penalty: float = 0.0  # over the answer, as OpenAI defines it
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    stop_tokens: frozenset[int] = frozenset()  # the answer ends before any of these
    logprobs: int | None = None  # how many alternatives to report at each position; None: no logprobs at all
    score_prompt: bool = False  # with `logprobs`: report the prompt's tokens as well, from the second on
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of these tokens
    grammar: str | None = None  # what the answer must match, as llguidance writes grammars

    @property
    def looks_back(self) -> bool:
        """Whether a token cannot be chosen before the one before it is known on the host."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised or self.grammar is not None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to continue. `answer` holds tokens already delivered before a worker died; it is continued."""

    id: str
    model: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    answer: tuple[int, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens, at most, whose keys and values it needs."""
        return self.prompt_tokens + self.max_tokens

    def continued(self, answer: tuple[int, ...]) -> GenerationRequest:
        """The same with an answer that has come so far."""
        return replace(self, answer=answer)


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Texts of which an encoder makes vectors. They are answered together, and made anew if a worker dies before."""

    id: str
    model: str
    inputs: tuple[tuple[int, ...], ...]

    answer: ClassVar[tuple[int, ...]] = ()
    max_tokens: ClassVar[int] = 0
    kv_tokens: ClassVar[int] = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.inputs))

    def continued(self, answer: tuple[int, ...]) -> EmbeddingRequest:
        return self


Request = GenerationRequest | EmbeddingRequest


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of a chosen token, before temperature and filters, and the likeliest alternatives."""

    logprob: float
    top: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Started:
    """A request took part in its first forward pass."""

    request: str


@dataclass(frozen=True, slots=True)
class EngineTime:
    """Where a request's time in the engine went, in seconds. What is left of `total` was waiting for a turn."""

    total: float  # from its submission to its last token
    computing: float  # forward passes it took part in
    paging: float  # their waits for pages


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of a request; `index` is the place of the first of them in its answer.

    `finish` set means that this is the last word on the request: its KV blocks are free again. A stop token is
    not delivered. `tokens` may then be empty.
    """

    request: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # with the first token, if they were asked for
    time: EngineTime | None = None  # with the last token of an answer that came to its own end
    vectors: tuple[bytes, ...] | None = None  # of an EmbeddingRequest, with its finish: float32, little-endian


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The engine could not go on with a request (a defect, or memory): its KV blocks are free again."""

    request: str
    message: str


@dataclass(frozen=True, slots=True)
class KvWanted:
    """A model's batch would use `frames` KV frames in all, more than it was granted; it goes on with less."""

    model: str
    frames: int


@dataclass(frozen=True, slots=True)
class KvReleased:
    """Answer to every change of a KV grant: the model holds at most `frames` KV frames from now on."""

    model: str
    frames: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Suspended:
    """Answer to a suspension: the model runs nothing and holds no KV frame.

    With a grant of `kv_frames` frames, all that ran can go on at once. `kept_bytes` of keys and values were moved to
    host memory; `lost_tokens` will be computed again.
    """

    model: str
    kv_frames: int
    epoch: int
    kept_bytes: int = 0
    lost_tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Resumed:
    """Answer to a resumption: the model's requests run again, as far as its grant goes."""

    model: str
    epoch: int


EngineReport = Started | Tokens | RequestFailed | KvWanted | KvReleased | Suspended | Resumed
