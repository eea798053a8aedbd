"""POST /v1/completions: plain text in, plain text out; several prompts in one request, or `n`, make several
choices.
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
from server.openai.generation import (
    Generation,
    Prompt,
    Rules,
    ScoredToken,
    generations_of,
    merge,
    prompt_too_long,
    refuse_encoder,
)
from server.openai.schemas import CompletionRequest, parse
from server.openai.shape import DONE, bounded, silence, usage, whole_response
from server.openai.structured import grammar_of
from server.service import Service, service_of
from server.tokens import ModelTokenizer, PromptTooLong

DEFAULT_MAX_TOKENS = 16
"""The OpenAI API's, where neither the request nor the configuration says anything."""

router = APIRouter()


@router.post("/completions")
async def create(request: Request) -> Response:
    began = time.perf_counter()
    service = service_of(request)
    body = parse(CompletionRequest, await service.bodies.read(request, service.config.server.max_body))
    model = await service.catalog.find(body.model)
    identity = f"cmpl-{uuid.uuid4().hex}"
    generations = await while_connected(request, prepare(service, body, model, identity))
    prepared = time.perf_counter() - began
    if body.stream:
        chunks = _chunks(identity, model.name, generations, body.include_usage)
        return await EventStream.open(request, chunks, silence(service, model.name))
    answer = await while_connected(request, _whole(identity, model.name, generations, body.logprobs is not None))
    return whole_response(answer, generations, prepared)


async def prepare(
    service: Service,
    body: CompletionRequest,
    model: CatalogModel,
    identity: str,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
) -> list[Generation]:
    """`n` for each prompt; none of them is submitted before all are known to be valid."""
    refuse_encoder(model)
    tokenizer = await service.tokenizers.get(model.name, model.path, model.stamp)
    rules = Rules(await service.tokenizers.run(grammar_of, body))
    generations: list[Generation] = []
    for index, given in enumerate(body.prompts):
        param = "prompt" if len(body.prompts) == 1 else f"prompt[{index}]"
        tokens = await _tokens(service, model, tokenizer, given, param)
        echo = None
        if body.echo:
            echo = given if isinstance(given, str) else await service.tokenizers.run(tokenizer.decode, tokens)
        prompt = Prompt(tokens, param, echo)
        name = f"{identity}-{index}"
        generations += generations_of(service, model, tokenizer, body, name, prompt, default_max_tokens, rules)
    return generations


async def _tokens(
    service: Service, model: CatalogModel, tokenizer: ModelTokenizer, prompt: str | list[int], param: str
) -> tuple[int, ...]:
    if isinstance(prompt, str):
        try:
            return await service.tokenizers.encode(tokenizer, prompt, model.context_length)
        except PromptTooLong as error:
            raise prompt_too_long(model, f"at least {error.least}", param) from None
    if len(prompt) > model.context_length:  # before anything is done with so many
        raise prompt_too_long(model, str(len(prompt)), param)
    return tokenizer.checked(prompt, param)


async def _whole(identity: str, model: str, generations: Sequence[Generation], scored: bool) -> dict[str, Any]:
    created = int(time.time())
    texts: list[list[str]] = [[] for _ in generations]
    tokens: list[list[ScoredToken]] = [[] for _ in generations]
    finishes: list[str | None] = [None for _ in generations]
    async with aclosing(merge(generations)) as pieces:
        async for index, piece in pieces:
            texts[index].append(piece.text)
            tokens[index] += piece.scored
            finishes[index] = piece.finish
    return {
        "id": identity,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": [
            {
                "index": index,
                "text": "".join(texts[index]),
                "logprobs": _logprobs(tokens[index], generation.tokenizer) if scored else None,
                "finish_reason": finishes[index],
            }
            for index, generation in enumerate(generations)
        ],
        "usage": usage(generations),
    }


async def _chunks(
    identity: str, model: str, generations: Sequence[Generation], include_usage: bool
) -> AsyncGenerator[bytes]:
    head = b'data: {"id":"%b","object":"text_completion","created":%d,"model":%b,"choices":[' % (
        identity.encode(),
        time.time(),
        orjson.dumps(model),
    )
    tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
    unfinished = len(generations)
    async with aclosing(merge(generations)) as pieces:
        async for index, piece in pieces:
            logprobs = b"null"
            if piece.scored:
                logprobs = orjson.dumps(_logprobs(piece.scored, generations[index].tokenizer))
            batch = head + b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}' % (
                index,
                orjson.dumps(piece.text),
                logprobs,
                orjson.dumps(piece.finish),
            )
            batch += tail
            unfinished -= piece.finish is not None
            if not unfinished:
                if include_usage:
                    batch += head + b'],"usage":%b}\n\n' % orjson.dumps(usage(generations))
                batch += DONE
            yield batch


def _logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> dict[str, Any]:
    def spell(token: int) -> str:
        return tokenizer.vocabulary.bytes_of(token).decode(errors="replace")

    return {
        "tokens": [spell(one.token) for one in scored],
        "token_logprobs": [one.logprob and bounded(one.logprob.logprob) for one in scored],
        "top_logprobs": [
            one.logprob and {spell(token): bounded(logprob) for token, logprob in one.logprob.top.items()}
            for one in scored
        ],
        "text_offset": [one.offset for one in scored],
    }
