"""From a prompt to pieces of text: what chat and text completions have in common.

`Generation` is one answer: tokens come out of the scheduler, text without stop strings goes out. `merge` reads several
at once. However the reading ends, the sequence of an answer that nobody reads leaves the batch.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from engine.request import GenerationRequest, SamplingParams, TokenLogprob, Tokens
from scheduler.interface import Room
from server.catalog import CatalogModel
from server.config import SamplingDefaults
from server.errors import ApiError
from server.openai.schemas import Generate
from server.openai.tools import ToolCall, ToolCallParser
from server.service import Service
from server.stops import StopMatcher
from server.tokens import ModelTokenizer
from swapper.errors import Refused


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log-probability, which a prompt's first has none of; `offset` is where its text begins."""

    token: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What became certain: text, the tokens it came from where they were scored, calls of tools. `finish` is set on the
    last.
    """

    text: str
    scored: Sequence[ScoredToken] = ()
    calls: Sequence[ToolCall] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    param: str  # what it came in, for errors
    echo: str | None = None  # what an answer is to begin with


@dataclass(frozen=True, slots=True)
class Rules:
    """What an answer has to be, and how it is read."""

    grammar: str | None = None
    parser: Callable[[], ToolCallParser] | None = None  # makes one for an answer that may have calls


def sampling_params(
    body: Generate, defaults: SamplingDefaults, tokenizer: ModelTokenizer, max_tokens: int
) -> SamplingParams:
    """What the request says, else what the configuration says of the model."""
    if body.logit_bias:
        tokenizer.checked(list(body.logit_bias), "logit_bias")

    def choose(name: str) -> float:
        asked = getattr(body, name)
        chosen: float = getattr(defaults, name) if asked is None else asked
        return chosen

    return SamplingParams(
        temperature=choose("temperature"),
        top_p=choose("top_p"),
        top_k=max(0, int(choose("top_k"))),
        min_p=choose("min_p"),
        repetition_penalty=choose("repetition_penalty"),
        presence_penalty=choose("presence_penalty"),
        frequency_penalty=choose("frequency_penalty"),
        seed=random.getrandbits(63) if body.seed is None else body.seed % (1 << 63),
        max_tokens=max_tokens,
        stop_tokens=frozenset() if body.ignore_eos else tokenizer.stop_tokens,
        logprobs=body.wanted_logprobs,
        logit_bias=body.logit_bias,
    )


def answer_limit(
    model: CatalogModel,
    prompt_tokens: int,
    body: Generate,
    default: int,
    room: Room | None,
    param: str,
) -> int:
    """How many tokens an answer may have: what `body` wants, else `default`, or what the context or memory (`room`) has
    left.

    KV memory is reserved for the longest answer that a request may have, so one that does not say how long its answer
    may be does not get the whole context.

    Raises ApiError if the prompt is empty, or the context, or all memory there is, cannot hold prompt and answer.
    """
    if prompt_tokens == 0:
        raise ApiError(400, f"Parameter '{param}' is invalid: it holds no token.", "invalid_value", param)
    rest = model.context_length - prompt_tokens
    wanted = body.wanted_tokens
    if rest < 1:
        raise prompt_too_long(model, str(prompt_tokens), param)
    if wanted is not None and rest < wanted:
        raise ApiError(
            400,
            f"This model's context is {model.context_length} tokens long, but the request has {prompt_tokens} in the "
            f"prompt and {wanted} for the answer. Shorten one of them.",
            "context_length_exceeded",
            body.limiting_parameter,
        )
    if room is not None and 0 < room.ever < prompt_tokens + (wanted or 1):
        raise ApiError(
            400,
            f"This server's memory holds {room.ever} tokens of this model at a time, but the request has "
            f"{prompt_tokens} in the prompt and {wanted or 1} for the answer. Shorten one of them; memory.pool sets "
            "this limit.",
            "context_length_exceeded",
            body.limiting_parameter if wanted else param,
        )
    if wanted is None and room is not None:
        rest = max(1, min(rest, room.now - prompt_tokens))
    return wanted or min(rest, default)


def refuse_encoder(model: CatalogModel) -> None:
    """Raises ApiError if a model does not generate text."""
    if model.embedding is not None:
        message = f"The model {model.name!r} makes embeddings and no text; use /v1/embeddings."
        raise ApiError(400, message, "unsupported_model", "model")


def prompt_too_long(model: CatalogModel, tokens: str, param: str) -> ApiError:
    return ApiError(
        400,
        f"This model's context is {model.context_length} tokens long, but the request has {tokens} in the prompt, "
        "which leaves none for the answer. Shorten it.",
        "context_length_exceeded",
        param,
    )


class Generation:
    """One answer. Iterate `pieces` once; `prompt_tokens` and `completion_tokens` are what has been used so far.

    `stages` says, after the last piece, where its time went; only the queue's is known where a stop string ended it.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        tokenizer: ModelTokenizer,
        request: GenerationRequest,
        stops: Sequence[str],
        *,
        timeout: float | None = None,
        keep_alive: float | None = None,
        echo: str | None = None,
        only_echo: bool = False,
        parser: ToolCallParser | None = None,
        is_first: bool = True,
    ) -> None:
        """`is_first`: of the answers to its prompt, whose tokens count once."""
        self.is_first = is_first
        self.tokenizer = tokenizer
        self.prompt_tokens = len(request.prompt)
        self.completion_tokens = 0
        self._service = service
        self._model = model
        self._request = request
        self._timeout = timeout
        self._keep_alive = keep_alive
        self._detokenizer = tokenizer.detokenizer()
        self._stops = StopMatcher(stops)
        self._parser = parser
        self._echo = echo  # not told yet
        self._only_echo = only_echo
        self._decoded_length = len(echo or "")  # characters, with what the stop strings hold back
        self._shown = len(echo or "")  # characters
        self._scored: list[ScoredToken] = []  # not shown yet
        self._last = time.perf_counter()  # when it began, or the last token came
        self.stages: Mapping[str, float] = {}

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Raises Refused, possibly after some pieces."""
        answer = self._service.submit(self._request, self._timeout, self._keep_alive)
        served = False
        try:
            async for report in answer:
                served = True
                piece = self._echoed(report) if self._echo is not None else self._absorb(report)
                if piece.text or piece.scored or piece.calls or piece.finish:
                    yield piece
                if piece.finish:
                    self.stages = answer.stages
                    return
            raise Refused("engine_failed", "The answer ended without a reason.")
        finally:
            answer.cancel()
            if served:
                self._service.metrics.answered(self._model, self.prompt_tokens, self.completion_tokens)

    def _absorb(self, report: Tokens) -> Piece:
        if report.finish == "cancelled":
            raise Refused("draining", "The answer was cut off: the server is shutting down.")
        if report.tokens:
            self._measure()
        text = "".join([self._decoded(report, place) for place in range(len(report.tokens))])
        if report.finish:
            text += self._detokenizer.flush()
        text = self._stops.push(text)
        finish: str | None = "stop" if self._stops.matched else report.finish
        if finish and not self._stops.matched:
            text += self._stops.flush()
        self._shown += len(text)
        scored = self._scored_so_far(everything=finish is not None and not self._stops.matched)
        return self._parsed(Piece(text, scored, finish=finish))

    def _parsed(self, piece: Piece) -> Piece:
        """With calls of tools taken out of its text."""
        parser = self._parser
        if parser is None:
            return piece
        text, calls = parser.push(piece.text)
        if piece.finish:
            rest, late = parser.flush()
            text, calls = text + rest, calls + late
        called = parser.done or (parser.called and piece.finish == "stop")
        return replace(piece, text=text, calls=calls, finish="tool_calls" if called else piece.finish)

    def _echoed(self, report: Tokens) -> Piece:
        """The prompt, and what the first report brought."""
        echo, self._echo = self._echo or "", None
        scored = () if report.prompt_logprobs is None else tuple(self._scored_prompt(report.prompt_logprobs))
        if self._only_echo and report.finish != "cancelled":
            return Piece(echo, scored, finish="length")
        first = self._absorb(report)
        return replace(first, text=echo + first.text, scored=(*scored, *first.scored))

    def _scored_prompt(self, logprobs: Sequence[TokenLogprob]) -> Iterator[ScoredToken]:
        detokenizer, offset = self.tokenizer.detokenizer(), 0
        for token, logprob in zip(self._request.prompt, (None, *logprobs), strict=True):
            yield ScoredToken(token, logprob, offset)
            offset += len(detokenizer.push(token))

    def _measure(self) -> None:
        now = time.perf_counter()
        tell = self._service.metrics.next_token if self.completion_tokens else self._service.metrics.first_token
        tell(self._model, now - self._last)
        self._last = now

    def _decoded(self, report: Tokens, place: int) -> str:
        token = report.tokens[place]
        if report.logprobs is not None:
            self._scored.append(ScoredToken(token, report.logprobs[place], self._decoded_length))
        text = self._detokenizer.push(token)
        self.completion_tokens += 1
        self._decoded_length += len(text)
        return text

    def _scored_so_far(self, everything: bool) -> Sequence[ScoredToken]:
        """The tokens whose text is shown now, and once: those of a stop string never are."""
        if not self._scored:
            return ()
        shown = [scored for scored in self._scored if everything or scored.offset < self._shown]
        self._scored = self._scored[len(shown) :]
        return shown


def generations_of(
    service: Service,
    model: CatalogModel,
    tokenizer: ModelTokenizer,
    body: Generate,
    identity: str,
    prompt: Prompt,
    default_max_tokens: int,
    rules: Rules = Rules(),
) -> list[Generation]:
    """The answers to a prompt, `body.n` of them, not submitted yet. `default_max_tokens` is for where neither `body`
    nor the configuration says how long an answer may be.
    """
    defaults = model.config.defaults
    room = service.scheduler.room(model.name)
    limit = answer_limit(model, len(prompt.tokens), body, defaults.max_tokens or default_max_tokens, room, prompt.param)
    sampling = replace(
        sampling_params(body, defaults, tokenizer, limit),
        score_prompt=prompt.echo is not None and body.wanted_logprobs is not None,
        grammar=rules.grammar,
    )
    return [
        Generation(
            service,
            model.name,
            tokenizer,
            GenerationRequest(
                f"{identity}-{choice}",
                model.name,
                prompt.tokens,
                replace(sampling, seed=(sampling.seed + choice) % (1 << 63)),
            ),
            body.stop,
            timeout=body.timeout,
            keep_alive=body.keep_alive,
            echo=prompt.echo,
            only_echo=body.max_tokens == 0,
            parser=rules.parser and rules.parser(),
            is_first=choice == 0,
        )
        for choice in range(body.n)
    ]


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Piece]]:
    """The pieces of all of them as they come, each with its generation's index. Raises the first one's Refused."""
    if len(generations) == 1:
        async with aclosing(generations[0].pieces()) as only:
            async for piece in only:
                yield 0, piece
        return
    sources = [generation.pieces() for generation in generations]
    waiting = {asyncio.ensure_future(_next(source)): index for index, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index = waiting.pop(task)
                piece = task.result()
                if piece.finish is None:
                    waiting[asyncio.ensure_future(_next(sources[index]))] = index
                yield index, piece
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()


async def _next(pieces: AsyncGenerator[Piece]) -> Piece:
    return await anext(pieces)
