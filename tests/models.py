"""Small random checkpoints of every architecture the tests need, saved as Hugging Face directories.

A model is a few kilobytes to a megabyte, in float32, with weights large enough that its greedy tokens vary.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY = 320
CONTEXT = 256
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT: dict[str, Any] = {**_COMMON, "num_key_value_heads": None, "hidden_size": 64}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}

_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "tie_word_embeddings": True},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 16},
    "mistral": {**_COMMON, "sliding_window": WINDOW},
    "gemma2": {
        **_COMMON,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
    },
    "gemma3_text": {
        **_COMMON,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "phi3": _COMMON,
    "gpt2": {**_GPT, "n_inner": 96},
    "opt": {**_GPT, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": {**_COMMON, **_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_COMMON, **_EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "gpt_oss": {
        **_COMMON,
        **_EXPERTS,
        "num_local_experts": 4,
        "sliding_window": WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "stablelm": {**_COMMON, "hidden_size": 64},
    "falcon": {**_GPT, "new_decoder_architecture": False, "multi_query": True},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2},
    "bert": _GPT,
    "t5": {"vocab_size": VOCABULARY, "d_model": 48, "d_ff": 96, "d_kv": 12, "num_layers": 2, "num_heads": 4},
}

SUPPORTED = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "gpt2",
    "opt",
    "mixtral",
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v3",
    "stablelm",
)
"""Architectures that the engine serves."""


def make_checkpoint(directory: Path, architecture: str, seed: int = 0, **overrides: Any) -> Path:
    """Save a small random model of one architecture to `directory`, and return it. The same seed gives the same bytes.

    `overrides` are fields of the model's configuration, e.g. `num_hidden_layers=8`.
    """
    model = random_model(architecture, seed, **overrides)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    return directory


def random_model(architecture: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The model that `make_checkpoint` saves, with transformers' eager attention."""
    name = "gemma3_text" if architecture == "gemma3" else architecture
    config = AutoConfig.for_model(name, **{**_ARCHITECTURES[name], **overrides})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if config.is_encoder_decoder:
            from transformers import AutoModelForSeq2SeqLM

            return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
        spread(model)
    return model.eval()


@torch.no_grad()
def spread(model: PreTrainedModel) -> None:
    """Draw weights anew, so large that attention is sharp and logits differ from token to token."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 1.5 / math.sqrt(parameter.shape[-1]))
        else:
            parameter.add_(torch.randn_like(parameter) * 0.1)


def make_tokenizer(directory: Path) -> Path:
    """Add a byte-level tokenizer with a chat template to a checkpoint directory.

    Ids 0 to 2 are `<pad>`, `<bos>` and `<eos>`; every byte is one token, so any text can be encoded.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=specials[0], bos_token=specials[1], eos_token=specials[2]
    )
    fast.chat_template = (
        "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(directory)
    return directory
