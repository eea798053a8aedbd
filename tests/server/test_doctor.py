"""The doctor says what is wrong with a machine, and what to do about it."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from server import doctor
from server.cli import app
from server.config import Config


def config(tmp_path: Path, **sections: Any) -> Config:
    return Config(store=tmp_path / "store", **{"memory": {"pool": "64MiB", "page": "2MiB"}} | sections)


def test_every_check_finds_something_and_what_is_wrong_comes_with_advice(tmp_path: Path) -> None:
    findings = list(doctor.examine(config(tmp_path)))
    assert len({finding.name for finding in findings}) == len(findings) == 10
    assert all(finding.found for finding in findings)
    assert all(finding.advice for finding in findings if finding.verdict == "problem")


def test_more_memory_than_there_is(tmp_path: Path) -> None:
    found = doctor.free_memory(config(tmp_path, memory={"pool": "900TiB"}, cluster={"device": "cpu"}))
    assert found.verdict == "problem"
    assert "memory.pool" in found.advice


def test_a_host_tier_that_shared_memory_cannot_hold(tmp_path: Path) -> None:
    found = doctor.shared_memory(config(tmp_path, memory={"pool": "64MiB", "page": "2MiB", "host_tier": "900TiB"}))
    assert found.verdict == "problem"
    assert "--shm-size=921601g" in found.advice


def test_every_rank_has_a_host_tier_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: doctor.shutil._ntuple_diskusage(0, 0, 3 << 30))  # type: ignore[attr-defined]
    memory = {"pool": "64MiB", "page": "2MiB", "host_tier": "1GiB"}
    assert doctor.shared_memory(config(tmp_path, memory=memory, cluster={"groups": [{"tp": 2}]})).verdict == "ok"
    assert doctor.shared_memory(config(tmp_path, memory=memory, cluster={"groups": [{"tp": 4}]})).verdict == "problem"


def test_too_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    found = doctor.open_files(config(tmp_path))
    assert (found.verdict, "ulimit -n 8192" in found.advice) == ("problem", True)


def test_a_gpu_that_is_wanted_and_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GPU_DEVICE", tmp_path / "none")
    assert doctor.driver(config(tmp_path, cluster={"device": "cuda"})).verdict == "problem"
    assert doctor.driver(config(tmp_path)).verdict == "note"


def test_the_disk_is_read_past_the_page_cache(tmp_path: Path) -> None:
    shard = tmp_path / "store" / "models" / "m" / "rank-0.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(bytes(3 << 20))
    found = doctor.disk_speed(config(tmp_path))
    assert "GB/s" in found.found or "not measured" in found.found
    assert "1 shard files" in doctor.storage(config(tmp_path)).found


def test_the_command_ends_with_1_where_there_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gswapd.yaml").write_text(f"store: {tmp_path}\nmemory: {{pool: 900TiB}}\n")
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert "problem" in done.output
    assert "→ Make memory.pool or memory.host_tier smaller" in done.output
    findings = [line for line in done.output.splitlines() if not line.startswith(" ")]
    assert {line[7:9] for line in findings} == {"  "}, "findings begin in one column, whatever the verdict"
    assert all(line[9] != " " for line in findings)
