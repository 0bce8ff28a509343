import random

import pytest
from dry import Sequence


class Pool:
    """A manager, and a token for each slot: what the K and V of that token would be."""

    def __init__(self, exercise, num_blocks, block_size=4):
        self.manager = exercise.ForkingBlockManager(num_blocks, block_size)
        self.slots = [None] * (num_blocks * block_size)

    def write(self, seq, tokens):
        """Append tokens to a sequence as a step does. Returns False if there are no blocks."""
        manager, size = self.manager, self.manager.block_size
        if not manager.grow(seq, seq.num_computed + len(tokens)):
            return False
        for source, target in manager.copies:
            self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]
        manager.copies.clear()
        seq.token_ids += tokens
        for slot, token in zip(manager.slots(seq, seq.num_computed, len(seq.token_ids)), tokens, strict=True):
            self.slots[slot] = token
        seq.num_computed = len(seq.token_ids)
        return True

    def read(self, seq):
        return [self.slots[slot] for slot in self.manager.slots(seq, 0, seq.num_computed)]

    def check(self, seqs):
        """Blocks are counted, and every sequence reads its own tokens."""
        manager = self.manager
        tables = [block for seq in seqs for block in seq.block_table]
        for block, count in enumerate(manager.ref_counts):
            assert count == tables.count(block), f"block {block} is in {tables.count(block)} tables, not {count}"
            assert (count == 0) == (block in manager.free_blocks), f"block {block}"
        assert len(set(manager.free_blocks)) == len(manager.free_blocks), "a block is free twice"
        for seq in seqs:
            assert self.read(seq) == seq.token_ids, seq.request_id


@pytest.fixture
def new():
    return lambda name: Sequence(name, [], 100)


def forked(pool, new, tokens):
    parent, child = new("parent"), new("child")
    assert pool.write(parent, tokens)
    pool.manager.fork(parent, child)
    child.token_ids, child.num_computed = list(parent.token_ids), parent.num_computed
    return parent, child


def test_a_fork_takes_no_blocks(exercise, new):
    pool = Pool(exercise, 8)
    parent, child = forked(pool, new, [1, 2, 3, 4, 5, 6])
    assert child.block_table == parent.block_table and child.block_table is not parent.block_table
    assert len(pool.manager.free_blocks) == 6
    pool.check([parent, child])


def test_who_writes_to_a_shared_block_first_gets_a_copy_and_the_last_owner_writes_in_place(exercise, new):
    pool = Pool(exercise, 8)
    parent, child = forked(pool, new, [1, 2, 3, 4, 5, 6])
    shared = list(parent.block_table)
    assert pool.write(child, [70])
    assert child.block_table[0] == shared[0] and child.block_table[1] != shared[1]
    assert pool.write(parent, [80])
    assert parent.block_table == shared
    assert len(pool.manager.free_blocks) == 5
    pool.check([parent, child])


def test_full_blocks_are_not_copied(exercise, new):
    pool = Pool(exercise, 8)
    parent, child = forked(pool, new, [1, 2, 3, 4])
    assert pool.write(child, [70]) and pool.write(parent, [80])
    assert child.block_table[0] == parent.block_table[0] and child.block_table[1] != parent.block_table[1]
    assert len(pool.manager.free_blocks) == 5
    pool.check([parent, child])


def test_too_few_blocks_change_nothing(exercise, new):
    pool = Pool(exercise, 3)
    parent, child = forked(pool, new, [1, 2, 3, 4, 5, 6])
    before = list(child.block_table), list(pool.manager.ref_counts), list(pool.manager.free_blocks)
    assert not pool.manager.grow(child, 9)  # a copy and a new block, and one is free
    assert (child.block_table, pool.manager.ref_counts, pool.manager.free_blocks) == before
    assert pool.manager.copies == []
    pool.check([parent, child])


def test_a_block_is_free_when_its_last_owner_ends(exercise, new):
    pool = Pool(exercise, 8)
    parent, child = forked(pool, new, [1, 2, 3, 4, 5, 6])
    pool.manager.free(parent)
    assert parent.block_table == [] and len(pool.manager.free_blocks) == 6
    pool.check([child])
    pool.manager.free(child)
    assert len(pool.manager.free_blocks) == 8
    pool.check([])


@pytest.mark.parametrize("seed", range(10))
def test_random_forks(exercise, new, seed):
    rng = random.Random(seed)
    pool, seqs = Pool(exercise, 12), []
    for number in range(300):
        action = rng.choice(["start", "fork", "write", "write", "write", "end"])
        if action == "start" and len(seqs) < 6:
            seqs.append(new(f"sequence {number}"))
        elif action == "fork" and 0 < len(seqs) < 6:
            parent, child = rng.choice(seqs), new(f"sequence {number}")
            pool.manager.fork(parent, child)
            child.token_ids, child.num_computed = list(parent.token_ids), parent.num_computed
            seqs.append(child)
        elif action == "write" and seqs:
            pool.write(rng.choice(seqs), [1000 * number + i for i in range(rng.randint(1, 6))])
        elif action == "end" and seqs:
            pool.manager.free(seqs.pop(rng.randrange(len(seqs))))
        pool.check(seqs)
