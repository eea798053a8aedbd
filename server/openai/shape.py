"""Parts of answers that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import Response

from server.openai.generation import Generation

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


def usage(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = sum(generation.prompt_tokens for generation in generations if generation.is_first)
    completion = sum(generation.completion_tokens for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
