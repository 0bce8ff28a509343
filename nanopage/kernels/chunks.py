"""Groups the chunks of a step, so that plain attention runs a few large operators instead of many small ones.

Here a chunk is the queries of one sequence in a step, so a decode is a chunk of one query. Chunks of similar sizes form
a group and are padded to the largest of them. A group is cut into tiles of TILE_QUERIES queries: attention then skips
the keys that lie behind a tile's last query.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

TILE_QUERIES = 128
# The largest sizes of a group of several chunks, in elements, small enough for the allocator to reuse the memory.
GROUP_SCORES = 2**22
GROUP_KEYS = 2**20


class Chunks(NamedTuple):
    """A group of chunks, padded to the most queries and keys of any of them.

    sequences  the sequence of each chunk
    rows       index into q of each query: int64 [chunks, queries]
    num_keys   length of the longest sequence
    tiles      (begin, end, first, last, mask): queries `begin` to `end` see all keys before `first`, none from `last`
               on, and the keys between according to `mask`: 0 or -inf, [chunks, 1, end - begin, last - first]. If the
               mask is None, they see all keys before `last`

    For example, a chunk of the queries at positions 4, 5 and 6 has the tile (0, 3, 4, 7, mask): all three see the keys
    0 to 3. The mask is for the keys 4 to 6:

        [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]
    """

    sequences: slice | list[int]
    rows: Tensor
    num_keys: int
    tiles: list[tuple[int, int, int, int, Tensor | None]]


@lru_cache(maxsize=4)  # every layer of a step with the same window needs the same groups
def group_chunks(
    query_lens: tuple[int, ...],
    seq_lens: tuple[int, ...],
    num_heads: int,
    key_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Chunks]:
    """Group the chunks of a step, whose queries follow each other in q. Padding adds at most a quarter to the scores of
    a group.

    Args: key_size: elements of one token's keys in a layer.
    """
    chunks = []  # (queries, keys, first row, sequence)
    row = 0
    for sequence, (num_queries, num_keys) in enumerate(zip(query_lens, seq_lens, strict=True)):
        chunks.append((num_queries, num_keys, row, sequence))
        row += num_queries
    groups: list[list[tuple[int, int, int, int]]] = []
    most_keys = area = 0  # of the last group; area is its number of scores without padding
    for chunk in sorted(chunks):  # by queries, so each chunk has the most queries of its group so far
        num_queries, num_keys, *_ = chunk
        most_keys, area = max(most_keys, num_keys), area + num_queries * num_keys
        keys = (len(groups[-1]) + 1 if groups else 1) * most_keys
        fits = keys * key_size <= GROUP_KEYS and keys * num_heads * min(num_queries, TILE_QUERIES) <= GROUP_SCORES
        if groups and fits and keys * num_queries <= 1.25 * area:
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
            most_keys, area = num_keys, num_queries * num_keys
    return [_pad(group, window, dtype, device) for group in groups]


def _pad(
    group: list[tuple[int, int, int, int]], window: int | None, dtype: torch.dtype, device: torch.device
) -> Chunks:
    """The indices and masks of one group."""
    num_queries, num_keys, row, sequences = (list(column) for column in zip(*group, strict=True))
    most = torch.tensor(num_queries)[:, None] - 1
    offsets = torch.arange(max(num_queries)).minimum(most)  # a chunk with fewer queries repeats its last one
    positions = offsets + torch.tensor(num_keys)[:, None] - 1 - most
    tiles: list[tuple[int, int, int, int, Tensor | None]] = []
    for begin in range(0, max(num_queries), TILE_QUERIES):
        end = min(begin + TILE_QUERIES, max(num_queries))
        inside = positions[:, begin:end, None]
        first, last = 0 if window is not None else int(inside.min()), int(inside.max()) + 1
        keys = torch.arange(first, last)
        hidden = keys > inside
        if window is not None:
            hidden |= keys <= inside - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None].to(device)
        tiles.append((begin, end, first, last, mask if hidden.any() else None))
    rows = offsets + torch.tensor(row)[:, None]
    which = sequences if len(group) > 1 else slice(sequences[0], sequences[0] + 1)
    return Chunks(which, rows.to(device), max(num_keys), tiles)
