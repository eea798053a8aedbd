"""Tensor parallelism: which slice of each tensor a rank holds, and what its modules do beside their own work.

transformers publishes for most models where they are cut, module by module, in a few styles. Here a style is a cut of
the module's tensors, which the packer makes once and for all, and one collective at most around the module's forward,
which runs on plain tensors. GPT-2 and OPT have no published plan; a table of ours stands in.

- by columns: a rank has some of the outputs, with no collective unless they are gathered;
- by rows: a rank has some of the inputs, and outputs are summed; the first rank alone has the bias;
- an embedding by its vocabulary: a rank looks up the tokens it has, and rows are summed. A head that is tied to it is
  cut by columns, which is the same slice.

Where there are fewer heads of keys and values than ranks, several ranks have the same one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from engine.mesh import MeshRank, Traffic
from swapper.errors import UnsupportedModel

_OWN_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "transformer.h.*.attn": "narrow",
        "transformer.h.*.attn.c_attn": "packed_colwise_of_3",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    "opt": {
        "model.decoder.layers.*.self_attn": "narrow",
        "model.decoder.layers.*.self_attn.q_proj": "colwise",
        "model.decoder.layers.*.self_attn.k_proj": "colwise",
        "model.decoder.layers.*.self_attn.v_proj": "colwise",
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
    },
}
"""Styles by model type, for models that publish no plan. Modules to `narrow` keep count of heads or widths."""

_COUNTS = ("num_heads", "split_size", "nf")
"""What modules call the numbers that are divided among the ranks."""

_MOST_RANKS = 64
"""Degrees up to this are tried when one that works is to be named."""

Tensors = dict[str, torch.Tensor]


class Collectives(Protocol):
    """What modules of a rank need of the others; `engine.mesh.Mesh` is the real one."""

    traffic: Traffic

    @property
    def rank(self) -> MeshRank: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the stage, in place."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack equal tensors of the stage's ranks along a new first dimension."""

    def send(self, tensor: torch.Tensor, rank: int) -> None: ...

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Fill a tensor with what a rank sends."""


@dataclass(slots=True)
class OnMeta:
    """For modules that are only looked at: on the meta device there is nothing to sum."""

    rank: MeshRank
    traffic: Traffic = field(default_factory=Traffic)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        raise NotImplementedError

    def receive(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cut:
    """A rank's part of a tensor: the pieces `[start, stop)` of one dimension, one behind the other."""

    dim: int
    pieces: tuple[tuple[int, int], ...]

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        size = sum(stop - start for start, stop in self.pieces)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = [tensor.narrow(self.dim, start, stop - start) for start, stop in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


def cut_module(module: PreTrainedModel, mesh: Collectives) -> dict[str, Cut]:
    """Turn a module on the meta device into one rank's: its tensors get the shapes of its slices, its modules their
    collectives. Returns the cuts by the tensors' names, all of them where tensors are tied.

    Raises UnsupportedModel if the model cannot be cut, or not for so many ranks.
    """
    rank = mesh.rank
    if rank.tp == 1:
        return {}
    styled = list(_styled(module, _plan(module)))
    if complaint := _misfit(module, styled, rank.tp):
        heads = min(_heads(module)[0], _MOST_RANKS)
        fitting = [str(degree) for degree in range(1, heads + 1) if not _misfit(module, styled, degree)]
        raise UnsupportedModel(
            f"{type(module).__name__} cannot be cut for {rank.tp} ranks: {complaint}. "
            f"Degrees that work: {', '.join(fitting)} (--tp)."
        )
    state = module.state_dict(keep_vars=True)
    cuts: dict[str, Cut] = {}
    for path, style, part in styled:
        for leaf, tensor in _tensors(part).items():
            dim = style.dim(part, tensor)
            if dim is not None:
                pieces = _pieces(module, path, style, tensor.shape[dim], rank)
                cuts[f"{path}.{leaf}" if leaf else path] = Cut(dim, pieces)
    for _, style, part in styled:
        if style.around is not None and isinstance(part, torch.nn.Module):
            style.around(part, mesh)
    _shrink(module, state, cuts)
    return cuts


def collectives(module: PreTrainedModel) -> Iterator[tuple[str, Literal["all_reduce", "all_gather"]]]:
    """The modules around whose forward the ranks of a stage meet, by path, and how. Raises UnsupportedModel."""
    for path, style, part in _styled(module, _plan(module)):
        if isinstance(part, torch.nn.Module) and style.around not in (None, _narrow):
            yield path, "all_gather" if style.around is _gather else "all_reduce"


@dataclass(frozen=True, slots=True)
class _Style:
    by: Literal["columns", "rows", "vocabulary", "nothing"]  # how the module's tensors are cut
    around: Callable[[torch.nn.Module, Collectives], None] | None = None  # what makes its forward do its part
    sections: int = 1  # of the dimension that is cut; each is cut for itself
    even: bool = True  # whether all ranks must have equally much

    def dim(self, part: torch.nn.Module | torch.Tensor, tensor: torch.Tensor) -> int | None:
        """Which dimension of a tensor of a module is cut; None if every rank has the whole tensor."""
        if self.by == "nothing" or (self.by == "rows" and tensor.ndim == 1):
            return None
        if self.by == "vocabulary":
            return 0
        outputs, inputs = max(0, tensor.ndim - 2), tensor.ndim - 1
        if isinstance(part, Conv1D) and tensor.ndim == 2:
            outputs, inputs = inputs, outputs
        return outputs if self.by == "columns" else inputs


Styled = tuple[str, _Style, torch.nn.Module | torch.Tensor]


def _plan(module: PreTrainedModel) -> dict[str, str]:
    """Styles by the path of a module or tensor, with `*` for each number in it."""
    plan = {**(module.tp_plan or {}), **_OWN_PLANS.get(module.config.model_type, {})}
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    if unknown:
        raise UnsupportedModel(
            f"The tensor-parallel plan of {type(module).__name__} has a style that is not supported: "
            f"{', '.join(unknown)}. Use --tp 1; pipeline stages (--pp) are possible."
        )
    if not any("*" in path and _STYLES[style].by != "nothing" for path, style in plan.items()):
        raise UnsupportedModel(
            f"transformers publishes no tensor-parallel plan for the layers of {type(module).__name__}. "
            "Use --tp 1; pipeline stages (--pp) are possible."
        )
    for end, style in (
        (module.get_input_embeddings(), "embedding_rowwise"),
        (module.get_output_embeddings(), "colwise_gather_output"),
    ):
        path = next((path for path, part in module.named_modules() if part is end), None)
        if path is not None:
            plan.setdefault(path, style)
    return plan


def _styled(module: PreTrainedModel, plan: Mapping[str, str]) -> Iterator[Styled]:
    """Every module and every tensor that the plan names."""
    parts: list[tuple[str, Any]] = [*module.named_modules(), *module.named_parameters()]
    for path, part in parts:
        style = plan.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path))
        if style is not None:
            yield path, _STYLES[style], part


def _tensors(part: torch.nn.Module | torch.Tensor) -> Tensors:
    """A module's own tensors by name; a tensor itself has the name ""."""
    return {"": part} if isinstance(part, torch.Tensor) else dict(part.named_parameters(recurse=False))


def _misfit(module: PreTrainedModel, styled: Sequence[Styled], tp: int) -> str | None:
    """Why a model cannot be divided among so many ranks."""
    heads, key_heads = _heads(module)
    for path, style, part in styled:
        if style.by == "nothing" or not style.even:
            continue
        if "attn" in path or "attention" in path:
            if heads % tp:
                return f"{tp} does not divide its {heads} attention heads"
            if key_heads % tp and tp % key_heads:
                return f"its {key_heads} heads of keys and values do not go into {tp} evenly"
            if _has_keys(path):
                continue
        for tensor in _tensors(part).values():
            dim = style.dim(part, tensor)
            if dim is not None and tensor.shape[dim] % (style.sections * tp):
                return f"{tp} does not divide the {tensor.shape[dim] // style.sections} of {path}"
    return None


def _heads(module: PreTrainedModel) -> tuple[int, int]:
    """Heads of queries, and of keys and values."""
    config = module.config.get_text_config()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        raise UnsupportedModel(f"The layers of {type(module).__name__} differ in their heads. Use --tp 1.")
    return heads, key_heads


def _has_keys(path: str) -> bool:
    return path.rpartition(".")[2] in ("k_proj", "v_proj")


def _pieces(
    module: PreTrainedModel, path: str, style: _Style, size: int, rank: MeshRank
) -> tuple[tuple[int, int], ...]:
    key_heads = _heads(module)[1]
    if _has_keys(path) and style.even and key_heads % rank.tp:
        width, head = size // key_heads, rank.tp_rank * key_heads // rank.tp
        return ((head * width, (head + 1) * width),)
    section = size // style.sections
    first, last = _share(section, rank)
    return tuple((start + first, start + last) for start in range(0, size, section))


def _share(size: int, rank: MeshRank) -> tuple[int, int]:
    """Where a rank's part of `size` things starts and stops."""
    return size * rank.tp_rank // rank.tp, size * (rank.tp_rank + 1) // rank.tp


def _shrink(module: PreTrainedModel, state: Tensors, cuts: Mapping[str, Cut]) -> None:
    """Give tensors the shapes of their slices, under each of their names."""
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for tied in names.values():
        found = {cuts.get(name) for name in tied}
        if len(found) > 1:
            raise UnsupportedModel(f"{' and '.join(tied)} are one tensor, but are not cut alike. Use --tp 1.")
        if (cut := found.pop()) is None:
            continue
        whole = state[tied[0]]
        part = torch.empty(cut.shape(whole.shape), dtype=whole.dtype, device="meta")
        part = torch.nn.Parameter(part, requires_grad=False)
        for name in tied:
            path, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(path), leaf, part)


# ---- what modules do


def _all_reduce(mesh: Collectives, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else mesh.all_reduce(tensor)


def _narrow(part: torch.nn.Module, mesh: Collectives) -> None:
    """Divide what a module counts."""
    for name in _COUNTS:
        if name in part.__dict__:
            part.__dict__[name] //= mesh.rank.tp


def _sum(part: torch.nn.Module, mesh: Collectives) -> None:
    part.register_forward_hook(lambda module, args, output: _all_reduce(mesh, output))


def _sum_rows(part: torch.nn.Module, mesh: Collectives) -> None:
    """Sum a product's parts. The first rank alone has a bias, so that it is added once."""
    if mesh.rank.tp_rank and part._parameters.get("bias") is not None:
        part._parameters["bias"] = None
        if isinstance(part, Conv1D):  # which cannot do without
            part.__dict__["forward"] = lambda x: x @ part.weight
    _sum(part, mesh)


def _split_input(part: torch.nn.Module, mesh: Collectives) -> None:
    """Give a product by rows its part of an input that is whole, and sum."""
    first, last = _share(_size(part, 1), mesh.rank)
    part.register_forward_pre_hook(lambda module, args: (args[0][..., first:last], *args[1:]))
    _sum_rows(part, mesh)


def _gather(part: torch.nn.Module, mesh: Collectives) -> None:
    """Put the outputs of all ranks side by side. Parts may differ by one: all are sent as long as the longest."""
    tp, width = mesh.rank.tp, _size(part, 0)
    sizes = [stop - start for start, stop in pairwise(width * number // tp for number in range(tp + 1))]

    def gather(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        if output.is_meta:
            return output.new_empty(*output.shape[:-1], width)
        missing = max(sizes) - output.shape[-1]
        parts = mesh.all_gather(torch.nn.functional.pad(output, (0, missing)) if missing else output)
        return torch.cat([own[..., :size] for own, size in zip(parts, sizes, strict=True)], -1)

    part.register_forward_hook(gather)


def _look_up(part: torch.nn.Module, mesh: Collectives) -> None:
    """Look up the tokens that this rank has; the others' rows are zeros. Sum."""
    first, last = _share(_size(part, 0), mesh.rank)
    look_up = part.forward
    part.__dict__["padding_idx"] = None  # it is for training, and may lie in another rank's part

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        rows = look_up((tokens - first).clamp(0, last - first - 1))
        return _all_reduce(mesh, rows.masked_fill(((tokens < first) | (tokens >= last))[..., None], 0))

    part.__dict__["forward"] = forward


def _size(part: torch.nn.Module, dim: int) -> int:
    """Of a product's or an embedding's weight, before it is cut."""
    weight = part._parameters["weight"]
    assert weight is not None
    if isinstance(part, Conv1D):
        dim = 1 - dim
    return weight.shape[dim]


_COLUMNS, _ROWS = _Style("columns", _narrow), _Style("rows", _sum_rows)
_GATHERED = _Style("columns", _gather, even=False)
_SPLIT = _Style("rows", _split_input, even=False)
_ALIKE = _Style("nothing")  # differs from doing nothing in training only

_STYLES: Mapping[str, _Style] = {
    "colwise": _COLUMNS,
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "rowwise": _ROWS,
    "rowwise_split_input": _SPLIT,
    "rowwise_rep": _SPLIT,
    "embedding_rowwise": _Style("vocabulary", _look_up, even=False),
    "packed_colwise": _Style("columns", _narrow, sections=2),
    "packed_colwise_of_3": _Style("columns", _narrow, sections=3),
    "packed_rowwise": _Style("rows", _sum_rows, sections=2),
    "moe_tp_experts": _Style("nothing", _sum),
    "all_reduce": _Style("nothing", _sum),
    "narrow": _Style("nothing", _narrow),
    "replicate": _ALIKE,
    "replicated_with_grad_allreduce": _ALIKE,
    "mla_kv_a_proj": _ALIKE,
    "local_params": _ALIKE,
}
