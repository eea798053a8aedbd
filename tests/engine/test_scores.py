"""Log-probabilities of real models: those of transformers, for the answer and for the prompt, in chunks or at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from engine import batching
from engine.model import BoundModel
from engine.request import Tokens
from swapper.store import Store
from tests.engine.fakes import request
from tests.engine.serving import Serving, pack_image, serving
from tests.engine.test_batching import prompt
from tests.models import make_checkpoint, random_model
from tests.swapper.paging import page_in

PROMPT = prompt(37, seed=5)
LENGTH = 6
TOP = 3


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    """Log-probabilities after each token of prompt and greedy answer; and the answer, behind the prompt."""
    model = random_model("llama")
    tokens = list(PROMPT)
    with torch.inference_mode():
        for _ in range(LENGTH):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@dataclass
class Served:
    parts: Serving
    model: BoundModel


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("llama")
    image = pack_image(Store(directory / "store"), make_checkpoint(directory / "checkpoint", "llama"), "llama")
    with serving(16, max_batch_tokens=24, max_batch_sequences=4) as parts:
        model = parts.add(image)
        page_in(parts.pager, "llama", 0, image.manifest.shards[0].page_count(parts.pool.page_bytes))
        yield Served(parts, model)


@pytest.fixture
def parts(served: Served) -> Serving:
    served.parts.grant(served.model, 10_000)
    return served.parts


@pytest.mark.parametrize("cap", [128, 5])
def test_they_are_those_of_transformers(
    parts: Serving, expected: torch.Tensor, cap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "SCORED_TOKENS", cap)
    name = f"scored {cap}"
    parts.engine.submit(request("beside " + name, PROMPT[:11], LENGTH, "llama"))
    parts.engine.submit(request(name, PROMPT, LENGTH, "llama", logprobs=TOP, score_prompt=True))
    parts.reports.wait_for(name)
    reports = [report for report in parts.reports.of(name) if isinstance(report, Tokens) and report.tokens]
    scores = [*(reports[0].prompt_logprobs or ()), *(one for report in reports for one in report.logprobs or ())]
    assert all(report.prompt_logprobs is None for report in reports[1:])
    tokens = [*PROMPT, *parts.reports.answer(name)]
    assert len(scores) == len(tokens) - 1
    for place, score in enumerate(scores):
        row = expected[place]
        assert score.logprob == pytest.approx(row[tokens[place + 1]].item(), abs=1e-4)
        best = row.topk(TOP)
        assert list(score.top) == best.indices.tolist()
        assert list(score.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_rerun_does_not_tell_the_prompts_again(parts: Serving, expected: torch.Tensor) -> None:
    answer = tuple(expected[len(PROMPT) - 1 : len(PROMPT) + 1].argmax(-1).tolist())
    parts.engine.submit(request("rerun", PROMPT, LENGTH, "llama", answer, logprobs=0, score_prompt=True))
    parts.reports.wait_for("rerun")
    reports = [report for report in parts.reports.of("rerun") if isinstance(report, Tokens)]
    assert [report.prompt_logprobs for report in reports] == [None] * len(reports)


def test_scores_survive_a_preemption(served: Served) -> None:
    """Under a grant for one sequence the younger one is computed twice, and told once."""
    parts = served.parts
    parts.grant(served.model, len(PROMPT) + LENGTH)
    parts.engine.submit(request("old", PROMPT, LENGTH, "llama", logprobs=0, score_prompt=True))
    parts.engine.submit(request("young", PROMPT, LENGTH, "llama", logprobs=0, score_prompt=True))
    parts.reports.wait_for("old", "young")
    old, young = (
        [report.prompt_logprobs for report in parts.reports.of(name) if isinstance(report, Tokens)]
        for name in ("old", "young")
    )
    assert len(old[0] or ()) == len(PROMPT) - 1
    assert [one.logprob for one in young[0] or ()] == pytest.approx([one.logprob for one in old[0] or ()], abs=1e-5)
