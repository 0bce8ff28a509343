"""Groups of several sequences: the completions of a prompt share its blocks, and so do beams."""

from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence


def fork_siblings(queues: Queues, leader: Sequence) -> None:
    """Let the group's other sequences share the blocks of the leader, which has computed what all have in common."""
    leader.group.forked = True
    for seq in leader.group.live:
        if seq is not leader:
            queues.block_manager.fork(leader.seq_id, seq.seq_id)
            seq.num_computed_tokens = leader.num_computed_tokens


def advance_searches(queues: Queues, schedule: Schedule, taken: list[Sequence]) -> None:
    """Let each beam search choose, once all its sequences have candidates. Fork sequences that continue more than once,
    and free sequences that end.

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
