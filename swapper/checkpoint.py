"""A checkpoint: a Hugging Face directory of safetensors files, opened for packing.

Everything that can be wrong with a directory is found when it is opened, from its names and its files'
headers. Tensors are then read one at a time into fresh memory, without a memory map, so that what was
read does not stay resident. Pickle files are never opened, and nothing in the directory is executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from swapper.errors import SourceError
from swapper.header import TORCH_WORDS, Header, read_header
from swapper.image import TensorEntry

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NUMBERED = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")
_CONVERT = (
    "Load it with transformers and call `model.save_pretrained(DIRECTORY)` and `tokenizer.save_pretrained(DIRECTORY)`, "
    "then add DIRECTORY."
)


@dataclass(frozen=True, slots=True)
class _Located:
    """A tensor, and the file and file offset its bytes are at."""

    tensor: TensorEntry
    path: Path
    offset: int


class Checkpoint:
    """One checkpoint directory. Opening reads headers only; raises SourceError naming the cause and the cure."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        _check_kind(self.path)
        self.config: dict[str, Any] = _read_config(self.path)
        self._headers: dict[Path, Header] = {file: read_header(file) for file in _weight_files(self.path)}
        self._tensors = _locate(self._headers)
        _check_index(self.path, self._tensors)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).tensor.shape

    def dtype(self, name: str) -> torch.dtype:
        dtype = getattr(torch, TORCH_WORDS[self._find(name).tensor.dtype])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def nbytes(self, name: str) -> int:
        return self._find(name).tensor.nbytes

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor into memory of its own. Raises SourceError on an I/O error or a short read."""
        located = self._find(name)
        result = torch.empty(self.shape(name), dtype=self.dtype(name))
        # A view of one dimension: a scalar has none to reinterpret as bytes.
        _read_into(located, result.reshape(-1).view(torch.uint8).numpy().data)
        return result

    def fingerprint(self) -> str:
        """BLAKE3 over names, sizes and headers of the weight files: cheap, and blind to a change of values alone."""
        digest = blake3()
        for path, header in self._headers.items():
            digest.update(f"{path.name}\0{header.file_bytes}\0{len(header.text)}\0".encode())
            digest.update(header.text)
        return digest.hexdigest()

    def _find(self, name: str) -> _Located:
        try:
            return self._tensors[name]
        except KeyError:
            raise SourceError(
                f"{self.path} has no tensor named {name}, which its architecture needs. "
                "The checkpoint is incomplete or of another architecture than its config.json says."
            ) from None


def _read_into(located: _Located, buffer: memoryview) -> None:
    path, name = located.path, located.tensor.name
    done = 0
    try:
        with path.open("rb", buffering=0) as file:
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], located.offset + done)
                if count == 0:
                    raise SourceError(f"{path} ended inside tensor {name}: it was changed while it was being read.")
                done += count
    except OSError as error:
        raise SourceError(f"Tensor {name} cannot be read from {path}: {error.strerror}.") from error


def _check_kind(path: Path) -> None:
    """Refuse what is not a checkpoint of safetensors at all, by what it is."""
    if path.suffix == ".gguf":
        raise _gguf(path)
    if not path.exists():
        raise SourceError(
            f"{path} does not exist. Give the path of a checkpoint directory; one from the Hugging Face Hub is fetched "
            "with `hf download MODEL --local-dir DIRECTORY`."
        )
    if not path.is_dir():
        raise SourceError(f"{path} is not a directory. Give the directory that holds config.json and *.safetensors.")
    try:
        files = {entry.name for entry in path.iterdir()}
    except OSError as error:
        raise SourceError(f"{path} cannot be listed: {error.strerror}. Check its permissions.") from error
    if "adapter_config.json" in files:
        raise SourceError(
            f"{path} is a LoRA adapter (it has adapter_config.json); adapters are not supported. Merge it into its "
            "base model with PEFT's `merge_and_unload()`, save that, and add the result."
        )
    if any(name.endswith(".safetensors") for name in files) or INDEX in files:
        return
    if any(name.endswith(".gguf") for name in files):
        raise _gguf(path)
    if pickles := sorted(name for name in files if name.endswith(_PICKLE_SUFFIXES)):
        raise SourceError(
            f"{path} holds its weights as pickle files only ({pickles[0]}). Reading those can run code, so gswapd "
            f"never does. {_CONVERT}"
        )
    if CONFIG in files:
        raise SourceError(f"{path} has no *.safetensors file. Give the directory that holds the model's weights.")


def _gguf(path: Path) -> SourceError:
    return SourceError(f"{path} holds GGUF weights, which are not supported. {_CONVERT}")


def _read_config(path: Path) -> dict[str, Any]:
    config = _read_json(path / CONFIG, "Give the directory of a whole checkpoint: config.json and *.safetensors.")
    text_config = config.get("text_config")
    parts = [config, text_config] if isinstance(text_config, dict) else [config]
    for part in parts:
        if quantisation := part.get("quantization_config"):
            method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
            raise SourceError(
                f"{path} is quantised ({method or 'by an unnamed method'}), its config.json says; not supported. "
                "Add the bfloat16 or float16 checkpoint it was made from."
            )
    return config


def _read_json(path: Path, cure: str) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}. {cure}") from error
    except ValueError as error:
        raise SourceError(f"{path} is not valid JSON ({error}). Download it again.") from error
    if not isinstance(raw, dict):
        raise SourceError(f"{path} is not a JSON object. Download it again.")
    return raw


def _weight_files(path: Path) -> list[Path]:
    """The files to read, by transformers' order of preference: the single file, the index's, or whatever there is.

    Other *.safetensors beside a single file or an index hold the same weights in another layout.
    """
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if (path / INDEX).exists():
        names = set(_weight_map(path).values())
    else:
        found = sorted(file.name for file in path.glob("*.safetensors"))
        names = set(found) | _numbered_siblings(found)
    if missing := sorted(name for name in names if not (path / name).exists()):
        raise SourceError(
            f"{path} lacks {len(missing)} of its {len(names)} weight files: {_some(missing)}. "
            "The download is incomplete: run it again."
        )
    return [path / name for name in sorted(names)]


def _weight_map(path: Path) -> dict[str, str]:
    weight_map = _read_json(path / INDEX, "Check the file's permissions.").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == Path(file).name and file.endswith(".safetensors")
        for file in weight_map.values()
    ):
        raise SourceError(f"{path / INDEX} has no weight_map from tensors to *.safetensors files. Download it again.")
    return weight_map


def _numbered_siblings(names: Iterable[str]) -> set[str]:
    """All names that belong to a numbered set (`model-00001-of-00003.safetensors`) of which some are there."""
    matches = [match for name in names if (match := _NUMBERED.fullmatch(name))]
    return {
        f"{match[1]}-{number:05d}-of-{match[3]}.safetensors"
        for match in matches
        for number in range(1, int(match[3]) + 1)
    }


def _locate(headers: dict[Path, Header]) -> dict[str, _Located]:
    tensors: dict[str, _Located] = {}
    for path, header in headers.items():
        for tensor in header.tensors:
            if other := tensors.get(tensor.name):
                raise SourceError(
                    f"Tensor {tensor.name} is in two files of {path.parent}: {other.path.name} and {path.name}. "
                    "Keep one set of weight files in the directory."
                )
            tensors[tensor.name] = _Located(tensor, path, header.data_start + tensor.offset)
    return tensors


def _check_index(path: Path, tensors: dict[str, _Located]) -> None:
    if (path / SINGLE).exists() or not (path / INDEX).exists():
        return
    if missing := sorted(set(_weight_map(path)) - set(tensors)):
        raise SourceError(
            f"{path / INDEX} names {len(missing)} tensors that no weight file holds: {_some(missing)}. "
            "Index and weight files are of different versions: download them again."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
