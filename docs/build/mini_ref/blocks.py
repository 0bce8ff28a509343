"""Sequences, and which block holds which of their tokens: pages (milestone 5), prefixes (8), forks (9)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import takewhile


@dataclass(eq=False)
class Sequence:
    """One answer to a request: its tokens, of which the first `num_computed` have K and V in the blocks of its table.

    With one token left to compute, it decodes; with more, it is in prefill. A request for n answers begins as one
    sequence. The others, with an `index` from 1 on, are its `forks`, which begin with its blocks after the prompt.
    """

    request_id: str
    token_ids: list[int]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    index: int = 0
    forks: list["Sequence"] = field(default_factory=list)
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def ended(self) -> bool:
        return len(self.output) >= self.max_tokens or any(token in self.stop_ids for token in self.output[-1:])


class BlockManager:
    """Gives out the blocks of the KV cache (PagedAttention, Kwon et al., 2023). A block is always one of

    free     in `free_blocks`; its contents have no meaning
    used     in at least one block table; `ref_counts` says in how many
    cached   in no table, but its contents are a known prefix; in `cached`, in the order of eviction
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks = list(range(num_blocks - 1, -1, -1))  # the last one is taken first
        self.ref_counts: dict[int, int] = {}
        self.cached: dict[int, None] = {}
        self.block_of: dict[bytes, int] = {}  # the hash of a prefix -> the block with the last tokens of the prefix
        self.hash_of: dict[int, bytes] = {}  # the reverse
        self.copies: list[tuple[int, int]] = []  # (source, target) to copy before the next step, in this order

    @property
    def num_free(self) -> int:  # blocks that can be given out
        return len(self.free_blocks) + len(self.cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Where in the cache the K and V of the tokens from `start` to `end` are: block * block_size + offset."""
        size = self.block_size
        return [seq.block_table[position // size] * size + position % size for position in range(start, end)]

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make a table ready for writing the tokens from `seq.num_computed` up to `num_tokens`. Of the blocks written
        to, only the first can be in other tables, too: a copy takes its place. Returns: False, changing nothing, if
        there are too few blocks."""
        table, first = seq.block_table, seq.num_computed // self.block_size
        shared = first < len(table) and self.ref_counts[table[first]] > 1
        missing = max(0, self.blocks_for(num_tokens) - len(table))
        if missing + shared > self.num_free:
            return False
        if shared:
            old, table[first] = table[first], self.take()
            self.drop(old)
            self.copies.append((old, table[first]))
        table += [self.take() for _ in range(missing)]
        return True

    def free(self, seq: Sequence) -> None:
        """Empty a sequence's table. `num_computed` is left to the caller. The end of a prefix is evicted before its
        beginning."""
        for block in reversed(seq.block_table):
            self.drop(block)
        seq.block_table.clear()

    def take(self) -> int:
        """Take a free block for one table, or evict a cached one."""
        if self.free_blocks:
            block = self.free_blocks.pop()
        else:
            block = next(iter(self.cached))
            del self.cached[block], self.block_of[self.hash_of.pop(block)]
        self.ref_counts[block] = 1
        return block

    def drop(self, block: int) -> None:
        """Count one table fewer. A block in no table becomes free, or cached if others can find it."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            del self.ref_counts[block]
            if block in self.hash_of:
                self.cached[block] = None
            else:
                self.free_blocks.append(block)

    def share(self, seq: Sequence, blocks: list[int], num_tokens: int) -> None:
        """Start a sequence's table with blocks that hold its first `num_tokens` tokens: a prefix that was found, or all
        that the parent of a fork has."""
        seq.block_table, seq.num_computed = list(blocks), num_tokens
        for block in blocks:
            self.cached.pop(block, None)  # in use again: nothing may evict it
            self.ref_counts[block] = self.ref_counts.get(block, 0) + 1

    def hashes(self, token_ids: list[int]) -> Iterator[bytes]:
        """For each full block of these tokens, the hash of all tokens up to its end."""
        key, size = b"", self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            key = sha256(key + repr(token_ids[start : start + size]).encode()).digest()
            yield key

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The blocks that hold the first tokens of a sequence already. Its last token has to be computed in any case:
        its logits give the next one."""
        known = takewhile(self.block_of.__contains__, self.hashes(seq.token_ids[:-1]))
        return [self.block_of[key] for key in known]

    def store_prefix(self, seq: Sequence) -> None:
        """Let others find the full blocks of a sequence whose K and V are written."""
        for key, block in zip(self.hashes(seq.token_ids[: seq.num_computed]), seq.block_table, strict=False):
            if key not in self.block_of:
                self.block_of[key], self.hash_of[block] = block, key
