"""fp8, compressed-tensors and ModelOpt checkpoints, written by benchmarks/formats.py as these formats define them. What
it writes for compressed-tensors was compared with that package's own compressors."""

import json

import pytest
import torch
from helpers import CPU, tiny_model
from safetensors.torch import load_file, save_file
from test_quantized_checkpoint import assert_same_answers

from benchmarks.formats import FLOAT8, FORMS, FP8, INT8, NVFP4, compressed, packed, quantize
from nanopage.cpu.tiled import TiledWeight
from nanopage.layers.linear import Linear
from nanopage.layers.weight import Floats
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import dequantize
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 192, "intermediate_size": 320}  # 1.5 and 2.5 blocks of 128
EXPERTS = SIZES | {"moe_intermediate_size": 64, "num_experts": 4}
O_PROJ = "model.layers.0.self_attn.o_proj"


ALL = pytest.mark.parametrize("form", FORMS)
IN_TILES = [form for form in FORMS if form.startswith("int") and "act-order" not in form]


def write(directory, form, family="llama", skip=(), head_step=None, **overrides):
    """A quantized checkpoint in bfloat16. Returns the weights that it holds, in float32.

    Args: skip: matrices left as floats. head_step: weights of the head are multiples of it.
    """
    config = FORMS[form]
    tiny_model(directory, family, "bfloat16", **SIZES | overrides)
    tensors, weights = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if name == "lm_head.weight" and head_step:
            tensor = (tensor / head_step).round() * head_step
        weights[name], prefix = tensor.float(), name.removesuffix("weight")
        if name in skip or not name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            tensors[name] = tensor
            continue
        parts, weights[name] = quantize(tensor.float(), config)
        tensors |= {prefix + kind: part.contiguous() for kind, part in parts.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit(directory, quantization_config=config)
    return weights


def edit(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def load(directory, keep_integers=None, **how):
    how = loader.Loading(keep_integers=keep_integers, **how)
    return loader.load_model(directory, loader.read_config(directory), torch.float32, CPU, how)


def assert_holds(model, weights):
    found = loader.slots(model)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-6, atol=0, msg=name)


def matrices(model, weights):
    for place, module in model.named_modules():
        if isinstance(module, Linear) and place != "lm_head":
            parent, _, own = f"model.{place}".rpartition(".")
            yield place, module, torch.cat([weights[f"{parent}.{part or own}.weight"] for part in module.parts])


@ALL
def test_weights_are_those_that_the_format_defines(tmp_path, form):
    weights = write(tmp_path, form)
    model = load(tmp_path)
    assert loader.slots(model).keys() == weights.keys()
    assert_holds(model, weights)


@ALL
def test_weights_for_a_gpu_are_exact(tmp_path, form):
    """Numbers of NVFP4 are int8 there."""
    weights = write(tmp_path, form)
    for _, module, weight in matrices(load(tmp_path, "packed"), weights):
        assert isinstance(module.weight, QuantizedWeight)
        order = module.weight.order
        weight = weight if order is None else weight[:, order]
        torch.testing.assert_close(dequantize(module.weight), weight, rtol=1e-6, atol=0)
        assert (order is not None) == ("act-order" in form)
        assert (module.weight.packed.dtype == FP8) == ("fp8" in form.replace("nvfp4", "") or "float" in form)


@ALL
def test_tiles_on_a_cpu_hold_integers(tmp_path, form):
    weights = write(tmp_path, form)
    model = load(tmp_path, "tiles")
    for _, module, weight in matrices(model, weights):
        assert isinstance(module.weight, TiledWeight if form in IN_TILES else Floats)
        if form in IN_TILES:
            tiled = module.weight.rows(torch.arange(module.out_features))
            offsets = module.weight.scales[:, :, -1].abs().max() if "zero points" in form else 0.0
            # Offsets are rounded to float16.
            torch.testing.assert_close(tiled, weight, rtol=0, atol=max(1e-6, float(offsets) * 2**-11))
    if form not in IN_TILES:
        assert_holds(model, weights)


def test_a_matrix_that_tiles_cannot_hold_is_floats(tmp_path):
    """Here its scales overflow float16."""
    write(tmp_path, "int4, groups of 32")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{O_PROJ}.weight_scale"] = torch.full((192, 6), 1e4, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    first, second = (layer.self_attn.o_proj.weight for layer in load(tmp_path, "tiles").layers)
    assert isinstance(first, Floats) and isinstance(second, TiledWeight)


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3_moe", "fp8, blocks"), ("qwen3_moe", "nvfp4"), ("qwen2_moe", "int8"), ("mixtral", "int4, groups of 32")],
)
def test_experts_are_floats_or_tiles(tmp_path, family, form):
    sizes = {"shared_expert_intermediate_size": 128} if family == "qwen2_moe" else {}
    weights = write(tmp_path, form, family, **(SIZES if family == "mixtral" else EXPERTS) | sizes)
    assert sum("expert" in name for name in weights) >= 24
    assert_holds(load(tmp_path), weights)
    grouped = load(tmp_path, "packed", group=True)  # as on a GPU
    assert_holds(grouped, {name: weight for name, weight in weights.items() if ".experts." in name})
    assert isinstance(grouped.layers[0].self_attn.o_proj.weight, QuantizedWeight)
    if form in IN_TILES:
        linears = [module for _, module, _ in matrices(load(tmp_path, "tiles"), weights)]
        assert len(linears) > 12 and all(isinstance(linear.weight, TiledWeight) for linear in linears)


@pytest.mark.parametrize("form", ["fp8, blocks", "int4, groups of 32"])
def test_matrices_that_are_not_quantized_are_floats(tmp_path, form):
    skip = ["model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.down_proj.weight"]
    weights = write(tmp_path, form, skip=skip)
    assert_holds(load(tmp_path), weights)
    model = load(tmp_path, "packed")
    floats = {place for place, module, _ in matrices(model, weights) if isinstance(module.weight, Floats)}
    assert floats == {"layers.0.self_attn.qkv_proj", "layers.1.mlp.down_proj"}
    assert_holds(model, {name: weights[name] for name in [*skip, "model.layers.0.self_attn.q_proj.weight"]})


def test_a_head_may_be_quantized(tmp_path):
    weights = write(tmp_path, "int8")
    tensors = load_file(tmp_path / "model.safetensors")
    parts, exact = quantize(tensors.pop("lm_head.weight").float(), FORMS["int8"])
    save_file(tensors | {f"lm_head.{kind}": part for kind, part in parts.items()}, tmp_path / "model.safetensors")
    assert_holds(load(tmp_path), weights | {"lm_head.weight": exact})
    head = load(tmp_path, "tiles").lm_head
    torch.testing.assert_close(head.weight.rows(torch.arange(300)), exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["fp8, blocks", "int4, act-order", "nvfp4"])
def test_answers_are_those_of_the_same_numbers_as_floats(tmp_path, form, caplog):
    """In float32, eagerly."""
    weights = write(tmp_path / "quantized", form)
    assert_same_answers(tmp_path / "quantized", weights, tiny_model(tmp_path / "plain", **SIZES))
    assert caplog.text.count("become float32") == 1


def test_scales_of_k_and_v_are_read(tmp_path):
    write(tmp_path, "float, tensors")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.5])
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).layers[1].self_attn.scoring.kv_scales == (0.5, 1.0)


def test_a_file_of_modelopt_counts_only_without_quantization_config(tmp_path):
    weights = write(tmp_path, "nvfp4 of ModelOpt")
    edit(tmp_path, quantization_config=None)
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    file = tmp_path / "hf_quant_config.json"
    file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quantization}))
    assert_holds(load(tmp_path), weights)
    file.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ValueError, match="quant_algo 'W4A8_AWQ' is not supported; supported: FP8, NVFP4"):
        loader.read_config(tmp_path)
    edit(tmp_path, quantization_config=FORMS["nvfp4 of ModelOpt"])
    assert_holds(load(tmp_path), weights)


# What is refused

NAN = torch.tensor(float("nan"))
BROKEN = [
    ("fp8, blocks", {"weight_scale_inv": None}, "missing: .*o_proj.weight_scale_inv .2, 2."),
    ("fp8, blocks", {"weight_scale_inv": torch.ones(1, 2)}, "mis-shaped: .*weight_scale_inv is .1, 2., .* .2, 2."),
    ("fp8, blocks", {"weight_scale_inv": torch.full((2, 2), NAN)}, "weight_scale_inv has values that are NaN"),
    ("fp8, blocks", {"weight": torch.full((192, 192), NAN).to(FP8)}, "o_proj.weight has values that are NaN"),
    ("fp8, blocks", {"weight": torch.zeros(192, 192, dtype=torch.float8_e5m2)}, "type not .* F8_E5M2; .* F8_E4M3"),
    ("fp8, blocks", {"weight_scale": torch.ones(2, 2)}, "unexpected: .*o_proj.weight_scale"),
    ("fp8, tensors", {"weight_scale": torch.ones(2)}, "mis-shaped: .*o_proj.weight_scale"),
    ("fp8, tensors", {"input_scale": torch.ones(2)}, "mis-shaped: .*o_proj.input_scale"),
    ("int8", {"weight_scale": torch.ones(192, 2)}, "mis-shaped: .*o_proj.weight_scale"),
    ("int8", {"weight_zero_point": torch.zeros(192, 1, dtype=torch.int8)}, "unexpected: .*weight_zero_point"),
    ("int8", {"weight": torch.zeros(192, 0, dtype=torch.int8)}, "mis-shaped: .*o_proj.weight"),
    ("int8, zero points", {"weight_zero_point": None}, "missing: .*weight_zero_point"),
    ("int4, groups of 32", {"weight_shape": torch.tensor([192, 191])}, "o_proj.weight_shape is not .192, 192."),
    ("int4, groups of 32", {"weight_shape": torch.tensor([192])}, "mis-shaped: .*weight_shape"),
    ("int4, groups of 32", {"weight_scale": torch.ones(192, 0)}, "mis-shaped: .*weight_scale is .192, 0."),
    ("int4, groups of 32", {"weight_packed": torch.zeros(192, 24, dtype=torch.uint8)}, "weight_packed is U8; .* I32"),
    ("int4, act-order", {"weight_g_idx": torch.zeros(192, dtype=torch.int32)}, "weight_g_idx does not have 6 groups"),
    ("int4, act-order", {"weight_g_idx": None}, "missing: .*weight_g_idx"),
    ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "o_proj.weight_global_scale is 0"),
    ("nvfp4", {"weight_global_scale": torch.ones(2)}, "mis-shaped: .*weight_global_scale"),
    ("nvfp4", {"weight_scale": torch.full((192, 12), NAN).to(FP8)}, "weight_scale has values that are NaN"),
    ("nvfp4 of ModelOpt", {"weight_scale_2": None}, "missing: .*weight_scale_2"),
]


@pytest.mark.parametrize(("form", "tensors", "message"), BROKEN, ids=lambda value: str(value)[:40])
def test_a_broken_checkpoint_is_an_error_that_names_the_tensor(tmp_path, form, tensors, message):
    write(tmp_path, form)
    stored = load_file(tmp_path / "model.safetensors") | {
        f"{O_PROJ}.{kind}": tensor for kind, tensor in tensors.items()
    }
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, tmp_path / "model.safetensors")
    for keep_integers in (None, "packed"):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, keep_integers)


def test_sizes_that_no_group_divides_are_refused(tmp_path):
    write(tmp_path, "int4, groups of 32")
    edit(tmp_path, quantization_config=packed(4, 128))
    with pytest.raises(ValueError, match=r"q_proj has 192 inputs .* compressed-tensors with group_size=128"):
        load(tmp_path)


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes' .*quantization='int8'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size .*128, 0.* two of 32, 64, 128"),
    ({"quant_method": "fp8", "weight_block_size": [128, True]}, "weight_block_size"),
    ({"quant_method": "fp8", "activation_scheme": "block"}, "activation_scheme 'block'"),
    ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers must be a list"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32 .* supported: 16"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo 'NVFP4'"),
    (compressed("marlin-24", **INT8), "format 'marlin-24' .* pack-quantized"),
    (
        compressed("float-quantized", **FLOAT8, strategy="token"),
        "strategy 'token' .* supported: tensor, channel, block",
    ),
    (compressed("float-quantized", **FLOAT8, strategy="block"), "block_structure None"),
    (compressed("float-quantized", **FLOAT8, strategy="channel", symmetric=False), "symmetric false"),
    (compressed("float-quantized", **INT8), "weights: type 'int' is not supported; supported: float"),
    (compressed("int-quantized", **INT8, group_size=32), "group_size 32 .* strategy 'channel'"),
    (compressed("int-quantized", **INT8 | {"dynamic": True}), "dynamic true"),
    (packed(4, 0), "group_size 0 .* supported: 32, 64, 128"),
    (packed(3, 32), "num_bits 3"),
    (packed(4, 32, actorder="sideways"), "actorder 'sideways'"),
    (packed(4, actorder="group"), "actorder 'group' .* strategy 'channel'"),
    (packed(4, 32) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format 'sparse-24"),
    (packed(4, 32) | {"transform_config": {"config_groups": {}}}, "transform_config"),
    (packed(4, 32) | {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type 'int'"),
    (packed(4, 32) | {"config_groups": {}}, "config_groups has no group with weights"),
    (packed(4, 32) | {"config_groups": {"W4A16": ["Linear"]}}, "W4A16 must be an object"),
    (packed(4, 32) | {"ignore": "lm_head"}, "ignore must be a list of names"),
    (compressed("nvfp4-pack-quantized", **NVFP4 | {"group_size": 32}), "group_size 32 .* supported: 16"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda value: str(value)[:50])
def test_what_is_not_supported_is_refused_by_name(tmp_path, config, message):
    tiny_model(tmp_path)
    edit(tmp_path, quantization_config=config)
    with pytest.raises(ValueError, match=f"quantization_config: .*{message}"):
        loader.read_config(tmp_path)


def test_groups_must_agree(tmp_path):
    tiny_model(tmp_path)
    first, second = packed(4, 32), packed(4, 64)
    first["config_groups"]["group_1"] = second["config_groups"]["group_0"]
    edit(tmp_path, quantization_config=first)
    with pytest.raises(ValueError, match="config_groups of different formats"):
        loader.read_config(tmp_path)
