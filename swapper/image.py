"""The image format: what a packed model is on disk, and its manifest.

An image is a directory of the store: `manifest.json`, one `rank-N.safetensors` for each rank of its mesh,
and the small files a model needs besides weights (config, tokenizer, chat template). A shard file is a
valid safetensors file whose data starts at a 4,096-byte offset and holds tensors in execution order; see
`swapper/packer.py` for how it is written and `docs/architecture.md` for why.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from blake3 import blake3

from swapper.errors import CorruptImage
from swapper.geometry import DATA_ALIGNMENT, GRANULE_BYTES, pages
from swapper.granules import page_identity

FORMAT_VERSION = 1
MANIFEST = "manifest.json"

Progress = Callable[[int, int], None]
"""How packing and verifying report: called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a shard: `offset` and `nbytes` count from the start of the shard's data."""

    name: str
    dtype: str  # safetensors' word: BF16, F32, ...
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LayerExtent:
    """The bytes `[start, end)` of a shard's data that one layer's forward pass touches, by module path.

    Extents are in execution order and cover all tensors. A tied head touches the embedding's bytes, which
    come first anyway, so it has no extent of its own.
    """

    name: str  # module path, e.g. "model.layers.0"
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds."""

    rank: int
    file: str
    data_start: int  # offset of the data in the file, a multiple of 4,096
    nbytes: int  # of data, a multiple of 4,096
    granules: tuple[str, ...]  # BLAKE3 hex digest of each 2 MiB of data, the last one maybe shorter
    tensors: tuple[TensorEntry, ...]
    layers: tuple[LayerExtent, ...]

    def page_count(self, page_bytes: int) -> int:
        return pages(self.nbytes, page_bytes)

    def page_hashes(self, page_bytes: int) -> tuple[str, ...]:
        """The content identity of each page: the hash of its granules' hashes.

        Raises ValueError if `page_bytes` is not a multiple of 2 MiB.
        """
        if page_bytes <= 0 or page_bytes % GRANULE_BYTES:
            raise ValueError(f"page size {page_bytes} is not a multiple of {GRANULE_BYTES} bytes")
        step = page_bytes // GRANULE_BYTES
        return tuple(page_identity(self.granules[i : i + step]) for i in range(0, len(self.granules), step))


Pooling = Literal["mean", "cls", "max", "last"]


@dataclass(frozen=True, slots=True)
class Embedding:
    """How an encoder makes one vector of a text's hidden states."""

    pooling: Pooling
    normalize: bool  # to length 1
    width: int
    max_tokens: int | None = None  # of a text, by the model's makers; None: as many as its context


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything the daemon must know of a model before it reads a byte of its weights."""

    version: int
    model: str
    fingerprint: str  # of the source checkpoint: BLAKE3 over file names, sizes and safetensors headers
    architecture: str  # transformers class name, e.g. "LlamaForCausalLM"
    dtype: str  # torch's word: bfloat16, float16, float32
    tp: int
    pp: int
    context_length: int  # tokens
    kv_bytes_per_token: int  # on the rank that holds most, all its layers, keys and values
    shards: tuple[Shard, ...]
    embedding: Embedding | None = None  # of an encoder; None: it generates text

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str | bytes, origin: str = MANIFEST) -> Manifest:
        """Parse a manifest. Raises CorruptImage naming `origin` if it does not parse or is of a newer version."""
        try:
            raw = json.loads(text)
            if raw["version"] != FORMAT_VERSION:
                raise CorruptImage(
                    f"{origin} has format version {raw['version']}; this gswapd reads version {FORMAT_VERSION}. "
                    "Add the model again."
                )
            raw["shards"] = tuple(
                Shard(
                    **{
                        **shard,
                        "granules": tuple(shard["granules"]),
                        "tensors": tuple(TensorEntry(**{**t, "shape": tuple(t["shape"])}) for t in shard["tensors"]),
                        "layers": tuple(LayerExtent(**layer) for layer in shard["layers"]),
                    }
                )
                for shard in raw["shards"]
            )
            if raw.get("embedding") is not None:
                raw["embedding"] = Embedding(**raw["embedding"])
            manifest = Manifest(**raw)
            manifest._check()
            return manifest
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptImage(f"{origin} is not a manifest ({error!r}). Add the model again.") from error

    def _check(self) -> None:
        """Raises ValueError where the parts do not fit together; all later arithmetic relies on it."""
        if [shard.rank for shard in self.shards] != list(range(self.tp * self.pp)):
            raise ValueError(f"{len(self.shards)} shards for a mesh of {self.tp} × {self.pp}")
        for shard in self.shards:
            if shard.nbytes % DATA_ALIGNMENT or shard.data_start % DATA_ALIGNMENT:
                raise ValueError(f"the data of {shard.file} is not aligned")
            if len(shard.granules) != pages(shard.nbytes, GRANULE_BYTES):
                raise ValueError(f"{len(shard.granules)} hashes for the {shard.nbytes} bytes of {shard.file}")
            if shard.file != Path(shard.file).name:
                raise ValueError(f"shard {shard.file} is not in the image's directory")


@dataclass(frozen=True, slots=True)
class Image:
    """A published image: its directory, its manifest, and `identity`, by which it is told from one that replaced it."""

    path: Path
    manifest: Manifest
    identity: str  # BLAKE3 of the manifest file

    @staticmethod
    def open(path: Path) -> Image:
        """Raises CorruptImage when the manifest is missing or unreadable, or a shard file is too short."""
        text = _read_manifest(path)
        image = Image(path, Manifest.from_json(text, str(path / MANIFEST)), blake3(text).hexdigest())
        for shard in image.manifest.shards:
            image._check_length(shard)
        return image

    @staticmethod
    def identity_at(path: Path) -> str:
        """The identity of the image that is at `path` now. Raises CorruptImage if there is none."""
        return blake3(_read_manifest(path)).hexdigest()

    def shard_path(self, rank: int) -> Path:
        return self.path / self.manifest.shards[rank].file

    def _check_length(self, shard: Shard) -> None:
        file = self.shard_path(shard.rank)
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CorruptImage(f"{file} cannot be read ({error.strerror}). Add the model again.") from error
        if size < shard.data_start + shard.nbytes:
            raise CorruptImage(
                f"{file} has {size:,} bytes of the {shard.data_start + shard.nbytes:,} that were packed. "
                "Add the model again."
            )


def _read_manifest(path: Path) -> bytes:
    try:
        return (path / MANIFEST).read_bytes()
    except OSError as error:
        raise CorruptImage(f"{path / MANIFEST} cannot be read ({error.strerror}). Add the model again.") from error
