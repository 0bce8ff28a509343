"""Drafts by prompt lookup on an answer that repeats its prompt: how many steps they save, and how long steps take.

python docs/course/experiments/drafts.py
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
from benchmarks.costs import Costs
from nanopage.speculation.lookup import NgramIndex
from nanopage.step import Batch
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub

PROMPT = """Rename total to result:

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
"""
ANSWER = """def mean(values):
    result = 0.0
    for value in values:
        result += value
    return result / len(values)
"""

Source = Callable[[list[int]], list[int]]
"""Guesses what follows the known tokens of a sequence."""


def lookup(most: int) -> Source:
    """nanopage's guesses from the sequence's own tokens, up to `most`."""
    index = NgramIndex(longest=4, shortest=2)
    return lambda known: index.draft(known, most)[0]


def steps(prompt: list[int], answer: list[int], source: Source) -> list[tuple[int, int]]:
    """(tokens of the draft, accepted ones) of each step, if the model answers with `answer`.

    A step samples the token after the last known one, and one after each token of the draft. Those up to the first that
    differs from the draft are kept, and so is the first that differs.
    """
    known, result = list(prompt), []
    while (done := len(known) - len(prompt)) < len(answer):
        draft, rest, accepted = source(known), answer[done:], 0
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        known += rest[: accepted + 1]
        result.append((len(draft), accepted))
    return result


@cache
def costs() -> Costs:
    file = Path(__file__).parents[3] / "benchmarks" / "results" / "cpu-costs.json"
    return Costs(json.loads(file.read_text())["costs"]["seconds"])


def seconds(costs: Costs, num_drafted: int, num_seqs: int = 1, context: int = 100) -> float:
    """How long a step takes in which each sequence has a draft of this many tokens."""
    rows, count = list(range(num_seqs)), 1 + num_drafted
    samples = [row for row in rows for _ in range(count)]
    batch = Batch(rows=rows, starts=[context] * num_seqs, counts=[count] * num_seqs, sampled_rows=samples)
    batch.sampled_from = list(range(len(samples)))
    return costs.of(batch)


def tokens() -> tuple[Tokenizer, list[int], list[int]]:
    tokenizer = Tokenizer(hub.resolve(None))
    return tokenizer, tokenizer.encode(PROMPT), tokenizer.encode(ANSWER)


def visible(text: str) -> str:
    """A text in which spaces and ends of lines can be seen."""
    return text.replace(" ", "·").replace("\n", "↵")


def main() -> None:
    tokenizer, prompt, answer = tokens()
    measured = costs()
    alone = seconds(measured, 0) * len(answer)
    print(f"an answer of {len(answer)} tokens\n")
    print("draft   steps   tokens/step   accepted   time of a full step   speed")
    for most in (0, 1, 2, 4, 8, 16):
        taken = steps(prompt, answer, lookup(most))
        drafted, accepted = (sum(column) for column in zip(*taken, strict=True))
        time = sum(seconds(measured, length) for length, _ in taken)
        share = f"{100 * accepted / drafted:.0f} %" if drafted else "-"
        print(
            f"{most:5} {len(taken):7} {len(answer) / len(taken):13.1f} {share:>10} "
            f"{1000 * seconds(measured, most):18.1f} ms   x{alone / time:.2f}"
        )
    print("\nwith drafts of 4 tokens, a line for each step; accepted tokens are in brackets:")
    done = 0
    for _, accepted in steps(prompt, answer, lookup(4)):
        guessed = visible(tokenizer.decode(answer[done : done + accepted]))
        sampled = visible(tokenizer.decode(answer[done + accepted : done + accepted + 1]))
        print(f"  [{guessed}]{sampled}" if guessed else f"  {sampled}")
        done += accepted + 1


if __name__ == "__main__":
    main()
