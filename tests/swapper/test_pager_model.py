"""The pager beside a model of it: any order of requests, reads that come back or fail, aborts and page-outs.

The model knows little: which pages each shard should have. Whatever happened, once everything asked for has ended the
pager must agree with it, every resident byte must be right, and the pool must hold one frame for each
distinct page.
"""

from __future__ import annotations

import queue
import tempfile
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from swapper.errors import GswapdError
from swapper.host_frames import HostFramePool
from swapper.pager import PagedShard, PageInResult, Pager
from tests.swapper.paging import PAGE, PATIENCE, GatedReader, Outcome, data_of, resident_bytes, write_shard

FRAMES = 6
SHARDS = {"a": (1, 2, 3, 4), "b": (1, 2, 5, 5), "c": (6, 2, 3, 7)}  # 7 distinct pages and c's short one
TAILS = {"a": PAGE, "b": PAGE, "c": 8192}
MODELS = st.sampled_from(sorted(SHARDS))


class PagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.reader = GatedReader()
        self.pool = HostFramePool(FRAMES, PAGE)
        self.shards: dict[str, PagedShard] = {}
        self.resident = dict.fromkeys(SHARDS, 0)
        self.asked: dict[str, list[tuple[Outcome, int]]] = {model: [] for model in SHARDS}
        self.disturbed = False  # something failed or was given up since everything last had ended

    @initialize(run=st.integers(1, 3))
    def begin(self, run: int) -> None:
        self.pager = Pager(self.pool, self.reader, depth=3, run=run)
        for model, tags in SHARDS.items():
            path = Path(self.directory.name) / model
            self.shards[model] = self.pager.open(model, write_shard(path, tags, TAILS[model]), path)

    @rule(model=MODELS, pages=st.integers(1, 3))
    def page_in(self, model: str, pages: int) -> None:
        first = self.asked[model][-1][1] if self.asked[model] else self.resident[model]
        last = min(first + pages, len(SHARDS[model]))
        outcome = Outcome()
        try:
            self.pager.page_in(model, first, last, outcome)
        except ValueError:  # an earlier page-in failed, and the model has yet to hear of it
            assert self.asked[model]
        else:
            self.asked[model].append((outcome, last))

    @rule(arrives=st.booleans())
    def read_comes_back(self, arrives: bool) -> None:
        self._answer_a_read(arrives, patience=0.0)

    @rule(model=MODELS)
    def abort(self, model: str) -> None:
        self.disturbed = True
        self.pager.abort(model)

    @rule(model=MODELS, keep=st.integers(0, 3))
    def page_out(self, model: str, keep: int) -> None:
        if self.asked[model]:
            return
        free = self.pool.free
        freed = self.pager.page_out(model, keep)
        self.resident[model] = min(self.resident[model], keep)
        if not any(self.asked.values()):
            assert self.pool.free == free + freed

    @rule()
    def everything_ends(self) -> None:
        deadline = time.monotonic() + PATIENCE
        outcomes = [outcome for asked in self.asked.values() for outcome, _ in asked]
        while not all(outcome.came for outcome in outcomes):
            assert time.monotonic() < deadline, "a page-in never ended"
            self._answer_a_read(arrives=True, patience=0.001)
        for model, asked in self.asked.items():
            for outcome, last in asked:
                result = outcome.get()
                assert not outcome.came, "told twice"
                if isinstance(result, PageInResult):
                    assert result.last == last
                    self.resident[model] = last
                else:
                    assert isinstance(result, GswapdError)
                    assert self.disturbed or self._wanted_frames() > FRAMES, f"failed without a reason: {result!r}"
                    self.resident[model] = 0
        self._check(everything_ended=True)
        for asked in self.asked.values():
            asked.clear()
        self.disturbed = False

    @invariant()
    def what_is_ready_is_right(self) -> None:
        if not any(self.asked.values()):
            self._check(everything_ended=False)

    def teardown(self) -> None:
        self.everything_ends()
        self.pager.shutdown()
        assert self.pool.free == FRAMES
        self.pool.close()
        self.directory.cleanup()

    def _answer_a_read(self, arrives: bool, patience: float) -> None:
        try:
            read = self.reader.pending.get(timeout=patience) if patience else self.reader.pending.get_nowait()
        except queue.Empty:
            return
        if arrives:
            read.finish()
        else:
            self.disturbed = True
            read.fail()

    def _check(self, everything_ended: bool) -> None:
        assert {model: shard.resident for model, shard in self.shards.items()} == self.resident
        assert self.pool.free == FRAMES - len(self._pages(self.resident))
        if everything_ended:
            assert self.reader.open_files == 0
            for model, shard in self.shards.items():
                assert resident_bytes(shard) == data_of(SHARDS[model], TAILS[model])[: shard.resident * PAGE]

    def _wanted_frames(self) -> int:
        """Frames that hold everything there is and everything that was asked for."""
        wanted = {model: asked[-1][1] if asked else self.resident[model] for model, asked in self.asked.items()}
        return len(self._pages(wanted))

    def _pages(self, resident: dict[str, int]) -> set[tuple[int, int]]:
        """The distinct pages that shards have with so many resident: content and length."""
        return {
            (tag, TAILS[model] if page == len(SHARDS[model]) - 1 else PAGE)
            for model, count in resident.items()
            for page, tag in enumerate(SHARDS[model][:count])
        }


TestPagerAgainstItsModel = PagerMachine.TestCase
TestPagerAgainstItsModel.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
