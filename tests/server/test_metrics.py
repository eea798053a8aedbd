"""What a scrape shows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from scheduler.interface import LoadRecord, ModelPlace
from server.metrics import Metrics
from swapper.pager import SourceBytes
from tests.server.fakes import FakeScheduler
from tests.server.test_chat import HELLO, script

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(exposition: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def value(of: Samples, name: str, **labels: str) -> float:
    return of[f"gswapd_{name}", frozenset(labels.items())]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    """Of a daemon that knows the model `a`."""
    metrics = Metrics(clock)
    metrics.watch(FakeScheduler(), 5.0)
    metrics.know("a")
    return metrics


def scrape(metrics: Metrics) -> Samples:
    return samples(asyncio.run(metrics.exposition()).decode())


def loaded(seconds: float = 0.5, error: str | None = None) -> LoadRecord:
    sources = {"disk": SourceBytes(2, 100), "alias": SourceBytes(1, 50)}
    return LoadRecord("a", "default", 0.0, seconds, 3, sources, {"queue": 0.25, "read": 0.4}, error)


def test_series_that_are_known_beforehand_are_there_from_the_start(metrics: Metrics) -> None:
    shown = scrape(metrics)
    assert value(shown, "swap_in_seconds_count", model="a") == 0
    assert value(shown, "swap_in_stage_seconds_count", model="a", stage="drain") == 0
    assert value(shown, "swap_in_reloads_total", model="a") == 0
    assert value(shown, "requests_total", model="a", outcome="queue_full") == 0
    assert value(shown, "requests_rejected_total", reason="server_full") == 0
    assert value(shown, "swap_in_bytes_total", source="host") == 0
    assert value(shown, "wait_bound_seconds") == 5
    assert any(name == "gswapd_build_info" for name, _ in shown)


def test_swaps_are_measured_from_ten_milliseconds_to_five_minutes(metrics: Metrics) -> None:
    shown = scrape(metrics)
    bounds = [float(dict(labels)["le"]) for name, labels in shown if name == "gswapd_swap_in_seconds_bucket"]
    assert (min(bounds), sorted(bounds)[-2]) == (0.01, 300)


def test_the_scheduler_feeds_counters_and_histograms(metrics: Metrics) -> None:
    metrics.loaded(loaded())
    metrics.loaded(loaded(error="short read"))
    metrics.paged_out("a", 3, 2, 0.01, "memory", 12.0)
    metrics.request_started("a", 0.2, cold=False)
    metrics.request_started("a", 0.7, cold=True)
    metrics.request_ended("a", "stop", 1.5)
    metrics.request_ended("a", "no_memory", 0.1)
    shown = scrape(metrics)
    assert value(shown, "swap_in_seconds_count", model="a") == 1
    assert value(shown, "swap_in_seconds_sum", model="a") == 0.5
    assert value(shown, "swap_in_failures_total", model="a") == 1
    assert value(shown, "swap_in_bytes_total", source="disk") == 200
    assert value(shown, "swap_in_stage_seconds_sum", model="a", stage="read") == 0.4
    assert value(shown, "swap_outs_total", reason="memory") == 1
    assert value(shown, "swap_out_idle_seconds_sum", model="a") == 12
    assert value(shown, "request_queue_time_seconds_sum", model="a") == pytest.approx(0.9)
    assert value(shown, "request_load_wait_seconds_sum", model="a") == 0.7
    assert value(shown, "requests_total", model="a", outcome="stop") == 1
    assert value(shown, "requests_rejected_total", reason="no_memory") == 1
    assert value(shown, "e2e_request_latency_seconds_count", model="a") == 2


@pytest.mark.parametrize(("reason", "later", "reloads"), [("memory", 59, 1), ("memory", 61, 0), ("evicted", 1, 0)])
def test_a_load_soon_after_its_memory_was_taken_is_thrash(
    metrics: Metrics, clock: Clock, reason: str, later: float, reloads: int
) -> None:
    metrics.paged_out("a", 3, 3, 0.01, reason, 12.0)
    clock.now += later + 0.5
    metrics.loaded(loaded(seconds=0.5))
    assert value(scrape(metrics), "swap_in_reloads_total", model="a") == reloads


def test_a_model_that_went_leaves_no_series_however_late_it_is_heard_of(metrics: Metrics) -> None:
    metrics.loaded(loaded())
    metrics.forget("a")
    metrics.request_ended("a", "stop", 1.5)
    metrics.paged_out("a", 3, 3, 0.01, "removed", 12.0)
    shown = scrape(metrics)
    assert [key for key in shown if ("model", "a") in key[1]] == []
    assert value(shown, "swap_outs_total", reason="removed") == 1


def test_registries_are_separate() -> None:
    assert Metrics().registry is not Metrics().registry


def test_a_scrape_shows_what_is_true_now(
    http: httpx.Client, scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    http.get("/v1/models").raise_for_status()
    status: Any = {
        "running": 2,
        "waiting": 3,
        "resident_pages": 1,
        "kv_frames": 4,
        "oldest_wait": 1.5,
        "state": "loading",
        "places": (ModelPlace("default", "loading", 1, 4, 2), ModelPlace("other", "resident", 1, 5, 0)),
    }
    smol = replace(scheduler.statuses["smol"], group="default", **status)
    monkeypatch.setitem(scheduler.statuses, "smol", smol)
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    shown = samples(answer.text)
    assert value(shown, "requests_running", model="smol") == 2
    assert value(shown, "requests_waiting", model="smol") == 3
    assert value(shown, "model_resident_pages", model="smol") == 1
    assert value(shown, "worker_up", group="default", rank="0") == 1
    assert value(shown, "worker_read_path", group="default", rank="0", path="pread") == 1
    assert value(shown, "worker_restarts_total", group="default", rank="0") == 0
    assert value(shown, "oldest_wait_seconds", model="smol") == 1.5
    states = {state: value(shown, "model_state", model="smol", state=state) for state in ("loading", "resident")}
    assert states == {"loading": 1, "resident": 0}
    uses = {use: value(shown, "frames", group="default", rank="0", use=use) for use in ("free", "kv", "weights")}
    assert uses == {"free": 4, "kv": 4, "weights": 2}


def test_answers_count_their_tokens(
    http: httpx.Client, openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    def counts() -> list[float]:
        shown = samples(http.get("/metrics").text)
        names = ("generation_tokens_total", "prompt_tokens_total")
        names += ("time_to_first_token_seconds_count", "inter_token_latency_seconds_count")
        return [shown.get((f"gswapd_{name}", frozenset({("model", "smol")})), 0.0) for name in names]

    scheduler.script = script(tokenizer, "One two")
    before = counts()
    messages: Any = HELLO
    answer = openai.chat.completions.create(model="smol", messages=messages)
    assert answer.usage is not None
    assert [after - b for after, b in zip(counts(), before, strict=True)] == [2, answer.usage.prompt_tokens, 1, 1]


def test_names_that_are_no_models_never_become_labels(http: httpx.Client, openai: OpenAI) -> None:
    with pytest.raises(sdk.NotFoundError):
        openai.completions.create(model="made-up-name", prompt="a")
    http.post("/admin/models/made-up-name/load")
    assert "made-up-name" not in http.get("/metrics").text
