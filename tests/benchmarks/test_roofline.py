"""The least time of a batch: weights by the headers of a checkpoint, bytes and operations counted by hand."""

from dataclasses import replace

import gguf
import pytest
from helpers import tiny_hf_model, tiny_model
from test_gguf import SMOLLM, model_for, write_gguf

from benchmarks.machine import product_speed
from benchmarks.peers.protocol import Work
from benchmarks.roofline import Speed, Weights, attended_tokens, read_weights, roofline
from nanopage.reading.config import config_from_directory
from nanopage.weights import loader

KV_BYTES = 2 * 2 * 16 * 4  # of a layer of the tiny model in float32: K and V, 2 heads of 16


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("stored", "dtype", "quantization", "each"),
    [
        ("bfloat16", "bfloat16", None, 2),
        ("bfloat16", "float32", None, 2),  # an engine can widen them as it reads them
        ("float32", "bfloat16", None, 2),
        ("float32", "float32", None, 4),
        ("float32", "float32", "int8", 1),
        ("bfloat16", "bfloat16", "int4", 0.5625),
    ],
)
def test_weights_are_those_that_every_token_passes_through(tmp_path, tied, stored, dtype, quantization, each):
    path = tiny_model(tmp_path / "model", dtype=stored, tie_word_embeddings=tied)
    weights = read_weights(path, config_from_directory(path), dtype, quantization)
    parameters = {name: p.numel() for name, p in tiny_hf_model(tie_word_embeddings=tied).named_parameters()}
    head = parameters.pop("model.embed_tokens.weight")
    assert weights.in_head == parameters.pop("lm_head.weight", head)
    assert weights.in_layers == sum(parameters.values())
    of_head = 1 if quantization else each
    assert weights.num_bytes == each * weights.in_layers + of_head * weights.in_head


def test_weights_of_a_gguf_file_have_its_bytes(tmp_path):
    """Q8_0: 34 bytes for 32 weights. Vectors, and here the embedding, which is the head, are float32."""
    hf_model = model_for(SMOLLM, tie_word_embeddings=True)
    types = dict.fromkeys(("self_attn", "mlp"), gguf.GGMLQuantizationType.Q8_0)
    path = write_gguf(tmp_path / "model.gguf", hf_model, "llama", SMOLLM, types)
    weights = read_weights(path, loader.read_config(path), "bfloat16", None)
    parameters = dict(hf_model.named_parameters())
    assert weights.in_head == parameters["model.embed_tokens.weight"].numel()
    matrices = sum(p.numel() for name, p in parameters.items() if "layers" in name and p.dim() == 2)
    everything = sum(p.numel() for p in parameters.values())
    assert weights.in_layers == everything - weights.in_head
    assert weights.num_bytes == matrices * 34 // 32 + 4 * (everything - matrices)


@pytest.mark.parametrize(
    ("prompts", "output_len", "passes", "computed", "attended", "attended_by_outputs"),
    [
        ([[7, 8, 9]], 1, 1, 3, 1 + 2 + 3, 0),
        ([[7, 8, 9]], 2, 2, 4, 1 + 2 + 3 + 4, 4),
        ([[7, 8, 9], [7, 8, 1]], 1, 1, 3 + 1, 6 + 3, 0),  # two tokens are shared
        ([[7, 8], [7, 8]], 2, 2, 3 + 2, 6 + 5, 3 + 3),  # the last one of a prompt is never found in a cache
        ([[7], [8]], 3, 3, 3 + 3, 6 + 6, 5 + 5),
    ],
)
def test_bytes_and_operations(model, prompts, output_len, passes, computed, attended, attended_by_outputs):
    config = config_from_directory(model)
    assert (config.num_layers, config.num_heads, config.head_dim) == (2, 4, 16)
    work = [Work(prompt, output_len) for prompt in prompts]
    roof = roofline(work, config, Weights(1000, 100, 5000), "float32", Speed(1e-9, 1e-9))  # a byte a second, and so on
    assert roof.memory_seconds == pytest.approx(5000 * passes + KV_BYTES * 2 * attended_by_outputs)
    operations = 2 * 1000 * computed + 2 * 100 * output_len * len(work) + 4 * 4 * 16 * 2 * attended
    assert roof.arithmetic_seconds == pytest.approx(operations)
    assert roof.seconds == max(roof.memory_seconds, roof.arithmetic_seconds)


def test_a_window_limits_what_is_attended_to(model):
    config = replace(config_from_directory(model), sliding_windows=(None, 3))
    assert attended_tokens(config, 1, 5) == (2 + 3 + 4 + 5) + (2 + 3 + 3 + 3)


def test_every_kind_of_product_can_be_measured():
    assert product_speed(1, "bfloat16", "int8") > 0
