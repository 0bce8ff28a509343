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
    constants = {"THREADS": 2, "BFLOAT16": int(dtype == torch.bfloat16)}
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
@pytest.mark.parametrize("weights", [torch.int8, torch.bfloat16], ids=str)
def test_it_equals_the_plain_product(made, weights, num_rows, out_features, in_features):
    dtype, function = made
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 3, out_features)[:, None]
    tiles, scales = tile_linear.tile(weight, weights)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    out = multiply(function, x, tiles, scales)
    exact = tile_linear.product(x.double(), tiles, scales.double())
    size = tile_linear.product(x.abs().double(), tiles.abs(), scales.double())
    assert out.dtype == dtype and out.shape == exact.shape
    # The sum is float32, and bfloat16 rounds it once.
    assert ((out.double() - exact).abs() <= 1e-6 * size + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


def test_nan_and_infinity_stay_in_their_rows(made):
    dtype, function = made
    x = torch.ones(3, 32, dtype=dtype)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    out = multiply(function, x, *tile_linear.tile(torch.ones(64, 32), torch.int8))
    assert out[0].isnan().all() and (out[1] == torch.inf).all() and (out[2] == 32).all()
