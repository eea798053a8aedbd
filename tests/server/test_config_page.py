"""The page of all settings is the one that the code would write."""

from __future__ import annotations

from pathlib import Path

from server.config_page import page


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert written.read_text() == page(), "run: python -m server.config_page > docs/configuration.md"


def test_every_section_and_its_variables_are_there() -> None:
    assert "| `server.port` | `8321` |" in page()
    assert "GSWAPD_MEMORY__POOL" in page()
    assert "`models.NAME.defaults.temperature`" in page()
