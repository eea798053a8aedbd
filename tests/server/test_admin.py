"""The operator's routes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from scheduler.interface import LoadRecord, ModelDecision
from server.cli import app
from swapper.errors import Refused
from swapper.pager import SourceBytes
from tests.server.conftest import ServerThread
from tests.server.fakes import FakeScheduler
from tests.server.test_errors import error_of


@pytest.fixture(autouse=True)
def _as_it_was(server: ServerThread, http: httpx.Client) -> Iterator[None]:
    http.get("/v1/models").raise_for_status()  # reads the store
    before = dict(server.scheduler.statuses)
    yield
    server.scheduler.statuses = before


def model(http: httpx.Client, name: str) -> dict[str, Any]:
    listed = http.get("/admin/models").raise_for_status().json()["models"]
    return next(entry for entry in listed if entry["name"] == name)


def test_models_tell_their_state(http: httpx.Client, scheduler: FakeScheduler) -> None:
    load = LoadRecord("smol", "default", 1.5, 0.25, 1, {"disk": SourceBytes(1, 4096)}, {"read": 0.2})
    scheduler._change("smol", waiting=2, running=1, kv_frames=3, last_used=9.5, last_load=load)
    assert model(http, "smol") == {
        "name": "smol",
        "group": None,
        "state": "absent",
        "reason": None,
        "pinned": False,
        "resident_pages": 0,
        "total_pages": 1,
        "resident_bytes": 0,
        "total_bytes": 4096,
        "waiting": 2,
        "running": 1,
        "kv_frames": 3,
        "last_used": 9.5,
        "oldest_wait": 0.0,
        "places": [],
        "aliases": ["tiny", "gpt-4o"],
        "profiled": None,
        "last_load": {
            "at": 1.5,
            "group": "default",
            "seconds": 0.25,
            "pages": 1,
            "sources": {"disk": {"pages": 1, "bytes": 4096}},
            "stages": {"read": 0.2},
            "error": None,
        },
    }


def test_a_removed_model_is_shown_as_long_as_it_holds_memory(http: httpx.Client, scheduler: FakeScheduler) -> None:
    scheduler.statuses["left"] = replace(scheduler.statuses["smol"], name="left", resident_pages=1)
    assert model(http, "left")["resident_pages"] == 1
    scheduler._change("left", resident_pages=0)
    assert "left" not in {model["name"] for model in http.get("/admin/models").json()["models"]}


def test_workers(http: httpx.Client) -> None:
    (worker,) = http.get("/admin/workers").raise_for_status().json()["workers"]
    assert (worker["group"], worker["rank"], worker["state"], worker["pid"]) == ("default", 0, "up", 4321)
    assert worker["heartbeat"]["frames"] == 10


@pytest.mark.parametrize(
    ("action", "field", "value"),
    [("load", "state", "resident"), ("evict", "state", "absent"), ("pin", "pinned", True), ("unpin", "pinned", False)],
)
def test_actions_answer_with_what_came_of_them_however_often(
    http: httpx.Client, scheduler: FakeScheduler, action: str, field: str, value: object
) -> None:
    for _ in range(3):
        answer = http.post(f"/admin/models/smol/{action}")
        assert answer.status_code == 200
        assert answer.json()["name"] == "smol"
        assert answer.json()[field] == value
    assert scheduler.jobs == [(action, "smol")] * 3


@pytest.mark.parametrize("name", ["tiny", "org/base", "org%2Fbase"])
def test_actions_take_aliases_and_slashes(http: httpx.Client, scheduler: FakeScheduler, name: str) -> None:
    assert http.post(f"/admin/models/{name}/load").json()["state"] == "resident"
    assert scheduler.jobs == [("load", "smol" if name == "tiny" else "org/base")]


@pytest.mark.parametrize("action", ["load", "evict", "pin", "unpin"])
def test_without_waiting_the_answer_comes_first(server: ServerThread, http: httpx.Client, action: str) -> None:
    server.scheduler.held_jobs = asyncio.Event()
    for _ in range(2):  # the second finds the first under way
        answer = http.post(f"/admin/models/smol/{action}", params={"wait": "false"})
        assert answer.status_code == 202
        assert answer.json()["state"] == "absent"
    server.loop.call_soon_threadsafe(server.scheduler.held_jobs.set)
    assert http.post(f"/admin/models/smol/{action}").status_code == 200
    assert server.scheduler.jobs == [(action, "smol")] * 2


def test_a_refusal_nobody_waits_for_is_logged(
    server: ServerThread, http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.scheduler.refusals["load"] = Refused("no_memory", "It does not fit.")
    assert http.post("/admin/models/smol/load", params={"wait": "false"}).status_code == 202
    assert error_of(http.post("/admin/models/smol/load"), 503)["code"] == "no_memory"
    assert "load smol was refused: It does not fit." in caplog.messages


def test_a_pin_that_cannot_be_kept_is_a_conflict(http: httpx.Client, scheduler: FakeScheduler) -> None:
    scheduler.refusals["pin"] = Refused("no_memory", "The pins need 9 bytes of 8.")
    error = error_of(http.post("/admin/models/smol/pin"), 409)
    assert error["message"] == "The pins need 9 bytes of 8."
    assert model(http, "smol")["pinned"] is False


def test_evicting_a_pinned_model_is_a_conflict(http: httpx.Client, scheduler: FakeScheduler) -> None:
    scheduler.refusals["evict"] = Refused("pinned", "It is pinned.")
    assert error_of(http.post("/admin/models/smol/evict"), 409)["code"] == "pinned"


@pytest.mark.parametrize("action", ["load", "evict", "pin", "unpin"])
def test_an_unknown_model(http: httpx.Client, action: str) -> None:
    assert error_of(http.post(f"/admin/models/nope/{action}"), 404)["code"] == "model_not_found"


def test_a_bad_query_is_named(http: httpx.Client) -> None:
    assert error_of(http.post("/admin/models/smol/load", params={"wait": "maybe"}), 400)["param"] == "wait"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/admin/models/smol/pin"), ("GET", "/admin/models"), ("GET", "/admin/workers")]
)
def test_an_unknown_query_is_named(http: httpx.Client, method: str, path: str) -> None:
    assert error_of(http.request(method, path, params={"wiat": "false"}), 400)["param"] == "wiat"


def test_readiness_is_the_schedulers_progress(server: ServerThread, http: httpx.Client) -> None:
    answer = http.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["workers"] == [
        {"group": "default", "rank": 0, "state": "up", "reason": None, "host_tier": None}
    ]
    server.scheduler.live = False
    try:
        assert http.get("/readyz").status_code == 503
        assert http.get("/healthz").status_code == 200
    finally:
        server.scheduler.live = True


def test_a_draining_server_is_not_ready(server: ServerThread, http: httpx.Client) -> None:
    server.service.draining = True  # and not `begin_draining`, which is for good
    try:
        assert http.get("/readyz").json()["draining"] is True
        assert http.get("/readyz").status_code == 503
    finally:
        server.service.draining = False


def test_the_command_line_tells_why(server: ServerThread) -> None:
    at = datetime(2026, 1, 2, 3, 4, 5, 678_000).timestamp()
    server.scheduler.decided += [
        ModelDecision("smol", at + 1, "waiting", "Waits for 3 frames that tuned holds."),
        ModelDecision("smol", at, "evicted", "Gave 3 frames to tuned."),
    ]

    def told(model: str) -> list[str]:
        return CliRunner().invoke(app, ["why", model, "--url", server.url]).output.splitlines()

    assert told("tiny") == [
        "03:04:05.678  smol: Gave 3 frames to tuned.",
        "03:04:06.678  smol: Waits for 3 frames that tuned holds.",
    ]
    assert told("tuned") == ["Nothing was decided yet."]


@pytest.mark.parametrize("query", ["torch_profiler=nonsense", "wait=false"])
def test_a_recording_is_asked_for_in_words_that_are_known(http: httpx.Client, query: str) -> None:
    answer = http.post(f"/admin/groups/default/recording?{query}")
    assert query.partition("=")[0] in str(error_of(answer, 400))
