"""After an exception: every request waits again, and those that may have caused it run one at a time.

Groups that may have caused an exception are `suspects`. Each runs alone until it gets a token, so that the next failure
has one group to blame.
"""

from nanopage.engine.preemption import give_up_blocks
from nanopage.engine.queues import Queues, order
from nanopage.engine.sequence import Sequence, SequenceGroup, Status


def restart(queues: Queues, groups: list[SequenceGroup]) -> None:
    """After an exception, start all groups again from the tokens that are known. Takes back all blocks and forgets all
    prefixes.

    Args: groups: all unfinished groups. The queues are not read: the exception may have left them inconsistent.
    """
    queues.block_manager.reset()
    queues.writer.reset()
    queues.adapter_slots.reset()
    queues.running, queues.swapped = [], []
    for group in groups:
        queues.number(group)
        if group.next_beams is not None:
            group.take_beams()
        for seq in group.seqs:
            seq.restart()
            if not seq.finished and (ending := _find_ending(group, seq)):
                seq.finish_reason, seq.stop_reason = ending
        if group.last_event is None:
            queues.record_added(group)
        elif group.last_event not in ("added", "preempted", "finished"):
            queues.record("preempted", group, reason="restart")
        group.status = Status.WAITING
    queues.waiting = sorted(groups, key=order)
    for group in groups:
        queues.end_if_finished(group)


def _find_ending(group: SequenceGroup, seq: Sequence) -> tuple[str, int | None] | None:
    """(finish_reason, stop_reason) if the tokens that are known end a sequence."""
    if group.error is not None:
        return "error", None
    if group.beam_search is not None:
        return ("stop", None) if group.beam_search.finished else None
    return seq.find_ending() if seq.num_output_tokens else None


def isolate(queues: Queues, group: SequenceGroup) -> None:
    """Make a waiting group the only running one. The others give up their blocks."""
    for other in queues.running:
        give_up_blocks(queues, other, reason="alone", cause=group.request_id)
    queues.waiting = sorted([*queues.waiting, *queues.running], key=order)
    queues.waiting.remove(group)
    queues.running, group.status = [group], Status.RUNNING
