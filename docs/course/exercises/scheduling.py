"""Exercise of chapter 3: a scheduling policy, the shortest prompt first, without starving the long ones.

    pytest -x docs/course/exercises/test_scheduling.py

If a long prompt and ten short ones wait, the average request has its first token sooner if the short ones start first.
But if short ones keep coming, the long one never starts. So a request may be passed over only so often. And a request
that was preempted has begun to answer somebody: it comes before all that have not.

Fill in `order` and `count_passed`. The Scheduler below asks the first before each step, and calls the second after it.
"""

from collections import deque
from collections.abc import Iterable

from dry import Scheduler, Sequence  # docs/course/experiments/dry.py has them from docs/build/mini_ref

MOST_PASSED = 4


def order(waiting: list[Sequence], passed_over: dict[Sequence, int]) -> list[Sequence]:
    """The order in which waiting requests may start:

    1. those that have begun to answer (`seq.output` is not empty),
    2. then those that have been passed over at least MOST_PASSED times,
    3. then the others, those with the shortest prompts (`seq.num_prompt_tokens`) first.

    Otherwise their order stays as it is: in `waiting`, who came earlier comes first.

    Args: passed_over: how many requests have started before a request although they came later. A request that nobody
        has passed is not in it.
    """
    raise NotImplementedError("exercise 3")


def count_passed(
    batch: Iterable[Sequence],
    waiting: Iterable[Sequence],
    arrivals: dict[Sequence, int],
    passed_over: dict[Sequence, int],
) -> None:
    """Count the requests of a step that start: each passes over those that wait and came earlier.

    A request starts with the first chunk of its prompt (`seq.num_computed` is 0), but only once. One that has begun to
    answer and was preempted computes its tokens anew, and passes over nobody.

    Args:
        batch: the requests of the step, before it is computed.
        waiting: those that are left.
        arrivals: when each request came: a smaller number is earlier.
        passed_over: as in `order`; to be changed.
    """
    raise NotImplementedError("exercise 3")


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
