"""A shard is put together for the device it is on, and says what it really uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.workspace import WORKSPACE_BYTES
from swapper.errors import ConfigError
from swapper.store import Store
from tests.swapper.gpu import LACKING
from tests.swapper.paging import PAGE, PATIENCE
from tests.swapper.stations import until
from tests.swapper.tiers import new_name
from tests.worker.house import write_image
from worker.assembly import gpu_frames, open_shard
from worker.protocol import WorkerSpec

SPEC = WorkerSpec("g", 0, frames=4, page_bytes=PAGE)


def test_on_a_cpu_frames_are_host_memory_and_files_are_read_with_pread() -> None:
    shard, ready = open_shard(SPEC)
    assert (ready.device, ready.reader, ready.frames) == ("cpu", "pread", 4)
    assert shard.poll(0, 0.0).heartbeat.tier is None
    shard.close()


def test_the_heartbeat_tells_of_the_host_tier() -> None:
    shard, _ = open_shard(replace(SPEC, tier_bytes=3 * PAGE + 1, tier_name=new_name()))
    tier = shard._tier
    assert tier is not None
    assert tier.wait_settled(PATIENCE)
    status = shard.poll(0, 0.0).heartbeat.tier
    assert status is not None
    assert (status.slots, status.ready, status.used) == (3, 3, 0)
    shard.close()
    tier.close()


def test_workers_of_a_node_meet_in_the_directory_that_they_are_told(tmp_path: Path) -> None:
    shards = [open_shard(replace(SPEC, rank=rank, peers=str(tmp_path / "peers")))[0] for rank in (0, 1)]
    for shard, other in zip(shards, ("g-1", "g-0"), strict=True):
        peers = shard._pager._peers
        assert peers is not None
        until(lambda peers=peers, other=other: [link.name for link in peers.links if link.is_usable] == [other])
    for shard in shards:
        shard.close()


def test_models_are_bound_for_the_attention_that_is_asked_for() -> None:
    for attention in ("fused", "plain"):
        shard, _ = open_shard(replace(SPEC, attention=attention))
        assert shard._bind.args == (None, attention == "plain")  # type: ignore[attr-defined]
        shard.close()


def test_what_cannot_read_into_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pread' cannot read into a GPU's memory; use kvikio"):
        open_shard(replace(SPEC, device="cuda", reader="pread"))
    with pytest.raises(ConfigError, match="no reader 'mmap'"):
        open_shard(replace(SPEC, reader="mmap"))


@pytest.mark.gpu
@pytest.mark.skipif(LACKING is not None, reason=LACKING or "")
def test_on_a_gpu_the_pool_may_be_a_share_of_what_is_free() -> None:
    shard, ready = open_shard(replace(SPEC, device="cuda", pool_share=0.01))
    assert ready.device == "cuda:0"
    assert ready.reader in ("kvikio/gds", "kvikio/posix")
    assert ready.frames > SPEC.frames
    shard.close()


def test_a_gpus_pool_leaves_room_for_what_is_not_in_frames() -> None:
    free = 140 << 30
    share = gpu_frames(replace(SPEC, pool_share=0.8), free)
    assert 0.79 * free < share * PAGE <= 0.8 * free
    whole = gpu_frames(replace(SPEC, pool_share=1.0), free)
    assert whole == (free - WORKSPACE_BYTES) // PAGE
    assert gpu_frames(replace(SPEC, frames=whole), free) == whole
    with pytest.raises(ConfigError, match=r"of which [\d,]+ are for what is not in frames. Make memory.pool smaller"):
        gpu_frames(replace(SPEC, frames=whole + 1), free)


def test_a_node_whose_store_is_not_the_daemons_is_told(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in "abc":
        write_image(tmp_path / "models", name, tags=(1,))
    images = Store(tmp_path).identities()
    shard, _ = open_shard(replace(SPEC, store=str(tmp_path), images={"a": images["a"]}))
    shard.close()
    wrong = {"a": images["a"], "b": images["c"], "d": images["a"]}
    with pytest.raises(ConfigError, match=r"lacks b, d, or has other images .* Copy the daemon's store to every node"):
        open_shard(replace(SPEC, store=str(tmp_path), images=wrong))
