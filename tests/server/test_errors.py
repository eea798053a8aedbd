"""Whatever goes wrong is told in OpenAI's envelope, with the parameter's name where there is one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from pydantic import ValidationError
from tokenizers import Tokenizer

from scheduler.interface import Room
from server.errors import REASONS
from server.ollama import schemas as ollama
from server.openai.messages import Part
from server.openai.schemas import ChatRequest, CompletionRequest, EmbeddingsRequest
from swapper.errors import Refused
from tests.server.conftest import CONTEXT, ServerThread, config, publish
from tests.server.fakes import WAIT, FakeScheduler
from tests.server.test_chat import HELLO, events, script

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat(**values: Any) -> dict[str, Any]:
    return {"model": "smol", "messages": HELLO} | values


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith(".")
    return dict(error)


BAD_CHATS = [
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"seed": 1 << 63}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "user", "content": "x", "mood": "good"}]}, "messages[1].mood"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"60000": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [5]}, "logit_bias"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/x"}}}},
        "response_format",
    ),
    (
        {"response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "response_format",
    ),
    (
        {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {}}]}]},
        "messages[1].tool_calls[0].function.name",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"what": True}}, "stream_options.what"),
    ({"model": 5}, "model"),
    ({"max_tokens": True}, "max_tokens"),
    ({"temperature": True}, "temperature"),
    ({"seed": False}, "seed"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": ["x"]}, "messages[0]"),
    ({"stream_options": 5}, "stream_options"),
    ({"stop": 5}, "stop"),
    ({"model": "m" * 257}, "model"),
]

UNSUPPORTED = [
    ("store", 0),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),  # the model's template takes none
    ("store", True),
    ("modalities", ["audio"]),
    ("reasoning_effort", "high"),
    ("service_tier", "flex"),
    ("temprature", 1),
]

NEUTRAL = {
    "n": 1,
    "logit_bias": {},
    "response_format": {"type": "text"},
    "store": False,
    "parallel_tool_calls": True,
    "tools": None,
    "tool_choice": "auto",
    "metadata": {},
    "modalities": ["text"],
    "service_tier": "auto",
    "audio": None,
    "stop": None,
    "temperature": None,
    "user": "somebody",
}


@pytest.mark.parametrize(("values", "param"), BAD_CHATS)
def test_a_bad_value_is_named(http: httpx.Client, values: dict[str, Any], param: str) -> None:
    error = error_of(http.post(CHAT, json=chat(**values)), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    for leaked in ("Input", "valid ", "validation", "instance", "tuple", "Request", "tag", "pattern"):
        assert leaked not in error["message"]


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED)
def test_an_unsupported_parameter_is_refused_by_name(http: httpx.Client, name: str, value: Any) -> None:
    error = error_of(http.post(CHAT, json=chat(**{name: value})), 400)
    assert error["param"] == name
    assert error["code"] == "unsupported_parameter"


def test_unsupported_parameters_are_taken_when_they_ask_for_nothing(http: httpx.Client) -> None:
    assert http.post(CHAT, json=chat(**NEUTRAL)).status_code == 200


def test_parts_other_than_text_are_refused(http: httpx.Client) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    text = {"type": "text", "text": "What is this?"}
    error = error_of(http.post(CHAT, json=chat(messages=[{"role": "user", "content": [text, image]}])), 400)
    assert error["param"] == "messages[0].content[1]"
    assert "images are not supported" in error["message"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "top_p"])
def test_numbers_are_finite(http: httpx.Client, name: str, number: str) -> None:
    body = f'{{"model": "smol", "messages": [{{"role": "user", "content": "x"}}], "{name}": {number}}}'
    error = error_of(http.post(CHAT, content=body), 400)
    assert error["message"] == f"Parameter '{name}' must be a finite number."


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_parameter_is_named(http: httpx.Client, missing: str) -> None:
    body = chat()
    del body[missing]
    error = error_of(http.post(CHAT, json=body), 400)
    assert error["param"] == missing
    assert error["code"] == "missing_required_parameter"


@pytest.mark.parametrize("body", [b"", b"{", b'{"model": "smol",}', b"\xff", b'["model"]', b"null"])
def test_a_body_that_is_no_json_object(http: httpx.Client, body: bytes) -> None:
    error_of(http.post(CHAT, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([-1], "prompt[0]"),
        (None, "prompt"),
        ([10**6], "prompt"),
        ([1, -1], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", 1], "prompt[1]"),
        (["a", [1, -1]], "prompt[1][1]"),
        (["a", []], "prompt[1]"),
        ([["a"]], "prompt[0]"),
        (["a", ""], "prompt[1]"),
        (5, "prompt"),
    ],
)
def test_a_bad_prompt(http: httpx.Client, prompt: Any, param: str) -> None:
    assert error_of(http.post(TEXT, json={"model": "smol", "prompt": prompt}), 400)["param"] == param


def test_what_no_memory_could_ever_hold_is_the_requests_fault(http: httpx.Client, scheduler: FakeScheduler) -> None:
    """Pins may go; a pool does not grow: trying again would not help."""
    scheduler.kv_room = Room(now=8, ever=32)
    error = error_of(http.post(TEXT, json={"model": "smol", "prompt": [5] * 10, "max_tokens": 23}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "32 tokens" in error["message"]
    assert http.post(TEXT, json={"model": "smol", "prompt": [5] * 10, "max_tokens": 22}).status_code == 200


@pytest.mark.parametrize(("name", "value"), [("best_of", 2), ("suffix", "x"), ("tools", [5])])
def test_unsupported_parameters_of_text_completions(http: httpx.Client, name: str, value: Any) -> None:
    error = error_of(http.post(TEXT, json={"model": "smol", "prompt": "a", name: value}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")


def test_an_unknown_model(openai: OpenAI, scheduler: FakeScheduler) -> None:
    with pytest.raises(sdk.NotFoundError) as failure:
        openai.chat.completions.create(model="nope", messages=HELLO)  # type: ignore[arg-type]
    assert failure.value.code == "model_not_found"
    assert failure.value.param == "model"
    assert scheduler.submitted == []


def test_a_prompt_longer_than_the_context(openai: OpenAI, scheduler: FakeScheduler) -> None:
    with pytest.raises(sdk.BadRequestError, match=str(CONTEXT)) as failure:
        openai.completions.create(model="smol", prompt="word " * CONTEXT)
    assert failure.value.code == "context_length_exceeded"
    assert scheduler.submitted == []


def test_prompt_and_answer_longer_than_the_context(openai: OpenAI, scheduler: FakeScheduler) -> None:
    with pytest.raises(sdk.BadRequestError) as failure:
        openai.completions.create(model="smol", prompt=[5] * 10, max_tokens=CONTEXT - 9)
    assert failure.value.code == "context_length_exceeded"
    assert failure.value.param == "max_tokens"
    openai.completions.create(model="smol", prompt=[5] * 10, max_tokens=CONTEXT - 10)
    assert len(scheduler.submitted) == 1


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_parameter_that_does_not_fit_the_context_is_named(http: httpx.Client, name: str) -> None:
    assert error_of(http.post(CHAT, json=chat(**{name: CONTEXT})), 400)["param"] == name
    long = [{"role": "user", "content": "word " * CONTEXT}]
    assert error_of(http.post(CHAT, json=chat(messages=long, **{name: 1})), 400)["param"] == "messages"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_hopelessly_long_prompt(http: httpx.Client, scheduler: FakeScheduler, path: str) -> None:
    text = "word " * 1_000_000
    body = chat(messages=[{"role": "user", "content": text}]) if path == CHAT else {"model": "smol", "prompt": text}
    error = error_of(http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == ("messages" if path == CHAT else "prompt")
    assert scheduler.submitted == []


def test_of_several_prompts_none_is_served_if_one_is_bad(openai: OpenAI, scheduler: FakeScheduler) -> None:
    with pytest.raises(sdk.BadRequestError) as failure:
        openai.completions.create(model="smol", prompt=[[5], [5] * CONTEXT])
    assert failure.value.param == "prompt[1]"
    assert scheduler.submitted == []


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_scheduler(http: httpx.Client, scheduler: FakeScheduler, reason: str, stream: bool) -> None:
    scheduler.script = [Refused(reason, "It cannot be.", retry_after=2.3)]
    answer = http.post(CHAT, json=chat(stream=stream))
    status, code = REASONS[reason]
    error = error_of(answer, status)
    assert error["code"] == code
    assert error["message"] == "It cannot be."
    assert answer.headers["retry-after"] == "3"


def test_a_full_queue_is_a_rate_limit_to_clients(openai: OpenAI, scheduler: FakeScheduler) -> None:
    scheduler.script = [Refused("queue_full", "Too many wait.", retry_after=1)]
    with pytest.raises(sdk.RateLimitError):
        openai.chat.completions.create(model="smol", messages=HELLO)  # type: ignore[arg-type]


def test_an_error_after_the_stream_began_is_an_event(
    http: httpx.Client, openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = [tokenizer.encode("One").ids, Refused("engine_failed", "The worker is lost.")]
    *_, text, error = events(http.post(CHAT, json=chat(stream=True)))
    assert text["choices"][0]["delta"] == {"content": "One"}
    assert error["error"]["code"] == "engine_failed"
    with pytest.raises(sdk.APIError, match="The worker is lost"):
        list(openai.chat.completions.create(model="smol", messages=HELLO, stream=True))  # type: ignore[arg-type]


def test_an_answer_cut_off_by_a_shutdown_is_an_error(
    http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = script(tokenizer, "One", "cancelled")
    assert error_of(http.post(CHAT, json=chat()), 503)["code"] == "draining"


def test_one_bad_answer_of_several_fails_the_request_and_ends_the_others(
    http: httpx.Client, scheduler: FakeScheduler
) -> None:
    scheduler.script = [Refused("no_memory", "It does not fit.")]
    assert error_of(http.post(TEXT, json={"model": "smol", "prompt": ["a", "b"]}), 503)["code"] == "no_memory"
    assert len(scheduler.cancelled) == 2


def test_a_defect_is_told_without_its_details(
    http: httpx.Client, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def submit(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(scheduler, "submit", submit)
    answer = http.post(CHAT, json=chat())
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "secret" not in answer.text
    (record,) = caplog.records
    assert record.exc_info is not None, "the log has the details, once"
    assert str(record.exc_info[1]) == "secret"


def test_a_defect_anywhere_is_logged_once(
    http: httpx.Client, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler, "workers", lambda: 1 / 0)
    assert error_of(http.get("/readyz"), 500)["code"] == "internal_error"
    assert len(caplog.records) == 1


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert error_of(http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = http.get(CHAT)
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert "POST" in answer.headers["allow"]


def test_a_model_without_a_chat_template_has_text_completions(
    server: ServerThread, smollm2: Path, openai: OpenAI
) -> None:
    publish(server.store, "base-model", smollm2, files={"chat_template.jinja": ""})
    try:
        with pytest.raises(sdk.BadRequestError, match="chat template") as failure:
            openai.chat.completions.create(model="base-model", messages=HELLO)  # type: ignore[arg-type]
        assert failure.value.param == "messages"
        openai.completions.create(model="base-model", prompt="Once")
    finally:
        server.store.remove("base-model")


def test_a_conversation_the_template_refuses(server: ServerThread, smollm2: Path, openai: OpenAI) -> None:
    publish(
        server.store, "strict", smollm2, files={"chat_template.jinja": "{{ raise_exception('roles must alternate') }}"}
    )
    try:
        with pytest.raises(sdk.BadRequestError, match="roles must alternate"):
            openai.chat.completions.create(model="strict", messages=HELLO)  # type: ignore[arg-type]
    finally:
        server.store.remove("strict")


def test_a_tokenizer_that_cannot_be_read(server: ServerThread, smollm2: Path, openai: OpenAI) -> None:
    publish(server.store, "broken", smollm2, files={"tokenizer.json": "{"})
    try:
        with pytest.raises(sdk.InternalServerError, match="Add the model again") as failure:
            openai.completions.create(model="broken", prompt="a")
        assert failure.value.status_code == 503
    finally:
        server.store.remove("broken")


def test_limits_of_the_house(tmp_path: Path, smollm2: Path) -> None:
    """A body that is too large, and more requests at once than are let in."""
    with (
        ServerThread(config(tmp_path, server={"max_requests": 1, "max_body": 2048})) as server,
        server.client() as http,
    ):
        publish(server.store, "smol", smollm2)
        assert (
            error_of(http.post(TEXT, json={"model": "smol", "prompt": "x" * 3000}), 413)["code"] == "request_too_large"
        )
        server.scheduler.script = [[500], WAIT]
        with http.stream("POST", CHAT, json=chat(stream=True)):
            assert server.scheduler.waiting.wait(20)
            answer = http.post(CHAT, json=chat())
            assert error_of(answer, 429)["code"] == "queue_full"
            assert answer.headers["retry-after"] == "1"
            assert http.get("/healthz").status_code == 200
        assert server.scheduler.cancellation.wait(20)


MANY = 10_000
MISTAKES: list[dict[str, Any]] = [
    {"messages": [1] * MANY},
    {"messages": [{"role": "user", "content": [1] * MANY}]},
    {"messages": [{"role": "assistant", "tool_calls": [1] * MANY}]},
    {"tools": [1] * MANY},
    {"stop": [1] * MANY},
    {"logit_bias": dict.fromkeys(map(str, range(-MANY, 0)), 1)},
    dict.fromkeys(map(str, range(MANY)), 1),
    {"messages": [HELLO[0] | dict.fromkeys(map(str, range(MANY)), 1)]},
    {"prompt": [-1] * MANY},
    {"prompt": [["x"] * MANY]},
    {"prompt": ["x", *[{}] * MANY]},
    {"input": ["x", *[{}] * MANY]},
    {"options": {"stop": [1] * MANY}},
]


@pytest.mark.parametrize("mistakes", MISTAKES, ids=range(len(MISTAKES)))
@pytest.mark.parametrize(
    "kind", [ChatRequest, CompletionRequest, EmbeddingsRequest, ollama.ChatRequest, ollama.EmbedRequest]
)
def test_ten_thousand_mistakes_cost_no_more_than_a_few(kind: type[Part], mistakes: dict[str, Any]) -> None:
    """They would keep the event loop, and so everybody, for as long as it takes to describe them."""
    with pytest.raises(ValidationError) as failure:
        kind.model_validate_json(json.dumps({"model": "smol", **mistakes}))
    assert failure.value.error_count() < 10


@pytest.mark.parametrize(
    "schema", [{"enum": [f"word {index}" for index in range(10_000)]}, {"type": "integer", "maximum": 10**30}]
)
def test_a_schema_that_is_too_much(http: httpx.Client, schema: dict[str, Any]) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = error_of(http.post(CHAT, json=chat(response_format=wanted)), 400)
    assert (error["code"], error["param"]) == ("invalid_json_schema", "response_format")


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a": "\\ud800"}', '{"a": NaN}', "[]"])
def test_arguments_of_a_call_that_are_no_object(http: httpx.Client, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    error = error_of(http.post(CHAT, json=chat(messages=[{"role": "assistant", "tool_calls": [call]}])), 400)
    assert error["param"] == "messages[0].tool_calls[0].function.arguments"
