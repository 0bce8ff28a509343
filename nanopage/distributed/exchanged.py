"""Modules and weights that exchange tensors with other workers. They wrap the modules and weights of a part of a model
(see distributed/parallel.py)."""

from collections.abc import Callable

from torch import Tensor, nn

from nanopage.layers.weight import Weight


class Summed(nn.Module):
    """A linear layer whose output is a partial sum.

    Args: add_up: sums a tensor over all workers, in place, and returns it.
    """

    def __init__(self, linear: nn.Module, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.add_up = linear, add_up

    def forward(self, x: Tensor) -> Tensor:
        return self.add_up(self.linear(x).contiguous())


class SlicedWeight(nn.Module):
    """The rows of a matrix from `first` to `first + size`; other workers have the other rows. An embedding sums the
    results of all workers, and a head gathers all logits on the first worker.

    Args:
        weight: the rows that this worker has.
        add_up: as in `Summed`.
        gather: takes this worker's logits [T, size]. Returns [T, vocab_size]: all logits on the first worker, and
            zeros, which nothing reads, on the others.
    """

    has_rows = True

    def __init__(
        self,
        weight: Weight,
        first: int,
        size: int,
        add_up: Callable[[Tensor], Tensor],
        gather: Callable[[Tensor], Tensor],
    ):
        super().__init__()
        self.weight, self.first, self.size, self.add_up, self.gather = weight, first, size, add_up, gather

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.gather(self.weight.product(x, bias).contiguous())

    def rows(self, indices: Tensor) -> Tensor:
        mine = indices - self.first
        x = self.weight.rows(mine.clamp(0, self.size - 1))
        return self.add_up(x.masked_fill(((mine < 0) | (mine >= self.size))[:, None], 0))


class Received(nn.Module):
    """Takes the place of the embedding in later stages: returns the hidden states of the previous stage.

    Args: receive: waits for the hidden states of T tokens and returns them, [T, hidden_size].
    """

    def __init__(self, receive: Callable[[int], Tensor]):
        super().__init__()
        self.receive = receive

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.receive(len(input_ids))
