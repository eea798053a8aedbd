"""Models on a group of several ranks: answers as from one process, whatever is swapped, withheld, cancelled or lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.plan import pack_plan
from engine.request import RequestFailed
from swapper.checkpoint import Checkpoint
from swapper.errors import WorkerError
from swapper.image import Image
from swapper.packer import pack
from tests.engine.serving import generate
from tests.engine.test_batching import prompt
from tests.models import make_checkpoint, random_model
from tests.worker.mesh_house import MeshHouse
from worker.protocol import Cancel

MESHES = ((2, 1), (1, 2), (2, 2))
ARCHITECTURES = {
    (2, 1): ("llama", "qwen3", "gemma3", "phi3", "mixtral", "opt", "gpt2"),
    (1, 2): ("llama", "gemma3", "opt", "gpt2"),
    (2, 2): ("llama", "phi3", "mixtral", "gpt2"),
}
"""Every architecture is tried on every mesh by tests/engine/test_partition.py; here the whole engine is."""

PROMPTS = tuple(tuple(prompt(length, seed=length)) for length in (5, 37, 1, 26))
LENGTH = 8
LARGE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 8}  # several pages on each rank


@cache
def expected(architecture: str, number: int, large: bool = False) -> tuple[int, ...]:
    """What transformers answers on one process."""
    with torch.inference_mode():
        return generate(_reference(architecture, large), PROMPTS[number], LENGTH)


@cache
def _reference(architecture: str, large: bool) -> torch.nn.Module:
    return random_model(architecture, **(LARGE if large else {}))


def packed(directory: Path, architecture: str, tp: int, pp: int, large: bool = False) -> Image:
    target = directory / f"{architecture}-{tp}x{pp}{'-large' * large}"
    if not target.exists():
        checkpoint = make_checkpoint(directory / f"{target.name}-source", architecture, **(LARGE if large else {}))
        target.mkdir()
        pack(pack_plan(Checkpoint(checkpoint), tp=tp, pp=pp), Checkpoint(checkpoint), target.name, target)
    return Image.open(target)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module", params=MESHES, ids=lambda mesh: f"{mesh[0]}x{mesh[1]}")
def mesh(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def house(mesh: tuple[int, int]) -> Iterator[MeshHouse]:
    house = MeshHouse(*mesh, max_batch_tokens=24, max_batch_sequences=4, suspended_bytes=1 << 20)
    yield house
    house.check_frames()
    house.close()


@pytest.mark.parametrize("architecture", ARCHITECTURES[2, 1])
def test_answers_are_those_of_one_process(
    house: MeshHouse, mesh: tuple[int, int], images: Path, architecture: str
) -> None:
    """In mixed batches, from before the first page is in, and again after a swap, with decodes launched ahead."""
    if architecture not in ARCHITECTURES[mesh]:
        pytest.skip("tried on other meshes")
    image = packed(images, architecture, *mesh)
    for life in lives(house, image, 2):
        check_answers(house, image.manifest.model, architecture, f"life {life}")
        house.run_ahead(image.manifest.model)


def lives(house: MeshHouse, image: Image, count: int) -> Iterator[int]:
    """A model comes in, goes and comes again; the first time, its requests come before its pages."""
    house.add(image)
    for life in range(count):
        epoch = house.begin_page_in(image)
        if life:
            house.answer_to(epoch)
        yield life
        house.page_out(image.manifest.model)
    house.remove(image.manifest.model)


def check_answers(house: MeshHouse, name: str, architecture: str, when: str) -> None:
    requests = [f"{name} {when} {number}" for number in range(len(PROMPTS))]
    for number, one in enumerate(requests):
        house.serve(one, name, PROMPTS[number], LENGTH)
    assert [house.tokens(one) for one in requests] == [expected(architecture, n) for n in range(len(PROMPTS))]


def test_models_of_different_architecture_decode_side_by_side(
    house: MeshHouse, mesh: tuple[int, int], images: Path
) -> None:
    """Their passes take turns, so their collectives have one order on all ranks; also of those launched ahead."""
    pair = [packed(images, architecture, *mesh) for architecture in ("llama", "gpt2")]
    for image in pair:
        house.add(image)
        house.page_in(image)
        house.run_ahead(image.manifest.model)
    requests = [(image.manifest.model, number) for number in range(len(PROMPTS)) for image in pair]
    for name, number in requests:
        house.serve(f"{name} beside {number}", name, PROMPTS[number], LENGTH)
    for name, number in requests:
        assert house.tokens(f"{name} beside {number}") == expected(name.partition("-")[0], number)
    assert ("broadcast" in house.ask(0, "traffic").kinds) == (mesh[0] > 1), "tokens go ahead to who embeds them"
    for image in pair:
        house.remove(image.manifest.model)


@pytest.mark.parametrize("slow", [0, -1], ids=["leader", "last"])
def test_a_pass_waits_for_the_slowest_rank_and_others_decode_meanwhile(
    house: MeshHouse, mesh: tuple[int, int], images: Path, slow: int
) -> None:
    cold, warm = packed(images, "llama", *mesh, large=True), packed(images, "gpt2", *mesh)
    house.add(warm)
    house.page_in(warm)
    house.ask(slow % house.size, "hold", 2)  # it gets two pages and no more
    house.add(cold)
    epoch = house.begin_page_in(cold)
    house.serve("cold", cold.manifest.model, PROMPTS[0], LENGTH)
    for number in range(len(PROMPTS)):
        house.serve(f"warm {slow} {number}", warm.manifest.model, PROMPTS[number], LENGTH)
        assert house.tokens(f"warm {slow} {number}") == expected("gpt2", number)
    assert not house.is_answered("cold")
    house.ask(slow % house.size, "release")
    house.answer_to(epoch)
    assert house.tokens("cold") == expected("llama", 0, large=True)
    house.heard.clear()
    house.remove(cold.manifest.model)
    house.remove(warm.manifest.model)


def test_a_cancel_does_not_wait_for_another_ranks_pages(house: MeshHouse, mesh: tuple[int, int], images: Path) -> None:
    cold = packed(images, "llama", *mesh, large=True)
    last = house.size - 1
    house.ask(last, "hold", 2)
    house.add(cold)
    epoch = house.begin_page_in(cold)
    for name in ("kept", "dropped"):
        house.serve(name, cold.manifest.model, PROMPTS[1], LENGTH)
    house.post(Cancel("dropped"))
    house.until(lambda: house.is_answered("dropped"))
    house.ask(last, "release")
    house.answer_to(epoch)
    assert house.tokens("kept") == expected("llama", 1, large=True)
    house.heard.clear()
    house.remove(cold.manifest.model)


@pytest.mark.parametrize("where", [0, -1], ids=["leader", "last"])
def test_a_page_in_that_fails_on_one_rank_is_undone_on_all_and_tried_again(
    house: MeshHouse, mesh: tuple[int, int], images: Path, where: int
) -> None:
    """In the middle of a pass that streams on the pages that are in."""
    cold = packed(images, "llama", *mesh, large=True)
    rank = where % house.size
    house.ask(rank, "hold", 1)
    house.ask(rank, "fail", 2)
    house.add(cold)
    epoch = house.begin_page_in(cold)
    house.serve("lost", cold.manifest.model, PROMPTS[0], LENGTH)
    house.ask(rank, "release")
    house.fails(epoch)
    house.check_frames()
    house.ask(rank, "fail", 1 << 30)
    house.page_in(cold)
    house.grant(cold.manifest.model, 4)
    house.serve("found", cold.manifest.model, PROMPTS[0], LENGTH)
    assert house.tokens("found") == expected("llama", 0, large=True)
    house.heard.clear()
    house.remove(cold.manifest.model)


def test_suspended_requests_go_on_with_what_every_rank_has_kept(
    house: MeshHouse, mesh: tuple[int, int], images: Path
) -> None:
    check_suspension(house, packed(images, "llama", *mesh), 120)


def check_suspension(house: MeshHouse, image: Image, length: int) -> None:
    """Answers are the same whatever has become of pages and blocks meanwhile; whoever is cancelled meanwhile leaves
    nothing on any rank."""
    name = image.manifest.model
    house.add(image)
    house.page_in(image)
    house.run_ahead(name)
    whole, disturbed = ([f"{name} {when} {number}" for number in range(3)] for when in ("whole", "disturbed"))
    for number, one in enumerate(whole):
        house.serve(one, name, PROMPTS[number], length)
    answers = [house.tokens(one) for one in whole]
    for number, one in enumerate(disturbed):
        house.serve(one, name, PROMPTS[number], length)
    for _ in range(2):
        heard = len(house.heard)
        house.until(lambda heard=heard: len(house.heard) > heard + 6)
        suspended = house.suspend(name)
        assert suspended.kept_bytes > 0
        assert suspended.lost_tokens == 0
        house.post(Cancel(disturbed[1]))
        house.page_out(name)
        house.check_frames()
        house.page_in(image)
        house.resume(name, suspended.kv_frames)
    assert [house.tokens(one) for one in (disturbed[0], disturbed[2])] == [answers[0], answers[2]]
    assert [house.ask(rank, "kept", name) for rank in range(1, house.size)] == [0] * (house.size - 1)
    house.remove(name)


def test_preempted_sequences_are_computed_again(house: MeshHouse, mesh: tuple[int, int], images: Path) -> None:
    """KV memory for one long sequence at a time, and none in between."""
    image = packed(images, "qwen3", *mesh)
    name = image.manifest.model
    house.add(image, tokens_kv=1)
    house.page_in(image)
    for round_ in range(2):
        for number in range(len(PROMPTS)):
            house.serve(f"{name} short {round_} {number}", name, PROMPTS[number], LENGTH)
        house.grant(name, 0)
        house.grant(name, 1)
        for number in range(len(PROMPTS)):
            assert house.tokens(f"{name} short {round_} {number}") == expected("qwen3", number)
    house.remove(name)


@pytest.mark.parametrize("dead", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)], ids=["2x1", "1x2"])
def test_the_death_of_a_rank_is_noticed_by_all_others_at_once(images: Path, tp: int, pp: int, dead: int) -> None:
    image = packed(images, "llama", tp, pp)
    house = MeshHouse(tp, pp)
    try:
        house.add(image)
        house.page_in(image)
        house.serve("a", image.manifest.model, PROMPTS[0], 200)
        house.until(lambda: len(house.heard) > 5)  # it is answering
        house.kill(dead)
        with pytest.raises(WorkerError, match=r"lost|failed|Rank \d of"):
            house.listen(1 - dead)
        assert not any(isinstance(report, RequestFailed) for report in house.heard)  # they are run again elsewhere
    finally:
        house.end()


def test_a_real_model_of_nine_heads_answers_on_three_ranks(smollm2: Path, tmp_path: Path) -> None:
    checkpoint = Checkpoint(smollm2)
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    question = tuple(range(100, 132))
    with torch.inference_mode():
        answer = generate(reference, question, LENGTH)
    del reference
    (tmp_path / "smollm2").mkdir()
    pack(pack_plan(checkpoint, "float32", tp=3), checkpoint, "smollm2", tmp_path / "smollm2")
    image = Image.open(tmp_path / "smollm2")
    pages = max(shard.page_count(2 << 20) for shard in image.manifest.shards)
    house = MeshHouse(3, 1, frames=pages + 8)
    house.add(image)
    house.begin_page_in(image)
    house.serve("a", "smollm2", question, LENGTH)
    assert house.tokens("a") == answer
    house.remove("smollm2")
    house.close()
