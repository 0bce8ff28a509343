"""How long the default model's weights take to be multiplied by 1, 2, 4, ... tokens at once.

python docs/course/experiments/memory_bound.py            # up to 256
python docs/course/experiments/memory_bound.py 1 3 5      # other numbers
"""

import sys
import time

import torch
from torch import Tensor

from nanopage.cpu.packed_linear import pack, packed_linear
from nanopage.weights import hub, loader


def matrices() -> list[Tensor]:
    """The matrices of the layers of the default model, in float32. The embedding, which is looked up, is left out."""
    checkpoint = loader.open_checkpoint(hub.resolve(None))
    stored = [tensor for tensor in loader.stored_tensors_of(checkpoint) if ".layers." in tensor.name]
    pieces = loader.pieces_of(checkpoint, [tensor for tensor in stored if len(tensor.shape) == 2])
    return [piece.to(torch.float32, copy=True) for _, _, piece in pieces]


@torch.inference_mode()
def seconds(weights: list[Tensor], packed: list[Tensor], num_tokens: int, times: int = 7) -> float:
    """The shortest of some runs.

    Args: packed: the weights in the layout in which nanopage keeps them on a CPU.
    """
    inputs = [torch.randn(num_tokens, weight.shape[1]) for weight in weights]
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        for x, weight in zip(inputs, packed, strict=True):
            packed_linear(x, weight, None)
        best = min(best, time.perf_counter() - started)
    return best


def main(sizes: list[int]) -> None:
    weights = matrices()
    packed = [pack(weight) for weight in weights]
    numbers = sum(weight.numel() for weight in weights)
    print(f"{len(weights)} matrices with {numbers / 1e6:.0f} million numbers, {4 * numbers / 1e6:.0f} MB in float32\n")
    print("tokens        ms   ms per token   weights read, GB/s   GFLOP/s")
    for size in sizes:
        took = seconds(weights, packed, size)
        speed, flops = 4 * numbers / took / 1e9, 2 * numbers * size / took / 1e9
        print(f"{size:6} {1000 * took:9.1f} {1000 * took / size:14.2f} {speed:20.1f} {flops:9.0f}")


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [1, 2, 4, 8, 16, 32, 64, 128, 256])
