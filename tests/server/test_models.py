"""/v1/models: what can be asked for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from openai import NotFoundError, OpenAI

from tests.server.conftest import CONTEXT, ServerThread, publish


def test_the_list_has_models_and_aliases(openai: OpenAI) -> None:
    assert {model.id for model in openai.models.list()} == {"smol", "tiny", "gpt-4o", "tuned", "org/base"}


def test_one_model(openai: OpenAI) -> None:
    model = openai.models.retrieve("tiny").model_dump()
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["root"] == "smol"
    assert model["max_model_len"] == CONTEXT
    assert model["created"] > 1_700_000_000


def test_an_unknown_model(openai: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="does not exist") as failure:
        openai.models.retrieve("nope")
    assert failure.value.code == "model_not_found"


def test_each_name_is_there_once(server: ServerThread, http: httpx.Client, smollm2: Path) -> None:
    publish(server.store, "tiny", smollm2)  # which is an alias of smol, too
    try:
        listed = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert listed.count("tiny") == 1
        assert http.get("/v1/models/tiny").json()["root"] == "tiny"
    finally:
        server.store.remove("tiny")
