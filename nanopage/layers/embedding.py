"""Token embedding and the language-model head, which may share one matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.layers.linear import Linear


class Embedding(nn.Module):
    """[T] token ids -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, input_ids: Tensor) -> Tensor:
        return F.embedding(input_ids, self.weight)


class LMHead(Linear):
    """[T, hidden_size] -> logits [T, vocab_size]. With `tied_to`, uses the embedding's matrix and has none itself."""

    def __init__(self, hidden_size: int, vocab_size: int, tied_to: Embedding | None = None):
        super().__init__(hidden_size, vocab_size)
        if tied_to is not None:
            self.weight = tied_to.weight
