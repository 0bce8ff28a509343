"""AdapterSlots: which adapter is in which of the workers' slots.

The workers hold the weights of a few adapters, one in each slot. A sequence runs only while its adapter has a slot. A
slot is in use while a running group has its adapter. The least recently used of the others gives way to a new adapter.
"""

from collections.abc import Iterable

from nanopage.engine.sequence import Adapter, SequenceGroup
from nanopage.step import AdapterLoad


class AdapterSlots:
    """Gives out the slots.

    Args: num_slots: how many adapters the workers can hold.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.reset()

    def reset(self) -> None:
        """Forget what the slots hold: after an exception, a load may have been lost."""
        self.free = list(range(self.num_slots - 1, -1, -1))
        self.held: dict[int, int] = {}  # adapter id -> slot, the least recently used first

    def fits(self, adapter: Adapter | None, running: Iterable[SequenceGroup]) -> bool:
        """Whether a group with this adapter may run beside those that run."""
        if adapter is None or adapter.adapter_id in self.held or self.free:
            return True
        return len(in_use(running) & self.held.keys()) < self.num_slots

    def take(self, adapter: Adapter, running: Iterable[SequenceGroup]) -> tuple[int, list[AdapterLoad]]:
        """Give a slot to an adapter that fits.

        Returns: the slot, and what the workers have to load first: nothing, if they have the adapter already.
        """
        slot, loads = self.held.pop(adapter.adapter_id, None), []
        if slot is None:
            if not self.free:
                used = in_use(running)
                oldest = next(adapter_id for adapter_id in self.held if adapter_id not in used)
                self.free.append(self.held.pop(oldest))
            slot = self.free.pop()
            loads.append(AdapterLoad(slot, adapter.path))
        self.held[adapter.adapter_id] = slot
        return slot, loads

    def drop(self, adapter: Adapter, slot: int) -> None:
        """Forget that a slot holds an adapter, which could not be loaded."""
        if self.held.get(adapter.adapter_id) == slot:
            del self.held[adapter.adapter_id]
            self.free.append(slot)


def in_use(running: Iterable[SequenceGroup]) -> set[int]:
    """The ids of the adapters of running groups."""
    return {group.adapter.adapter_id for group in running if group.adapter is not None}
