"""The pack plan: which tensors an image of a checkpoint holds, in which order, and how each is built.

The order is that of execution. Where a checkpoint's tensors are not the module's (other names, one tensor an expert,
fused projections), they go through transformers' own conversion mapping, one tensor of the module at a time, so that no
more than that tensor and its parts are in memory. What a rank of a mesh holds is what `engine/partition.py` and
`engine/stages.py` leave of its module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from engine.architecture import (
    DTYPES,
    MODEL_ERRORS,
    Architecture,
    build,
    build_encoder,
    context_length,
    position_offset,
    read_config,
    trace,
)
from engine.kv_cache import KvLayout
from engine.mesh import MeshRank
from engine.partition import Cut, OnMeta, cut_module
from engine.pooling import read_embedding
from engine.stages import stage_spans
from swapper.checkpoint import Checkpoint
from swapper.errors import SourceError
from swapper.image import Embedding
from swapper.packer import PackPlan, PlannedTensor

_LEGACY_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", r"\.masked_bias$")
"""Buffers that checkpoints used to hold and that models now make themselves."""


def pack_plan(checkpoint: Checkpoint, dtype: str | None = None, tp: int = 1, pp: int = 1) -> PackPlan:
    """Plan an image of a checkpoint; `dtype` None means its own.

    Raises UnsupportedModel if transformers cannot build the model or it cannot be cut like that, SourceError if tensors
    are missing, left over or of the wrong shape.
    """
    config = read_config(checkpoint.path)
    name = _choose_dtype(checkpoint, dtype or config.get_text_config().dtype or config.dtype)
    embedding = read_embedding(checkpoint.path)
    if embedding is not None:
        return _encoder_plan(checkpoint, config, name, embedding, tp * pp)
    module = build(config, DTYPES[name])
    architecture = trace(module)
    tensors = _plan_tensors(checkpoint, module, architecture, DTYPES[name])
    by_name = {planned.name: planned for planned in tensors}
    whole = {alias: by_name[names[0][0]] for names in architecture.owners for alias, _ in names}
    spans = stage_spans(architecture, {name: planned.nbytes for name, planned in whole.items()}, pp)
    parts = [_Part.of(config, DTYPES[name], MeshRank(tp, 1, rank)) for rank in range(tp)]
    return PackPlan(
        architecture=type(module).__name__,
        dtype=name,
        tp=tp,
        pp=pp,
        context_length=context_length(config),
        kv_bytes_per_token=max(
            KvLayout(part.architecture.kv_of(span), DTYPES[name]).bytes_per_token for span in spans for part in parts
        ),
        ranks=tuple(part.tensors(span, whole) for span in spans for part in parts),
    )


def _encoder_plan(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str, embedding: Embedding, ranks: int
) -> PackPlan:
    if ranks > 1:
        raise SourceError("Encoders are packed for one GPU. Use --tp 1 --pp 1.")
    module = build_encoder(config, DTYPES[dtype])
    length = context_length(config) - position_offset(module)
    tensors = _plan_tensors(checkpoint, module, trace(module, encodes=True), DTYPES[dtype])
    return PackPlan(
        architecture=type(module).__name__,
        dtype=dtype,
        tp=1,
        pp=1,
        context_length=min(length, embedding.max_tokens or length),
        kv_bytes_per_token=0,
        ranks=(tensors,),
        embedding=embedding,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's part of every layer."""

    architecture: Architecture
    cuts: Mapping[str, Cut]

    @staticmethod
    def of(config: PreTrainedConfig, dtype: torch.dtype, rank: MeshRank) -> _Part:
        module = build(config, dtype)
        cuts = cut_module(module, OnMeta(rank))
        return _Part(trace(module), cuts)

    def tensors(self, stage: range, whole: Mapping[str, PlannedTensor]) -> tuple[PlannedTensor, ...]:
        """Those of a stage, of which the whole tensors are given by all their names."""
        planned: list[PlannedTensor] = []
        for unit in self.architecture.units_of(stage):
            for name in unit.tensors:
                one, cut = whole[name], self.cuts.get(name)
                shape = one.shape if cut is None else cut.shape(one.shape)
                planned.append(replace(one, name=name, shape=shape, layer=unit.path, cut=cut.of if cut else None))
        return tuple(planned)


def _choose_dtype(checkpoint: Checkpoint, wanted: str | torch.dtype | None) -> str:
    """The asked type, or the checkpoint's: the one most of its bytes have."""
    if wanted is None:
        sizes: dict[torch.dtype, int] = {}
        for name in checkpoint.names:
            sizes[checkpoint.dtype(name)] = sizes.get(checkpoint.dtype(name), 0) + checkpoint.nbytes(name)
        wanted = max(sizes, key=lambda dtype: sizes[dtype])
    name = str(wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise SourceError(f"Weights of type {name} are not supported. Choose one of: {', '.join(DTYPES)} (--dtype).")
    return name


@dataclass(slots=True)
class _Recipe:
    """How one converter, or a plain copy (`converter` None), makes tensors of the module."""

    target: str  # the first tensor it makes
    converter: WeightConverter | None
    parts: dict[str, list[str]] = field(
        default_factory=dict
    )  # the checkpoint's names by the converter's source pattern

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for names in self.parts.values() for name in names)

    def make(self, name: str, load: Callable[[str], torch.Tensor], module: PreTrainedModel) -> torch.Tensor:
        """Make one of its tensors from the checkpoint's, which `load` reads."""
        if self.converter is None:
            return load(self.sources[0])
        converter = deepcopy(self.converter)
        for pattern, sources in self.parts.items():
            for source in sources:
                converter.add_tensor(self.target, source, pattern, partial(load, source))
        made = converter.convert(self.target, model=module, config=module.config)[name]
        tensor: torch.Tensor = made[0] if isinstance(made, list) else made
        return tensor


def _plan_tensors(
    checkpoint: Checkpoint, module: PreTrainedModel, architecture: Architecture, dtype: torch.dtype
) -> tuple[PlannedTensor, ...]:
    state = module.state_dict(keep_vars=True)
    recipes = _find_recipes(checkpoint, module, state)
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    in_float32 = _kept_in_float32(module, dtype)
    planned: list[PlannedTensor] = []
    missing: list[str] = []
    for unit in architecture.units:
        for name in unit.tensors:
            found = [alias for alias in names[id(state[name])] if alias in recipes]
            if not found:
                missing.append(name)
                continue
            kept = torch.float32 if in_float32 and in_float32.search(name) else state[name].dtype
            _check_tied(checkpoint, module, [recipes[alias] for alias in found])
            _check_shape(checkpoint, module, recipes[found[0]], found[0], state[name].shape)
            planned.append(
                PlannedTensor(
                    name=name,
                    dtype=str(kept).removeprefix("torch."),
                    shape=tuple(state[name].shape),
                    layer=unit.path,
                    sources=recipes[found[0]].sources,
                    build=_builder(recipes[found[0]], found[0], kept, module),
                )
            )
    if missing:
        raise SourceError(
            f"{checkpoint.path} lacks {len(missing)} tensors that {type(module).__name__} needs: {_some(missing)}. "
            "The checkpoint is incomplete, or of another architecture than its config.json says."
        )
    return tuple(planned)


def _builder(
    recipe: _Recipe, name: str, dtype: torch.dtype, module: PreTrainedModel
) -> Callable[[Checkpoint], torch.Tensor]:
    def build_tensor(checkpoint: Checkpoint) -> torch.Tensor:
        return recipe.make(name, lambda source: checkpoint.tensor(source).to(dtype), module)

    return build_tensor


def _find_recipes(
    checkpoint: Checkpoint, module: PreTrainedModel, state: Mapping[str, torch.Tensor]
) -> dict[str, _Recipe]:
    """How each tensor of the module is made. The renaming is transformers' own, name by name."""
    transforms = get_model_conversion_mapping(module)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    recipes: dict[str, _Recipe] = {}
    unexpected: dict[str, str] = {}
    for source in sorted(checkpoint.names, key=dot_natural_key):
        target, pattern = rename_source_key(source, renamings, converters, module.base_model_prefix, dict(state))
        if target not in state and source in state:
            target, pattern = source, None
        if target not in state:
            unexpected[source] = target
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        recipe = recipes.setdefault(target, _Recipe(target, converter))
        if converter is None and recipe.parts:
            raise SourceError(f"{checkpoint.path} holds {target} twice, as {recipe.sources[0]} and as {source}.")
        recipe.parts.setdefault(pattern or source, []).append(source)
        if converter is not None:
            first, *others = converter.target_patterns
            recipes.update((target.replace(first, other), recipe) for other in others)
    _refuse_unexpected(checkpoint, module, unexpected)
    return recipes


def _refuse_unexpected(checkpoint: Checkpoint, module: PreTrainedModel, unexpected: Mapping[str, str]) -> None:
    """Refuse names that the module has no use for, given with what they were renamed to.

    Passed over are those the model's class calls superfluous, and buffers, which models fill by themselves.
    """
    superfluous = [r"(^|\.)pooler\."] if getattr(module, "pooler", module) is None else []
    superfluous += [*(module._keys_to_ignore_on_load_unexpected or ()), *_LEGACY_BUFFERS]
    pattern = re.compile("|".join(f"(?:{text})" for text in superfluous))
    buffers = {name for name, _ in module.named_buffers()}
    left = [name for name, target in unexpected.items() if target not in buffers and not pattern.search(name)]
    if left:
        raise SourceError(
            f"{checkpoint.path} holds {len(left)} tensors that {type(module).__name__} has no place for: {_some(left)}."
            " The checkpoint is of another architecture than its config.json says."
        )


def _check_tied(checkpoint: Checkpoint, module: PreTrainedModel, recipes: Sequence[_Recipe]) -> None:
    """A tensor that is tied to another and stored all the same must equal it."""
    first, *others = recipes
    for other in others:
        one, two = first.sources[0], other.sources[0]
        if checkpoint.shape(one) != checkpoint.shape(two) or not torch.equal(
            checkpoint.tensor(one), checkpoint.tensor(two)
        ):
            raise SourceError(
                f"{checkpoint.path} holds {one} and {two} with different values, but its config.json ties them to one "
                'another. Set "tie_word_embeddings": false in config.json.'
            )


def _check_shape(
    checkpoint: Checkpoint, module: PreTrainedModel, recipe: _Recipe, name: str, shape: torch.Size
) -> None:
    """Make the tensor from stand-ins that have shapes and no numbers, to see that it comes out right."""
    try:
        made = recipe.make(name, lambda source: torch.empty(checkpoint.shape(source), device="meta"), module)
    except MODEL_ERRORS as error:
        raise SourceError(f"{name} cannot be made from the tensors {_some(recipe.sources)}: {error}") from error
    if made.shape != shape:
        raise SourceError(
            f"{checkpoint.path} holds {name} with shape {tuple(made.shape)}, but {type(module).__name__} needs "
            f"{tuple(shape)}. The weights do not belong to this config.json."
        )


def _kept_in_float32(module: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names of what the model's class keeps in float32 whatever type was asked for."""
    names: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        names.update(module._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        names.update(module._keep_in_fp32_modules or ())
    return re.compile("|".join(name.replace("*", ".*") for name in names)) if names else None


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
