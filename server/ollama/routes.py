"""The routes. Requests are put into the OpenAI API's words and go the same way; only answers are written otherwise.

A request without a prompt moves its model: it is loaded, or, with `keep_alive` 0, evicted. A model's name may carry the
tag `:latest`, which Ollama's clients add.
"""

from __future__ import annotations

import time
import uuid
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from scheduler.interface import ModelStatus
from server.catalog import CatalogModel
from server.ollama.answers import chat_fields, generate_fields, moment, now, respond
from server.ollama.schemas import (
    ChatRequest,
    EmbedRequest,
    GenerateRequest,
    OldEmbedRequest,
    ShowRequest,
)
from server.openai import chat, completions, schemas
from server.openai.connection import while_connected
from server.openai.embeddings import Embedded, embed
from server.openai.schemas import parse
from server.service import Service, service_of
from server.tokens import ChatTemplateError, ModelTokenizer

TAG = ":latest"
NEVER = "2286-11-20T17:46:40Z"  # what is told of a model that nothing takes away: ten digits of seconds, all nines


router = APIRouter()


@router.post("/chat")
async def create_chat(request: Request) -> Response:
    service, body = service_of(request), parse(ChatRequest, await _body(request))
    model = await _find(service, body.model)
    if not body.messages:
        return await _move(request, model, body.model, body.keep_alive, chat_fields("", ()))
    said = parse(schemas.ChatRequest, body.as_openai())
    generation, *_ = await while_connected(request, chat.prepare(service, said, model, _identity()))
    return await respond(request, body.model, generation, chat_fields, body.stream)


@router.post("/generate")
async def create_generate(request: Request) -> Response:
    service, body = service_of(request), parse(GenerateRequest, await _body(request))
    model = await _find(service, body.model)
    if not body.prompt:
        return await _move(request, model, body.model, body.keep_alive, generate_fields("", ()))
    if body.raw or not await _has_template(service, model):
        plain = parse(schemas.CompletionRequest, body.as_completion())
        preparing = completions.prepare(service, plain, model, _identity(), chat.DEFAULT_MAX_TOKENS)
    else:
        said = parse(schemas.ChatRequest, body.as_chat())
        preparing = chat.prepare(service, said, model, _identity())
    generation, *_ = await while_connected(request, preparing)
    return await respond(request, body.model, generation, generate_fields, body.stream)


@router.post("/embed")
async def create_embed(request: Request) -> Response:
    body = parse(EmbedRequest, await _body(request))
    began = time.perf_counter()
    made = await _embed(request, body.model, body.input, body.dimensions, body.truncate, body.keep_alive)
    answer = {
        "model": body.model,
        "embeddings": made.vectors,
        "total_duration": int(1e9 * (time.perf_counter() - began)),
        "load_duration": 0,
        "prompt_eval_count": made.tokens,
    }
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


@router.post("/embeddings")
async def create_embeddings(request: Request) -> Response:
    body = parse(OldEmbedRequest, await _body(request))
    made = await _embed(request, body.model, [body.prompt], None, True, body.keep_alive)
    answer = {"embedding": made.vectors[0]}
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


@router.get("/tags")
async def tags(request: Request) -> dict[str, Any]:
    catalog = service_of(request).catalog
    await catalog.refresh()
    return {
        "models": [
            _described(name, model) | {"modified_at": moment(model.created), "size": model.nbytes}
            for model in catalog.models.values()
            for name in (model.name, *catalog.aliases(model.name))
        ]
    }


@router.get("/ps")
async def ps(request: Request) -> dict[str, Any]:
    service = service_of(request)
    statuses = {status.name: status for status in service.scheduler.models()}
    return {
        "models": [
            _described(model.name, model)
            | {
                "size": model.nbytes,
                "size_vram": statuses[model.name].resident_bytes,
                "context_length": model.context_length,
                "expires_at": _expiry(service, statuses[model.name]),
            }
            for model in service.catalog.models.values()
            if model.name in statuses and statuses[model.name].resident_pages
        ]
    }


@router.post("/show")
async def show(request: Request) -> dict[str, Any]:
    service, body = service_of(request), parse(ShowRequest, await _body(request))
    model = await _find(service, body.model)
    tokenizer = await service.tokenizers.get(model.name, model.path, model.stamp)
    template = _template(tokenizer)
    family = model.architecture
    generates = ["completion", *(["tools"] if "tools" in template else [])]
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": model.parameters,
            f"{family}.context_length": model.context_length,
            **({} if model.embedding is None else {f"{family}.embedding_length": model.embedding.width}),
        },
        "capabilities": generates if model.embedding is None else ["embedding"],
        "modified_at": moment(model.created),
    }


@router.get("/version")
async def show_version() -> dict[str, str]:
    return {"version": version("gswapd")}


async def _body(request: Request) -> bytes:
    service = service_of(request)
    return await service.bodies.read(request, service.config.server.max_body)


async def _find(service: Service, name: str) -> CatalogModel:
    return await service.catalog.find(name.removesuffix(TAG))


def _identity() -> str:
    return f"ollama-{uuid.uuid4().hex}"


async def _move(
    request: Request, model: CatalogModel, name: str, keep_alive: float | None, fields: dict[str, Any]
) -> Response:
    """Load a model, or evict it."""
    service = service_of(request)
    if keep_alive == 0:
        await while_connected(request, service.scheduler.evict(model.name))
    else:
        service.catalog.keep_alive(model.name, keep_alive)  # before: an earlier request's 0 would take it away at once
        await while_connected(request, service.scheduler.load(model.name))
    reason = "unload" if keep_alive == 0 else "load"
    answer = {"model": name, "created_at": now(), **fields, "done": True, "done_reason": reason}
    return Response(orjson.dumps(answer), media_type="application/json")


async def _embed(
    request: Request, name: str, texts: list[str], dimensions: int | None, truncate: bool, keep_alive: float | None
) -> Embedded:
    service = service_of(request)
    model = await _find(service, name)
    work = embed(service, model, texts, dimensions, truncate=truncate, keep_alive=keep_alive)
    return await while_connected(request, work)


async def _has_template(service: Service, model: CatalogModel) -> bool:
    return bool(_template(await service.tokenizers.get(model.name, model.path, model.stamp)))


def _template(tokenizer: ModelTokenizer) -> str:
    try:
        return tokenizer.chat_template
    except ChatTemplateError:
        return ""


def _described(name: str, model: CatalogModel) -> dict[str, Any]:
    return {"name": name, "model": name, "digest": model.identity, "details": _details(model)}


def _details(model: CatalogModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": model.architecture,
        "families": [model.architecture],
        "parameter_size": _human(model.parameters),
        "quantization_level": model.dtype,
    }


def _human(count: int) -> str:
    for power, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= power:
            return f"{count / power:.3g}{unit}"
    return str(count)


def _expiry(service: Service, status: ModelStatus) -> str:
    ttl = service.catalog.ttl(status.name)
    if ttl is None or status.pinned:
        return NEVER
    return moment((status.last_used or time.time()) + ttl)
