"""What drafts are worth: the speed by their length, when a guess pays, and how often two models draw the same token.

python docs/course/experiments/gains.py
"""

import drafts
import torch

from nanopage.sampling.noise import gumbel_noise

SHARES = 0.3, 0.5, 0.7, 0.9
LENGTHS = 1, 2, 4, 8, 16
SIZES = 1, 2, 4, 8, 16, 32  # sequences in a step
MODEL = (0.6, 0.3, 0.1)  # probabilities of three tokens
DRAFT_MODELS = {"the same": MODEL, "similar": (0.5, 0.3, 0.2), "greedy": (1.0, 0.0, 0.0), "wrong": (0.1, 0.3, 0.6)}


def tokens(share: float, length: int) -> float:
    """How many tokens a step yields on average, if each guess is right with the probability `share`."""
    return sum(share**number for number in range(length + 1))


def slower(length: int, num_seqs: int) -> float:
    """How many times as long a step takes if each of its sequences has a draft."""
    costs = drafts.costs()
    return drafts.seconds(costs, length, num_seqs) / drafts.seconds(costs, 0, num_seqs)


def agreement(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    """How often two models draw the same token with the same noise (Daliri, Musco and Suresh, 2024)."""
    common = [i for i in range(len(p)) if p[i] and q[i]]
    return sum(1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(len(p))) for i in common)


def counted(p: tuple[float, ...], q: tuple[float, ...], count: int = 50_000) -> float:
    """The same, counted: by Gumbel-max, with the noise of nanopage's sampler at many positions."""
    noise = gumbel_noise(torch.zeros(count, dtype=torch.int64), torch.arange(count), torch.arange(len(p)))
    drawn = [(torch.tensor(probabilities).log() + noise).argmax(1) for probabilities in (p, q)]
    return float((drawn[0] == drawn[1]).float().mean())


def main() -> None:
    for num_seqs in (1, 16):
        print(f"speed with {num_seqs} sequence{'s' * (num_seqs > 1)} in a step, each with a draft\n")
        print("right guesses" + "".join(f"{length:9}" for length in LENGTHS) + "   tokens of a draft")
        for share in SHARES:
            speeds = (tokens(share, length) / slower(length, num_seqs) for length in LENGTHS)
            print(f"{100 * share:11.0f} %" + "".join(f"{speed:9.2f}" for speed in speeds))
        print()
    print("sequences in a step        " + "".join(f"{num_seqs:7}" for num_seqs in SIZES))
    print("one guess pays from" + " " * 8 + "".join(f"{100 * (slower(1, size) - 1):5.0f} %" for size in SIZES))
    print("\nhow often a guess is accepted\ndraft model     rejection   same noise   counted")
    for name, q in DRAFT_MODELS.items():
        rejection = sum(map(min, MODEL, q))
        figures = 100 * rejection, 100 * agreement(MODEL, q), 100 * counted(MODEL, q)
        print(f"{name:12}{figures[0]:11.0f} %{figures[1]:11.0f} %{figures[2]:8.0f} %")


if __name__ == "__main__":
    main()
