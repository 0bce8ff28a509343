"""Preemption: running groups give up their blocks (PagedAttention, SOSP 2023, section 4.5).

A group is recomputed or swapped. Recomputation gives up the blocks and computes their tokens again, except those that
are still in the prefix cache. A group of several sequences takes from the cache only what all of them have in common; a
request with prompt_logprobs, or whose hidden states are averaged, takes nothing. Swapping keeps the blocks in host
memory. By default, a group with one live sequence is recomputed. A group with several is swapped, because recomputation
would have to rebuild what they share. When host memory is full, any group is recomputed.
"""

from bisect import insort
from typing import Any

from nanopage.engine.admission import Admission
from nanopage.engine.queues import Queues, order
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import SequenceGroup, Status


def preempt_for_priority(queues: Queues, admission: Admission, schedule: Schedule, mode: str | None) -> None:
    """Preempt groups of lower priority than the first waiting group, latest first, if that admits it now.

    Args: mode: as in `preempt`.
    """
    if not queues.waiting or (queues.swapped and order(queues.swapped[0]) < order(queues.waiting[0])):
        return
    first = queues.waiting[0]
    victims = admission.choose_victims(first, queues.running, schedule.budget)
    if not victims:
        return
    num_running = sum(group.num_unfinished for group in queues.running)
    reserved = sum(map(admission.blocks_reserved, queues.running))
    lack = admission.find_lack(first, admission.find_prefix(first), queues.running, num_running, reserved)
    assert lack is not None
    why = {"reason": f"priority, {lack.reason}", "cause": first.request_id, "needed": lack.needed, "free": lack.free}
    for victim in victims:
        queues.running.pop()
        preempt(queues, victim, schedule, mode, **why)


def preempt(queues: Queues, group: SequenceGroup, schedule: Schedule, mode: str | None, **why: Any) -> None:
    """Take the blocks of a group that is no longer in `running`.

    Args:
        mode: "recompute", "swap" or None, the rule above.
        why: the fields `reason`, `cause`, `needed` and `free` of the RequestEvent.
    """
    live = group.live
    mode = mode or ("recompute" if len(live) == 1 else "swap")
    moved = queues.block_manager.swap_out([seq.seq_id for seq in live]) if mode == "swap" else None
    if moved is not None:
        schedule.batch.swap_out += moved
        group.status = Status.SWAPPED
        for seq in live:
            queues.writer.leave(seq)
        insort(queues.swapped, group, key=order)
        queues.record("swapped out", group, **why)
    else:
        give_up_blocks(queues, group, **why, host_full=mode == "swap")
        insort(queues.waiting, group, key=order)
    group.metrics.num_preemptions += 1
    queues.num_preemptions += 1
    schedule.preempted.append(group)


def swap_in(queues: Queues, group: SequenceGroup, schedule: Schedule) -> None:
    """Bring back the blocks of a swapped group, for which there are enough free ones."""
    free = queues.block_manager.num_free_blocks
    moved = queues.block_manager.swap_in([seq.seq_id for seq in group.live])
    schedule.batch.swap_in += moved
    group.status = Status.RUNNING
    queues.record("swapped in", group, needed=len(moved), free=free)


def give_up_blocks(queues: Queues, group: SequenceGroup, **why: Any) -> None:
    """Free the group's blocks. Its tokens will be computed again.

    Args: why: fields of the RequestEvent.
    """
    for seq in group.live:
        queues.block_manager.free(seq.seq_id)
        seq.num_computed_tokens = 0
        queues.writer.leave(seq)
    group.status = Status.WAITING
    queues.record("preempted", group, **why)
