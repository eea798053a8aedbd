"""Before anything is measured: options that cannot be kept are refused, and a private daemon is like the configured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import unstyle
from typer.testing import CliRunner

from server.cli import app
from server.config import Config, load_config
from server.profile import offline
from server.profile.offline import private_daemon, private_settings

IMAGE: Any = SimpleNamespace(manifest=SimpleNamespace(tp=2, pp=1))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no configuration file of ours


def configured(**groups: Any) -> Config:
    return Config.model_validate(
        {
            "memory": {"pool": "62.5%", "page": "4MiB"},
            "cluster": {"ray_address": "auto", "groups": [{"name": "one"}, {"name": "two", "tp": 2, **groups}]},
        }
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--group", "default"), "--group with --url"),
        (("--url", "http://localhost:1", "--memory", "1GiB"), "without --url"),
        (("--switch", "nonsense"), "no switch 'nonsense'"),
        (("other", "--trace", "trace.json"), "with a single"),
        (("other", "--torch-profiler", "torch.json.gz"), "with a single"),
        (("--report", "not/there.html"), "no directory not"),
        (("--break-at", "3"), "32 tokens"),
        (("--url", "localhost"), "no HTTP URL"),
    ],
)
def test_options_that_cannot_be_kept_are_refused_at_once(options: tuple[str, ...], why: str) -> None:
    done = CliRunner().invoke(app, ["profile", "llama", *options])
    told = unstyle(done.output) + str(done.exception)
    assert done.exit_code != 0
    assert why in told


def test_the_key_in_the_environment_is_no_wrong_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSWAPD_API_KEY", "k")
    load_config()


def settings(config: Config, one_pool: bool = False) -> dict[str, Any]:
    return private_settings(config, Path("/store"), IMAGE, 8, {"graphs": False}, one_pool)


def test_a_private_daemon_has_the_memory_of_the_configured_group() -> None:
    alone = settings(configured(pool="40%", host_tier="1GiB", device="cpu", node="10.0.0.7"))
    (group,) = alone["cluster"]["groups"]
    assert group == {"name": "profile", "tp": 2, "pp": 1, "pool": "40%", "host_tier": 1 << 30, "device": "cpu"}
    assert alone["memory"] == {"pool": "62.5%", "page": 4 << 20}
    assert alone["cluster"]["graphs"] is False
    assert Config.model_validate(alone).memory.gpu_share == 0.625


def test_memory_on_the_command_line_goes_for_the_group() -> None:
    (group,) = settings(configured(pool="40%"), one_pool=True)["cluster"]["groups"]
    assert "pool" not in group


def test_the_environment_does_not_go_before_what_a_private_daemon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Started:
        url = "http://daemon"

        def __init__(self, directory: Path, settings: dict[str, Any], *, env: dict[str, str]) -> None:
            assert "GSWAPD_CLUSTER__GROUPS" not in env
            assert env["PATH"]

        def __enter__(self) -> Started:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setenv("GSWAPD_CLUSTER__GROUPS", "[]")
    monkeypatch.setattr(offline, "DaemonProcess", Started)
    with private_daemon(configured(), Path("/store"), IMAGE, 8, {}, False) as url:
        assert url == "http://daemon"
