"""Preemption: running groups give up their blocks (PagedAttention, SOSP 2023, section 4.5).

A group is recomputed or swapped. Recomputation gives up the blocks and computes their tokens again, except those that
are still in the prefix cache. A group of several sequences takes from the cache only what all of them have in common; a
request with prompt_logprobs, or whose hidden states are averaged, takes nothing. Swapping keeps the blocks in host
memory. By default, a group with one live sequence is recomputed. A group with several is swapped, because recomputation
would have to rebuild what they share. When host memory is full, any group is recomputed.

Suspects are groups that may have caused an exception (see recovery.py). Each runs alone until it gets a token, so that
the next failure has one group to blame.
"""

from bisect import insort
from typing import Any

from nanopage.engine.admission import Admission
from nanopage.engine.queues import Queues, order
from nanopage.engine.schedule import Schedule, missing_blocks, next_work
from nanopage.engine.sequence import SequenceGroup, Status


def preempt_for_priority(queues: Queues, admission: Admission, schedule: Schedule, mode: str | None) -> None:
    """Make room for the first waiting group: preempt the fewest groups of lower priority, latest first, so that it can
    start now. Preempt none if it fits anyway, or if even all of them would not be enough.

    Args: mode: as in `preempt`.
    """
    if not queues.waiting or (queues.swapped and order(queues.swapped[0]) < order(queues.waiting[0])):
        return
    first, running = queues.waiting[0], queues.running
    if not running or running[-1].priority <= first.priority:
        return
    prefix = admission.find_prefix(first)
    reserved = [admission.blocks_reserved(group) for group in running]
    numbers = [group.num_unfinished for group in running]
    lack = admission.find_lack(first, prefix, running, sum(numbers), sum(reserved))
    if lack is None:
        return
    why = {"reason": f"priority, {lack.reason}", "cause": first.request_id, "needed": lack.needed, "free": lack.free}
    for num_victims in range(1, 1 + sum(group.priority > first.priority for group in running)):
        kept, victims = running[:-num_victims], running[-num_victims:]
        growth, left = 0, schedule.budget
        for group in kept:
            work = next_work(group, left)
            growth += missing_blocks(queues.block_manager, work)
            left -= sum(num_tokens for _, num_tokens in work)
        sums = sum(numbers[:-num_victims]), sum(reserved[:-num_victims])
        if left > 0 and admission.find_lack(first, prefix, kept, *sums, victims, growth) is None:
            for _ in victims:
                preempt(queues, running.pop(), schedule, mode, **why)
            return


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
    """Bring back the blocks of a swapped group. There must be enough free blocks."""
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


def run_only(queues: Queues, group: SequenceGroup) -> None:
    """Make a waiting group the only running one. The others give up their blocks."""
    for other in queues.running:
        give_up_blocks(queues, other, reason="alone", cause=group.request_id)
    queues.waiting = sorted([*queues.waiting, *queues.running], key=order)
    queues.waiting.remove(group)
    queues.running, group.status = [group], Status.RUNNING


def acquit(queues: Queues, schedule: Schedule) -> None:
    """Remove the groups that got a token in a step from the suspects."""
    for group in schedule.groups if queues.suspects else ():
        if group in queues.suspects:
            queues.suspects.remove(group)
