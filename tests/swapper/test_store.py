"""The store shows whole images only, whoever crashes, whoever reads, and whoever else wants to change it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swapper.checkpoint import Checkpoint
from swapper.errors import CorruptImage, ModelExists, ModelNotFound, StoreBusy, StoreError
from swapper.image import Image
from swapper.packer import pack
from swapper.store import Store, check_name
from swapper.verify import verify
from tests.swapper.small_checkpoint import plan_for, write_checkpoint

DEADLINE = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(write_checkpoint(tmp_path / "source"))


def add(store: Store, checkpoint: Checkpoint, name: str) -> Image:
    with store.adding(name) as directory:
        pack(plan_for(checkpoint), checkpoint, name, directory)
    return store.open(name)


def files_below(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


# ---- names


@pytest.mark.parametrize("name", ["llama", "SmolLM2-135M-Instruct", "meta/llama-3.1_8b", "0", "a" * 128])
def test_names_of_the_openai_world_are_models(store: Store, checkpoint: Checkpoint, name: str) -> None:
    image = add(store, checkpoint, name)
    assert image.manifest.model == name
    assert store.list() == (name,)
    store.remove(name)
    assert store.list() == ()


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/../b",
        "/etc",
        "a/",
        "/a",
        "a//b",
        "a/b/c",
        ".hidden",
        "a/.b",
        "-rf",
        "a b",
        "a\n",
        "ü",
        "a%2Fb",
        "a\0",
        "a\\b",
        "a" * 129,
    ],
)
def test_other_names_are_refused_everywhere(store: Store, name: str) -> None:
    for use in (check_name, store.open, store.remove, lambda name: store.adding(name).__enter__()):
        with pytest.raises(StoreError, match="cannot name a model"):
            use(name)


def test_a_slash_and_its_encoding_are_not_confused(store: Store, checkpoint: Checkpoint) -> None:
    for name in ("a/b", "a-b", "a.b", "a_b", "a--b"):
        add(store, checkpoint, name)
    assert store.list() == ("a--b", "a-b", "a.b", "a/b", "a_b")


# ---- adding, opening, removing


def test_a_store_that_was_never_written_is_empty(store: Store) -> None:
    assert store.list() == ()
    version = store.version()
    with pytest.raises(ModelNotFound, match="It is empty: add a model with `gswapd add`"):
        store.open("llama")
    assert store.version() == version
    assert not store.root.exists()


def test_an_image_is_invisible_until_it_is_whole(store: Store, checkpoint: Checkpoint) -> None:
    with store.adding("llama") as directory:
        assert list(directory.iterdir()) == []
        pack(plan_for(checkpoint), checkpoint, "llama", directory)
        assert store.list() == ()
        with pytest.raises(ModelNotFound):
            store.open("llama")
    assert store.list() == ("llama",)
    assert verify(store.open("llama")) == ()
    assert files_below(store.root / "incoming") == []


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_add_that_raises_leaves_nothing(store: Store, checkpoint: Checkpoint, error: BaseException) -> None:
    def interrupted() -> None:
        with store.adding("llama") as directory:
            pack(plan_for(checkpoint), checkpoint, "llama", directory)
            raise error

    with pytest.raises(type(error)):
        interrupted()
    assert store.list() == ()
    assert files_below(store.root / "incoming") == []
    add(store, checkpoint, "llama")


def test_what_is_not_a_whole_image_is_not_published(store: Store) -> None:
    with pytest.raises(CorruptImage, match=r"manifest\.json"), store.adding("llama"):
        pass
    assert store.list() == ()


def test_a_name_is_taken_once(store: Store, checkpoint: Checkpoint) -> None:
    add(store, checkpoint, "llama")
    with pytest.raises(ModelExists, match=r"llama is in the store.*`gswapd rm llama`"), store.adding("llama"):
        pytest.fail("the block must not run")
    assert verify(store.open("llama")) == ()


def test_an_unknown_name_is_answered_with_near_ones(store: Store, checkpoint: Checkpoint) -> None:
    for name in ("smollm2", "smollm2-poet", "qwen"):
        add(store, checkpoint, name)
    with pytest.raises(ModelNotFound, match=r"Did you mean smollm2 or smollm2-poet\?"):
        store.open("smolm2")
    with pytest.raises(ModelNotFound, match=r"It has qwen, smollm2, smollm2-poet\."):
        store.remove("zzz")


def test_a_damaged_image_is_corrupt_not_missing(store: Store, checkpoint: Checkpoint) -> None:
    (add(store, checkpoint, "llama").path / "manifest.json").write_text("{")
    assert store.list() == ("llama",)
    with pytest.raises(CorruptImage):
        store.open("llama")
    store.remove("llama")
    add(store, checkpoint, "llama")


def test_files_held_open_outlive_a_removal(store: Store, checkpoint: Checkpoint) -> None:
    """A daemon reads a shard while `gswapd rm` and then `gswapd add` of the same name run."""
    path = add(store, checkpoint, "llama").shard_path(0)
    expected = path.read_bytes()
    with path.open("rb") as held:
        start = held.read(5000)
        store.remove("llama")
        assert not path.exists()
        add(store, checkpoint, "llama")
        assert start + held.read() == expected


def test_the_version_changes_with_every_addition_and_removal(store: Store, checkpoint: Checkpoint) -> None:
    versions = [store.version()]
    for change in (
        lambda: add(store, checkpoint, "a"),
        lambda: add(store, checkpoint, "b"),
        lambda: store.remove("a"),
        lambda: add(store, checkpoint, "a"),
        lambda: store.remove("b"),
    ):
        change()
        assert store.version() == store.version()
        versions.append(store.version())
    assert len(set(versions)) == len(versions)


def test_the_version_does_not_change_while_an_image_is_written(store: Store, checkpoint: Checkpoint) -> None:
    add(store, checkpoint, "a")
    version = store.version()
    with store.adding("b") as directory:
        pack(plan_for(checkpoint), checkpoint, "b", directory)
        assert store.version() == version
    assert store.version() != version


# ---- one change at a time


def test_a_store_being_changed_refuses_other_changes_at_once_and_names_the_holder(
    store: Store, checkpoint: Checkpoint
) -> None:
    add(store, checkpoint, "a")
    other = Store(store.root)
    with store.adding("b") as directory:
        for change in (lambda: other.adding("c").__enter__(), lambda: other.remove("a"), other.gc):
            with pytest.raises(StoreBusy, match=rf"changed by process {os.getpid()}\."):
                change()
        assert other.open("a").manifest.model == "a"  # reading needs no lock
        pack(plan_for(checkpoint), checkpoint, "b", directory)
    other.remove("a")
    assert other.list() == ("b",)


def test_a_store_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        Store(tmp_path / "file").gc()


# ---- crashes

PACK_AND_HANG = textwrap.dedent(
    """
    import sys, threading
    from swapper.checkpoint import Checkpoint
    from swapper.packer import pack
    from swapper.store import Store
    from tests.swapper.small_checkpoint import plan_for

    def hang_half_way(done, total):
        if done > total // 2:
            print("half", flush=True)
            threading.Event().wait(600)

    checkpoint = Checkpoint(sys.argv[2])
    with Store(sys.argv[1]).adding("llama") as directory:
        pack(plan_for(checkpoint), checkpoint, "llama", directory, hang_half_way)
    """
)


@contextmanager
def packing_process(store: Store, checkpoint: Checkpoint) -> Iterator[subprocess.Popen[str]]:
    """A process that has written half of an image, and stops there holding the store."""
    with subprocess.Popen(
        [sys.executable, "-c", PACK_AND_HANG, str(store.root), str(checkpoint.path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "half\n"  # or end of file, if it failed
            yield process
        finally:
            process.kill()
            process.wait(DEADLINE)


def test_a_killed_add_blocks_nothing_and_its_leftovers_vanish_with_the_next(
    store: Store, checkpoint: Checkpoint
) -> None:
    with packing_process(store, checkpoint) as process:
        with pytest.raises(StoreBusy, match=rf"process {process.pid}\."), store.adding("llama"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE)
        assert store.list() == ()
        assert files_below(store.root / "incoming")
        assert verify(add(store, checkpoint, "llama")) == ()
        assert files_below(store.root / "incoming") == []


def test_gc_removes_what_a_killed_add_left_and_tells_the_bytes(store: Store, checkpoint: Checkpoint) -> None:
    add(store, checkpoint, "kept")
    assert store.gc() == 0
    with packing_process(store, checkpoint) as process:
        process.kill()
        process.wait(DEADLINE)
        left = sum(file.stat().st_blocks * 512 for file in files_below(store.root / "incoming"))
        assert left > 1 << 20
        assert store.gc() >= left
    assert files_below(store.root / "incoming") == []
    assert store.gc() == 0
    assert verify(store.open("kept")) == ()


def test_gc_finishes_a_removal_that_was_cut_short(
    store: Store, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    add(store, checkpoint, "llama")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.remove("llama")
    assert store.list() == ()  # the rename has happened
    assert files_below(store.root / "trash")
    assert store.gc() > 1 << 20
    assert files_below(store.root / "trash") == []


def test_a_disk_that_takes_no_more_bytes_can_still_be_cleaned(store: Store, checkpoint: Checkpoint) -> None:
    add(store, checkpoint, "llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # the kernel now refuses every write to a file
    try:
        store.remove("llama")
        store.gc()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.list() == ()
    assert files_below(store.root) == [store.root / ".lock"]
