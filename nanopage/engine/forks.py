"""Groups of several sequences: the completions of a prompt share its blocks, and so do beams."""

from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence, SequenceGroup


def fork_siblings(queues: Queues, leader: Sequence) -> None:
    """The leader has computed what all sequences of its group share: let the others share its blocks."""
    leader.group.forked = True
    for seq in leader.group.live:
        if seq is not leader:
            queues.block_manager.fork(leader.seq_id, seq.seq_id)
            seq.num_computed_tokens = leader.num_computed_tokens


def advance_beams(queues: Queues, schedule: Schedule, taken: list[Sequence]) -> None:
    """Choose the next beams of each search whose beams all have their candidates.

    Args: taken: the sequences that took tokens or candidates in this step.
    """
    if any(seq.candidates for seq in taken):
        for group in schedule.groups:
            if group.beam_search is not None and not group.finished and all(seq.candidates for seq in group.live):
                _take_beams(queues, group, schedule)


def _take_beams(queues: Queues, group: SequenceGroup, schedule: Schedule) -> None:
    """Fork the beams that continue more than once, and free those that end."""
    assert group.beam_search is not None
    ending, forks = group.choose_beams()
    schedule.tell("beams", ending, forks)
    for seq in ending:
        queues.block_manager.free(seq.seq_id)
        queues.writer.leave(seq)
    for parent, seq in forks:
        queues.block_manager.fork(parent.seq_id, seq.seq_id)
        seq.num_computed_tokens = parent.num_computed_tokens
        seq.parent = parent
    group.take_beams()
    if group.beam_search.finished:
        queues.finish(group, None, "stop")
