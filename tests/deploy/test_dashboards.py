"""The dashboards are what the code builds, and they and the rules speak of metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.dashboards import DASHBOARDS, PLACE, built, expressions
from server.metric_families import ASKED, FED

RULES = PLACE.parents[1] / "prometheus"
PROMTOOL = shutil.which("promtool")


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_they_are_current(uid: str) -> None:
    assert (PLACE / f"{uid}.json").read_text() == built(uid), "write them anew: python -m deploy.dashboards"


def test_every_one_has_a_query_in_every_panel() -> None:
    for uid in DASHBOARDS:
        panels = [panel for panel in json.loads(built(uid))["panels"] if panel["type"] != "row"]
        assert panels
        assert all(target["expr"] for panel in panels for target in panel["targets"])
        assert sum(len(panel["targets"]) for panel in panels) == len(expressions(uid))


def test_what_they_and_the_rules_ask_for_is_there() -> None:
    rules = (RULES / "gswapd.rules.yaml").read_text()
    texts = [rules, *(expression for uid in DASHBOARDS for expression in expressions(uid))]
    asked = {name for text in texts for name in re.findall(r"(?<![\w:])gswapd_\w+", text)}
    parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    there = {family.exposed + part for family in (*FED, *ASKED) for part in parts[family.kind]}
    assert asked - there == set()
    recorded = set(re.findall(r"record: (\S+)", rules))
    assert {name for text in texts for name in re.findall(r"\w+:\w+:\w+", text)} <= recorded


@pytest.mark.skipif(PROMTOOL is None, reason="needs the package prometheus")
@pytest.mark.parametrize("command", [["check", "rules", "gswapd.rules.yaml"], ["test", "rules", "gswapd.test.yaml"]])
def test_promtool_finds_the_rules_right(command: list[str]) -> None:
    done = subprocess.run([str(PROMTOOL), *command], cwd=RULES, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(PROMTOOL is None, reason="needs the package prometheus")
def test_promtool_finds_the_configuration_right(tmp_path: Path) -> None:
    shutil.copytree(RULES, tmp_path, dirs_exist_ok=True)
    done = subprocess.run([str(PROMTOOL), "check", "config", "prometheus.yaml"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_tried() -> None:
    alerts = set(re.findall(r"alert: (\S+)", (RULES / "gswapd.rules.yaml").read_text()))
    tried = re.findall(r"alertname: ([^,\s}]+)", (RULES / "gswapd.test.yaml").read_text())
    assert alerts == set(tried)
