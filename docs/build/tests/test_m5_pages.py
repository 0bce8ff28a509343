from functools import partial

import torch
from built.attention import attend, attend_one, paged_attention
from built.blocks import BlockManager, Sequence
from built.cache import PagedCache, Step, prepare


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


def example():
    """The step of the example on the page, with q, k and v. Of K and V, the first tokens of A are written already."""
    slots = torch.tensor([23, 8, 9, 24])
    tables, rows, positions = torch.tensor([[5, 2], [6, -1]]), torch.tensor([0, 0, 0, 1]), torch.tensor([3, 4, 5, 0])
    step = Step(torch.tensor([4, 5, 6, 7]), positions, slots, rows, tables, torch.tensor([2, 3]))
    return step, *torch.randn(3, 4, 2, 8, dtype=torch.float64).unbind()


def test_attend_writes_k_and_v_to_their_slots(model):
    (step, q, k, v), cache = example(), PagedCache(model, 8, block_size=4)
    cache.kv = torch.zeros(2, 2, 9, 4, 2, 8, dtype=torch.float64)
    seen = []
    cache.attend(step, lambda *args: seen.append(args) or q, 1, q, k, v)
    for name, written, values in zip("KV", cache.kv[1], (k, v), strict=True):
        for slot, value in zip(step.slot_mapping.tolist(), values, strict=True):
            assert written[slot // 4, slot % 4].equal(value), f"slot {slot} does not have its {name}"
    assert cache.kv.any(dim=(1, 4, 5)).sum() == 4, "other slots have changed"
    (arguments,) = seen
    assert arguments[1].equal(cache.kv[1, 0]), "attention must see the K of this step"


def test_each_token_sees_its_own_sequence_up_to_itself():
    step, q, *_ = example()
    keys, values = torch.randn(2, 9, 4, 1, 8, dtype=torch.float64).unbind()
    out = paged_attention(q, keys, values, step.block_tables, step.rows, step.positions)
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    for token, slots in enumerate(([20, 21, 22, 23], [20, 21, 22, 23, 8], [20, 21, 22, 23, 8, 9], [24])):
        expected = attend_one(q[token], flat_keys[slots], flat_values[slots])
        torch.testing.assert_close(out[token], expected, msg=f"token {token} must see the slots {slots} and no others")


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
