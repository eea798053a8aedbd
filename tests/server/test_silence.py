"""A stream that has nothing to say yet tells how far the model is, in comments that clients pass over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai as sdk
import pytest
from tokenizers import Tokenizer

from swapper.errors import Refused
from tests.server.conftest import ServerThread, config, publish
from tests.server.fakes import TIMEOUT, WAIT
from tests.server.test_chat import HELLO, script

BODY = {"model": "smol", "messages": HELLO, "stream": True}


@pytest.fixture(scope="module")
def quiet_once(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[ServerThread]:
    with ServerThread(config(tmp_path_factory.mktemp("quiet"), server={"silence": 0.05})) as server:
        publish(server.store, "smol", smollm2)
        yield server


@pytest.fixture
def quiet(quiet_once: ServerThread) -> ServerThread:
    quiet_once.scheduler.reset()
    return quiet_once


def test_comments_come_until_the_answer_does(quiet: ServerThread, tokenizer: Tokenizer) -> None:
    loaded = asyncio.Event()
    quiet.scheduler.script = [loaded, *script(tokenizer, "One two")]
    with quiet.client() as http, http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(3):
            comment = next(lines)
            assert comment.startswith(": ")
            assert json.loads(comment.removeprefix(": ")) == {
                "state": "absent", "resident_pages": 0, "total_pages": 1, "waiting": 0, "running": 0,
            }  # fmt: skip
        quiet.loop.call_soon_threadsafe(loaded.set)
        rest = [line for line in lines if not line.startswith(":")]
    assert rest[-1] == "data: [DONE]"
    texts = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in rest[:-1]]
    assert "".join(texts) == "One two"


def test_they_come_between_tokens_too(quiet: ServerThread, tokenizer: Tokenizer) -> None:
    more = asyncio.Event()
    first, *others = script(tokenizer, "One two")
    quiet.scheduler.script = [first, more, *others]
    with quiet.client() as http, http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert next(lines).startswith("data:")
        assert any(line.startswith(": ") for line in (next(lines), next(lines)))
        quiet.loop.call_soon_threadsafe(more.set)
        assert list(lines)[-1] == "data: [DONE]"


def test_the_official_client_passes_over_them_and_hears_of_a_late_refusal(quiet: ServerThread) -> None:
    failed = asyncio.Event()
    quiet.scheduler.script = [failed, Refused("load_failed", "The disk is gone.")]
    with quiet.openai() as client:
        stream = client.chat.completions.create(**BODY)  # type: ignore[call-overload]
        quiet.loop.call_soon_threadsafe(failed.set)
        with pytest.raises(sdk.APIError, match="The disk is gone"):
            list(stream)


def test_an_early_refusal_has_its_status(quiet: ServerThread) -> None:
    quiet.scheduler.script = [Refused("queue_full", "Too many wait.", 1)]
    with quiet.client() as http:
        assert http.post("/v1/chat/completions", json=BODY).status_code == 429


def test_a_client_that_leaves_in_the_silence_ends_the_work(quiet: ServerThread) -> None:
    quiet.scheduler.script = [WAIT]
    with quiet.client() as http, http.stream("POST", "/v1/chat/completions", json=BODY) as answer:
        assert next(answer.iter_lines()).startswith(": ")
    assert quiet.scheduler.cancellation.wait(TIMEOUT)
