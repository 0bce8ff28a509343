import random
from dataclasses import replace

import pytest

from nanopage.engine.block_manager import BlockManager
from nanopage.step import Item

CAT, DOG = bytes(range(32)), bytes(range(100, 132))


def picture(position, length=4, of=CAT, cost=3, whole=False):
    return Item("image", position, length, of, {}, cost, whole)


def test_text_keeps_its_token_ids_and_pictures_get_negative_numbers(exercise):
    keys = exercise.keys_of([5, 6, 9, 9, 9, 9, 7], [picture(2)])
    assert [keys[0], keys[1], keys[6]] == [5, 6, 7]
    assert all(-(2**63) <= key < 0 for key in keys[2:6]) and len({*keys[2:6]}) == 4


def test_a_picture_has_the_same_numbers_wherever_it_is(exercise):
    here = exercise.keys_of([9] * 4 + [1, 2], [picture(0)])
    there = exercise.keys_of([3, 4, 5] + [9] * 4, [picture(3)])
    assert here[:4] == there[3:]
    longer = exercise.keys_of([9] * 6, [picture(0, 6)])
    assert longer[:4] == here[:4]


def test_other_pictures_have_other_numbers_at_each_token(exercise):
    cat, dog = (exercise.keys_of([9] * 4, [picture(0, of=of)]) for of in (CAT, DOG))
    assert not {*cat} & {*dog}


def test_the_token_ids_are_not_changed(exercise):
    token_ids = [1, 9, 9, 9, 9]
    exercise.keys_of(token_ids, [picture(1)])
    assert token_ids == [1, 9, 9, 9, 9]


def test_prompts_share_the_blocks_before_the_first_picture_that_differs(exercise):
    token_ids = [1, 2, 3, 9, 9, 9, 9, 4, 9, 9, 9, 9, 5]
    manager = BlockManager(16, 2)

    def cached(*pictures):
        items = [picture(position, of=of) for position, of in zip((3, 8), pictures, strict=True)]
        keys = exercise.keys_of(token_ids, items)
        hit = manager.allocate(0, manager.lookup(keys))
        manager.grow(0, hit, len(keys))
        manager.register(0, keys, len(keys))
        manager.free(0)
        return hit

    assert [cached(CAT, DOG), cached(CAT, DOG), cached(CAT, CAT), cached(DOG, CAT)] == [0, 12, 8, 2]


def test_a_chunk_ends_before_a_picture_that_must_not_be_cut(exercise):
    items = [picture(4, 4, whole=True), picture(8, 6, whole=True)]
    assert [exercise.chunk(0, most, items, 100) for most in (3, 4, 6, 8, 9, 14, 20)] == [3, 4, 4, 8, 8, 14, 20]
    assert [exercise.chunk(4, most, items, 100) for most in (1, 4, 6, 10)] == [4, 4, 4, 10]
    assert exercise.chunk(14, 3, items, 100) == 3


def test_a_chunk_ends_before_a_picture_that_would_exceed_the_budget(exercise):
    items = [picture(2, cost=3), picture(6, cost=3), picture(10, cost=9)]
    assert [exercise.chunk(0, 20, items, budget) for budget in (1, 5, 6, 14, 15)] == [6, 6, 10, 10, 20]
    assert exercise.chunk(3, 20, items, 3) == 7, "the first picture has begun before"
    assert exercise.chunk(10, 20, items, 3) == 20, "it would never run otherwise"


@pytest.mark.parametrize("seed", range(3))
def test_random_prompts(exercise, seed):
    rng = random.Random(seed)
    for _ in range(300):
        items, end = [], 0
        for _ in range(rng.randrange(4)):
            end += rng.randrange(5)
            item = picture(end, rng.randint(1, 5), cost=rng.randint(1, 6), whole=rng.random() < 0.5)
            items.append(replace(item, hash=rng.randbytes(32)))
            end += items[-1].length
        start, most, budget = rng.randrange(end + 3), rng.randint(1, 12), rng.randint(1, 10)
        if any(item.whole and item.position < start < item.position + item.length for item in items):
            continue

        def fits(count, start=start, budget=budget, items=items):
            after = start + count
            costs = [item.cost for item in items if start <= item.position < after]
            cut = any(item.whole and item.position < after < item.position + item.length for item in items)
            return not cut and (len(costs) <= 1 or sum(costs) <= budget)

        whole = [item.length for item in items if item.position == start]
        expected = max(filter(fits, range(1, most + 1)), default=max(whole, default=0))
        assert exercise.chunk(start, most, items, budget) == expected
