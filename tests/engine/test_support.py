"""Which architectures are taken, which are refused and why, and that the check would notice a wrong one."""

from __future__ import annotations

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from engine import attention
from engine.groups import GroupView
from engine.support import check_supported
from swapper.checkpoint import Checkpoint
from swapper.errors import UnsupportedModel
from tests.models import SUPPORTED, make_checkpoint


def configuration(directory: Path, architecture: str, **fields: Any) -> Any:
    """A checkpoint of which there is only the configuration, which is all that the check reads."""
    AutoConfig.for_model(architecture, **fields).save_pretrained(directory)
    return types.SimpleNamespace(path=directory, config=json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize("architecture", SUPPORTED)
def test_supported(tmp_path: Path, architecture: str) -> None:
    check_supported(Checkpoint(make_checkpoint(tmp_path, architecture)))


def test_a_real_model_is_supported(smollm2: Path) -> None:
    check_supported(Checkpoint(smollm2))


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"hidden_size": 16384, "num_attention_heads": 128, "num_hidden_layers": 126}),
        ("mixtral", {}),
        ("gpt_oss", {"num_local_experts": 128}),
        ("deepseek_v3", {}),
    ],
)
def test_models_far_larger_than_memory_are_checked_small(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
) -> None:
    check_supported(configuration(tmp_path, architecture, **fields))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("falcon", "attention that cannot be replaced"),
        ("bloom", "3 of the 3 layers of BloomForCausalLM"),
        ("mamba", "recurrent"),
        ("bert", "left to right"),
        ("t5", "encoder-decoder"),
    ],
)
def test_refused_by_its_nature(tmp_path: Path, architecture: str, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(Checkpoint(make_checkpoint(tmp_path, architecture)))


def test_models_that_take_more_than_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="more than text"):
        check_supported(configuration(tmp_path, "gemma3"))


def test_checkpoints_with_another_head_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_checkpoint(tmp_path, "llama"))
    checkpoint.config["architectures"] = ["LlamaForSequenceClassification"]
    with pytest.raises(UnsupportedModel, match="LlamaForSequenceClassification"):
        check_supported(checkpoint)


def test_attention_that_the_interface_does_not_tell_of_is_noticed(tmp_path: Path) -> None:
    """Llama 4 attends within chunks, which only its masks know."""
    fields = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64}
    with pytest.raises(UnsupportedModel, match="does not compute the same"):
        check_supported(configuration(tmp_path, "llama4_text", num_local_experts=2, **fields))


def test_what_only_long_contexts_show_is_noticed(tmp_path: Path) -> None:
    """Llama 4 without chunks scales its attention by the place in the packed row, from the 8,192nd token on."""
    fields = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "intermediate_size_mlp": 64}
    kinds = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [0, 1], "attention_chunk_size": None}
    tuned = {"attn_temperature_tuning": True, "attn_scale": 2.0}
    with pytest.raises(UnsupportedModel, match="does not compute the same"):
        check_supported(configuration(tmp_path, "llama4_text", num_local_experts=2, **fields, **kinds, **tuned))


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_window_that_is_not_honoured_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    monkeypatch.setattr(attention, "GroupView", lambda group, window, stride: GroupView(group, None, stride))
    with pytest.raises(UnsupportedModel, match="does not compute the same"):
        check_supported(Checkpoint(make_checkpoint(tmp_path, architecture)))


@pytest.mark.parametrize(("architecture", "ignored"), [("gemma2", "softcap"), ("gpt_oss", "sinks")])
def test_a_cap_or_a_sink_that_is_not_honoured_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, ignored: str
) -> None:
    attend = attention._attend

    def forgetful(
        query: torch.Tensor,
        view: Any,
        layer: Any,
        scaling: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        plain: bool,
    ) -> torch.Tensor:
        softcap = None if ignored == "softcap" else softcap
        return attend(query, view, layer, scaling, softcap, None if ignored == "sinks" else sinks, plain)

    monkeypatch.setattr(attention, "_attend", forgetful)
    with pytest.raises(UnsupportedModel, match="does not compute the same"):
        check_supported(Checkpoint(make_checkpoint(tmp_path, architecture)))
