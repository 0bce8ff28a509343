"""Modules that exchange tensors with other workers, around those of a part of a model (see distributed/parallel.py)."""

from collections.abc import Callable

from torch import Tensor, nn


class Summed(nn.Module):
    """A linear layer whose output is a part of a sum.

    Args: add_up: adds up a tensor of all workers, in place, and returns it.
    """

    def __init__(self, linear: nn.Module, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.linear, self.add_up = linear, add_up

    def forward(self, x: Tensor) -> Tensor:
        return self.add_up(self.linear(x).contiguous())


class SlicedEmbedding(nn.Module):
    """An embedding of which this worker has `size` rows from `first` on. The other rows come from the other workers.

    Args: add_up: as in `Summed`.
    """

    def __init__(self, embedding: nn.Module, first: int, size: int, add_up: Callable[[Tensor], Tensor]):
        super().__init__()
        self.embedding, self.first, self.size, self.add_up = embedding, first, size, add_up

    def forward(self, input_ids: Tensor) -> Tensor:
        rows = input_ids - self.first
        x = self.embedding(rows.clamp(0, self.size - 1))
        mine = (rows >= 0) & (rows < self.size)
        return self.add_up(x.masked_fill(~mine[:, None], 0))


class SlicedHead(nn.Module):
    """A head that computes the logits of a part of the vocabulary. The first worker gets those of the others.

    Args:
        gather: takes this worker's logits [T, size]. Returns [T, vocab_size]: on the first worker all logits, on
            others zeros, which nothing reads.
        vocab_size: of the whole model.
    """

    def __init__(self, linear: nn.Module, gather: Callable[[Tensor], Tensor], vocab_size: int):
        super().__init__()
        self.linear, self.gather, self.out_features = linear, gather, vocab_size

    def forward(self, x: Tensor) -> Tensor:
        return self.gather(self.linear(x).contiguous())


class Received(nn.Module):
    """Takes the place of the embedding in later stages: returns the hidden states of the previous stage.

    Args: receive: waits for the hidden states of so many tokens, [T, hidden_size].
    """

    def __init__(self, receive: Callable[[int], Tensor]):
        super().__init__()
        self.receive = receive

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.receive(len(input_ids))
