"""MXFP4 checkpoints of GPT-OSS, written here number by number; transformers says what their numbers are."""

import json
import logging

import pytest
import torch
from helpers import CPU, Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from nanopage import EngineConfig
from nanopage.distributed.part import Part
from nanopage.quantization.mxfp4 import dequantize
from nanopage.reading.config import config_from_dict
from nanopage.startup.worker import build_worker
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

SKIPPED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}
BLOCKS = "model.layers.0.mlp.experts.gate_up_proj_blocks"
SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory, one with the same numbers as floats, and transformers' model of it."""
    directory, plain = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("floats")
    tiny_model(directory, "gpt_oss", torch.bfloat16, num_hidden_layers=2)
    hf_model, generator = tiny_hf_model("gpt_oss", torch.bfloat16), torch.Generator().manual_seed(1)
    floats, tensors = hf_model.state_dict(), load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        shape = num_experts, num_outputs, num_inputs // 32
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 127, shape, dtype=torch.uint8, generator=generator)
        floats[name].copy_(convert_moe_packed_tensors(blocks, scales))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]  # as in OpenAI's files
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    hf_model.save_pretrained(plain)
    return directory, plain, hf_model.float()


def test_numbers_are_those_of_the_format():
    """All of them, with the smallest scale and the largest."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    numbers = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    expected = torch.tensor([[numbers[byte % 16], numbers[byte // 16]] for byte in range(256)]).flatten().double()
    for scale in (0, 100, 127, 130, 252):
        found = dequantize(blocks, torch.full((1, 16), scale, dtype=torch.uint8))
        assert found.dtype == torch.bfloat16 and torch.equal(found[0].double(), expected * 2.0 ** (scale - 127))


@pytest.mark.parametrize("group", [False, True], ids=["separate", "fused"])
def test_logits_are_those_of_the_same_numbers_as_floats(checkpoint, group):
    directory, plain, hf_model = checkpoint
    sequences = random_tokens([2, 9, 33])
    paged = Paged(directory, sequences, group=group)
    steps = {index: len(tokens) for index, tokens in enumerate(sequences)}
    paged.step(steps)
    assert_all_close(paged.logits, reference_logits(hf_model, sequences))
    for part in (Part(), Part(0, 1, 1, 2), Part(1, 2), Part(1, 2, 0, 1, True)):
        how = loader.Loading(group=group, part=part)
        floats, ours = (
            loader.slots(loader.load_model(path, loader.read_config(path), torch.bfloat16, CPU, how))
            for path in (plain, directory)
        )
        assert floats.keys() == ours.keys() and all(torch.equal(floats[name], ours[name]) for name in ours)
    assert loader.read_config(directory).dtype == "bfloat16"


def make_worker(path, **options):
    config = EngineConfig(model=str(path), device="cpu", max_model_len=64, num_gpu_blocks_override=8, **options)
    return build_worker(config, loader.read_config(path), path)


def test_an_engine_says_what_it_does(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "nanopage"):
        worker = make_worker(checkpoint[0], dtype="float32", quantization="mxfp4")
    (line,) = [line for line in caplog.messages if " become " in line]
    kind = worker.wings.stored_as or "float32"  # bfloat16 if products of 16 bits have been compiled
    assert line.endswith(f"(mxfp4: mxfp4) become {kind}")
    assert worker.way == "eagerly: attention with sinks is not compiled"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, r"quantization='int8', but the weights of .* already are \(mxfp4\)"),
        ({"quantization": "awq"}, r"quantization='awq', but the weights of .* are quantized by mxfp4"),
        ({"enable_lora": True}, "enable_lora does not work with the experts of"),
        ({"load_format": "dummy"}, "load_format='dummy' draws weights that are not quantized"),
    ],
)
def test_options_that_do_not_fit_are_refused(checkpoint, options, message):
    with pytest.raises(ValueError, match=message):
        make_worker(checkpoint[0], **options)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (SCALES, lambda scales: scales.fill_(255), f"model.safetensors: {SCALES} has scales that are NaN or too large"),
        (SCALES, lambda scales: scales[..., :1].clone(), f"unexpected: {SCALES}"),
        (BLOCKS, lambda blocks: blocks.int(), f"unexpected: {BLOCKS}"),
        (BLOCKS, lambda blocks: None, r"missing: model.layers.0.mlp.experts.0.gate_proj.weight \[32, 192\]"),
    ],
)
def test_a_broken_checkpoint_is_an_error_that_names_the_tensor(checkpoint, tmp_path, name, change, message):
    tensors = load_file(checkpoint[0] / "model.safetensors")
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    with pytest.raises(ValueError, match=message):
        loader.load_model(tmp_path, loader.read_config(tmp_path), torch.float32, CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_other_families_do_not_have_it(family):
    model = tiny_hf_model(family)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": MXFP4}
    with pytest.raises(ValueError, match=r"quantization_config: quant_method 'mxfp4' of .* is not supported"):
        config_from_dict(config)
