"""SigLIP's vision tower (Zhai et al. 2023): a transformer over the patches of an image, without a class token.

pixels ─▶ patches, positions ─▶ layers ─▶ norm ─▶ hidden states of the patches

a layer:   x = x + attention(norm(x))
           x = x + mlp(norm(x))

Its matrices stay floats, whatever `quantization` says.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from nanopage.layers.mlp import ACTIVATIONS
from nanopage.vision.config import SiglipConfig


class SiglipTower(nn.Module):
    """Computes the hidden states of patches. Its parts have the names of checkpoints."""

    def __init__(self, config: SiglipConfig):
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        patches, places = nn.Conv2d(3, size, patch, patch), nn.Embedding(config.side**2, size)
        self.embeddings = nn.ModuleDict({"patch_embedding": patches, "position_embedding": places})
        layers = nn.ModuleList(SiglipLayer(config) for _ in range(config.num_layers))
        self.encoder, self.layers = nn.ModuleDict({"layers": layers}), [*layers]
        self.post_layernorm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, payload: dict[str, Tensor], positions: Tensor) -> Tensor:
        """Compute the hidden states of the P patches of each of N images.

        Args:
            payload: "pixels" uint8 [N, 3, height, width]; "scale" and "offset", float32 [N, 3], which prepare them.
            positions: int64 [P], the row of each patch in the position embeddings.

        Returns: [N, P, hidden_size]
        """
        patches, places = self.embeddings.values()
        pixels, scale, offset = (payload[name] for name in ("pixels", "scale", "offset"))
        prepared = pixels * scale[..., None, None] + offset[..., None, None]
        x = places(positions)
        x = patches(prepared.to(x.dtype)).flatten(2).mT + x
        for layer in self.layers:
            x = layer(x)
        return self.post_layernorm(x)


class SiglipLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self, config: SiglipConfig):
        super().__init__()
        size = config.hidden_size
        self.num_heads, self.activation = config.num_heads, ACTIVATIONS[config.activation]
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(size, config.layer_norm_eps) for _ in range(2))
        self.self_attn = nn.ModuleDict({f"{name}_proj": nn.Linear(size, size) for name in ("q", "k", "v", "out")})
        inner = config.intermediate_size
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(size, inner), "fc2": nn.Linear(inner, size)})

    def forward(self, x: Tensor) -> Tensor:
        """x [N, P, hidden_size] -> same"""
        *qkv_proj, out_proj = self.self_attn.values()
        y = self.layer_norm1(x)
        q, k, v = (proj(y).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for proj in qkv_proj)
        x = x + out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](self.activation(self.mlp["fc1"](self.layer_norm2(x))))
