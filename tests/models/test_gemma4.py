"""Gemma 4 and 3n, where they differ from other families: heads of two sizes, layers without K and V of their own."""

import json

import pytest
import torch
from helpers import CPU, Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model
from safetensors.torch import load_file, save_file

from nanopage.adapters.files import module_shapes
from nanopage.adapters.model import check_layers, parts_of
from nanopage.cpu.tiled_experts import can_join
from nanopage.distributed.division import divide, layers_of_stage
from nanopage.kernels import paged_attention
from nanopage.models.meta import meta_model
from nanopage.weights import loader
from nanopage.worker.eager import Eager

SHARED = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
}
EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}


@pytest.mark.interpreter
def test_logits_with_the_triton_kernels(tmp_path):
    """They read a part of each block of layers with smaller heads. Experts have fused weights, and no SiLU."""
    hf_model = tiny_hf_model("gemma4_text", **SHARED, **EXPERTS)
    hf_model.save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)

    def make_attention(plain):
        return paged_attention.make_attention(plain, config.num_heads, *config.heads[0], torch.float32)

    lengths = [9, 3, 14]
    paged = Paged(tmp_path, random_tokens(lengths), group=True)
    paged.way = Eager(paged.model, paged.cache, paged.table, make_attention)
    while any(paged.done(i) < length for i, length in enumerate(lengths)):
        left = {i: length - paged.done(i) for i, length in enumerate(lengths) if paged.done(i) < length}
        paged.step({i: min(n, 1 if i == 0 else 5) for i, n in left.items()})
    assert_all_close(paged.logits, reference_logits(hf_model, paged.sequences))


def test_a_layer_that_shares_k_and_v_has_their_scales_and_their_place(tmp_path):
    tiny_hf_model("gemma4_text", **SHARED).save_pretrained(tmp_path)
    paged = Paged(tmp_path, random_tokens([9]), kv_dtype=torch.float8_e4m3fn)
    layers = [layer.self_attn for layer in paged.model.layers]
    loader.set_kv_scale(paged.model, 1, "k", 0.5, "k_scale")
    loader.set_kv_scale(paged.model, 2, "v", 4.0, "v_scale")  # of no effect
    assert [part.scoring.kv_scales for part in layers] == [(1.0, 1.0), (0.5, 1.0)] * 2
    assert [part.scoring.window for part in layers] == [7, None] * 2
    places, size = [cache.data_ptr() for cache in paged.cache.layers], paged.block_size
    assert places[:2] == places[2:] and len(paged.cache.tensor) == 1
    assert [tuple(cache.shape[2:]) for cache in paged.cache.layers] == [(2, 16 * size), (2, 32 * size)] * 2


def test_k_and_v_of_layers_that_share_them_may_be_in_the_checkpoint_but_no_others(tmp_path):
    tiny_hf_model("gemma4_text", **SHARED).save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    unused = {f"model.layers.2.self_attn.{name}.weight": torch.ones(2) for name in ("k_proj", "v_proj", "k_norm")}
    save_file(tensors | unused, tmp_path / "model.safetensors")
    loader.load_model(tmp_path, config, torch.float32, CPU)
    save_file(tensors | {"model.layers.4.self_attn.k_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected: model\.layers\.4\.self_attn\.k_proj\.weight"):
        loader.load_model(tmp_path, config, torch.float32, CPU)


def test_the_text_model_of_gemma_3n_in_a_checkpoint_with_images_and_sounds(tmp_path):
    hf_model = tiny_hf_model("gemma3n_text")
    hf_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    others = {
        f"model.{name}.weight": torch.ones(2) for name in ("vision_tower", "audio_tower.conv", "embed_audio.norm")
    }
    save_file(tensors | others, tmp_path / "model.safetensors")
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": hf_model.config.to_dict()}
    config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    paged = Paged(tmp_path, random_tokens([9, 14]))
    paged.step({0: 9, 1: 3})
    paged.step({1: 11})
    assert_all_close(paged.logits, reference_logits(hf_model, paged.sequences))


@pytest.mark.parametrize(("family", "options"), [("gemma3n_text", {}), ("gemma4_text", SHARED)])
def test_what_is_not_supported_is_refused_by_name(tmp_path, family, options):
    tiny_hf_model(family, **options).save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size=2 does not work with {config.architecture}"):
        divide(config, 2)
    with pytest.raises(ValueError, match=rf"pipeline_parallel_size=2 does not work with {config.architecture}"):
        layers_of_stage(config, 0, 2)
    with pytest.raises(ValueError, match="enable_lora does not work with this model"):
        check_layers(meta_model(config), config)


def test_the_operator_for_experts_on_a_cpu_does_not_know_the_router(tmp_path):
    tiny_hf_model("gemma4_text", **EXPERTS, hidden_activation="silu").save_pretrained(tmp_path)
    assert not can_join(meta_model(loader.read_config(tmp_path)))


def test_adapters_fit_the_heads_of_each_layer(tmp_path):
    tiny_hf_model("gemma4_text", num_key_value_heads=4).save_pretrained(tmp_path)
    config = loader.read_config(tmp_path)
    model = meta_model(config)
    check_layers(model, config)
    for index, layer in enumerate(model.layers):
        shapes = {name: (linear.parts[part], linear.in_features) for name, (linear, part) in parts_of(layer).items()}
        assert shapes == module_shapes(config, index)
