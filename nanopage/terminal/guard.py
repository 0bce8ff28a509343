"""Finds a reply that repeats itself without end, as small models do.

The bounds are wide, because a table of zeros or a refrain repeats itself, too. SmolLM2-135M-Instruct ended 717 of 880
replies to the questions of MT-Bench by itself. The longest repetition in them has 168 tokens: none would have been cut.
"""

MAX_PERIOD = 64  # tokens; longer loops are not looked for
MIN_PERIODS = 10
MIN_TOKENS = 400


def is_loop(token_ids: list[int]) -> bool:
    """Whether the last MIN_TOKENS or more repeat a sequence of at most MAX_PERIOD tokens, MIN_PERIODS or more times."""
    for period in range(1, MAX_PERIOD + 1):
        covered = max(MIN_TOKENS, MIN_PERIODS * period)
        tail = token_ids[-covered:]
        if len(tail) == covered and tail[period:] == tail[:-period]:
            return True
    return False
