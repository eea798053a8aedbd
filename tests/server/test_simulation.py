"""`gswapd simulate` and `gswapd replay`: what a person is told, without a cluster."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from swapper.errors import GswapdError
from tests.scheduler.test_journal import Journaled

MADE_UP = ("--models", "4", "--size", "1GiB", "--memory", "2GiB", "--rate", "2", "--output", "1", "--seconds", "60")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gswapd.yaml, and no store with models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GSWAPD_STORE", str(tmp_path / "store"))


def gswapd(*arguments: object, status: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: object) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_person_sees_what_would_happen_and_a_program_gets_it_whole(tmp_path: Path) -> None:
    told = gswapd("simulate", *MADE_UP, "--report", "report.html")
    assert "4 models of 32 pages of 32 MiB, on 1 group of 64 frames" in told
    assert "model-04" in told
    figures = json.loads(gswapd("simulate", *MADE_UP, "--json"))
    assert figures["requests"] == sum(model["requests"] for model in figures["models"].values())
    assert figures["failed"] == 0
    assert 0 < figures["p50"] <= figures["p99"]
    assert figures["bytes"]["host"] > 0


def test_the_report_is_one_page_that_needs_nothing_else(tmp_path: Path) -> None:
    gswapd("simulate", *MADE_UP, "--groups", "2", "--report", "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert not page.open, "every tag is closed"
    assert page.tags.count("svg") == 3, "a picture of latencies, and one of each group's memory"
    assert "http" not in text
    assert "script" not in page.tags


def test_more_groups_and_a_quicker_link_help(tmp_path: Path) -> None:
    def mean(*options: str) -> float:
        return float(json.loads(gswapd("simulate", *MADE_UP, *options, "--json"))["mean"])

    slow = mean("--bandwidth", "1GB")
    assert mean("--bandwidth", "10GB") < slow / 2
    assert mean("--bandwidth", "1GB", "--groups", "2") < slow


def test_a_trace_is_simulated(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,model,prompt_tokens,output_tokens\n0,model-01,9,3\n5,model-02,9,2\n")
    figures = json.loads(gswapd("simulate", *MADE_UP[:6], "--workload", "trace.csv", "--json"))
    assert figures["models"]["model-02"]["requests"] == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ((), "There are no models in"),
        ((*MADE_UP, "--report", "none/report.html"), r"report\.html cannot be written"),
        ((*MADE_UP, "--workload", "none.csv"), r"none\.csv"),
        ((*MADE_UP, "--policy", "best"), "no policy 'best'; there are gswapd, lru, computron"),
        ((*MADE_UP, "--bandwidth", "fast"), "'fast' is not a size"),
    ],
)
def test_what_cannot_be_simulated_is_told(options: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(GswapdError, match=complaint):
        gswapd("simulate", *options)


def test_a_model_that_fits_nowhere_fails_with_the_reason() -> None:
    assert "requests failed: no_memory" in gswapd("simulate", *MADE_UP[:5], "1GiB", "--seconds", "10", "--size", "3GiB")


def test_a_trace_of_other_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("time,model,prompt_tokens,output_tokens\n0,other,9,3\n")
    with pytest.raises(GswapdError, match="asks for other, but there are only model-01"):
        gswapd("simulate", *MADE_UP, "--workload", "trace.csv")


def test_a_journal_is_repeated_and_one_model_followed(tmp_path: Path) -> None:
    count = Journaled(tmp_path / "journal").run(10.0)
    assert f"{count:,} events, and all decisions are the same" in gswapd("replay", "journal")
    assert "PageIn(group='g0', model='a'" in gswapd("replay", "journal", "--model", "a")


def test_a_decision_that_is_another_one_now_is_shown(tmp_path: Path) -> None:
    Journaled(tmp_path / "journal").run(10.0)
    path = tmp_path / "journal"
    path.write_text(path.read_text().replace('"extent_pages":1', '"extent_pages":3'))
    assert "is another one than it was. Now:" in gswapd("replay", "journal", status=1)


def test_a_journal_that_is_not_there_is_told() -> None:
    with pytest.raises(GswapdError, match="There is no journal none"):
        gswapd("replay", "none")
