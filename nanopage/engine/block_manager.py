"""BlockManager: which physical block holds which tokens of which sequence.

The KV cache is a pool of `num_blocks` blocks of `block_size` token slots (PagedAttention, Kwon et al., SOSP 2023).
Each sequence has a block table: the physical block of each of its logical blocks. If layers have different windows, a
logical block has one physical block for each kind of layers (see layer_kinds.py), side by side in the table. At a first
reading, assume one kind, without a window. A block is always one of

    free       on the free list; its contents have no meaning
    used       in at least one table; its reference count is the number of tables
    cached     in no table, but its contents are a known prefix; evicted when needed, least recently used first

`num_free_blocks` counts both free and cached blocks, because both can be given out.

Forking: a child's table is a copy of its parent's. Only the last block, partly filled, can still be written to. A
sequence that writes to it while others share it gets a copy first (copy-on-write). The last owner writes in place.

The manager moves no data. `take_copies`, `swap_out` and `swap_in` return which blocks to copy; the workers, which have
the tensors, copy them before the next forward pass.

Beside it: prefix_cache.py (which blocks hold known prefixes), host_pool.py (the tables of swapped sequences).
"""

from collections import Counter
from collections.abc import Sequence

from nanopage.engine.host_pool import HostPool, Tables, count_blocks
from nanopage.engine.prefix_cache import Prefix, PrefixCache
from nanopage.engine.windows import entries_behind
from nanopage.state.layer_kinds import STATE, first_blocks
from nanopage.step import NO_BLOCK


class BlockManager:
    """Block tables, reference counts and the prefix cache.

    Args:
        num_blocks: size of the pool.
        block_size: token slots per block.
        enable_prefix_caching: share full blocks between sequences with equal prefixes.
        num_host_blocks: size of the pool for swapped sequences.
        windows: of each kind of layers; None for a kind without one; STATE.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
        windows: Sequence[int | None] = (None,),
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.windows, self.num_kinds = tuple(windows), len(windows)
        self.num_states = self.windows.count(STATE)
        self.prefixes = PrefixCache(block_size, windows, enable_prefix_caching)
        self.host = HostPool(num_host_blocks)
        # Totals. A request that was preempted looks up its prefix again, and counts again.
        self.num_query_tokens = self.num_hit_tokens = 0
        self.reset()

    def reset(self) -> None:
        """Take back all blocks, on the host as well, and forget all prefixes. Works in any state."""
        self.block_tables: Tables = {}
        self.ref_counts: list[int] = [0] * self.num_blocks
        self.host.reset()
        self.copies: list[tuple[int, int]] = []  # since the last take_copies()
        # A stack: the block freed last is the most likely to be in the processor's cache.
        self._free: list[int] = list(range(self.num_blocks - 1, -1, -1))
        self.prefixes.clear()
        # seq_id -> the prefixes of its first full blocks; None if the sequence registers no more blocks
        self._chains: dict[int, list[Prefix] | None] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be given out: free ones and cached ones."""
        return len(self._free) + len(self.prefixes.cached)

    @property
    def num_cached_blocks(self) -> int:
        return len(self.prefixes.cached)

    def blocks_for(self, num_tokens: int) -> int:
        """The length of a table for so many tokens."""
        return -(-num_tokens // self.block_size) * self.num_kinds

    def lookup(self, token_ids: list[int], salt: str = "", hashes: list[bytes] | None = None) -> list[Prefix]:
        """The longest cached prefix of `token_ids`, block by block (see `PrefixCache.lookup`)."""
        return self.prefixes.lookup(token_ids, salt, hashes)

    def register(self, seq_id: int, token_ids: list[int], num_written: int, salt: str = "") -> None:
        """Register the full blocks among the first `num_written` tokens, whose K and V are written."""
        chain = self._chains[seq_id]
        if chain is not None:
            self.prefixes.register(chain, self.block_tables[seq_id], token_ids, num_written, salt)

    def forget(self, token_ids: list[int], salt: str = "") -> None:
        """Forget all prefixes of these tokens: their K and V are wrong. Sequences keep their blocks."""
        self._free += self.prefixes.forget(token_ids, salt)

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes. Sequences keep their blocks, but register no more of them."""
        self._free += reversed(self.prefixes.cached)
        self.prefixes.clear()
        self._chains = dict.fromkeys(self._chains)

    def allocate(self, seq_id: int, prefix: list[Prefix] | None = None, num_tokens: int = 0) -> int:
        """Start a block table with the blocks of `prefix`, which `lookup` has found for `num_tokens` tokens.

        Returns: the number of tokens in these blocks.
        """
        prefix = prefix or []
        table = self.prefixes.table_of(prefix)
        self._start(seq_id, table, list(prefix))
        for block in table:
            self.prefixes.cached.pop(block, None)  # in use again: nothing may evict it
        self.num_query_tokens += num_tokens
        self.num_hit_tokens += len(prefix) * self.block_size
        return len(prefix) * self.block_size

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start the child's table as a copy of the parent's."""
        chain = self._chains[parent_id]
        self._start(child_id, list(self.block_tables[parent_id]), None if chain is None else list(chain))

    def rename(self, seq_id: int, new_id: int) -> bool:
        """Give a sequence's table, on the device or the host, to one without. Returns whether there was a table."""
        for tables in (self.block_tables, self.host.tables):
            if seq_id in tables:
                tables[new_id] = tables.pop(seq_id)
                self._chains[new_id] = self._chains.pop(seq_id)
                return True
        return False

    def blocks_to_grow(self, work: list[tuple[int, int, int]]) -> int:
        """How many free blocks `grow` takes for all (seq_id, num_written, num_tokens) of `work`, copies included."""
        missing = 0
        writers: list[int] = []  # the shared blocks that each writing table would write to
        for seq_id, num_written, num_tokens in work:
            table = self.block_tables[seq_id]
            missing += len(self._missing(table, num_written, num_tokens, num_tokens))
            writers += [table[index] for index in self._shared_entries(table, num_written)]
        # The last owner writes in place, so a block is copied at most ref_count - 1 times.
        return missing + sum(min(writers.count(block), self.ref_counts[block] - 1) for block in set(writers))

    def grow(self, seq_id: int, num_written: int, num_tokens: int, num_drafted: int = 0) -> bool:
        """Make the table ready for writing the tokens from `num_written` up to `num_tokens`, of which the last
        `num_drafted` are a draft: the state before the draft is kept.

        Returns: False, changing nothing, if there are too few free blocks.
        """
        table = self.block_tables[seq_id]
        shares = self._shared_entries(table, num_written)
        missing = self._missing(table, num_written, num_tokens, num_tokens - num_drafted)
        if len(missing) + len(shares) > self.num_free_blocks:
            return False
        for index in shares:
            shared, table[index] = table[index], self._take_block()
            self.ref_counts[shared] -= 1
            self.ref_counts[table[index]] = 1
            self.copies.append((shared, table[index]))
        table += [NO_BLOCK] * (self.blocks_for(num_tokens) - len(table))
        for index in missing:
            table[index] = self._take_block()
            self.ref_counts[table[index]] = 1
        return True

    def shrink(self, seq_id: int, num_tokens: int) -> None:
        """Give back the blocks behind the first `num_tokens` tokens. They must be neither shared nor registered."""
        table = self.block_tables[seq_id]
        while len(table) > self.blocks_for(num_tokens):
            block = table.pop()
            if block != NO_BLOCK:
                self.ref_counts[block] = 0
                self._free.append(block)

    def slide(self, seq_id: int, num_written: int, marks: Sequence[int] = ()) -> None:
        """Give back the blocks that no window reaches from token `num_written` on, where the next step begins. NO_BLOCK
        takes their place in the table.

        Args: marks: where states are worth keeping (see `PrefixCache.marks`). Others are the next to be evicted.
        """
        table = self.block_tables[seq_id]
        for index, block in entries_behind(table, self.windows, num_written, self.block_size):
            end = (index // self.num_kinds + 1) * self.block_size
            self._drop(block, self.windows[index % self.num_kinds] != STATE or end in marks)
            table[index] = NO_BLOCK

    def take_copies(self) -> list[tuple[int, int]]:
        """(from, to) of the blocks to copy, since the last call. All are read before any is written or cleared."""
        copies, self.copies = self.copies, []
        return copies

    def free(self, seq_id: int) -> None:
        """Drop the sequence's table, if it has one. Blocks in no other table become cached if registered, else free."""
        # Last block first, so that the end of a prefix is evicted before its start.
        for block in reversed(self.block_tables.pop(seq_id, [])):
            if block != NO_BLOCK:
                self._drop(block)
        self._chains.pop(seq_id, None)
        self.host.drop(seq_id)

    def blocks_of(self, seq_ids: list[int]) -> Counter[int]:
        """The blocks in these sequences' tables, each with the number of tables that contain it."""
        return count_blocks(self.block_tables, seq_ids)

    def _start(self, seq_id: int, table: list[int], chain: list[Prefix] | None) -> None:
        """Give a sequence a table, and count one more owner of the blocks in it."""
        if seq_id in self.block_tables or seq_id in self.host.tables:
            raise ValueError(f"sequence {seq_id} already has a block table")
        self.block_tables[seq_id], self._chains[seq_id] = table, chain
        for block in table:
            if block != NO_BLOCK:
                self.ref_counts[block] += 1

    def _drop(self, block: int, worth_keeping: bool = True) -> None:
        """Count one owner less of a block."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0 and not self.prefixes.keep(block, worth_keeping):
            self._free.append(block)

    def _missing(self, table: list[int], num_written: int, num_tokens: int, state_end: int) -> Sequence[int]:
        """The table indices that lack a block for so many tokens. Of the states, only the one after `state_end` tokens
        needs a block."""
        missing: Sequence[int] = range(len(table), self.blocks_for(num_tokens))
        if num_written * self.num_kinds > len(table) * self.block_size:  # K and V are given: only what windows reach
            firsts = first_blocks(self.windows, num_written, self.block_size)
            missing = [index for index in missing if index // self.num_kinds >= firsts[index % self.num_kinds]]
        if not self.num_states:
            return missing
        newest = (state_end - 1) // self.block_size * self.num_kinds
        states = [newest + kind for kind, window in enumerate(self.windows) if window == STATE]
        without = [index for index in states if index >= len(table) or table[index] == NO_BLOCK]
        return [index for index in missing if self.windows[index % self.num_kinds] != STATE] + without

    def _shared_entries(self, table: list[int], num_written: int) -> list[int]:
        """The table indices of the shared blocks that token `num_written` is written to."""
        first = num_written // self.block_size * self.num_kinds
        entries = range(first, min(first + self.num_kinds, len(table)))
        return [index for index in entries if table[index] != NO_BLOCK and self.ref_counts[table[index]] > 1]

    def swap_out(self, seq_ids: list[int]) -> list[tuple[int, int]] | None:
        """Move the tables of these sequences to the host pool. Sequences without a table are skipped.

        Returns: (block, host block) of every block to copy; None, changing nothing, if the host pool has too few.
        """
        tables = {seq_id: self.block_tables[seq_id] for seq_id in seq_ids if seq_id in self.block_tables}
        if not self.host.fits(tables):
            return None
        for seq_id in tables:
            registers = self._chains[seq_id] is not None
            self.free(seq_id)
            self._chains[seq_id] = [] if registers else None  # registers from the first block again after swap_in
        return self.host.add(tables)

    def swap_in(self, seq_ids: list[int]) -> list[tuple[int, int]]:
        """Move the tables of these sequences back from the host pool, into as many free blocks as they have there.

        Returns: (host block, block) of every block to copy.
        """
        moved = {block: self._take_block() for block in sorted(self.host.blocks_of(seq_ids))}
        for seq_id in seq_ids:
            if seq_id in self.host.tables:
                table = [moved.get(block, NO_BLOCK) for block in self.host.tables[seq_id]]
                self.host.drop(seq_id)
                self._start(seq_id, table, self._chains[seq_id])
        return list(moved.items())

    def _take_block(self) -> int:
        return self._free.pop() if self._free else self.prefixes.evict()
