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
    """Computes the hidden states of an image's patches. Its parts have the names of checkpoints."""

    def __init__(self, config: SiglipConfig):
        super().__init__()
        size, patch = config.hidden_size, config.patch_size
        patches, places = nn.Conv2d(3, size, patch, patch), nn.Embedding(config.side**2, size)
        self.embeddings = nn.ModuleDict({"patch_embedding": patches, "position_embedding": places})
        layers = nn.ModuleList(SiglipLayer(config) for _ in range(config.num_layers))
        self.encoder, self.layers = nn.ModuleDict({"layers": layers}), [*layers]
        self.post_layernorm = nn.LayerNorm(size, config.layer_norm_eps)

    def forward(self, payload: dict[str, Tensor], positions: Tensor) -> Tensor:
        """Compute the hidden states of the P patches of an image.

        Args:
            payload: "pixels" uint8 [3, height, width]; "scale" and "offset", float32 [3], which prepare them.
            positions: int64 [P], the row of each patch in the position embeddings.

        Returns: [P, hidden_size]
        """
        patches, places = self.embeddings.values()
        pixels, scale, offset = (payload[name] for name in ("pixels", "scale", "offset"))
        prepared = pixels * scale[:, None, None] + offset[:, None, None]
        x = places(positions)
        x = patches(prepared[None].to(x.dtype))[0].flatten(1).T + x
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
        """x [P, hidden_size] -> same"""
        *qkv_proj, out_proj = self.self_attn.values()
        y = self.layer_norm1(x)
        q, k, v = (proj(y).unflatten(1, (self.num_heads, -1)).transpose(0, 1)[None] for proj in qkv_proj)
        x = x + out_proj(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
        return x + self.mlp["fc2"](self.activation(self.mlp["fc1"](self.layer_norm2(x))))
