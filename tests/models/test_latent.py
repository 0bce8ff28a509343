"""Latent attention: the memory of a token, and what is refused. test_models.py compares whole models with
transformers, and test_fuzz.py runs them in random worlds."""

from dataclasses import replace

import pytest
import torch
from helpers import CPU, Paged, random_tokens, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file
from test_models import PLANS

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.checks.fields import MAX_SIZES
from nanopage.families import deepseek
from nanopage.reading.config import config_from_dict
from nanopage.startup.options import refused
from nanopage.state.kv_cache import KVCache
from nanopage.weights import loader
from nanopage.worker.memory import block_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {  # of DeepSeek-V3's attention
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def config_of(family="deepseek_v3", **changes):
    model = tiny_hf_model(family)
    return config_from_dict(model.config.to_dict() | {"architectures": [type(model).__name__]} | changes)


def test_a_token_takes_the_memory_of_one_vector(tmp_path):
    """576 numbers for each layer of DeepSeek-V3. K and V of its heads would be 40,960."""
    config = config_of(**SIZES, num_attention_heads=128, num_key_value_heads=128)
    assert block_bytes(config, 16, torch.bfloat16, num_rows=1) == 16 * 576 * 2
    assert block_bytes(replace(config, latent=None), 16, torch.bfloat16, num_rows=1) == 2 * 16 * 576 * 2
    cache = KVCache(config, 3, 16, torch.bfloat16, CPU, num_host_blocks=2)
    assert cache.tensor.nbytes == 3 * 16 * config.num_layers * 576 * 2
    cache.tensor.zero_()
    cache.swap_out([(1, 0)])
    assert cache.host.nbytes == 2 * 16 * config.num_layers * 576 * 2
    llm = LLM(str(tiny_model(tmp_path, "deepseek_v2")), device="cpu", kv_cache_gib=1 / 1024, max_model_len=600)
    size = llm.engine.executor.worker.kv_cache.tensor.nbytes / llm.engine.capacity.num_blocks
    assert size == 2 * llm.engine.config.block_size * (24 + 8) * 4  # 2 layers in float32


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_k_and_v_of_heads_give_what_latent_vectors_give(tmp_path, family, monkeypatch):
    """Whole prompts, later chunks, and decodes beside them."""
    sequences = random_tokens([1, 9, 25, 40])
    made, results = Paged(tiny_model(tmp_path, family, torch.float64), sequences, torch.float64), []
    for many in (1000, 5):
        monkeypatch.setattr(deepseek, "MANY", many)
        for plan in PLANS:
            made.restart(sequences)
            results.append(torch.cat(made.run(plan)))
    assert not torch.equal(results[0], results[len(PLANS)])  # rounded differently
    for result in results:
        torch.testing.assert_close(result, results[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        *(("deepseek_v3", {name: MAX_SIZES[name] + 1}, f"{name} must be at most") for name in SIZES),
        *(("deepseek_v3", {name: "8"}, f"{name} must be a positive integer") for name in SIZES),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank must be a positive integer, got None"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads 2 is not supported; supported: 4"),
        (
            "deepseek_v3",
            {"topk_method": "greedy"},
            "topk_method 'greedy' is not supported; .*noaux_tc; transf",
        ),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported; supported: sigmoid"),
        ("deepseek_v3", {"rope_interleave": 1}, "rope_interleave must be true or false"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; supported: 1"),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config .*; the checkpoint",
        ),
        ("deepseek_v3", {"hidden_act": "gelu"}, "hidden_act 'gelu' with experts is not supported"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types .* of 2 layers is not supported; transf"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace 2 is not supported; supported: 1"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob True is not supported; supported: False"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias True is not supported"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": None}, "n_group must be a positive integer"),
        ("deepseek_v2", {"topk_method": None}, "topk_method None is not supported; supported: greedy, group_limited"),
    ],
)
def test_a_field_that_is_not_supported_is_named(family, changes, message):
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        config_of(family, **changes)


def test_a_missing_size_is_named():
    fields = tiny_hf_model("deepseek_v3").config.to_dict() | {"architectures": ["DeepseekV3ForCausalLM"]}
    for name in ("q_lora_rank", "qk_nope_head_dim", "n_routed_experts", "topk_group", "first_k_dense_replace"):
        with pytest.raises(ValueError, match=f"config.json: {name} must be a positive integer"):
            config_from_dict({key: value for key, value in fields.items() if key != name})


def test_options_that_do_not_work_are_named(tmp_path):
    model = tiny_model(tmp_path, "deepseek_v3")
    config = loader.read_config(model)
    (found,) = refused(EngineConfig(), config, torch.device("cuda"), torch.bfloat16, model)
    assert "has latent attention, which does not run on a GPU yet: use device='cpu'" in found
    (found,) = refused(EngineConfig(kv_cache_dtype="fp8", enforce_eager=True), config, CPU, torch.bfloat16, model)
    assert found.startswith("kv_cache_dtype='fp8' does not work with latent attention")
    with pytest.raises(ValueError, match="enable_lora does not work with this model"):
        LLM(str(model), device="cpu", enable_lora=True)


def test_layers_that_predict_further_tokens_are_left_out_and_the_bias_of_a_router_is_not_rounded(tmp_path):
    """In bfloat16, which would change who is chosen, and with weights of 8 bits, which kv_b_proj never has."""
    model = tiny_model(tmp_path, "deepseek_v3")
    weights = load_file(model / "model.safetensors")
    further = {f"model.layers.2.{name}": torch.ones(2, 2) for name in ("eh_proj.weight", "shared_head.head.weight")}
    save_file(weights | further, model / "model.safetensors")
    options = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 64, "kv_cache_gib": 0.01}
    for kind in (None, "int8"):
        llm = LLM(str(model), quantization=kind, **options)
        worker = llm.engine.executor.worker
        assert worker.way == "eagerly: layers with latent attention are not compiled"
        layer = worker.model.layers[1]
        name = "model.layers.1.mlp.gate.e_score_correction_bias"
        assert torch.equal(layer.mlp.gate.e_score_correction_bias, weights[name].double())
        assert layer.self_attn.kv_b_proj.weight.dtype == torch.bfloat16
        (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4
    weights["model.layers.20000.x"] = torch.ones(1)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model.layers.20000.x"):
        Paged(model, random_tokens([3]))
