"""Pipeline parallelism: which layers a stage has, and how a module runs only those.

Stages are runs of layers, as equal in bytes as can be; the embedding counts for the first, the head for the last. A
stage's module keeps its class and its forward: layers of other stages hand their input on, what comes before the layers
gives back the hidden states it should have made, the first own layer takes those of the stage before, and the forward
ends after the last own layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.architecture import Architecture, decoder_layers
from engine.partition import Collectives
from swapper.errors import UnsupportedModel


class StageEnd(Exception):
    """A stage's part of a forward pass is done."""


def stage_spans(architecture: Architecture, nbytes: Mapping[str, int], stages: int) -> tuple[range, ...]:
    """The stages of a model whose tensors have so many bytes. Raises UnsupportedModel if it has too few layers."""

    def total(first: int, last: int) -> int:
        return sum(nbytes[name] for unit in architecture.units_of(range(first, last)) for name in unit.tensors)

    count = len(architecture.layers)
    layers = [total(index, index + 1) for index in range(count)]
    # The layerless stages at both ends: a tensor that is tied between them counts twice, because both have it.
    before, after = total(0, 0), total(count, count)
    if count:
        layers[0] -= before
        layers[-1] -= after
    return balance(before, layers, after, stages)


def balance(before: int, layers: Sequence[int], after: int, stages: int) -> tuple[range, ...]:
    """Divide layers of so many bytes among stages, so that the largest stage is as small as can be; `before` and
    `after` are the bytes of what comes before and after all layers. Raises UnsupportedModel if there are too few."""
    count = len(layers)
    if stages > count:
        raise UnsupportedModel(f"A model of {count} layers has no {stages} pipeline stages (--pp).")
    sums = [0, *accumulate(layers)]

    def nbytes(first: int, last: int) -> int:
        return sums[last] - sums[first] + before * (first == 0) + after * (last == count)

    # best[k]: the least size of the largest of the stages so far, if they have the layers before k; and where they end
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(stages):
        left = stages - stage - 1  # each of those needs a layer
        best = {
            last: min(
                (max(size, nbytes(first, last)), (*ends, last)) for first, (size, ends) in best.items() if first < last
            )
            for last in range(stage + 1, count - left + 1)
            if any(first < last for first in best)
        }
    ends = best[count][1]
    return tuple(range(first, last) for first, last in zip((0, *ends), ends, strict=False))


class Stage:
    """A module's place in a pipeline: what comes from the stage before, and what goes to the one behind."""

    def __init__(self, mesh: Collectives, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """`width` and `dtype` are those of the hidden states between layers."""
        self._mesh = mesh
        self._rank = mesh.rank
        self._width = width
        self._dtype = dtype
        self._device = device
        self._hidden: torch.Tensor  # of the pass under way

    def keep(self, module: PreTrainedModel, architecture: Architecture, own: range) -> None:
        """Leave a module these layers only."""
        _, layers = decoder_layers(module)
        for index, layer in enumerate(layers):
            if index not in own:
                _empty(layer)
                layer.__dict__["forward"] = partial(_hand_on, architecture.layers_return_tuples)
        for path in architecture.outside_of(own):
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent)._modules[name] = _Absent(self)

    def connect(self, module: PreTrainedModel, own: range) -> None:
        """Have the first layer take what the stage before has sent, and the last one send to the stage behind, after
        which the forward raises StageEnd. Hooks run in the order in which they were registered: a layer's page gate
        must have been before."""
        _, layers = decoder_layers(module)
        if not self._rank.is_first:
            layers[own.start].register_forward_pre_hook(self._receive, with_kwargs=True)
        if not self._rank.is_last:
            layers[own.stop - 1].register_forward_hook(self._send)

    def begin(self, tokens: int) -> None:
        """A pass of so many tokens begins."""
        # Zeros, because what runs before the first own layer may compute with them.
        self._hidden = torch.zeros(1, tokens, self._width, dtype=self._dtype, device=self._device)

    @property
    def hidden(self) -> torch.Tensor:
        return self._hidden

    def send_logits(self, logits: torch.Tensor) -> None:
        """To the leader, who samples. Every rank of the last stage has them."""
        if self._rank.tp_rank == 0:
            self._mesh.send(logits.to(self._dtype), 0)

    def logits_of_last(self, rows: int, vocabulary: int) -> torch.Tensor:
        """The last stage's logits on the leader; nothing that means anything on other ranks."""
        if not self._rank.is_leader:
            return self._hidden.new_zeros(rows, 1)
        logits = torch.empty(rows, vocabulary, dtype=self._dtype, device=self._device)
        return self._mesh.receive(logits, self._rank.size - self._rank.tp)

    def _receive(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = self._mesh.receive(self._hidden, self._rank.rank - self._rank.tp)
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def _send(self, layer: torch.nn.Module, args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._mesh.send(hidden.to(self._dtype), self._rank.rank + self._rank.tp)
        raise StageEnd


class _Absent(torch.nn.Module):
    """In the place of what another stage has before or behind its layers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return self._stage.hidden


def _empty(part: torch.nn.Module) -> None:
    """Take away a layer's tensors and modules; its other attributes stay, which models look at."""
    for table in (part._modules, part._parameters, part._buffers):
        table.clear()


def _hand_on(in_tuple: bool, *args: Any, **kwargs: Any) -> Any:
    """What a layer of another stage does."""
    hidden = args[0] if args else kwargs["hidden_states"]
    return (hidden,) if in_tuple else hidden
