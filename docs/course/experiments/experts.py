"""How many experts a step reads, and how many tokens each of them gets.

python docs/course/experiments/experts.py
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanopage.config.model import ModelConfig
from nanopage.experts.routing import route
from nanopage.reading.config import config_from_dict

SIZES = 1, 2, 4, 8, 16, 64  # tokens in a step
NUM_EXPERTS, NUM_CHOSEN = 8, 2
TOKENS = 512  # of a prompt


def config_of(name: str) -> ModelConfig:
    file = Path(__file__).parents[3] / "benchmarks" / "configs" / name / "config.json"
    return config_from_dict(json.loads(file.read_text()))


@dataclass
class Weights:
    """How many weights a model has: those of one expert in all layers, and the rest, which every token uses."""

    expert: int
    rest: int


def weights(config: ModelConfig) -> Weights:
    """The rest includes the matrix that makes logits, but not the embeddings, which are looked up."""
    assert config.experts is not None
    hidden, heads = config.hidden_size, 2 * config.num_heads + 2 * config.num_kv_heads
    attention = hidden * config.head_dim * heads
    return Weights(
        config.num_layers * 3 * hidden * config.experts.intermediate_size,
        config.num_layers * attention + config.vocab_size * hidden,
    )


def logits(num_tokens: int, uneven: float = 0.0) -> Tensor:
    """A router's logits for tokens that have nothing in common: [num_tokens, NUM_EXPERTS].

    Args: uneven: how much some experts are preferred.
    """
    rng = random.Random(0)
    popular = [uneven * rng.gauss() for _ in range(NUM_EXPERTS)]
    return torch.tensor([[each + rng.gauss() for each in popular] for _ in range(num_tokens)], dtype=torch.float64)


def experts_read(num_tokens: int, num_steps: int = 100) -> float:
    """How many experts the tokens of a step choose together, on average over some steps."""
    chosen, _ = route(logits(num_tokens * num_steps), NUM_CHOSEN, True)
    return sum(len(step.unique()) for step in chosen.view(num_steps, -1)) / num_steps


def loads(uneven: float) -> list[int]:
    """How many of TOKENS tokens each expert gets."""
    chosen, _ = route(logits(TOKENS, uneven), NUM_CHOSEN, True)
    return chosen.flatten().bincount(minlength=NUM_EXPERTS).tolist()


def main() -> None:
    size = weights(config_of("Mixtral-8x7B"))
    total, active = NUM_EXPERTS * size.expert + size.rest, NUM_CHOSEN * size.expert + size.rest
    print(f"Mixtral 8x7B: {total / 1e9:.1f} billion weights, of which a token uses {active / 1e9:.1f} billion")
    print("(embeddings, which are looked up, do not count)\n")
    print("tokens   experts read   expected      GB read   GB per token")
    for number in SIZES:
        read, expected = experts_read(number), NUM_EXPERTS * (1 - (1 - NUM_CHOSEN / NUM_EXPERTS) ** number)
        gigabytes = 2 * (read * size.expert + size.rest) / 1e9
        print(f"{number:6}{read:15.1f}{expected:11.1f}{gigabytes:13.1f}{gigabytes / number:15.1f}")
    print(f"\n{TOKENS} tokens, {NUM_CHOSEN} experts each: how many tokens each expert gets")
    for name, uneven in {"even": 0.0, "uneven": 0.5}.items():
        counts = loads(uneven)
        most = max(counts) * NUM_EXPERTS / sum(counts)
        print(f"{name:8}{''.join(f'{count:5}' for count in counts)}   most / mean: {most:.2f}")


if __name__ == "__main__":
    main()
