"""flash_attention.cpp against attention spelled out, compiled for several models, and for AVX2 as well."""

from collections import namedtuple
from ctypes import c_void_p

import pytest
import torch
from helpers import LONG
from test_kernels import Pool, attention

from nanopage.cpu import aot_compile
from nanopage.cpu.aot_chain import Chain, Step
from nanopage.kernels.grouped_attention import GroupedAttention

KV_HEADS = 2
AVX2 = "AVX2"
AVX512 = torch.backends.cpu.get_cpu_capability()  # or less
ModelSizes = namedtuple("ModelSizes", "head_dim num_kv_heads num_heads attention_scale attention_softcap")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# head_dim, group, block_size, dtype, dtype of K and V, instructions: sizes that fill registers, and some that do not.
# Some have a scale and a soft cap of scores. Each compiles for 3 s: those below run with NANOPAGE_LONG_TESTS=1. Layers
# in float32 are compiled by test_aot.py as well.
MADE_FOR = [
    (20, 7, 24, FLOAT32, FLOAT16, AVX512, 0.3, 4.0),
    (128, 8, 5, BFLOAT16, BFLOAT16, AVX512),
    (16, 100, 256, FLOAT32, BFLOAT16, AVX2, None, 2.0),
]
if LONG:
    MADE_FOR += [
        (20, 1, 8, BFLOAT16, BFLOAT16, AVX2),
        (80, 7, 24, FLOAT32, FLOAT16, AVX512, 0.3, 4.0),
        (64, 3, 16, FLOAT32, FLOAT32, AVX512, 0.3, 4.0),
        (64, 3, 16, FLOAT32, FLOAT32, AVX2),
        (64, 3, 16, FLOAT32, FLOAT16, AVX2),
        (64, 3, 16, FLOAT32, BFLOAT16, AVX2),
        (64, 3, 16, BFLOAT16, BFLOAT16, AVX2),
        (64, 3, 16, BFLOAT16, BFLOAT16, AVX512),
        (20, 1, 8, BFLOAT16, BFLOAT16, AVX512),
        (16, 100, 256, FLOAT32, FLOAT32, AVX2, None, 2.0),
        (80, 7, 24, FLOAT32, FLOAT32, AVX512),
        (128, 8, 5, FLOAT32, BFLOAT16, AVX512),
    ]
TOLERANCE = {FLOAT32: 2e-5, BFLOAT16: 2**-6}


@pytest.fixture(scope="module", params=dict.fromkeys(MADE_FOR), ids=lambda made: "-".join(map(str, made)))
def made(request, tmp_path_factory):
    """What the code is compiled for, and the code."""
    head_dim, group, block_size, dtype, kv_dtype, instructions, *scores = request.param
    scale, softcap = scores or (None, 0.0)
    sizes = ModelSizes(head_dim, KV_HEADS, KV_HEADS * group, scale, softcap)
    constants = aot_compile.attention_constants(sizes, dtype, kv_dtype, block_size)
    directory = tmp_path_factory.mktemp("attention")
    with pytest.MonkeyPatch.context() as patch:
        if instructions == AVX2:
            patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: AVX2)
        aot_compile.compile_chain(constants, directory / "chain.so")
    (file,) = directory.glob("chain.*.so")

    def make_pool(num_blocks=32):
        return Pool(KV_HEADS, head_dim, block_size, dtype, num_blocks, kv_dtype=kv_dtype)

    def exactly(q, k, v, window=None):
        return attention(q.double(), k.double(), v.double(), window, scale, softcap)

    return group, make_pool, Chain(file), exactly


def attend(chain, pool, parts, query_lens, window):
    """Attention of queries in parts. All but the last have the same number of rows."""
    out = torch.full_like(torch.cat(parts), torch.nan)
    step = Step(GroupedAttention(torch.empty(0), *pool.metadata(query_lens)))
    addresses, cache = (c_void_p * len(parts))(*(part.data_ptr() for part in parts)), pool.cache
    chain.attend(step, addresses, len(parts[0]), cache.data_ptr(), cache.shape[1], window or 0, out.data_ptr())
    return out


def check(made, sequences, window):
    """`sequences` is a list of (tokens, how many of the last are queries)."""
    group, make_pool, chain, exactly = made
    pool = make_pool(sum(-(-length // make_pool().block_size) for length, _ in sequences))
    query_lens = {pool.add(length): queries for length, queries in sequences}
    q = pool.random(sum(query_lens.values()), KV_HEADS * group, pool.head_dim)
    rows = q.double().split(list(query_lens.values()))
    exact = [exactly(r, *pool.sequences[i][1:], window) for i, r in zip(query_lens, rows, strict=True)]
    tolerance = TOLERANCE[pool.dtype]
    for part_rows in (len(q), len(q) // 3 + 1):
        parts = [part.clone() for part in q.split(part_rows)]  # so that each is at a place of its own
        out = attend(chain, pool, parts, query_lens, window)
        torch.testing.assert_close(out.double(), torch.cat(exact), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 5, 100] if LONG else [None, 5])
def test_it_equals_attention(made, window):
    """Decodes, prompts and later chunks of them, with lengths around the edges of pages, blocks of keys and tiles."""
    check(made, [(1, 1), (7, 1), (64, 1), (9, 9), (65, 64), (40, 3), (150, 150), (131, 20)], window)
    check(made, [(2, 2)], window)


@pytest.mark.parametrize("window", [None, 300])
def test_long_sequences_are_split(made, window):
    make_pool = made[1]
    block_size = make_pool().block_size
    split = 4 * max(block_size, 64 // block_size * block_size)
    check(made, [(length, 1) for length in (1, split - 1, split, split + 1, 3 * split + 5)], window)
    check(made, [(3 * split + 5, 1)], window)
    check(made, [(2 * split + 9, 33)], window)


def test_large_scores_are_not_rounded_and_do_not_overflow(made):
    """Nearly all weight goes to one key, which differs from the others by less than bfloat16 can tell at this size."""
    group, make_pool, chain, exactly = made
    pool = make_pool()
    query_lens = {pool.add(70): 70, pool.add(70): 1}
    q = 300 * pool.random(71, KV_HEADS * group, pool.head_dim)
    exact = torch.cat([exactly(rows, *pool.sequences[i][1:]) for i, rows in enumerate(q.split([70, 1]))])
    out = attend(chain, pool, [q], query_lens, None)
    torch.testing.assert_close(out.double(), exact, rtol=2**-5, atol=2**-5)


def test_nan_reaches_the_output_of_its_own_sequence_only(made):
    group, make_pool, chain, _ = made
    pool = make_pool()
    query_lens = {pool.add(11): 1, pool.add(35): 1, pool.add(12): 12}
    pool.cache[:, pool.sequences[1][0]] = torch.nan
    out = attend(chain, pool, [pool.random(14, KV_HEADS * group, pool.head_dim)], query_lens, None)
    assert out[1].isnan().all()
    assert out[0].isfinite().all() and out[2:].isfinite().all()


@pytest.mark.parametrize("block_size", [4, 16] if LONG else [16])  # only pages of 16 are read in place
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_a_query_does_not_depend_on_the_queries_beside_it(dtype, block_size, tmp_path):
    """To the bit, without splits: the last queries of a sequence by themselves, in chunks, beside another sequence."""
    constants = aot_compile.attention_constants(ModelSizes(64, 1, 3, None, 0.0), dtype, dtype, block_size, True)
    aot_compile.compile_chain(constants, tmp_path / "chain.so")
    chain, pool = Chain(*tmp_path.glob("chain.*.so")), Pool(1, 64, block_size, dtype, 600)
    (index, other), length = (pool.add(1500), pool.add(700)), 1500
    q, q_other = pool.random(length, 3, 64), pool.random(1, 3, 64)
    for window in (None, 100):
        whole = attend(chain, pool, [q], {index: length}, window)
        for count in (1, 2, 31, 33, 700):
            out = attend(chain, pool, [torch.cat((q[-count:], q_other))], {index: count, other: 1}, window)
            assert torch.equal(out[:-1], whole[-count:])
