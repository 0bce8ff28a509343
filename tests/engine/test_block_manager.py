"""BlockManager against a model of what every slot of the pool holds.

The K and V of a token depend on every token before it, so the model writes (salt, all tokens up to it) into its slot.
"""

import copy
from dataclasses import dataclass, field

import pytest
from helpers import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanopage.engine import prefix_cache
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.prefix_cache import PrefixCache
from nanopage.state.layer_kinds import STATE
from nanopage.step import NO_BLOCK
from nanopage.view.invariants import check_blocks

HASHES = {
    "sha256": prefix_cache.hash_block,
    "constant": lambda parent_hash, tokens: b"",
    "one_bit": lambda parent_hash, tokens: bytes([sum(tokens) & 1]),
}


@dataclass(eq=False)
class Owner:
    """A sequence of the model: `written` tokens have their K and V, `offered` blocks went through register().

    `table` is of host blocks while it is swapped; `registers` is False after a reset of the cache.
    """

    seq_id: int
    tokens: list[int]
    salt: str
    table: list[int]
    written: int
    offered: int
    registers: bool = True
    hashes: list[bytes] = field(default_factory=list)  # of its blocks, as far as lookups have asked for them


@dataclass
class Known:
    """A block the cache can find by its hash, and what it holds."""

    block: int
    salt: str
    tokens: tuple[int, ...]


salts = st.sampled_from(["", "a"])
owners = st.integers(0, 3)
usually = st.sampled_from([True, True, True, False])
# Few distinct prefixes: they collide. Beside them the same token over and over, at any length.
prompts = st.one_of(
    st.lists(st.integers(0, 1), min_size=1, max_size=8), st.integers(1, 8).map(lambda n: [0] * n), st.just([0, 1] * 4)
)


class Books(RuleBasedStateMachine):
    """Any sequence of legal calls. The model is exact: which blocks are found, handed out, evicted and freed."""

    @initialize(
        num_blocks=st.integers(1, 6), block_size=st.integers(1, 3), caching=usually, num_host_blocks=st.integers(0, 4)
    )
    def start(self, num_blocks, block_size, caching, num_host_blocks):
        self.manager = BlockManager(num_blocks, block_size, caching, num_host_blocks)
        self.swapped: list[Owner] = []
        self.host_contents = [None] * num_host_blocks
        self.copies: list[tuple[int, int]] = []
        self.query_tokens = 0
        self.num_blocks, self.block_size, self.caching = num_blocks, block_size, caching
        self.live: list[Owner] = []
        self.contents = [[None] * block_size for _ in range(num_blocks)]
        self.known: dict[bytes, Known] = {}  # by hash
        self.free = set(range(num_blocks))
        self.idle: dict[int, tuple[int, int]] = {}  # cached block of no table -> when it was freed, the tail first
        self.hit_tokens = self.evictions = self.clock = self.next_id = 0

    def hash_of(self, salt, tokens):
        value = b"root of " + salt.encode()
        for i in range(0, len(tokens), self.block_size):
            value = prefix_cache.hash_block(value, tuple(tokens[i : i + self.block_size]))
        return value

    def owners_of(self, block):
        return sum(owner.table.count(block) for owner in self.live)

    def expected_hit(self, tokens, salt):
        blocks = []
        for end in range(self.block_size, len(tokens), self.block_size):
            known = self.known.get(self.hash_of(salt, tokens[:end]))
            if known is None or (known.salt, known.tokens) != (salt, tuple(tokens[:end])):
                break
            blocks.append(known.block)
        return blocks

    def check_lookup(self, tokens, salt, hashes=None):
        before = repr(vars(self.manager))
        hit = self.manager.lookup(tokens, salt, hashes)
        assert repr(vars(self.manager)) == before, "lookup() changed something"
        blocks = [prefix.blocks[0] for prefix in hit]
        assert blocks == self.expected_hit(tokens, salt)
        assert len(blocks) * self.block_size < len(tokens), "no token is left to compute"
        held = [slot for block in blocks for slot in self.contents[block]]
        assert held == [(salt, tuple(tokens[: i + 1])) for i in range(len(held))], "a hit with the wrong contents"
        return hit

    def allocate(self, tokens, salt, use_cache):
        hit = self.check_lookup(tokens, salt) if use_cache else []
        held = self.manager.allocate(self.next_id, hit, len(tokens))
        self.query_tokens += len(tokens)
        assert held == len(hit) * self.block_size
        table = [prefix.blocks[0] for prefix in hit]
        for block in table:
            self.idle.pop(block, None)
        owner = Owner(self.next_id, list(tokens), salt, table, held, len(hit))
        self.live.append(owner)
        self.next_id += 1
        self.hit_tokens += held
        return owner

    def take(self, block):
        """The manager has handed out `block`: was it the one to take?"""
        if self.free:
            assert block in self.free, "a cached block was taken while others were free"
            self.free.remove(block)
        else:
            assert block == min(self.idle, key=self.idle.get), "not the least recently used, tail first"
            del self.idle[block]
            self.known = {key: known for key, known in self.known.items() if known.block != block}
            self.evictions += 1

    def grow(self, owner, num_tokens):
        target = min(owner.written + num_tokens, len(owner.tokens))
        missing = max(0, -(-target // self.block_size) - len(owner.table))
        first = owner.written // self.block_size
        shared = first < len(owner.table) and self.owners_of(owner.table[first]) > 1
        before = repr(vars(self.manager))
        wanted = self.manager.blocks_to_grow([(owner.seq_id, owner.written, target)])
        assert wanted == missing + shared
        grown = self.manager.grow(owner.seq_id, owner.written, target)
        assert grown == (wanted <= len(self.free) + len(self.idle))
        if not grown or not wanted:
            assert repr(vars(self.manager)) == before, "grow() without need or room changed something"
            return grown
        table = self.manager.block_tables[owner.seq_id]
        assert len(table) == len(owner.table) + missing
        if shared:  # copy-on-write
            self.take(table[first])
            self.contents[table[first]] = list(self.contents[owner.table[first]])
            self.copies.append((owner.table[first], table[first]))
            owner.table[first] = table[first]
        assert table[: len(owner.table)] == owner.table
        for block in table[len(owner.table) :]:
            self.take(block)
        owner.table = list(table)
        return True

    def write(self, owner):
        """What a step does between grow() and register()."""
        for position in range(owner.written, min(len(owner.tokens), len(owner.table) * self.block_size)):
            block = owner.table[position // self.block_size]
            assert self.owners_of(block) == 1, "written while another sequence reads it"
            assert all(known.block != block for known in self.known.values()), "written while it can be found"
            slot = position % self.block_size
            self.contents[block][slot] = (owner.salt, tuple(owner.tokens[: position + 1]))
            owner.written = position + 1

    def register(self, owner):
        self.manager.register(owner.seq_id, owner.tokens, owner.written, owner.salt)
        full = owner.written // self.block_size
        if self.caching and owner.registers:
            for i in range(owner.offered, full):
                tokens = tuple(owner.tokens[: (i + 1) * self.block_size])
                known = Known(owner.table[i], owner.salt, tokens)
                self.known.setdefault(self.hash_of(owner.salt, tokens), known)
        owner.offered = full

    def release(self, owner):
        self.manager.free(owner.seq_id)
        self.released(owner)

    def released(self, owner):
        self.live.remove(owner)
        self.clock += 1
        findable = {known.block for known in self.known.values()}
        for i, block in enumerate(owner.table):
            if self.owners_of(block) == 0:
                if block in findable:
                    self.idle[block] = (self.clock, -i)
                else:
                    self.free.add(block)

    def run(self, owner, num_tokens, registered):
        if not self.grow(owner, num_tokens):
            return
        self.write(owner)
        if registered:
            self.register(owner)

    @rule(tokens=prompts, salt=salts, use_cache=usually, num_tokens=st.integers(0, 8), registered=usually)
    def admit(self, tokens, salt, use_cache, num_tokens, registered):
        if len(self.live) == 4:
            self.release(self.live[0])
        owner = self.allocate(tokens, salt, use_cache)
        if num_tokens:
            self.run(owner, num_tokens, registered)

    @precondition(lambda self: self.live)
    @rule(which=owners, num_tokens=st.integers(1, 8), registered=usually)
    def run_a_chunk(self, which, num_tokens, registered):
        self.run(self.live[which % len(self.live)], num_tokens, registered)

    @precondition(lambda self: self.live)
    @rule(which=owners, num_tokens=st.integers(1, 8))
    def grow_and_run_later(self, which, num_tokens):
        self.grow(self.live[which % len(self.live)], num_tokens)

    @precondition(lambda self: self.live)
    @rule(which=owners, token=st.integers(0, 1))
    def sample(self, which, token):
        owner = self.live[which % len(self.live)]
        if owner.written == len(owner.tokens):
            owner.tokens.append(token)
        self.run(owner, 1, True)

    @precondition(lambda self: self.live)
    @rule(which=owners)
    def look_up_again(self, which):
        owner = self.live[which % len(self.live)]
        self.check_lookup(owner.tokens, owner.salt, owner.hashes)

    @precondition(lambda self: self.live)
    @rule(which=owners)
    def end(self, which):
        self.release(self.live[which % len(self.live)])

    @precondition(lambda self: 0 < len(self.live) < 4)
    @rule(which=owners)
    def fork(self, which):
        parent = self.live[which % len(self.live)]
        if len(parent.table) > -(-parent.written // self.block_size):
            return  # forks happen between steps: no block is there that nothing was written to
        self.manager.fork(parent.seq_id, self.next_id)
        child = copy.deepcopy(parent)
        child.seq_id = self.next_id
        self.live.append(child)
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(which=owners)
    def rename(self, which):
        owner = self.live[which % len(self.live)]
        assert self.manager.rename(owner.seq_id, self.next_id)
        assert not self.manager.rename(owner.seq_id, self.next_id + 1)
        owner.seq_id = self.next_id
        self.next_id += 1

    @precondition(lambda self: self.live)
    @rule(which=st.sets(owners, min_size=1))
    def swap_out(self, which):
        leaving = [owner for i, owner in enumerate(self.live) if i in which]
        blocks = {block for owner in leaving for block in owner.table}
        before = repr(vars(self.manager))
        moved = self.manager.swap_out([owner.seq_id for owner in leaving])
        held = {block for owner in self.swapped for block in owner.table}
        if len(blocks) > len(self.host_contents) - len(held):
            assert moved is None and repr(vars(self.manager)) == before
            return
        assert {block for block, _ in moved} == blocks and len(moved) == len(blocks)
        to_host = dict(moved)
        assert len(set(to_host.values())) == len(moved) and not held & set(to_host.values())
        for block, host_block in moved:
            self.host_contents[host_block] = list(self.contents[block])
        for owner in leaving:
            self.released(owner)
            owner.table = [to_host[block] for block in owner.table]
            owner.offered = 0
        self.swapped += leaving

    @precondition(lambda self: self.swapped)
    @rule(which=st.sets(owners, min_size=1))
    def swap_in(self, which):
        coming = [owner for i, owner in enumerate(self.swapped) if i in which]
        host_blocks = {block for owner in coming for block in owner.table}
        if len(host_blocks) > len(self.free) + len(self.idle):
            return
        # A host block that is shared with one who stays is copied, and stays, too.
        moved = self.manager.swap_in([owner.seq_id for owner in coming])
        assert {host_block for host_block, _ in moved} == host_blocks and len(moved) == len(host_blocks)
        for host_block, block in moved:
            self.take(block)
            self.contents[block] = list(self.host_contents[host_block])
        for owner in coming:
            owner.table = [dict(moved)[block] for block in owner.table]
            self.swapped.remove(owner)
            self.live.append(owner)

    @precondition(lambda self: self.swapped)
    @rule(which=owners)
    def end_while_swapped(self, which):
        owner = self.swapped.pop(which % len(self.swapped))
        self.manager.free(owner.seq_id)

    @rule()
    def reset_prefix_cache(self):
        self.manager.reset_prefix_cache()
        self.known = {}
        self.free |= self.idle.keys()
        self.idle = {}
        for owner in self.live + self.swapped:
            owner.registers = False

    @precondition(lambda self: self.copies)
    @rule()
    def take_copies(self):
        assert self.manager.take_copies() == self.copies
        self.copies = []

    @invariant()
    def books_balance(self):
        manager = self.manager
        check_blocks(manager)
        assert manager.block_tables == {owner.seq_id: owner.table for owner in self.live}
        assert manager.ref_counts == [self.owners_of(block) for block in range(self.num_blocks)]
        used = {block for owner in self.live for block in owner.table}
        assert used | self.free | self.idle.keys() == set(range(self.num_blocks))
        assert len(used) + len(self.free) + len(self.idle) == self.num_blocks
        assert manager.num_free_blocks == self.num_blocks - len(used)
        assert (manager.num_hit_tokens, manager.prefixes.num_evictions) == (self.hit_tokens, self.evictions)
        assert (manager.num_query_tokens, manager.num_cached_blocks) == (self.query_tokens, len(self.idle))
        assert manager.host.tables == {owner.seq_id: owner.table for owner in self.swapped}
        held = {block for owner in self.swapped for block in owner.table}
        assert len(manager.host.free_blocks) == len(self.host_contents) - len(held)
        for owner in self.live:
            slots = [slot for block in owner.table for slot in self.contents[block]]
            assert slots[: owner.written] == [(owner.salt, tuple(owner.tokens[: i + 1])) for i in range(owner.written)]

    @invariant()
    def every_known_block_is_found_behind_its_own_tokens_only(self):
        for known in self.known.values():
            for salt in ("", "a"):
                self.check_lookup([*known.tokens, 0], salt)
            for other in self.known.values():
                if len(other.tokens) < len(known.tokens):
                    self.check_lookup([*other.tokens, *known.tokens[len(other.tokens) :], 0], other.salt)


@pytest.mark.parametrize("name", HASHES)
def test_any_sequence_of_calls_keeps_the_books_and_shares_only_equal_prefixes(name, monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash_block", HASHES[name])
    options = settings(max_examples=examples(100), stateful_step_count=40, deadline=None)
    run_state_machine_as_test(Books, settings=options)


# Examples


def grow(manager, seq_id, num_tokens):
    """Grow a table of which every token so far is written and every block full, so that nothing is copied."""
    written = len(manager.block_tables[seq_id]) * manager.block_size
    return manager.grow(seq_id, min(written, num_tokens), num_tokens)


def put(manager: BlockManager, seq_id: int, tokens: list[int], salt: str = "", use_cache: bool = True) -> list[int]:
    """Run a sequence to the end of its tokens, as the engine does. Returns its block table."""
    hit = manager.lookup(tokens, salt) if use_cache else []
    manager.allocate(seq_id, hit)
    assert grow(manager, seq_id, len(tokens))
    manager.register(seq_id, tokens, len(tokens), salt)
    return list(manager.block_tables[seq_id])


def found(manager: BlockManager, tokens: list[int], salt: str = "") -> list[int]:
    """The blocks of the longest cached prefix of `tokens`, which may be all of them."""
    return [prefix.blocks[0] for prefix in manager.lookup([*tokens, -1], salt)]


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for_rounds_up(num_tokens, blocks):
    assert BlockManager(8, 4).blocks_for(num_tokens) == blocks


def test_a_new_pool_is_all_free():
    manager = BlockManager(5, 4)
    assert manager.num_free_blocks == 5
    assert manager.lookup([1] * 40) == []
    check_blocks(manager)


def test_a_block_is_found_only_after_it_is_written_and_registered():
    manager = BlockManager(4, 2)
    manager.allocate(0)
    assert grow(manager, 0, 4)
    assert found(manager, [1, 2, 3, 4]) == []
    manager.register(0, [1, 2, 3, 4], 1)
    assert found(manager, [1, 2, 3, 4]) == []
    manager.register(0, [1, 2, 3, 4], 3)
    assert found(manager, [1, 2, 3, 4]) == manager.block_tables[0][:1]
    manager.register(0, [1, 2, 3, 4], 4)
    assert found(manager, [1, 2, 3, 4]) == manager.block_tables[0]


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 2)])
def test_a_full_hit_leaves_at_least_one_token_to_compute(length, hits):
    manager = BlockManager(4, 2)
    put(manager, 0, [1, 2, 3, 4])
    assert len(manager.lookup([1, 2, 3, 4, 5, 6, 7, 8][:length])) == hits


def test_a_hit_needs_every_token_before_it_to_be_equal():
    manager = BlockManager(4, 2)
    table = put(manager, 0, [1, 2, 3, 4])
    assert found(manager, [1, 2, 3, 5]) == table[:1]
    assert found(manager, [0, 2, 3, 4]) == []
    assert found(manager, [3, 4]) == []


def test_another_salt_shares_nothing():
    manager = BlockManager(8, 2)
    table = put(manager, 0, [1, 2, 3, 4], salt="alice")
    assert found(manager, [1, 2, 3, 4], "alice") == table
    assert found(manager, [1, 2, 3, 4], "bob") == []
    assert found(manager, [1, 2, 3, 4]) == []
    other = put(manager, 1, [1, 2, 3, 4], salt="bob")
    assert not set(other) & set(table)
    assert found(manager, [1, 2, 3, 4], "bob") == other


def test_a_shared_block_is_given_back_by_its_last_owner():
    manager = BlockManager(4, 2, enable_prefix_caching=True)
    first = put(manager, 0, [1, 2, 3])
    second = put(manager, 1, [1, 2, 4])
    assert first[0] == second[0] and first[1] != second[1]
    assert manager.ref_counts[first[0]] == 2
    manager.free(0)
    assert manager.num_free_blocks == 2
    manager.free(1)
    assert manager.num_free_blocks == 4
    assert found(manager, [1, 2]) == first[:1]


def test_a_freed_block_that_was_not_registered_is_not_found():
    manager = BlockManager(2, 2)
    manager.allocate(0)
    assert grow(manager, 0, 2)
    manager.free(0)
    assert found(manager, [1, 2]) == []


def test_the_tail_of_a_prefix_is_evicted_before_its_head():
    manager = BlockManager(3, 1)
    table = put(manager, 0, [1, 2, 3])
    manager.free(0)
    for left in (2, 1, 0):
        manager.allocate(9 + left)
        assert grow(manager, 9 + left, 1)
        assert found(manager, [1, 2, 3]) == table[:left]


def test_a_prefix_used_again_is_evicted_last():
    manager = BlockManager(2, 1)
    old, new = put(manager, 0, [1]), put(manager, 1, [2])
    manager.free(0)
    manager.free(1)
    manager.allocate(2, manager.lookup([1, 0]))
    manager.free(2)
    manager.allocate(3)
    assert grow(manager, 3, 1)
    assert manager.block_tables[3] == new
    assert found(manager, [1]) == old
    assert found(manager, [2]) == []


def test_a_free_block_is_taken_before_a_cached_one():
    manager = BlockManager(3, 1)
    put(manager, 0, [1])
    manager.free(0)
    manager.allocate(1)
    assert grow(manager, 1, 2)
    assert manager.prefixes.num_evictions == 0
    assert grow(manager, 1, 3)
    assert manager.prefixes.num_evictions == 1


def test_two_writers_of_one_prefix_keep_their_own_blocks_and_the_first_is_shared():
    manager = BlockManager(4, 2)
    for seq_id in (0, 1):
        manager.allocate(seq_id, manager.lookup([1, 2, 3]))
        assert grow(manager, seq_id, 2)
    for seq_id in (0, 1):
        manager.register(seq_id, [1, 2, 3], 2)
    first, second = manager.block_tables[0][0], manager.block_tables[1][0]
    assert first != second
    assert found(manager, [1, 2]) == [first]
    manager.free(1)
    check_blocks(manager)
    manager.allocate(2)
    assert grow(manager, 2, 6), "the second copy is free, not cached"
    assert second in manager.block_tables[2]
    assert found(manager, [1, 2]) == [first]


def test_a_descendant_is_found_again_when_its_evicted_ancestor_is_written_anew():
    manager = BlockManager(3, 1)
    for seq_id, tokens in ((0, [1]), (1, [1, 2])):
        manager.allocate(seq_id)
        assert grow(manager, seq_id, len(tokens))
    manager.register(0, [1], 1)
    manager.register(1, [1, 2], 2)  # its block of [1] is a copy, its block of [1, 2] is the child of sequence 0's
    ancestor, descendant = manager.block_tables[0][0], manager.block_tables[1][1]
    assert found(manager, [1, 2]) == [ancestor, descendant]
    manager.free(0)
    manager.allocate(2)
    assert grow(manager, 2, 1)
    assert manager.prefixes.num_evictions == 1
    assert found(manager, [1, 2]) == []
    manager.free(2)
    (anew,) = put(manager, 3, [1])
    assert found(manager, [1, 2]) == [anew, descendant]
    check_blocks(manager)


def test_a_descendant_is_not_found_behind_another_ancestor_with_the_same_hash(monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent_hash, tokens: bytes([tokens[0] % 10]))
    manager = BlockManager(3, 1)
    for seq_id, tokens in ((0, [1]), (1, [1, 2])):
        manager.allocate(seq_id)
        assert grow(manager, seq_id, len(tokens))
    manager.register(0, [1], 1)
    manager.register(1, [1, 2], 2)
    manager.free(0)
    (impostor,) = put(manager, 2, [11])
    assert manager.prefixes.num_evictions == 1
    assert found(manager, [11, 2]) == [impostor]
    assert found(manager, [1, 2]) == []


def test_what_follows_a_collision_is_not_found_behind_the_other_prefix(monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent_hash, tokens: bytes([tokens[0] % 10]))
    manager = BlockManager(4, 1)
    first = put(manager, 0, [1])
    put(manager, 1, [11, 2])  # its block of [11] is not registered, that of [11, 2] is
    assert found(manager, [1, 2]) == first
    assert found(manager, [11, 2]) == []


def test_a_prefix_with_the_hash_of_another_has_its_own_block_and_is_never_found(monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash_block", HASHES["constant"])
    manager = BlockManager(4, 2)
    first = put(manager, 0, [1, 2])
    second = put(manager, 1, [3, 4])
    assert first != second
    assert found(manager, [1, 2]) == first
    assert found(manager, [3, 4]) == []
    assert found(manager, [1, 2], "salt") == []
    manager.free(1)
    check_blocks(manager)
    assert manager.num_free_blocks == 3
    manager.free(0)
    assert manager.num_free_blocks == 4


def test_grow_that_is_short_of_blocks_changes_nothing():
    manager = BlockManager(4, 2)
    put(manager, 0, [1, 2, 3])
    put(manager, 1, [5, 6])
    manager.free(1)
    before = copy.deepcopy((manager.block_tables, manager.ref_counts, manager.prefixes.num_evictions))
    assert manager.num_free_blocks == 2
    assert not grow(manager, 0, 9)
    after = (manager.block_tables, manager.ref_counts, manager.prefixes.num_evictions)
    assert after == before
    assert len(found(manager, [5, 6])) == 1
    assert grow(manager, 0, 8)


def test_grow_to_fewer_tokens_keeps_the_table():
    manager = BlockManager(4, 2)
    table = put(manager, 0, [1, 2, 3, 4])
    assert grow(manager, 0, 1)
    assert manager.block_tables[0] == table


def test_hashes_that_are_kept_find_what_fresh_ones_find(monkeypatch):
    manager = BlockManager(8, 2)
    tokens, hashes = [1, 2, 3, 4, 5], []
    assert manager.lookup(tokens, "", hashes) == []
    assert len(hashes) == 1, "blocks behind the first that is not found are not hashed"
    table = put(manager, 0, [1, 2, 3, 4, 5, 6])
    assert [prefix.blocks[0] for prefix in manager.lookup(tokens, "", hashes)] == table[:2]
    assert len(hashes) == 2
    calls = []
    monkeypatch.setattr(prefix_cache, "hash_block", lambda *arguments: calls.append(arguments))
    assert [prefix.blocks[0] for prefix in manager.lookup(tokens, "", hashes)] == table[:2]
    assert calls == [], "nothing is hashed twice"


def test_without_prefix_caching_nothing_is_shared_or_kept():
    manager = BlockManager(4, 2, enable_prefix_caching=False)
    first, second = put(manager, 0, [1, 2, 3, 4]), put(manager, 1, [1, 2, 3, 4])
    assert not set(first) & set(second)
    manager.free(0)
    manager.free(1)
    assert found(manager, [1, 2, 3, 4]) == []
    put(manager, 2, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (manager.num_hit_tokens, manager.prefixes.num_evictions) == (0, 0)
    check_blocks(manager)


def test_hit_tokens_are_counted():
    manager = BlockManager(8, 2)
    put(manager, 0, [1, 2, 3, 4, 5])
    assert manager.num_hit_tokens == 0
    put(manager, 1, [1, 2, 3, 4, 5])
    assert manager.num_hit_tokens == 4


def test_a_sequence_has_one_table():
    manager = BlockManager(4, 2)
    manager.allocate(7)
    with pytest.raises(ValueError, match="7"):
        manager.allocate(7)


# Windows: a logical block has a physical block for each kind of layers


def slid(manager: BlockManager, seq_id: int, tokens: list[int], position: int, salt: str = "") -> list[int]:
    """`put` a sequence, and go on to a later position. Returns its table before that."""
    table = put(manager, seq_id, tokens, salt)
    manager.slide(seq_id, position)
    check_blocks(manager)
    return table


@pytest.mark.parametrize(("position", "gone"), [(0, 0), (4, 0), (5, 0), (6, 1), (7, 1), (8, 2), (10, 3)])
def test_blocks_that_the_window_does_not_reach_are_given_back(position, gone):
    manager = BlockManager(20, 2, windows=(None, 5))
    table = slid(manager, 0, list(range(10)), position)
    assert len(table) == 10
    left = manager.block_tables[0]
    assert left[::2] == table[::2], "there is no window"
    assert left[1::2] == [NO_BLOCK] * gone + table[1::2][gone:]
    assert manager.num_cached_blocks == gone
    manager.slide(0, position)
    assert manager.block_tables[0] == left, "a second time changes nothing"


def test_a_sequence_that_goes_back_a_little_keeps_what_it_sees():
    """Drafts that are refused."""
    manager = BlockManager(20, 2, windows=(5,))
    slid(manager, 0, list(range(10)), 8)
    left = list(manager.block_tables[0])
    manager.slide(0, 6)
    assert manager.block_tables[0] == left


def test_a_prefix_needs_only_the_blocks_that_its_next_token_sees():
    manager = BlockManager(12, 2, windows=(None, 3))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = slid(manager, 0, tokens, 8)
    manager.free(0)
    hit = manager.lookup([*tokens, 9])
    assert len(hit) == 4
    assert manager.prefixes.table_of(hit) == [
        table[0],
        NO_BLOCK,
        table[2],
        NO_BLOCK,
        table[4],
        NO_BLOCK,
        table[6],
        table[7],
    ]
    assert manager.allocate(1, hit) == 8
    check_blocks(manager)
    assert manager.num_cached_blocks == 3


def evict(manager: BlockManager, block: int) -> None:
    """Have a cached block evicted."""
    manager.prefixes.cached.move_to_end(block, last=False)
    manager._free, free = [], manager._free
    assert manager._take_block() == block
    manager._free = [*free, block]
    check_blocks(manager)


@pytest.mark.parametrize(("windows", "evicted", "num_found"), [
    ((None, 3), [], 4),
    ((None, 3), [0], 0),  # without a window: nothing behind it is found
    ((None, 3), [4], 2),
    ((None, 3), [1], 4),  # with one: no further than the window reaches
    ((None, 3), [3], 4),
    ((None, 3), [5], 4),
    ((None, 3), [7], 3),
    ((None, 3), [7, 5], 2),
    ((None, 3), [7, 3], 3),
    ((None, 5), [7, 3], 1),
    ((3,), [], 4),
    ((3,), [0, 1, 2], 4),  # nothing is left of the logical blocks
    ((3,), [3], 3),
    ((5,), [0, 1], 4),
    ((5,), [0, 3], 3),
    ((5,), [2], 2),
])  # fmt: skip
def test_the_longest_prefix_of_which_everything_is_left_that_is_seen(windows, evicted, num_found):
    manager = BlockManager(12, 2, windows=windows)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    table = slid(manager, 0, tokens, 8)
    manager.free(0)
    for index in evicted:
        evict(manager, table[index])
    hit = manager.lookup([*tokens, 9])
    assert len(hit) == num_found
    assert manager.allocate(1, hit, 9) == 2 * num_found
    assert manager.grow(1, 2 * num_found, 9)
    manager.register(1, [*tokens, 9], 8)
    manager.slide(1, 8)
    check_blocks(manager)
    manager.free(1)
    assert len(manager.lookup([*tokens, 9])) == 4, "what was evicted has been registered anew"
    assert manager.num_free_blocks == 12


@pytest.mark.parametrize("windows", [(None,), (None, 3), (3,), (3, 5)])
def test_a_lookup_that_finds_nothing_looks_at_no_tokens_again(monkeypatch, windows):
    manager, hashes, looked = BlockManager(40, 2, windows=windows), [], []
    tokens = list(range(20))
    assert manager.lookup(tokens, "", hashes) == []
    read = PrefixCache._tokens_of_block
    monkeypatch.setattr(PrefixCache, "_tokens_of_block", lambda *args: looked.append(args[2]) or read(*args))
    assert manager.lookup(tokens, "", hashes) == [] and looked in ([], [0])
    slid(manager, 0, tokens[:8], 8)
    looked.clear()
    assert len(manager.lookup(tokens, "", hashes)) == 4, "it is found once it is there"
    assert set(looked) <= {0, 1, 2, 3, 4}


def test_a_prefix_behind_evicted_blocks_is_compared_token_by_token(monkeypatch):
    monkeypatch.setattr(prefix_cache, "hash_block", lambda parent_hash, tokens: bytes([tokens[-1]]))
    manager = BlockManager(12, 2, windows=(3,))
    table = slid(manager, 0, [1, 2, 3, 4, 5, 6], 6)
    manager.free(0)
    evict(manager, table[0])
    assert len(manager.lookup([1, 2, 3, 4, 5, 6, 7])) == 3
    assert manager.lookup([0, 2, 3, 4, 5, 6, 7]) == [], "the hashes are equal"


def test_forks_share_what_is_left_and_copy_what_they_write_to_for_each_kind():
    manager = BlockManager(12, 2, windows=(None, 3))
    table = slid(manager, 0, [1, 2, 3, 4, 5], 5)
    manager.fork(0, 1)
    check_blocks(manager)
    assert manager.blocks_to_grow([(1, 5, 6)]) == 2
    assert manager.grow(1, 5, 6)
    new = manager.block_tables[1][4:]
    assert sorted(manager.take_copies()) == sorted(zip(table[4:], new, strict=True))
    manager.slide(1, 6)
    assert manager.block_tables[0][3] == table[3] and manager.block_tables[1][3] == NO_BLOCK
    assert manager.ref_counts[table[3]] == 1
    check_blocks(manager)


def test_a_swap_takes_what_is_left():
    manager = BlockManager(12, 2, num_host_blocks=6, windows=(None, 3))
    table = slid(manager, 0, [1, 2, 3, 4, 5, 6], 6)
    manager.fork(0, 1)
    kept = [block for block in table if block not in (table[1], table[3])]
    moved = manager.swap_out([0, 1])
    assert sorted(block for block, _ in moved) == sorted(kept)
    check_blocks(manager)
    back = manager.swap_in([0, 1])
    assert [host for host, _ in back] == sorted(host for _, host in moved)
    check_blocks(manager)
    assert [block == NO_BLOCK for block in manager.block_tables[0]] == [False, True, False, True, False, False]
    assert manager.block_tables[0] == manager.block_tables[1]
    manager.register(0, [1, 2, 3, 4, 5, 6], 6)
    check_blocks(manager)
    assert len(manager.lookup([1, 2, 3, 4, 5, 6, 7])) == 3


def lose_a_block(manager):
    manager._free.pop()


def free_a_block_twice(manager):
    manager._free.append(manager._free[0])


def free_a_used_block(manager):
    manager._free[0] = manager.block_tables[0][0]


def miscount(manager):
    manager.ref_counts[manager.block_tables[0][0]] += 1


def repeat_a_block(manager):
    manager.block_tables[0].append(manager.block_tables[0][0])
    manager.ref_counts[manager.block_tables[0][0]] += 1


def forget_a_hash(manager):
    manager.prefixes.by_hash.popitem()


def forget_a_registration(manager):
    del manager.prefixes.by_block[manager.block_tables[0][0]]


def forget_a_chain(manager):
    del manager._chains[0]


def register_a_free_block(manager):
    block = manager._free[-1]
    manager.prefixes.by_block[block] = manager.prefixes.by_hash[b"x"] = prefix_cache.Prefix(
        b"x", None, (8, 9), "", [block]
    )


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_a_block_twice,
        free_a_used_block,
        miscount,
        repeat_a_block,
        forget_a_hash,
        forget_a_registration,
        forget_a_chain,
        register_a_free_block,
    ],
    ids=lambda damage: damage.__name__,
)
def test_check_blocks_sees_damage(damage):
    manager = BlockManager(5, 2)
    put(manager, 0, [1, 2, 3])
    check_blocks(manager)
    damage(manager)
    with pytest.raises((AssertionError, KeyError)):
        check_blocks(manager)


def test_forgotten_prefixes_are_not_found_and_their_blocks_are_free():
    manager = BlockManager(8, 4)
    tokens = list(range(12))
    for seq_id in (0, 1):
        manager.allocate(seq_id)
        manager.grow(seq_id, 0, 12)
    manager.register(0, tokens, 12, "a")
    manager.register(1, tokens, 12, "b")
    manager.free(1)
    for salt in ("a", "b"):
        manager.forget(tokens, salt)
        assert manager.lookup([*tokens, 99], salt) == []
    assert manager.num_cached_blocks == 0
    check_blocks(manager)
    manager.free(0)
    assert (manager.num_cached_blocks, manager.num_free_blocks) == (0, 8)
    check_blocks(manager)


def test_a_state_needs_one_block_and_is_found_where_a_step_has_ended():
    """Blocks of 2, a kind without a window, and one with states."""
    manager, tokens = BlockManager(24, 2, windows=(None, STATE)), list(range(1, 12))
    manager.allocate(0)
    for start, end in ((0, 5), (5, 6), (6, 9), (9, 10)):  # of blocks 0, 1 and 3, no step ends at the end
        assert manager.blocks_to_grow([(0, start, end)]) == len(range(-(-start // 2), -(-end // 2))) + (end in (5, 9))
        assert manager.grow(0, start, end)
        manager.register(0, tokens, end)
        manager.slide(0, end, marks=[6])
        check_blocks(manager)
    states = manager.block_tables[0][1::2]
    assert [block == NO_BLOCK for block in states] == [True, True, True, True, False]
    manager.free(0)
    found = [len(manager.lookup(tokens[:length])) for length in range(1, 12)]
    assert found == [0, 0, 0, 0, 0, 0, 3, 3, 3, 3, 5]
    assert manager.prefixes.marks(tokens[:9], "", []) == [8] and manager.prefixes.marks([*tokens[:5], 0], "", []) == [4]


def test_states_that_are_left_behind_are_evicted_before_others_unless_they_are_marked():
    manager, tokens = BlockManager(24, 2, windows=(None, STATE)), list(range(1, 12))
    manager.allocate(0)
    left = []
    for end in (2, 4, 6, 8):
        assert manager.grow(0, end - 2, end)
        left.append(manager.block_tables[0][-1])
        manager.register(0, tokens, end)
        manager.slide(0, end, marks=[4])
    manager.free(0)
    assert [manager.prefixes.evict() for _ in range(2)] == [left[2], left[0]]
    assert left[1] in manager.prefixes.cached and left[3] in manager.prefixes.cached


def test_the_state_before_a_draft_is_kept():
    """The draft reaches into two more blocks, whose states get no block until the sequence is there."""
    manager = BlockManager(24, 2, windows=(None, STATE))
    manager.allocate(0)
    assert manager.grow(0, 0, 7, num_drafted=4)
    assert [block == NO_BLOCK for block in manager.block_tables[0][1::2]] == [True, False, True, True]
    manager.shrink(0, 6)
    assert len(manager.block_tables[0]) == 6
    assert manager.grow(0, 3, 6) and manager.block_tables[0][5] != NO_BLOCK
    manager.slide(0, 6)
    assert [block == NO_BLOCK for block in manager.block_tables[0][1::2]] == [True, True, False]
    check_blocks(manager)
