"""Answers held to a grammar by a real model with a real tokenizer; whatever the model would rather say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer

from engine.grammar import GrammarError, ImageGrammars
from swapper.store import Store
from tests.engine.fakes import request
from tests.engine.serving import Serving, pack_image, serving
from tests.models import VOCABULARY, make_checkpoint, make_tokenizer
from tests.swapper.paging import page_in

EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
WORDS = LLMatcher.grammar_from_regex("(yes|no)")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("llama") / "checkpoint", "llama"))


@pytest.fixture(scope="module")
def parts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    image = pack_image(Store(tmp_path_factory.mktemp("store")), checkpoint, "llama")
    with serving(16, max_batch_tokens=24, max_batch_sequences=4) as parts:
        model = parts.add(image)
        page_in(parts.pager, "llama", 0, image.manifest.shards[0].page_count(parts.pool.page_bytes))
        parts.grant(model, 10_000)
        yield parts


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))


def ask(parts: Serving, name: str, answer: tuple[int, ...] = (), **sampling: object) -> str:
    options = {"stop_tokens": frozenset({EOS}), "grammar": JSON, "max_tokens": 80, **sampling}
    parts.engine.submit(request(name, (5, 17, 3), model="llama", answer=answer, **options))  # type: ignore[arg-type]
    return name


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_matches_and_ends_by_itself(parts: Serving, tokenizer: Tokenizer, temperature: float) -> None:
    names = [ask(parts, f"{temperature} {seed}", temperature=temperature, seed=seed) for seed in range(4)]
    free = ask(parts, f"free {temperature}", grammar=None, max_tokens=20)  # in the same batch, and not held to it
    parts.reports.wait_for(*names, free)
    for name in names:
        value = json.loads(tokenizer.decode(parts.reports.answers[name]))
        assert set(value) == {"city", "sunny"}
        assert value["city"] in ("Paris", "Rome")
        assert parts.reports.finished[name] == "stop"


def test_a_rerun_goes_on_where_the_answer_was(parts: Serving) -> None:
    parts.reports.wait_for(ask(parts, "whole", temperature=1.0, seed=9))
    whole = tuple(parts.reports.answers["whole"])
    parts.reports.wait_for(ask(parts, "again", whole[:7], temperature=1.0, seed=9))
    assert tuple(parts.reports.answers["again"][7:]) == whole[7:]


def test_a_grammar_that_cannot_be_used_fails_its_request_alone(parts: Serving) -> None:
    parts.reports.wait_for(ask(parts, "bad", grammar='{"grammars": [{"lark_grammar": "start: nothing"}]}'))
    assert "grammar" in parts.reports.failed["bad"]
    parts.reports.wait_for(ask(parts, "good", grammar=WORDS))
    assert parts.reports.finished["good"] == "stop"


def test_an_answer_that_does_not_match_is_no_beginning(parts: Serving, tokenizer: Tokenizer) -> None:
    parts.reports.wait_for(ask(parts, "foreign", tuple(tokenizer.encode("maybe").ids), grammar=WORDS))
    assert "does not match" in parts.reports.failed["foreign"]


def test_it_may_be_cut_short(parts: Serving) -> None:
    parts.reports.wait_for(ask(parts, "short", max_tokens=3))
    assert parts.reports.finished["short"] == "length"


def test_end_tokens_are_allowed_where_the_answer_may_end(checkpoint: Path, tokenizer: Tokenizer) -> None:
    matcher = ImageGrammars(checkpoint, VOCABULARY).matcher(WORDS, frozenset({EOS, 1}))

    def allowed() -> set[int]:
        mask = matcher.mask()
        return {token for token in range(VOCABULARY) if mask[token // 32] >> token % 32 & 1}

    letters = {letter: tokenizer.token_to_id(letter) for letter in "yesno"}
    assert allowed() == {letters["y"], letters["n"]}
    matcher.consume(letters["n"])
    matcher.consume(letters["o"])
    assert allowed() == {EOS, 1}
    with pytest.raises(GrammarError):
        matcher.consume(letters["o"])


def test_a_model_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(GrammarError, match="tokenizer"):
        ImageGrammars(tmp_path, VOCABULARY).matcher(WORDS, frozenset())
