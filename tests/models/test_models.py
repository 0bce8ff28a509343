"""Every model family against transformers: the logits of every position, through the paged cache."""

import functools
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers import (
    BLOCK_SIZE,
    CPU,
    EOS,
    LONG,
    Paged,
    assert_all_close,
    assert_close_but_for_rounding,
    random_tokens,
    reference_logits,
    tiny_hf_model,
    tiny_model,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nanopage import models
from nanopage.config.rope import UNROTATED
from nanopage.cpu.packed import PackedWeight
from nanopage.cpu.tile_linear import round_activations
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.layers.linear import Linear
from nanopage.layers.weight import Floats
from nanopage.models import find_family, load_families, own_families
from nanopage.reading.config import config_from_dict
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import STATE
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch, BlockUpdate, Fork, NewSequence, SamplingSettings
from nanopage.weights import loader
from nanopage.worker.eager import Eager, prepare
from nanopage.worker.model_runner import ModelRunner

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [1, 7, 8, 9, 40, 80]


def rope(rope_type, **params):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **params}}


def stretched(rope_type, **params):
    return rope(rope_type, factor=4.0, original_max_position_embeddings=64, **params)


def longrope(original, **params):
    """In which the longest sequence has the long factors, and no other does, if `original` is 64."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5], "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 20.0]}
    fields = rope("longrope", **factors, partial_rotary_factor=0.75, **params)
    return fields | {"original_max_position_embeddings": original}


# name: (family, config overrides). The longest sequence is longer than every window and original context here.
WINDOWS = {
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "mistral, window of one page": ("mistral", {"sliding_window": BLOCK_SIZE, "num_key_value_heads": 4}),
    "mistral, window of one": ("mistral", {"sliding_window": 1}),
    "qwen2, window in the last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen2, window in every layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen3, window by layer type": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3, window": ("phi3", {"sliding_window": 9}),
    "gpt_oss, window by layer type": (
        "gpt_oss",
        {
            "sliding_window": 5,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "olmo3, window by layer type": (
        "olmo3",
        {
            "sliding_window": 3,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3, window in layers without a rope": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 6, "no_rope_layer_interval": 2},
    ),
    "smollm3, window by layer type": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "num_hidden_layers": 4,
            "no_rope_layers": [0, 1, 0, 1],
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3, window": ("ministral3", {"sliding_window": 6}),
    "ministral, window by layer type": ("ministral", {"layer_types": ["sliding_attention", "full_attention"]}),
}
ROPES = {
    "llama, rope theta": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama, proportional rope": ("llama", rope("proportional", partial_rotary_factor=0.5, factor=2.0)),
    "llama, linear rope": ("llama", rope("linear", factor=2.5)),
    "llama, llama3 rope": ("llama", stretched("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "llama, yarn": ("llama", stretched("yarn")),
    "llama, yarn with attention_factor": ("llama", stretched("yarn", attention_factor=0.7)),
    "llama, yarn with mscale": ("llama", stretched("yarn", mscale=1.3, mscale_all_dim=0.4)),
    "llama, yarn with betas": ("llama", stretched("yarn", beta_fast=4.0, beta_slow=0.25, head_dim=32)),
    "llama, yarn without truncation": ("llama", stretched("yarn", beta_fast=3.0, truncate=False)),
    "llama, yarn of its own context": ("llama", rope("yarn", factor=4.0) | {"max_position_embeddings": 64}),
    "mistral, yarn": ("mistral", stretched("yarn")),
    "qwen2, yarn": ("qwen2", stretched("yarn")),
    "qwen3, linear rope": ("qwen3", rope("linear", factor=8.0)),
    "olmo3, yarn": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": stretched("yarn", attention_factor=1.3)["rope_parameters"],
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "num_hidden_layers": 4,
        },
    ),
    "gpt_oss, yarn with truncation": ("gpt_oss", stretched("yarn", beta_fast=8.0, truncate=True)),
    "smollm3, rope theta": ("smollm3", rope("default") | {"num_hidden_layers": 4}),
    "smollm3, yarn": ("smollm3", stretched("yarn") | {"num_hidden_layers": 4}),
    "qwen3_5, mrope and partial rope": (
        "qwen3_5_text",
        rope("default", partial_rotary_factor=0.5, mrope_section=[4, 2, 2], mrope_interleaved=True),
    ),
    "qwen3_next, linear rope": ("qwen3_next", rope("linear", factor=8.0, partial_rotary_factor=1.0)),
    "phi3, partial rope": ("phi3", rope("default", partial_rotary_factor=0.75)),
    "phi3, long factors": ("phi3", longrope(6) | {"max_position_embeddings": 160}),
    "phi3, short factors": ("phi3", longrope(1024)),
    "phi3, longrope with attention_factor": ("phi3", longrope(1024, attention_factor=1.2)),
    "glm4, another part of a head": ("glm4", rope("default", partial_rotary_factor=0.75)),
    "glm4, yarn": ("glm4", stretched("yarn")),
    "glm4_moe, all of a head": ("glm4_moe", rope("default", partial_rotary_factor=1.0)),
    "ministral3, temperature": (
        "ministral3",
        rope("yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5, mscale=0.7),
    ),
}
# Options of one family that do not change how a config is read or packed.
OPTIONS = {
    "gemma2, one soft cap": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 4.0}),
    "gemma2, the other soft cap": ("gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": None}),
    "gemma2, scale": ("gemma2", {"query_pre_attn_scalar": 9}),
    "gemma2, another activation": ("gemma2", {"hidden_activation": "silu"}),
    "gemma3, another window": ("gemma3_text", {"sliding_window": 3, "num_hidden_layers": 7}),
    "gemma3, two ropes": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo3, two ropes": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
            },
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "olmo3, gelu": ("olmo3", {"num_hidden_layers": 4, "hidden_act": "gelu"}),
    "gemma3n, soft cap": ("gemma3n_text", {"final_logit_softcapping": 5.0}),
    "gemma4, soft cap": ("gemma4_text", {"final_logit_softcapping": 5.0}),
    "gemma4, another activation": ("gemma4_text", {"hidden_activation": "silu"}),
    "gemma4, another window": ("gemma4_text", {"sliding_window": 3}),
    "gemma4, two ropes": (
        "gemma4_text",
        {
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.6,
                    "factor": 3.0,
                    "rope_theta": 500.0,
                },
                "sliding_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0},
            },
        },
    ),
    "gemma3, soft cap and scale": ("gemma3_text", {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 100}),
    "granite, embedding multiplier": ("granite", {"embedding_multiplier": 0.3}),
    "granite, attention multiplier": ("granite", {"attention_multiplier": 0.1}),
    "granite, residual multiplier": ("granite", {"residual_multiplier": 0.22}),
    "granite, logits scaling": ("granite", {"logits_scaling": 8.0}),
    "mamba2, time step limit": ("mamba2", {"time_step_limit": (0.3, 1.0)}),
    "mamba2, gelu": ("mamba2", {"hidden_act": "gelu"}),
    "granitemoehybrid, time step limit": ("granitemoehybrid", {"time_step_limit": (0.3, 1.0)}),
    "granitemoehybrid, gelu": ("granitemoehybrid", {"hidden_act": "gelu"}),
    "granitemoehybrid, rope": ("granitemoehybrid", rope("default") | {"position_embedding_type": "rope"}),
    "granitemoehybrid, embedding multiplier": ("granitemoehybrid", {"embedding_multiplier": 0.3}),
    "granitemoehybrid, attention multiplier": ("granitemoehybrid", {"attention_multiplier": 0.1}),
    "granitemoehybrid, residual multiplier": ("granitemoehybrid", {"residual_multiplier": 0.22}),
    "granitemoehybrid, logits scaling": ("granitemoehybrid", {"logits_scaling": 8.0}),
    "smollm3, no layer without a rope": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 1]}),
    "smollm3, another interval": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 3}),
    "smollm3, more flags than layers": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": [0, 1, 1, 0, 1, 1]}),
    "smollm3, gelu": ("smollm3", {"num_hidden_layers": 4, "hidden_act": "gelu"}),
    "gpt_oss, activation": ("gpt_oss", {"swiglu_alpha": 0.5, "swiglu_limit": 0.8}),
    "gpt_oss, a rope that is not stretched": ("gpt_oss", rope("default")),
    "llama, gelu": ("llama", {"hidden_act": "gelu"}),
    "llama, relu2": ("llama", {"hidden_act": "relu2"}),
    "qwen3_5, gelu": ("qwen3_5_text", {"hidden_act": "gelu"}),
    "qwen3, gelu_pytorch_tanh": ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}),
}
EXPERTS = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next, plain layers, states in several kinds, wide convolution": (
        "qwen3_next",
        {
            "num_hidden_layers": 5,
            "layer_types": None,
            "full_attention_interval": 5,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 5,
            "linear_num_key_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 6}),
    "mixtral, three of eight experts, tied": (
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "tie_word_embeddings": True},
    ),
    "granitemoehybrid, experts": ("granitemoehybrid", {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss, one expert, without biases, MHA, tied": (
        "gpt_oss",
        {"num_experts_per_tok": 1, "attention_bias": False, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, normalized, without biases, window": (
        "qwen2_moe",
        {
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2_moe, every second layer": ("qwen2_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe, a plain layer": ("qwen3_moe", {"mlp_only_layers": [0], "norm_topk_prob": True, "head_dim": 24}),
    "qwen3_moe, one expert, attention bias": ("qwen3_moe", {"num_experts_per_tok": 1, "attention_bias": True}),
    "gemma4, experts": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40},
    ),
    "glm4_moe": ("glm4_moe", {"num_hidden_layers": 3, "routed_scaling_factor": 2.5}),
    "glm4_moe, norms, biases, only experts, one group": (
        "glm4_moe",
        {
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
}
CASES = {
    "llama": ("llama", {}),
    "llama, MHA": ("llama", {"num_key_value_heads": 4}),
    "llama, GQA of 3": ("llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama, GQA of 4": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama, MQA": ("llama", {"num_key_value_heads": 1}),
    "llama, wide heads": ("llama", {"head_dim": 40}),
    "llama, narrow heads": ("llama", {"head_dim": 6}),
    "llama, attention bias": ("llama", {"attention_bias": True}),
    "llama, mlp bias": ("llama", {"mlp_bias": True}),
    "llama, both biases, tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, large eps": ("llama", {"rms_norm_eps": 0.5}),
    "mistral": ("mistral", {}),
    "mistral, wide heads, tied": ("mistral", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2, MQA, tied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2, a window that is off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, MHA, tied": ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3, attention bias, GQA of 3": (
        "qwen3",
        {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 2},
    ),
    "qwen3_5": ("qwen3_5_text", {}),
    "qwen3_5, one key head, attention bias, MHA, large eps": (
        "qwen3_5_text",
        {
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 1,
            "attention_bias": True,
            "num_key_value_heads": 4,
            "rms_norm_eps": 0.5,
        },
    ),
    "qwen3_5, only states": ("qwen3_5_text", {"layer_types": ["linear_attention"] * 2}),
    "qwen3_5, only attention": ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}),
    "gemma2": ("gemma2", {"num_hidden_layers": 3}),
    "gemma2, attention bias, not tied": ("gemma2", {"attention_bias": True}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7}),
    "gemma3, attention bias, tied": ("gemma3_text", {"attention_bias": True, "tie_word_embeddings": True}),
    "gemma3n": ("gemma3n_text", {}),
    "gemma3n, all shapes and options": (
        "gemma3n_text",
        {
            "intermediate_size": [96, 64, 48, 96],
            "num_kv_shared_layers": 0,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "attention_bias": True,
            "activation_sparsity_pattern": [0.0] * 4,
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "gemma4": ("gemma4_text", {}),
    "gemma4, V is K, fewer KV heads, biases, not tied, large eps": (
        "gemma4_text",
        {
            "attention_k_eq_v": True,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 1,
            "attention_bias": True,
            "rms_norm_eps": 0.1,
        },
    ),
    "gemma4, larger heads with windows, tied": (
        "gemma4_text",
        {"global_head_dim": 8, "num_global_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "gemma4, inputs of layers": ("gemma4_text", {"hidden_size_per_layer_input": 12}),
    "gemma4, layers that share K and V, inputs of layers, wide": (
        "gemma4_text",
        {
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 4, "full_attention"],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
        },
    ),
    "gemma4, layers that share K, which is V": (
        "gemma4_text",
        {
            "num_kv_shared_layers": 2,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 12,  # transformers needs it here
        },
    ),
    "phi3": ("phi3", {}),
    "phi3, MHA, tied": ("phi3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmo2": ("olmo2", {}),
    "olmo2, attention bias, MHA": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5}),
    "olmo3, attention bias, MHA, tied": (
        "olmo3",
        {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True, "num_hidden_layers": 4},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, wide heads, large eps": ("smollm3", {"num_hidden_layers": 4, "head_dim": 40, "rms_norm_eps": 0.5}),
    "smollm3, both biases, MHA, tied": (
        "smollm3",
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2, states in several kinds, biases": (
        "lfm2",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2, only states": ("lfm2", {"layer_types": ["conv", "conv"], "block_auto_adjust_ff_dim": False}),
    "lfm2, only attention": ("lfm2", {"layer_types": ["full_attention"] * 2, "block_ffn_dim_multiplier": 0.7}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2, groups, scaling, plain q, biases, tied": (
        "deepseek_v2",
        {
            "topk_method": "group_limited_greedy",
            "routed_scaling_factor": 1.7,
            "q_lora_rank": None,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2, yarn, no plain layer": (
        "deepseek_v2",
        stretched("yarn", mscale=0.7, mscale_all_dim=0.9) | {"first_k_dense_replace": 0},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, not interleaved, plain q, biases": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "attention_bias": True, "num_hidden_layers": 3},
    ),
    "deepseek_v3, one group, not normalized, yarn, large eps": (
        "deepseek_v3",
        stretched("yarn", mscale=1.0, mscale_all_dim=1.0)
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "n_shared_experts": 2, "rms_norm_eps": 0.1},
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "glm4_moe_lite, kinds of layers, groups": (
        "glm4_moe_lite",
        {"num_hidden_layers": 3, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2},
    ),
    "mamba2": ("mamba2", {}),
    "mamba2, one group, other biases, tied": (
        "mamba2",
        {
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 2,
            "layer_norm_epsilon": 0.1,
            "tie_word_embeddings": True,
            "num_hidden_layers": 3,
        },
    ),
    "granitemoehybrid": ("granitemoehybrid", {}),
    "granitemoehybrid, one group, all biases, tied": (
        "granitemoehybrid",
        {
            "mamba_n_groups": 1,
            "mamba_d_conv": 3,
            "mamba_expand": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", *["linear_attention"] * 3],
        },
    ),
    "granitemoehybrid, only attention, rope": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
    ),
    "glm": ("glm", {}),
    "glm, tied": ("glm", {"tie_word_embeddings": True, "attention_bias": False}),
    "glm4": ("glm4", {}),
    "glm4, no bias, MHA, gelu": ("glm4", {"attention_bias": False, "num_key_value_heads": 4, "hidden_act": "gelu"}),
    "ministral": ("ministral", {}),
    "ministral3": ("ministral3", {}),
    "ministral3, tied": ("ministral3", {"tie_word_embeddings": True, "rms_norm_eps": 0.5}),
    "granite": ("granite", {}),
    "granite, both biases, tied": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    **WINDOWS,
    **ROPES,
    **EXPERTS,
}


def each_alone_then_decoded(paged, lengths):
    """A prefill in one go, then the last tokens one by one."""
    for index, length in enumerate(lengths):
        first = max(1, length - 5)
        paged.step({index: first})
        for _ in range(length - first):
            paged.step({index: 1})


def all_decoded_together(paged, lengths):
    """Every sequence token by token from its first, the whole batch at once; the short ones leave early."""
    for position in range(max(lengths)):
        paged.step({index: 1 for index, length in enumerate(lengths) if position < length})


def chunks_and_decodes_mixed(paged, lengths):
    """A new sequence joins each step; prompts run in chunks of 19, their last tokens one by one."""
    arrived = 0
    while any(paged.done(index) < length for index, length in enumerate(lengths)):
        arrived = min(arrived + 1, len(lengths))
        step = {}
        for index in range(arrived):
            left = lengths[index] - paged.done(index)
            if left:
                step[index] = min(19, left - 4) if left > 4 else 1
        if step:
            paged.step(step)


PLANS = [each_alone_then_decoded, all_decoded_together, chunks_and_decodes_mixed]


def packed(model, kv_cache, table, config):
    """For Paged: the model's own modules, its weights packed as an engine's on a CPU."""
    return Eager(model, kv_cache, table)


def make_case(name, directory, lengths=LENGTHS):
    family, overrides = CASES[name]
    hf_model = tiny_hf_model(family, **overrides)
    hf_model.save_pretrained(directory)
    sequences = random_tokens(lengths)
    expected = reference_logits(hf_model, sequences)
    return SimpleNamespace(name=name, directory=directory, sequences=sequences, expected=expected, hf_model=hf_model)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    return make_case(request.param, tmp_path_factory.mktemp("model"))


FIRST = {family: name for name, (family, _) in reversed(CASES.items())}  # case of each family
# Without NANOPAGE_LONG_TESTS=1, more than one plan is for a plain family, and for those whose decodes differ: windows,
# states, latent vectors, sinks.
DECODED = ["llama", "mistral, window", "gemma3", "gpt_oss", "mixtral, window", "deepseek_v2", "deepseek_v3"]
DECODED += ["qwen3_next", "qwen3_5", "lfm2", "mamba2", "granitemoehybrid", "qwen2, window in the last layers"]
MORE_PLANS = CASES if LONG else dict.fromkeys([*DECODED, *WINDOWS])


@pytest.mark.parametrize("plan", [each_alone_then_decoded, chunks_and_decodes_mixed], ids=lambda plan: plan.__name__)
def test_logits_of_every_position_equal_transformers(case, plan):
    if plan is each_alone_then_decoded and case.name not in MORE_PLANS:
        pytest.skip("runs with NANOPAGE_LONG_TESTS=1")
    paged = Paged(case.directory, case.sequences, make_way=packed)
    assert not any(isinstance(layer.weight, Floats) for layer in paged.model.modules() if isinstance(layer, Linear))
    assert_all_close(paged.run(plan), case.expected)


@pytest.mark.parametrize("name", CASES if LONG else DECODED)
def test_so_do_those_of_sequences_that_are_only_decoded(name, tmp_path):
    case = make_case(name, tmp_path, LENGTHS if LONG else LENGTHS[:-1])
    paged = Paged(case.directory, case.sequences, make_way=packed)
    assert_all_close(paged.run(all_decoded_together), case.expected)


@pytest.mark.parametrize("name", CASES if LONG else DECODED)
def test_logits_of_weights_that_are_not_packed_equal_transformers(name, tmp_path):
    case = make_case(name, tmp_path)
    paged = Paged(case.directory, case.sequences)
    assert not any(isinstance(module, PackedWeight) for module in paged.model.modules())
    assert_all_close(paged.run(chunks_and_decodes_mixed), case.expected)


@pytest.mark.parametrize("make_way", [None, packed], ids=["plain", "packed"])
@pytest.mark.parametrize("lengths", [[21], [17, 1, 8], [2], [1, 1, 1]], ids=str)
def test_the_model_computes_only_the_rows_that_are_asked_for(tmp_path, make_way, lengths):
    tiny_hf_model("llama").save_pretrained(tmp_path)
    paged = Paged(tmp_path, random_tokens(lengths), make_way=make_way)
    whole = hidden_states(paged, lengths)
    for rows in ([sum(lengths) - 1, 0][: len(lengths)], [0], list(range(len(whole)))[::2]):
        some = hidden_states(paged, lengths, rows=torch.tensor(rows))
        torch.testing.assert_close(some, whole[rows], rtol=1e-4, atol=1e-4)


def hidden_states(paged, lengths, rows=None):
    """Of the whole sequences, in one step that any number of calls may run."""
    paged.restart(paged.sequences)
    batch = paged.batch(dict(enumerate(lengths)))
    paged.cache.move(batch)
    paged.table.update(batch)
    input_ids, step = prepare(batch, paged.table, paged.cache)
    step.rows = rows
    with torch.inference_mode():
        return paged.model(input_ids, step)


def test_each_layer_writes_to_its_own_cache_and_only_the_last_drops_rows(tmp_path):
    tiny_hf_model("qwen3", num_hidden_layers=3).save_pretrained(tmp_path)
    paged, lengths, calls = Paged(tmp_path, random_tokens([9, 4])), [9, 4], []

    def record(layer, inputs, output):
        calls.append((len(inputs[0]), len(output), [bool(cache.nan_to_num().any()) for cache in paged.cache.layers]))

    for layer in paged.model.layers:
        layer.register_forward_hook(record)
    hidden_states(paged, lengths, torch.tensor([12, 8]))
    assert calls == [(13, 13, [True, False, False]), (13, 13, [True, True, False]), (13, 2, [True, True, True])]


def test_a_family_is_a_file():
    """CONTRIBUTING.md says so: a file in families/, a word in docs/map.md, cases here."""
    folder = Path(models.__file__).parent
    assert {file.stem for file in folder.glob("*.py")} == {"llama", "decoder", "meta", "__init__"}
    families = load_families()
    names = {f"families.{file.stem}" for file in folder.with_name("families").glob("[!_]*.py")} | {"models.llama"}
    assert {family.__name__.removeprefix("nanopage.") for family in families} == names
    architectures = [name for family in families for name in family.ARCHITECTURES]
    assert len(set(architectures)) == len(architectures)
    decoders = [family for family in families if hasattr(family, "make_layer")]  # tests/pooling has the encoders
    in_gguf_files = [name for family in decoders if (name := getattr(family, "GGUF_ARCHITECTURE", None))]
    assert len({*in_gguf_files}) == len(in_gguf_files)
    for family in families:
        assert all(find_family(name) is family for name in family.ARCHITECTURES)
    assert find_family("GPT2LMHeadModel") is None
    tested = {type(tiny_hf_model(name)).__name__ for name in FIRST}
    tested |= {f"{name}ForConditionalGeneration" for name in ("Qwen3_5", "Qwen3_5Moe", "Gemma4", "Gemma3n")}  # below
    tested.add("WhisperForConditionalGeneration")  # test_whisper.py
    tested |= {f"{name}ForConditionalGeneration" for name in ("Bart", "MBart", "Pegasus", "T5", "MT5")}
    tested |= {"MarianMTModel", "BartModel"}  # these and the last: test_encoder_decoder.py
    vision = ("SmolVLM", "Idefics3", "Gemma3", "Qwen2_5_VL", "Qwen2VL")  # tests/vision
    tested |= {f"{name}ForConditionalGeneration" for name in vision}
    assert tested == {name for family in decoders for name in family.ARCHITECTURES}
    others = [file for file in folder.parent.rglob("*.py") if file.parent.name not in ("models", "families")]
    for name in names:
        assert not [file for file in others if name in file.read_text()]


def test_a_family_that_is_added_needs_nothing_else(tmp_path, monkeypatch):
    """Here one whose layers are Qwen2's, under another name."""
    hf_model = tiny_hf_model("qwen2")
    hf_model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["NewForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"NewForCausalLM.* is not supported"):
        loader.read_config(tmp_path)
    family = ModuleType("nanopage.models.new")
    family.__dict__.update(vars(find_family("Qwen2ForCausalLM")) | {"__name__": "nanopage.models.new"})
    family.ARCHITECTURES, family.GGUF_ARCHITECTURE = ("NewForCausalLM",), "new"
    monkeypatch.setattr(models, "own_families", lambda: [*own_families(), family])
    sequences = random_tokens([9, 4])
    logits = Paged(tmp_path, sequences).run(chunks_and_decodes_mixed)
    assert_all_close(logits, reference_logits(hf_model, sequences))


def test_a_family_of_another_package_is_imported_only_when_it_is_needed_and_named_if_it_is_broken(
    tmp_path, monkeypatch
):
    (tmp_path / "others-1.0.dist-info").mkdir()
    (tmp_path / "others-1.0.dist-info" / "METADATA").write_text("Name: others\nVersion: 1.0\n")
    entries = tmp_path / "others-1.0.dist-info" / "entry_points.txt"
    monkeypatch.syspath_prepend(tmp_path)
    for value, problem in (("no_such_module", "ModuleNotFoundError"), ("json", "lacks ARCHITECTURES, read_config")):
        entries.write_text(f"[nanopage.models]\nours = {value}\n")
        assert find_family("LlamaForCausalLM").__name__ == "nanopage.models.llama"
        with pytest.raises(ValueError, match=rf"the entry point ours = {value} .*{problem}"):
            find_family("OurForCausalLM")


@functools.cache
def plain_logits(family, fields, lengths):
    """The logits of a model without the options that are tested. Args: fields of its config, as JSON."""
    return reference_logits(tiny_hf_model(family, **json.loads(fields)), random_tokens(lengths))


@pytest.mark.parametrize("name", [*OPTIONS, *([*WINDOWS, *ROPES] if LONG else [])])
def test_the_reference_applies_the_option_and_so_do_we(tmp_path, name):
    family, overrides = (CASES | OPTIONS)[name]
    plain = {
        key: value
        for key, value in overrides.items()
        if key in ("num_hidden_layers", "num_key_value_heads", "head_dim")
    }
    sequences = random_tokens(LENGTHS if name in OPTIONS else LENGTHS[-1:])
    with_option = reference_logits(tiny_hf_model(family, **overrides), sequences)
    without = plain_logits(family, json.dumps(plain), tuple(map(len, sequences)))
    if name in OPTIONS:
        tiny_hf_model(family, **overrides).save_pretrained(tmp_path)
        assert_all_close(Paged(tmp_path, sequences, make_way=packed).run(chunks_and_decodes_mixed), with_option)
    last = (with_option[-1][-1] - without[-1][-1]).abs().max()
    assert last > 0.01 * without[-1].std()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "gemma4"])
def test_the_text_model_of_a_checkpoint_with_a_vision_tower(tmp_path, kind, caplog):
    """Published checkpoints of Qwen3.5 have the tensors of another predicted token, mtp.*, too."""
    text = tiny_hf_model(f"{kind}_text", tie_word_embeddings=kind == "qwen3_5", initializer_range=0.1).config.to_dict()
    tower = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    if kind == "gemma4":
        tower = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8} | tower
        text["use_bidirectional_attention"] = "vision"
    config = AutoConfig.for_model(
        kind, text_config=text, vision_config=tower, tie_word_embeddings=text["tie_word_embeddings"]
    )
    torch.manual_seed(0)
    hf_model = AutoModelForImageTextToText.from_config(config).eval()
    hf_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.startswith(("model.visual.", "model.vision_tower.")) for name in tensors)
    more = {} if kind == "gemma4" else {"mtp.fc.weight": torch.ones(2, 2)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    sequences = random_tokens(LENGTHS)
    with caplog.at_level("INFO", "nanopage"):
        paged = Paged(tmp_path, sequences)
    assert "tensors are not used, such as" in caplog.text
    assert_all_close(paged.run(chunks_and_decodes_mixed), reference_logits(hf_model, sequences))


INT8 = ("llama", "llama, both biases, tied", "mistral, wide heads, tied", "qwen2", "qwen3")


@pytest.mark.parametrize("name", INT8)
def test_int8_weights_and_activations_are_those_of_transformers_rounded_to_255_steps(tmp_path, name):
    family, overrides = CASES[name]
    hf_model = tiny_hf_model(family, **overrides)
    hf_model.save_pretrained(tmp_path)
    with torch.no_grad():
        for module in hf_model.modules():
            if isinstance(module, torch.nn.Linear):  # a tied embedding is the head's
                step = module.weight.abs().amax(1, keepdim=True) / 127
                module.weight.copy_((module.weight / step).round() * step)
                module.register_forward_pre_hook(lambda _, inputs: round_activations(inputs[0][0])[None])
    sequences = random_tokens(LENGTHS)
    paged = Paged(tmp_path, sequences, tiles="int8")
    ours, theirs = paged.run(PLANS[0]), reference_logits(hf_model, sequences)
    assert_close_but_for_rounding(torch.cat(ours), torch.cat(theirs))


@pytest.mark.parametrize("poisoned", ["shorter", "longer"])
@pytest.mark.parametrize("decode", [True, False], ids=["decodes", "chunks"])
def test_pages_of_another_sequence_in_the_batch_do_not_matter(tmp_path, poisoned, decode):
    hf_model = tiny_hf_model("llama")
    hf_model.save_pretrained(tmp_path)
    sequences = random_tokens([21, 60])
    paged = Paged(tmp_path, sequences)
    last = 1 if decode else 3
    paged.step({0: 21 - last, 1: 60 - last})
    victim, survivor = (0, 1) if poisoned == "shorter" else (1, 0)
    paged.cache.tensor[:, :, paged.tables[victim]] = torch.nan
    paged.step({0: last, 1: last})
    assert_all_close([paged.logits[survivor]], reference_logits(hf_model, [sequences[survivor]]))
    assert paged.logits[victim][-1].isnan().all()


@pytest.mark.parametrize("forked", [False, True], ids=["prefix", "fork"])
def test_sequences_may_share_the_pages_of_a_common_prefix(tmp_path, forked):
    hf_model = tiny_hf_model("llama")
    hf_model.save_pretrained(tmp_path)
    prefix, *ends = random_tokens([2 * BLOCK_SIZE, 5, 13])
    sequences = [prefix + end for end in ends]
    paged = Paged(tmp_path, sequences)
    paged.step({0: len(prefix)})
    paged.tables[1], paged.logits[1] = paged.tables[0][:], paged.logits[0].clone()
    if forked:
        batch = Batch(forks=[Fork(0, 1, len(prefix), 0)])
        batch.tokens = [(1, len(prefix) + i, token) for i, token in enumerate(ends[1])]
    else:
        settings = SamplingSettings(prompt_logprobs=0)
        batch = Batch(new=[NewSequence(1, sequences[1], len(sequences[1]), 0, settings)])
    batch.blocks = [BlockUpdate(1, 0, paged.tables[1])]
    paged.table.update(batch)
    paged.step({0: 5, 1: 12})
    paged.step({1: 1})
    assert_all_close(paged.logits, reference_logits(hf_model, sequences))


def test_a_reused_block_shows_nothing_of_its_former_owner(tmp_path):
    hf_model = tiny_hf_model("llama")
    hf_model.save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)
    model = loader.load_model(tmp_path, config, torch.float32, CPU)
    cache = KVCache(config, 8, BLOCK_SIZE, torch.float32, CPU)
    table = SequenceTable(2, 8 * BLOCK_SIZE, BLOCK_SIZE, config.vocab_size, CPU)
    runner = ModelRunner(model, cache, table, [Eager(model, cache, table)])
    cache.tensor.fill_(torch.nan)
    scheduler = Scheduler(BlockManager(8, BLOCK_SIZE), 2, 7)
    seqs = []
    for i, prompt in enumerate(random_tokens([BLOCK_SIZE + 3, 5])):
        settings = SamplingSettings(temperature=0)
        seqs.append(Sequence(i, prompt, settings, max_total_tokens=len(prompt) + 9))
        scheduler.add(SequenceGroup(str(i), [seqs[-1]]))
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        launched = runner.launch(schedule.batch)
        scheduler.advance(schedule)
        scheduler.update(schedule, launched.result())
    for seq, logits in zip(seqs, reference_logits(hf_model, [seq.token_ids for seq in seqs]), strict=True):
        assert seq.num_output_tokens == 9
        assert seq.output_token_ids == logits[seq.num_prompt_tokens - 1 : -1].argmax(-1).tolist()


def test_the_config_of_each_family_is_read_as_transformers_reads_it(case):
    theirs, ours = case.hf_model.config, loader.read_config(case.directory)
    assert ours.architecture == theirs.architectures[0]
    assert ours.eos_token_ids == {EOS}
    attention = [getattr(layer, "self_attn", None) for layer in case.hf_model.base_model.layers]
    latent = ours.latent and theirs.kv_lora_rank + theirs.qk_rope_head_dim
    sizes = {latent or part.head_dim for part in attention if part is not None}
    assert sizes <= {ours.head_dim, *(ours.full_heads or ())[1:]}
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    windows = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    if windows is None:
        assert ours.sliding_windows == (window,) * theirs.num_hidden_layers
    else:
        known = {"full_attention": None, "sliding_attention": window}
        assert ours.sliding_windows == tuple(known.get(kind, STATE) for kind in windows)
    if ours.rope == UNROTATED:
        return
    rope = theirs.rope_parameters.get("full_attention", theirs.rope_parameters)
    assert (ours.rope.theta, ours.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])
    if local := theirs.rope_parameters.get("sliding_attention"):
        assert (ours.other_rope.theta, ours.other_rope.rope_type) == (local["rope_theta"], local["rope_type"])


def test_a_config_as_transformers_4_wrote_it_means_the_same(case, tmp_path):
    config = json.loads((case.directory / "config.json").read_text())
    new = config_from_dict(config)
    if "Gemma4ForCausalLM" in config["architectures"]:
        return  # transformers 4 does not have it
    rope = config.pop("rope_parameters", None) or {"rope_theta": None, "rope_type": "default"}
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    windows = [window is not None for window in new.sliding_windows]
    has_mixers = new.state or "mamba_n_heads" in config
    if windows == sorted(windows) and not has_mixers:  # what max_window_layers can say
        config.pop("layer_types", None)
    assert config_from_dict(config) == new


IN_BFLOAT16 = {
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3_5": ("qwen3_5_text", {}),
    "gemma2": ("gemma2", {"attn_logit_softcapping": 5.0}),
    "gemma4": ("gemma4_text", {"hidden_size_per_layer_input": 12}),
    "mamba2": ("mamba2", {}),
}
if LONG:
    IN_BFLOAT16 |= {
        **{family: (family, {}) for family in ("qwen2", "qwen3", "olmo2")},
        "llama, mlp bias": ("llama", {"mlp_bias": True}),
        "gemma3": ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"]}),
    }


@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU")
@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_with_packed_weights_is_as_close_to_float32_as_transformers_is(tmp_path, name):
    family, overrides = IN_BFLOAT16[name]
    # A smaller spread of the weights than elsewhere, so that rounding does not grow from layer to layer.
    tiny_model(tmp_path, family, torch.bfloat16, initializer_range=0.08, **overrides)
    sequences = random_tokens(LENGTHS if LONG else LENGTHS[:-1])
    exact = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), sequences)
    theirs = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), sequences)
    paged = Paged(tmp_path, sequences, torch.bfloat16, make_way=packed)
    assert not any(isinstance(layer.weight, Floats) for layer in paged.model.modules() if isinstance(layer, Linear))
    assert isinstance(paged.model.lm_head.weight, PackedWeight)

    def error(logits):
        return torch.cat([(a.float() - b).flatten() for a, b in zip(logits, exact, strict=True)]).square().mean().sqrt()

    spread = torch.cat(exact).std()
    for plan in PLANS if LONG else [chunks_and_decodes_mixed]:
        paged.restart(sequences)
        got = paged.run(plan)
        assert error(got) < 0.05 * spread
        assert error(got) < 1.5 * error(theirs)
