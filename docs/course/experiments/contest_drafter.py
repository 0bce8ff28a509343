"""Your source of drafts beside nanopage's, on three lists of recorded answers.

python docs/course/experiments/contest_drafter.py                # with exercises/drafter.py
python docs/course/experiments/contest_drafter.py --solutions    # with ours
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import contest
import drafts

from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub

MOST = 4  # tokens of a draft

Answers = list[tuple[list[int], list[int]]]
"""The tokens of prompts and of their answers."""


def read_answers() -> dict[str, Answers]:
    """Recorded answers of the default model, in lists with names."""
    lists = json.loads((Path(__file__).parent / "answers.json").read_text())["lists"]
    encode = Tokenizer(hub.resolve(None)).encode
    return {name: [(encode(prompt), encode(answer)) for prompt, answer in pairs] for name, pairs in lists.items()}


def seconds(answers: Answers, source: Callable[[], drafts.Source], learn: Callable[[list[int]], None]) -> float:
    """How long the steps of all answers take, one after the other.

    Args: source: makes the source of drafts of an answer. learn: is told the tokens of each prompt and answer.
    """
    costs, total = drafts.costs(), 0.0
    for prompt, answer in answers:
        total += sum(drafts.seconds(costs, length) for length, _ in drafts.steps(prompt, answer, source()))
        learn(prompt + answer)
    return total


def compare(exercise: ModuleType, answers: Answers) -> dict[str, float]:
    """The speed with each source of drafts."""
    plain = drafts.seconds(drafts.costs(), 0) * sum(len(answer) for _, answer in answers)
    followers = exercise.Followers()
    yours = seconds(answers, lambda: partial(followers.draft, most=MOST), followers.add)
    lookup = seconds(answers, lambda: drafts.lookup(MOST), lambda tokens: None)
    return {"no drafts": 1.0, "prompt lookup": plain / lookup, "yours": plain / yours}


def run(exercise: ModuleType) -> None:
    rows = {name: compare(exercise, answers) for name, answers in read_answers().items()}
    contest.show(f"speed with drafts of up to {MOST} tokens, times that without drafts", rows, ".2f")


if __name__ == "__main__":
    contest.main("drafter", run)
