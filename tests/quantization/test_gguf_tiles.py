"""gguf_blocks.py and gguf_tiles.py: a quantized .gguf file keeps its own integers, which are repacked once."""

import os

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers import CPU
from test_gguf import SMOLLM, VOCABULARIES, model_for, write_gguf

from nanopage.cpu import tile_linear
from nanopage.cpu.tiled import TiledWeight
from nanopage.files.private_files import cache_directory
from nanopage.layers.weight import Floats
from nanopage.quantization import gguf_tiles
from nanopage.quantization.gguf_blocks import KINDS, split_blocks, with_one_format
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import dequantize
from nanopage.weights import loader

# Where float16 numbers begin in a block of each kind.
HALVES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
}


def random_blocks(kind, num_rows, row_size, seed=0):
    """Rows of a tensor of this kind, all bytes of which are random except the float16 numbers: uint8."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(seed)
    data = generator.integers(0, 256, (num_rows * row_size // size, num_bytes), dtype=np.uint8)
    for position in HALVES[kind]:
        halves = generator.normal(0, 0.01, len(data)).astype(np.float16)
        data[:, position : position + 2] = halves[:, None].view(np.uint8)
    return data.reshape(num_rows, -1)


def dense(blocks):
    """In float32, as the package gguf computes it."""
    wide = blocks.integers.unflatten(1, (blocks.scales.shape[1], -1)).float() * blocks.scales[..., None]
    return (wide if blocks.offsets is None else wide - blocks.offsets[..., None]).flatten(1)


def test_all_kinds_are_tested():
    assert HALVES.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_blocks_are_split_exactly(kind):
    data = random_blocks(kind, 6, 512)
    blocks = split_blocks(kind, torch.from_numpy(data))
    assert torch.equal(dense(blocks), torch.from_numpy(gguf.dequantize(data, kind)))


@pytest.mark.parametrize("kinds", [(Kind.Q4_K, Kind.Q4_K, Kind.Q6_K), (Kind.Q8_0, Kind.Q6_K), (Kind.Q4_0, Kind.Q5_0)])
def test_one_format_holds_several_kinds_exactly(kinds):
    parts = [split_blocks(kind, torch.from_numpy(random_blocks(kind, 6, 256, seed=i))) for i, kind in enumerate(kinds)]
    assert torch.equal(dense(with_one_format(parts)), torch.cat([dense(part) for part in parts]))


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "tiny.gguf"


@pytest.fixture
def quantized(file):
    return write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, types={"": Kind.Q4_0})


def load(file, tiled=True):
    how = loader.Loading(keep_integers="tiles" if tiled else None)
    return loader.load_model(file, loader.read_config(file), torch.float32, CPU, how)


def kept_files():
    return sorted((cache_directory() / "tiles").glob("*.safetensors"))


def matrix_of(weight):
    """A weight of either kind as floats."""
    if isinstance(weight, TiledWeight):
        rows = torch.arange(weight.tiles.shape[0] * weight.tiles.shape[-2 if weight.tiles.dim() == 4 else -1])
        return tile_linear.rows(weight.tiles, weight.scales, rows, weight.in_features, torch.float32)
    return weight.matrix


STORED = {
    "one kind": {"": Kind.Q8_0},
    "mixed in one layer": {"q_proj": Kind.Q4_0, "k_proj": Kind.Q8_0, "gate_proj": Kind.Q5_1, "": Kind.Q5_0},
    "with matrices that are not quantized": {"v_proj": Kind.BF16, "embed": Kind.BF16, "": Kind.Q4_1},
}


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("family", "arch", "options"),
    [
        ("llama", "llama", {}),
        ("llama", "llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    ],
    ids=["llama", "sizes that do not fill tiles", "qwen2, biases, tied"],
)
def test_weights_are_those_of_the_file(file, monkeypatch, family, arch, options, stored, rows):
    monkeypatch.setattr(gguf_tiles, "ROWS", rows)
    vocabulary = SMOLLM if arch == "llama" else VOCABULARIES["qwen2"]
    types = STORED[stored]
    write_gguf(file, model_for(vocabulary, family, **options), arch, vocabulary, types=types)
    tiled, plain = load(file), load(file, tiled=False)
    for (name, ours), theirs in zip(plain.named_modules(), tiled.modules(), strict=True):
        if isinstance(ours, Floats):
            weight = matrix_of(theirs)[: len(ours.matrix)]
            halves = theirs.tiles.dtype == torch.bfloat16
            assert torch.equal(weight, ours.matrix.bfloat16().float() if halves else ours.matrix), name
        elif hasattr(ours, "eps"):  # a norm
            assert torch.equal(theirs.weight, ours.weight), name
        if getattr(ours, "bias", None) is not None:
            assert torch.equal(theirs.bias, ours.bias), name
    assert isinstance(tiled.embed_tokens.weight, TiledWeight) and isinstance(tiled.lm_head.weight, TiledWeight)


@pytest.mark.parametrize("rows", [64, 2048])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(
    ("family", "arch", "options"),
    [
        ("llama", "llama", {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2}),
        ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    ],
    ids=["llama", "qwen2, biases, tied"],
)
def test_packed_for_a_gpu_weights_are_those_of_the_file(file, monkeypatch, family, arch, options, stored, rows):
    monkeypatch.setattr(gguf_tiles, "ROWS", rows)
    vocabulary = SMOLLM if arch == "llama" else VOCABULARIES["qwen2"]
    write_gguf(file, model_for(vocabulary, family, **options), arch, vocabulary, types=STORED[stored])
    plain, config, calls = load(file, tiled=False), loader.read_config(file), []
    how = loader.Loading(keep_integers="packed")
    packed = loader.load_model(file, config, torch.float32, CPU, how, lambda *now: calls.append(now))
    kinds = set()
    for (name, ours), theirs in zip(plain.named_modules(), packed.modules(), strict=True):
        kinds.add(type(theirs))
        if isinstance(ours, Floats):
            weight = dequantize(theirs) if isinstance(theirs, QuantizedWeight) else theirs.matrix
            assert torch.equal(weight, ours.matrix), name
        elif hasattr(ours, "eps"):  # a norm
            assert torch.equal(theirs.weight, ours.weight), name
        if getattr(ours, "bias", None) is not None:
            assert torch.equal(theirs.bias, ours.bias), name
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(packed.embed_tokens(ids), plain.embed_tokens(ids))
    assert QuantizedWeight in kinds
    assert isinstance(packed.embed_tokens.weight, QuantizedWeight) == (
        "tie_word_embeddings" in options and "embed" not in STORED[stored]
    )
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1]


def test_packed_weights_that_do_not_fit_or_are_not_finite_are_refused(file, monkeypatch):
    hf_model = model_for(SMOLLM)
    write_gguf(file, hf_model, "llama", SMOLLM, types={"": Kind.Q4_1})
    with monkeypatch.context() as patch, pytest.raises(MemoryError, match=r"the weights take .* GiB"):
        patch.setattr("nanopage.device.free_bytes", lambda device: 1000)
        loader.load_model(file, loader.read_config(file), torch.float32, CPU, loader.Loading(keep_integers="packed"))
    with torch.no_grad():
        hf_model.model.layers[0].mlp.down_proj.weight[0, 0] = 1e9
    write_gguf(file, hf_model, "llama", SMOLLM, types={"": Kind.Q4_1})
    with pytest.raises(ValueError, match=r"down_proj.weight has values that are NaN, infinite or too large"):
        loader.load_model(file, loader.read_config(file), torch.float32, CPU, loader.Loading(keep_integers="packed"))


def test_logits_are_those_of_rounded_activations(quantized):
    tiled, plain = load(quantized), load(quantized, tiled=False)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = plain.lm_head(tile_linear.round_activations(x, 32))
    torch.testing.assert_close(tiled.lm_head(x), expected, rtol=1e-5, atol=1e-5)


def test_they_are_repacked_once(quantized, monkeypatch):
    calls = []
    config, on_progress = loader.read_config(quantized), lambda *now: calls.append(now)
    how = loader.Loading(keep_integers="tiles")
    first = loader.load_model(quantized, config, torch.float32, CPU, how, on_progress)
    assert calls and calls == sorted(calls) and calls[-1][0] == calls[-1][1]
    monkeypatch.setattr(gguf_tiles, "_write", None)
    second = load(quantized)
    for ours, theirs in zip(first.buffers(), second.buffers(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_that_changes_is_repacked_and_what_was_kept_before_is_removed(quantized):
    load(quantized)
    before = kept_files()
    write_gguf(quantized, model_for(SMOLLM), "llama", SMOLLM, types={"": Kind.Q8_0})
    assert load(quantized).lm_head.weight.tiles.shape[1] == 64 // 4
    assert len(kept_files()) == len(before) == 1
    assert kept_files() != before


def test_a_damaged_file_is_made_again(quantized, caplog):
    load(quantized)
    (kept,) = kept_files()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-100])
    load(quantized)
    assert f"{kept} is damaged" in caplog.text
    assert kept.read_bytes() == whole


@pytest.mark.parametrize("obstacle", ["a file in its place", "others may write to it"])
def test_where_nothing_can_be_kept_it_is_repacked_at_each_start(quantized, caplog, obstacle):
    directory = cache_directory() / "tiles"
    if obstacle == "a file in its place":
        directory.parent.mkdir(parents=True, mode=0o700)
        directory.touch()
    else:
        directory.mkdir(parents=True, mode=0o700)
        os.chmod(directory, 0o777)
    tiled = load(quantized)
    assert "cannot be kept" in caplog.text and str(directory) in caplog.text
    assert torch.equal(
        matrix_of(tiled.lm_head.weight)[: len(SMOLLM.tokens)], matrix_of(load(quantized, tiled=False).lm_head.weight)
    )


def test_what_killed_processes_left_is_removed(quantized):
    load(quantized)
    (kept,) = (file for file in kept_files() if file.suffix == ".safetensors")
    left = kept.with_suffix(".xyz.partial")
    kept.rename(left)
    load(quantized)
    assert kept.exists() and not left.exists()


def test_weights_that_do_not_fit_into_the_memory_are_refused(quantized, monkeypatch):
    monkeypatch.setattr("nanopage.device.free_bytes", lambda device: 2**10)
    with pytest.raises(MemoryError, match=r"tiny.gguf: the weights take 0.00 GiB, and 0.00 GiB are free"):
        load(quantized)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K], ids=lambda kind: kind.name)
def test_scales_of_k_types_are_rounded_to_float16(kind):
    blocks = split_blocks(kind, torch.from_numpy(random_blocks(kind, 6, 512)))
    tiles, scales = tile_linear.tile_blocks(blocks)
    stored, exact = tile_linear.rows(tiles, scales, torch.arange(6), 512, torch.float32), dense(blocks)
    assert not torch.equal(stored, exact)
    assert ((stored - exact).abs().amax(1) <= 2**-10 * exact.abs().amax(1)).all()


def test_a_scale_that_is_not_finite_is_named_and_nothing_is_kept(file):
    hf_model = model_for(SMOLLM)
    write_gguf(file, hf_model, "llama", SMOLLM, types={"": Kind.Q8_0})
    checkpoint = loader.open_checkpoint(file)
    offset = checkpoint.weights["model.layers.1.mlp.down_proj.weight"].offset
    with open(file, "r+b") as content:
        content.seek(offset)
        content.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(ValueError, match=r"tiny.gguf: model.layers.1.mlp.down_proj.weight has values that are NaN"):
        load(file)
    assert kept_files() == []


@pytest.mark.parametrize(
    ("types", "expected"), [({}, False), ({"": Kind.F16}, False), ({"down_proj": Kind.Q8_0}, True)]
)
def test_a_file_is_quantized_if_a_matrix_is(file, types, expected):
    write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, types=types)
    assert gguf_tiles.is_quantized(loader.open_checkpoint(file)) == expected
