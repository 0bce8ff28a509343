"""BlockManager: which physical block holds which tokens of which sequence.

The KV cache is a pool of `num_blocks` blocks of `block_size` token slots (PagedAttention, Kwon et al., SOSP 2023).
Each sequence has a block table: the physical block of each of its logical blocks. At any time a block is

    free       on the free list, contents meaningless
    used       in at least one table; its reference count is the number of tables it is in
    cached     in no table, but its contents are a known prefix; evictable, least recently used first

Prefix caching: a *full* block whose K and V are written is registered under a chained hash of everything up to and
including it: sha256(parent hash, its tokens). The root of the chain is the hash of the request's salt. A hash only
finds a candidate: the tokens of the whole chain are compared before a block is shared.

Pure Python: no torch here.
"""

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import sha256


@dataclass(slots=True, eq=False)
class Prefix:
    """A registered block and, through `parent`, all the tokens before it. `parent` is None for a sequence's first."""

    hash: bytes
    parent: "Prefix | None"
    tokens: tuple[int, ...]
    salt: str
    block: int

    def same_as(self, parent: "Prefix | None", tokens: tuple[int, ...], salt: str) -> bool:
        """Whether this is the prefix `parent` + `tokens`, by comparing tokens, not hashes."""
        if self.tokens != tokens or self.salt != salt:
            return False
        ours = self.parent
        # An ancestor may have been evicted and registered anew: then the chains are equal without being identical.
        while ours is not parent:
            if ours is None or parent is None or ours.tokens != parent.tokens:
                return False
            ours, parent = ours.parent, parent.parent
        return True


def hash_block(parent_hash: bytes, tokens: tuple[int, ...]) -> bytes:
    return sha256(parent_hash + array("q", tokens).tobytes()).digest()


class BlockManager:
    """Block tables, reference counts and the prefix cache.

    Args:
        num_blocks: size of the pool.
        block_size: token slots per block.
        enable_prefix_caching: share full blocks between sequences with equal prefixes.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.block_tables: dict[int, list[int]] = {}  # seq_id -> physical blocks
        self.ref_counts: list[int] = [0] * num_blocks
        self.num_hit_tokens = 0  # prompt tokens that allocate() found in the cache, ever
        self.num_evictions = 0
        self.new_blocks: list[int] = []  # handed out since the last take_new_blocks()

        self._free: list[int] = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is the likeliest in cache
        self._cached: OrderedDict[int, Prefix] = OrderedDict()  # in no table, least recently used first
        self._by_hash: dict[bytes, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}
        self._chains: dict[int, list[Prefix]] = {}  # seq_id -> the registered prefixes of its leading full blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones and cached ones that nobody uses."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Prefix cache

    def lookup(self, token_ids: list[int], salt: str = "") -> list[Prefix]:
        """The longest cached prefix of `token_ids`, block by block. At least one token is left to compute:
        sampling needs the last token's logits, which are not cached."""
        chain: list[Prefix] = []
        if not self.enable_prefix_caching:
            return chain
        parent, parent_hash = None, _root_hash(salt)
        for i in range((len(token_ids) - 1) // self.block_size):
            tokens = self._tokens_of_block(token_ids, i)
            parent_hash = hash_block(parent_hash, tokens)
            prefix = self._by_hash.get(parent_hash)
            if prefix is None or not prefix.same_as(parent, tokens, salt):
                break
            chain.append(prefix)
            parent = prefix
        return chain

    def register(self, seq_id: int, token_ids: list[int], num_written: int, salt: str = "") -> None:
        """Enter into the cache the full blocks among the first `num_written` tokens, whose K and V are written."""
        if not self.enable_prefix_caching:
            return
        chain, table = self._chains[seq_id], self.block_tables[seq_id]
        for i in range(len(chain), num_written // self.block_size):
            parent = chain[-1] if chain else None
            tokens = self._tokens_of_block(token_ids, i)
            key = hash_block(parent.hash if parent else _root_hash(salt), tokens)
            prefix = self._by_hash.get(key)
            if prefix is None:
                prefix = Prefix(key, parent, tokens, salt, table[i])
                self._by_hash[key] = self._by_block[table[i]] = prefix
            elif not prefix.same_as(parent, tokens, salt):
                # A true collision: this block keeps its own entry in the chain, but is never found.
                prefix = Prefix(key, parent, tokens, salt, table[i])
            # else another sequence wrote the same prefix first: its block stays the cached one.
            chain.append(prefix)

    # Tables

    def allocate(self, seq_id: int, prefix: list[Prefix] | None = None) -> int:
        """Start a block table with the blocks of `prefix` (from `lookup`). Returns the number of tokens they hold."""
        if seq_id in self.block_tables:
            raise ValueError(f"sequence {seq_id} already has a block table")
        prefix = prefix or []
        for entry in prefix:
            self._cached.pop(entry.block, None)
            self.ref_counts[entry.block] += 1
        self.block_tables[seq_id] = [entry.block for entry in prefix]
        self._chains[seq_id] = list(prefix)
        self.num_hit_tokens += len(prefix) * self.block_size
        return len(prefix) * self.block_size

    def grow(self, seq_id: int, num_tokens: int) -> bool:
        """Make the table hold `num_tokens` tokens. Returns False, and changes nothing, if blocks are short."""
        table = self.block_tables[seq_id]
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > self.num_free_blocks:
            return False
        for _ in range(missing):
            block = self._take_block()
            self.ref_counts[block] = 1
            table.append(block)
            self.new_blocks.append(block)
        return True

    def take_new_blocks(self) -> list[int]:
        """The blocks handed out since the last call. Their old contents must be cleared before they are read."""
        new, self.new_blocks = self.new_blocks, []
        return new

    def free(self, seq_id: int) -> None:
        """Drop the sequence's table. Blocks nobody else uses become cached if registered, else free."""
        # Tail first, so that the LRU order evicts the end of a prefix before its beginning.
        for block in reversed(self.block_tables.pop(seq_id)):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._by_block:
                    self._cached[block] = self._by_block[block]
                else:
                    self._free.append(block)
        del self._chains[seq_id]

    def _take_block(self) -> int:
        if self._free:
            return self._free.pop()
        block, prefix = self._cached.popitem(last=False)
        del self._by_hash[prefix.hash], self._by_block[block]
        self.num_evictions += 1
        return block

    def _tokens_of_block(self, token_ids: list[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    # For tests and debugging

    def check_invariants(self) -> None:
        """Raise AssertionError unless the books balance. Linear in the pool; meant for tests."""
        owners = [0] * self.num_blocks
        for table in self.block_tables.values():
            assert len(set(table)) == len(table), f"a block twice in one table: {table}"
            for block in table:
                owners[block] += 1
        assert owners == self.ref_counts, "reference counts differ from owners"
        free, cached = set(self._free), set(self._cached)
        used = {block for block, count in enumerate(owners) if count}
        assert len(free) == len(self._free), "a block twice on the free list"
        assert not (free & cached or free & used or cached & used), "a block in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        assert self._chains.keys() == self.block_tables.keys()
        assert cached <= self._by_block.keys() <= cached | used, "a registered block is free"
        for block, prefix in self._by_block.items():
            assert prefix.block == block and self._by_hash[prefix.hash] is prefix
        assert len(self._by_hash) == len(self._by_block)


def _root_hash(salt: str) -> bytes:
    return sha256(salt.encode()).digest()
