"""Every answer tells the request's id, and so does what is logged meanwhile, as text or as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import httpx
import pytest

from server import request_id
from server.logs import JsonFormatter, TextFormatter
from tests.server.fakes import FakeScheduler

BODY = {"model": "smol", "prompt": "Hello"}


def test_a_clients_own_id_comes_back(http: httpx.Client) -> None:
    answer = http.get("/v1/models", headers={"x-request-id": "trace/42:a"})
    assert answer.headers.get_list("x-request-id") == ["trace/42:a"]


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "ümlaut".encode("latin-1"), 'quo"te'])
def test_otherwise_a_new_one_is_made(http: httpx.Client, given: str | bytes | None) -> None:
    headers = {} if given is None else {"x-request-id": given}
    ids = [http.get("/v1/models", headers=headers).headers["x-request-id"] for _ in range(2)]
    assert all(re.fullmatch(r"[0-9a-f]{32}", one) for one in ids)
    assert ids[0] != ids[1]


def test_errors_and_streams_have_one_too(http: httpx.Client, scheduler: FakeScheduler) -> None:
    assert "x-request-id" in http.get("/nowhere").headers
    assert "x-request-id" in http.post("/v1/completions", content=b"{").headers
    assert "x-request-id" in http.post("/v1/completions", json={**BODY, "stream": True}).headers


def test_a_request_is_one_line_of_the_log_and_looks_at_metrics_are_none(
    http: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="server.request_id")
    http.post("/v1/completions", json={**BODY, "model": "unknown"})
    for path in ("/metrics", "/healthz", "/page/style.css", "/admin/decisions"):
        http.get(path).raise_for_status()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "server.request_id"]
    assert re.fullmatch(r"POST /v1/completions 404 in \d+\.\d{3} s", line)


@pytest.fixture
def record() -> Iterator[logging.LogRecord]:
    token = request_id.current.set("abc")
    try:
        raise ValueError("broken")
    except ValueError as error:
        info = (ValueError, error, error.__traceback__)
        yield logging.LogRecord("server.x", logging.WARNING, "x.py", 1, "about %s\nand more", ("it",), info)
    request_id.current.reset(token)


def test_a_line_for_people_names_the_request(record: logging.LogRecord) -> None:
    assert "WARNING server.x: [abc] about it" in TextFormatter().format(record)


def test_what_a_client_says_makes_no_line_of_its_own(record: logging.LogRecord) -> None:
    record.exc_info, record.args = None, ("a\r\n2026-01-01 INFO \x1b[2J\u2028ü",)
    line = TextFormatter().format(record)
    assert line.isprintable()
    assert line.endswith(r"about a\r\n2026-01-01 INFO \x1b[2J\u2028ü\nand more")


def test_a_line_for_a_collector_is_one_json_object(record: logging.LogRecord) -> None:
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("+00:00")
    assert "ValueError: broken" in entry.pop("exception")
    assert entry == {"level": "warning", "logger": "server.x", "message": "about it\nand more", "request_id": "abc"}
