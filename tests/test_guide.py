"""What the guide has its reader type is what the program takes, and the examples are valid."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from server.cli import app
from server.config import load_config

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs" / "guide.md").read_text()
COMMANDS = re.findall(r"^\$ (.*?(?:\\\n.*?)*)(?:  +#.*)?$", GUIDE, re.MULTILINE)
OF_GSWAPD = [shlex.split(command.split(" > ")[0])[1:] for command in COMMANDS if re.match("gswapd [a-z]", command)]


@pytest.mark.parametrize("words", OF_GSWAPD, ids=" ".join)
def test_its_commands_are_understood(words: list[str]) -> None:
    gswapd = typer.main.get_command(app)
    with gswapd.make_context("gswapd", list(words)) as context:
        name, command, rest = gswapd.resolve_command(context, words)  # type: ignore[attr-defined]
        command.make_context(name, rest, parent=context)


def test_every_task_of_it_is_there() -> None:
    named = {words[0] for words in OF_GSWAPD}
    assert named >= {"add", "serve", "ps", "why", "pin", "evict", "load", "unpin", "profile", "simulate", "replay"}


def test_its_files_and_modules_exist() -> None:
    files = set(re.findall(r"~/gswapd/([\w/.-]+)", "\n".join(COMMANDS)))
    assert len(files) >= 3
    assert [file for file in files if file != ".venv/bin/activate" and not (ROOT / file).exists()] == []
    assert [link for link in re.findall(r"\]\((?!http)([^)#]+)", GUIDE) if not (ROOT / "docs" / link).exists()] == []
    modules = re.findall(r"python -m ([\w.]+)", GUIDE)
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_the_examples_configuration_is_valid() -> None:
    config = load_config(ROOT / "examples" / "gswapd.yaml")
    assert (config.memory.page, config.models["smollm2"].aliases) == (2 << 20, ("default",))
