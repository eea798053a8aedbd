"""POST /v1/chat/completions.

Chunks are written as bytes around a skeleton that is made once for each answer: between a token and the socket stands
the encoding of one string.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.catalog import CatalogModel
from server.openai.connection import EventStream, while_connected
from server.openai.generation import Generation, ScoredToken, generation_of, prompt_too_long
from server.openai.schemas import ChatRequest, parse
from server.openai.shape import DONE, bounded, usage, whole_response
from server.service import Service, service_of
from server.tokens import ModelTokenizer, PromptTooLong

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
    generation = await while_connected(request, _generation(service, body, model, identity))
    prepared = time.perf_counter() - began
    if body.stream:
        return await EventStream.open(request, _chunks(identity, model.name, generation, body.include_usage))
    answer = await while_connected(request, _whole(identity, model.name, generation, body.logprobs))
    return whole_response(answer, [generation], prepared)


async def _generation(service: Service, body: ChatRequest, model: CatalogModel, identity: str) -> Generation:
    tokenizer = await service.tokenizers.get(model.name, model.path, model.stamp)
    messages = [message.for_template() for message in body.messages]
    try:
        prompt = await service.tokenizers.encode_chat(tokenizer, messages, model.context_length)
    except PromptTooLong as error:
        raise prompt_too_long(model, f"at least {error.least}", "messages") from None
    return generation_of(
        service, model, tokenizer, body, identity, prompt, "messages", DEFAULT_MAX_TOKENS, body.wanted_logprobs
    )


async def _whole(identity: str, model: str, generation: Generation, scored: bool) -> dict[str, Any]:
    created = int(time.time())
    text: list[str] = []
    logprobs: list[dict[str, Any]] = []
    finish = None
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            text.append(piece.text)
            logprobs += _logprobs(piece.scored, generation.tokenizer)
            finish = piece.finish
    return {
        "id": identity,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "".join(text), "refusal": None},
                "logprobs": {"content": logprobs, "refusal": None} if scored else None,
                "finish_reason": finish,
            }
        ],
        "usage": usage([generation]),
    }


async def _chunks(identity: str, model: str, generation: Generation, include_usage: bool) -> AsyncGenerator[bytes]:
    """The role comes with the first text, and the last text with all that ends a stream: each is one write."""
    head = b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,"model":%b,"choices":[' % (
        identity.encode(),
        time.time(),
        orjson.dumps(model),
    )
    tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
    opening = head + b'{"index":0,"delta":'
    unscored = b'},"logprobs":null,"finish_reason":null}' + tail
    batch = opening + b'{"role":"assistant","content":""' + unscored
    async with aclosing(generation.pieces()) as pieces:
        async for piece in pieces:
            if piece.scored:
                logprobs = {"content": _logprobs(piece.scored, generation.tokenizer), "refusal": None}
                scored = b'},"logprobs":%b,"finish_reason":null}' % orjson.dumps(logprobs)
                batch += opening + b'{"content":' + orjson.dumps(piece.text) + scored + tail
            elif piece.text:
                batch += opening + b'{"content":' + orjson.dumps(piece.text) + unscored
            if piece.finish:
                batch += opening + b'{},"logprobs":null,"finish_reason":"%b"}' % piece.finish.encode() + tail
                if include_usage:
                    batch += head + b'],"usage":%b}\n\n' % orjson.dumps(usage([generation]))
                batch += DONE
            yield batch
            batch = b""


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
    ]
