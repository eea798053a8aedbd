"""Two keys: one for the API, one for operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai as sdk
import pytest

from server.auth import is_loopback
from server.config import ServerConfig
from server.daemon import warn_if_open
from tests.server.conftest import ServerThread, config, publish


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[ServerThread]:
    keys = {"api_key": "sk-ünï", "admin_key": "root"}
    with ServerThread(config(tmp_path_factory.mktemp("locked"), server=keys)) as server:
        publish(server.store, "smol", smollm2)
        yield server


def status(server: ServerThread, method: str, path: str, authorization: bytes | None) -> int:
    headers = {} if authorization is None else {b"authorization": authorization}
    return httpx.request(method, server.url + path, headers=headers).status_code


@pytest.mark.parametrize(
    "authorization", [None, b"Bearer wrong", b"Bearer", b"Bearer root", "sk-ünï".encode(), b"Basic x"]
)
@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions")]
)
def test_the_api_wants_its_key(locked: ServerThread, method: str, path: str, authorization: bytes | None) -> None:
    assert status(locked, method, path, authorization) == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/admin/models"), ("GET", "/admin/workers"), ("POST", "/admin/models/smol/evict")],
)
def test_operators_want_theirs(locked: ServerThread, method: str, path: str) -> None:
    assert status(locked, method, path, None) == 401
    assert status(locked, method, path, b"Bearer sk-x") == 401
    assert status(locked, method, path, b"bearer root") == 200


def test_the_right_key_opens(locked: ServerThread) -> None:
    assert status(locked, "GET", "/v1/models", "Bearer sk-ünï".encode()) == 200


def test_a_wrong_key_is_an_authentication_error_to_clients(locked: ServerThread) -> None:
    with locked.openai("wrong") as client, pytest.raises(sdk.AuthenticationError) as failure:
        client.models.list()
    assert failure.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
def test_probes_need_no_key(locked: ServerThread, path: str) -> None:
    assert status(locked, "GET", path, None) == 200


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("example.org", False),
    ],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_an_open_door_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_if_open(ServerConfig(host="127.0.0.1"))
        assert caplog.messages == []
        warn_if_open(ServerConfig.model_validate({"host": "0.0.0.0", "api_key": "sk"}))
    assert [message for message in caplog.messages if "admin_key" in message] == caplog.messages != []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:8321", "origin": "http://localhost:8321"}, 200),
        ({"host": "[::1]:8321"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"host": "evil.example:8321"}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 403),
        ({"host": "["}, 403),
    ],
)
def test_without_a_key_no_other_sites_page_is_an_operator(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    assert http.get("/admin/models", headers=headers).status_code == status
