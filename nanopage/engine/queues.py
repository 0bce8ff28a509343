"""Queues: where each group of sequences is, and how it leaves.

`waiting` groups have no blocks, `running` groups have blocks, and `swapped` groups have blocks in host memory. Each
queue is ordered by (priority, arrival). If there is a `Scheduler.arrange`, it orders `waiting` instead.
"""

import time
from typing import Any

from nanopage.engine.block_manager import BlockManager
from nanopage.engine.schedule import BatchWriter
from nanopage.engine.sequence import Sequence, SequenceGroup, Status
from nanopage.outputs import RequestEvent

NOT_FINITE = (
    "the logits of its next token are not finite: weights that are NaN or infinite, an overflow in float16, or "
    "constraints that forbid every token"
)
NO_VECTOR = "its vector is not finite: weights that are NaN, infinite or too large, or an overflow in float16"


class Queues:
    """The groups of a scheduler.

    Args:
        block_manager: has the blocks of running and swapped groups.
        writer: gives sequences their rows of the workers' tables.
    """

    def __init__(self, block_manager: BlockManager, writer: BatchWriter):
        self.block_manager, self.writer = block_manager, writer
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.suspects: list[SequenceGroup] = []  # run one at a time, each until it gets a token
        self.events: list[RequestEvent] = []  # since `Scheduler.take_events`
        self.num_preemptions = 0
        self._num_added = 0

    def __bool__(self) -> bool:
        return bool(self.waiting or self.running or self.swapped)

    def first(self) -> SequenceGroup:
        """The swapped or waiting group that is admitted next."""
        return min(self.swapped[:1] + self.waiting[:1], key=order)

    def of(self, group: SequenceGroup) -> list[SequenceGroup]:
        """The queue of a group that has not ended."""
        return {Status.WAITING: self.waiting, Status.RUNNING: self.running, Status.SWAPPED: self.swapped}[group.status]

    def number(self, group: SequenceGroup) -> None:
        """Give a group its place in the order of arrival, if it has none."""
        if group.order < 0:
            group.order = self._num_added
            self._num_added += 1

    def finish(
        self, group: SequenceGroup, seq: Sequence | None, finish_reason: str, stop_reason: int | str | None = None
    ) -> None:
        """End one sequence of a group, or all of them (None), and give back the blocks."""
        for ending in [seq] if seq is not None else [s for s in group.seqs if not s.finished]:
            ending.finish_reason, ending.stop_reason = finish_reason, stop_reason
            ending.num_in_flight = 0
            if not group.forked and group.live and not ending.dormant:
                # The leader computes blocks for its siblings, too: hand them to the next live sequence (the ending one
                # is not live any more). If it was not the leader, it has no table, and `rename` does nothing.
                next_leader = group.live[0]
                if self.block_manager.rename(ending.seq_id, next_leader.seq_id):
                    next_leader.num_computed_tokens = ending.num_computed_tokens
            self.block_manager.free(ending.seq_id)
            self.writer.leave(ending)
        self.end_if_finished(group)

    def fail(self, group: SequenceGroup, error: str) -> None:
        """End a group because of an error."""
        group.error = error
        self.finish(group, None, "error")

    def fail_not_finite(self, group: SequenceGroup) -> None:
        """End a group whose logits or vector are not finite."""
        self.forget_prefixes(group)
        self.fail(group, NOT_FINITE if group.seqs[0].settings.pooling_type is None else NO_VECTOR)

    def forget_prefixes(self, group: SequenceGroup) -> None:
        """Forget the prefixes of a group whose K and V are not finite, or may not be: nothing may find them."""
        for seq in group.seqs:
            self.block_manager.forget(seq.keys, seq.cache_salt)

    def end_if_finished(self, group: SequenceGroup) -> None:
        """Take a group out of its queue if all of its sequences have ended."""
        if group.finished or group.num_unfinished:
            return
        self.of(group).remove(group)
        if group in self.suspects:
            self.suspects.remove(group)
        group.status, group.items = Status.FINISHED, []  # items are large, and a group is garbage in a cycle
        if group.last_event != "finished":  # recovery ends groups again
            group.metrics.finished_time = time.perf_counter()
            self.record("finished", group, reason=group.seqs[0].finish_reason or "")

    def record(self, kind: str, group: SequenceGroup, **why: Any) -> None:
        """Record an event. Args: why: fields of the RequestEvent."""
        event, end = RequestEvent(kind, group.request_id, **why), len(self.events)
        # One statement of plain assignments: no signal handler can run in the middle.
        self.events[end:], group.last_event = (event,), kind


def order(group: SequenceGroup) -> tuple[int, int]:
    return group.priority, group.order
