"""EngineConfig: what is refused, and under which name. ModelConfig: config.json as transformers 4 and 5 write it."""

import copy
import dataclasses
import importlib
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import by_field, tiny_model

from nanopage import EngineConfig
from nanopage.build import build_engine
from nanopage.checks.fields import GENERATE, MAX_SIZES, RANGES
from nanopage.checks.stored_quantization import StoredQuantization
from nanopage.config.model import ExpertsConfig, ModelConfig
from nanopage.config.rope import RopeConfig
from nanopage.families import granite_hybrid, mamba2
from nanopage.layers.rotary import inverse_frequencies
from nanopage.models import find_family
from nanopage.reading.config import config_from_dict, config_from_directory
from nanopage.reading.rope import ROPE_NUMBERS, ROPE_TYPES
from nanopage.vision.setup import OPTIONS as OPTIONS_OF_IMAGES
from nanopage.weights import loader

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Phi3ForCausalLM": "phi3",
    "Olmo2ForCausalLM": "olmo2",
    "GraniteForCausalLM": "granite",
    "SmolLM3ForCausalLM": "smollm3",
    "Olmo3ForCausalLM": "olmo3",
    "Lfm2ForCausalLM": "lfm2",
    "GptOssForCausalLM": "gpt_oss",
    "GlmForCausalLM": "glm4",
    "MinistralForCausalLM": "ministral",
}
CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
PUBLISHED_BILLIONS = {  # parameters; a matrix that is tied counts once
    "Qwen3-0.6B": 0.596,
    "Llama-3.2-1B": 1.236,
    "Llama-3.1-8B": 8.030,
    "Qwen3-14B": 14.768,
    "gemma-3-270m": 0.268,
    "LFM2-350M": 0.3545,
    "SmolVLM-256M": 0.2565,
    "Mixtral-8x7B": 46.703,
}
NAN, INF, HUGE = math.nan, math.inf, 10**400  # HUGE has no float


# EngineConfig

COUNTS = ["max_num_seqs", "block_size"]
SIZES = ["tensor_parallel_size", "pipeline_parallel_size"]
OPTIONAL_COUNTS = ["max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override"]
SHARES = ["kv_cache_gib", "gpu_memory_utilization"]
LORA_COUNTS = ["max_loras", "max_lora_rank"]
OTHER_SIZES = (
    "sliding_window",
    "sliding_window_pattern",
    "no_rope_layer_interval",
    "type_vocab_size",
    "num_labels",
    *("mamba_d_ssm", "conv_L_cache", "block_ff_dim", "block_multiple_of"),
    *("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *(name for family in (mamba2, granite_hybrid) for name, _ in family.SIZES.values()),  # tests/recurrent has them
    "shared_intermediate_size",
    *("d_model", "encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_ffn_dim", "decoder_ffn_dim", "num_mel_bins", "max_source_positions", "max_target_positions"),
    *("n_positions", "d_ff", "d_kv", "num_layers", "num_decoder_layers"),  # tests/models has them
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
    "median_filter_width",
    *("image_size", "patch_size", "scale_factor", "longest_edge", "mm_tokens_per_image"),  # tests/vision has them
    *("depth", "embed_dim", "mlp_ratio", "spatial_merge_size", "temporal_patch_size", "window_size"),  # and these
    *("global_head_dim", "num_global_key_value_heads", "num_kv_shared_layers", "top_k_experts"),
    *("altup_num_inputs", "laurel_rank"),
    *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
)  # two are an encoder's; tests/models and tests/recurrent have the last lines
RERANKER = {"architectures": ["QForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
LONGER = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 1e6, "max_position_embeddings": 512}
FLAGS = ["enable_prompt_embeds", "enable_prompt_adapter", "enable_prefix_caching", "enforce_eager", "enable_lora"]
FLAGS += ["batch_invariant"]
EXPERTS = "enable_expert_parallel"

CHOICES = {
    "dtype": ["auto", "float32", "bfloat16", "float16", "float64"],
    "device": ["auto", "cpu", "cuda"],
    "kv_cache_dtype": ["auto", "fp8", "fp8_e4m3"],
    "preemption_mode": [None, "recompute", "swap"],
    "scheduling_policy": ["fcfs", "priority"],
    "quantization": [None, "int8", "int4", "fp8", "awq", "gptq", "mxfp4", "compressed-tensors", "modelopt"],
    "distributed_executor_backend": [None, "mp", "ray"],
    "load_format": ["auto", "dummy"],
    "model_impl": ["auto", "nanopage", "transformers"],
    "generation_config": ["auto", "vllm"],
    "runner": ["auto", "generate", "pooling"],
    "convert": ["auto", "none", "embed", "classify"],
}

PASS = by_field(
    [
        *(([name], values) for name, values in CHOICES.items()),
        (["model"], [None, "org/name", Path("/models/x")]),
        (COUNTS, [1, 10**6]),
        (SIZES, [1, 1024]),
        (OPTIONAL_COUNTS, [None, 1, 10**6]),
        (SHARES, [None, 1e-6, 0.5, 1, 1.0]),
        (["kv_cache_gib"], [1.5, 4000]),
        (FLAGS, [True, False]),
        ([EXPERTS], [False]),
        (["async_scheduling"], [None, True, False]),
        (["max_loras"], [1]),
        (["max_lora_rank"], [16]),
        (
            ["speculative_config"],
            [
                None,
                {"method": "ngram", "num_speculative_tokens": 1},
                {"method": "ngram", "num_speculative_tokens": 64, "prompt_lookup_max": 64, "prompt_lookup_min": 1},
                {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": None},
            ],
        ),
        (["seed"], [-1, 0, 2**64]),
        (["swap_space"], [None, 0, 0.0, 1e-6, 4, 4000]),
        (["pooler_config"], [None, {}, {"pooling_type": "MEAN"}, {"pooling_type": "CLS", "normalize": False}]),
        (
            ["hf_overrides"],
            [None, {}, LONGER, LONGER | RERANKER, RERANKER | {"is_original_qwen3_reranker": True}],
        ),
        (["limit_mm_per_prompt"], [None, {}, {"image": 4}]),
        (["allowed_local_media_path"], ["", "media"]),
        (["allowed_media_domains"], [None, [], ["a.org"]]),
    ]
)
OUT_OF_RANGE = by_field(
    [
        (["dtype"], ["", "int8", "bf16", "Float32"]),
        (["device"], ["", "tpu", "CUDA", "cuda:0"]),
        (["quantization"], ["", "int2", "AWQ", "bitsandbytes", 8]),
        (["load_format"], ["", None, "Dummy", "safetensors", True]),
        (["model_impl"], ["", None, "vllm", "Transformers"]),
        (COUNTS + OPTIONAL_COUNTS + SIZES + LORA_COUNTS, [0, -1]),
        (LORA_COUNTS, [2]),  # without enable_lora
        (["max_lora_rank"], [513]),
        (SIZES, [1025]),
        (["distributed_executor_backend"], ["", "MP", "uni", 1]),
        (SHARES, [0, 0.0, -1, -0.5, NAN, INF, -INF, HUGE]),
        (["gpu_memory_utilization"], [1.0001, 2]),
        (["preemption_mode"], ["", "SWAP", "drop", 1]),
        (["kv_cache_dtype"], ["", "fp8_e5m2", "bfloat16", None]),
        (["swap_space"], [-1, -1e-9, NAN, INF, HUGE]),
        (["scheduling_policy"], ["", None, "FCFS", "lifo"]),
        (["generation_config"], ["", None, "AUTO", "/models/x"]),
        (["runner"], ["", None, "draft", "Pooling"]),
        (["convert"], ["", None, "reward"]),
        (["pooler_config"], [{"pooling_type": "ALL"}, {"pooling_type": None}, {"dimensions": 4}]),
        (
            ["hf_overrides"],
            [
                {"rope_theta": 1},
                {"rope_theta": "1e6"},
                {"max_position_embeddings": 0},
                {"rope_scaling": {}},
                {"rope_parameters": [4]},
                {"rope_parameters": {"rope_type": "yarn"}, "rope_scaling": {"rope_type": "yarn"}},
                {"max_model_len": 512},
                {"architectures": ["QForSequenceClassification"]},
                RERANKER | {"architectures": ["QForCausalLM"]},
                RERANKER | {"classifier_from_token": ["no"]},
            ],
        ),
        (
            ["speculative_config"],
            [
                {},
                {"method": "ngram"},
                {"num_speculative_tokens": 5},
                {"method": "draft_model", "num_speculative_tokens": 5},
                {"method": "eagle", "num_speculative_tokens": 5},
                {"method": "ngram", "num_speculative_tokens": 0},
                {"method": "ngram", "num_speculative_tokens": 65},
                {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 0},
                {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 2},
            ],
        ),
    ]
)
WRONG_TYPE = by_field(
    [
        (["model"], [1, True, b"name", ["name"]]),
        (COUNTS + OPTIONAL_COUNTS + SIZES + LORA_COUNTS, [True, False, "1", 1.0, NAN, INF, [1]]),
        ([*COUNTS, *SIZES, *LORA_COUNTS, "seed"], [None]),
        (SHARES, [True, False, "0.5", [0.5]]),
        ([*FLAGS, EXPERTS], [0, 1, None, "True"]),
        (["async_scheduling"], [0, 1, "True"]),
        (["seed"], [True, "1", 1.0, NAN]),
        (["swap_space"], [True, "4", [4]]),
        (["pooler_config"], ["MEAN", [], {"normalize": 1}]),
        (["hf_overrides"], ["a", [], RERANKER | {"is_original_qwen3_reranker": 1}]),
        (["limit_mm_per_prompt"], [4, "image", [4]]),
        (["allowed_local_media_path"], [None, 5, Path("media")]),
        (["allowed_media_domains"], ["a.org", 5, [5]]),
        (
            ["speculative_config"],
            [
                "ngram",
                5,
                [],
                {"method": "ngram", "num_speculative_tokens": True},
                {"method": "ngram", "num_speculative_tokens": 5.0},
                {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": "4"},
            ],
        ),
    ]
)


def test_the_tables_have_every_engine_option():
    options = {field.name for field in dataclasses.fields(EngineConfig)}
    assert PASS.keys() == options
    assert OUT_OF_RANGE.keys() == options - {
        "model",
        "seed",
        "async_scheduling",
        EXPERTS,
        *FLAGS,
        *OPTIONS_OF_IMAGES,  # tests/vision
    }
    assert WRONG_TYPE.keys() == options - {*CHOICES}


@pytest.mark.parametrize("field", PASS)
def test_an_engine_option_in_range_passes(field):
    for value in PASS[field]:
        kept = getattr(EngineConfig(**{field: value}), field)
        assert kept == value and type(kept) is type(value)


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_an_engine_option_out_of_range_is_an_error_that_names_it(field):
    for value in OUT_OF_RANGE[field]:
        with pytest.raises(ValueError, match=rf"\b{field}\b"):
            EngineConfig(**{field: value})


@pytest.mark.parametrize("field", WRONG_TYPE)
def test_an_engine_option_of_the_wrong_type_is_an_error_that_names_it(field):
    for value in WRONG_TYPE[field]:
        with pytest.raises(TypeError, match=rf"\b{field}\b"):
            EngineConfig(**{field: value})


@pytest.mark.parametrize("field", CHOICES)
def test_an_unknown_choice_is_an_error_that_lists_the_known_ones(field):
    known = ", ".join(filter(None, CHOICES[field]))
    for value in ("int3", 1, True, ["auto"], 1.5):
        with pytest.raises(ValueError, match=re.escape(f"{field}={value!r} is not one of {known}")):
            EngineConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("max_num_seqs", 0, "an integer of at least 1, not 0"),
        ("max_model_len", 1.5, "an integer of at least 1, or None, not 1.5"),
        ("max_lora_rank", 513, "an integer from 1 to 512, not 513"),
        ("gpu_memory_utilization", 1.5, "a number above 0 and at most 1, or None, not 1.5"),
        ("swap_space", -1, "a finite number of at least 0, or None, not -1"),
        ("async_scheduling", 1, "True or False, or None, not 1"),
        ("seed", "1", "an integer, not '1'"),
        ("pooler_config", [], r"a dict, or None, not []"),
    ],
)
def test_an_error_says_what_an_engine_option_may_be(field, value, what):
    with pytest.raises((TypeError, ValueError), match=re.escape(f"{field} must be {what}")):
        EngineConfig(**{field: value})


def test_numpys_numbers_are_numbers():
    assert EngineConfig(kv_cache_gib=np.float64(0.5)).kv_cache_gib == 0.5


@pytest.mark.parametrize("swap_space", [0, 0.0])
def test_swapping_without_host_memory_is_an_error_that_names_both_options(swap_space):
    with pytest.raises(ValueError, match=r"preemption_mode='swap'.*swap_space=0"):
        EngineConfig(preemption_mode="swap", swap_space=swap_space)
    assert EngineConfig(swap_space=swap_space).preemption_mode is None
    assert EngineConfig(preemption_mode="recompute", swap_space=swap_space).swap_space == 0


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_async_scheduling_needs_one_worker(sizes):
    options = dict(zip(SIZES, sizes, strict=True))
    with pytest.raises(ValueError, match=r"async_scheduling=True .* tensor_parallel_size"):
        EngineConfig(async_scheduling=True, **options)
    assert EngineConfig(async_scheduling=False, **options).is_distributed


def test_experts_are_divided_among_several_workers():
    with pytest.raises(ValueError, match=r"enable_expert_parallel=True .* needs tensor_parallel_size above 1"):
        EngineConfig(enable_expert_parallel=True, pipeline_parallel_size=2)
    assert EngineConfig(enable_expert_parallel=True, tensor_parallel_size=2).enable_expert_parallel


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.mark.parametrize("name", ["async_scheduling", "pipeline_parallel_size"])
def test_what_drafts_exclude_is_an_error_that_names_both_options(name):
    value = True if name == "async_scheduling" else 2
    with pytest.raises(ValueError, match=rf"speculative_config and {name}={value}"):
        EngineConfig(speculative_config=NGRAM, **{name: value})
    assert EngineConfig(speculative_config=NGRAM, tensor_parallel_size=2, async_scheduling=False).speculation


def test_the_lookup_of_drafts_has_defaults_that_agree_with_what_is_given():
    def lookup(**given):
        made = EngineConfig(speculative_config=NGRAM | given).speculation
        return made.prompt_lookup_min, made.prompt_lookup_max

    assert lookup() == (2, 4) and lookup(prompt_lookup_max=None, prompt_lookup_min=None) == (2, 4)
    assert lookup(prompt_lookup_max=1) == (1, 1) and lookup(prompt_lookup_max=7) == (2, 7)
    assert lookup(prompt_lookup_min=3) == (3, 4) and lookup(prompt_lookup_min=6) == (6, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_speculative_tokens": 3}, "method is missing"),
        ({**NGRAM, "method": "medusa"}, "method='medusa' is not one of ngram, draft_model"),
        ({"method": "ngram"}, "num_speculative_tokens is missing"),
        ({"method": "ngram", "num_speculative_token": 3}, "'num_speculative_token', which is not supported"),
        ({**NGRAM, 1: 2}, "has 1, which is not supported"),
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 4},
            "min=5.*max=4",
        ),
    ],
)
def test_what_speculative_config_does_not_have_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculative_config=given)


def test_the_number_of_workers_has_a_bound():
    with pytest.raises(ValueError, match="tensor_parallel_size=64 times pipeline_parallel_size=32"):
        EngineConfig(tensor_parallel_size=64, pipeline_parallel_size=32)


@pytest.mark.parametrize("field", ["data_parallel_size", "max_num_seq", "trust_remote_code"])
def test_an_unknown_engine_option_is_an_error_that_names_it(field):
    with pytest.raises(TypeError, match=field):
        EngineConfig(**{field: 1})


@pytest.mark.parametrize(
    "names",
    [
        ("kv_cache_gib", "gpu_memory_utilization"),
        ("kv_cache_gib", "num_gpu_blocks_override"),
        ("gpu_memory_utilization", "num_gpu_blocks_override"),
        ("kv_cache_gib", "gpu_memory_utilization", "num_gpu_blocks_override"),
    ],
)
def test_two_sizes_of_the_kv_cache_are_an_error_that_names_both(names):
    with pytest.raises(ValueError, match=".*".join(names)):
        EngineConfig(**dict.fromkeys(names, 1))


# ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"]}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"]}
QWEN2_WINDOW = QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def without(config: dict, name: str) -> dict:
    return {key: value for key, value in config.items() if key != name}


def test_a_llama_config_is_read_whole():
    config = LLAMA | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 7,
        "head_dim": 32,
        "hidden_act": "silu",
    }
    assert config_from_dict(config) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-5,
        max_position_embeddings=128,
        rope=RopeConfig(500000.0),
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        sliding_windows=(None,) * 4,
        dtype="bfloat16",
        eos_token_ids=frozenset({7}),
    )


def test_defaults_are_those_of_transformers():
    config = config_from_dict(LLAMA)
    assert (config.rms_norm_eps, config.rope, config.dtype) == (1e-6, RopeConfig(10000.0), "float32")
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


@pytest.mark.parametrize(
    ("transformers_4", "transformers_5"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3_SCALING},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3"} | LLAMA3_SCALING},
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn", "factor": 4.0}},
        ),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"torch_dtype": "float32"}, {}),
    ],
)
def test_field_names_of_transformers_4_and_5_mean_the_same(transformers_4, transformers_5):
    old, new = config_from_dict(LLAMA | transformers_4), config_from_dict(LLAMA | transformers_5)
    assert old == new
    assert old.rope.theta == (transformers_4.get("rope_theta") or 1e4)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "linear", "factor": 2.0}, RopeConfig(1e4, "linear", {"factor": 2.0})),
        ({"rope_type": "llama3"} | LLAMA3_SCALING, RopeConfig(1e4, "llama3", LLAMA3_SCALING)),
        (
            {"type": "yarn", "factor": 4.0},
            RopeConfig(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 128}),
        ),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
            RopeConfig(1e4, "yarn", {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16}),
        ),
    ],
)
def test_rope_parameters_keep_what_the_rope_type_needs(rope, expected):
    assert config_from_dict(LLAMA | {"rope_scaling": rope}).rope == expected


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_overrides_are_as_if_config_json_had_them(name):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    overrides = {name: scaling, "max_position_embeddings": 512}
    expected = config_from_dict(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 512})
    for rope in (
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0, "x": 1}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "original_max_position_embeddings": 64},
    ):
        assert config_from_dict(LLAMA | rope, overrides=overrides) == expected
        other = config_from_dict(LLAMA | rope, overrides=overrides | {"rope_theta": 1e6})
        assert other == dataclasses.replace(expected, rope=dataclasses.replace(expected.rope, theta=1e6))
    file = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert config_from_dict(LLAMA | file, overrides={"rope_theta": 1e6}).rope == RopeConfig(1e6)
    with pytest.raises(ValueError, match="factor"):
        config_from_dict(LLAMA, overrides={name: {"rope_type": "linear"}})
    with pytest.raises(ValueError, match=f"hf_overrides: {name}: Olmo3ForCausalLM has several rotary embeddings"):
        config_from_dict(of_family("Olmo3ForCausalLM", num_hidden_layers=5), overrides=overrides)


def test_an_engine_reads_its_model_with_the_overrides(tmp_path):
    path = tiny_model(tmp_path, max_position_embeddings=64)
    options = {"model": str(path), "device": "cpu", "num_gpu_blocks_override": 64, "enforce_eager": True}
    engine = build_engine(EngineConfig(**options, hf_overrides=LONGER))
    assert engine.max_model_len == 512
    assert (engine.model_config.rope.rope_type, engine.model_config.rope.theta) == ("yarn", 1e6)
    with pytest.raises(ValueError, match="rope_parameters of type 'yarn': factor"):
        build_engine(EngineConfig(**options, hf_overrides={"rope_scaling": {"rope_type": "yarn"}}))


def test_the_original_length_beside_the_rope_parameters_wins_as_in_transformers():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = config_from_dict(LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 32})
    assert config.rope.params["original_max_position_embeddings"] == 32


def test_dtype_wins_over_torch_dtype():
    assert config_from_dict(LLAMA | {"dtype": "float16", "torch_dtype": "float32"}).dtype == "float16"


def test_reading_does_not_change_the_dict():
    config = QWEN2_WINDOW | {"rope_scaling": {"type": "yarn", "factor": 4.0}, "eos_token_id": [1, 2]}
    before = copy.deepcopy(config)
    assert config_from_dict(config) == config_from_dict(config)
    assert config == before


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], ["Foo", "Bar"], [], None])
def test_an_unknown_architecture_is_an_error_that_lists_some_of_the_supported_ones(architectures):
    with pytest.raises(ValueError, match="architecture") as error:
        config_from_dict(LLAMA | {"architectures": architectures})
    for name in ["Llama", "Mistral", *(architectures or [])]:
        assert name in str(error.value)
    assert str(error.value).endswith(" others; model_impl='auto' runs most other decoders")
    assert len(str(error.value)) <= 250


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_known_architecture_has_a_family(architecture):
    for named in ([architecture], ["Unknown", architecture]):
        config = config_from_dict(LLAMA | {"architectures": named})
        assert config.architecture == architecture
    assert find_family(architecture).__name__.split(".")[-1] == ARCHITECTURES[architecture]


@pytest.mark.parametrize("rope_type", ["mrope", "axial", None, ["linear"]])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_unknown_rope_type_is_an_error_that_lists_the_supported_ones(key, field, rope_type):
    with pytest.raises(ValueError, match="rope") as error:
        config_from_dict(LLAMA | {field: {key: rope_type, "factor": 2.0}})
    for name in [*ROPE_TYPES, repr(rope_type)]:
        assert name in str(error.value)


def test_rope_parameters_for_each_layer_type_are_an_error():
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match=r"rope_parameters of each layer type is not"):
        config_from_dict(LLAMA | {"rope_parameters": nested})


@pytest.mark.parametrize("name", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
@pytest.mark.parametrize("value", [None, "8", [8.0]])
def test_a_llama3_rope_needs_its_numbers(name, value):
    with pytest.raises(ValueError, match=rf"llama3.*\b{name}\b"):
        config_from_dict(LLAMA | {"rope_scaling": {"rope_type": "llama3"} | LLAMA3_SCALING | {name: value}})


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "dynamic"])
def test_a_stretched_rope_needs_a_factor(rope_type):
    with pytest.raises(ValueError, match=rf"{rope_type}.*factor"):
        config_from_dict(LLAMA | {"rope_scaling": {"rope_type": rope_type}})


@pytest.mark.parametrize(
    "fields", [{"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}]
)
def test_a_partial_rotary_embedding_is_an_error(fields):
    with pytest.raises(ValueError, match=r"partial_rotary_factor 0\.5"):
        config_from_dict(LLAMA | fields)
    assert config_from_dict(LLAMA | {"partial_rotary_factor": 1.0}) == config_from_dict(LLAMA)


def of_family(architecture, **fields):
    return LLAMA | {"architectures": [architecture]} | fields


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
PHI3 = of_family("Phi3ForCausalLM", hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
GEMMA4 = of_family("Gemma4ForCausalLM", num_attention_heads=4, num_key_value_heads=4, head_dim=16)
GEMMA3N = of_family("Gemma3nForCausalLM", num_kv_shared_layers=0)
MIXED = {"0": {"head_dim": 8}, "3": {"head_dim": 32}}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (of_family("Gemma2ForCausalLM", attn_logit_softcapping=0), "attn_logit_softcapping"),
        (of_family("Gemma2ForCausalLM", final_logit_softcapping="30"), "final_logit_softcapping"),
        (of_family("Gemma2ForCausalLM", query_pre_attn_scalar=None), "query_pre_attn_scalar"),
        (of_family("Gemma2ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (of_family("Gemma2ForCausalLM", hidden_activation="quick_gelu"), "hidden_activation"),
        (of_family("Gemma2ForCausalLM", layer_types=["full_attention"]), "layer_types"),
        (of_family("Gemma3ForCausalLM", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
        (of_family("Gemma3ForCausalLM", sliding_window_pattern=0), "sliding_window_pattern"),
        (of_family("Gemma3ForCausalLM", sliding_window=None), "sliding_window"),
        (of_family("Gemma3ForCausalLM", rope_local_base_freq="1e4"), "rope_local_base_freq"),
        (
            of_family("Gemma3ForCausalLM", rope_parameters={"sliding_attention": {"rope_type": "mrope"}}),
            "sliding_attention.* 'mrope'",
        ),
        (of_family("GraniteForCausalLM", logits_scaling=0), "logits_scaling"),
        (of_family("GraniteForCausalLM", embedding_multiplier=True), "embedding_multiplier"),
        (of_family("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 1]), "no_rope_layers"),
        (of_family("SmolLM3ForCausalLM", no_rope_layers=[1, 1, 1, 2]), "no_rope_layers"),
        (of_family("SmolLM3ForCausalLM", no_rope_layers=4), "no_rope_layers"),
        (of_family("SmolLM3ForCausalLM", no_rope_layer_interval=0), "no_rope_layer_interval"),
        (
            of_family("SmolLM3ForCausalLM", sliding_window=8, layer_types=["sliding_attention"] * 4),
            "use_sliding_window",
        ),
        (of_family("Olmo3ForCausalLM", sliding_window=None), "sliding_window"),
        (of_family("Lfm2ForCausalLM", layer_types=["conv", "attention", "conv", "conv"]), "layer_types"),
        (of_family("Lfm2ForCausalLM", full_attn_idxs=2), "full_attn_idxs"),
        (of_family("Lfm2ForCausalLM", conv_L_cache=0), "conv_L_cache"),
        (of_family("Lfm2ForCausalLM", block_ffn_dim_multiplier="2"), "block_ffn_dim_multiplier"),
        (of_family("GptOssForCausalLM", swiglu_limit=None), "swiglu_limit"),
        (of_family("GptOssForCausalLM", swiglu_alpha="1.7"), "swiglu_alpha"),
        (of_family("GptOssForCausalLM", hidden_act="gelu"), "hidden_act 'gelu' with experts is not supported"),
        (of_family("GptOssForCausalLM", layer_types=["full_attention"]), "layer_types"),
        (of_family("GptOssForCausalLM", num_experts_per_tok=200), "num_experts_per_tok"),
        (of_family("Glm4ForCausalLM", head_dim=8, partial_rotary_factor=0.2), "partial_rotary_factor 0.2 rotates 1 of"),
        (
            of_family("Ministral3ForCausalLM", sliding_window=8, layer_types=["full_attention"] * 4),
            "layer_types must be sliding_attention",
        ),
        (
            of_family("Ministral3ForCausalLM", rope_parameters={"rope_type": "linear", "factor": 2.0}),
            "rope_parameters of type 'linear' is not supported for Ministral 3",
        ),
        (
            of_family("Ministral3ForCausalLM", rope_scaling={"type": "default", "llama_4_scaling_beta": 0.1}),
            "rope_scaling: original_max_position_embeddings must be a number",
        ),
        (
            of_family("Ministral3ForCausalLM", rope_scaling={"type": "yarn", "factor": 2.0}),
            "rope_scaling: llama_4_scaling_beta must be a number",
        ),
        (PHI3 | {"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 rotates 1 of 8"),
        (PHI3 | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        (PHI3 | {"rope_scaling": LONGROPE}, "original_max_position_embeddings"),
        (PHI3 | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "original_max_position_embeddings"),
        *(
            (PHI3 | {"rope_scaling": LONGROPE | wrong, "original_max_position_embeddings": 8}, "_factor of a rope")
            for wrong in ({"short_factor": [1.0] * 3}, {"long_factor": None}, {"long_factor": [1.0, 1.0, 1.0, 0.0]})
        ),
        (LLAMA | {"rope_scaling": {"type": "default", "mrope_section": [1, 1, 2]}}, "mrope"),
        (of_family("Qwen3NextForCausalLM", layer_types=["linear_attention"] * 3), "layer_types"),
        (of_family("Qwen3NextForCausalLM", layer_types=["conv"] * 4), "layer_types"),
        (of_family("Qwen3NextForCausalLM", layer_types=4), "layer_types"),
        (of_family("Qwen3NextForCausalLM", linear_num_value_heads=24), "linear_num_value_heads 24 is not a multiple"),
        (of_family("Qwen3NextForCausalLM", linear_conv_kernel_dim=0), "linear_conv_kernel_dim"),
        (of_family("Qwen3NextForCausalLM", attn_output_gate=False), "attn_output_gate false"),
        (of_family("Qwen3NextForCausalLM", rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}), "mrope"),
        (of_family("Qwen3NextForCausalLM", hidden_act="gelu"), "hidden_act"),
        (of_family("Qwen3NextForCausalLM", num_experts=0), "num_experts"),
        (GEMMA3N | {"sliding_window": None}, "sliding_window must not be null"),
        (GEMMA3N | {"num_kv_shared_layers": 4}, "num_kv_shared_layers leaves a type of layers"),
        (without(GEMMA3N, "num_kv_shared_layers"), "num_kv_shared_layers leaves a type of layers"),
        (GEMMA3N | {"intermediate_size": [8] * 3}, "intermediate_size must be a size, or 4 of them"),
        (GEMMA3N | {"intermediate_size": [8, 8, 8, 2**21]}, "intermediate_size must be a size"),
        (GEMMA3N | {"intermediate_size": 0}, "intermediate_size must be a size"),
        (GEMMA3N | {"activation_sparsity_pattern": [0.0] * 3}, "activation_sparsity_pattern must be 4 numbers"),
        (GEMMA3N | {"activation_sparsity_pattern": [0.0, 0.0, 0.0, 1.0]}, "activation_sparsity_pattern must be 4"),
        (GEMMA3N | {"activation_sparsity_pattern": 0.5}, "activation_sparsity_pattern must be 4"),
        (GEMMA3N | {"altup_active_idx": 4}, "altup_active_idx must be an integer from 0 to 3"),
        (GEMMA3N | {"altup_num_inputs": 65}, "altup_num_inputs must be at most 64"),
        (GEMMA3N | {"laurel_rank": 0}, "laurel_rank must be a positive integer"),
        (GEMMA3N | {"hidden_size_per_layer_input": 0}, "hidden_size_per_layer_input must be a positive"),
        (GEMMA4 | {"sliding_window": None}, "sliding_window must not be null"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all'"),
        (GEMMA4 | {"num_kv_shared_layers": 4}, "num_kv_shared_layers leaves a type of layers"),
        (GEMMA4 | {"num_kv_shared_layers": 1}, "num_kv_shared_layers leaves a type of layers"),
        (GEMMA4 | {"num_kv_shared_layers": -1}, "num_kv_shared_layers must be a positive integer"),
        (GEMMA4 | {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input 99 is less than"),
        (GEMMA4 | {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
        (GEMMA4 | {"global_head_dim": 2**13}, "global_head_dim must be at most"),
        (GEMMA4 | {"global_head_dim": 7}, "num_attention_heads 4 does not fit 4 KV heads of 7"),
        (GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "does not fit 3 KV heads"),
        (GEMMA4 | {"per_layer_config": {"3": {"hidden_size": 8}}}, "per_layer_config with .* of layer 3"),
        (GEMMA4 | {"per_layer_config": MIXED}, "per_layer_config with several sizes"),
        (GEMMA4 | {"per_layer_config": {"3": 1}}, "3 must be an object"),
        (GEMMA4 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling in place of"),
        (GEMMA4 | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters has no object full_attention"),
        (GEMMA4 | {"enable_moe_block": True}, "num_experts"),
        (GEMMA4 | {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}, "top_k_experts must be at most"),
        (GEMMA4 | {"enable_moe_block": 1}, "enable_moe_block must be true or false"),
        (of_family("Qwen3_5ForConditionalGeneration", text_config=[]), "text_config"),
        (of_family("Qwen3_5ForConditionalGeneration", text_config={"hidden_size": "64"}), "hidden_size"),
    ],
)
def test_a_field_of_a_family_that_is_not_supported_is_named(config, named):
    with pytest.raises(ValueError, match=named):
        config_from_dict(config)


def test_missing_fields_of_smollm3_are_those_of_transformers():
    config = of_family("SmolLM3ForCausalLM", num_attention_heads=8)
    made = config_from_dict(without(config, "num_key_value_heads"))
    assert (made.num_kv_heads, made.rope, made.tie_word_embeddings) == (4, RopeConfig(2e6), True)
    assert made.other_rope_layers == {3}
    assert config_from_dict(config | {"num_key_value_heads": None}).num_kv_heads == 8


def test_missing_fields_of_gpt_oss_are_those_of_transformers():
    made = config_from_dict(without(of_family("GptOssForCausalLM", num_attention_heads=8), "num_key_value_heads"))
    assert (made.num_kv_heads, made.head_dim, made.rms_norm_eps, made.attention_bias) == (8, 64, 1e-5, True)
    assert made.sliding_windows == (128, None, 128, None) and made.dtype == "bfloat16"
    assert (made.experts.num_experts, made.experts.num_chosen, made.experts.swiglu) == (128, 4, (1.702, 7.0))
    yarn = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    expected = RopeConfig(150000.0, "yarn", yarn | {"original_max_position_embeddings": 4096})
    (ours, scale), (theirs, their_scale) = (inverse_frequencies(64, rope) for rope in (made.rope, expected))
    assert ours.equal(theirs) and scale == their_scale > 1


def test_missing_fields_of_gemma_4_are_those_of_transformers():
    config = without(of_family("Gemma4ForCausalLM", num_attention_heads=8, head_dim=None), "num_key_value_heads")
    made = config_from_dict(config | {"num_hidden_layers": 7})
    assert (made.num_kv_heads, made.head_dim, made.full_heads, made.kv_sources) == (4, 256, (4, 512), ())
    assert made.sliding_windows == (*[512] * 5, None, None) and made.tie_word_embeddings
    partial = {"factor": 1.0, "partial_rotary_factor": 0.25}
    assert (made.rope, made.other_rope) == (RopeConfig(1e6, "proportional", partial), RopeConfig(1e4))
    assert (made.mixer["input_size"], made.mixer["input_vocab_size"], made.experts) == (256, 2**18, None)


def test_missing_fields_of_glm_are_those_of_transformers():
    config = without(of_family("Glm4ForCausalLM", num_attention_heads=8), "num_key_value_heads")
    made = config_from_dict(config)
    assert (made.num_kv_heads, made.head_dim, made.attention_bias, made.rms_norm_eps) == (2, 128, True, 1.5625e-7)
    assert (made.rope.partial, made.rope.theta) == (0.5, 1e4)
    assert config_from_dict(config | {"partial_rotary_factor": None}).rope.partial == 1
    made = config_from_dict(config | {"architectures": ["Glm4MoeForCausalLM"]})
    assert (made.num_kv_heads, made.head_norms, made.rms_norm_eps, made.rope.partial) == (8, False, 1e-5, 0.5)
    assert made.experts == ExpertsConfig(
        128, 8, 1408, 1408, True, (False, True, True, True), shared_gate=False, corrected=True
    )


def test_missing_fields_of_ministral_are_those_of_transformers():
    config = without(of_family("Ministral3ForCausalLM", num_attention_heads=16), "num_key_value_heads")
    made = config_from_dict(config)
    assert (made.num_kv_heads, made.head_dim, made.rms_norm_eps) == (8, 128, 1e-5)
    assert (made.rope.theta, made.rope.params["factor"], made.rope.temperature) == (1e6, 16.0, (0.1, 16384))
    made = config_from_dict(config | {"num_key_value_heads": None, "head_dim": None})
    assert (made.num_kv_heads, made.head_dim) == (16, 4)
    made = config_from_dict(config | {"architectures": ["MinistralForCausalLM"]})
    assert (made.num_kv_heads, made.head_dim, made.sliding_windows, made.rope) == (8, 4, (4096,) * 4, RopeConfig(1e4))


def test_ropes_of_olmo3():
    """Missing fields are those of transformers. In files of transformers 4, rope_theta is that of all layers, and
    rope_scaling stretches those without a window."""
    config = of_family("Olmo3ForCausalLM", num_hidden_layers=5)
    made = config_from_dict(config)
    assert made.sliding_windows == (4096, 4096, 4096, None, 4096)
    assert (made.rope, made.other_rope, made.rms_norm_eps) == (RopeConfig(5e5), RopeConfig(5e5), 1e-5)
    stretched = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}
    ropes = {"full_attention": stretched | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e6}}
    nested = config_from_dict(config | {"rope_parameters": ropes})
    flat = config_from_dict(config | {"rope_theta": 1e6, "rope_scaling": stretched})
    assert flat == nested
    assert (flat.rope.rope_type, flat.rope.theta, flat.other_rope) == ("yarn", 1e6, RopeConfig(1e6))
    assert flat.other_rope_layers == {0, 1, 2, 4}


def test_longrope_follows_the_longest_sequence_and_has_an_older_name():
    fields = {"original_max_position_embeddings": 64, "max_position_embeddings": 128}
    config = config_from_dict(PHI3 | fields | {"rope_scaling": LONGROPE})
    older = LONGROPE | {"type": "su"}
    del older["rope_type"]
    assert config_from_dict(PHI3 | fields | {"rope_scaling": older}) == config
    long, short = (inverse_frequencies(8, config.for_length(length).rope)[0] for length in (65, 64))
    assert short.equal(2 * long)
    assert inverse_frequencies(8, config.rope)[0].equal(long)


def test_a_dynamic_rope_is_a_plain_one_within_the_context():
    config = config_from_dict(LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    plain, found = (inverse_frequencies(16, rope) for rope in (RopeConfig(1e4), config.rope))
    assert found[0].equal(plain[0]) and plain[1] == found[1] == 1


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (AWQ, StoredQuantization("awq", "awq", 4, 128)),
        (AWQ | {"version": "GEMM", "modules_to_not_convert": None}, StoredQuantization("awq", "awq", 4, 128)),
        (AWQ | {"group_size": 32, "modules_to_not_convert": ["lm_head"]}, StoredQuantization("awq", "awq", 4, 32)),
        (GPTQ, StoredQuantization("gptq", "gptq", 4, 128, zero_offset=1)),
        (
            GPTQ | {"group_size": -1, "checkpoint_format": "gptq"},
            StoredQuantization("gptq", "gptq", 4, None, zero_offset=1),
        ),
        (
            GPTQ | {"desc_act": True, "bits": 8},
            StoredQuantization("gptq", "gptq", 8, 128, desc_act=True, zero_offset=1),
        ),
        (
            GPTQ | {"checkpoint_format": "gptq_v2", "lm_head": False, "dynamic": None},
            StoredQuantization("gptq", "gptq", 4, 128),
        ),
    ],
)
def test_quantized_weights_are_described(fields, expected):
    assert config_from_dict(LLAMA | {"quantization_config": fields}).quantization == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({}, "quant_method None"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'"),
        ({"quant_method": ["awq"]}, "quant_method .* supported: awq, gptq, fp8, mxfp4, compressed-tensors, modelopt; "),
        (AWQ | {"bits": 8}, "bits 8 .* supported: 4;"),
        (AWQ | {"bits": None}, "bits None"),
        (AWQ | {"bits": True}, "bits True"),
        (AWQ | {"version": "gemv"}, "version 'gemv'"),
        (AWQ | {"version": 1}, "version 1"),
        (AWQ | {"zero_point": False}, "zero_point false"),
        (AWQ | {"group_size": 16}, "group_size 16 .* supported: 32, 64, 128, -1"),
        (AWQ | {"modules_to_not_convert": "mlp"}, "modules_to_not_convert must be a list of names, got 'mlp'"),
        (GPTQ | {"bits": 3}, "bits 3 .* supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (GPTQ | {"desc_act": "yes"}, "desc_act"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        (GPTQ | {"dynamic": {"-:.*down_proj": {}}}, "dynamic"),
        (GPTQ | {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "modules_in_block_to_quantize"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    ],
)
def test_quantized_weights_that_are_not_supported_are_an_error_that_names_what(fields, named):
    with pytest.raises(ValueError, match=f"quantization_config: {named}"):
        config_from_dict(LLAMA | {"quantization_config": fields})
    assert config_from_dict(LLAMA | {"quantization_config": None}) == config_from_dict(LLAMA)


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        (LLAMA | {"hidden_act": "mish"}, "model_impl='transformers' may run the model"),
        (LLAMA | {"rope_scaling": {"rope_type": "new"}}, "model_impl='transformers' may run the model"),
        (LLAMA | {"is_causal": False}, "model_impl='transformers' may run the model"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "the checkpoint that is not quantized runs, .*"),
        (LLAMA | {"quantization_config": GPTQ | {"lm_head": True}}, "the checkpoint that is not quantized runs, .*"),
        (of_family("Lfm2ForCausalLM", hidden_act="mish"), re.escape(GENERATE)),
        (of_family("Qwen3_5ForCausalLM", attn_output_gate=False), re.escape(GENERATE)),
        (of_family("DeepseekV3ForCausalLM", topk_method="greedy"), re.escape(GENERATE)),
        (of_family("BertModel", position_embedding_type="relative_key"), "supported: absolute"),  # has no other module
    ],
)
def test_an_error_says_what_runs_instead(config, instead):
    with pytest.raises(ValueError, match=f"is not supported; .*{instead}$") as error:
        config_from_dict(config)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("activation", ["quick_gelu", "relu6", "SiLU", None, ["silu"]])
def test_another_activation_is_an_error_that_names_it(activation):
    with pytest.raises(ValueError, match="hidden_act") as error:
        config_from_dict(LLAMA | {"hidden_act": activation})
    assert repr(activation) in str(error.value)


def test_silu_has_two_names():
    assert config_from_dict(LLAMA | {"hidden_act": "swish"}) == config_from_dict(LLAMA)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "auto", "bf16"])
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_an_unknown_dtype_of_a_checkpoint_is_an_error_that_lists_the_known_ones(field, dtype):
    with pytest.raises(ValueError, match=rf"dtype '{dtype}'.*float32, bfloat16, float16, float64"):
        config_from_dict(LLAMA | {field: dtype})


REQUIRED = [name for name in LLAMA if name not in ("architectures", "num_key_value_heads")]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_size_is_an_error_that_names_it(name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        config_from_dict(without(LLAMA, name))


@pytest.mark.parametrize("name", [*REQUIRED, "num_key_value_heads", "head_dim"])
def test_a_size_that_is_no_positive_integer_is_an_error_that_names_it(name):
    for value in (0, -4, 4.0, "4", True, [4], NAN, {}):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            config_from_dict(LLAMA | {name: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"architectures": 7}, "architectures"),
        ({"architectures": [7]}, "architectures"),
        ({"quantization_config": "gptq"}, "quantization_config"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": [2.0]}, "rope_scaling"),
        ({"rope_parameters": "linear"}, "rope_parameters"),
        ({"rope_theta": "big"}, "rope_theta"),
        ({"rope_theta": -1e4}, "rope_theta"),
        ({"rope_theta": NAN}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": HUGE}, "rope_theta"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": INF}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": HUGE}}, "factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings",
        ),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps"),
        ({"rms_norm_eps": INF}, "rms_norm_eps"),
        ({"rms_norm_eps": HUGE}, "rms_norm_eps"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"eos_token_id": [1, None]}, "eos_token_id"),
        ({"eos_token_id": 1.5}, "eos_token_id"),
        ({"eos_token_id": True}, "eos_token_id"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"attention_bias": "false"}, "attention_bias"),
        ({"mlp_bias": "false"}, "mlp_bias"),
        (QWEN2_WINDOW | {"use_sliding_window": "false"}, "use_sliding_window"),
        (QWEN2_WINDOW | {"max_window_layers": None}, "max_window_layers"),
        (QWEN2_WINDOW | {"max_window_layers": "2"}, "max_window_layers"),
        (QWEN2_WINDOW | {"sliding_window": True}, "sliding_window"),
        (QWEN2_WINDOW | {"sliding_window": "8"}, "sliding_window"),
        (QWEN2_WINDOW | {"sliding_window": 8.0}, "sliding_window"),
        (QWEN2_WINDOW | {"sliding_window": 0}, "sliding_window"),
        (MISTRAL | {"sliding_window": -1}, "sliding_window"),
        (QWEN2_WINDOW | {"layer_types": 5}, "layer_types"),
        (QWEN2_WINDOW | {"layer_types": ["full_attention"] * 3}, "layer_types"),
        (QWEN2_WINDOW | {"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "layer_types"),
    ],
    ids=lambda value: (
        str({k: value[k] for k in value if value[k] != QWEN2_WINDOW.get(k, ...)}).replace(str(HUGE), "huge")
        if isinstance(value, dict)
        else value
    ),
)
def test_an_impossible_field_is_an_error_that_names_it(fields, named):
    with pytest.raises(ValueError, match=rf"\b{named}\b"):
        config_from_dict(LLAMA | fields)


def test_the_number_of_key_value_heads_divides_that_of_heads():
    with pytest.raises(ValueError, match=r"num_attention_heads 4.*num_key_value_heads=3"):
        config_from_dict(LLAMA | {"num_key_value_heads": 3})


@pytest.mark.parametrize("key_value_heads", [{}, {"num_key_value_heads": None}])
def test_llama_has_as_many_key_value_heads_as_heads_unless_told(key_value_heads):
    assert config_from_dict(without(LLAMA, "num_key_value_heads") | key_value_heads).num_kv_heads == 4
    for config in (MISTRAL, QWEN2, QWEN3):
        with pytest.raises(ValueError, match="num_key_value_heads"):
            config_from_dict(without(config, "num_key_value_heads") | key_value_heads)


@pytest.mark.parametrize(
    ("config", "head_dim"),
    [
        (LLAMA, 16),
        (LLAMA | {"head_dim": None}, 16),
        (LLAMA | {"head_dim": 40}, 40),
        (MISTRAL, 16),
        (QWEN2, 16),
        (QWEN3, 128),
        (QWEN3 | {"head_dim": 16}, 16),
    ],
)
def test_head_dim_is_a_head_s_share_of_the_hidden_size_except_in_qwen3(config, head_dim):
    assert config_from_dict(config).head_dim == head_dim


@pytest.mark.parametrize("name", [name for name in MAX_SIZES if name not in OTHER_SIZES])
def test_sizes_have_bounds(name):
    most = MAX_SIZES[name]
    config = LLAMA | {"num_key_value_heads": 1, "head_dim": 16}
    if name == "num_key_value_heads":
        config |= {"num_attention_heads": most}
    if name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
        config |= {"architectures": ["Qwen2MoeForCausalLM"], "num_experts": 2**12}
    if name.startswith(("linear_", "full_attention_")):
        config |= {"architectures": ["Qwen3_5ForCausalLM"], "linear_num_value_heads": 2**12}
    if name in ("num_local_experts", "decoder_sparse_step"):
        config |= {"architectures": ["MixtralForCausalLM"]}
    config_from_dict(config | {name: most})
    for value in (most + 1, 10**9 * most, 10**30, HUGE):
        with pytest.raises(ValueError, match=rf"^config\.json: {name} must be at most {most:,}, got") as caught:
            config_from_dict(config | {name: value})
        assert len(str(caught.value)) < 250


def test_a_sliding_window_has_a_bound():
    most = MAX_SIZES["sliding_window"]
    assert config_from_dict(MISTRAL | {"sliding_window": most}).sliding_windows == (most,) * 4
    with pytest.raises(ValueError, match=r"sliding_window must be at most"):
        config_from_dict(MISTRAL | {"sliding_window": most + 1})


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {"rope_type": "llama3"} | LLAMA3_SCALING | {"low_freq_factor": 0.5, "high_freq_factor": 5e5},
    "yarn": {"rope_type": "yarn", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64},
    "proportional": {"rope_type": "proportional"},
}
ROPES["longrope"] |= {name: [1.5] * 8 for name in ("short_factor", "long_factor")}
IN_ROPES = [(kind, name) for kind, names in ROPE_NUMBERS.items() for name in (*names[0], *names[1])]


@pytest.mark.parametrize(
    ("kind", "name"), [(None, "rms_norm_eps"), (None, "rope_theta"), *IN_ROPES], ids=lambda value: str(value)
)
def test_numbers_have_ranges_and_give_finite_frequencies_in_them(kind, name):
    low, high = RANGES[name]
    if (kind, name) == ("llama3", "low_freq_factor"):
        high = ROPES["llama3"]["high_freq_factor"] / 2  # it has to be less
    elif (kind, name) == ("llama3", "high_freq_factor"):
        low = ROPES["llama3"]["low_freq_factor"] * 2
    elif (kind, name) == ("longrope", "original_max_position_embeddings"):
        low = 2  # its logarithm is a divisor

    def read(value):
        fields = {name: value} if kind is None else {"rope_scaling": ROPES[kind] | {name: value}}
        return config_from_dict(LLAMA | fields)

    for value in (low, high):
        config = read(value)
        frequencies, scale = inverse_frequencies(config.head_dim, config.rope)
        assert frequencies.isfinite().all()
        assert math.isfinite(scale)
        assert (frequencies > 0).all()
    below, above = RANGES[name]
    for value in (below - 0.1, math.nextafter(below, -1), above * 1.01, -1e300, 10**30, INF, -INF, NAN, HUGE, "1", [1]):
        with pytest.raises(ValueError, match=rf"\b{name} must be a number from {below:g} to"):
            read(value)


def test_the_factors_of_a_llama3_rope_are_in_order():
    for low, high in [(4.0, 4.0), (5.0, 4.0)]:
        factors = {"low_freq_factor": low, "high_freq_factor": high}
        with pytest.raises(ValueError, match="low_freq_factor must be less than high_freq_factor"):
            config_from_dict(LLAMA | {"rope_scaling": {"rope_type": "llama3"} | LLAMA3_SCALING | factors})


@pytest.mark.parametrize("value", ["false", 0, None, []])
def test_truncate_of_a_yarn_rope_is_true_or_false(value):
    with pytest.raises(ValueError, match="truncate must be true or false"):
        config_from_dict(LLAMA | {"rope_scaling": ROPES["yarn"] | {"truncate": value}})


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_a_special_token_outside_the_vocabulary_is_an_error_that_names_it(name):
    for value in (-2, 320, 10**30, [1, 320], [-7], "1", 1.0, True, [None], {"id": 1}, [[1]]):
        with pytest.raises(ValueError, match=rf"^config\.json: {name} "):
            config_from_dict(LLAMA | {name: value})


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_minus_one_is_no_special_token_unless_it_is_that_of_padding(name):
    assert config_from_dict(LLAMA | {"pad_token_id": -1}) == config_from_dict(LLAMA)
    with pytest.raises(ValueError, match=rf"{name} -1 is not in the vocabulary of 320 tokens"):
        config_from_dict(LLAMA | {name: -1})


@pytest.mark.parametrize("special", [{}, {"bos_token_id": 0}, {"bos_token_id": 319, "pad_token_id": 319}])
def test_special_tokens_inside_the_vocabulary_are_accepted(special):
    assert config_from_dict(LLAMA | {"eos_token_id": [0, 319]} | special).eos_token_ids == {0, 319}


@pytest.mark.parametrize(
    "field", ["architectures", "hidden_act", "dtype", "vocab_size", "tie_word_embeddings", "rms_norm_eps"]
)
def test_a_long_or_deep_value_makes_a_short_message(field):
    deep: list = []
    for _ in range(900):
        deep = [deep]
    for value in (deep, "x" * 10**6, [["x"] * 1000] * 1000, {"x" * 10**6: deep}):
        with pytest.raises(ValueError) as caught:
            config_from_dict(LLAMA | {field: value})
        assert len(str(caught.value)) < 1500


def test_an_odd_head_dim_is_an_error():
    with pytest.raises(ValueError, match="head_dim 15"):
        config_from_dict(LLAMA | {"head_dim": 15})


ALTERNATING = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA | {"sliding_window": 8}, [None] * 4),
        (MISTRAL, [4096] * 4),
        (MISTRAL | {"sliding_window": None}, [None] * 4),
        (MISTRAL | {"sliding_window": 8}, [8] * 4),
        (QWEN2, [None] * 4),
        (QWEN2 | {"sliding_window": 8}, [None] * 4),
        (QWEN3 | {"sliding_window": 8}, [None] * 4),
        (QWEN2_WINDOW | {"use_sliding_window": False}, [None] * 4),
        (QWEN2_WINDOW | {"use_sliding_window": False, "layer_types": ALTERNATING}, [None] * 4),
        (QWEN2_WINDOW, [None, None, 8, 8]),
        (QWEN2_WINDOW | {"sliding_window": None}, [None] * 4),
        (without(QWEN2_WINDOW, "sliding_window"), [None, None, 4096, 4096]),
        (QWEN2_WINDOW | {"max_window_layers": 0}, [8] * 4),
        (QWEN2_WINDOW | {"max_window_layers": 4}, [None] * 4),
        (QWEN2_WINDOW | {"layer_types": None}, [None, None, 8, 8]),
        (QWEN2_WINDOW | {"layer_types": ALTERNATING}, [8, None, 8, None]),
        (QWEN2_WINDOW | {"architectures": ["Qwen3ForCausalLM"]}, [None, None, 8, 8]),
        (without(QWEN2_WINDOW, "max_window_layers") | {"num_hidden_layers": 30}, [None] * 28 + [8, 8]),
    ],
)
def test_sliding_windows_are_those_of_transformers(config, windows):
    assert config_from_dict(config).sliding_windows == tuple(windows)


@pytest.mark.parametrize(
    ("eos", "ids"),
    [({}, []), ({"eos_token_id": None}, []), ({"eos_token_id": 0}, [0]), ({"eos_token_id": [5, 0]}, [0, 5])],
)
def test_end_of_sequence_ids_are_one_or_a_list(eos, ids):
    assert config_from_dict(LLAMA | eos).eos_token_ids == frozenset(ids)


# Directories


def write(directory: Path, **files: dict) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("generation_config", "ids"),
    [({"eos_token_id": [5, 6]}, {1, 5, 6}), ({"eos_token_id": 6}, {1, 6}), ({"eos_token_id": None}, {1}), ({}, {1})],
)
def test_generation_config_adds_to_the_ends_of_config(tmp_path, generation_config, ids):
    write(tmp_path, config=LLAMA | {"eos_token_id": 1})
    assert config_from_directory(tmp_path).eos_token_ids == {1}
    write(tmp_path, generation_config=generation_config)
    assert config_from_directory(tmp_path).eos_token_ids == ids


@pytest.mark.parametrize(
    "wrong",
    [
        {"eos_token_id": 320},
        {"eos_token_id": -1},
        {"eos_token_id": ["</s>"]},
        {"bos_token_id": 320},
        {"pad_token_id": 320},
    ],
    ids=str,
)
def test_an_error_names_the_file_that_it_is_in(tmp_path, wrong):
    write(tmp_path, config=LLAMA, generation_config=wrong)
    with pytest.raises(ValueError) as caught:
        config_from_directory(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'generation_config.json'}: {next(iter(wrong))} ")
    write(tmp_path, config=LLAMA | wrong, generation_config={})
    with pytest.raises(ValueError) as caught:
        config_from_directory(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: {next(iter(wrong))} ")


def test_a_generation_config_that_leads_nowhere_is_not_ignored(tmp_path):
    write(tmp_path, config=LLAMA)
    (tmp_path / "generation_config.json").symlink_to("missing")
    with pytest.raises(FileNotFoundError, match=r"generation_config\.json"):
        config_from_directory(tmp_path)


def test_a_directory_without_config_json_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        config_from_directory(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{'a': 1}",
        b'{"a": 1',
        b'{"a": "\xff"}',
        b"[]",
        b"null",
        b'"text"',
        b"<html></html>",
        b'{"a": ' + b"1" * 5000 + b"}",  # more digits than Python reads
        b'{"a": ' + b"[" * 100_000,  # deeper than Python reads
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_file_that_is_no_json_object_is_an_error_that_names_it(tmp_path, name, content):
    write(tmp_path, config=LLAMA)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        config_from_directory(tmp_path)
    assert str(tmp_path / name) in str(error.value)


def test_every_config_for_dummy_weights_has_its_published_size_here():
    made_up = {"SmolLM2-135M-8-heads"}  # for bench.py parallel
    assert {path.name for path in CONFIGS.iterdir()} - made_up == PUBLISHED_BILLIONS.keys()


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_a_config_for_dummy_weights_has_the_published_size(name):
    config = config_from_directory(CONFIGS / name)
    parameters = sum(parameter.numel() for parameter in loader.meta_model(config).parameters())
    assert parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=1e-3)
    assert config.dtype == "bfloat16"
    ends = {"Qwen3": 151645, "Llama": 128001, "gemma": 1, "Mixtral": 2, "LFM2": 7, "SmolVLM": 49279}
    assert config.eos_token_ids == {ends[name.split("-")[0]]}
    stretched = {"Llama-3.2-1B": 32, "Llama-3.1-8B": 8}
    assert config.rope.rope_type == ("llama3" if name in stretched else "default")
    assert config.rope.params.get("factor") == stretched.get(name)


def test_a_config_that_names_code_runs_none(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text("import pathlib\npathlib.Path(__file__).with_name('sprung').touch()\n")
    for name in ("configuration_llama.py", "modeling_llama.py", "__init__.py"):
        (tmp_path / name).write_text("import trap_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    names_code = {
        "auto_map": {
            "AutoConfig": "configuration_llama.LlamaConfig",
            "AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
        },
        "custom_pipelines": {"text-generation": {"impl": "trap_module.Pipeline"}},
        "_attn_implementation_internal": "trap_module",
        "_attn_implementation": "kernels-community/trap_module",
        "attn_implementation": "trap_module",
        "model_type": "trap_module",
        "trust_remote_code": True,
        "generation_config": "trap_module",
    }
    write(tmp_path, config=LLAMA | names_code, generation_config=names_code)
    assert config_from_directory(tmp_path) == config_from_dict(LLAMA)
    assert not {"trap_module", "configuration_llama", "modeling_llama"} & sys.modules.keys()
    assert not (tmp_path / "sprung").exists()
    importlib.import_module("configuration_llama")
    assert (tmp_path / "sprung").exists(), "the trap works"
    for name in ("trap_module", "configuration_llama"):
        monkeypatch.delitem(sys.modules, name)


def test_the_default_token_budget_depends_on_the_device():
    assert [EngineConfig().token_budget(device) for device in ("cpu", "cuda")] == [2048, 8192]
    assert [EngineConfig(max_num_batched_tokens=7).token_budget(device) for device in ("cpu", "cuda")] == [7, 7]
