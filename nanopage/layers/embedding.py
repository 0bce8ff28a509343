"""Token embedding and the language-model head, which may share one matrix."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.kernels.cpu import int8_linear, packed_linear
from nanopage.layers.linear import Linear


class Embedding(nn.Module):
    """[T] token ids -> [T, hidden_size]."""

    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.tiles: Tensor | None
        self.scales: Tensor | None
        self.register_buffer("tiles", None, persistent=False)
        self.register_buffer("scales", None, persistent=False)
        self.dtype = torch.float32  # of what comes out of int8

    def forward(self, input_ids: Tensor) -> Tensor:
        if self.tiles is not None and self.scales is not None:
            return int8_linear.rows(self.tiles, self.scales, input_ids, self.dtype)
        if self.tiles is not None:
            return packed_linear.rows(self.tiles, input_ids)
        return F.embedding(input_ids, self.weight)


class LMHead(Linear):
    """[T, hidden_size] -> logits [T, vocab_size]. With `tied_to`, uses the embedding's matrix and has none itself."""

    def __init__(self, hidden_size: int, vocab_size: int, tied_to: Embedding | None = None):
        super().__init__(hidden_size, vocab_size)
        self.tied_to = [] if tied_to is None else [tied_to]  # in a list: not a part of this module
        if tied_to is not None:
            self.weight = tied_to.weight

    def quantize(self) -> None:
        """As in Linear, and a tied embedding with it."""
        dtype = self.weight.dtype
        super().quantize()
        for embedding in self.tied_to:
            embedding.tiles, embedding.scales, embedding.dtype = self.tiles, self.scales, dtype
            del embedding.weight

    def pack(self) -> None:
        """As in Linear; a tied embedding then reads its rows out of the packed matrix, so there is one copy still."""
        super().pack()
        if self.tiles is not None:
            for embedding in self.tied_to:
                embedding.tiles = self.tiles
                del embedding.weight
