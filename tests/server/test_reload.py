"""A configuration that is read again: what changed is taken over, what needs a restart is named, half of it never."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.config import load_config
from swapper.errors import Refused
from tests.server.conftest import ServerThread, publish
from tests.server.test_chat import HELLO
from tests.server.test_errors import error_of

BASE: dict[str, Any] = {
    "server": {"port": 0},
    "memory": {"pool": "50%", "page": "2MiB"},
    "models": {"smol": {"aliases": ["tiny"], "ttl": 60}, "other": {"pinned": True}},
}
Write = Callable[[dict[str, Any]], None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "gswapd.yaml"
    file.write_text(yaml.safe_dump(BASE | {"store": str(tmp_path / "store")}))
    return file


@pytest.fixture
def server(file: Path, smollm2: Path) -> Iterator[ServerThread]:
    with ServerThread(load_config(file)) as server:
        server.service.load = lambda: load_config(file)
        for name in ("smol", "other"):
            publish(server.store, name, smollm2)
        server.call(server.catalog.refresh())
        server.catalog.workers_are_up()
        server.call(server.catalog.settled())
        yield server


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def write(file: Path) -> Write:
    return lambda changed: file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changed)) and None


def reload(http: httpx.Client, **headers: str) -> list[str]:
    changed: list[str] = http.post("/admin/reload", headers=headers).raise_for_status().json()["changed"]
    return changed


def test_what_is_the_same_is_not_touched(http: httpx.Client, server: ServerThread) -> None:
    before = dict(server.catalog.models)
    jobs = list(server.scheduler.jobs)
    assert reload(http) == []
    assert server.catalog.models == before
    assert server.scheduler.jobs == jobs


def test_models_are_configured_anew(http: httpx.Client, server: ServerThread, write: Write) -> None:
    write({"models": {"smol": {"aliases": ["mini"], "ttl": 5, "priority": 3, "pinned": True}, "other": {}}})
    assert reload(http) == [
        "models.other.pinned",
        "models.smol.aliases",
        "models.smol.pinned",
        "models.smol.priority",
        "models.smol.ttl",
    ]
    served = server.scheduler.served["smol"]
    assert (served.ttl, served.priority) == (5, 3)
    server.call(server.catalog.settled())
    assert ("unpin", "other") in server.scheduler.jobs
    assert server.scheduler.jobs[-1] == ("pin", "smol")
    assert {model["id"] for model in http.get("/v1/models").json()["data"]} == {"smol", "mini", "other"}
    chat = {"messages": HELLO, "max_tokens": 1}
    http.post("/v1/chat/completions", json={"model": "mini"} | chat).raise_for_status()
    error_of(http.post("/v1/chat/completions", json={"model": "tiny"} | chat), 404)


def test_an_unpin_that_is_refused_keeps_no_other_change_back(
    http: httpx.Client, server: ServerThread, write: Write
) -> None:
    server.scheduler.refusals["unpin"] = Refused("queue_full", "Too much to do.")
    write({"models": {"other": {}, "smol": {"ttl": 5}}})
    assert reload(http) == ["models.other.pinned", "models.smol.aliases", "models.smol.ttl"]
    assert server.scheduler.served["smol"].ttl == 5
    assert reload(http) == []


def test_models_stay_known_when_the_store_changes_afterwards(
    http: httpx.Client, server: ServerThread, write: Write, smollm2: Path
) -> None:
    """A model that is configured otherwise is the same model: it is not removed and added again."""
    write({"models": {"smol": {"ttl": 7}}})
    reload(http)
    removed: list[str] = []
    server.scheduler.remove_model = removed.append  # type: ignore[method-assign]
    publish(server.store, "third", smollm2)
    server.call(server.catalog.refresh())
    assert removed == []
    assert server.scheduler.served["smol"].ttl == 7


def test_keys_and_bounds_hold_from_then_on(http: httpx.Client, write: Write) -> None:
    write({"server": {"port": 0, "api_key": "new", "admin_key": "root", "max_body": 2048}, "timeouts": {"request": 9}})
    assert reload(http) == ["server.api_key", "server.admin_key", "server.max_body", "timeouts.request"]
    assert http.get("/v1/models").status_code == 401
    bearer = {"authorization": "Bearer new"}
    assert http.get("/v1/models", headers=bearer).status_code == 200
    assert http.get("/admin/models").status_code == 401
    assert http.get("/admin/models", headers={"authorization": "Bearer root"}).status_code == 200
    body = {"model": "smol", "prompt": "x" * 4096}
    assert http.post("/v1/completions", json=body, headers=bearer).status_code == 413
    assert reload(http, authorization="Bearer root") == []


def test_what_needs_a_restart_is_named_and_nothing_is_taken_over(
    http: httpx.Client, server: ServerThread, write: Write
) -> None:
    write({"memory": {"pool": "40%", "page": "4MiB"}, "models": {"smol": {"ttl": 1}}})
    error = error_of(http.post("/admin/reload"), 409)
    assert error["code"] == "restart_needed"
    assert error["message"].startswith("memory.pool, memory.page need a restart")
    assert server.scheduler.served["smol"].ttl == 60


def test_a_file_that_is_wrong_changes_nothing(http: httpx.Client, server: ServerThread, file: Path) -> None:
    file.write_text("models: {smol: {ttl: -1}}")
    error = error_of(http.post("/admin/reload"), 400)
    assert "models.smol.ttl" in error["message"]
    assert server.scheduler.served["smol"].ttl == 60


def test_a_daemon_without_a_file_says_so(http: httpx.Client, server: ServerThread) -> None:
    server.service.load = None
    assert error_of(http.post("/admin/reload"), 409)["code"] == "no_config"
