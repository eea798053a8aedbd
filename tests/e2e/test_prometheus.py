"""A real Prometheus watches a real daemon at work, and every question that a dashboard asks has an answer."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deploy.dashboards import DASHBOARDS, PLACE, expressions
from server.demo.daemon import DaemonProcess
from tests.e2e.client import Client

PROMETHEUS = shutil.which("prometheus")
RULES = PLACE.parents[1] / "prometheus" / "gswapd.rules.yaml"
MODELS = ("smollm2", "smollm2-late", "smollm2-middle")

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs the package prometheus")


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[httpx.Client]:
    """One that scrapes `target` every second, and its API."""
    scraping = {"job_name": "gswapd", "static_configs": [{"targets": [target.removeprefix("http://")]}]}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [scraping],
    }
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [
        str(PROMETHEUS),
        f"--config.file={directory / 'prometheus.yaml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=10, transport=httpx.HTTPTransport(retries=10)) as api:
            yield api
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def answers(api: httpx.Client, query: str) -> list[dict[str, Any]]:
    answer = api.get("/api/v1/query", params={"query": query}).raise_for_status().json()
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return [one for one in found if one["value"][1] != "NaN"]


def test_every_query_of_the_dashboards_finds_something(config: dict[str, Any], tmp_path: Path) -> None:
    memory = {**config["memory"], "host_tier": "400MiB"}
    with (
        DaemonProcess(tmp_path, {**config, "memory": memory}) as daemon,
        prometheus(tmp_path, daemon.url) as api,
        Client(daemon.url) as client,
    ):
        client.until(lambda: api.get("/-/ready").is_success)  # it answers before it is
        client.until(lambda: answers(api, "up") == answers(api, "up == 1") != [])
        for _ in range(3):
            for model in MODELS:
                client.text(model, max_tokens=6)
        queries = [query for uid in DASHBOARDS for query in expressions(uid)]
        asked = {query: query.replace("$model", ".*").replace("$__rate_interval", "1m") for query in queries}

        def silent() -> list[str]:
            return [query for query, text in asked.items() if not answers(api, text)]

        client.until(lambda: not silent(), seconds=60)
        rules = api.get("/api/v1/rules").raise_for_status().json()["data"]["groups"]
        assert [rule["lastError"] for group in rules for rule in group["rules"] if rule.get("lastError")] == []
        assert answers(api, "sum(increase(gswapd_swap_in_seconds_count[1m])) > 0"), "models took turns in memory"
