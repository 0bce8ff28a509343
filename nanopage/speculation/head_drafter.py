"""HeadDrafter: drafts of a head (heads.py), as many as pay. The worker's half is head_worker.py."""

import time
from typing import Any

from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats
from nanopage.speculation.lookup import DraftGains, StepCosts

EXPECTED_TOKEN = 0.1  # time of a token of drafts, in steps of the model, before one is measured


class HeadDrafter:
    """Proposes the drafts of a head (a `Drafter`, see drafts.py).

    Args: heads: the HeadWorker of the model's worker.
    """

    def __init__(self, heads: Any):
        self.heads, self.gains = heads, DraftGains()
        self.costs = StepCosts()  # of a token of drafts
        self.seconds = 0.0  # that drafts have taken in this step
        self.learn = self.gains.learn

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        times = self.gains.times_of(schedule)
        if times is None or any(seq not in decodes for seq, _ in schedule.chunks):
            return {}
        new, rooms = {each.row for each in schedule.batch.new}, {}
        for seq in decodes:
            room = min(self.heads.length, seq.max_total_tokens - 1 - len(seq.token_ids))
            if room > 0 and seq.row not in new and self.heads.state(seq.row, len(seq.token_ids) - 2) is not None:
                rooms[seq] = room
        measured = self.costs.of(len(rooms))
        seconds = measured.plain if measured else EXPECTED_TOKEN * times.plain
        lengths = self.gains.choose(rooms, most, schedule, lambda length: length * seconds)
        if not lengths:
            return {}
        seqs = sorted(lengths, key=lambda seq: -lengths[seq])
        asked, started = [(seq.row, len(seq.token_ids), lengths[seq]) for seq in seqs], time.perf_counter()
        drafts = self.heads.attempt(self.heads.draft, asked) or []
        self.seconds = time.perf_counter() - started
        if drafts:
            self.costs.add(len(rooms), 0, self.seconds / lengths[seqs[0]])
        return {seq: draft for seq, draft in zip(seqs, drafts, strict=False) if draft}

    def observe(self, stats: StepStats) -> None:
        self.gains.observe(stats, stats.seconds - self.seconds, self.seconds)
        self.seconds = 0.0

    def restart(self) -> None:
        self.heads.states.clear()
        self.seconds = 0.0

    rest = restart
