"""`gswapd profile` with private daemons on a CPU: every shape of mesh, counted and checked against the arithmetic."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from server.profile.document import Profile, load
from server.profile.run import Options, run
from swapper.store import Store
from tests.models import make_checkpoint, make_tokenizer
from worker.add import add_model

LAST = 240  # tokens of a sequence at the breaking point
AGAIN = {(1, 1): ("bfloat16",)}  # and with what, by mesh


def profile(tmp_path: Path, tp: int, pp: int) -> Profile:
    """Of a small random Llama, in memory where its batches end at a few dozen."""
    store = Store(tmp_path / "store")
    checkpoint = make_tokenizer(make_checkpoint(tmp_path / "llama", "llama"))
    add_model(store, checkpoint, "llama", tp=tp, pp=pp)
    options = Options(
        batches=(1, 3),
        prompt_tokens=(16, 40),
        output_tokens=4,
        repeat=2,
        memory=f"{8 if tp * pp == 1 else 4}MiB",
        break_at=LAST,
        report=tmp_path / "report.html",
        trace=tmp_path / "trace.json",
        torch_profiler=tmp_path / "torch.json.gz",
        switches=AGAIN.get((tp, pp), ()),
        store=store.root,
    )
    (made,) = run(["llama"], options)
    assert load(store.open("llama").path, store.open("llama").identity) == made
    return made


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_sweep_counts_what_the_arithmetic_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int, pp: int
) -> None:
    monkeypatch.setenv("GSWAPD_MEMORY__PAGE", "2MiB")
    made = profile(tmp_path, tp, pp)
    points = list(made.points())
    assert [(its.batch, its.prompt_tokens) for its in points] == [(1, 16), (3, 16), (1, 40), (3, 40)]
    kinds = _kinds(tp, pp)
    for point in points:
        assert point.moved.keys() == kinds
        assert all(moved.counted == moved.expected > 0 for moved in point.moved.values())
        memory = point.memory
        assert memory.weights + memory.kv + memory.fragmentation == memory.frames
        assert memory.mapped is not None
        assert memory.frames == pytest.approx(memory.mapped, rel=0.02)  # the kernel counts for itself
    (broken,) = made.breaking_points
    assert broken.limited_by == "memory"
    assert broken.observed == pytest.approx(broken.predicted, rel=0.03)
    for variant in made.variants:
        assert [(its.batch, its.prompt_tokens) for its in variant.points] == [(1, 16), (3, 16), (1, 40), (3, 40)]
        accuracy = variant.accuracy
        assert accuracy is not None
        assert accuracy.reference is not None
        exact = variant.settings["dtype"] == "float32"
        assert accuracy.perplexity == pytest.approx(accuracy.reference, rel=1e-4 if exact else 0.05)
        assert accuracy.agreement == 1.0 if exact else 0.9 < accuracy.agreement < 1.0
    assert tuple(variant.name for variant in made.variants[1:]) == AGAIN.get((tp, pp), ())
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(tp * pp))
    for rank in range(tp * pp):
        file = tmp_path / (f"rank-{rank}-torch.json.gz" if rank else "torch.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert "aten::mm" in {event.get("name") for event in events}
    assert "memory ends" in (tmp_path / "report.html").read_text()


def _kinds(tp: int, pp: int) -> set[str]:
    return ({"all_reduce", "all_gather"} if tp > 1 else set()) | ({"send", "receive"} if pp > 1 else set())
