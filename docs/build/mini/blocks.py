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
        raise NotImplementedError("milestone 5")

    def blocks_for(self, num_tokens: int) -> int:
        raise NotImplementedError("milestone 5")

    def slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Where in the cache the K and V of the tokens from `start` to `end` are: block * block_size + offset."""
        raise NotImplementedError("milestone 5")

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make a table ready for writing the tokens from `seq.num_computed` up to `num_tokens`. Of the blocks written
        to, only the first can be in other tables, too: a copy takes its place. Returns: False, changing nothing, if
        there are too few blocks."""
        raise NotImplementedError("milestone 5")

    def free(self, seq: Sequence) -> None:
        """Empty a sequence's table. `num_computed` is left to the caller. The end of a prefix is evicted before its
        beginning."""
        raise NotImplementedError("milestone 5")

    def take(self) -> int:
        """Take a free block for one table, or evict a cached one."""
        raise NotImplementedError("milestone 5")

    def drop(self, block: int) -> None:
        """Count one table fewer. A block in no table becomes free, or cached if others can find it."""
        raise NotImplementedError("milestone 5")

    def share(self, seq: Sequence, blocks: list[int], num_tokens: int) -> None:
        """Start a sequence's table with blocks that hold its first `num_tokens` tokens: a prefix that was found, or all
        that the parent of a fork has."""
        raise NotImplementedError("milestone 8")

    def hashes(self, token_ids: list[int]) -> Iterator[bytes]:
        """For each full block of these tokens, the hash of all tokens up to its end."""
        raise NotImplementedError("milestone 8")

    def find_prefix(self, seq: Sequence) -> list[int]:
        """The blocks that hold the first tokens of a sequence already. Its last token has to be computed in any case:
        its logits give the next one."""
        raise NotImplementedError("milestone 8")

    def store_prefix(self, seq: Sequence) -> None:
        """Let others find the full blocks of a sequence whose K and V are written."""
        raise NotImplementedError("milestone 8")
