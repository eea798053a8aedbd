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
from swapper.header import SAFETENSORS_WORDS, encode_header
from swapper.image import FORMAT_VERSION, MANIFEST, Manifest, Progress, Shard
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


@dataclass(frozen=True, slots=True)
class PackPlan:
    """A model cut for a tp × pp mesh."""

    architecture: str  # transformers class name
    dtype: str  # torch's word
    tp: int
    pp: int
    context_length: int
    kv_bytes_per_token: int  # on the rank that holds most
    ranks: tuple[tuple[PlannedTensor, ...], ...]  # each in execution order; tensors of one layer lie side by side


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
        shards = tuple(
            _write_shard(rank, planned, layouts[rank], checkpoint, directory, meter)
            for rank, planned in enumerate(plan.ranks)
        )
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
            shards=shards,
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


def _write_shard(
    rank: int,
    planned: tuple[PlannedTensor, ...],
    layout: Layout,
    checkpoint: Checkpoint,
    directory: Path,
    meter: _Meter,
) -> Shard:
    path = directory / f"rank-{rank}.safetensors"
    header = encode_header(layout.file_tensors)
    with path.open("wb") as file:
        file.write(header)
        writer = _DataWriter(file, meter)
        remaining = iter(planned)
        for entry in layout.file_tensors:
            if entry.name.startswith(PAD_PREFIX):
                writer.write(memoryview(bytes(entry.nbytes)))
            else:
                _write_tensor(writer, next(remaining), checkpoint)
        file.flush()
        os.fsync(file.fileno())
    return Shard(
        rank=rank,
        file=path.name,
        data_start=len(header),
        nbytes=layout.nbytes,
        granules=writer.hasher.finish(),
        tensors=layout.tensors,
        layers=layout.layers,
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


def _write_tensor(writer: _DataWriter, planned: PlannedTensor, checkpoint: Checkpoint) -> None:
    """Build one tensor and write it in its planned dtype, converted a granule at a time.

    Nothing of it outlives the call: a piece, if not converted, is a view that would keep the whole tensor in memory.
    """
    built = planned.build(checkpoint).detach()
    if tuple(built.shape) != planned.shape:
        raise SourceError(
            f"Tensor {planned.name} has shape {list(built.shape)} in {checkpoint.path}; its config.json calls for "
            f"{list(planned.shape)}. Config and weights are of different models."
        )
    dtype = getattr(torch, planned.dtype)
    elements = GRANULE_BYTES // built.element_size()
    # A scalar has no dimension to split, and a transposed tensor no flat view: reshape makes both flat.
    for piece in torch.split(built.reshape(-1), elements):
        writer.write(piece.to(dtype).view(torch.uint8).numpy().data)
