"""The pack plan: order, ties, conversions, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.plan import pack_plan
from swapper.checkpoint import Checkpoint
from swapper.errors import SourceError, UnsupportedModel
from swapper.packer import PackPlan
from tests.models import CONTEXT, make_checkpoint, random_model

Tensors = dict[str, torch.Tensor]


def plan_of(directory: Path, architecture: str, dtype: str | None = None, **overrides: object) -> PackPlan:
    return pack_plan(Checkpoint(make_checkpoint(directory, architecture, **overrides)), dtype)


def layers(plan: PackPlan) -> list[str]:
    return [layer for layer, _ in groupby(plan.ranks[0], key=lambda planned: planned.layer)]


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> Checkpoint:
    """Rewrite a checkpoint's weights, which `change` edits in place."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory)


def change_config(directory: Path, **fields: object) -> Checkpoint:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    return Checkpoint(directory)


# ---- order and layers


def test_tensors_are_in_execution_order(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "llama", tie_word_embeddings=False)
    decoder = [f"model.layers.{index}" for index in range(3)]
    assert layers(plan) == ["model.embed_tokens", *decoder, "model.norm", "lm_head"]
    assert plan.architecture == "LlamaForCausalLM"


def test_order_is_that_of_execution_and_not_of_registration(tmp_path: Path) -> None:
    """OPT registers its final norm and its projections before the layers."""
    order = layers(plan_of(tmp_path, "opt", word_embed_proj_dim=32))
    body = "model.decoder."
    assert order[:3] == [body + "embed_tokens", body + "embed_positions", body + "project_in"]
    assert order[-2:] == [body + "final_layer_norm", body + "project_out"]


def test_every_tensor_of_the_module_is_planned_once_and_built_as_transformers_loads_it(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "qwen2")
    expected = random_model("qwen2").state_dict()
    assert sorted(planned.name for planned in plan.ranks[0]) == sorted(expected)
    for planned in plan.ranks[0]:
        assert torch.equal(planned.build(Checkpoint(tmp_path)), expected[planned.name])
        assert planned.shape == expected[planned.name].shape
        assert planned.dtype == "float32"


# ---- ties


def test_tied_weights_are_stored_once_where_they_are_wanted_first(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "llama", tie_word_embeddings=True)
    assert plan.ranks[0][0].name == "model.embed_tokens.weight"
    assert "lm_head" not in layers(plan)


def test_a_tied_weight_may_be_stored_under_its_other_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = change_tensors(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")})
    )
    first = pack_plan(checkpoint).ranks[0][0]
    assert (first.name, first.sources) == ("model.embed_tokens.weight", ("lm_head.weight",))


def test_tied_weights_stored_twice_must_be_equal(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    embedding = "model.embed_tokens.weight"
    twice = change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding].clone()}))
    assert "lm_head" not in layers(pack_plan(twice))
    other = change_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[embedding] + 1}))
    with pytest.raises(SourceError, match="tie_word_embeddings"):
        pack_plan(other)


# ---- names and conversions


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_one_file_tensor_an_expert_becomes_the_fused_tensor_of_the_module(tmp_path: Path, architecture: str) -> None:
    make_checkpoint(tmp_path, architecture)
    checkpoint = Checkpoint(tmp_path)
    fused = {planned.name: planned for planned in pack_plan(checkpoint).ranks[0]}[
        "model.layers.1.mlp.experts.gate_up_proj"
    ]
    assert len(fused.sources) == 8  # gate and up of four experts
    expected = random_model(architecture).state_dict()[fused.name]
    assert fused.shape == expected.shape
    assert torch.equal(fused.build(checkpoint), expected)


def test_a_checkpoint_of_the_body_alone_serves_a_model_with_a_tied_head(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt2")

    def strip(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    checkpoint = change_tensors(tmp_path, strip)
    assert pack_plan(checkpoint).ranks[0][0].sources == ("wte.weight",)


def test_buffers_that_old_checkpoints_hold_are_passed_over(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "llama", "llama")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    pack_plan(change_tensors(tmp_path / "llama", lambda tensors: tensors.update(old)))
    make_checkpoint(tmp_path / "gpt2", "gpt2")
    masks = {"transformer.h.0.attn.bias": torch.ones(4, 4), "transformer.h.0.attn.masked_bias": torch.ones(1)}
    pack_plan(change_tensors(tmp_path / "gpt2", lambda tensors: tensors.update(masks)))


# ---- types and sizes


def test_the_type_is_the_checkpoints_unless_another_is_asked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = Checkpoint(tmp_path)
    assert pack_plan(checkpoint).dtype == "float32"
    plan = pack_plan(checkpoint, "bfloat16")
    assert {plan.dtype, *(planned.dtype for planned in plan.ranks[0])} == {"bfloat16"}
    assert plan.ranks[0][0].build(checkpoint).dtype == torch.bfloat16
    with pytest.raises(SourceError, match="float32, bfloat16, float16"):
        pack_plan(checkpoint, "int8")


def test_what_a_model_keeps_in_float32_stays_so(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "deepseek_v3", "bfloat16")
    kept = {planned.name.rpartition(".")[2] for planned in plan.ranks[0] if planned.dtype == "float32"}
    assert kept == {"weight", "e_score_correction_bias"}
    assert all("mlp.gate." in planned.name for planned in plan.ranks[0] if planned.dtype == "float32")


@pytest.mark.parametrize(
    ("architecture", "elements"),
    [
        ("llama", 3 * 2 * (12 + 12)),  # layers, key heads, key and value width
        ("gpt2", 3 * 4 * (16 + 16)),
        ("deepseek_v3", 3 * 4 * (24 + 12)),  # values are narrower than keys
    ],
)
def test_bytes_of_keys_and_values_a_token(tmp_path: Path, architecture: str, elements: int) -> None:
    make_checkpoint(tmp_path, architecture)
    assert pack_plan(Checkpoint(tmp_path)).kv_bytes_per_token == elements * 4
    assert pack_plan(Checkpoint(tmp_path), "bfloat16").kv_bytes_per_token == elements * 2


def test_context_length_is_the_configurations(tmp_path: Path) -> None:
    assert plan_of(tmp_path / "a", "llama").context_length == CONTEXT
    assert plan_of(tmp_path / "b", "gpt2", max_position_embeddings=128).context_length == 128


def test_context_length_ends_where_rotary_frequencies_would_change(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    plan = plan_of(tmp_path, "phi3", rope_parameters=rope, original_max_position_embeddings=64)
    assert plan.context_length == 64


# ---- refusals


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    checkpoint = change_tensors(tmp_path, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(SourceError, match=r"lacks 1 tensors .*model\.norm\.weight"):
        pack_plan(checkpoint)


def test_tensors_without_a_place_are_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.ones(12)}
    checkpoint = change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    with pytest.raises(SourceError, match=r"no place for: model\.layers\.0\.self_attn\.q_norm\.weight"):
        pack_plan(checkpoint)


def test_a_configuration_of_another_size_is_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(SourceError, match="shape"):
        pack_plan(change_config(tmp_path, intermediate_size=100))


def test_too_few_experts_in_the_files_are_noticed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    with pytest.raises(SourceError, match="shape"):
        pack_plan(change_config(tmp_path, num_local_experts=8))


def test_models_that_transformers_does_not_know_are_refused_and_their_code_is_not_run(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "modeling.py").write_text("raise SystemExit('remote code ran')")
    own_code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    with pytest.raises(UnsupportedModel, match="own code, which is never run"):
        pack_plan(change_config(tmp_path, model_type="homegrown", auto_map=own_code))
    pack_plan(change_config(tmp_path, model_type="llama", auto_map=own_code))  # a known model does not need it
