"""What answers can be made to be: several, scored, biased, held to JSON, calls of tools. The official client, a real
model, the whole daemon.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from server.demo.checkpoints import smollm2
from server.demo.daemon import DaemonProcess
from swapper.image import MANIFEST, Image
from swapper.store import Store
from tests.e2e.client import Client
from tests.encoders import TEXTS, minilm, reference
from tests.server.test_tools import TEMPLATE, WEATHER

CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_several_answers_differ(openai: OpenAI) -> None:
    answer = openai.completions.create(model="smollm2", prompt="My dog", seed=5, n=3, max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) > 1
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 24)


def test_a_text_is_scored_as_by_transformers(openai: OpenAI) -> None:
    text = "The capital of France is Paris, and that of Italy is Rome."
    answer = openai.completions.create(model="smollm2", prompt=text, echo=True, logprobs=3, max_tokens=0)
    assert answer.choices[0].text == text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert "".join(logprobs.tokens or []) == text
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained(smollm2())(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        rows = model(tokens).logits[0].float().log_softmax(-1)
    expected = [rows[place, token].item() for place, token in enumerate(tokens[0, 1:].tolist())]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[1:] == pytest.approx(expected, abs=0.15)  # of bfloat16, attended otherwise
    best = rows[len(expected) - 1].topk(3)
    assert list(logprobs.top_logprobs[-1].values()) == pytest.approx(best.values.tolist(), abs=0.15)


def test_a_bias_forbids_a_token(openai: OpenAI) -> None:
    def ask(**more: Any) -> str:
        answer = openai.chat.completions.create(
            model="smollm2", messages=CAPITAL, temperature=0, max_tokens=8, logprobs=True, top_logprobs=1, **more
        )
        return answer.choices[0].message.content or ""

    paris = AutoTokenizer.from_pretrained(smollm2()).encode(" Paris", add_special_tokens=False)
    assert "Paris" in ask()
    assert "Paris" not in ask(logit_bias={str(paris[0]): -100})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_held_to_a_schema(openai: OpenAI, stream: bool) -> None:
    answer: Any = openai.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Who was Napoleon?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}},
        temperature=1,
        seed=1,
        max_tokens=100,
        stream=stream,
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)


def test_a_schema_that_cannot_be_kept_is_refused(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="JSON schema"):
        openai.chat.completions.create(
            model="smollm2",
            messages=CAPITAL,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}},
        )


@pytest.fixture(scope="module")
def encoder(daemon: DaemonProcess) -> Iterator[str]:
    """A model of another kind, added while the daemon serves, by the daemon."""
    name = "minilm"
    with httpx.Client(base_url=daemon.url, timeout=120) as http:
        answer = http.post("/admin/models", json={"source": str(minilm()), "name": name})
        assert (answer.status_code, answer.json()["state"]) == (201, "added")
        yield name
        http.delete(f"/admin/models/{name}").raise_for_status()
        assert http.get(f"/v1/models/{name}").status_code == 404


def test_vectors_are_those_of_the_model_by_itself(openai: OpenAI, client: Client, encoder: str) -> None:
    expected = reference(TEXTS)
    for _ in range(2):  # paged in for the request; and again, after it was paged out
        answer = openai.embeddings.create(model=encoder, input=list(TEXTS))
        found = torch.tensor([item.embedding for item in answer.data])
        assert (found - expected).abs().max() < 1e-5
        assert client.models()[encoder]["state"] == "resident"
        client.post(f"/admin/models/{encoder}/evict").raise_for_status()
        assert client.models()[encoder]["state"] == "absent"


def test_many_texts_beside_a_stream(openai: OpenAI, client: Client, encoder: str) -> None:
    with client.stream("smollm2", max_tokens=24) as pieces:
        next(pieces)
        answer = openai.embeddings.create(model=encoder, input=["word " * (n % 40) for n in range(200)])
        assert len(answer.data) == 200
        assert "".join(pieces)


@pytest.fixture
def speaker(daemon: DaemonProcess) -> Iterator[ollama.Client]:
    client = ollama.Client(host=daemon.url, timeout=120)
    yield client
    client._client.close()


def test_ollamas_client_chats_and_lets_a_model_go(speaker: ollama.Client, client: Client) -> None:
    *chunks, last = speaker.chat(model="smollm2:latest", messages=CAPITAL, options={"temperature": 0}, stream=True)
    assert "".join(chunk.message.content or "" for chunk in chunks) == "The capital of France is Paris."
    assert last.done_reason == "stop"
    assert "smollm2" in {model.model for model in speaker.ps().models}
    speaker.generate(model="smollm2", prompt="Hi", options={"num_predict": 1}, keep_alive=0)
    client.until(lambda: client.models()["smollm2"]["state"] == "absent")
    assert speaker.generate(model="smollm2").done_reason == "load"
    assert client.models()["smollm2"]["state"] == "resident"


def test_ollamas_client_embeds(speaker: ollama.Client, encoder: str) -> None:
    found = torch.tensor(speaker.embed(model=encoder, input=list(TEXTS)).embeddings)
    assert (found - reference(TEXTS)).abs().max() < 1e-5


@pytest.fixture(scope="module")
def tooled(images: dict[str, Image], daemon: DaemonProcess) -> Iterator[str]:
    """The same model with a template that takes tools, added while the daemon serves: all its pages are shared."""
    image = images["smollm2"]
    store, name = Store(image.path.parents[1]), "smollm2-tools"
    with store.adding(name) as directory:
        for file in image.path.iterdir():
            if file.suffix == ".safetensors":
                os.link(file, directory / file.name)
            else:
                shutil.copy(file, directory)
        (directory / "chat_template.jinja").write_text(TEMPLATE + "assistant:")
        (directory / MANIFEST).write_text(replace(image.manifest, model=name).to_json())
    yield name
    store.remove(name)
    with Client(daemon.url) as client:
        client.until(lambda: name not in client.models())


def test_a_tool_is_called(openai: OpenAI, tooled: str) -> None:
    answer = openai.chat.completions.create(
        model=tooled,
        messages=[{"role": "user", "content": "What is the weather in Rome?"}],
        tools=[WEATHER],  # type: ignore[list-item]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=60,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def test_the_examples_run(daemon: DaemonProcess, encoder: str) -> None:
    def printed(example: str, *words: str) -> str:
        command = [sys.executable, f"examples/{example}.py", *words]
        root, env = Path(__file__).parents[2], {**os.environ, "GSWAPD_URL": daemon.url}
        return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    assert printed("chat", "smollm2", "What is the capital of France?") == "The capital of France is Paris.\n"
    nearest = printed("embeddings", encoder, "a purring pet", "a lorry", "a cat").splitlines()
    assert [line.split("  ")[1] for line in nearest] == ["a cat", "a lorry"]
