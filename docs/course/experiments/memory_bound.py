"""How long the default model's weights take to be multiplied by 1, 2, 4, ... tokens at once.

python docs/course/experiments/memory_bound.py            # up to 256
python docs/course/experiments/memory_bound.py 1 3 5      # other numbers
"""

import sys
import time

import torch
import torch.nn.functional as F

from nanopage.weights import hub, loader


def matrices() -> list[torch.Tensor]:
    """The matrices of the layers of the default model, in float32. The embedding, which is looked up, is left out."""
    checkpoint = loader.open_checkpoint(hub.resolve(None))
    pieces = [piece.float() for name, _, piece in loader.pieces_of(checkpoint) if ".layers." in name]
    return [piece for piece in pieces if piece.dim() == 2]


@torch.inference_mode()
def seconds(weights: list[torch.Tensor], num_tokens: int, times: int = 7) -> float:
    """The shortest of some runs."""
    inputs = {weight.shape[1]: torch.randn(num_tokens, weight.shape[1]) for weight in weights}
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)
        best = min(best, time.perf_counter() - started)
    return best


def main(sizes: list[int]) -> None:
    weights = matrices()
    numbers = sum(weight.numel() for weight in weights)
    print(f"{len(weights)} matrices with {numbers / 1e6:.0f} million numbers, {4 * numbers / 1e6:.0f} MB in float32\n")
    print("tokens        ms   ms per token   weights read, GB/s   GFLOP/s")
    for size in sizes:
        took = seconds(weights, size)
        speed, flops = 4 * numbers / took / 1e9, 2 * numbers * size / took / 1e9
        print(f"{size:6} {1000 * took:9.1f} {1000 * took / size:14.2f} {speed:20.1f} {flops:9.0f}")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1, 2, 4, 8, 16, 32, 64, 128, 256])
