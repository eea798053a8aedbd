"""The page of metrics says what the code says."""

from pathlib import Path

from server.metrics_page import page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "write it anew: python -m server.metrics_page > docs/metrics.md"
