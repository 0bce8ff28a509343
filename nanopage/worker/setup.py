"""Setup: what a worker computes, on which device and in which types. It is settled before anything is loaded."""

from dataclasses import dataclass
from pathlib import Path

import torch

from nanopage.config.model import ModelConfig
from nanopage.config.options import EngineConfig
from nanopage.kernels.grouped_attention import GroupedAttention
from nanopage.layers.attention import Attention
from nanopage.state.layer_kinds import BlockNeeds, LayerKinds
from nanopage.state.sequence_table import SequenceTable


@dataclass(frozen=True)
class Setup:
    """What a worker computes, on which device and in which types.

    model_config  the whole model
    part          this worker's part of it
    kinds         of this worker's layers
    longest       the most tokens of a sequence, if the KV cache holds them
    dtype         of weights and activations
    kv_dtype      of K and V
    """

    config: EngineConfig
    model_config: ModelConfig
    part: ModelConfig
    kinds: LayerKinds
    longest: int
    path: Path
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_cache(self) -> bool:
        """Whether layers keep K and V. Those of an encoder do not."""
        return bool(self.kinds.windows)

    @property
    def needs(self) -> BlockNeeds:
        """How many blocks sequences take."""
        config = self.config
        return BlockNeeds(self.kinds.windows, config.block_size, config.token_budget(self.device.type))

    def make_table(self, max_model_len: int) -> SequenceTable:
        """A table for as many sequences as run at once, and one more."""
        config, vocab_size = self.config, self.model_config.vocab_size
        shape = config.max_num_seqs + 1, max_model_len, config.block_size, vocab_size
        return SequenceTable(*shape, self.device, config.enable_lora, self.kinds.windows)

    def make_attention(self, plain: GroupedAttention) -> Attention:
        """The attention of a step on a GPU, for the layers of one kind."""
        from nanopage.kernels import paged_attention  # imports Triton, which would double the time to start on a CPU

        part = self.part
        return paged_attention.make_attention(plain, part.num_heads, part.num_kv_heads, part.head_dim, self.dtype)
