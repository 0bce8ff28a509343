"""BlockManager: which physical block holds which tokens of which sequence.

The KV cache is a pool of `num_blocks` blocks of `block_size` token slots (PagedAttention, Kwon et al., SOSP 2023).
Each sequence has a block table: the physical block of each of its logical blocks. A block is always one of

    free       on the free list; its contents have no meaning
    used       in at least one table; its reference count is the number of tables
    cached     in no table, but its contents are a known prefix; evicted when needed, least recently used first

`num_free_blocks` counts both free and cached blocks, because both can be given out.

Prefix caching: a *full* block whose K and V are written is registered under a chained hash of all tokens up to its end:
sha256(parent hash, its tokens). The root of the chain is the hash of the request's salt. A hash only finds a candidate:
the tokens of the whole chain are compared before a block is shared.

Forking: a child's table is a copy of its parent's. Only the last block, partly filled, can still be written to. A
sequence that writes to it while others share it gets a copy first (copy-on-write). The last owner writes in place.

Swapping: a second pool of `num_host_blocks` in host memory takes the blocks of preempted sequences, sharing included.

The manager moves no data. `take_copies`, `swap_out` and `swap_in` return which blocks to copy; the workers, which have
the tensors, copy them before the next forward pass.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection
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
        num_host_blocks: size of the pool for swapped sequences.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, num_host_blocks: int = 0):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_host_blocks = num_host_blocks
        # Totals. A request that was preempted looks up its prefix again, and counts again.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Take back all blocks, on the host as well, and forget all prefixes. Works in any state."""
        self.block_tables: dict[int, list[int]] = {}  # seq_id -> physical blocks
        self.ref_counts: list[int] = [0] * self.num_blocks
        self.host_tables: dict[int, list[int]] = {}  # of the swapped sequences
        self.host_ref_counts: list[int] = [0] * self.num_host_blocks
        self.copies: list[tuple[int, int]] = []  # since the last take_copies()
        self.evicted: list[int] = []  # since the last take_evicted()

        # A stack: the block freed last is the most likely to be in the processor's cache.
        self._free: list[int] = list(range(self.num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, Prefix] = OrderedDict()  # in no table, least recently used first
        self._by_hash: dict[bytes, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}
        # seq_id -> the prefixes of its first full blocks; None if the sequence registers no more blocks
        self._chains: dict[int, list[Prefix] | None] = {}
        self._host_free: list[int] = list(range(self.num_host_blocks - 1, -1, -1))

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def num_free_host_blocks(self) -> int:
        return len(self._host_free)

    @property
    def cached_blocks(self) -> Collection[int]:
        """The cached blocks, the next to be evicted first."""
        return self._cached.keys()

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # Prefix cache

    def lookup(self, token_ids: list[int], salt: str = "", hashes: list[bytes] | None = None) -> list[Prefix]:
        """The longest cached prefix of `token_ids`, block by block. It leaves at least one token to compute, because
        sampling needs the last token's logits.

        Args: hashes: the hashes of the first blocks, kept between calls. This adds the hashes it computes.
        """
        chain: list[Prefix] = []
        if not self.enable_prefix_caching:
            return chain
        hashes = [] if hashes is None else hashes
        parent = None
        for i in range((len(token_ids) - 1) // self.block_size):
            tokens = self._tokens_of_block(token_ids, i)
            if i == len(hashes):
                hashes.append(hash_block(hashes[-1] if hashes else _root_hash(salt), tokens))
            prefix = self._by_hash.get(hashes[i])
            if prefix is None or not prefix.same_as(parent, tokens, salt):
                break
            chain.append(prefix)
            parent = prefix
        return chain

    def register(self, seq_id: int, token_ids: list[int], num_written: int, salt: str = "") -> None:
        """Register the full blocks among the first `num_written` tokens, whose K and V are written."""
        if not self.enable_prefix_caching:
            return
        chain, table = self._chains[seq_id], self.block_tables[seq_id]
        if chain is None:
            return
        for i in range(len(chain), num_written // self.block_size):
            parent = chain[-1] if chain else None
            tokens = self._tokens_of_block(token_ids, i)
            key = hash_block(parent.hash if parent else _root_hash(salt), tokens)
            prefix = self._by_hash.get(key)
            if prefix is None:
                prefix = Prefix(key, parent, tokens, salt, table[i])
                self._by_hash[key] = self._by_block[table[i]] = prefix
            elif not prefix.same_as(parent, tokens, salt):
                # A true collision: this block gets an entry in its sequence's chain, but none in the index that lookups
                # read.
                prefix = Prefix(key, parent, tokens, salt, table[i])
            # Otherwise another sequence has registered the same prefix first: its block stays the cached one.
            chain.append(prefix)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Sequences keep their blocks, but register no more of them."""
        self._free += reversed(self._cached)
        self._cached.clear()
        self._by_hash.clear()
        self._by_block.clear()
        self._chains = dict.fromkeys(self._chains)

    # Tables

    def allocate(self, seq_id: int, prefix: list[Prefix] | None = None, num_tokens: int = 0) -> int:
        """Start a block table with the blocks of `prefix`, which `lookup` has found for `num_tokens` tokens.

        Returns: the number of tokens in these blocks.
        """
        if seq_id in self.block_tables or seq_id in self.host_tables:
            raise ValueError(f"sequence {seq_id} already has a block table")
        prefix = prefix or []
        for entry in prefix:
            self._cached.pop(entry.block, None)  # in use again: nothing may evict it
            self.ref_counts[entry.block] += 1
        self.block_tables[seq_id] = [entry.block for entry in prefix]
        self._chains[seq_id] = list(prefix)
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += len(prefix) * self.block_size
        return len(prefix) * self.block_size

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start the child's table as a copy of the parent's."""
        if child_id in self.block_tables or child_id in self.host_tables:
            raise ValueError(f"sequence {child_id} already has a block table")
        self.block_tables[child_id] = list(self.block_tables[parent_id])
        for block in self.block_tables[child_id]:
            self.ref_counts[block] += 1
        chain = self._chains[parent_id]
        self._chains[child_id] = None if chain is None else list(chain)

    def rename(self, seq_id: int, new_id: int) -> bool:
        """Give a sequence's table, on the device or the host, to another that has none. Returns whether it had one."""
        for tables in (self.block_tables, self.host_tables):
            if seq_id in tables:
                tables[new_id] = tables.pop(seq_id)
                self._chains[new_id] = self._chains.pop(seq_id)
                return True
        return False

    def blocks_to_grow(self, work: list[tuple[int, int, int]]) -> int:
        """How many free blocks `grow` takes for all (seq_id, num_written, num_tokens) of `work`, copies included."""
        missing = 0
        writers: list[int] = []  # the shared block that each writing table would write to
        for seq_id, num_written, num_tokens in work:
            table = self.block_tables[seq_id]
            missing += max(0, self.blocks_for(num_tokens) - len(table))
            first = num_written // self.block_size
            if first < len(table) and self.ref_counts[table[first]] > 1:
                writers.append(table[first])
        # If all owners of a block write to it, the last one needs no copy.
        return missing + sum(min(writers.count(block), self.ref_counts[block] - 1) for block in set(writers))

    def grow(self, seq_id: int, num_written: int, num_tokens: int) -> bool:
        """Make the table ready for writing the tokens from `num_written` up to `num_tokens`.

        Returns: False, changing nothing, if there are too few free blocks.
        """
        table = self.block_tables[seq_id]
        first = num_written // self.block_size
        missing = self.blocks_for(num_tokens) - len(table)
        shares = first < len(table) and self.ref_counts[table[first]] > 1
        if max(0, missing) + shares > self.num_free_blocks:
            return False
        if shares:
            shared, table[first] = table[first], self._take_block()
            self.ref_counts[shared] -= 1
            self.ref_counts[table[first]] = 1
            self.copies.append((shared, table[first]))
        for _ in range(missing):
            block = self._take_block()
            self.ref_counts[block] = 1
            table.append(block)
        return True

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens. They must be neither shared nor registered."""
        table = self.block_tables[seq_id]
        while len(table) > self.blocks_for(num_tokens):
            block = table.pop()
            self.ref_counts[block] = 0
            self._free.append(block)

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the blocks to copy, since the last call. All are read before any is written or cleared."""
        copies, self.copies = self.copies, []
        return copies

    def take_evicted(self) -> list[int]:
        """The cached blocks that have been given out for other tokens, since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def free(self, seq_id: int) -> None:
        """Drop the sequence's table, if it has one. Blocks in no other table become cached if registered, else free."""
        # Last block first, so that the end of a prefix is evicted before its start.
        for block in reversed(self.block_tables.pop(seq_id, [])):
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                if block in self._by_block:
                    self._cached[block] = self._by_block[block]
                else:
                    self._free.append(block)
        self._chains.pop(seq_id, None)
        for block in reversed(self.host_tables.pop(seq_id, [])):
            self.host_ref_counts[block] -= 1
            if self.host_ref_counts[block] == 0:
                self._host_free.append(block)

    def blocks_of(self, seq_ids: list[int]) -> set[int]:
        """The blocks in these sequences' tables."""
        return {block for seq_id in seq_ids for block in self.block_tables.get(seq_id, ())}

    # Swapping

    def swap_out(self, seq_ids: list[int]) -> list[tuple[int, int]] | None:
        """Move the tables of these sequences to the host pool. Sequences without a table are skipped.

        Returns: (block, host block) of every block to copy; None, changing nothing, if the host pool has too few.
        """
        blocks = self.blocks_of(seq_ids)
        if len(blocks) > len(self._host_free):
            return None
        moved = {block: self._host_free.pop() for block in sorted(blocks)}
        for seq_id in seq_ids:
            if seq_id in self.block_tables:
                host_table = [moved[block] for block in self.block_tables[seq_id]]
                registers = self._chains[seq_id] is not None
                self.free(seq_id)
                self.host_tables[seq_id] = host_table
                self._chains[seq_id] = [] if registers else None  # registers from the first block again after swap_in
                for block in host_table:
                    self.host_ref_counts[block] += 1
        return list(moved.items())

    def host_blocks_of(self, seq_ids: list[int]) -> set[int]:
        return {block for seq_id in seq_ids for block in self.host_tables.get(seq_id, ())}

    def swap_in(self, seq_ids: list[int]) -> list[tuple[int, int]]:
        """Move the tables of these sequences back from the host pool.

        The pool must have `len(host_blocks_of(seq_ids))` free blocks.

        Returns: (host block, block) of every block to copy.
        """
        moved = {block: self._take_block() for block in sorted(self.host_blocks_of(seq_ids))}
        for seq_id in seq_ids:
            if seq_id in self.host_tables:
                table = [moved[block] for block in self.host_tables[seq_id]]
                chain = self._chains[seq_id]
                self.free(seq_id)
                self.block_tables[seq_id] = table
                self._chains[seq_id] = chain
                for block in table:
                    self.ref_counts[block] += 1
        return list(moved.items())

    def _take_block(self) -> int:
        if self._free:
            return self._free.pop()
        block, prefix = self._cached.popitem(last=False)
        del self._by_hash[prefix.hash], self._by_block[block]
        self.num_evictions += 1
        self.evicted.append(block)
        return block

    def _tokens_of_block(self, token_ids: list[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    # For tests and debugging

    def check_invariants(self) -> None:
        """Raise AssertionError if the tables, counts and lists disagree. Takes time linear in the pool."""
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
        assert self._chains.keys() == self.block_tables.keys() | self.host_tables.keys()
        assert not self.block_tables.keys() & self.host_tables.keys(), "a sequence in both pools"
        host_owners = Counter(block for table in self.host_tables.values() for block in table)
        assert [host_owners[block] for block in range(len(self.host_ref_counts))] == self.host_ref_counts
        host_free = set(self._host_free)
        assert len(host_free) == len(self._host_free) and not host_free & host_owners.keys()
        assert len(host_free) + len(host_owners) == len(self.host_ref_counts), "a host block is lost"
        assert cached <= self._by_block.keys() <= cached | used, "a registered block is free"
        for block, prefix in self._by_block.items():
            assert prefix.block == block and self._by_hash[prefix.hash] is prefix
        assert len(self._by_hash) == len(self._by_block)


def _root_hash(salt: str) -> bytes:
    return sha256(salt.encode()).digest()
