"""An encoder bound to its region: texts in, one vector a text out. It keeps no keys and values.

Texts are packed into one row, like the sequences of a decoder's pass. Attention goes through the same interface: here
each token sees all of its own text, before and behind it. Texts of similar length attend together, padded to one
another; no loop runs over texts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from engine.architecture import build_encoder, position_offset, read_config
from engine.attention import current_pass
from engine.batch import SequenceSlice, StepBatch
from engine.grammar import Grammars
from engine.model import KvCache, PageGate, WeightRegion, bind_weights
from engine.pooling import pool
from swapper.errors import CorruptImage
from swapper.frames import Region
from swapper.image import Embedding, Image


class EncoderModel:
    """Implements `ModelRunnerProtocol`, with vectors in the place of logits. Not for several threads at once."""

    kv_bytes_per_token = 0
    grammars: Grammars | None = None
    likeliest: torch.Tensor | None = None  # it samples nothing

    def __init__(self, weights: WeightRegion, image: Image, module: PreTrainedModel, how: Embedding) -> None:
        self.name = image.manifest.model
        self.vocab_size = int(module.config.vocab_size)
        self.context_length = image.manifest.context_length
        self._module = module
        self._how = how
        self._device = torch.device(weights.region.device)
        self._offset = position_offset(module)

    @staticmethod
    def bind(image: Image, shard: WeightRegion) -> EncoderModel:
        """Raises CorruptImage or UnsupportedModel, as `BoundModel.bind` does."""
        how = image.manifest.embedding
        if how is None:
            raise CorruptImage(f"{image.path} is no encoder's. Add the model again.")
        module = bind_weights(build_encoder(read_config(image.path), torch.float32), image, shard)
        return EncoderModel(shard, image, module, how)

    def kv_cache(self, region: Region) -> KvCache:
        return _NoKv(region)

    def forward(
        self, batch: StepBatch, kv: KvCache, gate: PageGate, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One vector for each slice of the batch, in float32, on the model's device."""
        with torch.inference_mode():
            hidden = self.hidden(batch, gate)
            starts, lengths = (
                torch.tensor(column, device=self._device)
                for column in zip(*((piece.start, piece.length) for piece in batch.slices), strict=True)
            )
            return pool(hidden, starts, lengths, self._how)

    def hidden(self, batch: StepBatch, gate: PageGate) -> torch.Tensor:
        """The last hidden state of each packed token."""
        ids, positions = torch.tensor((batch.tokens, batch.positions), device=self._device)[:, None]
        token = current_pass.set(EncoderPass(batch.slices, gate, self._device))
        try:
            output = self._module(input_ids=ids, position_ids=positions + self._offset)
        finally:
            current_pass.reset(token)
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def settle(self) -> None:
        """Nothing but passes needs its pages."""

    def close(self) -> None:
        """Passes leave nothing."""


class _NoKv:
    def __init__(self, region: Region) -> None:
        self.region = region


class EncoderPass:
    """The attention of one forward pass over packed texts."""

    def __init__(self, texts: Sequence[SequenceSlice], gate: PageGate, device: torch.device) -> None:
        self.gate = gate
        alike: dict[int, list[SequenceSlice]] = {}
        for text in texts:
            alike.setdefault((text.length - 1).bit_length(), []).append(text)
        self._groups = [_Texts(members, device) for members in alike.values()]

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
        packed = [part[0].transpose(0, 1) for part in (query, key, value)]  # [tokens, heads, width]
        result = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for group in self._groups:
            q, k, v = (part[group.rows].transpose(1, 2) for part in packed)  # [texts, heads, tokens, width]
            seen = scaled_dot_product_attention(
                q, k, v, attn_mask=group.mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
            result[group.rows] = seen.transpose(1, 2)
        return result[None]


class _Texts:
    """Texts padded to one length by their own last token, which gives that token's row the same result again."""

    def __init__(self, texts: Sequence[SequenceSlice], device: torch.device) -> None:
        starts = torch.tensor([text.start for text in texts])[:, None]
        lengths = torch.tensor([text.length for text in texts])[:, None]
        steps = torch.arange(int(lengths.max()))[None]
        self.rows = (starts + torch.minimum(steps, lengths - 1)).to(device)
        """The packed row of each token, shape `[texts, tokens]`."""
        is_real = steps < lengths
        self.mask = None if bool(is_real.all()) else is_real[:, None, None].to(device)
