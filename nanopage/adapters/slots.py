"""AdapterSlots: which of the workers' slots each adapter is in.

The workers hold the weights of a few adapters, one in each slot. A sequence runs only while its adapter has a slot. A
slot is in use while a running group has its adapter. A new adapter takes the least recently used free slot.
"""

from collections.abc import Iterable

from nanopage.engine.queues import Queues
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import SequenceGroup
from nanopage.step import AdapterLoad


class AdapterSlots:
    """Gives out the slots (the scheduler's `AdapterSlots`, see engine/attached.py).

    Args: num_slots: how many adapters the workers can hold.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Forget what the slots hold: after an exception, a load may have been lost."""
        self.free = list(range(self.num_slots - 1, -1, -1))
        self.held: dict[int, int] = {}  # adapter id -> slot, the least recently used first

    def fits(self, group: SequenceGroup, running: Iterable[SequenceGroup]) -> bool:
        """Whether a group's adapter can have a slot while the adapters of the running groups keep theirs."""
        if group.adapter is None or group.adapter.adapter_id in self.held or self.free:
            return True
        return len(in_use(running) & self.held.keys()) < self.num_slots

    def take(self, group: SequenceGroup, running: Iterable[SequenceGroup], schedule: Schedule) -> None:
        """Give a group that is about to run a slot for its adapter, if the group has an adapter. If the workers do not
        have the adapter, the step loads it first."""
        if (adapter := group.adapter) is None:
            return
        slot = self.held.pop(adapter.adapter_id, None)
        if slot is None:
            if not self.free:
                used = in_use(running)
                oldest = next(adapter_id for adapter_id in self.held if adapter_id not in used)
                self.free.append(self.held.pop(oldest))
            slot = self.free.pop()
            schedule.batch.loads.append(AdapterLoad(slot, adapter.path))
            schedule.loading.append(adapter)
        self.held[adapter.adapter_id] = group.adapter_slot = slot

    def fail(self, queues: Queues, schedule: Schedule, failed_loads: dict[int, str]) -> None:
        """End the groups that run with adapters that could not be loaded. A later request loads them again.

        Args: failed_loads: index in the batch's `loads` -> why.
        """
        for index, cause in failed_loads.items():
            adapter, slot = schedule.loading[index], schedule.batch.loads[index].slot
            if self.held.get(adapter.adapter_id) == slot:
                del self.held[adapter.adapter_id]
                self.free.append(slot)
            for group in [group for group in queues.running if group.adapter == adapter]:
                queues.forget_prefixes(group)
                queues.fail(group, f"the adapter {adapter.path} could not be loaded: {cause}")


def in_use(running: Iterable[SequenceGroup]) -> set[int]:
    """The ids of the adapters of running groups."""
    return {group.adapter.adapter_id for group in running if group.adapter is not None}
