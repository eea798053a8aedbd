"""Ollama's API, through its official client."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
from pydantic import TypeAdapter, ValidationError
from tokenizers import Tokenizer

from engine.request import EmbeddingRequest
from server.keep_alive import KeepAlive
from swapper.errors import Refused
from swapper.image import Embedding
from tests.encoders import minilm
from tests.server.conftest import ServerThread, publish
from tests.server.fakes import WAIT, FakeScheduler
from tests.server.test_chat import HELLO, script
from tests.server.test_tools import CALLS, TEMPLATE, WEATHER


@pytest.fixture(autouse=True)
def restored(server: ServerThread) -> Iterator[None]:
    """What is in memory is nobody else's business."""
    yield
    if "smol" in server.scheduler.statuses:
        server.scheduler._change("smol", state="absent", group=None, resident_pages=0, resident_bytes=0)


@pytest.fixture
def client(server: ServerThread) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=20)
    yield client
    client._client.close()


@pytest.fixture(scope="module")
def tooled(shared_server: ServerThread, smollm2: Path) -> Iterator[str]:
    publish(shared_server.store, "ollama-tools", smollm2, files={"chat_template.jinja": TEMPLATE})
    yield "ollama-tools"
    shared_server.store.remove("ollama-tools")


@pytest.fixture(scope="module")
def encoder(shared_server: ServerThread) -> Iterator[str]:
    publish(shared_server.store, "ollama-encoder", minilm(), embedding=Embedding("mean", True, 3))
    yield "ollama-encoder"
    shared_server.store.remove("ollama-encoder")


# ---- text


def test_a_chat(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "Paris. 👍🏽")
    answer = client.chat(model="smol", messages=HELLO)
    assert answer.message.role == "assistant"
    assert answer.message.content == "Paris. 👍🏽"
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", "smol")
    assert answer.prompt_eval_count == len(scheduler.submitted[0].prompt)
    assert answer.eval_count == len(scheduler.script) - 1
    assert answer.total_duration is not None
    assert answer.load_duration is not None
    assert answer.prompt_eval_duration is not None
    assert answer.eval_duration is not None
    parts = answer.load_duration + answer.prompt_eval_duration + answer.eval_duration
    assert parts == pytest.approx(answer.total_duration, abs=10)


def test_a_chat_streamed(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two", "length")
    *chunks, last = client.chat(model="smol:latest", messages=HELLO, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == "One two"
    assert not any(chunk.done for chunk in chunks)
    assert (last.done, last.done_reason, last.message.content, last.eval_count) == (True, "length", "", 2)
    assert {chunk.model for chunk in (*chunks, last)} == {"smol:latest"}


def test_options(client: ollama.Client, scheduler: FakeScheduler) -> None:
    options = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "seed": 7, "num_predict": 9,
        "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096,
    }  # fmt: skip
    client.chat(model="smol", messages=HELLO, options=options)
    client.chat(model="smol", messages=HELLO, options={"num_predict": -1})
    sampling = scheduler.submitted[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.9, 0.05)
    assert (sampling.seed, sampling.max_tokens) == (7, 9)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, 0.2)
    assert scheduler.submitted[1].sampling.max_tokens > 9


def test_stop_strings(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "It is Paris.\nUser: and now?")
    answer = client.chat(model="smol", messages=HELLO, options={"stop": ["\nUser:"]})
    assert answer.message.content == "It is Paris."


def test_tools(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer, tooled: str) -> None:
    scheduler.script = script(tokenizer, CALLS)
    answer = client.chat(model=tooled, messages=HELLO, tools=[WEATHER])
    calls = answer.message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", {"city": "Rome"}),
        ("clock", {}),
    ]
    assert answer.message.content == "Let me see."
    messages = [*HELLO, answer.message, {"role": "tool", "tool_name": "weather", "content": "sunny"}]
    client.chat(model=tooled, messages=messages, tools=[WEATHER])
    prompt = tokenizer.decode(scheduler.submitted[-1].prompt)
    assert "<tool_call>weather Rome</tool_call>" in prompt
    assert "tool: sunny" in prompt


def test_a_format_becomes_a_grammar(client: ollama.Client, scheduler: FakeScheduler) -> None:
    schema = {"type": "object", "properties": {"place": {"type": "string"}}}
    client.chat(model="smol", messages=HELLO, format=schema)
    client.generate(model="smol", prompt="Where?", format="json")
    own, some = (request.sampling.grammar for request in scheduler.submitted)
    assert own is not None
    assert "place" in own
    assert some is not None


def test_generate(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    """A prompt is put into the model's chat template, unless it is raw."""
    scheduler.script = script(tokenizer, " upon a time")
    answer = client.generate(model="smol", prompt="Once", system="Tell tales.")
    assert answer.response == " upon a time"
    assert tokenizer.decode(scheduler.submitted[0].prompt, skip_special_tokens=False) == (
        "<|im_start|>system\nTell tales.<|im_end|>\n<|im_start|>user\nOnce<|im_end|>\n<|im_start|>assistant\n"
    )
    client.generate(model="smol", prompt="Once", raw=True)
    assert scheduler.submitted[1].prompt == tuple(tokenizer.encode("Once").ids)
    *chunks, last = client.generate(model="smol", prompt="Once", stream=True)
    assert "".join(chunk.response or "" for chunk in chunks) == " upon a time"
    assert last.done


def test_logprobs(client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two")
    for answer in (
        client.chat(model="smol", messages=HELLO, logprobs=True, top_logprobs=1),
        client.generate(model="smol", prompt="x", raw=True, logprobs=True, top_logprobs=1),
    ):
        assert [(entry.token, entry.logprob) for entry in answer.logprobs or ()] == [("One", -0.5), (" two", -0.5)]


# ---- models


def test_what_there_is(client: ollama.Client, server: ServerThread) -> None:
    listed = {model.model: model for model in client.list().models}
    assert {"smol", "tiny", "tuned", "org/base"} <= set(listed)
    smol = listed["smol"]
    assert smol.size == 4096
    assert smol.details is not None
    assert (smol.details.format, smol.details.family, smol.details.quantization_level) == (
        "safetensors", "LlamaForCausalLM", "bfloat16",
    )  # fmt: skip
    assert client.ps().models == []
    shown = client.show("smol:latest")
    assert shown.template is not None
    assert "im_start" in shown.template
    assert shown.capabilities == ["completion"]
    assert shown.modelinfo is not None
    assert shown.modelinfo["LlamaForCausalLM.context_length"] == 256


def test_what_an_encoder_and_a_model_with_tools_can_do(client: ollama.Client, encoder: str, tooled: str) -> None:
    assert client.show(encoder).capabilities == ["embedding"]
    assert client.show(tooled).capabilities == ["completion", "tools"]


def test_a_request_without_a_prompt_moves_its_model(
    client: ollama.Client, server: ServerThread, scheduler: FakeScheduler
) -> None:
    loaded = client.generate(model="smol")
    assert (loaded.done_reason, loaded.response) == ("load", "")
    (running,) = client.ps().models
    assert (running.model, running.size_vram, running.context_length) == ("smol", 4096, 256)
    assert client.chat(model="smol", keep_alive=0).done_reason == "unload"
    assert scheduler.jobs == [("load", "smol"), ("evict", "smol")]
    assert client.ps().models == []
    assert scheduler.submitted == []


def test_keep_alive_holds_until_the_next_request(client: ollama.Client, scheduler: FakeScheduler) -> None:
    def ttl() -> float | None:
        return scheduler.served["smol"].ttl

    assert ttl() is None
    client.chat(model="smol", messages=HELLO, keep_alive="5m")
    assert ttl() == 300
    client.chat(model="smol", messages=HELLO, keep_alive=0)
    assert ttl() == 0
    client.chat(model="smol", messages=HELLO, keep_alive=-1)
    assert ttl() is None
    client.chat(model="smol", messages=HELLO, keep_alive=10)
    client.chat(model="smol", messages=HELLO)
    assert ttl() is None


@pytest.mark.parametrize("path", ["/api/generate", "/admin/models/smol/load"])
def test_a_model_that_is_loaded_stays_whatever_was_said_before(
    http: httpx.Client, scheduler: FakeScheduler, path: str
) -> None:
    http.post("/api/chat", json={"model": "smol", "messages": HELLO, "keep_alive": 0}).raise_for_status()
    ttls: list[float | None] = []
    scheduler.on_job = lambda: ttls.append(scheduler.served["smol"].ttl)
    http.post(path, json={"model": "smol"}).raise_for_status()
    assert (scheduler.jobs, ttls) == ([("load", "smol")], [None])  # already when the load begins


def test_keep_alive_is_taken_from_openais_clients_too(http: httpx.Client, scheduler: FakeScheduler) -> None:
    for keep_alive, ttl in (("90s", 90), (None, None)):
        body = {"model": "smol", "messages": HELLO, "keep_alive": keep_alive}
        http.post("/v1/chat/completions", json=body).raise_for_status()
        assert scheduler.served["smol"].ttl == ttl


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (5, 5), (0, 0), (2.5, 2.5), (-1, -1), ("5m", 300), ("1h30m", 5400), ("10", 10), ("1.5s", 1.5),
        ("-1", -1), ("-5m", -1), ("100ms", 0.1), (10**400, -1), (1e308, -1), ("9000000h", -1),
    ],
)  # fmt: skip
def test_durations(written: object, seconds: float) -> None:
    assert TypeAdapter(KeepAlive).validate_python(written) == pytest.approx(seconds)


@pytest.mark.parametrize("written", ["", "soon", "5 m", "5x", True, None, [], math.nan])
def test_what_is_no_duration(written: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(KeepAlive).validate_python(written)


# ---- vectors


def test_embed(client: ollama.Client, scheduler: FakeScheduler, encoder: str) -> None:
    scheduler.vectors = ((3.0, 4.0, 0.0), (0.0, 0.0, 1.0))
    answer = client.embed(model=encoder, input=["one", "two"])
    assert answer.embeddings == [[3, 4, 0], [0, 0, 1]]
    assert answer.prompt_eval_count == 6
    assert client.embed(model=encoder, input="one", dimensions=2).embeddings[0] == pytest.approx([0.6, 0.8])
    assert client.embeddings(model=encoder, prompt="one").embedding == [3, 4, 0]


def test_a_long_text_is_cut_or_refused(client: ollama.Client, scheduler: FakeScheduler, encoder: str) -> None:
    scheduler.vectors = ((1.0, 0.0, 0.0),)
    client.embed(model=encoder, input="word " * 1000)
    (request,) = scheduler.submitted
    assert isinstance(request, EmbeddingRequest)
    (text,) = request.inputs
    assert (len(text), text[0], text[-1]) == (256, 101, 102)  # between its marks still
    with pytest.raises(ollama.ResponseError, match="256 tokens"):
        client.embed(model=encoder, input="word " * 1000, truncate=False)


# ---- errors


def test_errors_are_a_sentence(client: ollama.Client, scheduler: FakeScheduler, http: httpx.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="does not exist") as missing:
        client.chat(model="nobody", messages=HELLO)
    assert missing.value.status_code == 404
    scheduler.script = [Refused("queue_full", "Too many wait.", 3)]
    for stream in (False, True):
        answer = http.post("/api/chat", json={"model": "smol", "messages": HELLO, "stream": stream})
        assert (answer.status_code, answer.json()) == (429, {"error": "Too many wait."})
        assert answer.headers["retry-after"] == "3"
    assert http.get("/api/nowhere").json() == {"error": "There is no /api/nowhere here."}


def test_numbers_may_be_of_any_size(http: httpx.Client, scheduler: FakeScheduler) -> None:
    huge = 10**30
    body: dict[str, Any] = {"model": "smol", "messages": HELLO, "stream": False}
    assert http.post("/api/chat", json=body | {"options": {"top_k": huge}}).status_code == 200
    assert scheduler.submitted[-1].sampling.top_k == huge
    refused = http.post("/api/chat", json=body | {"format": {"type": "integer", "maximum": huge}})
    assert (refused.status_code, "too large" in refused.json()["error"]) == (400, True)


def test_an_answer_that_breaks_off_says_why(
    client: ollama.Client, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    scheduler.script = [tokenizer.encode("One").ids, Refused("engine_failed", "It broke.")]
    with pytest.raises(ollama.ResponseError, match="It broke"):
        list(client.chat(model="smol", messages=HELLO, stream=True))


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"temperature": 3}}, "options.temperature"),
        ({"options": {"temprature": 1}}, "options.temprature"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"think": True}, "think"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "images"),
        ({"format": "yaml"}, "format"),
        ({"format": {"$ref": "#/nowhere"}}, "response_format"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(http: httpx.Client, values: dict[str, Any], named: str) -> None:
    answer = http.post("/api/chat", json={"model": "smol", "messages": HELLO} | values)
    assert answer.status_code == 400
    assert named in answer.json()["error"]


def test_a_client_that_goes_ends_the_work(server: ServerThread, scheduler: FakeScheduler) -> None:
    scheduler.script = [WAIT]
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/api/chat", json={"model": "smol", "messages": HELLO}, timeout=0.5)
    assert scheduler.cancellation.wait(20)


def test_lines_are_json(http: httpx.Client, scheduler: FakeScheduler, tokenizer: Tokenizer) -> None:
    scheduler.script = script(tokenizer, "One two")
    answer = http.post("/api/chat", json={"model": "smol", "messages": HELLO})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    assert [json.loads(line)["done"] for line in answer.text.splitlines()] == [False, False, True]
    assert http.get("/api/version").json()["version"]
