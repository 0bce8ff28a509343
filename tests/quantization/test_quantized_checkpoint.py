"""AWQ and GPTQ checkpoints, written here in their published layouts, number by number."""

import json
import re

import numpy as np
import pytest
import torch
from helpers import CPU, Paged, assert_all_close, random_tokens, tiny_model
from safetensors.torch import load_file, save_file

from nanopage import LLM, SamplingParams
from nanopage.cpu.tiled import TiledWeight
from nanopage.layers.linear import Linear
from nanopage.layers.weight import Floats
from nanopage.quantization import quantized_checkpoint
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import dequantize
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

O_PROJ = "model.layers.0.self_attn.o_proj"
SIZES = {"hidden_size": 256, "intermediate_size": 384}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}
KINDS = {
    "awq": AWQ | {"modules_to_not_convert": None},
    "awq, groups of 32": AWQ | {"group_size": 32, "modules_to_not_convert": ["lm_head"]},
    "gptq": GPTQ | {"damp_percent": 0.01},
    "gptq, whole columns": GPTQ | {"group_size": -1, "sym": True},
    "gptq_v2, groups of 64": GPTQ | {"group_size": 64, "checkpoint_format": "gptq_v2"},
    "gptq, 8 bits": GPTQ | {"bits": 8, "group_size": 64},
    "gptq, act-order": GPTQ | {"desc_act": True, "group_size": 64},
    "gptq, act-order, 8 bits": GPTQ | {"desc_act": True, "bits": 8, "group_size": 32},
}
ALL = pytest.mark.parametrize("kind", KINDS)
IN_ORDER = pytest.mark.parametrize("kind", [kind for kind in KINDS if "act-order" not in kind])


def rounded(weight, config, group_of):
    """Integers [out, in] from 0 on, scales and zero points [groups, out], where `group_of` [in] names input's group."""
    most = 2 ** config["bits"] - 1
    columns = [weight[:, group_of == group] for group in range(int(group_of.max()) + 1)]
    low = np.stack([np.minimum(part.min(1), 0) for part in columns])
    high = np.stack([np.maximum(part.max(1), 0) for part in columns])
    scales = ((high - low) / most).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, most).astype(np.int64)
    integers = np.clip(np.rint(weight / scales[group_of].T) + zeros[group_of].T, 0, most).astype(np.int64)
    return integers, scales, zeros


def awq_tensors(integers, scales, zeros):
    """WQLinear_GEMM: number i of an int32 is that of output 8 * word + (0, 2, 4, 6, 1, 3, 5, 7)[i]."""

    def packed(numbers):  # [rows, out]
        words = np.zeros((numbers.shape[0], numbers.shape[1] // 8), np.uint32)
        for i, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            words |= numbers[:, output::8].astype(np.uint32) << np.uint32(4 * i)
        return words.view(np.int32)

    return {"qweight": packed(integers.T), "qzeros": packed(zeros), "scales": scales}


def gptq_tensors(integers, scales, zeros, config, group_of):
    """QuantLinear: number i of an int32 is that of input (in qweight) or output (in qzeros) per_word * word + i."""
    bits, per_word = config["bits"], 32 // config["bits"]
    numbers = integers.T
    qweight = np.zeros((numbers.shape[0] // per_word, numbers.shape[1]), np.uint32)
    qzeros = np.zeros((zeros.shape[0], zeros.shape[1] // per_word), np.uint32)
    for i in range(per_word):
        qweight |= numbers[i::per_word].astype(np.uint32) << np.uint32(bits * i)
        qzeros |= zeros[:, i::per_word].astype(np.uint32) << np.uint32(bits * i)
    if config.get("checkpoint_format", "gptq") == "gptq":  # minus one in every number; 0 borrows from the next one
        qzeros = qzeros - np.uint32(sum(1 << bits * i for i in range(per_word)))
    tensors = {"qweight": qweight.view(np.int32), "qzeros": qzeros.view(np.int32), "scales": scales}
    return tensors | {"g_idx": group_of.astype(np.int32)}


def group_of_inputs(config, num_inputs, name):
    size = num_inputs if config["group_size"] == -1 else config["group_size"]
    group_of = np.arange(num_inputs) // size
    if config.get("desc_act"):  # layers that share their input share its order
        shared = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_proj", "gate_proj")
        np.random.default_rng(len(shared) + num_inputs).shuffle(group_of)
    return group_of


def write_quantized(directory, config, family="llama", dtype="float16", drop_g_idx=False, **overrides):
    """A quantized checkpoint. Returns the weights that it holds, in float32, by their names without quantization."""
    tiny_model(directory, family, dtype, **SIZES | overrides)
    tensors, weights = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        weights[name] = tensor.float()
        if not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        prefix = name.removesuffix("weight")
        group_of = group_of_inputs(config, tensor.shape[1], name)
        integers, scales, zeros = rounded(tensor.float().numpy(), config, group_of)
        if config["quant_method"] == "awq":
            parts = awq_tensors(integers, scales, zeros)
        else:
            parts = gptq_tensors(integers, scales, zeros, config, group_of)
            if drop_g_idx:
                del parts["g_idx"]
        tensors |= {prefix + kind: torch.from_numpy(np.ascontiguousarray(part)) for kind, part in parts.items()}
        exact = (integers - zeros[group_of].T) * scales.astype(np.float32)[group_of].T
        weights[name] = torch.from_numpy(exact.astype(np.float32))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return weights


@pytest.mark.parametrize("kind", ["awq, groups of 32", "gptq, act-order"])
def test_quantized_experts_are_floats_or_tiles(tmp_path, kind):
    """Their gate is not quantized, whatever the config says about it."""
    config = KINDS[kind] | ({"modules_to_not_convert": ["gate", "lm_head"]} if "awq" in kind else {})
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 128}
    weights = write_quantized(tmp_path, config, "qwen2_moe", **sizes)
    found = loader.slots(load(tmp_path))
    assert len(weights) > 50
    assert all(torch.allclose(found[name], weight, rtol=1e-3, atol=1e-6) for name, weight in weights.items())
    if "act-order" in kind:
        return
    mixture = load(tmp_path, "tiles").layers[1].mlp
    assert all(isinstance(expert.down_proj.weight, TiledWeight) for expert in [*mixture.experts, mixture.shared_expert])
    assert torch.equal(mixture.gate.weight, weights["model.layers.1.mlp.gate.weight"])


def load(directory, keep_integers=None, dtype=torch.float32):
    how = loader.Loading(keep_integers=keep_integers)
    return loader.load_model(directory, loader.read_config(directory), dtype, CPU, how)


def matrices(model, weights):
    """(a linear layer of the model except the head, its weight as the rows of `weights`)"""
    for place, module in model.named_modules():
        if isinstance(module, Linear) and place != "lm_head":
            parent, _, own = f"model.{place}".rpartition(".")
            yield module, torch.cat([weights[f"{parent}.{part or own}.weight"] for part in module.parts])


@ALL
def test_weights_are_those_that_the_layout_defines(tmp_path, kind):
    weights = write_quantized(tmp_path, KINDS[kind])
    model = load(tmp_path)
    found = loader.slots(model)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(found[name], weight), name


@IN_ORDER
def test_tiles_hold_the_same_integers(tmp_path, kind):
    config = KINDS[kind]
    weights = write_quantized(tmp_path, config, "qwen2")
    model = load(tmp_path, keep_integers="tiles")
    for module, weight in matrices(model, weights):
        assert isinstance(module.weight, TiledWeight)
        tiled, scales = module.weight.rows(torch.arange(module.out_features)), module.weight.scales
        offsets = scales[:, :, 1].abs().max()
        assert (tiled - weight).abs().max() <= offsets * 2**-11  # offsets are rounded to float16
        assert scales.shape[1] == module.in_features // 32
    biases = {name: bias for name, bias in loader.slots(model).items() if name.endswith("bias")}
    assert biases and all(torch.equal(bias, weights[name]) for name, bias in biases.items())


@ALL
def test_packed_weights_for_a_gpu_are_exact(tmp_path, kind):
    weights = write_quantized(tmp_path, KINDS[kind], "qwen2")
    model = load(tmp_path, keep_integers="packed")
    for module, weight in matrices(model, weights):
        packed = module.weight
        assert isinstance(packed, QuantizedWeight) and packed.packed.dtype == torch.uint8
        assert torch.equal(dequantize(packed), weight if packed.order is None else weight[:, packed.order])
        assert (packed.order is not None) == ("act-order" in kind)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["awq", "gptq, act-order"])
def test_logits_of_packed_weights_are_those_of_the_dequantized_checkpoint(tmp_path, kind):
    write_quantized(tmp_path, KINDS[kind], "qwen2")
    sequences, logits = random_tokens([3, 1, 5]), []
    for tiles in (None, "packed"):
        paged = Paged(tmp_path, sequences, torch.float32, tiles=tiles)
        for _ in range(9):
            left = {i: 3 for i, tokens in enumerate(sequences) if paged.done(i) < len(tokens)}
            if left:
                paged.step({i: min(n, len(sequences[i]) - paged.done(i)) for i, n in left.items()})
        logits.append(paged.logits)
    assert_all_close(logits[1], logits[0], 1e-4)


def test_symmetric_weights_in_tiles_are_exact(tmp_path):
    weights = write_quantized(tmp_path, KINDS["awq"])
    tensors = load_file(tmp_path / "model.safetensors")
    zero_of_eight = torch.full_like(tensors[f"{O_PROJ}.qzeros"], int(np.uint32(0x88888888).view(np.int32)))
    tensors[f"{O_PROJ}.qzeros"] = zero_of_eight
    save_file(tensors, tmp_path / "model.safetensors")
    plain, tiled = (load(tmp_path, keep).layers[0].self_attn.o_proj for keep in (None, "tiles"))
    assert not torch.equal(plain.weight.matrix, weights[f"{O_PROJ}.weight"])
    assert torch.equal(tiled.weight.rows(torch.arange(256)), plain.weight.matrix)


def test_without_g_idx_inputs_are_in_order(tmp_path):
    weights = write_quantized(tmp_path, KINDS["gptq"], drop_g_idx=True)
    assert torch.equal(loader.slots(load(tmp_path))[f"{O_PROJ}.weight"], weights[f"{O_PROJ}.weight"])


def test_parts_of_a_matrix_may_be_in_different_files(tmp_path):
    weights = write_quantized(tmp_path, KINDS["awq"])
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = loader.slots(load(tmp_path))
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_progress_ends_at_the_total(tmp_path):
    write_quantized(tmp_path, KINDS["awq"])
    for keep_integers in (None, "tiles", "packed"):
        calls = []
        config, on_progress = loader.read_config(tmp_path), lambda *now, calls=calls: calls.append(now)
        loader.load_model(tmp_path, config, torch.float32, CPU, loader.Loading("auto", keep_integers), on_progress)
        assert len(calls) > 4 and calls == sorted(calls) and calls[-1][0] == calls[-1][1]


def assert_same_answers(quantized, weights, plain):
    """In float32, eagerly: greedy answers of a checkpoint are those of the same model with these weights.

    Args: plain: a directory of this model, whose weights are replaced.
    """
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = []
    for path in (quantized, plain):
        llm = LLM(str(path), dtype="float32", enforce_eager=True, num_gpu_blocks_override=64)
        outputs = llm.generate(["the cat", "a dog went"], SamplingParams(temperature=0.0, max_tokens=12))
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["awq", "gptq, act-order"])
@pytest.mark.parametrize("tied", [False, True])
def test_answers_are_those_of_the_dequantized_checkpoint(tmp_path, kind, tied):
    """In float32, eagerly: both engines compute with the same weights."""
    weights = write_quantized(tmp_path / "quantized", KINDS[kind], tie_word_embeddings=tied)
    assert_same_answers(
        tmp_path / "quantized", weights, tiny_model(tmp_path / "plain", **SIZES, tie_word_embeddings=tied)
    )


# What is refused


def change(directory, **tensors):
    """Replace tensors, drop those that are None; `__` in a name stands for a dot."""
    stored = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        stored[name.replace("__", ".")] = tensor
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, directory / "model.safetensors")


O = O_PROJ.replace(".", "__")  # noqa: E741
BROKEN = [
    ("awq", {f"{O}__qweight": None}, "missing: .*o_proj.qweight"),
    ("awq", {f"{O}__qweight": torch.zeros(32, 256, dtype=torch.int32)}, "mis-shaped: .*o_proj.qweight"),
    ("awq", {f"{O}__qweight": torch.zeros(256, 32)}, "type not supported: .*qweight is F32; supported: I32"),
    ("awq", {f"{O}__scales": torch.zeros(2, 256, dtype=torch.int32)}, "type not supported: .*scales is I32"),
    ("awq", {f"{O}__scales": torch.full((2, 256), float("nan"))}, "model.safetensors: .*o_proj.scales has values"),
    ("awq", {f"{O}__g_idx": torch.zeros(256, dtype=torch.int32)}, "unexpected: .*o_proj.g_idx"),
    ("awq", {f"{O}__weight": torch.zeros(256, 256)}, "unexpected: .*o_proj.weight"),
    ("gptq", {f"{O}__g_idx": torch.arange(256, dtype=torch.int32) % 2}, "g_idx is not in order, but .* desc_act"),
    ("gptq", {f"{O}__g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx does not have 2 groups of 128"),
    ("gptq", {f"{O}__g_idx": torch.full((256,), -1, dtype=torch.int32)}, "g_idx does not have 2 groups of 128"),
    ("gptq", {f"{O}__bias": torch.ones(256)}, "o_proj.bias is not zero"),
]


@pytest.mark.parametrize(("kind", "tensors", "message"), BROKEN, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("keep_integers", [None, "tiles", "packed"])
def test_a_broken_checkpoint_is_an_error_that_names_the_tensor(tmp_path, kind, tensors, message, keep_integers):
    write_quantized(tmp_path, KINDS[kind])
    change(tmp_path, **tensors)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, keep_integers)


def test_biases_of_zero_that_the_model_does_not_have_are_ignored(tmp_path):
    weights = write_quantized(tmp_path, KINDS["gptq"])
    change(tmp_path, **{f"{O}__bias": torch.zeros(256)})
    assert torch.equal(loader.slots(load(tmp_path))[f"{O_PROJ}.weight"], weights[f"{O_PROJ}.weight"])


def test_parts_with_different_orders_become_floats(tmp_path):
    write_quantized(tmp_path, KINDS["gptq, act-order"])
    other = torch.arange(256, dtype=torch.int32) // 64
    change(tmp_path, model__layers__0__self_attn__k_proj__g_idx=other)
    first, second = (layer.self_attn.qkv_proj.weight for layer in load(tmp_path, "packed").layers)
    assert isinstance(first, Floats) and isinstance(second, QuantizedWeight)
    assert torch.equal(first.matrix, load(tmp_path).layers[0].self_attn.qkv_proj.weight.matrix)


def test_sizes_that_no_group_divides_are_refused(tmp_path):
    write_quantized(tmp_path, KINDS["awq"])
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["group_size"] = 64
    config["intermediate_size"] = 400
    file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"down_proj has 400 inputs .* group_size=64"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "gptq"}, "quantization='gptq', but .* are quantized by awq"),
        ({"quantization": "int8"}, "quantization='int8', but .* already are"),
        ({"load_format": "dummy"}, "load_format='dummy'"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused(tmp_path, options, message):
    write_quantized(tmp_path, KINDS["awq"])
    with pytest.raises(ValueError, match=message):
        LLM(str(tmp_path), **options)


def test_awq_is_refused_for_weights_that_are_not_quantized(tmp_path):
    tiny_model(tmp_path)
    with pytest.raises(ValueError, match=re.escape("quantization='awq'") + ".* are not quantized"):
        LLM(str(tmp_path), quantization="awq")


def test_little_memory_is_an_error_before_anything_is_read(tmp_path, monkeypatch):
    write_quantized(tmp_path, KINDS["awq"])
    monkeypatch.setattr("nanopage.device.free_bytes", lambda device: 1000)
    monkeypatch.setattr(quantized_checkpoint.Reader, "read", lambda *_: pytest.fail("a matrix is read"))
    with pytest.raises(MemoryError, match=r"the weights take .* GiB"):
        load(tmp_path, keep_integers="tiles")
