"""Sliding windows and states: which blocks of a table no later token sees."""

from collections.abc import Iterator, Sequence
from itertools import islice

from nanopage.state.layer_kinds import STATE, first_blocks
from nanopage.step import NO_BLOCK


def entries_behind(
    table: list[int], windows: Sequence[int | None], position: int, block_size: int
) -> Iterator[tuple[int, int]]:
    """(index, block) of each block in a table that queries from `position` on do not see.

    The caller replaces each by NO_BLOCK before the next call: the search ends at the first NO_BLOCK. The blocks between
    two states are NO_BLOCK already, so for states it ends behind the first block that it finds.
    """
    num_kinds = len(windows)
    for kind, first in enumerate(first_blocks(windows, position, block_size)):
        begin = end = first * num_kinds + kind
        if windows[kind] == STATE:
            places = range(begin - num_kinds, -1, -num_kinds)
            yield from islice(((index, table[index]) for index in places if table[index] != NO_BLOCK), 1)
            continue
        while begin >= num_kinds and table[begin - num_kinds] != NO_BLOCK:
            begin -= num_kinds
        yield from ((index, table[index]) for index in range(begin, end, num_kinds))
