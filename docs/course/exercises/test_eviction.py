import random

import pytest

from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.view.invariants import check_blocks

SIZE = 4


def serve(manager, seq_id, tokens):
    """Run one request and end it. Returns how many of its tokens were found in the cache."""
    hit = manager.allocate(seq_id, manager.lookup(tokens))
    assert manager.grow(seq_id, hit, len(tokens))
    manager.register(seq_id, tokens, len(tokens))
    manager.free(seq_id)
    check_blocks(manager)
    return hit


def prefix(name, parent=None):
    return Prefix(name.encode(), parent, (), "", ord(name[0]))


def test_few_hits_go_first_and_of_equal_ones_the_least_recently_used(exercise):
    a, b, c = prefix("a"), prefix("b"), prefix("c")
    assert exercise.choose([a, b, c], {b"a": 3, b"b": 1, b"c": 2}) is b
    assert exercise.choose([b, c, a], {b"a": 1, b"b": 1, b"c": 1}) is b
    assert exercise.choose([c, a, b], {b"c": 1}) is a


def test_a_block_does_not_go_before_those_that_continue_it(exercise):
    a = prefix("a")
    b = prefix("b", a)
    c = prefix("c", b)
    assert exercise.choose([a, b, c], {}) is c
    assert exercise.choose([a, b], {b"b": 9}) is b
    again = prefix("a")  # evicted, and registered anew: the same block of text, another object
    assert exercise.choose([again, c, b], {}) is c
    assert exercise.choose([again, b], {b"b": 9}) is b


@pytest.mark.parametrize("kind", ["least recently used", "ours"])
def test_many_documents_do_not_evict_what_chats_begin_with(exercise, kind):
    manager = (exercise.FrequencyBlockManager if kind == "ours" else BlockManager)(12, SIZE)
    system = list(range(100, 108))
    for number in range(5):
        serve(manager, number, [*system, number, number, number])
    for number in range(20):
        serve(manager, 100 + number, [1000 + 50 * number + i for i in range(18)])
    assert serve(manager, 999, [*system, 1, 2, 3]) == (8 if kind == "ours" else 0)


@pytest.mark.parametrize("seed", range(5))
def test_random_requests(exercise, seed):
    rng = random.Random(seed)
    manager = exercise.FrequencyBlockManager(10, SIZE)
    for number in range(300):
        beginning = [rng.randrange(3)] * (SIZE * rng.randrange(4))
        serve(manager, number, [*beginning, *(rng.randrange(2) for _ in range(rng.randint(1, 3 * SIZE)))])
        for entry in manager.prefixes.cached.values():  # every cached block can be found
            parent = entry.parent
            assert parent is None or parent.hash in manager.prefixes.by_hash, "a block went before its child"
    assert manager.prefixes.num_evictions > 0
