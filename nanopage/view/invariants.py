"""Invariants of a BlockManager, for tests and debugging."""

from nanopage.engine.block_manager import BlockManager
from nanopage.state.layer_kinds import STATE
from nanopage.step import NO_BLOCK


def check_blocks(manager: BlockManager) -> None:
    """Raise AssertionError if the tables, counts and lists disagree. Takes time linear in the pool."""
    by_hash, by_block = manager.prefixes.by_hash, manager.prefixes.by_block
    counts = manager.blocks_of(list(manager.block_tables))
    owners = [counts[block] for block in range(manager.num_blocks)]
    assert owners == manager.ref_counts, "reference counts differ from owners"
    for table in (*manager.block_tables.values(), *manager.host.tables.values()):
        blocks = [block for block in table if block != NO_BLOCK]
        assert len(set(blocks)) == len(blocks), f"a block twice in one table: {table}"
        assert len(table) % manager.num_kinds == 0
        for kind, window in enumerate(manager.windows):  # only the first blocks of a kind are given back
            if window == STATE:
                continue
            gone = [block == NO_BLOCK for block in table[kind :: manager.num_kinds]]
            assert gone == sorted(gone, reverse=True) and (window is not None or not any(gone))
    free, cached = set(manager._free), set(manager.prefixes.cached)
    used = {block for block, count in enumerate(owners) if count}
    assert len(free) == len(manager._free), "a block twice on the free list"
    assert not (free & cached or free & used or cached & used), "a block in two states"
    assert len(free) + len(cached) + len(used) == manager.num_blocks, "a block is lost"
    assert manager._chains.keys() == manager.block_tables.keys() | manager.host.tables.keys()
    assert not manager.block_tables.keys() & manager.host.tables.keys(), "a sequence in both pools"
    host_owners = manager.host.blocks_of(list(manager.host.tables))
    assert [host_owners[block] for block in range(len(manager.host.ref_counts))] == manager.host.ref_counts
    host_free = set(manager.host.free_blocks)
    assert len(host_free) == len(manager.host.free_blocks) and not host_free & host_owners.keys()
    assert len(host_free) + len(host_owners) == len(manager.host.ref_counts), "a host block is lost"
    assert cached <= by_block.keys() <= cached | used, "a registered block is free"
    for block, prefix in by_block.items():
        assert block in prefix.blocks and by_hash[prefix.hash] is prefix
    registered = [block for prefix in by_hash.values() for block in prefix.blocks if block != NO_BLOCK]
    assert sorted(registered) == sorted(by_block)
    assert {id(prefix) for prefix in by_block.values()} == {id(prefix) for prefix in by_hash.values()}
