"""Exercise of chapter 9: a router of experts that keeps them equally busy.

    pytest -x docs/course/exercises/test_balance.py

Left alone, a router sends most tokens to a few experts. They are trained most, become better still, and get even more.
So training has to balance the load. DeepSeek-V3 (2024) does it with a bias for each expert, which is not trained as the
weights are: after each step, the bias of an expert with too many tokens falls, and that of one with too few rises.

The bias must not change what a chosen expert contributes. So it affects only the choice:

    scores   sigmoid(logits)
    choice   the experts with the largest scores + bias
    weights  the scores of the chosen experts, without the bias, divided by their sum

At inference the biases are fixed: they are in the checkpoint, and nanopage's `route` (nanopage/experts/routing.py) adds
them. Fill in both functions without calling it.
"""

from torch import Tensor


def choose(logits: Tensor, bias: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """Choose experts for each token, the one with the largest score + bias first.

    Args:
        logits: [T, experts].
        bias: [experts].

    Returns: the numbers of the experts, int64 [T, num_chosen], and their weights, [T, num_chosen].
    """
    raise NotImplementedError("exercise 9")


def update(bias: Tensor, chosen: Tensor, rate: float) -> Tensor:
    """The bias for the next step: `rate` more for experts that have fewer tokens than the mean of all experts, `rate`
    less for those that have more, and the same for those that have just as many.

    Args:
        bias: [experts].
        chosen: the numbers of the experts of each token, int64 [T, num_chosen].

    Returns: a new tensor.
    """
    raise NotImplementedError("exercise 9")
