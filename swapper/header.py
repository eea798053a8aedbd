"""Headers of safetensors files: read with every check that a damaged download calls for, and written.

A safetensors file is eight bytes of header length, a JSON header that may be padded with spaces, and the
tensors' bytes without holes. See https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swapper.errors import SourceError
from swapper.geometry import DATA_ALIGNMENT
from swapper.image import TensorEntry

TORCH_WORDS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
"""safetensors' words for dtypes and torch's. What is not here (8-bit floats and smaller) needs quantisation support."""

SAFETENSORS_WORDS = {torch_word: word for word, torch_word in TORCH_WORDS.items()}

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own limit
_LFS_POINTER = b"version https://git-lfs"
_DAMAGED = "The file is damaged: download it again."


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed header; `text` is the JSON as it is in the file."""

    file_bytes: int
    data_start: int
    text: bytes
    tensors: tuple[TensorEntry, ...]


def tensor_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of a safetensors dtype."""
    return math.prod(shape) * ITEM_BYTES[dtype]


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file; its data is not touched.

    Raises SourceError if the header does not parse, describes what cannot be read, or promises more bytes than
    the file has.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(len(_LFS_POINTER))
            if prefix == _LFS_POINTER:
                raise SourceError(
                    f"{path} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository."
                )
            length = int.from_bytes(prefix[:8], "little")
            if len(prefix) < 8 or length > _MAX_HEADER_BYTES:
                raise SourceError(f"{path} does not begin with a safetensors header. {_DAMAGED}")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}.") from error
    if len(text) < length:
        raise SourceError(f"{path} is truncated inside its header ({size:,} bytes). Download it again.")
    tensors = _parse(path, text)
    end = 8 + length + max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
    if end > size:
        raise SourceError(
            f"{path} is truncated: its header promises {end:,} bytes, the file has {size:,}. Download it again."
        )
    return Header(size, 8 + length, text, tensors)


def _parse(path: Path, text: bytes) -> tuple[TensorEntry, ...]:
    try:
        raw = json.loads(text)
        return tuple(_tensor(path, name, entry) for name, entry in raw.items() if name != "__metadata__")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{path} has a header that does not parse ({error}). {_DAMAGED}") from error


def _tensor(path: Path, name: str, entry: dict[str, Any]) -> TensorEntry:
    dtype, shape, (start, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise SourceError(
            f"Tensor {name} of {path} has dtype {dtype}, which gswapd cannot serve. "
            "Add a checkpoint in bfloat16, float16 or float32."
        )
    if start < 0 or min(shape, default=0) < 0 or end - start != tensor_nbytes(dtype, shape):
        raise ValueError(f"tensor {name} of {end - start} bytes cannot hold {dtype} {list(shape)}")
    return TensorEntry(name, dtype, shape, start, end - start)


def encode_header(tensors: Iterable[TensorEntry]) -> bytes:
    """The first bytes of a file with these tensors, padded with spaces to a multiple of 4,096 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.offset, tensor.offset + tensor.nbytes],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)
