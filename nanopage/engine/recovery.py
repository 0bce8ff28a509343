"""What follows an exception: every request waits again, and those that may have caused it run one at a time.

An exception may end a call of the engine at any point, Ctrl-C too. `in_call` then stays set, and the next call recovers
first: only the tokens of each request are trusted. After a step that failed by itself, `isolate` says which
requests are suspects (see preemption.py).
"""

import contextlib
import logging
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from nanopage.engine.output_processor import OutputProcessor
from nanopage.engine.queues import order
from nanopage.engine.schedule import Schedule
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup, Status
from nanopage.step import Executor, WorkerDiedError

logger = logging.getLogger("nanopage")


class Recoverable(Protocol):
    """What recovery needs of an LLMEngine."""

    scheduler: Scheduler
    executor: Executor
    output_processor: OutputProcessor
    planned: Schedule | None
    in_flight: deque[Schedule]
    in_call: bool
    dead_error: WorkerDiedError | None


@contextlib.contextmanager
def changing(engine: Recoverable) -> Iterator[None]:
    """Surrounds every change of the engine's state. If an exception ends it, the next call recovers first: there is no
    `finally` here, so `in_call` stays True."""
    recover(engine)
    engine.in_call = True
    yield
    engine.in_call = False


def recover(engine: Recoverable) -> None:
    """If an exception has ended the last call, start every request again from the tokens it has."""
    if not engine.in_call:
        return
    engine.in_flight.clear()
    engine.planned = None
    engine.executor.discard()
    restart(engine.scheduler, [request.group for request in engine.output_processor.requests.values()])
    for group, error in engine.output_processor.recover():
        fail(engine, group, f"making its text failed: {type(error).__name__}: {error}")
    engine.in_call = False


def isolate(engine: Recoverable, error: Exception, suspect: SequenceGroup | None) -> None:
    """After a batch has failed, run each of its requests alone, and each request of the step in flight. If the failed
    batch was a suspect's, end that request."""
    message = f"{type(error).__name__}: {error}"
    schedules = [schedule for schedule in (engine.planned, *engine.in_flight) if schedule is not None]
    groups = list(dict.fromkeys(seq.group for schedule in schedules for seq in schedule.sequences))
    groups = groups or [request.group for request in engine.output_processor.requests.values()]
    recover(engine)
    engine.in_call = True
    if suspect is not None:
        fail(engine, suspect, message)
        return
    engine.scheduler.queues.suspects = suspects = [group for group in groups if not group.finished]
    logger.warning(f"a step failed: {message}; running its {len(suspects)} requests one at a time", exc_info=error)


def die(engine: Recoverable, error: WorkerDiedError) -> None:
    """End every request: no step can run any more."""
    engine.dead_error = error
    recover(engine)
    engine.in_call = True
    for request in list(engine.output_processor.requests.values()):
        fail(engine, request.group, str(error))
    engine.output_processor.report()


def fail(engine: Recoverable, group: SequenceGroup, message: str) -> None:
    """End a request because of an error."""
    logger.warning(f"request {group.request_id} ended by an error: {message}")
    engine.scheduler.queues.fail(group, message)
    engine.output_processor.read_aborted(group.request_id)


def restart(scheduler: Scheduler, groups: list[SequenceGroup]) -> None:
    """After an exception, start all groups again from the tokens that are known. Takes back all blocks and forgets all
    prefixes.

    Args: groups: all unfinished groups. The queues are not read: the exception may have left them inconsistent.
    """
    queues = scheduler.queues
    scheduler.block_manager.reset()
    scheduler.writer.reset()
    if scheduler.adapter_slots is not None:
        scheduler.adapter_slots.reset()
    if scheduler.drafts is not None:
        scheduler.drafts.restart()
    queues.running, queues.swapped = [], []
    for group in groups:
        queues.number(group)
        if group.beam_search is not None:
            group.beam_search.adopt(group)
        for seq in group.seqs:
            seq.restart()
            if not seq.finished and (ending := _find_ending(group, seq)):
                seq.finish_reason, seq.stop_reason = ending
        if group.last_event is None:
            queues.record("added", group, tokens=group.seqs[0].num_prompt_tokens)
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
