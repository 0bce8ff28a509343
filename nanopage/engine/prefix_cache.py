"""PrefixCache: which blocks hold a known prefix, for sequences that begin with it.

A *full* block whose K and V are written is registered under a chained hash of all tokens up to its end:
sha256(parent hash, its tokens). The root of the chain is the hash of the request's salt. A hash only finds a candidate:
the tokens of the whole chain are compared before a block is shared.

If layers have windows, a prefix is a hit if all blocks that the token after it attends to are cached. If layers have
states, the state at the end of the prefix must be. States are registered where steps end at the end of a block
(`marks`).
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from nanopage.state.layer_kinds import STATE, first_blocks
from nanopage.step import NO_BLOCK


@dataclass(slots=True, eq=False)
class Prefix:
    """A registered logical block and, through `parent`, all the tokens before it. `parent` is None for the first block
    of a sequence. `blocks` are the physical blocks, one for each kind of layers, NO_BLOCK where there is none."""

    hash: bytes
    parent: "Prefix | None"
    tokens: tuple[int, ...]
    salt: str
    blocks: list[int]

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


class PrefixCache:
    """The registered blocks. `cached` has the blocks that are in no table, the next to be evicted first.

    Args: enabled: whether any block is registered. The others: as in BlockManager.
    """

    def __init__(self, block_size: int, windows: Sequence[int | None] = (None,), enabled: bool = True):
        self.block_size, self.windows, self.num_kinds, self.enabled = block_size, tuple(windows), len(windows), enabled
        self.num_evictions = 0
        self.clear()

    def clear(self) -> None:
        """Forget all prefixes."""
        self.evicted: list[int] = []  # since `take_evicted`
        self.cached: OrderedDict[int, Prefix] = OrderedDict()
        self.by_hash: dict[bytes, Prefix] = {}
        self.by_block: dict[int, Prefix] = {}

    def lookup(self, token_ids: list[int], salt: str = "", hashes: list[bytes] | None = None) -> list[Prefix]:
        """The longest cached prefix of `token_ids`, block by block. It leaves at least one token to compute, because
        sampling needs the last token's logits.

        Args: hashes: the hashes of the first blocks, kept between calls. This adds the hashes it computes.
        """
        chain = self._find(token_ids, salt, [] if hashes is None else hashes)
        return chain if not any(self.windows) else self._cut(chain)

    def marks(self, token_ids: list[int], salt: str, hashes: list[bytes]) -> list[int]:
        """Where steps should end in a prompt, so that other prompts find a state there: at the end of its last full
        block, and where it leaves a known prefix. Args: as of `lookup`."""
        if not self.enabled:
            return []
        last = (len(token_ids) - 1) // self.block_size
        return sorted({length * self.block_size for length in (len(self._find(token_ids, salt, hashes)), last)})

    def _find(self, token_ids: list[int], salt: str, hashes: list[bytes]) -> list[Prefix]:
        """As `lookup`, except that blocks behind windows, and states, may be missing."""
        chain: list[Prefix] = []
        if not self.enabled:
            return chain
        parent, num_blocks = None, (len(token_ids) - 1) // self.block_size
        if None not in self.windows:  # a missing block does not end the search, so find its end first
            self._add_hashes(hashes, token_ids, num_blocks, salt)
            num_blocks = next((i + 1 for i in reversed(range(num_blocks)) if hashes[i] in self.by_hash), 0)
        for i in range(num_blocks):
            tokens = self._tokens_of_block(token_ids, i)
            if i == len(hashes):
                self._add_hashes(hashes, token_ids, i + 1, salt)
            prefix = self.by_hash.get(hashes[i])
            if prefix is None or not prefix.same_as(parent, tokens, salt):
                prefix = Prefix(hashes[i], parent, tokens, salt, [NO_BLOCK] * self.num_kinds)
            if NO_BLOCK in prefix.blocks and (NO_BLOCK, None) in zip(prefix.blocks, self.windows, strict=True):
                break  # without a window, all tokens behind this block see it
            chain.append(prefix)
            parent = prefix
        return chain

    def table_of(self, chain: list[Prefix]) -> list[int]:
        """The table that a sequence with this cached prefix starts with."""
        firsts = first_blocks(self.windows, len(chain) * self.block_size, self.block_size)
        return [
            block if i >= first else NO_BLOCK
            for i, prefix in enumerate(chain)
            for block, first in zip(prefix.blocks, firsts, strict=True)
        ]

    def register(
        self, chain: list[Prefix], table: list[int], token_ids: list[int], num_written: int, salt: str = ""
    ) -> None:
        """Register the full blocks of a table among the first `num_written` tokens, whose K and V are written.

        Args: chain: the prefixes of the table's first full blocks. This adds those that it registers.
        """
        if not self.enabled:
            return
        for i in range(len(chain), num_written // self.block_size):
            parent = chain[-1] if chain else None
            tokens = self._tokens_of_block(token_ids, i)
            key = hash_block(parent.hash if parent else _root_hash(salt), tokens)
            prefix = self.by_hash.get(key)
            collides = prefix is not None and not prefix.same_as(parent, tokens, salt)
            if prefix is None or collides:
                prefix = Prefix(key, parent, tokens, salt, [NO_BLOCK] * self.num_kinds)
            chain.append(prefix)
            if collides:
                continue  # this block is in its sequence's chain, but not in the index that lookups read
            # If another sequence has registered the same prefix first, that sequence's blocks stay.
            for kind, block in enumerate(table[i * self.num_kinds : (i + 1) * self.num_kinds]):
                if self.windows[kind] == STATE and (i + 1) * self.block_size != num_written:
                    continue  # a state from before the end of the block
                if prefix.blocks[kind] == NO_BLOCK and block != NO_BLOCK:
                    prefix.blocks[kind] = block
                    self.by_hash[key] = self.by_block[block] = prefix

    def forget(self, token_ids: list[int], salt: str = "") -> list[int]:
        """Forget all prefixes of these tokens: their K and V are wrong. Returns the blocks that are free now."""
        key, freed = _root_hash(salt), []
        for i in range(len(token_ids) // self.block_size):
            key = hash_block(key, self._tokens_of_block(token_ids, i))
            prefix = self.by_hash.pop(key, None)
            for kind, block in enumerate(prefix.blocks if prefix else ()):
                if block == NO_BLOCK or prefix is None:
                    continue
                del self.by_block[block]
                if self.cached.pop(block, None) is not None:
                    freed.append(block)
                prefix.blocks[kind] = NO_BLOCK
        return freed

    def keep(self, block: int, worth_keeping: bool = True) -> bool:
        """Keep a block that is in no table any more, if it is registered. Returns whether it stays.

        Args: worth_keeping: if not, it is the next to be evicted.
        """
        if block in self.by_block:
            self.cached[block] = self.by_block[block]
            self.cached.move_to_end(block, last=worth_keeping)
        return block in self.by_block

    def evict(self) -> int:
        """Forget the cached block that was used least recently. Returns it."""
        block, prefix = self.cached.popitem(last=False)
        del self.by_block[block]
        prefix.blocks[prefix.blocks.index(block)] = NO_BLOCK
        if set(prefix.blocks) == {NO_BLOCK}:
            del self.by_hash[prefix.hash]
        self.num_evictions += 1
        self.evicted.append(block)
        return block

    def take_evicted(self) -> list[int]:
        """The blocks that have been evicted since the last call."""
        evicted, self.evicted = self.evicted, []
        return evicted

    def _cut(self, chain: list[Prefix]) -> list[Prefix]:
        """The longest beginning of a chain for which all blocks that the next token sees are cached."""
        length = 0
        missing = [-1] * self.num_kinds  # of each kind, the last block so far that is not cached
        for i, prefix in enumerate(chain):
            missing = [i if block == NO_BLOCK else last for block, last in zip(prefix.blocks, missing, strict=True)]
            firsts = first_blocks(self.windows, (i + 1) * self.block_size, self.block_size)
            if all(last < first for last, first in zip(missing, firsts, strict=True)):
                length = i + 1
        return chain[:length]

    def _add_hashes(self, hashes: list[bytes], token_ids: list[int], num_blocks: int, salt: str) -> None:
        """Add the missing hashes, until there are `num_blocks`."""
        for i in range(len(hashes), num_blocks):
            parent_hash = hashes[-1] if hashes else _root_hash(salt)
            hashes.append(hash_block(parent_hash, self._tokens_of_block(token_ids, i)))

    def _tokens_of_block(self, token_ids: list[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])


def _root_hash(salt: str) -> bytes:
    return sha256(salt.encode()).digest()
