"""Parts of answers that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Response

from server.openai.connection import Silence
from server.openai.generation import Generation
from server.service import Service

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's word for "impossible": JSON knows no infinity


def bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def whole_response(answer: dict[str, Any], generations: Sequence[Generation], prepared: float) -> Response:
    """The response to a request that does not stream. A single answer's says in `Server-Timing`, in milliseconds, where
    its time went; `prepared` is what validation and tokenization took, in seconds.
    """
    headers = {}
    if len(generations) == 1 and generations[0].stages:
        stages = {"prepare": prepared, **generations[0].stages}
        headers["Server-Timing"] = ", ".join(f"{stage};dur={1e3 * spent:.3f}" for stage, spent in stages.items())
    return Response(orjson.dumps(answer), headers=headers, media_type="application/json")


def silence(service: Service, model: str) -> Silence:
    """What a stream says while a model's answer does not come: how far the model is, in a comment."""

    def comment() -> bytes:
        status = next((status for status in service.scheduler.models() if status.name == model), None)
        names = ("state", "resident_pages", "total_pages", "waiting", "running")
        return b": %b\n\n" % orjson.dumps({name: getattr(status, name, None) for name in names})

    return Silence(service.config.server.silence, comment)


def usage(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = sum(generation.prompt_tokens for generation in generations if generation.is_first)
    completion = sum(generation.completion_tokens for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
