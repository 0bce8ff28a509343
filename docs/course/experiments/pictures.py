"""Prompts with pictures: the steps that compute them, and what they share in the prefix cache.

python docs/course/experiments/pictures.py
"""

from dataclasses import dataclass

import numpy as np

from nanopage.audio.mel import NUM_TIMESTAMPS, WINDOW_SAMPLES, log_mel
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.items.items import make_item
from nanopage.step import BatchResult, Item, SamplingSettings
from nanopage.text.prompts import keys_of

BUDGET = 32  # tokens of a step, and the cost of the pictures that begin in it
LENGTH, COST = 16, 24  # of a picture: the tokens that it takes the place of, and the work of its encoder
PLACEHOLDER = 9  # a token id


@dataclass(frozen=True)
class Picture:
    """A picture of one color."""

    color: str


@dataclass
class Step:
    """The tokens from `start` to `end` of a prompt, and the numbers of the pictures that begin there."""

    start: int
    end: int
    pictures: list[int]


Parts = list[int | Picture]
"""A prompt: pictures, and for each stretch of text, its number of tokens."""

RED, BLUE = Picture("red"), Picture("blue")
EARLY: Parts = [6, RED, 4, BLUE, 8]
LATE: Parts = [20, RED, 4, BLUE, 8]
CASES = (EARLY, False), (LATE, False), (LATE, True)  # prompts, and whether their pictures must not be cut


def read(parts: Parts, whole: bool) -> tuple[list[int], list[Item]]:
    """The token ids of a prompt, with placeholders, and its items. Args: whole: as of Item."""
    token_ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, Picture):
            pixels = np.full((8, 8), ["red", "blue"].index(part.color), np.uint8)
            items.append(make_item("image", len(token_ids), LENGTH, {"pixels": pixels}, COST))
            items[-1].whole = whole
            token_ids += [PLACEHOLDER] * LENGTH
        else:
            token_ids += range(100, 100 + part)
    return token_ids, items


def make_scheduler() -> Scheduler:
    return Scheduler(BlockManager(64, 8), max_num_seqs=4, max_num_batched_tokens=BUDGET)


def serve(scheduler: Scheduler, number: int, parts: Parts, whole: bool = False) -> tuple[int, list[Step]]:
    """Run one request, which gets one token. Returns the tokens that were cached, and its steps."""
    token_ids, items = read(parts, whole)
    seq = Sequence(number, token_ids, SamplingSettings(), seed=0, max_total_tokens=len(token_ids) + 1)
    group = SequenceGroup(str(number), [seq], items=items, keys=keys_of(token_ids, items))
    scheduler.add(group)
    steps = []
    while scheduler.has_unfinished():
        schedule = scheduler.schedule()
        start, end = schedule.batch.starts[0], schedule.batch.starts[0] + schedule.batch.counts[0]
        steps.append(Step(start, end, [i for i, item in enumerate(items, 1) if start <= item.position < end]))
        scheduler.advance(schedule)
        scheduler.update(schedule, BatchResult([7] * len(schedule.samplers)))
    return group.num_cached_tokens, steps


def shown(parts: Parts) -> str:
    return ", ".join(part.color if isinstance(part, Picture) else f"{part} of text" for part in parts)


def main() -> None:
    for parts, whole in CASES:
        print(f"{shown(parts)}{'; pictures must not be cut' * whole}")
        for step in serve(make_scheduler(), 0, parts, whole)[1]:
            begins = "".join(f", picture {number} is encoded" for number in step.pictures)
            print(f"    tokens {step.start:2} to {step.end - 1:2}{begins}")
    print("\none after the other, with a prefix cache of blocks of 8 tokens")
    scheduler = make_scheduler()
    prompts: list[Parts] = [LATE, [*LATE, 16], [20, RED, 4, RED, 8], [20, BLUE, 4, RED, 8]]
    for number, prompt in enumerate(prompts):
        cached, _ = serve(scheduler, number, prompt)
        print(f"    {shown(prompt)}: {cached} tokens were cached")
    bands, frames = log_mel(np.zeros(WINDOW_SAMPLES, np.float32)).shape
    print(f"\n30 seconds of sound: {WINDOW_SAMPLES:,} samples, {frames:,} frames of {bands} numbers, ", end="")
    print(f"{NUM_TIMESTAMPS - 1:,} positions of Whisper's encoder")


if __name__ == "__main__":
    main()
