"""/v1/chat/completions, through the official client and as raw events."""

from __future__ import annotations

import json
from typing import Any

import httpx
from openai import OpenAI
from tokenizers import Tokenizer

from scheduler.interface import Room
from tests.server.conftest import CONTEXT
from tests.server.fakes import FakeScheduler

HELLO = [{"role": "user", "content": "Hello?"}]


def script(tokenizer: Tokenizer, text: str, finish: str = "stop") -> list[Any]:
    """One report for each token, then the finish."""
    return [*([token] for token in tokenizer.encode(text).ids), finish]


def events(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_an_answer_in_one_piece(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "Paris. 👩‍👩‍👧‍👦")
    answer = openai.chat.completions.create(model="smol", messages=HELLO)
    assert answer.choices[0].message.content == "Paris. 👩‍👩‍👧‍👦"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.model == "smol"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == len(scheduler.script) - 1
    assert usage.prompt_tokens == len(scheduler.submitted[0].prompt)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_adds_up_to_the_answer(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "naïve 👍🏽 日本語", "length")
    chunks = list(openai.chat.completions.create(model="smol", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "naïve 👍🏽 日本語"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert scheduler.cancelled == []


def test_the_shape_of_a_stream(http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two")
    answer = http.post("/v1/chat/completions", json={"model": "smol", "messages": HELLO, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    first, *texts, last, done = events(answer)
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert [chunk["choices"][0]["delta"] for chunk in texts] == [{"content": "One"}, {"content": " two"}]
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in (first, *texts, last)} == {"chat.completion.chunk"}
    assert "usage" not in first


def test_usage_comes_last_when_it_is_asked_for(
    http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, "One two")
    body = {"model": "smol", "messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(http.post("/v1/chat/completions", json=body))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)


def test_an_empty_answer_is_one(openai: OpenAI, scheduler: FakeScheduler) -> None:
    scheduler.script = ["stop"]
    assert openai.chat.completions.create(model="smol", messages=HELLO).choices[0].message.content == ""
    chunks = list(openai.chat.completions.create(model="smol", messages=HELLO, stream=True))
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]


def test_several_tokens_of_one_report_are_one_chunk(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = [tokenizer.encode("One two three four").ids, "stop"]
    chunks = list(openai.chat.completions.create(model="smol", messages=HELLO, stream=True))
    assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "One two three four", None]


def test_a_stop_string_over_several_tokens_ends_the_answer(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, "It is Paris.\nUser: and now?")
    for stop in ("\nUser:", ["nowhere", "\nUser:"]):
        answer = openai.chat.completions.create(model="smol", messages=HELLO, stop=stop)
        assert answer.choices[0].message.content == "It is Paris."
        assert answer.choices[0].finish_reason == "stop"
    chunks = list(openai.chat.completions.create(model="smol", messages=HELLO, stop="\nUser:", stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "It is Paris."
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert scheduler.cancelled == [request.id for request in scheduler.submitted]  # none runs on for nobody


def test_the_beginning_of_a_stop_string_at_the_end_is_text(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, "the EN")
    answer = openai.chat.completions.create(model="smol", messages=HELLO, stop="END")
    assert answer.choices[0].message.content == "the EN"


def test_logprobs(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One 👍")
    answer = openai.chat.completions.create(model="smol", messages=HELLO, logprobs=True, top_logprobs=2)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == "One 👍"
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    assert {entry.logprob for entry in content} == {-0.5}
    assert scheduler.submitted[-1].sampling.logprobs == 2


def test_streamed_logprobs_come_with_their_text_and_stop_strings_have_none(
    openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, "One 👍 END more")
    chunks = openai.chat.completions.create(model="smol", messages=HELLO, logprobs=True, stop=" END", stream=True)
    text, spelt = "", b""
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []:
            spelt += bytes(entry.bytes or [])
        assert spelt.decode() == text
    assert text == "One 👍"


def test_the_prompt_is_the_models_chat_template(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None},
        {"role": "user", "content": "four"},
    ]
    openai.chat.completions.create(model="smol", messages=messages)
    assert tokenizer.decode(scheduler.submitted[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne\ntwo<|im_end|>\n"
        "<|im_start|>assistant\nthree<|im_end|>\n<|im_start|>user\nfour<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parameters_reach_the_scheduler(openai: OpenAI, scheduler: FakeScheduler) -> None:
    openai.chat.completions.create(
        model="smol", messages=HELLO, temperature=0.5, top_p=0.9, seed=-3, presence_penalty=0.1, frequency_penalty=-0.2,
        max_completion_tokens=9, user="somebody", extra_body={"top_k": 5, "min_p": 0.05, "repetition_penalty": 1.1},
    )  # fmt: skip
    sampling = scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, -0.2)
    assert (sampling.seed, sampling.max_tokens, sampling.logprobs) == ((1 << 63) - 3, 9, None)
    assert sampling.stop_tokens == {2}


def test_without_a_seed_every_request_gets_another(openai: OpenAI, scheduler: FakeScheduler) -> None:
    for _ in range(2):
        openai.chat.completions.create(model="smol", messages=HELLO)
    first, second = (request.sampling.seed for request in scheduler.submitted)
    assert first != second


def test_the_configuration_says_what_the_request_does_not(openai: OpenAI, scheduler: FakeScheduler) -> None:
    openai.chat.completions.create(model="tuned", messages=HELLO)
    openai.chat.completions.create(model="tuned", messages=HELLO, temperature=0, max_tokens=50)
    silent, explicit = (request.sampling for request in scheduler.submitted)
    assert (silent.temperature, silent.top_k, silent.max_tokens) == (0.25, 7, 5)
    assert (explicit.temperature, explicit.top_k, explicit.max_tokens) == (0, 7, 50)


def test_without_a_limit_an_answer_may_fill_the_rest_of_a_small_context(
    openai: OpenAI, scheduler: FakeScheduler
) -> None:
    openai.chat.completions.create(model="smol", messages=HELLO)
    request = scheduler.submitted[0]
    assert request.sampling.max_tokens == min(2048, CONTEXT - len(request.prompt))


def test_without_a_limit_an_answer_may_take_what_memory_has_room_for(openai: OpenAI, scheduler: FakeScheduler) -> None:
    scheduler.kv_room = Room(now=64, ever=100)
    openai.chat.completions.create(model="smol", messages=HELLO)
    (request,) = scheduler.submitted
    assert request.sampling.max_tokens == 64 - len(request.prompt)


def test_aliases_answer_as_the_model_they_stand_for(openai: OpenAI, scheduler: FakeScheduler) -> None:
    answer = openai.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert answer.model == "smol"
    assert scheduler.submitted[0].model == "smol"


def test_names_with_a_slash(openai: OpenAI, scheduler: FakeScheduler) -> None:
    assert openai.chat.completions.create(model="org/base", messages=HELLO).model == "org/base"
    assert openai.models.retrieve("org/base").id == "org/base"


def test_several_answers_to_one_prompt(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two")
    answer = openai.chat.completions.create(model="smol", messages=HELLO, n=3, seed=(1 << 63) - 2)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(i, "One two") for i in range(3)]
    assert [request.sampling.seed for request in scheduler.submitted] == [(1 << 63) - 2, (1 << 63) - 1, 0]
    assert len({request.id for request in scheduler.submitted}) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(scheduler.submitted[0].prompt), 6)


def test_several_answers_in_one_stream(openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two")
    chunks = [
        chunk.choices[0] for chunk in openai.chat.completions.create(model="smol", messages=HELLO, n=2, stream=True)
    ]
    for index in range(2):
        own = [choice for choice in chunks if choice.index == index]
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(choice.delta.content or "" for choice in own) == "One two"
        assert own[-1].finish_reason == "stop"


def test_a_bias_reaches_the_scheduler(openai: OpenAI, scheduler: FakeScheduler) -> None:
    openai.chat.completions.create(model="smol", messages=HELLO, logit_bias={"17": -100, "18": 1})
    assert scheduler.submitted[0].sampling.logit_bias == {17: -100, 18: 1}


def test_a_format_becomes_a_grammar(openai: OpenAI, scheduler: FakeScheduler) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    for format in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        {"type": "text"},
    ):
        openai.chat.completions.create(model="smol", messages=HELLO, response_format=format)  # type: ignore[arg-type]
    some, own, none = (request.sampling.grammar for request in scheduler.submitted)
    assert some is not None
    assert "place" not in some
    assert own is not None
    assert "place" in own
    assert none is None
