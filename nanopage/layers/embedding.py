"""Token embedding: one row of a matrix for each token. The language-model head, a Linear, may share the matrix."""

from typing import Any

from torch import Tensor, nn

from nanopage.layers.weight import Floats


class Embedding(nn.Module):
    """Looks up embeddings. Shape: [T] token ids -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight: Any = Floats(vocab_size, hidden_size)  # or another Weight (weight.py)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.weight.rows(input_ids)
