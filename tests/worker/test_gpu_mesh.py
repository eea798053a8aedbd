"""Two ranks that hold one model together: NCCL, decode graphs with collectives in them, and swaps between models.

On a host with one GPU they share it, and NCCL goes through sockets: slower, and the same answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.swapper.gpu import needs_gpu
from tests.worker.mesh_house import MeshHouse
from tests.worker.test_mesh import LENGTH, PROMPTS, check_answers, check_suspension, expected, lives, packed

pytestmark = needs_gpu

PAGE = 2 << 20
ANSWER = 100  # tokens: most are decoded by a graph


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["2x1", "1x2"])
def mesh(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def house(mesh: tuple[int, int]) -> Iterator[MeshHouse]:
    house = MeshHouse(
        *mesh, frames=64, device="cuda", max_batch_tokens=24, max_batch_sequences=4, suspended_bytes=1 << 20
    )
    yield house
    house.check_frames()
    house.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3", "opt", "gpt2", "mixtral"])
def test_answers_are_those_of_one_process(
    house: MeshHouse, mesh: tuple[int, int], tmp_path: Path, architecture: str
) -> None:
    """Alone and in mixed batches, with and without graphs, before and after a swap."""
    image = packed(tmp_path, architecture, *mesh)
    for life in lives(house, image, 3):
        check_answers(house, image.manifest.model, architecture, f"life {life}")


def test_a_decode_counts_the_same_collectives_with_a_graph_as_without(
    house: MeshHouse, mesh: tuple[int, int], tmp_path: Path
) -> None:
    image = packed(tmp_path, "llama", *mesh)
    house.add(image)
    house.page_in(image)
    calls = []  # but for tokens that go ahead: as many as no command was waiting for
    for round_ in range(3):
        before = house.ask(0, "traffic").copy()
        house.serve(f"traffic {round_}", image.manifest.model, PROMPTS[0], ANSWER)
        house.tokens(f"traffic {round_}")
        moved = house.ask(0, "traffic").since(before).kinds
        calls.append({kind: its.calls for kind, its in moved.items() if kind != "broadcast"})
    assert calls[0] == calls[1] == calls[2]
    assert sum(calls[0].values()) >= ANSWER
    assert all(house.ask(rank, "graphs") for rank in range(house.size)), "decodes with collectives were not recorded"
    house.remove(image.manifest.model)


def test_a_pass_waits_for_the_slowest_rank_and_others_decode_meanwhile(
    house: MeshHouse, mesh: tuple[int, int], tmp_path: Path
) -> None:
    """A long answer of one model beside page-ins of another, back and forth."""
    warm, cold = packed(tmp_path, "llama", *mesh), packed(tmp_path, "gpt2", *mesh)
    for image in (warm, cold):
        house.add(image)
    house.page_in(warm)
    house.serve("long", warm.manifest.model, PROMPTS[0], ANSWER)
    for round_ in range(4):
        house.begin_page_in(cold)
        house.serve(f"cold {round_}", cold.manifest.model, PROMPTS[2], LENGTH)
        assert house.tokens(f"cold {round_}") == expected("gpt2", 2)
        house.page_out(cold.manifest.model)
    assert house.tokens("long")[:LENGTH] == expected("llama", 0)
    for image in (warm, cold):
        house.remove(image.manifest.model)


def test_suspended_requests_go_on_with_what_every_rank_has_kept(
    house: MeshHouse, mesh: tuple[int, int], tmp_path: Path
) -> None:
    check_suspension(house, packed(tmp_path, "llama", *mesh), 200)


def test_the_step_of_a_small_model_is_told(house: MeshHouse, mesh: tuple[int, int], tmp_path: Path) -> None:
    """Not a bar: what a step costs beside the GPU's time, printed."""
    image = packed(tmp_path, "llama", *mesh)
    house.add(image)
    house.page_in(image)
    house.serve("first", image.manifest.model, PROMPTS[0], ANSWER)
    house.tokens("first")
    began = time.perf_counter()
    house.serve("second", image.manifest.model, PROMPTS[0], ANSWER)
    house.tokens("second")
    print(f"{mesh}: {(time.perf_counter() - began) / ANSWER * 1e6:.0f} µs a step, polls included")
    house.remove(image.manifest.model)
