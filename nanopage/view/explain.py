"""Explains in sentences what a step does and why.

The engine records its decisions as it goes: RequestEvents, with the numbers that decided them, and the events of a
Schedule. This module turns them into sentences, only when somebody asks. It reads other facts from the state of the
engine (which sequences wait behind the first one, which blocks other sequences share).

Events of a Schedule:

    held, group, reason                   a running group that the step leaves out (see engine/stages.py)
    evicted, blocks                       blocks that the prefix cache has lost
    submitted, number, time               the step's batch went to the workers; batches are numbered from 1
    forked, leader                        siblings share the leader's blocks from now on
    arrived, time                         the batch's results came
    dropped, sequence                     the sequence had ended when its token came
    beams, ending, forks                  beams that end; (parent, beam) of beams that fork from others
    draft, sequence, drafted, accepted, ends_early   numbers of tokens; whether the sequence ended within its draft
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from nanopage.engine.engine import LLMEngine
from nanopage.engine.queues import order
from nanopage.engine.schedule import Schedule, Wait
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import SequenceGroup, Status
from nanopage.engine.statistics import StepRecord
from nanopage.outputs import RequestEvent
from nanopage.step import NO_BLOCK

MAX_NAMES = 8  # of requests or blocks that one sentence lists


class Sentence(NamedTuple):
    """One sentence.

    kind: "add", "admit", "swap in", "wait", "preempt", "swap out", "evict", "copy", "fork", "drop", "finish" or "run".
    request_id: the id of the request that it is about; None if it is about several requests.
    """

    kind: str
    request_id: str | None
    text: str


def explain(engine: LLMEngine, name: Callable[[str], str] = str) -> list[str]:
    """What the last step did and why, or what the step of `LLMEngine.plan` is about to do: a sentence for each
    decision, in order. The sentences are made from the events of the step and the present state of the engine.

    Args: name: request id -> what a sentence calls the request.
    """
    return [sentence.text for sentence in make_sentences(engine, name)]


def make_sentences(engine: LLMEngine, name: Callable[[str], str] = str) -> list[Sentence]:
    """The sentences of `explain`, with their kinds and requests."""
    scheduler, step, events = engine.scheduler, engine.last, engine.last.stats.events
    if engine.planned is not None:
        step, events = StepRecord(scheduled=engine.planned), scheduler.queues.events
    schedule = step.scheduled
    sentences = [_event(event, name) for event in events if event.kind != "finished"]
    if schedule is not None:
        sentences += _evicted(scheduler, schedule, name)
        sentences += _copied(schedule, name)
        sentences += _waiting(scheduler, schedule, name)
        sentences += _forked(scheduler, schedule, name)
        sentences.append(_run(schedule))
    for completed in step.completed:
        sentences += _beams(completed, name)
        sentences += _dropped(completed, name)
    return sentences + [_event(event, name) for event in events if event.kind == "finished"]


def told(schedule: Schedule, kind: str) -> list[tuple]:
    """The contents of a schedule's events of one kind."""
    return [event[1:] for event in schedule.events if event[0] == kind]


# Requests


def _event(event: RequestEvent, name: Callable[[str], str]) -> Sentence:
    subject = f"Request {name(event.request_id)}"
    kind, text = {
        "added": lambda: ("add", f"{subject} arrives: {_count(event.tokens, 'prompt token')}."),
        "started": lambda: ("admit", _admitted(event, subject)),
        "swapped in": lambda: (
            "swap in",
            f"{subject} is swapped in: its {_count(event.needed, 'block')} "
            f"{_be(event.needed)} copied back from host memory, and {event.free} {_be(event.free)} free.",
        ),
        "swapped out": lambda: (
            "swap out",
            f"{subject} is preempted: {_why_preempted(event, name)}. Its blocks are copied to host memory.",
        ),
        "preempted": lambda: (
            "preempt",
            f"{subject} is preempted: {_why_preempted(event, name)}. Its tokens will be computed again"
            + (", because host memory is full." if event.host_full else "."),
        ),
        "finished": lambda: ("finish", f"{subject} ends: {ENDINGS.get(event.reason, event.reason)}."),
    }[event.kind]()
    return Sentence(kind, event.request_id, text)


ENDINGS = {
    "stop": "the model has ended it, or a stop string has",
    "length": "it has as many tokens as it may have",
    "abort": "it was aborted",
    "error": "it failed",
}


def _admitted(event: RequestEvent, subject: str) -> str:
    text = f"{subject} is admitted: it needs {_count(event.needed, 'block')}, and {event.free} {_be(event.free)} free"
    if event.cached_tokens:
        text += f"; {event.cached_tokens} of its {_count(event.tokens, 'token')} are in the prefix cache"
    return f"{text}."


def _why_preempted(event: RequestEvent, name: Callable[[str], str]) -> str:
    blocks = f"{_count(event.needed, 'block')} needed, {event.free} free"
    if event.reason == "blocks" and event.cause == event.request_id:
        return f"{blocks}; no other running request is behind it"
    cause, last = name(event.cause or ""), "it is the latest of the lowest priority"
    return {
        "blocks": f"{blocks}, for request {cause}; {last}",
        "priority, blocks": f"request {cause} has a higher priority ({blocks}); {last}",
        "priority, sequences": f"request {cause} has a higher priority, and no more sequences may run at once; {last}",
        "priority, adapter": f"request {cause} has a higher priority, and all slots for adapters are in use; {last}",
        "alone": f"a step has failed, and request {cause} runs alone",
        "restart": "an exception has ended a step, and all requests start again",
        "draft": "its logits behind a draft were not finite",
    }[event.reason]


def _waiting(scheduler: Scheduler, schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    skipped: dict[str, list[str]] = {}
    held = told(schedule, "held")
    for group, reason in held:
        if group.status is Status.RUNNING:
            skipped.setdefault(HELD[reason], []).append(group.request_id)
    used_up = schedule.batch.num_tokens >= schedule.budget
    if used_up or len(schedule.sequences) < len(scheduler.running):
        running = {id(seq.group) for seq in schedule.sequences} | {id(group) for group, _ in held}
        why = f"the {schedule.budget} tokens of the step are used up" if used_up else "there is nothing to compute yet"
        for group in scheduler.running:
            if id(group) not in running:
                skipped.setdefault(why, []).append(group.request_id)
    for why, ids in skipped.items():
        verb = "waits" if len(ids) == 1 else "wait"
        yield Sentence("wait", ids[0] if len(ids) == 1 else None, f"{_requests(ids, name)} {verb} with blocks: {why}.")
    wait = schedule.wait
    if wait is None:
        return
    text = f"Request {name(wait.group.request_id)} waits: {_why_waiting(scheduler, wait, name)}"
    queued = [*scheduler.waiting, *scheduler.swapped]
    if scheduler.arrange is None:
        queued.sort(key=order)
        behind = [group.request_id for group in queued if order(group) > order(wait.group)]
    else:
        behind = [group.request_id for group in queued if group is not wait.group]
    if behind:
        text += f". {_requests(behind, name)} {'waits' if len(behind) == 1 else 'wait'} behind it"
    yield Sentence("wait", wait.group.request_id, f"{text}.")


HELD = {
    "mask": "the mask of the next token depends on a token in flight",
    "stage": "the next step depends on a token in flight, in another stage of the pipeline",
    "share": "this batch has its share of the running requests; the other stages get the rest",
}


USED_UP = "the step's budget of tokens is used up"


def _why_waiting(scheduler: Scheduler, wait: Wait, name: Callable[[str], str]) -> str:
    other = "" if wait.other is None else f"request {name(wait.other.request_id)}"
    if wait.reason == "blocks":
        text = f"{_count(wait.needed, 'block')} needed, {wait.free} free"
        return text + (f" besides {wait.kept} kept for running requests to grow" if wait.kept else "")
    if wait.reason == "sequences":
        most = scheduler.admission.max_num_seqs
        return f"{_count(wait.needed, 'sequence')} would run beside {most - wait.free}, and {most} may run at once"
    if wait.reason == "budget":
        return f"it has {wait.needed} tokens, and the step has {wait.free} left" if wait.needed else USED_UP
    return {
        "adapter": "all slots for adapters are in use",
        "prefix": f"{other} computes a block in this step that it can share in the next",
        "swap": "this step copies blocks to host memory, and the next one may bring them back",
        "tokens": "its tokens in flight have not arrived",
        "preemption": "blocks ran out in this step, so none is admitted",
        "alone": f"a step has failed, and {other} runs alone",
        "turn": f"{other} has been swapped in and has taken the last blocks",
    }[wait.reason]


# Blocks


def _evicted(scheduler: Scheduler, schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    evicted = [block for (blocks,) in told(schedule, "evicted") for block in blocks]
    owners = _owners(schedule) if evicted else {}
    for group in scheduler.running if evicted else ():  # some groups are swapped in and do not run
        owners = dict.fromkeys(scheduler.block_manager.blocks_of([seq.seq_id for seq in group.live]), group) | owners
    by_owner: dict[str | None, list[int]] = {}
    for block in evicted:
        owner = owners.get(block)
        by_owner.setdefault(None if owner is None else owner.request_id, []).append(block)
    for request_id, blocks in by_owner.items():
        whose = "" if request_id is None else f" for request {name(request_id)}"
        text = f"{_blocks(blocks)} {_be(len(blocks))} evicted from the prefix cache{whose}: no other block is free"
        yield Sentence("evict", request_id, f"{text}, and nothing cached was used less recently.")


def _copied(schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    owners = _owners(schedule) if schedule.batch.copies else {}
    for source, target in schedule.batch.copies:
        group = owners.get(target)
        request_id = None if group is None else group.request_id
        who = "a sequence" if request_id is None else f"request {name(request_id)}"
        yield Sentence(
            "copy", request_id, f"Block {source} is copied to block {target}: {who} writes to it while others share it."
        )


def _owners(schedule: Schedule) -> dict[int, SequenceGroup]:
    """Block -> the group that gets the block in this step."""
    groups = {row: seq.group for row, seq in zip(schedule.batch.rows, schedule.sequences, strict=True)}
    return {
        block: groups[update.row] for update in schedule.batch.blocks if update.row in groups for block in update.blocks
    }


# Sequences


def _forked(scheduler: Scheduler, schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    for (leader,) in told(schedule, "forked"):
        group = leader.group
        others = len(group.seqs) - 1
        manager = scheduler.block_manager
        table = manager.block_tables.get(leader.seq_id, [])[: manager.blocks_for(group.shared_len)]
        shared = sum(block != NO_BLOCK for block in table)
        what = f"the {_count(shared, 'block')} of its {_count(group.shared_len, 'token')}"
        yield Sentence("fork", group.request_id, f"Request {name(group.request_id)} forks: {others} more share {what}.")


def _beams(schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    searches = told(schedule, "beams")
    for beam in (beam for ending, _ in searches for beam in ending):
        group = beam.group
        which = f"Beam {group.seqs.index(beam)} of request {name(group.request_id)}"
        why = "the search has ended" if group.finished else "no continuation of it is among the best"
        yield Sentence("drop", group.request_id, f"{which} is dropped: {why}.")
    for parent, beam in (fork for _, forks in searches for fork in forks):
        group = beam.group
        which = f"Beam {group.seqs.index(beam)} of request {name(group.request_id)}"
        text = f"{which} forks from beam {group.seqs.index(parent)}, of which two continuations are among the best."
        yield Sentence("fork", group.request_id, text)


def _dropped(schedule: Schedule, name: Callable[[str], str]) -> Iterable[Sentence]:
    for (seq,) in told(schedule, "dropped"):
        request_id = seq.group.request_id
        yield Sentence(
            "drop", request_id, f"A token of request {name(request_id)} is dropped: it had ended before the token came."
        )
    for seq, drafted, accepted, ends_early in told(schedule, "draft"):
        if refused := drafted - accepted:
            request_id = seq.group.request_id
            why = "it has ended" if ends_early else "the model has chosen otherwise"
            text = (
                f"{refused} of the {_count(drafted, 'drafted token')} of request {name(request_id)} "
                f"{_be(refused)} dropped: {why}."
            )
            yield Sentence("drop", request_id, text)


def _run(schedule: Schedule) -> Sentence:
    """The sentence about the batch of a step."""
    if schedule.is_empty:
        return Sentence("run", None, "Nothing runs: everything waits for tokens in flight.")
    batch = schedule.batch
    drafted = {id(seq) for seq, _ in schedule.drafted}
    decodes, prompts, again = 0, [], []  # `prompts` and `again` have numbers of tokens
    for seq, start, count in zip(schedule.sequences, batch.starts, batch.counts, strict=True):
        if start < seq.num_prompt_tokens:
            prompts.append(count)
        elif count == 1 or id(seq) in drafted:
            decodes += 1
        else:  # a preempted request computes its output again
            again.append(count)
    parts = [_count(decodes, "decode")] if decodes else []
    if prompts:
        parts.append(f"{_count(sum(prompts), 'prompt token')} of {_count(len(prompts), 'sequence')}")
    if again:
        parts.append(f"{_count(sum(again), 'token')} of {_count(len(again), 'sequence')} again")
    what = " and ".join(parts) or "no sequence, only copies of blocks"
    tokens = f"{batch.num_tokens} of at most {_count(schedule.budget, 'token')}"
    return Sentence("run", None, f"The step runs {what}: {tokens}.")


# Words


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _be(number: int) -> str:
    return "is" if number == 1 else "are"


def _requests(ids: list[str], name: Callable[[str], str]) -> str:
    return _list("Request", [name(request_id) for request_id in ids])


def _blocks(blocks: list[int]) -> str:
    return _list("Block", list(map(str, blocks)))


def _list(noun: str, names: list[str]) -> str:
    if len(names) == 1:
        return f"{noun} {names[0]}"
    shown, left = names[:MAX_NAMES], len(names) - MAX_NAMES
    last = f"{left} more" if left > 0 else shown.pop()
    return f"{noun}s {', '.join(shown)} and {last}"
