"""A transformers model without weights: its module on the meta device, and what a forward pass of it does.

Nothing here knows an architecture by name. A pass over the meta device tells in which order modules run, which is the
order their weights are wanted in, and what each attention layer keeps of a token.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.attention import NAME, current_pass
from engine.kv_cache import KvLayerShape
from swapper.errors import SourceError, UnsupportedModel

MODEL_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    StrictDataclassError,
)
"""What a model's code may raise that was handed a configuration, or a way of running, that it was not made for."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


_building = threading.Lock()  # transformers changes functions of torch and of its own while it builds a module


@dataclass(frozen=True, slots=True)
class Unit:
    """A module whose weights are waited for together: a decoder layer, or a module outside of the layers."""

    path: str
    tensors: tuple[str, ...]  # its parameters and persistent buffers, those tied to an earlier unit's left out


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a forward pass showed of a module."""

    layers: tuple[str, ...]  # paths of the decoder's layers
    owners: tuple[tuple[tuple[str, str], ...], ...]  # of each tensor: its names, and the path of the unit it has it in
    order: Mapping[str, int]  # of the units' paths, as they ran
    kv: Mapping[int, KvLayerShape]  # by the layer index that attention modules carry
    hidden_width: int  # of what layers hand on
    layers_return_tuples: bool

    @property
    def units(self) -> tuple[Unit, ...]:
        """All units, in execution order."""
        return self.units_of(range(len(self.layers)))

    def units_of(self, stage: range) -> tuple[Unit, ...]:
        """The units of a stage that has these layers, in execution order.

        A tensor that is tied to several goes to the one that runs first. What never ran is used unseen, so it goes to
        the front.
        """
        held: dict[str, list[str]] = {}
        for aliases in self.owners:
            here = [(name, path) for name, path in aliases if self._is_in(path, stage)]
            if here:
                held.setdefault(min((path for _, path in here), key=self._place), []).append(here[0][0])
        return tuple(Unit(path, tuple(held[path])) for path in sorted(held, key=self._place))

    def outside_of(self, stage: range) -> tuple[str, ...]:
        """Paths of the units before and behind all layers that a stage does not have."""
        paths = {path for aliases in self.owners for _, path in aliases if path not in self.layers}
        return tuple(path for path in paths if path in self.order and not self._is_in(path, stage))

    def span_of(self, units: Collection[str]) -> range:
        """The layers among these units, which are a stage's."""
        own = [index for index, path in enumerate(self.layers) if path in units]
        return range(own[0], own[-1] + 1) if own else range(0)

    def kv_of(self, stage: range) -> Mapping[int, KvLayerShape]:
        """What a stage's layers keep of a token."""
        return {index: shape for index, shape in self.kv.items() if index in stage}

    def _is_in(self, path: str, stage: range) -> bool:
        if path in self.layers:
            return self.layers.index(path) in stage
        if self._place(path) < self._place(self.layers[0]):
            return stage.start == 0
        return stage.stop == len(self.layers)

    def _place(self, path: str) -> int:
        return self.order.get(path, -1)


def read_config(directory: Path) -> PreTrainedConfig:
    """The configuration in a directory. Never runs code of the directory's own."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(directory, local_files_only=True)
        model_type = raw.get("model_type")
        if model_type not in CONFIG_MAPPING:
            own = " and brings its own code, which is never run" if "auto_map" in raw else ""
            raise UnsupportedModel(
                f"{directory} is of model type {model_type!r}, which transformers does not define{own}. "
                "Add a model of an architecture that transformers has built in."
            )
        return AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except (OSError, *MODEL_ERRORS) as error:
        raise SourceError(f"transformers cannot read {directory / 'config.json'}: {error}") from error


def build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model's module on the meta device, with our attention. Raises UnsupportedModel where that cannot be had."""
    return _build(AutoModelForCausalLM, config, dtype)


def _build(auto: Any, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        with _building, torch.device("meta"):
            module: PreTrainedModel = auto.from_config(
                config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
            )
    except MODEL_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise UnsupportedModel(f"{config.model_type} models have an attention that cannot be replaced.") from error
        raise UnsupportedModel(f"transformers cannot build a {config.model_type} model: {error!r}") from error
    for part in module.modules():
        if isinstance(part, PreTrainedModel):  # else some models search every input for padding
            part.warn_if_padding_and_no_attention_mask = _no_padding
    return module.eval()


def build_encoder(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The same of a model that turns texts into hidden states. Raises UnsupportedModel."""
    module = _build(AutoModel, config, dtype)
    if getattr(module, "pooler", None) is not None:
        module.pooler = None  # a head of its own, which embeddings are not made with
    return module


def position_offset(module: PreTrainedModel) -> int:
    """The position of a text's first token: RoBERTa and its kin count from behind their padding token."""
    for part in module.modules():
        if hasattr(part, "create_position_ids_from_input_ids"):
            return int(part.padding_idx) + 1
    return 0


def _no_padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    """Inputs are packed: they have none."""


def context_length(config: PreTrainedConfig) -> int:
    """Tokens that a sequence may have.

    Where rotary frequencies change once a sequence outgrows the length the model was first trained with, that length is
    the limit: which frequencies a sequence gets would depend on its neighbours in the batch.
    """
    text = config.get_text_config()
    length = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
            if isinstance(value := getattr(text, name, None), int) and value > 0
        ),
        None,
    )
    if length is None:
        raise UnsupportedModel("The configuration names no context length (max_position_embeddings).")
    return min([length, *_original_lengths(getattr(text, "rope_parameters", None) or {})])


def _original_lengths(rope: Mapping[str, Any]) -> Iterator[int]:
    if rope.get("rope_type") == "longrope" and rope.get("original_max_position_embeddings"):
        yield int(rope["original_max_position_embeddings"])
    for per_layer_type in rope.values():
        if isinstance(per_layer_type, Mapping):
            yield from _original_lengths(per_layer_type)


def freeze_rope(module: torch.nn.Module) -> None:
    """Keep the rotary frequencies as they are now, whatever lengths come."""
    for part in module.modules():
        kind = getattr(part, "rope_type", None)
        if isinstance(kind, str):
            _set_rope_type(part, "default")
        elif isinstance(kind, dict):
            _set_rope_type(part, dict.fromkeys(kind, "default"))


def _set_rope_type(part: torch.nn.Module, kind: Any) -> None:
    part.__dict__["rope_type"] = kind


def decoder_layers(module: PreTrainedModel) -> tuple[str, torch.nn.ModuleList]:
    """The path and the list of the decoder's layers: the outermost list that is as long as the model is deep."""
    depth = getattr(module.config.get_text_config(), "num_hidden_layers", None)
    for path, part in module.named_modules():
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth:
            return path, part
    raise UnsupportedModel(f"{type(module).__name__} has no list of {depth} decoder layers.")


def layer_kind(layer: torch.nn.Module) -> tuple[object, ...]:
    """What sets a layer apart from layers of other kinds: its modules and their flags, and its parameters' shapes."""
    kind: list[object] = [(name, tuple(parameter.shape)) for name, parameter in layer.named_parameters()]
    for name, part in layer.named_modules():
        flags = {key: value for key, value in vars(part).items() if value is None or isinstance(value, (bool, str))}
        kind.append((name, type(part).__name__, tuple(sorted(flags.items(), key=lambda item: item[0]))))
    return tuple(kind)


def trace(module: PreTrainedModel, *, encodes: bool = False) -> Architecture:
    """Run a module that is on the meta device, and say what happened. Of layers of one kind only the first computes.

    Raises UnsupportedModel, also if it does not go left to right, or, of one that `encodes`, if it does.
    """
    list_path, layers = decoder_layers(module)
    paths = tuple(f"{list_path}.{index}" for index in range(len(layers)))
    owners = _tensor_owners(module, paths)
    observer = _Observer(gate=lambda nbytes: None, encodes=encodes)
    with ExitStack() as stack:
        _repeat_kinds(layers, observer, stack)
        for path in dict.fromkeys(path for aliases in owners for _, path in aliases):
            part = module.get_submodule(path)
            hook = part.register_forward_pre_hook(lambda module, args, path=path: observer.ran(path))
            stack.callback(hook.remove)
        stack.enter_context(_traceable(module))
        token = current_pass.set(observer)
        stack.callback(current_pass.reset, token)
        row = torch.zeros(1, 2, dtype=torch.long, device="meta")
        try:
            with torch.no_grad():
                module(input_ids=row, position_ids=row, **({} if encodes else {"use_cache": False}))
        except MODEL_ERRORS as error:
            raise UnsupportedModel(
                f"A forward pass of {type(module).__name__} cannot be followed without weights: {error!r}"
            ) from error
    if len(observer.layers) != len(layers):
        raise UnsupportedModel(
            f"{len(layers) - len(observer.layers)} of the {len(layers)} layers of {type(module).__name__} have no "
            "attention that can be replaced by paged attention; recurrent and hybrid models are not supported."
        )
    first = observer.first_output
    return Architecture(
        layers=paths,
        owners=owners,
        order=observer.order,
        kv=dict(sorted(observer.layers.items())),
        hidden_width=(first[0] if isinstance(first, tuple) else first).shape[-1],
        layers_return_tuples=isinstance(first, tuple),
    )


def _repeat_kinds(layers: torch.nn.ModuleList, observer: _Observer, stack: ExitStack) -> None:
    """Make each layer whose kind came before give that layer's output again, until the stack is unwound."""
    firsts: dict[tuple[object, ...], int] = {}
    outputs: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        first = firsts.setdefault(layer_kind(layer), index)
        if first == index:

            def keep(module: torch.nn.Module, args: object, output: object, index: int = index) -> None:
                outputs[index] = output
                if index == 0:
                    observer.first_output = output

            stack.callback(layer.register_forward_hook(keep).remove)
        else:

            def repeat(*args: object, index: int = index, first: int = first, **kwargs: object) -> object:
                if first in observer.layers:
                    observer.layers[index] = observer.layers[first]
                return outputs[first]

            layer.forward = repeat
            stack.callback(delattr, layer, "forward")


def _tensor_owners(module: PreTrainedModel, layers: tuple[str, ...]) -> tuple[tuple[tuple[str, str], ...], ...]:
    """For each parameter or persistent buffer its names (several if it is tied), each with the unit that has it."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        layer = next((path for path in layers if name.startswith(f"{path}.")), None)
        path = layer if layer is not None else name.rpartition(".")[0]
        owners.setdefault(id(tensor), []).append((name, path))
    return tuple(map(tuple, owners.values()))


@dataclass(slots=True)
class _Observer:
    """A pass that computes nothing and takes notes."""

    gate: Any
    encodes: bool
    order: dict[str, int] = field(default_factory=dict)
    layers: dict[int, KvLayerShape] = field(default_factory=dict)
    first_output: Any = None  # of the first layer

    def ran(self, path: str) -> None:
        self.order.setdefault(path, len(self.order))

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        index = getattr(module, "layer_idx", None)
        looks_ahead = getattr(module, "is_causal", True) is False
        if looks_ahead and not self.encodes:
            raise UnsupportedModel(
                f"{type(module).__name__} looks ahead: only models that go left to right are supported, and encoders "
                "that come with the modules.json of sentence-transformers."
            )
        if self.encodes and (not looks_ahead or window is not None):
            raise UnsupportedModel(f"{type(module).__name__} does not see all of a text, as an encoder should.")
        if self.encodes and index is None:  # nothing is kept of a layer, so some do not say which they are
            index = len(self.layers)
        if not isinstance(index, int) or index in self.layers:
            raise UnsupportedModel(f"{type(module).__name__} is not the only attention of a numbered layer.")
        if not query.dtype == key.dtype == value.dtype:
            raise UnsupportedModel(f"{type(module).__name__} mixes types of numbers.")
        self.layers[index] = KvLayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


@contextmanager
def _traceable(module: PreTrainedModel) -> Iterator[None]:
    """Make a module's pass independent of numbers, which the meta device has none of: rotary updates and the choice of
    experts look at them."""
    kinds = {part: part.rope_type for part in module.modules() if hasattr(part, "rope_type")}
    switchable = module._can_set_experts_implementation()
    experts = module.get_experts_implementation()
    freeze_rope(module)
    if switchable:
        module.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        for part, kind in kinds.items():
            _set_rope_type(part, kind)
        if switchable:
            module.set_experts_implementation(experts)
