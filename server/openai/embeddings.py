"""POST /v1/embeddings: one vector a text, by models that are encoders."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
from fastapi import APIRouter, Request, Response

from engine.request import EmbeddingRequest
from server.catalog import CatalogModel
from server.errors import ApiError
from server.openai.connection import while_connected
from server.openai.schemas import EmbeddingsRequest, parse
from server.service import Service, service_of
from server.tokens import ModelTokenizer, PromptTooLong
from swapper.errors import Refused

Vector = npt.NDArray[np.float32]

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Embedded:
    vectors: list[Vector]
    tokens: int


@router.post("/embeddings")
async def create(request: Request) -> Response:
    service = service_of(request)
    body = parse(EmbeddingsRequest, await service.bodies.read(request, service.config.server.max_body))
    model = await service.catalog.find(body.model)
    embedded = await while_connected(
        request, embed(service, model, body.inputs, body.dimensions, keep_alive=body.keep_alive)
    )
    as_text = body.encoding_format == "base64"
    answer = {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(vector) if as_text else vector}
            for index, vector in enumerate(embedded.vectors)
        ],
        "model": model.name,
        "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
    }
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


async def embed(
    service: Service,
    model: CatalogModel,
    inputs: Sequence[str | list[int]],
    dimensions: int | None = None,
    *,
    truncate: bool = False,
    keep_alive: float | None = None,
) -> Embedded:
    """The vectors of some texts; with `truncate`, of the beginnings of those that are too long. Raises ApiError or
    Refused.
    """
    how = model.embedding
    if how is None:
        message = f"The model {model.name!r} generates text; it makes no embeddings."
        raise ApiError(400, message, "unsupported_model", "model")
    if dimensions is not None and dimensions > how.width:
        message = f"Parameter 'dimensions' is invalid: vectors of this model have {how.width}."
        raise ApiError(400, message, "invalid_value", "dimensions")
    tokenizer = await service.tokenizers.get(model.name, model.path, model.stamp)
    texts = [
        await _tokens(service, model, tokenizer, text, "input" if len(inputs) == 1 else f"input[{index}]", truncate)
        for index, text in enumerate(inputs)
    ]
    vectors = [np.frombuffer(raw, dtype="<f4") for raw in await _vectors(service, model, tuple(texts), keep_alive)]
    if dimensions is not None:
        vectors = [_shortened(vector, dimensions, how.normalize) for vector in vectors]
    return Embedded(vectors, sum(map(len, texts)))


async def _tokens(
    service: Service, model: CatalogModel, tokenizer: ModelTokenizer, text: str | list[int], param: str, truncate: bool
) -> tuple[int, ...]:
    limit = model.context_length
    if not isinstance(text, str):
        tokens = tokenizer.checked(text, param)
    elif truncate:
        tokens = await service.tokenizers.run(tokenizer.encode_beginning, text, limit)
    else:
        try:
            tokens = await service.tokenizers.encode(tokenizer, text, limit)
        except PromptTooLong as error:
            raise _too_long(model, f"at least {error.least}", param) from None
    if not tokens:
        raise ApiError(400, f"Parameter '{param}' is invalid: it holds no token.", "invalid_value", param)
    if len(tokens) > limit:
        raise _too_long(model, str(len(tokens)), param)
    return tokens


def _too_long(model: CatalogModel, tokens: str, param: str) -> ApiError:
    message = f"This model takes {model.context_length} tokens of a text, but '{param}' has {tokens}. Shorten it."
    return ApiError(400, message, "context_length_exceeded", param)


async def _vectors(
    service: Service, model: CatalogModel, texts: tuple[tuple[int, ...], ...], keep_alive: float | None
) -> tuple[bytes, ...]:
    began = time.perf_counter()
    request = EmbeddingRequest(f"embd-{uuid.uuid4().hex}", model.name, texts)
    answer = service.submit(request, None, keep_alive)
    try:
        async for report in answer:
            if report.vectors is not None:
                service.metrics.first_token(model.name, time.perf_counter() - began)
                service.metrics.answered(model.name, request.prompt_tokens, 0)
                return report.vectors
            if report.finish == "cancelled":
                raise Refused("draining", "The answer was cut off: the server is shutting down.")
        raise Refused("engine_failed", "The answer ended without vectors.")
    finally:
        answer.cancel()


def _shortened(vector: Vector, dimensions: int, normalize: bool) -> Vector:
    """A vector's beginning, which says the most of it where the model was trained so."""
    short: Vector = vector[:dimensions]
    return short / np.linalg.norm(short) if normalize else short


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.tobytes()).decode()
