"""Whether the engine serves an architecture rightly: found out by trying, before a model is added.

What is known to be out of reach is refused by name. Anything else has to prove itself: a random model of the same
configuration, cut to its first layers and, if need be, made narrower, is packed and bound as a real one would be, and
a few tokens in chunks, in a mixed batch, must come out as from transformers' eager attention. The cut model's weights
start out as NaN and come in layer by layer as the pass asks for them, so a model that touches a weight too early is
found, too.

What is cut: layers after the first of each kind; the vocabulary to 256 tokens; windows to 8 tokens, so that the test's
sequences outgrow them. Models that are still too large lose, in this order, experts, width of their feed-forward
networks, and heads together with hidden width. For a mesh, the cut model is packed for that mesh and runs in as many
threads as it has ranks.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from engine.architecture import MODEL_ERRORS, build, decoder_layers, layer_kind, read_config, trace
from engine.batch import SequenceSlice, StepBatch
from engine.mesh import MeshRank
from engine.model import BoundModel
from engine.partition import OnMeta, cut_module
from engine.plan import pack_plan
from engine.stages import balance
from engine.thread_mesh import ThreadMesh
from swapper.checkpoint import Checkpoint
from swapper.errors import GswapdError, UnsupportedModel
from swapper.frames import Region
from swapper.geometry import KV_BLOCK_TOKENS, kv_blocks
from swapper.image import Image
from swapper.packer import pack

_LARGEST_BYTES = 64 << 20  # of a cut model's weights
_VOCABULARY = 256
_WINDOW = 8
TOLERANCE = 1e-3  # of the largest logit

_THRESHOLDS = ("sliding_window", "attention_chunk_size", "window_size", "floor_scale")
"""Numbers of tokens beyond which a model computes otherwise; made small, so that the check gets there."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_FEED_FORWARD = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "ffn_dim", "n_inner")
_WIDTHS = ("hidden_size", "word_embed_proj_dim", "num_attention_heads", "num_key_value_heads")

_PASSES = ({0: 19, 1: 5}, {0: 1, 1: 16}, {0: 1, 1: 1, 2: 23}, {0: 3, 1: 2, 2: 1})
"""New tokens of each sequence in each pass: chunks and decodes, alone and together."""


def check_supported(checkpoint: Checkpoint, tp: int = 1, pp: int = 1) -> None:
    """Raises UnsupportedModel, with the reason, if the engine cannot serve a checkpoint on such a mesh."""
    config = read_config(checkpoint.path)
    _refuse_by_name(config)
    module = build(config, torch.float32)
    _refuse_other_heads(checkpoint.config, module)
    trace(module)
    cut_module(build(config, torch.float32), OnMeta(MeshRank(tp)))
    balance(0, [1] * len(decoder_layers(module)[1]), 0, pp)
    cut = _cut(config, module, tp, pp)
    with tempfile.TemporaryDirectory(prefix="gswapd-check-") as scratch, no_progress_bar():
        model = _random_model(cut)
        try:
            model.save_pretrained(Path(scratch) / "checkpoint")
            difference = _difference(model, Path(scratch), tp, pp)
        except (GswapdError, *MODEL_ERRORS) as error:
            raise UnsupportedModel(f"A small random {type(module).__name__} does not run: {error}") from error
    if not difference <= TOLERANCE:  # NaN is no proof either
        raise UnsupportedModel(
            f"{type(module).__name__} does not compute the same over paged memory as with transformers' own attention "
            f"(a small random model's logits differ by {difference:.1%}), so it is not served."
        )


def _refuse_by_name(config: PreTrainedConfig) -> None:
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{config.model_type} models are encoder-decoders; only decoder-only models are supported."
        )
    if config.get_text_config() is not config:
        raise UnsupportedModel(
            f"{config.model_type} models take more than text; only text models are supported. "
            "If the text model was published alone, add that."
        )


def _refuse_other_heads(raw: Mapping[str, Any], module: PreTrainedModel) -> None:
    """The checkpoint must be of the class that generates text, or of its body where the head is tied to it."""
    known = {type(module).__name__, type(module.base_model).__name__}
    named = raw.get("architectures") or []
    if named and not known & set(named):
        raise UnsupportedModel(f"The checkpoint is a {named[0]}, which does not generate text like a {max(known)}.")


# ---- the cut model


def _cut(config: PreTrainedConfig, module: PreTrainedModel, tp: int, pp: int) -> PreTrainedConfig:
    """The same configuration, as small as the check needs it."""
    depth = max(_depth(module), pp)
    cut = deepcopy(config)
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(cut, name, value[:depth])
    cut.num_hidden_layers = depth
    cut.vocab_size = min(cut.vocab_size, _VOCABULARY)
    if isinstance(pad := cut.pad_token_id, int) and pad >= cut.vocab_size:
        cut.pad_token_id = 0
    for name in _THRESHOLDS:
        if isinstance(getattr(cut, name, None), int):
            setattr(cut, name, min(getattr(cut, name), _WINDOW))
    error: UnsupportedModel | None = None
    for candidate in _narrower(cut, tp):
        try:
            small = build(candidate, torch.float32)
            if _nbytes(small) > _LARGEST_BYTES * max(1, tp // 4):  # many ranks need many heads
                continue
            cut_module(small, OnMeta(MeshRank(tp)))
            return candidate
        except UnsupportedModel as refused:  # widths that do not go together
            error = refused
    raise UnsupportedModel(f"No {config.model_type} model could be made that is small enough to be checked.") from error


def _depth(module: PreTrainedModel) -> int:
    """How many layers, from the first, include every kind of layer."""
    seen: set[tuple[object, ...]] = set()
    depth = 0
    for index, layer in enumerate(decoder_layers(module)[1]):
        kind = layer_kind(layer)
        if kind not in seen:
            seen.add(kind)
            depth = index + 1
    return depth


def _nbytes(module: PreTrainedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _narrower(config: PreTrainedConfig, tp: int) -> Iterator[PreTrainedConfig]:
    """The configuration, and narrower and narrower ones."""
    yield config
    fewer = deepcopy(config)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    for name in _EXPERTS:
        if isinstance(count := getattr(fewer, name, None), int):
            setattr(fewer, name, min(count, 2 * max(chosen, getattr(config, "n_group", None) or 1)))
    yield fewer
    thin = _divided(fewer, _FEED_FORWARD, 32, least=64 * tp)
    yield thin
    for factor in (2, 4, 8, 16, 32):
        yield _divided(thin, _WIDTHS, factor)


def _divided(config: PreTrainedConfig, names: tuple[str, ...], factor: int, least: int = 1) -> PreTrainedConfig:
    """Some numbers of a configuration divided, each to a multiple of `least`."""
    divided = deepcopy(config)
    for name in names:
        if isinstance(value := getattr(divided, name, None), int):
            setattr(divided, name, max(least, value // factor // least * least))
    return divided


def _random_model(config: PreTrainedConfig) -> PreTrainedModel:
    """A model with transformers' eager attention, and weights so large that what it attends to shows in its logits."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        )
        spread(model)
    return model.eval()


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Draw weights anew, so large that what a token attends to shows."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.5 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


# ---- the comparison


class MemoryShard:
    """A shard over a piece of plain memory. It starts out as NaN; `load` brings bytes in, from the front."""

    def __init__(self, image: Image, device: str = "cpu", rank: int = 0) -> None:
        self.shard = image.manifest.shards[rank]
        self._path = image.shard_path(rank)
        self._loaded = 0
        self._memory = _nan_bytes(self.shard.nbytes).to(device)
        self.region = Region(self._memory.data_ptr(), self.shard.nbytes, device)

    def load(self, nbytes: int) -> None:
        """Bring data bytes `[0, nbytes)` in: a gate for a forward pass."""
        if nbytes <= self._loaded:
            return
        with self._path.open("rb") as file:
            file.seek(self.shard.data_start + self._loaded)
            data = bytearray(file.read(nbytes - self._loaded))
        self._memory[self._loaded : nbytes] = torch.frombuffer(data, dtype=torch.uint8)
        self._loaded = nbytes

    def is_ready(self, nbytes: int) -> bool:
        return nbytes <= self._loaded


def _nan_bytes(nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), 0xFF, dtype=torch.uint8)


def _difference(model: PreTrainedModel, scratch: Path, tp: int, pp: int) -> float:
    """The largest difference between a saved model's logits and those of its image, as a part of the largest logit."""
    checkpoint = Checkpoint(scratch / "checkpoint")
    directory = scratch / "image"
    directory.mkdir()
    pack(pack_plan(checkpoint, "float32", tp, pp), checkpoint, "check", directory)
    image = Image.open(directory)
    lengths = [sum(new.get(index, 0) for new in _PASSES) for index in range(3)]
    generator = torch.Generator().manual_seed(0)
    vocabulary = int(model.config.get_text_config().vocab_size)
    prompts = [torch.randint(vocabulary, (length,), generator=generator) for length in lengths]
    with torch.no_grad():
        expected = [model(input_ids=prompt[None], use_cache=False).logits[0] for prompt in prompts]
    scale = max(float(logits.abs().max()) for logits in expected)
    worst = 0.0
    for index, first, logits in _run_on_all(image, [prompt.tolist() for prompt in prompts]):
        difference = float((logits - expected[index][first : first + len(logits)]).abs().max()) / scale
        if not difference <= worst:  # NaN, too
            worst = difference
    return worst


_Chunk = tuple[int, int, torch.Tensor]
"""(sequence, place of the first token, logits)."""


def _run_on_all(image: Image, prompts: list[list[int]]) -> list[_Chunk]:
    """Run the prompts on every rank of a mesh, a thread each; what the leader got."""
    meshes = ThreadMesh.of(image.manifest.tp, image.manifest.pp)
    with ThreadPoolExecutor(len(meshes)) as threads:
        runs = [threads.submit(_run_on, mesh, image, prompts) for mesh in meshes]
        failed = [error for run in runs if (error := run.exception()) is not None]
        if failed:  # a rank that another one left alone raises RuntimeError, too
            raise min(failed, key=lambda error: isinstance(error, RuntimeError))
        return runs[0].result()


def _run_on(mesh: ThreadMesh, image: Image, prompts: list[list[int]]) -> list[_Chunk]:
    try:
        shard = MemoryShard(image, rank=mesh.rank.rank)
        return list(_run(BoundModel.bind(image, shard, mesh), shard, prompts))
    except BaseException:
        mesh.abort()
        raise


def _run(bound: BoundModel, shard: MemoryShard, prompts: list[list[int]]) -> Iterator[_Chunk]:
    """Run the prompts in chunks."""
    blocks = [kv_blocks(len(prompt)) for prompt in prompts]
    nbytes = sum(blocks) * KV_BLOCK_TOKENS * bound.kv_bytes_per_token
    memory = _nan_bytes(nbytes)
    cache = bound.kv_cache(Region(memory.data_ptr(), nbytes, "cpu"))
    done = [0] * len(prompts)
    for new in _PASSES:
        slices: dict[int, SequenceSlice] = {}
        tokens: list[int] = []
        positions: list[int] = []
        for index, length in new.items():
            context = done[index] + length
            own = tuple(range(sum(blocks[:index]), sum(blocks[: index + 1])))[::-1]
            slices[index] = SequenceSlice(len(tokens), length, context, own)
            tokens += prompts[index][done[index] : context]
            positions += range(done[index], context)
        batch = StepBatch(tuple(tokens), tuple(positions), tuple(slices.values()), tuple(range(len(tokens))))
        logits = bound.forward(batch, cache, shard.load)
        for index, piece in slices.items():
            yield index, done[index], logits[piece.start : piece.start + piece.length]
            done[index] = piece.context


@contextmanager
def no_progress_bar() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
