"""The page of the API is the one that the code would write, and says something of every parameter."""

from __future__ import annotations

from pathlib import Path

from server.api_page import MEANINGS, page
from server.openai import schemas


def test_the_page_is_up_to_date() -> None:
    written = Path(__file__).parents[2] / "docs" / "api.md"
    assert written.read_text() == page(), "run: python -m server.api_page > docs/api.md"


def test_it_tells_of_parameters_that_there_are() -> None:
    bodies = (schemas.ChatRequest, schemas.CompletionRequest, schemas.EmbeddingsRequest)
    assert MEANINGS.keys() == {name for body in bodies for name in body.model_fields}
    assert "| `temperature` | ≥ 0, ≤ 2 | 0: the likeliest token |" in page()
    assert "`service_tier` (auto or default)" in page()
