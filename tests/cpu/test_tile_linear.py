"""tile_linear.cpp and tile_experts.cpp against the same in PyTorch, compiled for both dtypes, and for AVX2 as well."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import LONG

from nanopage.cpu import aot_products, tile_experts, tile_linear
from nanopage.cpu.aot_products import CompiledProduct
from nanopage.cpu.toolchain import KERNELS, TILE_SOURCES, run_compiler, shared
from nanopage.experts.routing import route

AVX2 = "AVX2"
OWN = torch.backends.cpu.get_cpu_capability()
# Each compiles for 4 s. bfloat16 with AVX2, where a processor has more, runs with NANOPAGE_LONG_TESTS=1.
MADE_FOR = [*product((torch.float32, torch.bfloat16), {OWN: 0, AVX2: 0})]


@pytest.fixture(
    scope="module",
    params=MADE_FOR if LONG or OWN == AVX2 else MADE_FOR[:-1],
    ids=lambda made: "-".join(map(str, made)),
)
def made(request, tmp_path_factory, products):
    """A dtype, and the products that were compiled for it."""
    dtype, instructions = request.param
    file = tmp_path_factory.mktemp("tiles") / "tiles.so"
    with pytest.MonkeyPatch.context() as patch:
        if instructions == OWN:
            patch.setenv("XDG_CACHE_HOME", str(products))
            return dtype, aot_products.tile_product(dtype)
        patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: AVX2)
        sources = [KERNELS / name for name in TILE_SOURCES]
        run_compiler({"BFLOAT16": int(dtype == torch.bfloat16)}, *sources, *shared(file))
    return dtype, CompiledProduct(file, "tile_linear")


# Inputs that fill panels, and some that do not; an odd number of them; rows that fill blocks, and some that do not.
ROWS, SIZES = (1, 2, 13, 192, 390), ((64, 32), (300, 17), (100, 576), (64, 257))
CASES = [*product(ROWS, SIZES)]


# Each third case: all rows and all sizes are among them.
@pytest.mark.parametrize(("num_rows", "sizes"), CASES if LONG else CASES[::3], ids=str)
@pytest.mark.parametrize("weights", [torch.int8, torch.bfloat16, torch.float16], ids=str)
def test_it_equals_the_plain_product(made, weights, num_rows, sizes):
    (dtype, products), (out_features, in_features) = made, sizes
    if (weights, dtype) == (torch.float16, torch.bfloat16):
        pytest.skip("activations are float32 beside float16 weights")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator)
    weight *= torch.logspace(-3, 3, out_features)[:, None]
    tiles, scales = tile_linear.tile(weight, weights)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    x[:, : in_features // 2] *= 100  # so that groups have other scales
    out = products(x, tiles, scales)
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
    dtype, products = made
    blocks = random_blocks(bits, group, offset, out_features, in_features)
    tiles, scales = tile_linear.tile_blocks(blocks)
    stored = tile_linear.rows(tiles, scales, torch.arange(out_features), in_features, torch.float64)
    wide = blocks.integers.unflatten(1, (-1, group)) * blocks.scales[..., None]
    if offset:
        wide -= blocks.offsets.half()[..., None]
    torch.testing.assert_close(stored, wide.flatten(1).double(), rtol=0, atol=0)
    x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:, : in_features // 2] *= 100  # so that groups have other scales
    out = products(x, tiles, scales)[:, :out_features]
    rounded = tile_linear.round_activations(x.double(), group)
    exact = rounded @ stored.T
    size = rounded.abs() @ (stored.abs() + 2 * wide.abs().amax()).T  # offsets are multiplied by themselves
    torch.testing.assert_close(tile_linear.product(x.double(), tiles, scales)[:, :out_features], exact)
    assert ((out.double() - exact).abs() <= 1e-6 * size + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)).all()


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, torch.int8, *BLOCKS], ids=str)
def test_a_row_does_not_depend_on_the_rows_beside_it(made, weights):
    """To the bit."""
    dtype, products = made
    if (weights, dtype) == (torch.float32, torch.bfloat16):
        pytest.skip("weights are bfloat16 beside activations in bfloat16")
    if isinstance(weights, tuple):
        tiles, scales = tile_linear.tile_blocks(random_blocks(*weights, 70, 192))
    else:
        tiles, scales = tile_linear.tile(torch.randn(70, 192), weights)
    x = torch.randn(200, 192).to(dtype)
    whole = products(x, tiles, scales)
    for num_rows in (*range(1, 41), 199):
        assert torch.equal(products(x[:num_rows], tiles, scales), whole[:num_rows])
        assert torch.equal(products(x[-num_rows:], tiles, scales), whole[-num_rows:])


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
    dtype, products = made
    x = torch.ones(3, 32, dtype=dtype)
    x[0, 3], x[1, 5] = torch.nan, torch.inf
    for weights in (torch.int8, torch.bfloat16):
        tiles = tile_linear.tile(torch.ones(64, 32), weights)
        for out in (products(x, *tiles), tile_linear.product(x, *tiles)):
            assert out[0].isnan().all() and not out[1].isfinite().any()
            torch.testing.assert_close(out[2], torch.full((64,), 32, dtype=dtype), rtol=2e-3, atol=0)


def tiles_of(weight, kind):
    if kind == "int4":
        return tile_linear.tile_int4(weight)
    if kind == "blocks":
        groups = weight.unflatten(1, (-1, 32))
        scales = groups.abs().amax(2) / 127
        integers = (groups / scales[..., None]).round().flatten(1).to(torch.int8)
        return tile_linear.tile_blocks(tile_linear.Blocks(integers, scales, None, 8))
    return tile_linear.tile(weight, getattr(torch, kind))


def random_experts(kind, num_experts, hidden_size, intermediate_size):
    """For each expert, tiles and scales of gate and up, and of down."""
    generator, made = torch.Generator().manual_seed(1), []
    for _ in range(num_experts):
        gate_up = torch.randn(2 * intermediate_size, hidden_size, generator=generator) / hidden_size**0.5
        down = torch.randn(hidden_size, intermediate_size, generator=generator) / intermediate_size**0.5
        made.append([*tiles_of(gate_up, kind), *tiles_of(down, kind)])
    return made


def compare(made, kind, x, gate, num_chosen, normalize, intermediate_size):
    """Compute a mixture by C++, compare it with float64, and return the numbers of the experts."""
    dtype, products = made
    if kind in ("float32", "float16") and dtype == torch.bfloat16:
        pytest.skip("activations are float32 beside these weights")
    hidden_size = x.shape[1]
    experts = random_experts(kind, len(gate), hidden_size, intermediate_size)
    weights_of_all = tile_experts.addresses_of(experts), *experts[0]
    numbers = intermediate_size, num_chosen, normalize
    y = products.experts(x.to(dtype), gate.to(dtype), *weights_of_all, *numbers)
    assert y.dtype == dtype and y.shape == x.shape
    # Routing is compared with logits as C++ rounds them, since rounding could choose other experts.
    logits = F.linear(x.to(dtype).double(), gate.to(dtype).double()).to(dtype)
    chosen, weights = route(logits, num_chosen, normalize)
    largest = logits.float().topk(min(num_chosen + 1, len(gate))).values
    assert (largest[:, :-1] - largest[:, 1:] > 0.01).all()
    expected = torch.zeros(x.shape, dtype=torch.float64)
    for token, (numbers_of_token, scales) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
        for number, scale in zip(numbers_of_token, scales, strict=True):
            row = x[token, None].to(dtype).double()
            gate_up, gate_up_scales, down, down_scales = experts[number]
            both = tile_linear.product(row, gate_up, gate_up_scales.double())
            gates, ups = both[:, : 2 * intermediate_size].to(dtype).double().chunk(2, dim=1)
            activated = (F.silu(gates) * ups).to(dtype).double()
            out = tile_linear.product(activated, down, down_scales.double())
            expected[token] += scale * out[0, :hidden_size]
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2e-3 if kind in ("int8", "int4", "blocks") else 1e-5
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    reference = tile_experts.experts(x.double(), gate.double(), *weights_of_all, *numbers)
    if dtype == torch.float32:
        torch.testing.assert_close(y.double(), reference, rtol=tolerance, atol=tolerance)
    return chosen


def inputs(num_tokens, num_experts, hidden_size):
    """Tokens and a router whose scores are far from each other, so that rounding cannot change the choice."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, hidden_size, generator=generator)
    scores = torch.stack([torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]) / 4
    x[:, :num_experts] = scores
    return x, torch.eye(num_experts, hidden_size)


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16", "int8", "int4", "blocks"])
def test_mixtures_equal_the_plain_ones(made, kind, num_tokens):
    x, gate = inputs(num_tokens, 5, 96)
    compare(made, kind, x, gate, 2, True, 64)


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "normalize", "hidden_size", "intermediate_size"),
    [(20, 4, False, 73, 40), (20, 20, True, 64, 17), (1, 1, False, 64, 100), (3, 1, True, 130, 64)],
)
def test_mixtures_of_any_sizes(made, num_experts, num_chosen, normalize, hidden_size, intermediate_size):
    x, gate = inputs(7, num_experts, hidden_size)
    compare(made, "bfloat16", x, gate, num_chosen, normalize, intermediate_size)


@pytest.mark.parametrize("balance", ["one expert for all", "two", "one token"])
def test_any_balance_of_experts(made, balance):
    """An expert has all tokens, more than a block of rows, and others have one or none."""
    x, gate = inputs(250, 6, 64)
    x[:, :6] = torch.arange(6) / 4
    if balance == "two":
        x[100:, :6] = torch.arange(6).flip(0) / 4
    if balance == "one token":
        x[17, :6] = torch.arange(6).flip(0) / 4
    chosen = compare(made, "bfloat16", x, gate, 1, True, 64)
    counts = chosen.flatten().bincount(minlength=6).tolist()
    assert counts == {"one expert for all": [0] * 5 + [250], "two": [150, 0, 0, 0, 0, 100]}.get(
        balance, [1, 0, 0, 0, 0, 249]
    )


def test_only_the_weights_of_chosen_experts_are_read(made):
    dtype, products = made
    experts = random_experts("bfloat16", 4, 64, 64)
    addresses = tile_experts.addresses_of(experts)
    addresses[[0, 2, 3]] = 0  # reading there would end the process
    gate = torch.zeros(4, 64, dtype=dtype)
    gate[1] = 1
    y = products.experts(torch.ones(3, 64, dtype=dtype), gate, addresses, *experts[1], 64, 1, True)
    assert y.isfinite().all() and y.any()


def test_a_token_that_is_not_finite_stays_alone(made):
    """NaN in the scores of the router chooses some experts, and reads no other memory."""
    dtype, products = made
    generator = torch.Generator().manual_seed(0)
    experts = random_experts("bfloat16", 4, 64, 64)
    weights = tile_experts.addresses_of(experts), *experts[0]
    x = torch.randn(3, 64, generator=generator).to(dtype)
    gate = torch.randn(4, 64, generator=generator).to(dtype)
    expected = products.experts(x, gate, *weights, 64, 3, True)
    x[1, 5] = torch.nan
    y = products.experts(x, gate, *weights, 64, 3, True)
    assert y[1].isnan().all()
    torch.testing.assert_close(y[[0, 2]], expected[[0, 2]], rtol=2**-6, atol=2**-6)
