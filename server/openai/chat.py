"""POST /v1/chat/completions.

Chunks are written as bytes around a skeleton that is made once for each answer: between a token and the socket stands
the encoding of one string.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.catalog import CatalogModel
from server.openai.connection import EventStream, while_connected
from server.openai.generation import (
    Generation,
    Piece,
    Prompt,
    Rules,
    ScoredToken,
    generations_of,
    merge,
    prompt_too_long,
    refuse_encoder,
)
from server.openai.schemas import ChatRequest, parse
from server.openai.shape import DONE, bounded, silence, usage, whole_response
from server.openai.structured import grammar_of, lark_grammar
from server.openai.tools import ToolCall, ToolCallParser, forced_calls, format_of, strict_calls
from server.service import Service, service_of
from server.tokens import Chat, ModelTokenizer, PromptTooLong

DEFAULT_MAX_TOKENS = 2048
"""Where neither the request nor the configuration says anything."""

router = APIRouter()


@router.post("/chat/completions")
async def create(request: Request) -> Response:
    began = time.perf_counter()
    service = service_of(request)
    body = parse(ChatRequest, await service.bodies.read(request, service.config.server.max_body))
    model = await service.catalog.find(body.model)
    identity = f"chatcmpl-{uuid.uuid4().hex}"
    generations = await while_connected(request, prepare(service, body, model, identity))
    prepared = time.perf_counter() - began
    if body.stream:
        chunks = _chunks(identity, model.name, generations, body.include_usage)
        return await EventStream.open(request, chunks, silence(service, model.name))
    answer = await while_connected(request, _whole(identity, model.name, generations, body.logprobs))
    return whole_response(answer, generations, prepared)


async def prepare(service: Service, body: ChatRequest, model: CatalogModel, identity: str) -> list[Generation]:
    """The answers to be made, none of them submitted. Raises ApiError, Refused or ChatTemplateError."""
    refuse_encoder(model)
    tokenizer = await service.tokenizers.get(model.name, model.path, model.stamp)
    opening, rules = await service.tokenizers.run(_rules, body, tokenizer)
    messages = [message.for_template() for message in body.messages]
    chat = Chat(messages, [tool.for_template() for tool in body.offered_tools], opening)
    try:
        tokens = await service.tokenizers.encode_chat(tokenizer, chat, model.context_length)
    except PromptTooLong as error:
        raise prompt_too_long(model, f"at least {error.least}", "messages") from None
    prompt = Prompt(tokens, "messages")
    return generations_of(service, model, tokenizer, body, identity, prompt, DEFAULT_MAX_TOKENS, rules)


def _rules(body: ChatRequest, tokenizer: ModelTokenizer) -> tuple[str, Rules]:
    """What the prompt ends with, and what the answer has to be."""
    if not body.offered_tools:
        return "", Rules(grammar_of(body))
    format = format_of(tokenizer.chat_template)
    single = not body.parallel_tool_calls
    if body.forced_tools:
        opening, grammar = forced_calls(format, [tool.for_template() for tool in body.forced_tools], single)
        parser = partial(ToolCallParser, format, single=single, begun=bool(opening))
        return opening, Rules(lark_grammar(grammar, "tools"), parser)
    strict = None
    if any(tool.function.strict for tool in body.offered_tools):
        strict = lark_grammar(strict_calls(format, [tool.checked() for tool in body.offered_tools]), "tools")
    return "", Rules(strict, partial(ToolCallParser, format, single=single))


async def _whole(identity: str, model: str, generations: Sequence[Generation], scored: bool) -> dict[str, Any]:
    created = int(time.time())
    choices = [_Choice(index, generation.tokenizer) for index, generation in enumerate(generations)]
    async with aclosing(merge(generations)) as pieces:
        async for index, piece in pieces:
            choices[index].add(piece)
    return {
        "id": identity,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice.whole(scored) for choice in choices],
        "usage": usage(generations),
    }


class _Choice:
    """An answer that is put together."""

    def __init__(self, index: int, tokenizer: ModelTokenizer) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._text: list[str] = []
        self._calls: list[ToolCall] = []
        self._scored: list[ScoredToken] = []
        self._finish: str | None = None

    def add(self, piece: Piece) -> None:
        self._text.append(piece.text)
        self._calls += piece.calls
        self._scored += piece.scored
        self._finish = piece.finish

    def whole(self, scored: bool) -> dict[str, Any]:
        text = "".join(self._text)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self._calls:
            message |= {"content": text or None, "tool_calls": [_call(call) for call in self._calls]}
        logprobs = {"content": _logprobs(self._scored, self._tokenizer), "refusal": None} if scored else None
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish}


async def _chunks(
    identity: str, model: str, generations: Sequence[Generation], include_usage: bool
) -> AsyncGenerator[bytes]:
    """A role comes with the first text, and the last text with all that ends a stream: each is one write."""
    head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
        identity.encode(),
        time.time(),
        orjson.dumps(model),
    )
    tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
    openings = [head + b'{"index":%d,"delta":' % index for index in range(len(generations))]
    unscored = b'},"logprobs":null,"finish_reason":null}' + tail
    silent = set(range(len(generations)))
    calls = [0] * len(generations)
    unfinished = len(generations)
    async with aclosing(merge(generations)) as pieces:
        async for index, piece in pieces:
            opening, batch = openings[index], b""
            if index in silent:
                silent.remove(index)
                batch = opening + b'{"role":"assistant","content":""' + unscored
            if piece.scored:
                logprobs = {"content": _logprobs(piece.scored, generations[index].tokenizer), "refusal": None}
                scored = b'},"logprobs":%b,"finish_reason":null}' % orjson.dumps(logprobs)
                batch += opening + b'{"content":' + orjson.dumps(piece.text) + scored + tail
            elif piece.text:
                batch += opening + b'{"content":' + orjson.dumps(piece.text) + unscored
            for call in piece.calls:
                batch += opening + b'{"tool_calls":' + orjson.dumps([{"index": calls[index]} | _call(call)]) + unscored
                calls[index] += 1
            if piece.finish:
                unfinished -= 1
                batch += opening + b'{},"logprobs":null,"finish_reason":"%b"}' % piece.finish.encode() + tail
            if not unfinished:
                if include_usage:
                    batch += head + b'],"usage":%b}\n\n' % orjson.dumps(usage(generations))
                batch += DONE
            yield batch


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelling = tokenizer.vocabulary.bytes_of(token)
        return {
            "token": spelling.decode(errors="replace"),
            "logprob": bounded(logprob),
            "bytes": list(spelling),
        }

    return [
        entry(one.token, one.logprob.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in one.logprob.top.items()]}
        for one in scored
        if one.logprob is not None
    ]
