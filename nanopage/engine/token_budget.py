"""TokenBudget: keeps steps short on any machine, so that a long prompt does not stall the streams beside it.

How long a step takes depends mostly on its number of prompt tokens, and on the machine: 2,048 tokens take 4 seconds on
two slow cores. The number of prompt tokens that a step may have starts low. It is halved when a step took too long that
had more than half of them, and doubled when a step that had all of them took so little time that twice as many would be
fine. Between these two it stays as it is, so it settles.

Short steps cost throughput, because each step reads all weights and serves the running sequences. On two cores with
AVX512-BF16, 32 prompts of SmolLM2-135M sent at once give 6 % fewer output tokens per second with 1,024 prompt tokens a
step than with 2,048, 14 % fewer with 512, 25 % fewer with 256 and 34 % fewer with 128.
"""

from nanopage.engine.scheduler import Scheduler
from nanopage.outputs import StepStats

SECONDS = {"cpu": 1.0, "cuda": 0.05}  # the longest that a step should take
START = 512  # before anything is measured
LEAST = 128
MARGIN = 2.5  # a step with twice as many tokens is assumed to take up to 2.5 times as long


class TokenBudget:
    """A listener of an engine that sets its scheduler's token budget.

    Args:
        scheduler: its present budget stays the upper limit.
        seconds: the longest that a step should take.
    """

    def __init__(self, scheduler: Scheduler, seconds: float):
        self.scheduler, self.seconds, self.most = scheduler, seconds, scheduler.max_num_batched_tokens
        self.prompt_tokens = START  # that a step may have
        self._set(0)

    def __call__(self, stats: StepStats) -> None:
        if 2 * stats.prefill_tokens > self.prompt_tokens and stats.seconds > self.seconds:
            self.prompt_tokens = max(LEAST, self.prompt_tokens // 2)
        elif stats.prefill_tokens >= self.prompt_tokens and stats.seconds * MARGIN < self.seconds:
            self.prompt_tokens = min(2 * self.prompt_tokens, self.most)
        self._set(stats.running)

    def _set(self, num_running: int) -> None:
        # Each running sequence takes a token of the budget, before any prompt of the same priority does.
        self.scheduler.max_num_batched_tokens = min(self.most, self.prompt_tokens + num_running)
