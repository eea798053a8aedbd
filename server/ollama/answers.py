"""How Ollama writes answers: lines of JSON, or one object; times in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import Request, Response

from server.errors import as_api_error
from server.openai.connection import EventStream, while_connected
from server.openai.generation import Generation, Piece, ScoredToken
from server.openai.shape import bounded
from server.tokens import ModelTokenizer

Fields = Callable[[str, Sequence[dict[str, Any]]], dict[str, Any]]
"""What a text and calls of tools stand in, in an object of an answer."""


def chat_fields(text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return {"message": message | ({"tool_calls": calls} if calls else {})}


def generate_fields(text: str, calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"response": text}


class LineStream(EventStream):
    """An object a line."""

    media_type = "application/x-ndjson"

    def failure(self, error: Exception) -> bytes:
        return orjson.dumps({"error": str(as_api_error(error))}) + b"\n"


async def respond(request: Request, model: str, generation: Generation, fields: Fields, stream: bool) -> Response:
    answer = _Answer(model, generation, fields)
    if stream:
        return await LineStream.open(request, answer.lines())
    return Response(orjson.dumps(await while_connected(request, answer.whole())), media_type="application/json")


def now() -> str:
    return moment(time.time())


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class _Answer:
    def __init__(self, model: str, generation: Generation, fields: Fields) -> None:
        self._model = model
        self._generation = generation
        self._fields = fields
        self._began = time.perf_counter()
        self._first: float | None = None  # seconds until the first piece

    async def lines(self) -> AsyncGenerator[bytes]:
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                self._note()
                line = b""
                if piece.text or piece.calls or piece.scored:
                    line = self._line(self._object(piece.text, _calls(piece), piece.scored) | {"done": False})
                if piece.finish:
                    line += self._line(self._object("", (), ()) | self._end(piece.finish))
                yield line

    async def whole(self) -> dict[str, Any]:
        text: list[str] = []
        calls: list[dict[str, Any]] = []
        scored: list[ScoredToken] = []
        finish = "stop"
        async with aclosing(self._generation.pieces()) as pieces:
            async for piece in pieces:
                self._note()
                text.append(piece.text)
                calls += _calls(piece)
                scored += piece.scored
                finish = piece.finish or finish
        return self._object("".join(text), calls, scored) | self._end(finish)

    def _note(self) -> None:
        if self._first is None:
            self._first = time.perf_counter() - self._began

    def _object(self, text: str, calls: Sequence[dict[str, Any]], scored: Sequence[ScoredToken]) -> dict[str, Any]:
        said = {"model": self._model, "created_at": now(), **self._fields(text, calls)}
        return said | ({"logprobs": _logprobs(scored, self._generation.tokenizer)} if scored else {})

    def _line(self, said: dict[str, Any]) -> bytes:
        return orjson.dumps(said) + b"\n"

    def _end(self, finish: str) -> dict[str, Any]:
        stages = self._generation.stages
        total, first = time.perf_counter() - self._began, self._first or 0.0
        load = min(first, stages.get("queue", 0.0) + stages.get("page", 0.0))
        return {
            "done": True,
            "done_reason": "length" if finish == "length" else "stop",
            "total_duration": int(1e9 * total),
            "load_duration": int(1e9 * load),
            "prompt_eval_count": self._generation.prompt_tokens,
            "prompt_eval_duration": int(1e9 * (first - load)),
            "eval_count": self._generation.completion_tokens,
            "eval_duration": int(1e9 * (total - first)),
        }


def _calls(piece: Piece) -> list[dict[str, Any]]:
    return [{"function": {"name": call.name, "arguments": orjson.Fragment(call.arguments)}} for call in piece.calls]


def _logprobs(scored: Sequence[ScoredToken], tokenizer: ModelTokenizer) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.vocabulary.bytes_of(token).decode(errors="replace"), "logprob": bounded(logprob)}

    return [
        entry(one.token, one.logprob.logprob)
        | {"top_logprobs": [entry(token, logprob) for token, logprob in one.logprob.top.items()]}
        for one in scored
        if one.logprob is not None
    ]
