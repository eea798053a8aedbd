"""Parts of answers that chat and text completions share."""

from __future__ import annotations

from collections.abc import Sequence

from server.openai.generation import Generation

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # OpenAI's word for "impossible": JSON knows no infinity


def bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def usage(generations: Sequence[Generation]) -> dict[str, int]:
    prompt = sum(generation.prompt_tokens for generation in generations)
    completion = sum(generation.completion_tokens for generation in generations)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
