"""Exercise of chapter 3, solved."""

from collections import deque
from collections.abc import Iterable

from dry import Scheduler, Sequence

MOST_PASSED = 4


def order(waiting: list[Sequence], passed_over: dict[Sequence, int]) -> list[Sequence]:
    """The order in which waiting requests may start. Rules as in the exercise."""

    def key(seq: Sequence) -> tuple[int, int]:
        if seq.output:
            return 0, 0
        if passed_over.get(seq, 0) >= MOST_PASSED:
            return 1, 0
        return 2, seq.num_prompt_tokens

    return sorted(waiting, key=key)  # sorted is stable


def count_passed(
    batch: Iterable[Sequence],
    waiting: Iterable[Sequence],
    arrivals: dict[Sequence, int],
    passed_over: dict[Sequence, int],
) -> None:
    """Count the requests of a step that start: each passes over those that wait and came earlier."""
    for started in batch:
        if started.num_computed == 0 and not started.output:
            for seq in waiting:
                if arrivals[seq] < arrivals[started]:
                    passed_over[seq] = passed_over.get(seq, 0) + 1


class ShortestFirst(Scheduler):
    """The Scheduler of docs/build/mini_ref with `waiting` in the order of `order`."""

    def __init__(self, *args):
        super().__init__(*args)
        self.arrivals: dict[Sequence, int] = {}
        self.passed_over: dict[Sequence, int] = {}

    def schedule(self) -> list[tuple[Sequence, int]]:
        for seq in self.waiting:
            self.arrivals.setdefault(seq, len(self.arrivals))
        by_arrival = sorted(self.waiting, key=self.arrivals.__getitem__)
        self.waiting = deque(order(by_arrival, self.passed_over))
        batch = super().schedule()
        count_passed([seq for seq, _ in batch], self.waiting, self.arrivals, self.passed_over)
        return batch
