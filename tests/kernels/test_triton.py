"""The Triton kernels, in Triton's interpreter where there is no GPU: against attention spelled out, and compiled ahead
of time for GPUs that are not there."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import pytest
import torch
from helpers import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import Pool
from test_kernels import attention as plain_attention

from benchmarks import kernel_resources
from nanopage.kernels import cache_write, reference
from nanopage.kernels import paged_attention as kernels
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.kernels.rotate_and_write import rotate_and_write
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import rotate
from nanopage.state import pages

ROOT = Path(__file__).parents[2]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


NO_SLOTS = torch.zeros(0, dtype=torch.int64, device=DEVICE)  # nothing is written


def attention_of(tables, query_lens, seq_lens, num_splits) -> kernels.TritonAttention:
    """Decodes and prompts are split into as many parts."""
    query_start = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    query_start[1:] = torch.tensor(query_lens).cumsum(0)
    num_decodes = query_lens.count(1)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    lengths = query_start.to(DEVICE), lens.to(DEVICE)
    return kernels.TritonAttention(NO_SLOTS, tables, *lengths, num_decodes, max(query_lens), num_splits, num_splits)


def attended(q, k, v, window=None, scale=None, softcap=0.0, sinks=None):
    """In float64."""
    return plain_attention(q.double(), k.double(), v.double(), window, scale, softcap, sinks)


def check(pool, group, query_lens, window=None, softcap=0.0, num_splits=1, padding=0, scale=None, sinks=None):
    """Run {sequence: number of its last tokens that are queries} by the kernels; `padding` more rows of no sequence."""
    query_lens = dict(sorted(query_lens.items(), key=lambda item: item[1] > 1))
    tables, counts, seq_lens = pool.metadata(query_lens)
    q = pool.random(sum(query_lens.values()) + padding, group * pool.kv_heads, pool.head_dim)
    if padding:  # as a captured graph has it: decodes without a context
        assert set(query_lens.values()) == {1}
        tables = torch.cat((tables, torch.zeros(padding, tables.shape[1], dtype=tables.dtype)))
        counts, seq_lens = torch.cat((counts, torch.ones(padding))), torch.cat((seq_lens, torch.zeros(padding)))
    attention = attention_of(tables.to(DEVICE), counts.int().tolist(), seq_lens.int().tolist(), num_splits)
    on_device = None if sinks is None else sinks.to(DEVICE)
    scoring = reference.Scoring(window, scale, softcap, pool.scales, on_device)
    out = attention.attend(q.to(DEVICE), pool.cache.to(DEVICE), scoring).cpu()
    assert out.dtype == q.dtype
    if not padding:
        plain = reference.paged_attention(q, pool.cache, tables, counts, seq_lens, replace(scoring, sinks=sinks))
        assert (out - plain).abs().max() / plain.abs().max() < 2 * TOLERANCE[pool.dtype]
    rows = q.split([*query_lens.values(), *[1] * padding])
    for index, q_rows, out_rows in zip(query_lens, rows, out.split(list(map(len, rows))), strict=False):
        _, k, v = pool.sequences[index]
        expected = attended(q_rows, k, v, window, scale, softcap, sinks)
        error = (out_rows.double() - expected).abs().max() / expected.abs().max()
        assert error < TOLERANCE[pool.dtype], (index, error)
    assert not out[len(out) - padding :].any()


@pytest.fixture
def poisoned(monkeypatch):
    """New memory is NaN, so that what is not written shows."""

    def poisoning(make):
        def made(*arguments, **options):
            tensor = make(*arguments, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return made

    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


def mixed(pool, lengths):
    """Decodes, whole prompts and later chunks of such lengths."""
    decodes = {pool.add(length): 1 for length in lengths}
    whole = {pool.add(length): length for length in lengths if length > 1}
    return decodes, whole, {pool.add(length): length // 2 for length in lengths if length > 3}


HEAD_SIZES, PAGE_SIZES = (64, 80, 96, 128, 256), (8, 16, 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
# Pages larger than a tile take the interpreter long: one of them will do.
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [*(product(HEAD_SIZES, PAGE_SIZES) if LONG else zip(HEAD_SIZES, cycle(PAGE_SIZES))), (64, 256)],
    ids=lambda size: str(size),
)
def test_attention_over_pages(head_dim, block_size, dtype):
    large = block_size == 256
    pool = Pool(1 if large else 2, head_dim, block_size, dtype, num_blocks=40)
    lengths = [1, block_size - 1, block_size + 1, *([] if large else [3 * block_size + 2])]
    for kind in mixed(pool, lengths):
        check(pool, 2, kind)


@pytest.mark.parametrize(
    ("group", "window"),
    product((1, 2, 3, 4, 7, 8), (None, 1, 5, 40)) if LONG else [(1, None), (2, 5), (3, 1), (4, 40), (7, 5), (8, None)],
    ids=lambda value: str(value),
)
def test_query_heads_that_share_a_kv_head(group, window):
    pool = Pool(3 if LONG else 2, 16, 16, torch.float32, num_blocks=60)
    decodes, whole, chunks = mixed(pool, [1, 15, 16, 17, 70 if LONG else 45])
    check(pool, group, decodes | whole | chunks, window)


@pytest.fixture
def small_splits(monkeypatch):
    """A split may be a single tile."""
    monkeypatch.setattr(kernels, "SPLIT_TOKENS", 1)
    monkeypatch.setattr(kernels, "PROMPT_SPLIT_TOKENS", 1)


@pytest.mark.usefixtures("poisoned", "small_splits")
@pytest.mark.parametrize(
    ("num_splits", "window"),
    product((1, 2, 3, 8, 40), (None, 100)) if LONG else [(1, 100), (2, None), (3, 100), (8, 100), (40, None)],
    ids=lambda value: str(value),
)
def test_splits_of_a_decode(num_splits, window):
    """More than there are tiles, fewer, and more than are merged at once."""
    pool = Pool(2 if LONG else 1, 256, 16, torch.float32, num_blocks=150)  # tiles of 16 tokens
    longest = 700 if LONG else 520 if num_splits > 8 else 200  # 33 tiles, which are merged in three groups
    check(pool, 3, {pool.add(length): 1 for length in (1, 15, 16, 17, 33, longest)}, window, num_splits=num_splits)


@pytest.mark.usefixtures("poisoned", "small_splits")
@pytest.mark.parametrize(
    ("num_splits", "window"),
    product((1, 2, 3, 8, 40), (None, 20)) if LONG else [(2, 20), (3, None), (40, 20)],
    ids=lambda value: str(value),
)
def test_splits_of_prompts_and_of_decodes_beside_them(num_splits, window):
    """Short chunks of long contexts and whole prompts. Rows of a program may see nothing of a split."""
    pool = Pool(2 if LONG else 1, 256, 16, torch.float32, num_blocks=150)
    queries = {pool.add(length): count for length, count in ((130, 9), (24, 24), (17, 2), (33, 1), (100, 1))}
    check(pool, 3 if LONG else 2, queries, window, num_splits=num_splits)


@pytest.mark.usefixtures("poisoned")
def test_a_context_has_no_more_splits_than_pay_for_merging_them(monkeypatch):
    """However many splits a longer context of the step has."""
    pool, made, split_results = Pool(1, 256, 16, torch.float32, num_blocks=150), [], kernels.split_results
    monkeypatch.setattr(kernels, "split_results", lambda *sizes: made.append(split_results(*sizes)) or made[-1])
    monkeypatch.setattr(kernels, "PROMPT_SPLIT_TOKENS", 400)
    check(pool, 1, {pool.add(length): count for length, count in ((600, 1), (200, 1), (600, 2), (30, 3))}, num_splits=8)
    decodes, prompts = ((lse > -torch.inf).sum(2).flatten().tolist() for _, lse in made)
    assert decodes == [3, 1]  # of 256 tokens
    assert prompts == [2, 2, 1, 1, 1]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("num_splits", [1, 4])
def test_rows_that_only_pad_give_zeros(num_splits):
    pool = Pool(2, 32, 16, torch.float32)
    check(pool, 2, {pool.add(length): 1 for length in (3, 50)}, num_splits=num_splits, padding=3)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap):
    pool = Pool(1, 32, 16, torch.float32)
    decodes, whole, _ = mixed(pool, [3, 20])
    check(pool, 2, decodes | whole, softcap=softcap, num_splits=2)
    check(pool, 2, decodes | whole, 11, softcap, num_splits=2, scale=0.4)


@pytest.mark.usefixtures("poisoned", "small_splits")
@pytest.mark.parametrize(("num_splits", "window"), [(1, 20), (3, None)], ids=str)
def test_sinks(num_splits, window):
    """A sink counts once, however many splits there are, and pads no row. Its dtype is that of the weights."""
    pool, sinks = Pool(2, 256, 16, torch.float32, num_blocks=60), torch.linspace(-3, 8, 6).half()  # tiles of 16 tokens
    decodes, whole, chunks = mixed(pool, [1, 17, 60])
    check(pool, 3, decodes | whole | chunks, window, num_splits=num_splits, scale=0.3, sinks=sinks)
    check(pool, 3, decodes, window, softcap=5.0, num_splits=num_splits, padding=2, sinks=sinks)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_what_stands_behind_a_sequence_does_not_matter(num_splits):
    pool = Pool(2, 256, 16, torch.float32)  # tiles of 16 tokens
    queries = {pool.add(length): count for length, count in ((5, 1), (30, 1), (13, 13), (40, 7))}
    k_pages, v_pages = pages.views(pool.cache, 256)
    for table, k, _ in pool.sequences:
        k_pages[table[-1], :, :, (len(k) - 1) % 16 + 1 :] = v_pages[table[-1], :, (len(k) - 1) % 16 + 1 :] = torch.nan
    check(pool, 2, queries, num_splits=num_splits)


def test_sequences_that_share_pages():
    pool = Pool(2, 64, 8, torch.float32)
    first = pool.add(40)
    second, third = pool.add(29, first, 3), pool.add(44, first, 5)
    check(pool, 2, {first: 1, second: 1, third: 20}, num_splits=2)


@settings(deadline=None, max_examples=examples(12))
@given(st.data())
def test_any_shapes(data):
    draw = data.draw
    block_size = draw(st.sampled_from([1, 2, 8, 16, 64]))
    pool = Pool(draw(st.integers(1, 3)), draw(st.integers(1, 70)), block_size, torch.float32, num_blocks=300)
    sizes = {"min_size": 1, "max_size": 4 if LONG else 2}
    lengths = draw(st.lists(st.integers(1, 70 if LONG else 40), **sizes))
    queries = {pool.add(length): draw(st.integers(1, length)) for length in lengths}
    window = draw(st.none() | st.integers(1, 80))
    check(pool, draw(st.integers(1, 9)), queries, window, num_splits=draw(st.integers(1, 9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (6, 32), (128, 256)])
def test_writes_equal_the_plain_ones(head_dim, block_size, dtype):
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(7, 4 + 2 + 2, head_dim, generator=generator).to(dtype)
    _, k, v = fused.split([4, 2, 2], dim=1)  # strided views
    cache = torch.full((2, 5, 2, head_dim * block_size), torch.nan, dtype=dtype)
    slots = torch.randperm(5 * block_size, generator=generator)[:7]
    expected = cache.clone()
    pages.write(k, v, expected, slots)
    padded = torch.cat((slots, torch.tensor([-1, -1])))  # as a captured graph has them
    garbage = torch.full((2, 8, head_dim), 7.0, dtype=dtype)
    fused = torch.cat((fused, garbage)).to(DEVICE)
    cache = cache.to(DEVICE)
    cache_write.write(fused[:, 4:6], fused[:, 6:], cache, padded.to(DEVICE))
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("norms", [None, 0.0, 1.0], ids=["plain", "norms", "norms with an offset"])
@pytest.mark.parametrize(("sizes", "rotated"), [((9, 3, 64, 16), 64), ((4, 4, 6, 32), 6), ((2, 1, 80, 8), 48)], ids=str)
@torch.inference_mode()
def test_heads_are_normalized_rotated_and_written_in_one_kernel(sizes, rotated, norms, dtype):
    """Equal to the layers in float64, rounded to the dtype once."""
    generator = torch.Generator().manual_seed(0)
    q_heads, kv_heads, head_dim, block_size = sizes

    def random(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    num_tokens, num_heads = 7, q_heads + 2 * kv_heads
    heads, angles = random(num_tokens, num_heads, head_dim), random(num_tokens, 1, rotated // 2)
    cos, sin = angles.double().cos().to(dtype), angles.double().sin().to(dtype)
    q_norm, k_norm = RMSNorm(head_dim, 0.1, norms).double(), RMSNorm(head_dim, 0.1, norms).double()
    for norm in (q_norm, k_norm):
        norm.weight.data = random(head_dim).double()
    q, k, v = heads.double().split([q_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = q_norm(q), k_norm(k)
    q, k = (rotate(part, cos.double(), sin.double()) for part in (q, k))
    slots = torch.randperm(5 * block_size, generator=generator)[:num_tokens]
    slots[[2, 6]] = -1
    kept = slots >= 0
    cache = torch.full((2, 5, kv_heads, head_dim * block_size), 9.0, dtype=dtype)
    expected, out = cache.double(), torch.full((num_tokens, q_heads, head_dim), 9.0, dtype=dtype)
    pages.write(k[kept], v[kept], expected, slots[kept])
    weights = (q_norm.weight.to(dtype), k_norm.weight.to(dtype), 0.1, norms) if norms is not None else None
    cache, out, inputs = cache.to(DEVICE), out.to(DEVICE), [tensor.to(DEVICE) for tensor in (heads, cos, sin)]
    if weights is not None:
        weights = weights[0].to(DEVICE), weights[1].to(DEVICE), *weights[2:]
    rotate_and_write(*inputs, weights, cache, slots.to(DEVICE), out)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(cache.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.cpu().double()[kept], q[kept], rtol=tolerance, atol=tolerance)
    assert (out[~kept] == 9).all(), "padding"


def without_interpreter(*arguments) -> subprocess.CompletedProcess:
    """Python in another process, whose kernels are compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


ALL_KERNELS = os.environ.get("NANOPAGE_ALL_KERNELS", "0") != "0"


# A cache in fp8, for the oldest GPU that is not refused.
OLDEST_WITH_FP8 = """
import torch
from benchmarks.kernel_resources import KEEPING, Specialization, compile_ahead

for kernel in KEEPING:
    used = compile_ahead(Specialization(kernel, torch.bfloat16, cache="fp8"), 89)
    assert used.stack == 0 and used.shared <= 99 * 1024, (kernel, used)  # an RTX 4090 has 99 KiB
"""
WINGS = """
import sys
from tests.kernels.ahead_of_time import compile_wings, trace_the_sampler

if sys.argv[2] in ("80", "90"):
    compile_wings(int(sys.argv[2]))
trace_the_sampler()
"""
COMPILE = "import runpy; runpy.run_module('benchmarks.kernel_resources', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize("architecture", [75, 80, 90, 100] if ALL_KERNELS else [90])
def test_what_the_engine_launches_compiles_ahead_of_time(architecture):
    """Each kernel in each dtype for an H100; all specializations for every architecture with NANOPAGE_ALL_KERNELS=1.
    One process does it all, wings and the sampler included: to start one takes as long as to compile most of them."""
    which = "every" if ALL_KERNELS else "few"
    done = without_interpreter("-c", OLDEST_WITH_FP8 + WINGS + COMPILE, which, str(architecture), "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) >= 16
    for row in rows:
        assert 0 < row["registers"] <= 255, row
        assert row["shared"] <= kernel_resources.SHARED[architecture] * 1024, row
        if architecture in (80, 90):
            assert row["stack"] == 0, row  # nothing is spilled


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_splits", [1, 7])
def test_the_same_from_every_launch_into_poisoned_memory(dtype, num_splits):
    pool = Pool(4, 128, 16, dtype, num_blocks=700)
    decodes, whole, chunks = mixed(pool, [1, 16, 17, 300, 1000])
    query_lens = decodes | whole | chunks
    tables, counts, seq_lens = pool.metadata(query_lens)
    q = pool.random(int(counts.sum()), 16, 128).to(DEVICE)
    attention = attention_of(tables.to(DEVICE), counts.tolist(), seq_lens.tolist(), num_splits)
    cache = pool.cache.to(DEVICE)
    outs = [attention.attend(q, cache) for _ in range(20)]
    assert all(torch.equal(out, outs[0]) for out in outs) and not outs[0].isnan().any()
    for index, rows, out in zip(
        query_lens, q.cpu().split(counts.tolist()), outs[0].cpu().split(counts.tolist()), strict=True
    ):
        _, k, v = pool.sequences[index]
        expected = attended(rows, k, v)
        assert (out.double() - expected).norm() / expected.norm() < {torch.bfloat16: 1e-2}.get(dtype, 2e-3)


@pytest.mark.gpu
def test_a_cache_of_more_elements_than_an_int32_counts():
    kv_heads, head_dim, num_blocks = 8, 128, 140_000
    cache = torch.zeros(2, num_blocks, kv_heads, head_dim * 16, dtype=torch.bfloat16, device=DEVICE)
    k, v = torch.randn(2, 40, kv_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(num_blocks - 3, num_blocks, device=DEVICE)
    slots = (table[:, None] * 16 + torch.arange(16, device=DEVICE)).flatten()[:40]
    cache_write.write(k, v, cache, slots)
    q = torch.randn(1, 32, head_dim, dtype=torch.bfloat16, device=DEVICE)
    out = attention_of(table[None], [1], [40], num_splits=2).attend(q, cache).cpu()
    expected = attended(q.cpu(), k.cpu(), v.cpu())
    assert (out.double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.gpu
def test_what_varies_from_step_to_step_compiles_nothing_anew():
    pool = Pool(2, 64, 16, torch.float16, num_blocks=200)
    indices = [pool.add(20) for _ in range(5)]

    def variants():
        every = (kernels.decode_kernel, kernels.merge_kernel, kernels.prefill_kernel)
        return [sum(map(len, (cache[0] for cache in kernel.device_caches.values()))) for kernel in every]

    seen = []
    for num_splits in (2, 16, 17):
        for width in (2, 16, 17):
            for num_decodes in range(1, 5):
                counts = [1] * num_decodes + [7]
                tables = torch.zeros(len(counts), width, dtype=torch.int64)
                tables[:, :2] = torch.tensor([pool.sequences[index][0] for index in indices[: len(counts)]])
                q = torch.randn(sum(counts), 4, 64, dtype=torch.float16, device=DEVICE)
                attention_of(tables.to(DEVICE), counts, [20] * len(counts), num_splits).attend(q, pool.cache.to(DEVICE))
                seen.append(variants())
    assert seen[-1] == seen[0]


@pytest.mark.gpu
def test_a_captured_graph_serves_other_lengths():
    pool = Pool(2, 64, 16, torch.float16, num_blocks=300)
    batches = [{pool.add(length): 1 for length in lengths} for lengths in ([700, 3, 40], [1, 500, 900])]
    width = max(len(table) for table, _, _ in pool.sequences)
    q = pool.random(3, 4, 64).to(DEVICE)
    tables = torch.zeros(3, width, dtype=torch.int64, device=DEVICE)
    attention = attention_of(tables, [1, 1, 1], [1, 1, 1], num_splits=5)
    cache = pool.cache.to(DEVICE)
    graph = torch.cuda.CUDAGraph()
    attention.attend(q, cache)  # compiles
    with torch.cuda.graph(graph):
        out = attention.attend(q, cache)
    for batch in batches:
        for row, index in enumerate(batch):
            table, k, _ = pool.sequences[index]
            tables[row, : len(table)] = torch.tensor(table, device=DEVICE)
            attention.seq_lens[row] = len(k)
        graph.replay()
        for row, index in enumerate(batch):
            expected = attended(q[row : row + 1].cpu(), *pool.sequences[index][1:])
            assert (out[row].cpu().double() - expected[0]).norm() / expected.norm() < 2e-3


def test_attention_of_a_step_writes_what_it_attends_over():
    """As a worker makes it out of a step's inputs: lengths on the CPU, the rest on the device."""
    pool = Pool(2, 32, 16, torch.float32)
    query_lens = {pool.add(length): count for length, count in ((40, 1), (5, 1), (30, 7))}
    tables, counts, seq_lens = pool.metadata(query_lens)
    rows = [
        (i, length - count + j) for i, (length, count) in enumerate(((40, 1), (5, 1), (30, 7))) for j in range(count)
    ]
    slots = torch.tensor([pool.sequences[i][0][p // 16] * 16 + p % 16 for i, p in rows])
    expected = pool.cache.clone()
    nan = torch.full((9, 2, 32), torch.nan)
    pages.write(nan, nan, pool.cache, slots)  # not there before
    q = pool.random(9, 4, 32)
    k, v = (torch.stack([pool.sequences[i][which][p] for i, p in rows]) for which in (1, 2))
    cache = pool.cache.to(DEVICE)
    plain = GroupedAttention(slots.to(DEVICE), tables.to(DEVICE), counts, seq_lens)
    attention = kernels.make_attention(plain, 4, 2, 32, torch.float32)
    assert (attention.num_decodes, attention.max_query_len, attention.num_splits) == (2, 7, 1)
    assert attention.query_start.tolist() == [0, 1, 2, 9]
    attention.write(k.to(DEVICE), v.to(DEVICE), cache)
    out = attention.attend(q.to(DEVICE), cache, reference.Scoring(20)).cpu()
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))
    plain = reference.paged_attention(q, expected, tables, counts, seq_lens, reference.Scoring(20))
    torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)


def test_splits_share_the_work_of_two_programs_a_processor():
    choose = kernels.choose_splits
    assert choose([4096] * 64, 8, 132) == 1  # there is work enough
    assert choose([32768], 8, 132) == 33  # 8 x 33 programs
    assert choose([200], 8, 132) == 1  # too little to split
    assert choose([32768] + [100] * 63, 8, 132) > 8  # the longest is not left to eight programs
    assert choose([], 8, 132) == 1


FP8 = torch.float8_e4m3fn
SCALES = 0.25, 2.0  # of K and V


def fp8_pool(head_dim, dtype, lengths, num_blocks=40):
    """A pool whose K and V are multiples of their scales by numbers of fp8, and its sequences."""
    pool = Pool(2, head_dim, 16, dtype, num_blocks, kv_dtype=FP8, scales=SCALES)
    return pool, [pool.add(length) for length in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("head_dim", "num_splits", "window", "softcap"), [(64, 1, None, 0.0), (128, 3, 20, 0.0), (80, 2, None, 5.0)]
)
def test_attention_over_a_cache_in_fp8(head_dim, num_splits, window, softcap, dtype):
    """Equals attention over the numbers that the cache holds, times the scales."""
    pool, indices = fp8_pool(head_dim, dtype, (1, 17, 90, 40, 33))
    check(pool, 2, dict(zip(indices, (1, 1, 1, 40, 5), strict=True)), window, softcap, num_splits)


def test_writes_to_a_cache_in_fp8_equal_the_plain_ones_and_saturate():
    """Triton's interpreter does not round to fp8 correctly. Nothing is rounded here but what is too large."""
    k, v = torch.randint(-15, 16, (2, 7, 2, 64)).float()
    k[0, 0, :4] = torch.tensor([1e30, -1e30, torch.inf, -torch.inf])
    k[1, 0, 0], v[2, 0, 0] = 115.0, 897.0  # above 448 times their scales
    expected = torch.zeros(2, 3, 2, 64 * 16, dtype=torch.uint8).view(FP8)
    slots = torch.tensor([3, 40, 5, -1, 17, 20, -1])
    pages.write(k[slots >= 0], v[slots >= 0], expected, slots[slots >= 0], *SCALES)
    k_pages, v_pages = (x.float() for x in pages.views(expected, 64))
    assert k_pages[0, 0, :4, 3].tolist() == [448, -448, 448, -448]
    assert torch.equal(4 * k[4], k_pages[1, :, :, 1]) and torch.equal(v[4] / 2, v_pages[1, :, 1])
    assert k_pages[2, 0, 0, 8] == v_pages[0, 0, 5, 0] == 448
    cache = torch.zeros(expected.shape, dtype=torch.uint8, device=DEVICE).view(FP8)
    cache_write.write(k.to(DEVICE), v.to(DEVICE), cache, slots.to(DEVICE), *SCALES)
    assert torch.equal(cache.cpu().view(torch.uint8), expected.view(torch.uint8))
    fused = torch.zeros(expected.shape, dtype=torch.uint8, device=DEVICE).view(FP8)
    heads, q = torch.cat((k, k, v), 1).to(DEVICE), torch.empty(7, 2, 64, device=DEVICE)
    heads.clamp_(-1e30, 1e30)  # infinity times a sine of 0 is NaN
    cos, sin = torch.ones(7, 1, 32, device=DEVICE), torch.zeros(7, 1, 32, device=DEVICE)
    rotate_and_write(heads, cos, sin, None, fused, slots.to(DEVICE), q, SCALES)
    assert torch.equal(fused.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.gpu
def test_a_gpu_converts_every_number_of_fp8_as_torch_does():
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = torch.cat((values, values * 1.03, torch.randn(512) * 1e-2)).view(16, 1, 64)
    expected = torch.zeros(2, 1, 1, 64 * 16, dtype=torch.uint8).view(FP8)
    cache = expected.clone().to(DEVICE)
    slots = torch.arange(16)
    pages.write(numbers, numbers, expected, slots)
    cache_write.write(numbers.to(DEVICE), numbers.to(DEVICE), cache, slots.to(DEVICE))
    torch.testing.assert_close(cache.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)


def test_attention_in_fp8_is_near_that_of_k_and_v_before_they_were_rounded():
    """A number of fp8 has 4 significant bits: rounding changes it by at most 1/16, up or down."""
    scales = 0.01, 0.02
    k, v = 0.1 + torch.rand(2, 60, 2, 64)
    q, slots, tables = torch.randn(9, 4, 64), torch.arange(60), torch.arange(4)[None]
    attention = attention_of(tables.to(DEVICE), [9], [60], 1)
    cache = torch.zeros(2, 4, 2, 64 * 16, dtype=torch.uint8).view(FP8)
    pages.write(k, v, cache, slots, *scales)
    out = attention.attend(q.to(DEVICE), cache.to(DEVICE), reference.Scoring(kv_scales=scales)).cpu()
    expected = attended(q, k, v)
    error = (out.double() - expected).norm() / expected.norm()
    assert 1e-4 < error < 2e-2


def test_prompts_are_split_where_their_programs_would_not_fill_the_gpu():
    llama = 32, 8, 128, torch.bfloat16, 90, 132  # heads, KV heads, head_dim; an H100
    choose = kernels.choose_prompt_splits
    assert choose([32], [32_768], *llama) == 32  # 8 programs become 256
    assert choose([4096], [4096], *llama) == 1  # 1,024 programs
    assert choose([512], [512], *llama) == 1  # too little to split
    assert choose([32] * 64, [32_800] * 64, *llama) == 1  # 512 programs
    assert choose([300], [32_800], *llama) == 4  # 80 programs become 320
    assert choose([], [], *llama) == 1
    beside_others = choose([32, *[500] * 4], [131_072, *[500] * 4], *llama)
    assert 1 < beside_others <= kernels.PROMPT_SPLIT_BYTES // (2032 * 32 * 128 * 4) + 1


def test_a_step_splits_its_prompts_and_merges_them(monkeypatch):
    """Decided by lengths on the host. One more launch, and the grid has that many times as many programs."""
    launches = []

    class Recorded:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *arguments, **options: launches.append((self.name, grid))

    for name in ("decode_kernel", "prefill_kernel", "merge_kernel"):
        monkeypatch.setattr(kernels, name, Recorded(name))
    monkeypatch.setattr(kernels, "num_processors", lambda device: 132)
    cache = torch.zeros(2, 1, 8, 128 * 16, dtype=torch.bfloat16)
    q = torch.zeros(34, 32, 128, dtype=torch.bfloat16)
    for length, num_splits in ((40, 1), (32_768, 17)):  # 33 tokens are two programs for each KV head
        lens = torch.tensor([1, 33]), torch.tensor([9, length])
        tables = torch.zeros(2, 2048, dtype=torch.int32)
        launches.clear()
        plain = GroupedAttention(NO_SLOTS.cpu(), tables, *lens)
        kernels.make_attention(plain, 32, 8, 128, torch.bfloat16).attend(q, cache)
        merges = [("merge_kernel", (33, 32))] if num_splits > 1 else []
        assert launches == [("decode_kernel", (1, 8, 1)), ("prefill_kernel", (2 * num_splits, 8, 1)), *merges]
