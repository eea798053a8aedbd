"""Commands that watch: the daemon's events as a screen, and names for the shell's completion."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from scheduler.interface import GroupMemory, Holding, LoadRecord
from server.cli import app
from server.cli.remote import RequestRefused, Unreachable
from server.cli.watching import Board, follow, screen
from tests.server.conftest import ServerThread, config


def drawn(board: Board) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(screen(board))
    return console.export_text()


def test_a_board_follows_the_daemon(server: ServerThread) -> None:
    held = (Holding(("smol", "tuned"), "weights", 6), Holding(("smol",), "kv", 2))
    server.scheduler.maps["default"] = GroupMemory("default", 1, True, 16, 1 << 20, held)
    server.call(server.catalog.refresh())
    boards = follow(server.url + "/", "")
    board = next(boards)
    assert [model["name"] for model in board.models] == ["org/base", "smol", "tuned"]
    server.loop.call_soon_threadsafe(server.observers.loaded, LoadRecord("smol", "default", 9.0, 0.5, 3, {}, {}))
    assert any("smol paged in 3 pages in 0.5 s" in drawn(one) for one in islice(boards, 3))
    text = drawn(board)
    assert "live" in text
    assert f"default      {'█' * 22}{'▒' * 8}{'·' * 30} 8.4 MB of 16.8 MB" in text
    boards.close()
    server.scheduler.maps.clear()


def test_what_goes_from_the_state_goes_from_the_board() -> None:
    board = Board()
    board.hear("state", {"models": {"a": {"name": "a"}, "b": {"name": "b"}}})
    board.hear("change", {"models": {"a": None, "b": {"name": "b", "running": 1}}})
    assert board.models == [{"name": "b", "running": 1}]


def test_a_daemon_that_is_not_there_and_one_that_wants_a_key(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match="gswapd serve"):
        next(follow("http://127.0.0.1:9", ""))
    with ServerThread(config(tmp_path, server={"admin_key": "sesame"})) as server:
        with pytest.raises(RequestRefused, match="API key"):
            next(follow(server.url, ""))
        assert next(follow(server.url, "sesame")).models == []


@pytest.mark.parametrize("command", [["top"], ["ps", "--watch"]])
def test_it_is_on_a_terminal_until_ctrl_c(server: ServerThread, command: list[str]) -> None:
    server.call(server.catalog.refresh())
    master, terminal = pty.openpty()
    arguments = [sys.executable, "-m", "server.cli", *command, "--url", server.url]
    process = subprocess.Popen(arguments, stdout=terminal, stderr=terminal, env={**os.environ, "COLUMNS": "100"})
    os.close(terminal)
    seen = b""
    while b"org/base" not in seen:
        seen += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    os.close(master)


def completed(words: str, **environment: str) -> list[str]:
    asked = {"_GSWAPD_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = CliRunner().invoke(app, [], env={**asked, **environment}, prog_name="gswapd")
    return done.output.split()


def test_the_shell_completes_commands_options_and_names_of_models(server: ServerThread) -> None:
    server.call(server.catalog.refresh())
    assert completed("gswapd unp") == ["unpin"]
    assert "--admin-key" in completed("gswapd ps --a")
    assert completed("gswapd pin s", GSWAPD_URL=server.url) == ["smol"]
    assert completed("gswapd pin s", GSWAPD_URL="http://127.0.0.1:9") == []
    assert completed(f"gswapd verify --store {server.store.root} t") == ["tuned"]
