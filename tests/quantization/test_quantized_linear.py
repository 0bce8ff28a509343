"""quantized_weights.py and quantized_linear.py: products with weights of 4 and 8 bits, in Triton's interpreter where
there is no GPU, against float64 products with the weights as floats."""

import pytest
import torch

from nanopage.cpu import tile_linear
from nanopage.cpu.tile_linear import Blocks
from nanopage.quantization import quantized_linear, quantized_weights
from nanopage.quantization.quantized_weights import TILE, QuantizedMatrix, dequantize

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ["awq", "gptq 8", "whole rows", "int4", "q4_0", "q8_0", "q5_k", "q6_k", "int8", "fp8", "fp8 blocks"]
ALL = pytest.mark.parametrize("kind", KINDS)


def random_weight(kind, out_features, in_features, seed=0):
    """(a QuantizedMatrix, the same weight in float64 [out, in], by its definition)"""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(out_features, in_features, generator=generator)
    if kind in ("int4", "int8", "fp8"):
        weight = getattr(quantized_weights, f"round_to_{kind}")(normal)
        return weight, defined_by_rounding(kind, normal)

    if kind == "fp8 blocks":  # the last group may have fewer inputs
        rounded, groups = normal.to(quantized_weights.FP8), -(-in_features // 128)
        packed = torch.nn.functional.pad(rounded.view(torch.uint8), (0, -in_features % TILE)).view(rounded.dtype)
        scales = torch.rand(groups, out_features, generator=generator)
        wide = scales.double().T.repeat_interleave(128, 1)[:, :in_features]
        return QuantizedMatrix(packed, scales, None, False, 8, 128, in_features), rounded.double() * wide

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    bits, group, low, high = {
        "awq": (4, 64, 0, 16),
        "whole rows": (4, in_features, 0, 16),
        "gptq 8": (8, 32, -128, 128),
        "q4_0": (4, 32, 0, 16),
        "q8_0": (8, 32, -128, 128),
        "q5_k": (8, 32, 0, 32),
        "q6_k": (8, 16, -32, 32),
    }[kind]
    groups = in_features // group
    numbers = integers(low, high, out_features, in_features)
    scales = (torch.rand(groups, out_features, generator=generator) * 0.01).to(torch.float16)
    wide = scales.double().T.repeat_interleave(group, 1)
    if kind in ("awq", "gptq 8", "whole rows"):
        zeros = integers(low, high, groups, out_features)
        stored = zeros.to(torch.float16)
        packed = quantized_weights.pack(numbers.to(torch.int8), scales, stored, True, bits, group)
        return packed, (numbers - zeros.T.repeat_interleave(group, 1)) * wide
    offsets = None
    if kind in ("q4_0", "q5_k"):
        offsets = 8 * scales if kind == "q4_0" else torch.randn(groups, out_features, generator=generator).half()
    blocks = Blocks(numbers.to(torch.int8), scales.float().T, None if offsets is None else offsets.float().T, bits)
    expected = numbers * wide
    if offsets is not None:
        expected = expected - offsets.double().T.repeat_interleave(group, 1)
    return quantized_weights.from_blocks(blocks), expected


def defined_by_rounding(kind, normal):
    if kind == "int4":
        blocks = tile_linear.round_to_int4(normal)
        scales, offsets = (part.double().repeat_interleave(32, 1) for part in (blocks.scales, blocks.offsets))
        return blocks.integers * scales - offsets
    most = 127 if kind == "int8" else 448
    scales = (normal.abs().amax(1, keepdim=True) / most).clamp(min=1e-38)
    rounded = (normal / scales).round() if kind == "int8" else (normal / scales).to(torch.float8_e4m3fn)
    return rounded.double() * scales


def multiply(x, weight, bias=None):
    tensors = (weight.packed, weight.scales, weight.offsets)
    packed, scales, offsets = (None if tensor is None else tensor.to(DEVICE) for tensor in tensors)
    bias = None if bias is None else bias.to(DEVICE)
    options = weight.bits, weight.group, weight.zero_points
    return torch.ops.nanopage.quantized_linear(x.to(DEVICE), packed, scales, offsets, bias, *options).cpu()


def check(kind, num_tokens, out_features, in_features, dtype, with_bias=False):
    weight, exact = random_weight(kind, out_features, in_features)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator).to(dtype) if with_bias else None
    y = multiply(x, weight, bias)
    assert y.dtype == dtype and y.shape == (num_tokens, out_features)
    added = 0 if bias is None else bias.double()
    # Each weight is rounded to x's dtype, and so is the result; float32 sums are rounded, and shifted weights, too.
    size = x.double().abs() @ exact.abs().T + abs(added)
    error = (y.double() - (x.double() @ exact.T + added)).abs()
    shifted = x.double().abs().sum(1, keepdim=True) * weight.scales.double().max() * 384 * 2**-23
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else 2**-21
    assert (error <= size * unit + shifted).all(), (error - size * unit).max()


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 16, 33])
def test_products_are_those_of_the_dequantized_weight(kind, dtype, num_tokens):
    check(kind, num_tokens, 72, 192, dtype)


@pytest.mark.parametrize("kind", ["awq", "int4", "q6_k", "int8", "fp8", "fp8 blocks"])
@pytest.mark.parametrize(
    ("num_tokens", "out_features", "in_features"),
    [(1, 1, 64), (3, 129, 128), (2, 64, 1088), (130, 130, 64), (17, 65, 320)],
)
def test_sizes_need_not_be_multiples_of_a_tile(kind, num_tokens, out_features, in_features):
    check(kind, num_tokens, out_features, in_features, torch.float16, with_bias=True)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("in_features", [1, 50, 100])
def test_a_scale_for_all_inputs_needs_no_multiple_of_anything(kind, in_features):
    check(kind, 2, 10, in_features, torch.float32, with_bias=True)


@ALL
def test_a_weight_is_dequantized_exactly(kind):
    weight, exact = random_weight(kind, 20, 192)
    torch.testing.assert_close(dequantize(weight).double(), exact, rtol=1e-6, atol=1e-6)
    ids = torch.tensor([3, 19, 3])
    assert torch.equal(dequantize(weight, ids), dequantize(weight)[ids])


def test_parts_are_joined():
    for kind in KINDS:
        weight, _ = random_weight(kind, 24, 192)
        pieces = [part_of(weight, rows) for rows in (slice(0, 10), slice(10, 11), slice(11, 24))]
        assert torch.equal(dequantize(quantized_weights.join(pieces)), dequantize(weight))


def part_of(weight, rows):
    offsets = None if weight.offsets is None else weight.offsets[:, rows]
    sizes = weight.zero_points, weight.bits, weight.group, weight.in_features
    return QuantizedMatrix(weight.packed[rows], weight.scales[:, rows], offsets, *sizes)


def test_rounding_in_chunks_is_the_same(monkeypatch):
    normal = torch.randn(20, 96, generator=torch.Generator().manual_seed(0))
    for kind in ("int4", "int8", "fp8"):
        rounding = getattr(quantized_weights, f"round_to_{kind}")
        monkeypatch.setattr(quantized_weights, "CHUNK", 2**24)
        whole = dequantize(rounding(normal))
        monkeypatch.setattr(quantized_weights, "CHUNK", 300)
        assert torch.equal(dequantize(rounding(normal)), whole)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_an_output_of_zeros_stays_zero(kind):
    weight = getattr(quantized_weights, f"round_to_{kind}")(torch.tensor([[0.0] * 8, [1.0] * 8]))
    assert multiply(torch.ones(1, 8), weight).tolist() == [[0.0, 8.0]]


@pytest.mark.parametrize("kind", ["awq", "int8"])
def test_few_tokens_are_split_and_the_sums_added_in_order(kind, monkeypatch):
    """As on a GPU with many processors. Programs of a split write partial sums, so two runs are equal."""
    launched = []

    class Recorded:
        def __getitem__(self, grid):
            launched.append(grid)
            return kernel[grid]

    kernel = quantized_linear.linear_kernel
    monkeypatch.setattr(quantized_linear, "num_processors", lambda device: 132)
    monkeypatch.setattr(quantized_linear, "linear_kernel", Recorded())
    check(kind, 2, 72, 64 * TILE, torch.float16, with_bias=True)
    per_tile = 2 * TILE if kind == "awq" else TILE
    assert launched == [(2, 1, 64 * TILE // per_tile // quantized_linear.SPLIT_TILES)]
    weight, _ = random_weight(kind, 72, 64 * TILE)
    x = torch.randn(2, 64 * TILE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(x, weight), multiply(x, weight))


@pytest.mark.parametrize(
    ("num_tiles", "blocks", "expected"),
    [(64, 1, 8), (64, 264, 64), (64, 133, 64), (64, 66, 16), (7, 1, 7), (20, 1, 10), (1, 1, 1)],
)
def test_a_split_has_enough_tiles(num_tiles, blocks, expected):
    assert quantized_linear.choose_split(num_tiles, blocks, 132) == expected


def test_x_may_have_strides():
    weight, exact = random_weight("awq", 16, 128)
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    expected = (x[::2, 128:].double() @ exact.T).float()
    torch.testing.assert_close(multiply(x[::2, 128:], weight), expected, rtol=1e-4, atol=1e-4)
    transposed = torch.randn(128, 3, generator=torch.Generator().manual_seed(1)).T
    torch.testing.assert_close(
        multiply(transposed, weight), (transposed.double() @ exact.T).float(), rtol=1e-4, atol=1e-4
    )


def test_the_compiler_sees_one_graph_for_any_number_of_tokens():
    """Compiled with stand-ins for generated code: no break, and no second graph for another number of tokens."""
    weight, _ = random_weight("awq", 16, 128)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    run = torch.compile(lambda x: multiply_by(x, weight) * 2, backend=keep, fullgraph=True)
    for num_tokens in (2, 40, 70):
        x = torch.randn(num_tokens, 128, device=DEVICE)
        torch._dynamo.mark_dynamic(x, 0)  # as jit.py does
        assert torch.equal(run(x), multiply_by(x, weight) * 2)
    assert len(graphs) == 1
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert (
        called.count(torch.ops.nanopage.quantized_linear.default) + called.count(torch.ops.nanopage.quantized_linear)
        == 1
    )


def multiply_by(x, weight):
    options = weight.bits, weight.group, weight.zero_points
    packed, scales, offsets = weight.packed.to(DEVICE), weight.scales.to(DEVICE), weight.offsets.to(DEVICE)
    return torch.ops.nanopage.quantized_linear(x, packed, scales, offsets, None, *options)


# fp8 activations


def test_tokens_are_rounded_with_a_scale_each():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[1], x[2] = 0, x[2] * 1000
    rounded, scales = quantized_linear.round_tokens(x)
    assert rounded.dtype == torch.float8_e4m3fn and scales.shape == (5, 1) and scales.dtype == torch.float32
    wide = rounded.double() * scales
    assert torch.isfinite(wide).all() and not wide[1].any()
    assert ((wide - x.double()).abs() <= x.double().abs() * 2**-4 + scales * 2**-9).all()


@pytest.mark.parametrize(
    ("tokens", "dtype", "in_features", "out_features", "capability", "expected"),
    [
        (64, torch.bfloat16, 64, 32, (8, 9), True),
        (64, torch.bfloat16, 64, 32, (9, 0), True),
        (63, torch.bfloat16, 64, 32, (9, 0), False),
        (64, torch.float16, 64, 32, (9, 0), False),
        (64, torch.bfloat16, 72, 32, (9, 0), False),
        (64, torch.bfloat16, 64, 40, (9, 0), False),
        (64, torch.bfloat16, 64, 32, (8, 6), False),
    ],
)
def test_fp8_activations_need_a_gpu_for_them(
    tokens, dtype, in_features, out_features, capability, expected, monkeypatch
):
    class OnAGPU:
        is_cuda, device = True, "cuda"
        shape = (tokens, in_features)

        def __len__(self):
            return tokens

    x = OnAGPU()
    x.dtype = dtype
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert quantized_linear.has_scaled_product(x, out_features) == expected
    assert not quantized_linear.has_scaled_product(torch.zeros(tokens, in_features, dtype=dtype), out_features)


def test_weights_with_scales_of_groups_do_not_use_the_scaled_product(monkeypatch):
    monkeypatch.setattr(quantized_linear, "has_scaled_product", lambda x, out_features: True)
    check("fp8 blocks", 2, 16, 192, torch.float16)


def test_the_scaled_product_is_that_of_the_rounded_tensors(monkeypatch):
    """torch computes it on a CPU, too. Here it runs as on a GPU."""
    weight, exact = random_weight("fp8", 48, 80)
    x = torch.randn(64, 80, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    rounded, scales = quantized_linear.round_tokens(x)
    expected = (rounded.double() * scales) @ exact.T + bias.double()
    size = (rounded.double() * scales).abs() @ exact.abs().T + bias.abs()
    monkeypatch.setattr(quantized_linear, "has_scaled_product", lambda x, out_features: True)
    y = multiply(x, weight, bias)
    assert y.dtype == torch.bfloat16
    assert ((y.double() - expected).abs() <= size * 2**-8).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 300])
def test_bfloat16_on_a_gpu(kind, num_tokens, monkeypatch):
    monkeypatch.setattr(quantized_linear, "SCALED_TOKENS", 10**6)  # weights alone are rounded
    check(kind, num_tokens, 1000, 1024, torch.bfloat16, with_bias=True)
