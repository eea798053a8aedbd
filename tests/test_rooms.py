"""The rooms of the house: imports go down only, and the daemon's own process needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("swapper", "engine", "worker", "scheduler", "server")  # from the ground up
PURE = ("scheduler/core", "scheduler/policy")


def imported_rooms(file: Path) -> set[str]:
    """Dotted names of our own modules that a file imports, wherever in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return {name for name in names if name.split(".")[0] in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down_only(room: str) -> None:
    below = set(ROOMS[: ROOMS.index(room) + 1])
    for file in (ROOT / room).rglob("*.py"):
        above = {name for name in imported_rooms(file) if name.split(".")[0] not in below}
        assert not above, f"{file.relative_to(ROOT)} imports {sorted(above)} from above"


@pytest.mark.parametrize("place", PURE)
def test_decisions_are_pure(place: str) -> None:
    forbidden = {"asyncio", "time", "datetime", "random", "threading", "ray", "torch", "logging"}
    for file in (ROOT / place).rglob("*.py"):
        ours = {name for name in imported_rooms(file) if not name.startswith(("scheduler.core", "scheduler.policy"))}
        assert not ours, f"{file.relative_to(ROOT)} imports {sorted(ours)}"
        tops = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            if (isinstance(node, ast.ImportFrom) and node.module) or isinstance(node, ast.Import)
        }
        assert not tops & forbidden, f"{file.relative_to(ROOT)} imports {sorted(tops & forbidden)}"


def test_the_daemon_serves_without_torch() -> None:
    code = "import sys, server.backend, server.daemon; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_the_command_line_answers_without_the_heavy_imports() -> None:
    code = "import sys, server.cli; sys.exit(bool({'torch', 'ray', 'fastapi', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
