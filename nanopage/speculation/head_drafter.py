"""HeadDrafter: drafts of a head (heads.py), as many as pay. The worker's half is head_worker.py."""

import logging
import time
from typing import Any

from nanopage.checks.speculation import MOST_ROWS, SpeculativeConfig
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats
from nanopage.speculation.lookup import DraftGains, StepCosts, num_rows_of

logger = logging.getLogger("nanopage")

EXPECTED_TOKEN = 0.1  # time of a token of drafts, in steps of the model, before one is measured


class HeadDrafter:
    """Proposes the drafts of a head (a `Drafter`, see drafts.py).

    Args: heads: the HeadWorker of the model's worker.
    """

    def __init__(self, config: SpeculativeConfig, heads: Any):
        self.config, self.heads = config, heads
        self.gains = DraftGains()
        self.costs = StepCosts()  # of a token of drafts
        self.seconds = 0.0  # that drafts have taken in this step

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        num_rows = num_rows_of(schedule)
        times = self.gains.costs.of(num_rows)
        if not self.heads.works or num_rows > MOST_ROWS or times is None:
            return {}
        if any(seq not in decodes for seq, _ in schedule.chunks):
            return {}
        new, longest = {each.row for each in schedule.batch.new}, self.config.num_speculative_tokens
        rooms = {
            seq: min(longest, seq.max_total_tokens - 1 - len(seq.token_ids))
            for seq in decodes
            if seq.row not in new and not has_just_forked(seq)
        }
        rooms = {seq: room for seq, room in rooms.items() if room > 0}
        started, measured = time.perf_counter(), self.costs.of(len(rooms))
        seconds = measured.plain if measured else EXPECTED_TOKEN * times.plain
        lengths = self.gains.choose(rooms, most, schedule, lambda length: length * seconds)
        drafts: dict[Sequence, list[int]] = {}
        if lengths:
            asked = [(seq.row, len(seq.token_ids), seq.token_ids[-1], length) for seq, length in lengths.items()]
            making = time.perf_counter()
            try:
                drafts = dict(zip(lengths, self.heads.draft(asked), strict=True))
            except Exception as error:
                self.heads.give_up(error)
            made = max(map(len, drafts.values()), default=0)
            if made:
                self.costs.add(len(rooms), 0, (time.perf_counter() - making) / made)
        self.seconds = time.perf_counter() - started
        return {seq: draft for seq, draft in drafts.items() if draft}

    def learn(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        self.gains.learn(seq, num_drafted, num_accepted)

    def observe(self, stats: StepStats) -> None:
        self.gains.observe(stats, stats.seconds - self.seconds, self.seconds)
        self.seconds = 0.0

    def rest(self) -> None:
        self.heads.states.clear()

    def restart(self) -> None:
        self.heads.states.clear()
        self.seconds = 0.0


def has_just_forked(seq: Sequence) -> bool:
    """Whether the worker gets the blocks of a sequence only with this step."""
    return len(seq.group.seqs) > 1 and len(seq.token_ids) == seq.group.shared_len + 1
