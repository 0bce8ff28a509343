"""Admission: whether a waiting or swapped group may start to run.

A group fits if there are free blocks for all of its present tokens. If it has several live sequences, each also
needs at least one block that it does not share. So a long prompt does not start only to be preempted. Blocks that
admitted groups have yet to take are reserved for them, and one percent of the pool (the watermark) stays free so that
running groups can grow. If nothing runs, both are ignored. A group with an adapter also needs a slot for it.
"""

from collections.abc import Iterable

from nanopage.engine.attached import AdapterSlots
from nanopage.engine.block_manager import BlockManager, Prefix
from nanopage.engine.schedule import Schedule, Wait, Work
from nanopage.engine.sequence import SequenceGroup, Status, common_length
from nanopage.state.layer_kinds import BlockNeeds
from nanopage.step import NO_BLOCK


class Admission:
    """The rules of admission over a pool of blocks.

    Args:
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in one step.
        adapter_slots: the workers' slots for adapters, if groups may have any.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        adapter_slots: AdapterSlots | None = None,
    ):
        self.adapter_slots = adapter_slots
        self.needs = BlockNeeds(block_manager.windows, block_manager.block_size, max_num_batched_tokens)
        self.block_manager, self.max_num_seqs = block_manager, max_num_seqs
        self.watermark = block_manager.num_blocks // 100

    def find_prefix(self, group: SequenceGroup) -> list[Prefix]:
        """The cached prefix of a waiting group's tokens."""
        live = group.live
        if live[0].settings.needs_all_positions:  # they need every position computed
            return []
        known = live[0].keys[: common_length(live)]
        return self.block_manager.lookup(known, live[0].cache_salt, live[0].block_hashes)

    def find_computing(self, group: SequenceGroup, prefix: list[Prefix], chunks: Work) -> SequenceGroup | None:
        """The group whose chunk of this step computes the block after a waiting group's cached prefix, if there is
        one. In the next step, that block is in the prefix cache."""
        leader, size = group.live[0], self.block_manager.block_size
        end = (len(prefix) + 1) * size
        if not self.block_manager.prefixes.enabled or leader.settings.needs_all_positions:
            return None
        if end >= common_length(group.live):  # the last token has to be computed anyway
            return None
        for seq, num_tokens in chunks:
            if (
                seq.num_computed_tokens < end <= seq.num_computed_tokens + num_tokens
                and seq.cache_salt == leader.cache_salt
                and seq.keys[:end] == leader.keys[:end]
            ):
                return seq.group
        return None

    def find_wait(
        self,
        group: SequenceGroup,
        prefix: list[Prefix],
        schedule: Schedule,
        running: list[SequenceGroup],
        num_running: int,
        reserved: int,
    ) -> Wait | None:
        """Why the first group of the queues cannot be admitted in this step, if it cannot. Args: as of `find_lack`."""
        if group.status is Status.SWAPPED:
            if schedule.batch.swap_out:  # blocks that this step swaps out cannot come back in the same step
                return Wait(group, "swap")
        elif computing := self.find_computing(group, prefix, schedule.chunks):
            return Wait(group, "prefix", other=computing)
        elif any(seq.num_in_flight for seq in group.live):  # it has just been preempted
            return Wait(group, "tokens")
        return self.find_lack(group, prefix, running, num_running, reserved)

    def find_lack(
        self,
        group: SequenceGroup,
        prefix: list[Prefix],
        running: list[SequenceGroup],
        num_running: int,
        reserved: int,
        victims: Iterable[SequenceGroup] = (),
        growth: int = 0,
    ) -> Wait | None:
        """What a group lacks to be admitted beside those that run; None if it can be admitted.

        Args:
            prefix: its cached prefix, if it is waiting.
            num_running: the sequences of `running` that have not ended.
            reserved: blocks that are reserved for `running`.
            victims: further groups that run now and would be preempted.
            growth: blocks that `running` would take first.
        """
        manager = self.block_manager
        if num_running + group.num_unfinished > self.max_num_seqs:
            return Wait(group, "sequences", group.num_unfinished, self.max_num_seqs - num_running)
        if self.adapter_slots is not None and not self.adapter_slots.fits(group, running):
            return Wait(group, "adapter")
        given_up = manager.blocks_of([seq.seq_id for victim in victims for seq in victim.live])
        free = manager.num_free_blocks - growth
        free += sum(count == manager.ref_counts[block] for block, count in given_up.items())
        kept = self.watermark + reserved if running else 0
        wanted = self.blocks_wanted(group)
        if group.status is Status.SWAPPED:
            present = len(manager.host.blocks_of([seq.seq_id for seq in group.live]))
            # Beside others, it must have blocks to grow, or it would be swapped out again at once.
            needed = max(wanted, present + len(group.live) * manager.num_kinds) if running else present
        else:
            cached = [block for block in manager.prefixes.table_of(prefix) if block != NO_BLOCK]
            needed = wanted - sum(manager.ref_counts[block] > given_up[block] for block in cached)
        return Wait(group, "blocks", needed, max(0, free - kept), kept) if needed > free - kept else None

    def blocks_reserved(self, group: SequenceGroup) -> int:
        """Blocks that a running group was admitted with and has not taken yet."""
        live = group.live
        leader = live[0]
        if group.forked and len(leader.token_ids) + leader.num_in_flight - leader.num_computed_tokens <= 1:
            return 0
        held = self.block_manager.blocks_of([seq.seq_id for seq in live])
        return max(0, self.blocks_wanted(group) - len(held))

    def blocks_wanted(self, group: SequenceGroup) -> int:
        """Blocks for all present tokens of a group. If it has several sequences, each has a block of its own."""
        live = group.live
        shared = common_length(live) if len(live) > 1 else 0
        return self.needs.of([seq.num_tokens for seq in live], shared)
