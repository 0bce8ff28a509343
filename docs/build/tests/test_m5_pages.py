from functools import partial

import torch
from built.attention import attend, paged_attention
from built.blocks import BlockManager, Sequence
from built.cache import PagedCache, prepare


def test_a_table_grows_by_the_blocks_that_are_missing():
    blocks, seq = BlockManager(5, block_size=4), Sequence("A", [7] * 20, 9)
    assert blocks.grow(seq, 1) and seq.block_table == [0]
    assert blocks.grow(seq, 4) and seq.block_table == [0]
    assert blocks.grow(seq, 9) and seq.block_table == [0, 1, 2]
    assert blocks.num_free == 2 and blocks.ref_counts == {0: 1, 1: 1, 2: 1}


def test_too_few_blocks_change_nothing():
    blocks, a, b = BlockManager(5, block_size=4), Sequence("A", [7] * 9, 9), Sequence("B", [7] * 12, 9)
    assert blocks.grow(a, 9)
    assert not blocks.grow(b, 12)
    assert b.block_table == [] and blocks.num_free == 2


def test_freed_blocks_are_taken_again():
    blocks, a, b = BlockManager(3, block_size=4), Sequence("A", [7] * 9, 9), Sequence("B", [7] * 12, 9)
    assert blocks.grow(a, 9)
    blocks.free(a)
    assert a.block_table == [] and blocks.num_free == 3 and blocks.ref_counts == {}
    assert blocks.grow(b, 12) and sorted(b.block_table) == [0, 1, 2]


def test_a_step_says_where_everything_goes():
    blocks, a, b = BlockManager(8, block_size=4), Sequence("A", [1, 2, 3, 4, 5, 6], 9), Sequence("B", [7, 8], 9)
    a.block_table, a.num_computed, b.block_table = [5, 2], 3, [6]
    step = prepare([(a, 3), (b, 1)], blocks)
    assert step.token_ids.tolist() == [4, 5, 6, 7]
    assert step.positions.tolist() == [3, 4, 5, 0]
    assert step.slot_mapping.tolist() == [23, 8, 9, 24]
    assert step.rows.tolist() == [0, 0, 0, 1]
    assert step.block_tables.tolist() == [[5, 2], [6, -1]]
    assert step.last.tolist() == [2, 3]


def test_pages_change_no_hidden_state(model, prompts):
    """Three sequences, in three steps of different shapes, in blocks that lie anywhere."""
    blocks = BlockManager(12, block_size=4)
    blocks.free_blocks = [3, 11, 0, 8, 5, 1, 10, 7, 2, 9, 4, 6]
    cache = PagedCache(model, 12, block_size=4)
    cache.kv[:, :, :-1] = 1e6  # what nobody has written
    seqs = [Sequence(name, tokens, 9) for name, tokens in zip("ABC", prompts([13, 5, 8]), strict=True)]
    hidden = {seq: [] for seq in seqs}
    for counts in ((6, 5, 1), (1, 0, 1), (6, 0, 6)):
        batch = [(seq, count) for seq, count in zip(seqs, counts, strict=True) if count]
        assert all(blocks.grow(seq, seq.num_computed + count) for seq, count in batch)
        step = prepare(batch, blocks)
        out = model.forward(step.token_ids, step.positions, partial(cache.attend, step, paged_attention))
        for (seq, count), rows in zip(batch, out.split([count for _, count in batch]), strict=True):
            seq.num_computed += count
            hidden[seq].append(rows)
    for seq in seqs:
        ids = torch.tensor(seq.token_ids)
        alone = model.forward(ids, torch.arange(len(ids)), lambda layer, q, k, v: attend(q, k, v))
        torch.testing.assert_close(torch.cat(hidden[seq]), alone)
