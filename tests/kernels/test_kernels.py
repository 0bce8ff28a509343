"""Pages and what attends over them against attention spelled out, on K and V that were never paged."""

import gc
import weakref
from itertools import cycle, product

import pytest
import torch
from helpers import LONG

from nanopage.cpu import packed_linear, tile_linear
from nanopage.cpu.packed import PackedRowWeight, PackedWeight, pack
from nanopage.cpu.tiled import TiledWeight, has_only_float16, tile
from nanopage.kernels import reference
from nanopage.kernels.chunks import group_chunks
from nanopage.kernels.grouped_attention import GroupedAttention, attend_chunks
from nanopage.kernels.reference import Scoring
from nanopage.layers.embedding import Embedding
from nanopage.layers.linear import Linear
from nanopage.layers.weight import Floats
from nanopage.state import pages

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def attention(q, k, v, window=None, scale=None, softcap=0.0, sinks=None):
    """Causal attention of the last len(q) of len(k) tokens: q [n, heads, d], k and v [tokens, kv_heads, d]. sinks
    [heads]: as if there were one more token, whose value is 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    keys = torch.arange(len(k))
    queries = keys[len(k) - len(q) :, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), 2)
        v = torch.cat((v, torch.zeros_like(v[:1])))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def grouped(q, cache, block_tables, query_lens, seq_lens, scoring):
    """The attention of eager steps."""
    step = GroupedAttention(torch.empty(0), block_tables, query_lens, seq_lens)
    return step.attend(q, cache, scoring)


class Pool:
    """A cache of NaN in which sequences get random blocks, written by pages.write, the rest of the last one garbage.
    K and V are numbers that `kv_dtype` has, times `scales`."""

    def __init__(self, kv_heads, head_dim, block_size, dtype, num_blocks=32, seed=0, kv_dtype=None, scales=(1.0, 1.0)):
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.block_size, self.kv_heads, self.head_dim = dtype, block_size, kv_heads, head_dim
        self.kv_dtype, self.scales = kv_dtype or dtype, scales
        self.cache = torch.full((2, num_blocks, kv_heads, head_dim * block_size), torch.nan).to(self.kv_dtype)
        self.free = torch.randperm(num_blocks, generator=self.generator).tolist()
        self.sequences = []  # (table, k, v)

    def random(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=self.dtype)

    def add(self, length, prefix_of=None, shared_blocks=0):
        """A sequence of `length` tokens, the first blocks of which may be those of an earlier sequence."""
        shape = length, self.kv_heads, self.head_dim
        k, v = ((self.random(*shape) / scale).to(self.kv_dtype).to(self.dtype) * scale for scale in self.scales)
        v = v if len(self.cache) == 2 else k
        table = []
        shared = shared_blocks * self.block_size
        if prefix_of is not None:
            other_table, other_k, other_v = self.sequences[prefix_of]
            table = other_table[:shared_blocks]
            k[:shared], v[:shared] = other_k[:shared], other_v[:shared]
        while len(table) * self.block_size < length:
            block = self.free.pop()
            most = 100 if self.kv_dtype == pages.FP8 else 1e4
            self.cache[:, block] = (1e3 * self.random(*self.cache[:, block].shape)).clamp(-most, most).to(self.kv_dtype)
            table.append(block)
        positions = torch.arange(shared, length)
        slots = torch.tensor(table)[positions // self.block_size] * self.block_size + positions % self.block_size
        order = torch.randperm(len(slots), generator=self.generator)  # slots need not be in order
        pages.write(k[shared:][order], v[shared:][order], self.cache, slots[order], *self.scales)
        self.sequences.append((table, k, v))
        return len(self.sequences) - 1

    def metadata(self, query_lens):
        """(block_tables, query_lens, seq_lens) of {sequence: number of its last tokens that are queries}."""
        tables = [self.sequences[index][0] for index in query_lens]
        width = max(map(len, tables)) + 1  # wider than needed
        padded = torch.tensor([table + table[:1] * (width - len(table)) for table in tables])
        seq_lens = [len(self.sequences[index][1]) for index in query_lens]
        return padded, torch.tensor(list(query_lens.values())), torch.tensor(seq_lens)

    def check(self, group, query_lens, window=None, sinks=None):
        """Compare paged attention with plain attention for {sequence: queries}, in this order."""
        q = self.random(sum(query_lens.values()), group * self.kv_heads, self.head_dim)
        expected = [
            attention(rows, *self.sequences[index][1:], window, sinks=sinks)
            for index, rows in zip(query_lens, q.split(list(query_lens.values())), strict=True)
        ]
        tolerance = TOLERANCE[self.dtype]
        for paged_attention in (reference.paged_attention, grouped):
            scoring = Scoring(window, kv_scales=self.scales, sinks=sinks)
            out = paged_attention(q, self.cache, *self.metadata(query_lens), scoring)
            torch.testing.assert_close(out, torch.cat(expected), rtol=tolerance, atol=tolerance)
            assert out.is_contiguous()


def test_a_cache_of_k_alone_gives_k_as_v():
    """As latent attention needs it."""
    pool = Pool(1, 24, 4, torch.float64)
    pool.cache = pool.cache[:1]
    for length in (1, 4, 14):
        pool.add(length)
    pool.add(9, prefix_of=2, shared_blocks=2)
    pool.check(6, {0: 1, 1: 3, 2: 1, 3: 1})
    pool.check(4, {2: 14}, window=5)


def lengths(page):
    return [1, 2, page - 1, page, page + 1, 3 * page + 2]


KINDS = [(torch.float64, None), (torch.float64, 1), (torch.float64, 3), (torch.float32, None), (torch.float32, 16)]
SIZES = [*product([64, 80, 128], [1, 2, 3, 4, 8], [8, 16, 32])]


# Each size with one kind, or with every kind.
@pytest.mark.parametrize(
    ("sizes", "kind"),
    product(SIZES, KINDS) if LONG else zip(SIZES, cycle(KINDS)),
    ids=lambda values: "-".join(map(str, values)),
)
def test_paged_attention_equals_attention(sizes, kind):
    (head_dim, group, block_size), (dtype, window) = sizes, kind
    pool = Pool(2, head_dim, block_size, dtype)
    lengths = [1, 2, block_size - 1, block_size, block_size + 1, 3 * block_size + 2]
    decodes = {pool.add(length): 1 for length in lengths}
    whole = {pool.add(length): length for length in lengths if length > 1}
    later_chunks = {pool.add(length): length // 2 for length in lengths if length > 3}
    pool.check(group, decodes | whole | later_chunks, window)
    for alone in (decodes, whole, later_chunks):
        for index, queries in alone.items():
            pool.check(group, {index: queries}, window)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_k_and_v_may_have_fewer_bits_than_activations(kv_dtype):
    pool = Pool(2, 64, 16, torch.float32, kv_dtype=kv_dtype)
    pool.check(3, {pool.add(1): 1, pool.add(40): 1, pool.add(20): 20, pool.add(35): 7})
    k, v = pool.random(2, 1, 2, 64)
    pages.write(k, v, pool.cache, torch.tensor([17]))
    (k_page,), (v_page,) = pages.gather(pool.cache, torch.tensor([[1]]), 64)
    assert torch.equal(k_page[:, :, 1], k[0].to(kv_dtype)) and torch.equal(v_page[:, 1], v[0].to(kv_dtype))
    pages.write(1e6 * k, -1e6 * v, pool.cache, torch.tensor([17]))  # too large for float16
    (k_page,), (v_page,) = pages.gather(pool.cache, torch.tensor([[1]]), 64)
    assert k_page[:, :, 1].isfinite().all() and v_page[:, 1].isfinite().all()


@pytest.mark.parametrize("window", [None, 5])
class TestBatches:
    def test_one_decode_beside_chunks(self, window):
        pool = Pool(3, 16, 8, torch.float64)
        pool.check(2, {pool.add(20): 1, pool.add(9): 9, pool.add(30): 4}, window)

    def test_decodes_only(self, window):
        pool = Pool(3, 16, 8, torch.float64)
        pool.check(2, {pool.add(length): 1 for length in (1, 33, 8, 24, 7, 2)}, window)

    def test_chunks_only(self, window):
        pool = Pool(3, 16, 8, torch.float64)
        pool.check(2, {pool.add(12): 12, pool.add(40): 2, pool.add(17): 16}, window)

    def test_sinks(self, window):
        pool = Pool(2, 16, 8, torch.float64)
        lengths = {pool.add(1): 1, pool.add(20): 1, pool.add(9): 9, pool.add(30): 4, pool.add(29): 4}
        pool.check(3, lengths, window, sinks=torch.linspace(-3, 8, 6, dtype=torch.float64))

    def test_pages_shared_by_decodes_and_chunks(self, window):
        pool = Pool(2, 16, 8, torch.float64)
        first = pool.add(40)
        second = pool.add(29, prefix_of=first, shared_blocks=3)
        third = pool.add(20, prefix_of=second, shared_blocks=2)
        fourth = pool.add(32, prefix_of=first, shared_blocks=4)
        assert len({tuple(pool.sequences[index][0][:2]) for index in (first, second, third, fourth)}) == 1
        pool.check(4, {first: 1, fourth: 1, second: 5, third: 4}, window)
        pool.check(4, dict.fromkeys((third, fourth, first, second), 1), window)

    def test_a_decode_does_not_see_the_pages_of_a_poisoned_neighbour(self, window):
        pool = Pool(2, 16, 8, torch.float64)
        healthy, poisoned = pool.add(11), pool.add(35)
        pool.cache[:, pool.sequences[poisoned][0]] = torch.nan
        q = pool.random(2, 4, 16)
        out = grouped(q, pool.cache, *pool.metadata({healthy: 1, poisoned: 1}), Scoring(window))
        expected = attention(q[:1], *pool.sequences[healthy][1:], window)
        torch.testing.assert_close(out[:1], expected)
        assert out[1].isnan().all()

    def test_queries_that_are_a_slice_of_a_wider_tensor(self, window):
        pool = Pool(2, 16, 8, torch.float64)
        query_lens = {pool.add(11): 1, pool.add(35): 1, pool.add(12): 7}
        wide = pool.random(9, 4 + 2 + 2, 16)
        q = wide.split([4, 2, 2], dim=1)[0]
        out = grouped(q, pool.cache, *pool.metadata(query_lens), Scoring(window))
        expected = grouped(q.contiguous(), pool.cache, *pool.metadata(query_lens), Scoring(window))
        assert torch.equal(out, expected)
        assert out.is_contiguous()


class TestTiles:
    """Chunks in tiles, as in bfloat16, but computed in float64: lengths around the edges of tiles and groups."""

    LENGTHS = (
        (11, 7),
        (35, 35),
        (12, 2),
        (300, 300),
        (290, 130),
        (150, 150),
        (151, 16),
        (149, 149),
        (700, 129),
        (90, 90),
        (95, 95),
    )

    def attend(self, pool, query_lens, q, window=None):
        block_tables, queries, lengths = pool.metadata(query_lens)
        out = torch.full_like(q, torch.nan)
        queries, lengths = tuple(queries.tolist()), tuple(lengths.tolist())
        groups = group_chunks(queries, lengths, q.shape[1], 2 * 16, window, q.dtype, q.device)
        for chunks in groups:
            attend_chunks(chunks, q, pool.cache, block_tables, out, Scoring())
        return out, groups

    @pytest.mark.parametrize("window", [None, 1, 5, 100])
    @pytest.mark.parametrize("group", [1, 3])
    def test_equal_attention(self, group, window):
        pool = Pool(2, 16, 8, torch.float64, num_blocks=300)
        query_lens = {pool.add(length): queries for length, queries in self.LENGTHS}
        q = pool.random(sum(query_lens.values()), 2 * group, 16)
        out, groups = self.attend(pool, query_lens, q, window)
        rows = q.split(list(query_lens.values()))
        expected = [attention(r, *pool.sequences[i][1:], window) for i, r in zip(query_lens, rows, strict=True)]
        torch.testing.assert_close(out, torch.cat(expected), rtol=1e-12, atol=1e-12)
        assert 3 < len(groups) < len(query_lens)  # some go together
        assert max(len(chunks.tiles) for chunks in groups) == 3  # 300 queries

    def test_what_goes_together_is_bounded_in_size_and_in_padding(self, monkeypatch):
        monkeypatch.setattr("nanopage.kernels.chunks.GROUP_SCORES", 4 * 100 * 100 * 3)
        group_chunks.cache_clear()
        groups = group_chunks((100,) * 7 + (10,), (100,) * 8, 4, 8, None, torch.float64, torch.device("cpu"))
        group_chunks.cache_clear()
        assert sorted(len(chunks.rows) for chunks in groups) == [1, 1, 3, 3]
        assert len(groups) == 4

    def test_bfloat16_goes_in_tiles(self):
        pool = Pool(2, 64, 16, torch.bfloat16, num_blocks=64)
        query_lens = {pool.add(5): 1, pool.add(150): 150, pool.add(140): 140, pool.add(300): 20}
        q = pool.random(sum(query_lens.values()), 6, 64)
        out = grouped(q, pool.cache, *pool.metadata(query_lens), Scoring())
        rows = q.double().split(list(query_lens.values()))
        exact = [
            attention(r, *(x.double() for x in pool.sequences[i][1:])) for i, r in zip(query_lens, rows, strict=True)
        ]
        torch.testing.assert_close(out.double(), torch.cat(exact), rtol=2**-6, atol=2**-5)

    def test_large_scores_are_not_rounded(self):
        """Keys with a large bias, as Qwen2's: scores differ by less than bfloat16 can tell at their size."""
        pool = Pool(1, 64, 16, torch.bfloat16, num_blocks=16)
        index = pool.add(100)
        table, k, v = pool.sequences[index]
        k[..., 0] += 400  # exact scores stay apart by tens
        slots = torch.tensor(table)[torch.arange(100) // 16] * 16 + torch.arange(100) % 16
        pages.write(k, v, pool.cache, slots)
        q = pool.random(100, 1, 64)
        q[..., 0] = 8.0
        out = grouped(q, pool.cache, *pool.metadata({index: 100}), Scoring())
        exact = attention(q.double(), k.double(), v.double())
        torch.testing.assert_close(out.double(), exact, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
class TestPages:
    def test_write_fills_the_slots_it_is_given_and_no_others(self, block_size):
        generator = torch.Generator().manual_seed(0)
        cache = torch.randn((2, 5, 3, 4 * block_size), generator=generator)
        k, v = torch.randn((2, 11, 3, 4), generator=generator)
        slots = torch.randperm(5 * block_size, generator=generator)[:11]
        expected = cache.clone()
        for token, slot in enumerate(slots.tolist()):
            block, offset = divmod(slot, block_size)
            expected[0, block].view(3, 4, block_size)[:, :, offset] = k[token]
            expected[1, block].view(3, block_size, 4)[:, offset] = v[token]
        pages.write(k, v, cache, slots)
        assert torch.equal(cache, expected)

    def test_write_takes_slices_of_a_wider_tensor_and_one_layer_of_the_cache_of_all(self, block_size):
        heads = torch.randn((6, 4 + 2 + 2, 4), generator=torch.Generator().manual_seed(0))
        _, k, v = heads.split([4, 2, 2], dim=1)
        cache = torch.zeros(3, 2, 3, 2, 4 * block_size)
        pages.write(k, v, cache.unbind(0)[1], torch.arange(6) + block_size)
        k_pages, v_pages = pages.views(cache[1], 4)
        assert torch.equal(k_pages[1, :, :, :6].permute(2, 0, 1), k)
        assert torch.equal(v_pages[1, :, :6].transpose(0, 1), v)
        assert cache.count_nonzero() == 2 * k.numel()

    def test_gather_gives_what_was_written_in_the_order_of_the_tables(self, block_size):
        k, v = torch.randn((2, 3 * block_size, 2, 4), generator=torch.Generator().manual_seed(0))
        cache = torch.zeros(2, 5, 2, 4 * block_size)
        tables = torch.tensor([[4, 0, 2], [0, 4, 4]])
        slots = (tables[0][:, None] * block_size + torch.arange(block_size)).flatten()
        pages.write(k, v, cache, slots)
        gathered_k, gathered_v = pages.gather(cache, tables, 4)
        order = torch.arange(3 * block_size).view(3, -1)[[1, 0, 0]].flatten()
        for row, tokens in enumerate((slice(None), order)):
            assert torch.equal(gathered_k[row], k[tokens].permute(1, 2, 0))
            assert torch.equal(gathered_v[row], v[tokens].transpose(0, 1))


@pytest.mark.parametrize("window", [None, 4])
def test_what_a_step_writes_it_sees(window):
    pool = Pool(2, 16, 8, torch.float64)
    decode, chunk = pool.add(12), pool.add(21)
    block_tables, query_lens, seq_lens = pool.metadata({decode: 1, chunk: 6})
    (table, k1, v1), (other_table, k2, v2) = pool.sequences
    slots = torch.tensor([table[1] * 8 + 3] + [other_table[p // 8] * 8 + p % 8 for p in range(15, 21)])
    expected = pool.cache.clone()
    nan = torch.full((7, 2, 16), torch.nan, dtype=pool.dtype)
    pages.write(nan, nan, pool.cache, slots)  # not there before
    q = pool.random(7, 6, 16)
    k, v = torch.cat([k1[-1:], k2[-6:]]), torch.cat([v1[-1:], v2[-6:]])
    step = GroupedAttention(slots, block_tables, query_lens, seq_lens)
    step.write(k, v, pool.cache)
    out = step.attend(q, pool.cache, Scoring(window))
    assert torch.equal(pool.cache.view(torch.uint8), expected.view(torch.uint8))
    torch.testing.assert_close(out, torch.cat([attention(q[:1], k1, v1, window), attention(q[1:], k2, v2, window)]))


def quantize(module):
    tile(module, "int8")


def test_weights_that_float16_does_not_have_are_found():
    linear = Linear(3, 2).requires_grad_(False)
    linear.weight.matrix.copy_(torch.tensor([[1.5, -65504, 0], [2**-24, 0.25, 3]]))
    assert has_only_float16(torch.nn.Sequential(linear))
    for other in (65520.0, 1 + 2**-12, 2**-26):
        linear.weight.matrix[1, 2] = other
        assert not has_only_float16(torch.nn.Sequential(linear))


class Tied(torch.nn.Module):
    """An embedding, a head tied to it, and a layer of two Linears."""

    def __init__(self, weight, head_first=False):
        super().__init__()
        vocab_size, hidden_size = weight.shape
        embedding, head = Embedding(vocab_size, hidden_size), Linear(hidden_size, vocab_size)
        embedding.weight = head.weight
        head.weight.matrix = torch.nn.Parameter(weight.clone(), requires_grad=False)
        parts = {"embed_tokens": embedding, "lm_head": head}
        for name in reversed(parts) if head_first else parts:
            setattr(self, name, parts[name])
        self.layers = torch.nn.Sequential(Linear(hidden_size, {"q": 64, "k": 64}, bias=True), Linear(128, hidden_size))
        for parameter in self.layers.parameters():
            parameter.requires_grad_(False).normal_(generator=torch.Generator().manual_seed(1)).to(weight.dtype)
        self.to(weight.dtype)
        assert self.lm_head.weight is self.embed_tokens.weight


@pytest.mark.parametrize("head_first", [False, True], ids=["embedding first", "head first"])
@pytest.mark.parametrize(
    ("module", "convert"), [(packed_linear, pack), (tile_linear, quantize)], ids=["packed", "quantized"]
)
@pytest.mark.usefixtures("quick_collections")
def test_one_matrix_at_a_time_exists_twice(module, convert, head_first, monkeypatch):
    model = Tied(torch.randn(192, 64), head_first)
    alive = [weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2]
    assert len(alive) == 3  # the tied one is one
    name, seen = "pack" if module is packed_linear else "tile", []
    convert_weight = getattr(module, name)

    def count(weight, *arguments):
        gc.collect()
        seen.append(sum(reference() is not None for reference in alive))
        return convert_weight(weight, *arguments)

    packed_linear.tile_width(torch.float32)  # packs a small weight once
    monkeypatch.setattr(module, name, count)
    convert(model)
    gc.collect()
    assert seen == [3, 2, 1]
    assert not any(reference() for reference in alive)
    assert sum(parameter.numel() for parameter in model.parameters()) == 128  # a bias


@pytest.mark.parametrize("vocab_size", [192, 300], ids=["tiles", "no tiles"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_only_an_embedding_tied_to_a_head_with_tiles_is_replaced_by_packing(vocab_size, tied):
    model = Tied(torch.randn(vocab_size, 64))
    weight = model.lm_head.weight.matrix
    if not tied:
        model.embed_tokens = Embedding(vocab_size, 64).requires_grad_(False)
        model.embed_tokens.weight.matrix.normal_()
    ids = torch.tensor([3, 191, 64])
    expected = model.embed_tokens(ids)
    pack(model)
    assert isinstance(model.embed_tokens.weight, PackedWeight) == (tied and vocab_size == 192)
    assert torch.equal(model.embed_tokens(ids), expected)
    assert (model.lm_head.weight.tiles is not None) == (vocab_size == 192)
    x = torch.randn(5, 64)
    torch.testing.assert_close(model.lm_head(x), x @ weight.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("convert", [pack, quantize])
def test_a_layer_by_itself_can_be_converted(convert):
    """As it is for compiling: without an embedding, and packed for a single row."""
    model = Tied(torch.randn(192, 64))
    kind, arguments = (PackedRowWeight, [PackedRowWeight]) if convert is pack else (TiledWeight, [])
    x = torch.randn(1, 64)
    expected = model.layers[0](x)
    convert(model.layers, *arguments)
    assert [type(layer.weight) for layer in model.layers] == [kind, kind]
    tolerance = 1e-4 if convert is pack else 0.3
    torch.testing.assert_close(model.layers[0](x), expected, rtol=tolerance, atol=tolerance)
    assert isinstance(model.lm_head.weight, Floats) and isinstance(model.embed_tokens.weight, Floats)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
class TestPackedWeight:
    """oneDNN's products and our own over its memory, on sizes that are tiles of 64 and on others."""

    @pytest.fixture(autouse=True)
    def _needs_one_dnn(self, dtype):
        if not packed_linear.can_pack(dtype):
            pytest.skip(f"oneDNN does not multiply in {dtype} on this CPU")

    def random(self, dtype, *shapes):
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    def check(self, out, x, weight, bias, dtype):
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert out.dtype == dtype
        rtol, atol = (2**-7, 0.05) if dtype == torch.bfloat16 else (1e-5, 1e-4)
        torch.testing.assert_close(out.double(), exact, rtol=rtol, atol=atol)

    @pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
    @pytest.mark.parametrize("num_rows", [1, 2, 33])
    def test_equals_the_plain_product(self, num_rows, with_bias, dtype):
        x, weight, bias = self.random(dtype, (num_rows, 48), (80, 48), (80,))
        out = torch.ops.nanopage.packed_linear(x, packed_linear.pack(weight), bias if with_bias else None)
        self.check(out, x, weight, bias if with_bias else None, dtype)

    @pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
    @pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (192, 576), (576, 1536)])
    def test_a_single_row_over_the_tiles(self, out_features, in_features, with_bias, dtype):
        x, weight, bias = self.random(dtype, (1, in_features), (out_features, in_features), (out_features,))
        packed = packed_linear.pack(weight)
        tiles = packed_linear.tiles_of(packed, weight)
        assert tiles is not None
        assert tiles.data_ptr() == torch.ops.mkldnn.data_ptr(packed)  # one copy
        out = packed_linear.matvec(x, tiles, bias if with_bias else None)
        assert out.shape == (1, out_features)
        self.check(out, x, weight, bias if with_bias else None, dtype)

    def test_rows_are_those_of_the_weight(self, dtype):
        (weight,) = self.random(dtype, (192, 576))
        packed = packed_linear.pack(weight)
        tiles = packed_linear.tiles_of(packed, weight)
        ids = torch.tensor([0, 191, 63, 64, 64, 5])
        assert torch.equal(packed_linear.rows(tiles, ids), weight[ids])

    @pytest.mark.parametrize(("out_features", "in_features"), [(80, 48), (33, 17), (63, 64)])
    def test_a_layout_that_is_not_tiles_is_left_to_one_dnn(self, out_features, in_features, dtype):
        (weight,) = self.random(dtype, (out_features, in_features))
        assert packed_linear.tiles_of(packed_linear.pack(weight), weight) is None

    def test_a_layout_that_only_looks_like_tiles_is_recognized(self, dtype):
        weight, other = self.random(dtype, (128, 64), (128, 64))
        assert packed_linear.tiles_of(packed_linear.pack(other), weight) is None

    def test_a_tied_embedding_reads_the_packed_head(self, dtype):
        (weight,) = self.random(dtype, (192, 576))
        model = Tied(weight)
        pack(model)
        ids = torch.tensor([3, 191, 64])
        assert torch.equal(model.embed_tokens(ids), weight[ids])
        assert model.embed_tokens.weight is model.lm_head.weight  # one copy
        assert list(model.embed_tokens.parameters()) == list(model.lm_head.parameters()) == []

    @pytest.mark.parametrize("out_features", [192, 80], ids=["tiles", "no tiles"])
    @pytest.mark.parametrize("kind", [PackedWeight, PackedRowWeight])
    def test_a_packed_layer_of_a_single_row(self, kind, out_features, dtype):
        """What is compiled for one token: a loop over the tiles, or oneDNN's product where there are none."""
        x, weight, bias = self.random(dtype, (1, 576), (out_features, 576), (out_features,))
        packed = kind(weight)
        assert (packed.tiles is None) == (out_features == 80)
        self.check(packed.product(x, bias), x, weight, bias, dtype)


class TestTiledWeight:
    """Quantized weights, on sizes that fill their tiles and others."""

    SIZES = pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (300, 17), (33, 576)])

    def weight(self, out_features, in_features, dtype=torch.float32):
        weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
        weight *= torch.logspace(-3, 3, out_features)[:, None]  # each output has a scale of its own
        weight[out_features // 2] = 0
        return weight.to(dtype)

    def dequantized(self, weight):
        tiles, ids = tile_linear.tile(weight, torch.int8), torch.arange(len(weight))
        return tile_linear.rows(*tiles, ids, weight.shape[1], torch.float32)

    @SIZES
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    def test_rounds_to_the_nearest_of_255_steps(self, out_features, in_features, dtype):
        weight = self.weight(out_features, in_features, dtype)
        step = weight.float().abs().amax(1, keepdim=True) / 127
        assert ((self.dequantized(weight) - weight.float()).abs() <= step * 0.5001).all()
        assert not self.dequantized(weight)[out_features // 2].any()

    def test_is_one_byte_a_weight_and_loses_no_integers(self):
        weight = torch.randint(-127, 128, (128, 64), generator=torch.Generator().manual_seed(0)).float()
        weight[:, 3] = -127
        tiles, scales = tile_linear.tile(weight, torch.int8)
        assert (tiles.itemsize, tiles.numel(), scales.numel()) == (1, weight.numel(), len(weight))
        assert torch.equal(self.dequantized(weight), weight)

    @SIZES
    @pytest.mark.parametrize("num_rows", [1, 2, 16, 17])
    def test_products_are_those_of_the_rounded_values(self, num_rows, out_features, in_features):
        weight = self.weight(out_features, in_features)
        x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1))
        rounded = self.dequantized(weight).double()
        for dtype, rtol in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
            out = tile_linear.product(x.to(dtype), *tile_linear.tile(weight, torch.int8))[:, :out_features]
            inputs = tile_linear.round_activations(x.to(dtype).double())
            exact, size = inputs @ rounded.T, inputs.abs() @ rounded.abs().T
            assert out.dtype == dtype
            assert ((out.double() - exact).abs() <= rtol * size).all()

    def test_a_tied_embedding_reads_the_quantized_head(self):
        weight = self.weight(192, 48, torch.bfloat16)
        model = Tied(weight)
        quantize(model)
        ids = torch.tensor([3, 191, 64])
        assert isinstance(model.embed_tokens.weight, TiledWeight)
        assert torch.equal(model.embed_tokens(ids), self.dequantized(weight)[ids].bfloat16())
        assert model.embed_tokens.weight is model.lm_head.weight  # one copy
        assert list(model.embed_tokens.parameters()) == list(model.lm_head.parameters()) == []

    @SIZES
    def test_a_quantized_layer_leaves_out_what_fills_its_last_tile(self, out_features, in_features):
        weight = self.weight(out_features, in_features)
        x = torch.randn(5, in_features, generator=torch.Generator().manual_seed(1))
        tiles, scales = tile_linear.tile(weight, torch.int8)
        tiled = TiledWeight(out_features, in_features, tiles, scales, torch.float32)
        out = tiled.product(x, torch.full((out_features,), 3.0))
        assert out.shape == (5, out_features)
        exact = tile_linear.round_activations(x) @ self.dequantized(weight).T
        size = x.abs() @ self.dequantized(weight).abs().T + 3
        assert ((out - 3 - exact).abs() <= 1e-5 * size).all()
