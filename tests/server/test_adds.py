"""Models come and go while the daemon serves: real adds, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.models import make_checkpoint, make_tokenizer
from tests.server.conftest import ServerThread, config, publish
from tests.server.test_errors import error_of

ADD_TIMEOUT = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[ServerThread]:
    with ServerThread(config(tmp_path_factory.mktemp("adds"))) as server:
        publish(server.store, "old", smollm2)
        yield server


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=ADD_TIMEOUT) as client:
        yield client


def adds(http: httpx.Client) -> dict[str, dict[str, Any]]:
    return {add["name"]: add for add in http.get("/admin/models").raise_for_status().json()["adding"]}


def test_a_model_is_added_asked_for_and_removed(http: httpx.Client, tmp_path: Path) -> None:
    source = make_tokenizer(make_checkpoint(tmp_path / "llama", "llama"))
    begun = http.post("/admin/models?wait=false", json={"source": str(source), "name": "new", "dtype": "bfloat16"})
    assert begun.status_code == 202
    assert begun.json()["state"] == "adding"
    second = {"source": str(source), "name": "second"}
    assert error_of(http.post("/admin/models", json=second), 409)["code"] == "store_busy"
    end = time.monotonic() + ADD_TIMEOUT
    while (add := adds(http)["new"])["state"] == "adding":
        assert time.monotonic() < end
    assert (add["state"], add["error"]) == ("added", None)
    assert add["done_bytes"] == add["total_bytes"] > 0
    http.post("/v1/completions", json={"model": "new", "prompt": "x"}).raise_for_status()
    assert error_of(http.post("/admin/models", json=second | {"name": "new"}), 409)["code"] == "model_exists"
    assert http.delete("/admin/models/new").raise_for_status().json() == {"removed": "new"}
    assert error_of(http.post("/v1/completions", json={"model": "new", "prompt": "x"}), 404)["param"] == "model"
    assert error_of(http.delete("/admin/models/new"), 404)["code"] == "model_not_found"


def test_a_checkpoint_that_cannot_be_served_is_told_with_the_reason(http: httpx.Client, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "t5", "t5")
    error = error_of(http.post("/admin/models", json={"source": str(source), "name": "t5"}), 400)
    assert (error["code"], error["param"]) == ("invalid_model", "source")
    assert "encoder-decoders" in error["message"]
    assert adds(http)["t5"]["state"] == "failed"
    assert "t5" not in [model["id"] for model in http.get("/v1/models").json()["data"]]


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"source": "/nowhere", "name": "x"}, 400, "source"),
        ({"source": "/tmp", "name": "../x"}, 400, "name"),
        ({"source": "/tmp", "name": "old"}, 409, "name"),
        ({"source": "/tmp"}, 400, "name"),
        ({"source": "/tmp", "name": "x", "dtype": "int4"}, 400, "dtype"),
        ({"source": "/tmp", "name": "x", "mood": 1}, 400, "mood"),
    ],
)
def test_what_shows_at_once_starts_no_process(
    http: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    assert error_of(http.post("/admin/models", json=body), status)["param"] == param
    assert "x" not in adds(http)


@pytest.mark.parametrize("source", ["/" + "x" * 300, "/tmp\0", "/proc/1/root/x"])
def test_a_source_that_cannot_be_looked_at_is_none(http: httpx.Client, source: str) -> None:
    assert error_of(http.post("/admin/models", json={"source": source, "name": "x"}), 400)["param"] == "source"


def test_an_add_whose_process_talks_nonsense_has_failed_and_is_in_nobodys_way(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/bin/echo")
    for _ in range(2):
        error = error_of(http.post("/admin/models", json={"source": str(tmp_path), "name": "odd"}), 503)
        assert "could not be followed" in error["message"]
    assert adds(http)["odd"]["state"] == "failed"


def test_what_libraries_print_is_not_taken_for_the_adds_word(tmp_path: Path) -> None:
    code = """
import sys, worker.add
def add_model(*_, progress, **__):
    print("a banner")
    progress(1, 2)
worker.add.add_model = add_model
from server.adding import main
main()
"""
    request = json.dumps({"store": str(tmp_path), "source": "s", "name": "n", "dtype": None, "tp": 1, "pp": 1})
    done = subprocess.run([sys.executable, "-c", code], input=request, capture_output=True, text=True, timeout=60)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"done": 1, "total": 2}, {"added": "n"}]
    assert "a banner" in done.stderr
