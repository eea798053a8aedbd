"""/v1/completions, through the official client and as raw events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from tokenizers import Tokenizer

from tests.server.conftest import ServerThread, publish
from tests.server.fakes import FakeScheduler
from tests.server.test_chat import events, script


def test_text_in_text_out(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " upon a time", "length")
    answer = openai.completions.create(model="smol", prompt="Once")
    assert answer.choices[0].text == " upon a time"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert scheduler.submitted[0].prompt == tuple(tokenizer.encode("Once").ids)
    assert scheduler.submitted[0].sampling.max_tokens == 16  # the OpenAI API's default


def test_a_stream(http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " upon a")
    body = {"model": "smol", "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(http.post("/v1/completions", json=body))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" upon", " a", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    assert done == "[DONE]"


def test_a_request_may_wait_less_than_the_server_lets_it_and_not_more(
    http: httpx.Client, scheduler: FakeScheduler
) -> None:
    for timeout in (None, 2.5, 1e6):
        http.post("/v1/completions", json={"model": "smol", "prompt": "Once", "timeout": timeout}).raise_for_status()
    assert scheduler.timeouts == [300.0, 2.5, 300.0]
    assert http.post("/v1/completions", json={"model": "smol", "prompt": "Once", "timeout": 0}).status_code == 400


def test_a_prompt_of_token_ids(openai: OpenAI, scheduler: FakeScheduler) -> None:
    openai.completions.create(model="smol", prompt=[5, 6, 7])
    assert scheduler.submitted[0].prompt == (5, 6, 7)


def test_several_prompts_make_several_choices(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " yes")
    answer = openai.completions.create(model="smol", prompt=["One", "Two", "Three"])
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, " yes"), (1, " yes"), (2, " yes")]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert len({request.id for request in scheduler.submitted}) == 3


def test_several_prompts_of_token_ids(openai: OpenAI, scheduler: FakeScheduler) -> None:
    openai.completions.create(model="smol", prompt=[[5, 6], [7]])
    assert [request.prompt for request in scheduler.submitted] == [(5, 6), (7,)]


def test_several_prompts_in_one_stream(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " one two three")
    texts: dict[int, str] = {0: "", 1: ""}
    finishes: dict[int, Any] = {}
    for chunk in openai.completions.create(model="smol", prompt=["A", "B"], stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
        if chunk.choices[0].finish_reason:
            finishes[chunk.choices[0].index] = chunk.choices[0].finish_reason
    assert texts == {0: " one two three", 1: " one two three"}
    assert finishes == {0: "stop", 1: "stop"}


def test_logprobs(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " upon a time")
    answer = openai.completions.create(model="smol", prompt="Once", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == [" upon", " a", " time"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 5, 7]
    assert logprobs.top_logprobs == [{" upon": -0.5}, {" a": -0.5}, {" time": -0.5}]


def test_a_model_that_took_anothers_place_has_its_own_tokenizer(
    server: ServerThread, http: httpx.Client, scheduler: FakeScheduler, smollm2: Path
) -> None:
    """Same name, same weights, another end of text: nothing of the first may be remembered."""
    stops = []
    for end in (5, 6):
        files = {"generation_config.json": f'{{"eos_token_id": {end}}}'}
        publish(server.store, "renewed", smollm2, files=files)
        server.call(server.catalog.refresh())
        http.post("/v1/completions", json={"model": "renewed", "prompt": "Once"}).raise_for_status()
        stops.append(end in scheduler.submitted[-1].sampling.stop_tokens)
        server.store.remove("renewed")
        server.call(server.catalog.refresh())
    assert stops == [True, True]


def test_n_answers_to_each_prompt(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " yes")
    answer = openai.completions.create(model="smol", prompt=["One", "Two"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [request.prompt for request in scheduler.submitted] == [
        tuple(tokenizer.encode(text).ids) for text in ("One", "One", "Two", "Two")
    ]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)


def test_an_echo(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " upon a time")
    for prompt in ("Once", tokenizer.encode("Once").ids):
        answer = openai.completions.create(model="smol", prompt=prompt, echo=True)
        assert answer.choices[0].text == "Once upon a time"
    chunks = openai.completions.create(model="smol", prompt="Once", echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Once upon a time"


def test_an_echo_that_is_scored(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, " upon a")
    answer = openai.completions.create(model="smol", prompt="There was once", echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["There", " was", " once", " upon", " a"]
    assert logprobs.text_offset == [0, 5, 9, 14, 19]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.5, -0.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[:2] == [None, {" was": -0.25}]
    assert scheduler.submitted[0].sampling.score_prompt is True


def test_a_prompt_may_be_scored_and_not_answered(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, " upon", "length")
    answer = openai.completions.create(model="smol", prompt="There was once", echo=True, logprobs=0, max_tokens=0)
    assert answer.choices[0].text == "There was once"
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    assert scheduler.submitted[0].sampling.max_tokens == 1
