"""Suspects: groups that may have caused an exception (see recovery.py).

Each runs alone until it gets a token, so that the next failure has one group to blame.
"""

from nanopage.engine.preemption import give_up_blocks
from nanopage.engine.queues import Queues, order
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import SequenceGroup, Status


def run_only(queues: Queues, group: SequenceGroup) -> None:
    """Make a waiting group the only running one. The others give up their blocks."""
    for other in queues.running:
        give_up_blocks(queues, other, reason="alone", cause=group.request_id)
    queues.waiting = sorted([*queues.waiting, *queues.running], key=order)
    queues.waiting.remove(group)
    queues.running, group.status = [group], Status.RUNNING


def acquit(queues: Queues, schedule: Schedule) -> None:
    """The groups that got a token in a step are no suspects any more."""
    for group in schedule.groups if queues.suspects else ():
        if group in queues.suspects:
            queues.suspects.remove(group)
