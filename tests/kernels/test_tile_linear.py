"""tile_linear.cpp against the same product in PyTorch, compiled for both dtypes, and for AVX2 as well."""

import ctypes

import pytest
import torch

from nanopage.kernels.cpu import tile_linear
from nanopage.worker import aot_compile
from nanopage.worker.aot_chain import new_handles, take_tensors

AVX512, AVX2 = "AVX512", "AVX2"


@pytest.fixture(
    scope="module",
    params=[(torch.float32, AVX512), (torch.float32, AVX2), (torch.bfloat16, AVX512), (torch.bfloat16, AVX2)],
    ids=lambda made: "-".join(map(str, made)),
)
def made(request, tmp_path_factory):
    """A dtype, and the function that was compiled for it."""
    dtype, instructions = request.param
    constants = {"BFLOAT16": int(dtype == torch.bfloat16)}
    file = tmp_path_factory.mktemp("tiles") / "tiles.so"
    with pytest.MonkeyPatch.context() as patch:
        if instructions == AVX2:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: AVX2)
        aot_compile.run_compiler(constants, aot_compile.KERNELS / "tile_linear.cpp", *aot_compile.shared(file))
    return dtype, ctypes.CDLL(str(file)).aoti_torch_cpu_tile_linear


def multiply(function, *tensors):
    handles, out = new_handles(tensors), ctypes.c_void_p()
    assert function(*(ctypes.c_void_p(handle) for handle in handles), ctypes.byref(out)) == 0
    take_tensors(handles)
    return take_tensors([out.value])[0]


# Inputs that fill panels, and some that do not; an odd number of them; rows that fill blocks, and some that do not.
@pytest.mark.parametrize("num_rows", [1, 2, 6, 13, 192, 390])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (300, 17), (100, 576), (64, 257)])
@pytest.mark.parametrize("weights", [torch.int8, torch.bfloat16, torch.float16], ids=str)
def test_it_equals_the_plain_product(made, weights, num_rows, out_features, in_features):
    dtype, function = made
    if (weights, dtype) == (torch.float16, torch.bfloat16):
        pytest.skip("activations are float32 beside float16 weights")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 3, out_features)[:, None]
    tiles, scales = tile_linear.tile(weight, weights)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    x[:, : in_features // 2] *= 100  # so that groups have other scales
    out = multiply(function, x, tiles, scales)
    stored = tile_linear.rows(tiles, scales.double(), torch.arange(scales.numel()), in_features, torch.float64)
    rounded = tile_linear.round_activations(x.double()) if weights == torch.int8 else x.double()
    exact, size = rounded @ stored.T, rounded.abs() @ stored.abs().T
    torch.testing.assert_close(tile_linear.product(x.double(), tiles, scales.double()), exact)
    assert out.dtype == dtype and out.shape == exact.shape
    # The sum is float32, and bfloat16 rounds it once.
    assert ((out.double() - exact).abs() <= 1e-6 * size + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


def random_blocks(bits, group, offset, out_features, in_features):
    generator = torch.Generator().manual_seed(0)
    low, high = (0, 16) if bits == 4 else (-128, 128)
    integers = torch.randint(low, high, (out_features, in_features), generator=generator, dtype=torch.int8)
    scales, offsets = torch.rand(2, out_features, in_features // group, generator=generator).half().float()
    return tile_linear.Blocks(integers, scales, 10 * offsets if offset else None, bits)


# (bits, inputs in a group, whether there are offsets): all that tile_linear.cpp knows.
BLOCKS = [(4, 32, True), (8, 16, False), (8, 16, True), (8, 32, False), (8, 32, True)]


@pytest.mark.parametrize("num_rows", [1, 2, 13, 200])
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (300, 576)])
@pytest.mark.parametrize(("bits", "group", "offset"), BLOCKS)
def test_products_with_blocks_equal_the_plain_ones(made, bits, group, offset, num_rows, out_features, in_features):
    dtype, function = made
    blocks = random_blocks(bits, group, offset, out_features, in_features)
    tiles, scales = tile_linear.tile_blocks(blocks)
    stored = tile_linear.rows(tiles, scales, torch.arange(out_features), in_features, torch.float64)
    wide = blocks.integers.unflatten(1, (-1, group)) * blocks.scales[..., None]
    if offset:
        wide -= blocks.offsets.half()[..., None]
    torch.testing.assert_close(stored, wide.flatten(1).double(), rtol=0, atol=0)
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, : in_features // 2] *= 100  # so that groups have other scales
    out = multiply(function, x, tiles, scales)[:, :out_features]
    rounded = tile_linear.round_activations(x.double(), group)
    exact = rounded @ stored.T
    size = rounded.abs() @ (stored.abs() + 2 * wide.abs().amax()).T  # offsets are multiplied by themselves
    torch.testing.assert_close(tile_linear.product(x.double(), tiles, scales)[:, :out_features], exact)
    assert ((out.double() - exact).abs() <= 1e-6 * size + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


def test_int8_is_within_a_step_of_what_it_stands_for():
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=generator) for size in ((70, 300), (9, 300)))
    x[2] = 0
    tiles, scales = tile_linear.tile(weight, torch.int8)
    stored = tile_linear.rows(tiles, scales, torch.arange(70), 300, torch.float32)
    assert ((stored - weight).abs() <= weight.abs().amax(1, keepdim=True) / 253).all()
    for group, rounded in zip(x.split(64, 1), tile_linear.round_activations(x).split(64, 1), strict=True):
        assert ((rounded - group).abs() <= group.abs().amax(1, keepdim=True) / 253).all()


def test_int4_keeps_what_it_can_and_is_closer_than_rounding_to_the_range():
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(0, 16, (70, 96), generator=generator).float()
    integers[:, 0::32], integers[:, 1::32] = 0, 15  # each group has its whole range
    integers[:, 2::32] = 8
    exact = integers / 4 - 2
    exact[5] = 0.375  # a range of 0
    tiles, scales = tile_linear.tile_int4(exact)
    assert (tiles.nbytes, scales.nbytes) == (128 * 96 / 2, 128 * 3 * 2 * 2)
    assert torch.equal(tile_linear.rows(tiles, scales, torch.arange(70), 96, torch.float32), exact)
    weight = torch.randn(1100, 96, generator=generator)
    stored = tile_linear.rows(*tile_linear.tile_int4(weight), torch.arange(1100), 96, torch.float32)
    groups = weight.unflatten(1, (-1, 32))
    low, step = groups.amin(2, keepdim=True), (groups.amax(2, keepdim=True) - groups.amin(2, keepdim=True)) / 15
    plain = ((groups - low) / step).round() * step + low
    assert (stored - weight).square().mean() < 0.9 * (plain - groups).square().mean()


def test_nan_and_infinity_stay_in_their_rows(made):
    dtype, function = made
    x = torch.ones(3, 32, dtype=dtype)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    for weights in (torch.int8, torch.bfloat16):
        tiles = tile_linear.tile(torch.ones(64, 32), weights)
        for out in (multiply(function, x, *tiles), tile_linear.product(x, *tiles)):
            assert out[0].isnan().all() and not out[1].isfinite().any()
            torch.testing.assert_close(out[2], torch.full((64,), 32, dtype=dtype), rtol=2e-3, atol=0)
