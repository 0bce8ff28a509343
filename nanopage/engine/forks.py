"""Groups of several sequences: the completions of a prompt share its blocks, and so do beams."""

from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence


def fork_siblings(queues: Queues, leader: Sequence) -> None:
    """The leader has computed what all sequences of its group share: let the others share its blocks."""
    leader.group.forked = True
    for seq in leader.group.live:
        if seq is not leader:
            queues.block_manager.fork(leader.seq_id, seq.seq_id)
            seq.num_computed_tokens = leader.num_computed_tokens


def advance_searches(queues: Queues, schedule: Schedule, taken: list[Sequence]) -> None:
    """Let each search choose whose sequences all have candidates. Fork those that continue more than once, and free
    those that end.

    Args: taken: the sequences that took tokens or candidates in this step.
    """
    for group in schedule.groups if any(seq.candidates for seq in taken) else ():
        search = group.beam_search
        if search is None or group.finished or not all(seq.candidates for seq in group.live):
            continue
        ending, forks = search.choose(group)
        schedule.tell("beams", ending, forks)
        for seq in ending:
            queues.block_manager.free(seq.seq_id)
            queues.writer.leave(seq)
        for parent, seq in forks:
            queues.block_manager.fork(parent.seq_id, seq.seq_id)
            seq.num_computed_tokens = parent.num_computed_tokens
            seq.parent = parent
        search.adopt(group)
        if search.finished:
            queues.finish(group, None, "stop")
