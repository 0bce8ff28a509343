"""Groups of several sequences: the completions of a prompt share its blocks, and so do beams."""

from nanopage.engine.beam_search import Beam
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
    ending, forks = _choose_beams(group)
    schedule.tell("beams", ending, forks)
    for seq in ending:
        queues.block_manager.free(seq.seq_id)
        queues.writer.leave(seq)
    for parent, seq in forks:
        queues.block_manager.fork(parent.seq_id, seq.seq_id)
        seq.num_computed_tokens = parent.num_computed_tokens
        seq.parent = parent
    adopt_beams(group)
    if group.beam_search.finished:
        queues.finish(group, None, "stop")


def _choose_beams(group: SequenceGroup) -> tuple[list[Sequence], list[tuple[Sequence, Sequence]]]:
    """Choose the group's `next_beams` from the candidates of its present beams.

    Returns: the beams that end; (parent, sequence) for each beam that forks from another.
    """
    search, parents = group.beam_search, group.live
    assert search is not None
    step = search.choose([Beam(seq.output_token_ids, seq.cumulative_logprob, seq.candidates) for seq in parents])
    survivors = set() if step.finished else {index for index, _, _ in step.live}
    ending = [seq for index, seq in enumerate(parents) if index not in survivors]
    spare = [seq for seq in group.seqs if seq.dormant] + ending
    forks, live = [], []
    for index, token_id, cumulative_logprob in [] if step.finished else step.live:
        seq = parent = parents[index]
        if index in survivors:  # its first successor is the same sequence
            survivors.remove(index)
        else:
            seq = spare.pop()
            forks.append((parent, seq))
        live.append((seq, [*parent.token_ids, token_id], cumulative_logprob))
    group.next_beams = step, live
    return ending, forks


def adopt_beams(group: SequenceGroup) -> None:
    """Make `next_beams` the state of a group. If an exception interrupts this, call it again."""
    assert group.beam_search is not None and group.next_beams is not None
    step, live = group.next_beams
    group.beam_search.accept(step)
    for seq in group.seqs:
        seq.candidates = {}
        seq.dormant = not step.finished and all(seq is not other for other, _, _ in live)
    for seq, token_ids, cumulative_logprob in live:
        seq.token_ids, seq.cumulative_logprob, seq.block_hashes = token_ids, cumulative_logprob, []
    group.next_beams = None
