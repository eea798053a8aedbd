"""The correctness bar: greedy answers are, token for token, those of transformers' `generate` in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.model import BoundModel
from swapper.store import Store
from tests.engine.fakes import request
from tests.engine.serving import Serving, generate, pack_image, serving
from tests.engine.test_batching import prompt
from tests.models import SUPPORTED, make_checkpoint, random_model
from tests.swapper.paging import page_in

PROMPTS = [prompt(length, seed=length) for length in (5, 37, 1, 26)]  # mistral's window is 8
LENGTH = 10
BATCH_TOKENS = 24  # prompts come in chunks


@dataclass
class Served:
    parts: Serving
    model: BoundModel
    expected: list[tuple[int, ...]]

    def submit(self, number: int, tag: str, answer: tuple[int, ...] = ()) -> str:
        name = f"{self.model.name} {tag} {number}"
        one = request(name, PROMPTS[number], LENGTH, self.model.name, answer)
        self.parts.engine.submit(one)
        return name

    def check(self, *names: str) -> None:
        self.parts.reports.wait_for(*names)
        assert not self.parts.reports.failed
        for name in names:
            assert self.parts.reports.answer(name) == self.expected[int(name.split()[-1])], name


@pytest.fixture(scope="module")
def parts() -> Iterator[Serving]:
    with serving(64, max_batch_tokens=BATCH_TOKENS, max_batch_sequences=4) as parts:
        yield parts


@pytest.fixture(scope="module", params=SUPPORTED)
def served(request: pytest.FixtureRequest, parts: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp(request.param)
    checkpoint = make_checkpoint(directory / "checkpoint", request.param)
    reference = random_model(request.param)
    image = pack_image(Store(directory / "store"), checkpoint, request.param)
    model = parts.add(image)
    page_in(parts.pager, model.name, 0, image.manifest.shards[0].page_count(parts.pool.page_bytes))
    with torch.inference_mode():
        expected = [generate(reference, tokens, LENGTH) for tokens in PROMPTS]
    return Served(parts, model, expected)


def test_alone(served: Served) -> None:
    served.parts.grant(served.model, 10_000)
    for number in range(len(PROMPTS)):
        served.check(served.submit(number, "alone"))


def test_in_a_mixed_batch_with_staggered_arrivals(served: Served) -> None:
    served.parts.grant(served.model, 10_000)
    names: list[str] = []
    for number in range(len(PROMPTS)):
        names.append(served.submit(number, "mixed"))
        if number % 2:  # the next two join when this one is under way
            served.parts.reports.wait_until(lambda: names[-1] in served.parts.reports.answers)
    served.check(*names)


def test_when_blocks_are_short(served: Served) -> None:
    """The grant is what the largest request needs alone: the others are preempted and computed again."""
    served.parts.grant(served.model, max(map(len, PROMPTS)) + LENGTH)
    served.check(*(served.submit(number, "short") for number in range(len(PROMPTS))))


def test_when_an_answer_is_continued_by_another_worker(served: Served) -> None:
    served.parts.grant(served.model, 10_000)
    name = served.submit(1, "continued", served.expected[1][:6])
    served.parts.reports.wait_for(name)
    assert served.parts.reports.answer(name)[6:] == served.expected[1][6:]


def test_a_real_model_answers_as_in_transformers(smollm2: Path, tmp_path: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    questions = ["What is the capital of France?", "Count from one to five."]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    with torch.inference_mode():
        expected = [generate(reference, tokens, 8) for tokens in prompts]
    del reference
    image = pack_image(Store(tmp_path / "store"), smollm2, "smollm2", "float32")
    pages = image.manifest.shards[0].page_count(2 << 20)
    with serving(pages, max_batch_tokens=32) as parts:
        model = parts.add(image)
        parts.grant(model, 512)
        for name, tokens in zip("ab", prompts, strict=True):
            parts.engine.submit(request(name, tokens, 8, "smollm2"))
        page_in(parts.pager, "smollm2", 0, pages)  # they run as its layers arrive
        parts.reports.wait_for("a", "b")
        assert [parts.reports.answer(name) for name in "ab"] == expected
    assert tokenizer.decode(expected[0]).startswith("The capital of France is Paris")
