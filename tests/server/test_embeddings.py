"""/v1/embeddings, through the official client, which asks for base64 unless told otherwise, and as raw JSON."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import httpx
import numpy as np
import openai as sdk
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from engine.request import EmbeddingRequest
from swapper.errors import Refused
from swapper.image import Embedding
from tests.encoders import minilm
from tests.server.conftest import ServerThread, publish
from tests.server.fakes import WAIT, FakeScheduler
from tests.server.test_errors import error_of

EMBEDDINGS = "/v1/embeddings"
VECTORS = ((3.0, 4.0, 0.0), (0.0, 0.0, 1.0))


@pytest.fixture(scope="module")
def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(minilm() / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@pytest.fixture(scope="module")
def encoder(shared_server: ServerThread) -> Iterator[str]:
    how = Embedding("mean", True, 3)
    publish(shared_server.store, "encoder", minilm(), embedding=how)
    yield "encoder"
    shared_server.store.remove("encoder")


@pytest.fixture(autouse=True)
def scripted(scheduler: FakeScheduler) -> None:
    scheduler.vectors = VECTORS


def test_a_text(openai: OpenAI, scheduler: FakeScheduler, wordpiece: Tokenizer, encoder: str) -> None:
    answer = openai.embeddings.create(model=encoder, input="Hello there, Bob.")
    assert answer.data[0].embedding == [3, 4, 0]
    assert (answer.object, answer.model) == ("list", encoder)
    assert (answer.data[0].object, answer.data[0].index) == ("embedding", 0)
    (request,) = scheduler.submitted
    assert isinstance(request, EmbeddingRequest)
    assert request.inputs == (tuple(wordpiece.encode("Hello there, Bob.").ids),)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(request.inputs[0])


def test_several_texts_are_one_request(openai: OpenAI, scheduler: FakeScheduler, encoder: str) -> None:
    answer = openai.embeddings.create(model=encoder, input=["one", "two"], encoding_format="float")
    assert [(item.index, item.embedding) for item in answer.data] == [(0, [3, 4, 0]), (1, [0, 0, 1])]
    assert len(scheduler.submitted) == 1


def test_tokens(openai: OpenAI, scheduler: FakeScheduler, encoder: str) -> None:
    openai.embeddings.create(model=encoder, input=[101, 7592, 102])
    openai.embeddings.create(model=encoder, input=[[101, 7592, 102], [101, 102]])
    assert [request.inputs for request in scheduler.submitted if isinstance(request, EmbeddingRequest)] == [
        ((101, 7592, 102),),
        ((101, 7592, 102), (101, 102)),
    ]


def test_base64_is_little_endian_float32(http: httpx.Client, encoder: str) -> None:
    body = {"model": encoder, "input": "x", "encoding_format": "base64"}
    raw = http.post(EMBEDDINGS, json=body).raise_for_status().json()["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == [3, 4, 0]


def test_fewer_dimensions_are_the_first_ones_to_length_1(openai: OpenAI, encoder: str) -> None:
    answer = openai.embeddings.create(model=encoder, input="x", dimensions=2)
    assert answer.data[0].embedding == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [5, -1]}, "input[1]"),
        ({"input": [40_000]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [["a"]]}, "input[0]"),
        ({"input": ["a", "word " * 300]}, "input[1]"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 4}, "dimensions"),
        ({"mood": 1}, "mood"),
        ({"model": "smol"}, "model"),
    ],
)
def test_a_bad_value_is_named(http: httpx.Client, encoder: str, values: dict[str, object], param: str) -> None:
    error = error_of(http.post(EMBEDDINGS, json={"model": encoder, "input": "x"} | values), 400)
    assert error["param"] == param


def test_an_encoder_does_not_chat(http: httpx.Client, encoder: str) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
    ):
        error = error_of(http.post(path, json={"model": encoder} | body), 400)
        assert (error["code"], error["param"]) == ("unsupported_model", "model")
        assert "/v1/embeddings" in error["message"]


def test_a_refusal(openai: OpenAI, scheduler: FakeScheduler, encoder: str) -> None:
    scheduler.script = [Refused("queue_full", "Too many wait.", 3)]
    with pytest.raises(sdk.RateLimitError, match="Too many"):
        openai.embeddings.create(model=encoder, input="x")


def test_a_client_that_goes_ends_the_work(server: ServerThread, scheduler: FakeScheduler, encoder: str) -> None:
    scheduler.script = [WAIT]
    with server.client() as http, pytest.raises(httpx.ReadTimeout):
        http.post(EMBEDDINGS, json={"model": encoder, "input": "x"}, timeout=0.5)
    assert scheduler.cancellation.wait(20)
