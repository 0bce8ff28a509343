"""TokenBudget: keeps steps short on any machine, so that a long prompt does not stall the streams beside it.

How long a step takes depends mostly on its number of prompt tokens, and on the machine: 2,048 tokens take 1.3 seconds
on two cores with AVX512-BF16, and 4 seconds on slower ones. The number of prompt tokens that a step may have starts
low. After each step with more than half of them, it moves halfway to the number that would have taken `seconds`.

Shorter steps make the last of many prompts wait longer, because each step serves the running sequences, too. On two
cores with AVX512-BF16, with 32 prompts of SmolLM2-135M at once, steps of 0.3 seconds instead of 2,048 tokens give the
first token of the last prompt 7 % later, and first tokens on average 20 % earlier. The longest pause of a stream falls
from 1.2 to 0.32 seconds. The number of output tokens per second hardly changes (medians of nine runs in turn).
"""

from nanopage.engine.interface import Queues
from nanopage.outputs import StepStats

SECONDS = {"cpu": 0.3, "cuda": 0.05}  # the longest that a step should take
START = 512  # before anything is measured
LEAST = 128


class TokenBudget:
    """A listener of an engine that sets its scheduler's token budget.

    Args:
        scheduler: its present budget stays the upper limit.
        seconds: the longest that a step should take.
    """

    def __init__(self, scheduler: Queues, seconds: float):
        self.scheduler, self.seconds, self.most = scheduler, seconds, scheduler.max_num_batched_tokens
        self.prompt_tokens = START  # that a step may have
        self._set(0)

    def __call__(self, stats: StepStats) -> None:
        if 2 * stats.prefill_tokens > self.prompt_tokens:
            fitting = stats.prefill_tokens * self.seconds / max(stats.seconds, 1e-6)
            self.prompt_tokens = max(LEAST, min(int(self.prompt_tokens + fitting) // 2, self.most))
        self._set(stats.running)

    def _set(self, num_running: int) -> None:
        # Each running sequence takes a token of the budget, before any prompt of the same priority does.
        self.scheduler.max_num_batched_tokens = min(self.most, self.prompt_tokens + num_running)
