"""What a scrape shows."""

from __future__ import annotations

from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from scheduler.interface import LoadRecord
from server.metrics import Metrics
from swapper.pager import SourceBytes
from tests.server.conftest import ServerThread
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


@pytest.fixture
def fed() -> Metrics:
    metrics = Metrics()
    metrics.watch(FakeScheduler())
    sources = {"disk": SourceBytes(2, 100), "alias": SourceBytes(1, 50)}
    metrics.loaded(LoadRecord("a", "default", 0.0, 0.5, 3, sources, {"read": 0.4}))
    metrics.loaded(LoadRecord("a", "default", 0.0, 0.5, 3, {}, {}, error="short read"))
    metrics.paged_out("a", 3, 2, 0.01, "memory", 12.0)
    metrics.request_started("a", 0.2)
    metrics.request_ended("a", "stop", 1.5)
    metrics.request_ended("a", "no_memory", 0.1)
    metrics.worker_restarted("default")
    return metrics


def test_the_scheduler_feeds_counters_and_histograms(fed: Metrics) -> None:
    shown = samples(fed.exposition().decode())
    assert value(shown, "swap_in_seconds_count", model="a") == 1
    assert value(shown, "swap_in_seconds_sum", model="a") == 0.5
    assert value(shown, "swap_in_failures_total", model="a") == 1
    assert value(shown, "swap_in_bytes_total", source="disk") == 100
    assert value(shown, "swap_in_bytes_total", source="alias") == 50
    assert value(shown, "swap_in_stage_seconds_total", stage="read") == 0.4
    assert value(shown, "swap_outs_total", reason="memory") == 1
    assert value(shown, "swap_out_idle_seconds_sum", model="a") == 12
    assert value(shown, "request_queue_time_seconds_sum", model="a") == 0.2
    assert value(shown, "requests_total", model="a", outcome="stop") == 1
    assert value(shown, "requests_total", model="a", outcome="no_memory") == 1
    assert value(shown, "e2e_request_latency_seconds_count", model="a") == 2
    assert value(shown, "worker_restarts_total", group="default") == 1
    assert any(name == "gswapd_build_info" for name, _ in shown)


def test_a_model_that_went_leaves_no_series(fed: Metrics) -> None:
    fed.forget("a")
    assert [key for key in samples(fed.exposition().decode()) if ("model", "a") in key[1]] == []


def test_registries_are_separate() -> None:
    assert Metrics().registry is not Metrics().registry


def test_a_scrape_shows_what_is_true_now(server: ServerThread, http: httpx.Client, scheduler: FakeScheduler) -> None:
    http.get("/v1/models").raise_for_status()
    scheduler._change("smol", running=2, waiting=3, resident_pages=1, kv_frames=4, group="default")
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    shown = samples(answer.text)
    assert value(shown, "requests_running", model="smol") == 2
    assert value(shown, "requests_waiting", model="smol") == 3
    assert value(shown, "model_resident_pages", model="smol") == 1
    assert value(shown, "worker_up", group="default", rank="0") == 1
    uses = {use: value(shown, "frames", group="default", rank="0", use=use) for use in ("free", "kv", "weights")}
    assert uses == {"free": 4, "kv": 4, "weights": 2}


def test_answers_count_their_tokens(
    http: httpx.Client, openai: OpenAI, scheduler: FakeScheduler, tokenizer: Tokenizer
) -> None:
    def counts() -> list[float]:
        shown = samples(http.get("/metrics").text)
        names = ("generation_tokens_total", "prompt_tokens_total", "time_to_first_token_seconds_count")
        return [shown.get((f"gswapd_{name}", frozenset({("model", "smol")})), 0.0) for name in names]

    scheduler.script = script(tokenizer, "One two")
    before = counts()
    messages: Any = HELLO
    answer = openai.chat.completions.create(model="smol", messages=messages)
    assert answer.usage is not None
    assert [after - b for after, b in zip(counts(), before, strict=True)] == [2, answer.usage.prompt_tokens, 1]


def test_names_that_are_no_models_never_become_labels(http: httpx.Client, openai: OpenAI) -> None:
    with pytest.raises(sdk.NotFoundError):
        openai.completions.create(model="made-up-name", prompt="a")
    http.post("/admin/models/made-up-name/load")
    assert "made-up-name" not in http.get("/metrics").text
