"""aot_products.py: compiled products, and which engines use those of weights in tiles."""

import os
import shutil

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from helpers import tiny_model
from test_gguf import SMOLLM, model_for, write_gguf
from test_layouts import write
from test_quantized_checkpoint import KINDS, write_quantized

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.cpu import aot_products, tile_linear, toolchain
from nanopage.cpu.compiled_files import find_file
from nanopage.cpu.lora import add_adapters
from nanopage.cpu.packed import PackedWeight
from nanopage.cpu.packed_linear import can_pack
from nanopage.cpu.tiled_experts import TiledExperts


@pytest.fixture(scope="module")
def cache(products):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(products))
        yield products


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, types={"q_proj": Kind.Q4_0, "": Kind.Q8_0})


def worker_of(file, **options):
    defaults = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 32, "block_size": 8}
    return build_engine(EngineConfig(model=str(file), device="cpu", **defaults | options)).executor.worker


@pytest.mark.parametrize(("weights", "dtype"), [(torch.int8, torch.float32), (torch.bfloat16,) * 2], ids=str)
def test_it_equals_the_operator(cache, weights, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=generator) for size in ((100, 96), (5, 192)))
    x = x.to(dtype)[:, ::2]  # not contiguous
    tiles = tile_linear.tile(weight, weights)
    made = aot_products.tile_product(dtype)(x, *tiles)
    torch.testing.assert_close(made, torch.ops.nanopage.tile_linear(x, *tiles), rtol=2**-6, atol=0.1)


def test_it_is_compiled_once(cache, monkeypatch):
    aot_products.tile_product(torch.float32)
    monkeypatch.setattr(aot_products, "compile_library", None)
    assert aot_products.tile_product(torch.float32) is not None


def test_a_quantized_file_keeps_its_integers(cache, file):
    worker = worker_of(file)
    assert worker.wings.stored_as == "block-quantized"
    layer = worker.model.layers[0].self_attn
    assert layer.qkv_proj.weight.tiles.dtype == torch.uint8
    assert isinstance(layer.qkv_proj.weight.multiply, aot_products.CompiledProduct)


@pytest.mark.parametrize(
    "options", [{"enforce_eager": True}, {"quantization": "int8"}, {"load_format": "dummy"}], ids=str
)
def test_options_that_need_other_weights_get_them(cache, file, options):
    expected = {"quantization": "int8", "load_format": "bfloat16"}.get(*options)
    assert worker_of(file, **options).wings.stored_as == expected


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("awq", {}, "block-quantized"),
        ("awq", {"quantization": "awq"}, "block-quantized"),
        ("gptq, 8 bits", {}, "block-quantized"),
        ("awq", {"enforce_eager": True}, None),
        ("gptq, act-order", {}, None),
    ],
)
def test_awq_and_gptq_keep_their_integers(cache, tmp_path, kind, options, expected):
    write_quantized(tmp_path, KINDS[kind])
    worker = worker_of(tmp_path, **options)
    assert worker.wings.stored_as == expected
    layer = worker.model.layers[0].self_attn
    if expected:
        assert layer.qkv_proj.weight.tiles.dtype == torch.uint8
        assert isinstance(layer.qkv_proj.weight.multiply, aot_products.CompiledProduct)
        assert worker.model.lm_head.weight.tiles.dtype == torch.float16  # as the checkpoint stores it
    else:
        assert not hasattr(layer.qkv_proj.weight, "scales")


@pytest.mark.parametrize(
    ("form", "options", "expected"),
    [
        ("int8", {}, "block-quantized"),
        ("int4, groups of 64, zero points", {}, "block-quantized"),
        ("nvfp4", {}, "bfloat16"),
        ("fp8, blocks", {"enforce_eager": True}, None),
    ],
)
def test_other_formats_keep_integers_or_become_16_bits(cache, tmp_path, caplog, form, options, expected):
    weights = write(tmp_path, form)
    worker = worker_of(tmp_path, **options)
    assert worker.wings.stored_as == expected
    assert ("become" in caplog.text) == (expected != "block-quantized")
    if expected is not None:
        linear = worker.model.layers[1].mlp.down_proj
        made = linear.weight.rows(torch.arange(192))
        torch.testing.assert_close(made, weights["model.layers.1.mlp.down_proj.weight"], rtol=2**-8, atol=1e-3)
        assert isinstance(linear.weight.multiply, aot_products.CompiledProduct)


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this CPU does not multiply bfloat16")
def test_in_bfloat16_the_head_is_bfloat16(cache, tmp_path):
    """Also if float16 holds it: products in bfloat16 do not read float16."""
    write(tmp_path, "int8", head_step=2**-6)
    worker = worker_of(tmp_path, dtype="bfloat16")
    assert worker.wings.stored_as == "block-quantized"
    assert worker.model.lm_head.weight.tiles.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["16 bits", "experts", "experts in int8", "awq"])
def test_other_weights_are_stored_as_the_first_ones(cache, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("NANOPAGE_COMPILE", "never")  # the products are there already
    models = [tmp_path / "0", tmp_path / "1"]
    for seed, model in enumerate(models):
        if kind == "awq":
            write_quantized(model, KINDS["awq"], seed=seed)
        else:
            tiny_model(model, "mixtral" if "experts" in kind else "llama", "bfloat16", seed=seed)
    options = {"dtype": "float32", "max_model_len": 128, "num_gpu_blocks_override": 32, "device": "cpu"}
    options |= {"quantization": "int8"} if "int8" in kind else {}
    llm, new = (LLM(str(model), **options) for model in models)
    params, prompt = (
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        {"prompt_token_ids": [*range(9, 26)]},
    )
    before, expected = (each.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for each in (llm, new))
    worker = llm.engine.executor.worker
    assert worker.wings.stored_as is not None
    assert any(isinstance(each, TiledExperts) for each in worker.model.modules()) == ("experts" in kind)
    llm.update_weights(models[1])
    assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == expected != before


def assert_widened(worker):
    assert worker.wings.stored_as is None
    assert isinstance(worker.model.layers[0].self_attn.qkv_proj.weight, PackedWeight)


def test_where_it_cannot_be_compiled_weights_are_widened(file, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "no-such-compiler")
    assert_widened(worker_of(file))
    assert "compiled products with weights in tiles cannot be used" in caplog.text


def test_with_any_umask_only_the_user_can_write_what_is_kept(file, cache):
    before = os.umask(0o002)
    try:
        workers = [worker_of(file) for _ in range(2)]
    finally:
        os.umask(before)
    assert [worker.wings.stored_as for worker in workers] == ["block-quantized"] * 2
    kept = [path for path in (cache / "nanopage").rglob("*") if path.is_file()]
    assert {".so", ".safetensors"} <= {path.suffix for path in kept}
    assert not [path for path in kept if path.stat().st_mode & 0o022]


def test_compiling_can_be_refused(file, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NANOPAGE_COMPILE", "never")
    assert_widened(worker_of(file))


def test_a_damaged_library_is_named_and_compiled_again(cache, tmp_path, monkeypatch, caplog):
    assert aot_products.tile_product(torch.float32) is not None
    constants = toolchain.product_constants(torch.float32)
    key = aot_products._key("tile_linear", toolchain.TILE_SOURCES, constants)
    directory = tmp_path / "nanopage" / "compiled" / key
    shutil.copytree(cache / "nanopage" / "compiled" / key, directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library = find_file(directory, "tile_linear")
    whole = library.read_bytes()
    library.write_bytes(whole + b"x")
    compiled = []

    def compile_again(constants, sources, file):
        assert not library.exists()
        compiled.append(file)
        library.write_bytes(whole)  # where the compiler would take seconds

    monkeypatch.setattr(aot_products, "compile_library", compile_again)
    assert aot_products.tile_product(torch.float32) is not None
    assert compiled == [directory / "tile_linear"]
    assert f"{library} is damaged" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "used", "parts", "rank", "in_features"),
    [
        (1, [2], [70], 8, 48),
        (1, [-1], [64], 8, 48),
        (7, [-1], [64], 8, 48),
        (33, [-1, 0, 1, 2, 3], [64, 24, 24], 16, 130),  # sizes that do not fill registers
        (50, [1], [1100, 1100], 3, 256),  # several blocks of one adapter, several tasks for a part
        (90, [-1, 0, 3], [40, 40], 20, 31),
    ],
)
def test_products_of_adapters_equal_those_in_plain_torch(cache, num_tokens, used, parts, rank, in_features, dtype):
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    x, y = normal(num_tokens, 2 * in_features)[:, ::2], normal(num_tokens, sum(parts) + 5)[:, :-5]  # not contiguous
    a, b = normal(4, len(parts), rank, in_features), normal(4, rank, sum(parts))
    slots = torch.tensor(used)[torch.randint(len(used), (num_tokens,), generator=generator)]
    before = y.clone()
    product = aot_products.adapter_product(dtype)
    made = product(y, x, a, b, slots, parts)
    doubles = (tensor.double() for tensor in (y, x, a, b))
    expected = add_adapters(*doubles, slots, parts)
    error = (made.double() - expected).abs().max() / expected.abs().max()
    assert made.dtype == dtype and error < {torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]
    assert torch.equal(y, before) and torch.equal(made[slots < 0], y[slots < 0])  # bit for bit
    operator = torch.ops.nanopage.add_adapters(y, x, a, b, slots, parts)
    assert (operator.double() - expected).abs().max() / expected.abs().max() < {4: 1e-6, 2: 2e-2}[dtype.itemsize]


def test_an_adapter_of_nan_changes_only_its_tokens(cache):
    x, y, a, b = torch.ones(3, 8), torch.ones(3, 16), torch.ones(2, 1, 4, 8), torch.ones(2, 4, 16)
    a[1], b[1] = torch.nan, torch.nan
    made = aot_products.adapter_product(torch.float32)(y, x, a, b, torch.tensor([1, 0, -1]), [16])
    assert made[0].isnan().all() and (made[1] == 33).all() and (made[2] == 1).all()
