"""GGUF files of families whose tensors llama.cpp's converter changes, against the models they were made of."""

import re

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers import CPU, Paged, assert_all_close, random_tokens, reference_logits
from test_gguf import VOCABULARIES, decode_the_last, model_for, permute

from nanopage.cpu.tiled import TiledWeight
from nanopage.layers.linear import Linear
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

QWEN2 = VOCABULARIES["qwen2"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": QWEN2.tokens,
    "tokenizer.ggml.token_type": QWEN2.types,
    "tokenizer.ggml.merges": QWEN2.merges,
    "tokenizer.ggml.eos_token_id": QWEN2.fields["eos_token_id"],
}
SSM = {"A_log": "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias", "conv1d": "ssm_conv1d", "in_proj": "ssm_in"}
SSM |= {"norm": "ssm_norm", "out_proj": "ssm_out"}
NAMES = {  # parts of a layer: in GGUF files
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "norm": "attn_norm",
}
NAMES |= {f"{mixer}.{here}": there for mixer in ("mixer", "mamba", "linear_attn") for here, there in SSM.items()}
for shared in ("mlp.shared_expert", "mlp.shared_experts", "shared_mlp"):
    NAMES |= {f"{shared}.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
TOP = {"embed_tokens": "token_embd", "embeddings": "token_embd", "norm": "output_norm", "norm_f": "output_norm"}


def gguf_name(name):
    """The name of a tensor of transformers in a GGUF file."""
    name = re.sub(r"^(model|backbone)\.", "", name)
    match = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+?)(?:\.(weight|bias))?", name)
    layer, part, kind = match.groups()
    known = {"lm_head": "output"} | TOP if layer is None else NAMES
    return f"{'' if layer is None else f'blk.{layer}.'}{known[part]}{f'.{kind}' if kind else ''}"


def tiled(x, config, head_dim, dim=0):
    """Heads in the order of llama.cpp: the first ones of all key heads, then the second ones."""
    keys = config.linear_num_key_heads
    heads = x.unflatten(dim, (keys, config.linear_num_value_heads // keys, head_dim))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def converted(name, x, config, arch):
    """What llama.cpp's converter makes of a tensor: pairs of names in transformers and values."""
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        yield from of_qwen(name, x, config, arch)
    elif name.endswith("A_log"):
        yield name, -x.exp()[:, None]
    elif name.endswith(".D"):
        yield name, x[:, None]
    elif name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
        yield name, x.unflatten(0, (2, -1))  # groups
    elif "conv1d.weight" in name:
        yield name, x[:, 0]
    elif ".shared_mlp." in name or "block_sparse_moe.experts" in name or "input_linear" in name:
        yield from of_granite(name, x, config)
    elif arch == "granitehybrid" and name.split(".")[-2] in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        yield name, permute(x, heads)
    elif name.endswith("kv_b_proj.weight"):
        k, v = x.unflatten(0, (config.num_attention_heads, -1)).split([config.qk_nope_head_dim, config.v_head_dim], 1)
        yield name.replace("kv_b", "k_b"), k.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), v
    elif arch == "gpt-oss" and ".experts." in name:
        kind, x = ("bias", x) if name.endswith("bias") else ("weight", x.transpose(1, 2))
        if "gate_up" in name:
            place = name.rpartition(".")[0]
            yield f"{place}.gate_proj.{kind}", x[:, ::2]
            yield f"{place}.up_proj.{kind}", x[:, 1::2]
        else:
            yield f"{name.removesuffix('_bias')}.{kind}", x
    elif ".experts." in name:
        yield from of_experts(name, x)
    else:
        yield name, x


def of_experts(name, x):
    place, _, part = name.rpartition(".")
    if part == "gate_up_proj":
        for kind, half in zip(("gate", "up"), x.chunk(2, 1), strict=True):
            yield f"{place}.{kind}_proj.weight", half
    else:
        yield f"{name}.weight", x


def of_granite(name, x, config):
    place = name.rpartition(".shared_mlp.")[0] or name.rpartition(".block_sparse_moe.")[0]
    is_shared = ".shared_mlp." in name
    shared = "shared_mlp" if config.num_local_experts else "mlp"
    if name.endswith(("input_linear.weight", "gate_up_proj")):
        for kind, half in zip(("gate", "up"), x.chunk(2, -2), strict=True):
            yield f"{place}.{shared if is_shared else 'mlp.experts'}.{kind}_proj.weight", half
    else:
        yield f"{place}.{shared if is_shared else 'mlp.experts'}.down_proj.weight", x


def of_qwen(name, x, config, arch):
    keys, key_dim, value_dim = config.linear_num_key_heads, config.linear_key_head_dim, config.linear_value_head_dim
    sizes = [keys * key_dim] * 2 + [config.linear_num_value_heads * value_dim]
    if arch != "qwen3next" and "linear_attn." in name:
        if "in_proj_qkv" in name or "conv1d" in name:
            *qk, v = x.split(sizes)
            x = torch.cat((*qk, tiled(v, config, value_dim)))
        elif "in_proj_z" in name:
            x = tiled(x, config, value_dim)
        elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
            x = tiled(x, config, 1)
        elif "out_proj" in name:
            x = tiled(x, config, value_dim, dim=1)
    if "in_proj_qkvz" in name:
        each = config.linear_num_value_heads // keys * value_dim
        *qkv, z = x.unflatten(0, (keys, -1)).split([key_dim, key_dim, each, each], dim=1)
        yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in qkv])
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
    elif name.endswith("A_log"):
        yield name, -x.exp()
    elif "conv1d" in name:
        yield name, x[:, 0]
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        yield name, x + 1
    elif "shared_expert_gate" in name:
        yield name, x[0]
    elif ".experts." in name:
        yield from of_experts(name, x)
    else:
        yield name, x


def plain_fields(config):
    """What the converter writes for most architectures, by the last parts of the keys."""
    rope = getattr(config, "rope_parameters", None) or {}
    names = {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "attention.key_length": "head_dim",
        "attention.value_length": "head_dim",
        "attention.sliding_window": "sliding_window",
        "expert_used_count": "num_experts_per_tok",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "routed_scaling_factor",
        "leading_dense_block_count": "first_k_dense_replace",
    }
    fields = {key: getattr(config, name, None) for key, name in names.items()}
    counts = [getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")]
    fields |= {"expert_count": next((count for count in counts if count is not None), None)}
    fields |= {"rope.freq_base": rope.get("rope_theta")}
    if rope.get("rope_type") == "yarn":
        fields |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        fields["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        fields |= {f"rope.scaling.yarn_{name}": rope.get(name) for name in ("beta_fast", "beta_slow")}
    return fields


def fields_of(config, arch):
    fields, rope = plain_fields(config), getattr(config, "rope_parameters", None) or {}
    if arch == "mamba2":
        inner = config.expand * config.hidden_size
        return fields | {
            "context_length": 2**20,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "attention.key_length": None,
            "attention.value_length": None,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": inner,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": inner // config.head_dim,
            "ssm.group_count": config.n_groups,
        }
    if arch == "granitehybrid":
        with_attention = [kind in ("attention", "full_attention") for kind in config.layer_types]
        return fields | {
            "context_length": 2**20,
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
            "attention.head_count_kv": [config.num_key_value_heads * has for has in with_attention],
            "expert_shared_feed_forward_length": config.shared_intermediate_size,
            "rope.scaling.finetuned": False,
            "ssm.conv_kernel": config.mamba_d_conv,
            "ssm.inner_size": config.mamba_expand * config.hidden_size,
            "ssm.state_size": config.mamba_d_state,
            "ssm.time_step_rank": config.mamba_n_heads,
            "ssm.group_count": config.mamba_n_groups,
        }
    if arch in ("qwen3next", "qwen35", "qwen35moe"):
        sections = {} if arch == "qwen3next" else {"rope.dimension_sections": [2, 1, 1, 0]}
        return (
            fields
            | sections
            | {
                "full_attention_interval": 2,
                "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
                "ssm.conv_kernel": config.linear_conv_kernel_dim,
                "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
                "ssm.state_size": config.linear_key_head_dim,
                "ssm.time_step_rank": config.linear_num_value_heads,
                "ssm.group_count": config.linear_num_key_heads,
            }
        )
    if arch == "deepseek2":
        is_v3 = config.model_type == "deepseek_v3"
        mscale = rope.get("mscale_all_dim")
        return fields | {
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": config.q_lora_rank,
            "attention.kv_lora_rank": config.kv_lora_rank,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
            "attention.value_length": config.kv_lora_rank,
            "attention.key_length_mla": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "attention.value_length_mla": config.v_head_dim,
            "expert_gating_func": 2 if is_v3 else 1,
            "expert_weights_norm": True if is_v3 and config.norm_topk_prob else None,
            "expert_group_count": config.n_group if is_v3 or config.topk_method != "greedy" else None,
            "rope.dimension_count": config.qk_rope_head_dim,
            "rope.scaling.yarn_log_multiplier": None if mscale is None else 0.1 * mscale,
        }
    if arch == "glm4moe":
        return fields | {
            "block_count": config.num_hidden_layers + 1,
            "nextn_predict_layers": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": config.norm_topk_prob,
            "rope.dimension_count": int(config.head_dim * rope["partial_rotary_factor"]),
        }
    return fields | {"expert_feed_forward_length": config.intermediate_size}


def write_family(path, hf_model, arch, kinds=None, changes=None):
    """Write a model as llama.cpp's convert_hf_to_gguf.py would.

    Args: kinds: how matrices are stored, by parts of their names in the file; others are float32. hf_model then has
        the values of the file. changes: fields in place of those of the model, by the last parts of their keys.
    """
    config = hf_model.config
    writer = gguf.GGUFWriter(path, arch)
    fields = TOKENIZER | {f"{arch}.{key}": value for key, value in (fields_of(config, arch) | (changes or {})).items()}
    for key, value in fields.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    corrections = [named for named in hf_model.named_buffers() if named[0].endswith("correction_bias")]
    for name, parameter in [*hf_model.named_parameters(), *corrections]:
        for new, values in converted(name, parameter.detach(), config, arch):
            there = gguf_name(new)
            if arch in ("qwen3next", "qwen35", "qwen35moe", "glm4moe", "gpt-oss"):
                there = there.replace("ffn_norm", "post_attention_norm")
            data = np.ascontiguousarray(values.numpy())
            kind = next((kind for part, kind in (kinds or {}).items() if part in there and data.ndim > 1), None)
            if kind is None:
                writer.add_tensor(there, data)
            else:
                stored = gguf.quants.quantize(data, kind)
                writer.add_tensor(there, stored, raw_dtype=kind)
                values.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    if arch == "glm4moe":
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
MODELS = {
    "mamba2": ("mamba2", "mamba2", {"layer_norm_epsilon": 0.1}),
    "mamba2, biases, tied": (
        "mamba2",
        "mamba2",
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "granite": (
        "granitemoehybrid",
        "granitehybrid",
        {"attention_multiplier": 0.1, "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    ),
    "granite, experts": ("granitemoehybrid", "granitehybrid", {"num_local_experts": 4, "mamba_d_conv": 3}),
    "qwen3_next": ("qwen3_next", "qwen3next", {}),
    "qwen3_5": ("qwen3_5_text", "qwen35", {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", "qwen35moe", {}),
    "deepseek_v2": ("deepseek_v2", "deepseek2", {"topk_method": "group_limited_greedy", "routed_scaling_factor": 2.5}),
    "deepseek_v2, yarn, all q": (
        "deepseek_v2",
        "deepseek2",
        {"q_lora_rank": None, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek_v3": ("deepseek_v3", "deepseek2", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm4_moe": ("glm4_moe", "glm4moe", {"use_qk_norm": True, "attention_bias": True}),
    "gpt_oss": ("gpt_oss", "gpt-oss", {"num_hidden_layers": 3}),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_original(tmp_path, name):
    family, arch, overrides = MODELS[name]
    hf_model = model_for(QWEN2, family, **overrides)
    file = write_family(tmp_path / "tiny.gguf", hf_model, arch)
    sequences = random_tokens([5, 21, 60])
    logits = Paged(file, sequences).run(decode_the_last)
    assert_all_close(logits, reference_logits(hf_model, sequences))


@pytest.mark.parametrize("group", [False, True])
def test_experts_may_be_mxfp4(tmp_path, group):
    """On a CPU, and fused as on a GPU."""
    hf_model = model_for(QWEN2, "gpt_oss", num_hidden_layers=1)
    file = write_family(tmp_path / "tiny.gguf", hf_model, "gpt-oss", {"_exps.weight": Kind.MXFP4})
    sequences = random_tokens([5, 21])
    logits = Paged(file, sequences, group=group).run(decode_the_last)
    assert_all_close(logits, reference_logits(hf_model, sequences), 2e-3 if group else 2e-4)


@pytest.mark.parametrize("name", ["granite, experts", "qwen3_5", "deepseek_v2, yarn, all q", "gpt_oss"])
def test_integers_stay_integers(tmp_path, name, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    family, arch, overrides = MODELS[name]
    kinds = dict.fromkeys(("ssm_in", "attn_qkv", "attn_q", "ffn_gate_exps"), Kind.Q8_0)
    file = write_family(tmp_path / "tiny.gguf", model_for(QWEN2, family, **overrides), arch, kinds)
    config = loader.read_config(file)
    tiled, floats = (
        loader.load_model(file, config, torch.float32, CPU, loader.Loading(keep_integers=kept))
        for kept in ("tiles", None)
    )
    same = dict(floats.named_modules())
    linears = {place: module for place, module in tiled.named_modules() if isinstance(module, Linear)}
    assert all(isinstance(linear.weight, TiledWeight) for linear in linears.values())
    for place, linear in linears.items():
        rows = torch.eye(linear.in_features)
        torch.testing.assert_close(linear(rows), same[place](rows), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("glm4_moe", {"expert_gating_func": 1}, "glm4moe.expert_gating_func = 1 is not supported"),
        ("glm4_moe", {"nextn_predict_layers": 3}, "glm4moe.nextn_predict_layers is 3, with 0 other layers"),
        ("qwen3_next", {"rope.dimension_sections": [1, 1, 2, 0]}, "qwen3next.rope.dimension_sections = .* is not supp"),
        ("qwen3_next", {"rope.dimension_count": 64}, "qwen3next.rope.dimension_count = 64 is not supported"),
        ("deepseek_v3", {"attention.key_length_mla": None}, "qk_nope_head_dim must be a positive integer, got None"),
        ("granite", {"ssm.inner_size": 3}, "mamba_expand must be a positive integer"),
        ("mamba2", {"ssm.time_step_rank": 2**20}, "mamba2.ssm.time_step_rank must be from 1 to"),
        ("gpt_oss", {"expert_count": 0}, "num_local_experts|the weights of .* do not fit"),
    ],
)
def test_a_field_that_does_not_fit_is_named(tmp_path, name, changes, message):
    family, arch, overrides = MODELS[name]
    file = write_family(tmp_path / "tiny.gguf", model_for(QWEN2, family, **overrides), arch, changes=changes)
    with pytest.raises(ValueError, match=message) as error:
        loader.load_model(file, loader.read_config(file), torch.float32, CPU)
    assert str(file) in str(error.value)


def test_a_file_of_deepseek_from_before_april_2025_is_refused_by_its_tensor(tmp_path):
    hf_model = model_for(QWEN2, "deepseek_v3")
    names = NAMES | {"self_attn.k_b_proj": "attn_kv_b", "self_attn.v_b_proj": "attn_kv_b_2"}
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(globals(), "NAMES", names)
        file = write_family(tmp_path / "tiny.gguf", hf_model, "deepseek2")
    with pytest.raises(ValueError, match=r"'blk.0.attn_kv_b.weight' is not one of a deepseek2 model; the model's"):
        loader.read_config(file)
