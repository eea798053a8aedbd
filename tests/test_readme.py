"""What the README shows is what the program takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.config import load_config

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_configuration_example_is_valid(tmp_path: Path) -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    file = tmp_path / "gswapd.yaml"
    file.write_text(example)
    config = load_config(file)
    assert config.models["smollm2"].aliases == ("small", "default")


def test_every_command_of_the_readme_exists() -> None:
    named = set(re.findall(r"(?:`|^)gswapd ([a-z]+)", README, re.MULTILINE))
    assert {"add", "serve", "demo", "ps"} <= named
    for command in named:
        shown = CliRunner().invoke(app, [command, "--help"])
        assert shown.exit_code == 0, f"gswapd {command}"


@pytest.mark.parametrize("page", sorted(set(re.findall(r"\]\((docs/[a-z]+\.md)\)", README))))
def test_every_page_of_the_readme_exists(page: str) -> None:
    assert (Path(__file__).parents[1] / page).exists()
