"""The daemon as an OpenAI server: the official client, a real chat model."""

from __future__ import annotations

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_model_knows_the_capital_of_france(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32)
    assert reply.choices[0].message.content == "The capital of France is Paris."
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_a_stream_brings_the_same_words_and_the_usage(openai: OpenAI) -> None:
    chunks = list(
        openai.chat.completions.create(
            model="smollm2",
            messages=CAPITAL,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


def test_an_answer_says_where_its_time_went(openai: OpenAI) -> None:
    raw = openai.chat.completions.with_raw_response.create(model="smollm2", messages=CAPITAL, max_tokens=1)
    timing = dict(part.split(";dur=") for part in raw.headers["server-timing"].split(", "))
    assert set(timing) == {"prepare", "queue", "transport", "batch", "page", "compute"}
    assert float(timing["compute"]) > 0


def test_a_seed_repeats_an_answer(openai: OpenAI) -> None:
    def ask(seed: int) -> str:
        return openai.completions.create(model="smollm2", prompt="My dog", seed=seed, max_tokens=12).choices[0].text

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_the_models_of_the_store_are_listed(openai: OpenAI) -> None:
    assert {model.id for model in openai.models.list()} == {"smollm2", "smollm2-middle", "smollm2-late"}


def test_errors_reach_the_client_as_its_own_exceptions(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="nobody"):
        openai.chat.completions.create(model="nobody", messages=CAPITAL)
    with pytest.raises(BadRequestError, match="context"):
        openai.completions.create(model="smollm2", prompt="word " * 9000, max_tokens=1)
