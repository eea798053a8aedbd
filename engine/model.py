"""A model bound to its region: a transformers module whose weights are views of paged memory.

Binding touches no weight, so it can be done before the first page is in, and it is done once: addresses never change,
whatever is paged out and in. `BoundModel.forward` is the only way to run the model. It waits for a layer's pages before
it runs the layer, by a hook on each module that the manifest has an extent for.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel

from engine.architecture import DTYPES, build, freeze_rope, read_config, trace
from engine.attention import PagedPass, Pass, current_pass
from engine.batch import StepBatch
from engine.grammar import Grammars, ImageGrammars
from engine.kv_cache import KvLayout, PagedKvCache
from engine.partition import Collectives, cut_module
from engine.stages import Stage, StageEnd
from engine.views import region_bytes, view
from swapper.errors import CorruptImage, UnsupportedModel
from swapper.frames import Region
from swapper.header import TORCH_WORDS
from swapper.image import Image, Shard

if TYPE_CHECKING:
    from engine.gpu_passes import GpuPasses
    from engine.mesh import Traffic


class KvCache(Protocol):
    """A KV region seen as blocks. Which blocks are mapped and who owns them is `engine/blocks.py`'s business."""

    region: Region


class PageGate(Protocol):
    """How a forward pass waits for pages: returns once shard bytes `[0, nbytes)` are in.

    The engine's gate gives the processor away meanwhile. Raises PageInAborted if they will not come.
    """

    def __call__(self, nbytes: int) -> None: ...


class ModelRunnerProtocol(Protocol):
    """What the batching engine needs of a bound model."""

    name: str
    vocab_size: int
    context_length: int
    kv_bytes_per_token: int
    grammars: Grammars | None

    @property
    def likeliest(self) -> torch.Tensor | None:
        """What `find_likeliest` says of the last pass, if that is known already; padded to more rows, maybe."""

    def forward(
        self, batch: StepBatch, kv: KvCache, gate: PageGate, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the sampled rows, shape `[len(batch.sampled), vocab]`, float32, on the model's device.

        With `tokens` (int64, on that device), these are the packed tokens, and those of the batch are not looked at.
        """

    def kv_cache(self, region: Region) -> KvCache:
        """See a reserved region as this model's KV blocks. Touches no memory."""

    def settle(self) -> None:
        """Return once nothing but passes needs the model's pages, within a second or so."""

    def close(self) -> None:
        """Give back what passes have left on the device. No pass is under way, and none will come."""


class WeightRegion(Protocol):
    """What binding needs of a `PagedShard`: it is all about addresses."""

    shard: Shard
    region: Region

    def is_ready(self, nbytes: int) -> bool:
        """Whether shard bytes `[0, nbytes)` are in."""


class BoundModel:
    """One rank's shard of a model, ready to run as far as its pages are in. Not for several threads at once."""

    def __init__(
        self,
        weights: WeightRegion,
        image: Image,
        module: PreTrainedModel,
        kv: KvLayout,
        stage: Stage | None = None,
        traffic: Traffic | None = None,
        plain: bool = False,
    ) -> None:
        """`stage` is its place in a pipeline, if it has one; `traffic` what counts its collectives; with `plain`, it
        attends step by step."""
        manifest = image.manifest
        self.weights = weights
        self.name = manifest.model
        self.vocab_size = int(module.config.get_text_config().vocab_size)
        self.context_length = manifest.context_length
        self.kv_bytes_per_token = kv.bytes_per_token
        self.kv_layout = kv
        self.grammars: Grammars | None = ImageGrammars(image.path, self.vocab_size)
        self._module = module
        self._stage = stage
        self._plain = plain
        self._device = torch.device(weights.region.device)
        self._keeps_logits = "logits_to_keep" in inspect.signature(type(module).forward).parameters
        self._gpu = self._gpu_passes(traffic) if self._device.type == "cuda" else None

    @staticmethod
    def bind(image: Image, shard: WeightRegion, mesh: Collectives | None = None, *, plain: bool = False) -> BoundModel:
        """Build the module over the shard's region; for a rank of a mesh, its part of it. Touches no weight, and copies
        none.

        Raises CorruptImage if the image is not what the model's configuration says, UnsupportedModel if this version of
        transformers cannot build it.
        """
        manifest = image.manifest
        # Weights bring their own types. Building with any type but torch's default would change that default for the
        # whole process meanwhile, and other models may be running in other threads.
        module = build(read_config(image.path), torch.float32)
        if mesh is not None:
            cut_module(module, mesh)
        architecture = trace(module)
        own = architecture.span_of({extent.name for extent in shard.shard.layers})
        kv = KvLayout(architecture.kv_of(own), DTYPES[manifest.dtype], manifest.kv_bytes_per_token)
        if kv.used_bytes_per_token > kv.bytes_per_token:
            raise CorruptImage(
                f"{image.path} was packed for {kv.bytes_per_token} bytes of keys and values a token, but this "
                f"version of transformers makes {kv.used_bytes_per_token}. Add the model again."
            )
        stage = None
        if mesh is not None and mesh.rank.pp > 1:
            stage = Stage(mesh, architecture.hidden_width, kv.dtype, torch.device(shard.region.device))
            stage.keep(module, architecture, own)
        bind_weights(module, image, shard)
        if stage is not None:
            stage.connect(module, own)
        traffic = mesh.traffic if mesh is not None and mesh.rank.size > 1 else None
        return BoundModel(shard, image, module, kv, stage, traffic, plain)

    @property
    def likeliest(self) -> torch.Tensor | None:
        return None if self._gpu is None else self._gpu.likeliest

    def kv_cache(self, region: Region) -> PagedKvCache:
        return PagedKvCache(region, self.kv_layout)

    def forward(
        self, batch: StepBatch, kv: KvCache, gate: PageGate, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one pass, in the calling thread.

        An exception out of `gate` leaves the model as it was; the pass's keys and values may then be written in part.
        """
        assert isinstance(kv, PagedKvCache)
        with torch.inference_mode():
            if self._gpu is not None:
                logits = self._gpu.forward(batch, kv, gate, tokens)
            else:
                ids, positions = torch.tensor((batch.tokens, batch.positions))[:, None]
                sampled = torch.tensor(batch.sampled, dtype=torch.long)
                ids = ids if tokens is None else tokens[None]
                logits = self._run(ids, positions, sampled, PagedPass(batch, kv, gate, self._plain))
        # Made outside of inference mode, so that whoever gets it may write to it.
        return logits.to(torch.float32, copy=True)

    def rehearse(self, batch: StepBatch, kv: PagedKvCache) -> torch.Tensor:
        """On a GPU: a pass on the current stream, of a model that serves nobody (`engine/rehearsal.py`)."""
        assert self._gpu is not None
        with torch.inference_mode():
            return self._gpu.rehearse(batch, kv).to(torch.float32, copy=True)

    def settle(self) -> None:
        if self._gpu is not None:
            self._gpu.settle()

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()

    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, sampled: torch.Tensor, one: Pass) -> torch.Tensor:
        """Logits of the sampled rows; `tokens` and `positions` have shape `[1, tokens]`."""
        keep = {"logits_to_keep": sampled} if self._keeps_logits else {}
        token = current_pass.set(one)
        try:
            if self._stage is not None:
                self._stage.begin(tokens.shape[1])
            output = self._module(input_ids=tokens, position_ids=positions, use_cache=False, **keep)
        except StageEnd:
            assert self._stage is not None
            return self._stage.logits_of_last(len(sampled), self.vocab_size)
        finally:
            current_pass.reset(token)
        logits: torch.Tensor = output.logits[0] if self._keeps_logits else output.logits[0, sampled]
        if self._stage is not None:
            self._stage.send_logits(logits)
        return logits

    def _gpu_passes(self, traffic: Traffic | None) -> GpuPasses:
        from engine.fused import fuse  # both need Triton
        from engine.gpu_passes import GpuPasses

        fuse(self._module)
        end = max((extent.end for extent in self.weights.shard.layers), default=0)
        return GpuPasses(
            self.name, self._device, self._run, self.weights.is_ready, end, self.context_length, traffic, self._plain
        )


def bind_weights(module: PreTrainedModel, image: Image, shard: WeightRegion) -> PreTrainedModel:
    """Give a module on the meta device its weights, with a gate before each layer. Raises CorruptImage."""
    data = region_bytes(shard.region)
    _fill_own_buffers(module, data.device)
    if data.device.type == "cuda":  # passes run on another stream
        torch.cuda.current_stream(data.device).synchronize()
    freeze_rope(module)
    _bind_tensors(module, data, shard.shard, image.manifest.model)
    for extent in shard.shard.layers:
        _gate_before(module.get_submodule(extent.name), extent.end)
    return module.requires_grad_(False)


def _fill_own_buffers(module: PreTrainedModel, device: torch.device) -> None:
    """Allocate the buffers that no checkpoint holds and have the model fill them.

    Weights are still on the meta device, so whatever else the model initialises on the way goes nowhere.
    """
    for path, part in module.named_modules():
        own = {
            name: buffer
            for name, buffer in part._buffers.items()
            if buffer is not None and name in part._non_persistent_buffers_set
        }
        for name, buffer in own.items():
            part._buffers[name] = _unlikely(buffer, device)
        if own:
            module._init_weights(part)
        for name in own:
            buffer = part._buffers[name]
            if buffer is None or buffer.dtype == torch.bool or not buffer.numel():
                continue
            if torch.equal(buffer, _unlikely(buffer, device)):
                raise UnsupportedModel(f"{type(module).__name__} does not fill its buffer {path}.{name} by itself.")


def _unlikely(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of what no model fills a buffer with."""
    if like.dtype == torch.bool:
        return torch.zeros_like(like, device=device)
    limits = torch.finfo(like.dtype) if like.dtype.is_floating_point else torch.iinfo(like.dtype)
    return torch.full(like.shape, limits.min, dtype=like.dtype, device=device)


def _bind_tensors(module: PreTrainedModel, data: torch.Tensor, shard: Shard, model: str) -> None:
    """Put a view of the region in the place of each parameter and persistent buffer, tied ones included."""
    entries = {entry.name: entry for entry in shard.tensors}
    state = module.state_dict(keep_vars=True)
    bound: dict[int, torch.Tensor] = {}
    for name, tensor in state.items():
        entry = entries.pop(name, None)
        if entry is None:
            continue
        dtype: torch.dtype = getattr(torch, TORCH_WORDS[entry.dtype])
        if entry.shape != tuple(tensor.shape):
            raise CorruptImage(f"Image of {model}: {name} has shape {entry.shape}, not {tuple(tensor.shape)}.")
        weight = view(data, entry.offset, dtype, entry.shape)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        bound[id(tensor)] = torch.nn.Parameter(weight, requires_grad=False) if is_parameter else weight
    missing = [name for name, tensor in state.items() if id(tensor) not in bound]
    if missing or entries:
        raise CorruptImage(f"Image of {model} does not hold what its model needs: {[*missing, *entries][:3]}.")
    for name, tensor in state.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, bound[id(tensor)])


def _gate_before(part: torch.nn.Module, nbytes: int) -> None:
    def wait(module: torch.nn.Module, args: object) -> None:
        current_pass.get().gate(nbytes)

    part.register_forward_pre_hook(wait)
