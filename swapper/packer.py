"""The packer: turns a checkpoint into an image, one rank's shard file after another.

A `PackPlan` says what each rank holds, in execution order, and how every tensor is built from the checkpoint's;
`engine/plan.py` makes it. Packing is a stream: one tensor is read, converted, hashed and written before the
next, and the conversion goes piece by piece, so memory is bounded by the largest tensor, whatever the model's size.

`swapper/layout.py` decides where the tensors lie. That depends on names, dtypes and shapes alone, so models
of one shape have equal tensors at equal places, and their equal pages have equal hashes.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from swapper import libc
from swapper.checkpoint import Checkpoint
from swapper.durable import copy_file, write_file
from swapper.errors import SourceError, StoreError
from swapper.geometry import GRANULE_BYTES
from swapper.granules import GranuleHasher
from swapper.header import SAFETENSORS_WORDS, encode_header, tensor_nbytes
from swapper.image import FORMAT_VERSION, MANIFEST, Embedding, Manifest, Progress, Shard
from swapper.layout import PAD_PREFIX, Layout, lay_out

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer*.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "*.tiktoken",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*.jinja",
    "chat_template*.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "sentence_*_config.json",
    "*_Pooling/config.json",
)
"""What a model needs besides weights. Data only: nothing that could be run."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor of a rank's shard, as the engine will bind it."""

    name: str  # as the module calls its parameter
    dtype: str  # torch's word; `build` may return another, it is converted
    shape: tuple[int, ...]
    layer: str  # path of the module whose forward pass touches it, e.g. "model.layers.0"
    sources: tuple[str, ...]  # the checkpoint's tensors that `build` reads
    build: Callable[[Checkpoint], torch.Tensor]
    cut: Callable[[torch.Tensor], torch.Tensor] | None = None  # the rank's part of what was built; None: all of it

    @property
    def nbytes(self) -> int:
        return tensor_nbytes(SAFETENSORS_WORDS[self.dtype], self.shape)


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A model cut for a tp × pp mesh."""

    architecture: str  # transformers class name
    dtype: str  # torch's word
    tp: int
    pp: int
    context_length: int
    kv_bytes_per_token: int  # on the rank that holds most
    ranks: tuple[tuple[PlannedTensor, ...], ...]
    """Each in execution order; tensors of one layer lie side by side. Of the ranks of a stage, the first has all that
    the others have a part of."""
    embedding: Embedding | None = None  # of an encoder


def pack(
    plan: PackPlan, checkpoint: Checkpoint, model: str, directory: Path, progress: Progress | None = None
) -> Manifest:
    """Write the image of `model` into an empty directory; the manifest comes last.

    Raises SourceError if the checkpoint does not hold what the plan says, StoreError if the directory cannot be
    written; a full disk is noticed before the first byte where that is possible.
    """
    libc.keep_no_large_blocks()  # or the memory of converted tensors adds up
    layouts = [_layout(rank) for rank in plan.ranks]
    small_files = _small_files(checkpoint.path)
    _check_space(layouts, small_files, directory)
    meter = _Meter(sum(layout.nbytes for layout in layouts), progress)
    try:
        for file in small_files:
            target = directory / file.relative_to(checkpoint.path)
            target.parent.mkdir(exist_ok=True)
            copy_file(file, target)
        shards: list[Shard] = []
        for first in range(0, len(plan.ranks), plan.tp):
            shards += _write_stage(plan, first, layouts, checkpoint, directory, meter)
        manifest = Manifest(
            version=FORMAT_VERSION,
            model=model,
            fingerprint=checkpoint.fingerprint(),
            architecture=plan.architecture,
            dtype=plan.dtype,
            tp=plan.tp,
            pp=plan.pp,
            context_length=plan.context_length,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            shards=tuple(shards),
            embedding=plan.embedding,
        )
        write_file(directory / MANIFEST, manifest.to_json())
    except OSError as error:
        raise _write_error(error, directory) from error
    return manifest


class _Meter:
    """Counts bytes written, over all ranks."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done = 0
        self._total = total
        self._progress = progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _layout(rank: tuple[PlannedTensor, ...]) -> Layout:
    return lay_out((planned.name, SAFETENSORS_WORDS[planned.dtype], planned.shape, planned.layer) for planned in rank)


def _small_files(source: Path) -> list[Path]:
    files = [file for pattern in SMALL_FILES for file in sorted(source.glob(pattern))]
    for file in files:
        if not file.exists():
            raise SourceError(f"{file} is a link to nothing. The download is incomplete: run it again.")
    return files


def _check_space(layouts: list[Layout], small_files: list[Path], directory: Path) -> None:
    needed = sum(layout.nbytes + len(encode_header(layout.file_tensors)) for layout in layouts)
    needed += sum(file.stat().st_size for file in small_files)
    free = shutil.disk_usage(directory).free
    if needed > free:
        raise StoreError(
            f"The image needs {needed:,} bytes and the disk of {directory} has {free:,} free. "
            "Remove models with `gswapd rm`, leftovers with `gswapd gc`, or put the store on another disk."
        )


def _write_error(error: OSError, directory: Path) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(
            f"The disk of {directory} became full while the image was written, and nothing was added. "
            "Remove models with `gswapd rm`, or put the store on another disk."
        )
    return StoreError(f"The image cannot be written to {directory}: {error}.")


def _write_stage(
    plan: PackPlan, first: int, layouts: list[Layout], checkpoint: Checkpoint, directory: Path, meter: _Meter
) -> list[Shard]:
    """Write the shards of a stage's ranks side by side: what they share is read and built once."""
    ranks = range(first, first + plan.tp)
    with ExitStack() as stack:
        writers = [_ShardWriter(rank, layouts[rank], directory, meter, stack) for rank in ranks]
        parts = [{planned.name: planned for planned in plan.ranks[rank]} for rank in ranks]
        for planned in plan.ranks[first]:
            built = planned.build(checkpoint).detach()
            for writer, part in zip(writers, parts, strict=True):
                if planned.name in part:
                    writer.write(part[planned.name], built, checkpoint)
            del built
        return [writer.finish() for writer in writers]


class _ShardWriter:
    """One rank's file under way."""

    def __init__(self, rank: int, layout: Layout, directory: Path, meter: _Meter, stack: ExitStack) -> None:
        self._rank = rank
        self._layout = layout
        self._path = directory / f"rank-{rank}.safetensors"
        self._header = encode_header(layout.file_tensors)
        self._file = stack.enter_context(self._path.open("wb"))
        self._file.write(self._header)
        self._data = _DataWriter(self._file, meter)
        self._entries = iter(layout.file_tensors)

    def write(self, planned: PlannedTensor, built: torch.Tensor, checkpoint: Checkpoint) -> None:
        """Write the rank's part of a tensor, with the padding before it."""
        for entry in self._entries:
            if not entry.name.startswith(PAD_PREFIX):
                assert entry.name == planned.name
                _write_tensor(self._data, planned, built, checkpoint)
                return
            self._data.write(memoryview(bytes(entry.nbytes)))

    def finish(self) -> Shard:
        for entry in self._entries:
            assert entry.name.startswith(PAD_PREFIX), f"{entry.name} was not written"
            self._data.write(memoryview(bytes(entry.nbytes)))
        self._file.flush()
        os.fsync(self._file.fileno())
        return Shard(
            rank=self._rank,
            file=self._path.name,
            data_start=len(self._header),
            nbytes=self._layout.nbytes,
            granules=self._data.hasher.finish(),
            tensors=self._layout.tensors,
            layers=self._layout.layers,
        )


class _DataWriter:
    """Writes a shard's data and hashes it on the way, while it is in the processor's cache."""

    def __init__(self, file: BinaryIO, meter: _Meter) -> None:
        self.hasher = GranuleHasher()
        self._file = file
        self._meter = meter

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self.hasher.update(data)
        self._meter.add(len(data))


def _write_tensor(writer: _DataWriter, planned: PlannedTensor, built: torch.Tensor, checkpoint: Checkpoint) -> None:
    """Write a rank's part of a tensor in its planned dtype, converted a granule at a time.

    Nothing of it outlives the call: a piece, if not converted, is a view that would keep the whole tensor in memory.
    """
    part = built if planned.cut is None else planned.cut(built)
    if tuple(part.shape) != planned.shape:
        raise SourceError(
            f"Tensor {planned.name} has shape {list(part.shape)} in {checkpoint.path}; its config.json calls for "
            f"{list(planned.shape)}. Config and weights are of different models."
        )
    dtype = getattr(torch, planned.dtype)
    elements = GRANULE_BYTES // part.element_size()
    # A scalar has no dimension to split, and a transposed tensor no flat view: reshape makes both flat.
    for piece in torch.split(part.reshape(-1), elements):
        writer.write(piece.to(dtype).view(torch.uint8).numpy().data)
