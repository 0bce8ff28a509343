"""TokenBudget: how many tokens each step may have. `choose_budget` decides it, once for each engine. The server keeps
steps short, so that a long prompt does not stall the streams beside it.

How long a step takes depends mostly on its number of prompt tokens, and on the machine: 2,048 tokens take 1.3 seconds
on two cores with AVX512-BF16, and 4 seconds on slower ones. The number of prompt tokens that a step may have starts
low. After a step that used more than half of it, it moves halfway to the number that would have taken `seconds`.

Shorter steps make the last of many prompts wait longer, because each step serves the running sequences, too. On two
cores with AVX512-BF16, with 32 prompts of SmolLM2-135M at once, steps of 0.3 seconds instead of 2,048 tokens give the
first token of the last prompt 7 % later, and first tokens on average 20 % earlier. The longest pause of a stream falls
from 1.2 to 0.32 seconds. The number of output tokens per second hardly changes (medians of nine runs in turn).
"""

from typing import Literal

from nanopage.config.options import EngineConfig
from nanopage.outputs import StepStats

Use = Literal["steps", "LLM", "AsyncLLM"]
# Of `LLM` on a CPU. Steps of 512 tokens instead of 2,048 give 32 prompts at once their first tokens 15 % earlier on
# average, at the same throughput (SmolLM2-135M, AVX512-BF16).
OFFLINE_ON_CPU = 512
SECONDS = {"cpu": 0.3, "cuda": 0.05}  # the longest that a step should take
START = 512  # before anything is measured
LEAST = 128


class TokenBudget:
    """The token budget of a scheduler.

    Args:
        most: no step has more tokens.
        seconds: the longest that a step should take. None: every step may have `most` tokens.

    Attributes:
        tokens: that the next step may have.
    """

    def __init__(self, most: int, seconds: float | None = None):
        self.most, self.seconds = most, seconds
        self.prompt_tokens = most if seconds is None else START  # that a step may have
        self.tokens = min(most, self.prompt_tokens)

    def observe(self, stats: StepStats) -> None:
        """A listener of the engine: learn from a step how many tokens fit into `seconds`."""
        if self.seconds is not None and 2 * stats.prefill_tokens > self.prompt_tokens:
            fitting = stats.prefill_tokens * self.seconds / max(stats.seconds, 1e-6)
            self.prompt_tokens = max(LEAST, min(int(self.prompt_tokens + fitting) // 2, self.most))
        # Each running sequence takes a token of the budget, before any prompt of the same priority does.
        self.tokens = min(self.most, self.prompt_tokens + stats.running)


def choose_budget(config: EngineConfig, device_type: str, use: Use) -> TokenBudget:
    """The token budget of a new engine.

    Args: use: who steps it: the user ("steps"), `LLM` or `AsyncLLM`.
    """
    most = config.token_budget(device_type)
    if config.max_num_batched_tokens is None and use == "AsyncLLM":
        return TokenBudget(most, SECONDS[device_type])
    if config.max_num_batched_tokens is None and use == "LLM" and device_type == "cpu":
        return TokenBudget(OFFLINE_ON_CPU)
    return TokenBudget(most)
