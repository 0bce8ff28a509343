"""DeepSeek-V2 and DeepSeek-V3 (DeepSeek-AI 2024): multi-head latent attention (MLA), and mixtures of experts that are
chosen in groups.

A token keeps one vector for all heads, c [rank], from which each head's K and V are made, and a part of K that is
rotated. No K and V are made here. Head h scores a token by q · W_K c = (W_Kᵀ q) · c and puts out Σ w W_V c = W_V Σ w c,
with its own W_K and W_V, two parts of kv_b_proj. So attention has one KV head for all query heads:

    q of a head   [rotated part of q | W_Kᵀ q]
    K, also V     [rotated part of K | c]        in the pages of K; there are no others
    output        [not used          | Σ w c]    -> W_V Σ w c

The tensors of layers after the last one are left out. They predict further tokens (num_nextn_predict_layers).
"""

import math
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.config.model import LatentConfig, ModelConfig
from nanopage.experts.config import read_grouped_experts
from nanopage.experts.moe import Gate
from nanopage.families.qwen2_moe import make_mlp
from nanopage.files.model_files import shown
from nanopage.layers.linear import Linear
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import magnitude
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.rope import read_rope

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
GGUF_ARCHITECTURE = ""  # not supported: files have kv_b_proj in two parts
GGUF_TENSORS: dict[str, str] = {}
EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py. The sizes of attention and of experts have no defaults."""
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    fields = Fields({"norm_topk_prob": is_v3} | fields.values, fields.source)
    in_groups = _check(fields, is_v3)
    rope, rank, rotated = read_rope(fields), fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    k_size, v_size = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    q_rank = None if fields.values.get("q_lora_rank", 0) is None else fields.size("q_lora_rank")
    interleaved = not is_v3 or fields.flag("rope_interleave", True)
    stretch = (rope.params.get("factor") if rope.rope_type != "default" else None) or 1.0
    mscale = Fields(rope.params, fields.source).optional_number("mscale_all_dim") or 0.0
    return {
        "num_kv_heads": 1,
        "head_dim": rotated + rank,
        "rope": replace(rope, partial=math.nextafter(rotated / (rotated + rank), 1)),  # the product must not round down
        "attention_scale": (k_size + rotated) ** -0.5 * magnitude(stretch, mscale) ** 2,
        "attention_bias": fields.flag("attention_bias"),
        "latent": LatentConfig(rank, rotated, q_rank, k_size, v_size, interleaved),
        "experts": read_grouped_experts(fields, corrected=is_v3, in_groups=in_groups),
    }


def _check(fields: Fields, is_v3: bool) -> bool:
    """Returns: whether experts are chosen in groups. Raises: ValueError for a field with a value that is not supported,
    or that implementations disagree about."""
    supported: dict[str, tuple[Any, ...]] = {
        "topk_method": ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy"),
        "scoring_func": ("sigmoid" if is_v3 else "softmax",),
        "norm_topk_prob": (True, False) if is_v3 else (False,),
        "moe_layer_freq": (1,),
        "mlp_bias": (False,),
        "num_key_value_heads": (fields.size("num_attention_heads"), None),
        "quantization_config": (None,),
    }
    for name, choices in supported.items():
        if (value := fields.values.get(name, choices[0])) not in choices:
            raise fields.error(name, f"{shown(value)} is not supported; supported: {', '.join(map(str, choices))}")
    return is_v3 or fields.values.get("topk_method") == "group_limited_greedy"


def rename(name: str, config: ModelConfig) -> str | None:
    """The name of a checkpoint's tensor in this model. None: it has none."""
    layer = re.match(r"model\.layers\.(\d{1,4})\.", name)
    return None if layer and int(layer[1]) >= config.num_layers else name


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return LatentLayer(config, LatentAttention(config, index), make_mlp(config, index))


class LatentLayer(DecoderLayer):
    self_attn: "LatentAttention"

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        return super().after(x, self.self_attn.values(attended))


class LatentAttention(SelfAttention):
    """As in the module's docstring."""

    def __init__(self, config: ModelConfig, index: int):
        super().__init__(config, index)
        assert config.latent is not None
        del self.qkv_proj
        sizes, hidden_size, bias = config.latent, config.hidden_size, config.attention_bias
        self.sizes, q_size = sizes, self.num_heads * (sizes.k_size + sizes.rotated)
        if sizes.q_rank is None:
            self.q_proj = Linear(hidden_size, q_size)
        else:
            self.q_a_proj = Linear(hidden_size, sizes.q_rank, bias)
            self.q_a_layernorm = RMSNorm(sizes.q_rank, EPS)
            self.q_b_proj = Linear(sizes.q_rank, q_size)
        self.kv_a_proj_with_mqa = Linear(hidden_size, sizes.rank + sizes.rotated, bias)
        self.kv_a_layernorm = RMSNorm(sizes.rank, EPS)
        self.kv_b_proj = Gate(sizes.rank, self.num_heads * (sizes.k_size + sizes.v_size))  # never quantized
        self.o_proj = Linear(self.num_heads * sizes.v_size, hidden_size, bias)

    def heads(self, x: Tensor) -> Tensor:
        sizes = self.sizes
        q = self.q_proj(x) if sizes.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rotated = q.unflatten(-1, (self.num_heads, -1)).split([sizes.k_size, sizes.rotated], dim=-1)
        c, k_rotated = self.kv_a_proj_with_mqa(x)[:, None].split([sizes.rank, sizes.rotated], dim=-1)
        q = torch.einsum("thk,hkr->thr", q, self._matrices()[0])
        rotated = torch.cat((q_rotated, k_rotated), dim=1)
        if sizes.interleaved:
            rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        qk = torch.cat((rotated, torch.cat((q, self.kv_a_layernorm(c)), dim=1)), dim=-1)
        return torch.cat((qk, qk[:, -1:]), dim=1)  # the last one in place of V, which is not written

    def values(self, attended: Tensor) -> Tensor:
        """The output of attention [T, num_heads, rotated + rank] -> [T, num_heads, v_size]."""
        return torch.einsum("thr,hvr->thv", attended[..., self.sizes.rotated :], self._matrices()[1])

    def _matrices(self) -> tuple[Tensor, ...]:
        """W_K and W_V of each head: [num_heads, k_size, rank] and [num_heads, v_size, rank]."""
        sizes = [self.sizes.k_size, self.sizes.v_size]
        return self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)).split(sizes, dim=1)
