"""DeepSeek-V2 and DeepSeek-V3 (DeepSeek-AI 2024): multi-head latent attention (MLA), and mixtures of experts that are
chosen in groups.

A token keeps one vector for all heads, c [rank], from which each head's K and V are made, and a part of K that is
rotated. For most sequences, no K and V are made here. Head h scores a token by q · W_K c = (W_Kᵀ q) · c and puts out
Σ w W_V c = W_V Σ w c, with its own W_K and W_V, two parts of kv_b_proj. So attention has one KV head for all query
heads:

    q of a head   [rotated part of q | W_Kᵀ q]
    K, also V     [rotated part of K | c]        in the pages of K; there are no others
    output        [not used          | Σ w c]    -> W_V Σ w c

For DeepSeek's sizes, a pair of tokens then takes 1,152 multiplications in each head, in place of 320 with K and V. So K
and V are made for sequences with MANY tokens in a step, one head after the other.

The layer after the last one predicts a further token: drafts may come from it (speculation/heads.py).
"""

import math
import re
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.checks.fields import GENERATE, Fields
from nanopage.checks.stored_quantization import FLOATS
from nanopage.config.model import LatentConfig, ModelConfig
from nanopage.experts.config import EXPERT_TENSORS, read_grouped_experts
from nanopage.experts.moe import Gate
from nanopage.families.qwen2_moe import make_mlp
from nanopage.files.model_files import shown
from nanopage.layers.attention import StepContext
from nanopage.layers.linear import Linear
from nanopage.layers.norm import RMSNorm
from nanopage.layers.rotary import magnitude, rotate
from nanopage.models.decoder import DecoderLayer, SelfAttention
from nanopage.reading.rope import read_rope
from nanopage.state.pages import gather

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
INSTEAD = GENERATE
GGUF_ARCHITECTURE = "deepseek2"
GGUF_TENSORS = EXPERT_TENSORS | {
    "attn_k_b": "self_attn.k_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GGUF_PARTIAL_ROPE = True
GGUF_GATINGS, GGUF_NORMALIZED = (0, 1, 2), False
GGUF_EXPERTS = {
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "leading_dense_block_count": "first_k_dense_replace",
}
GGUF_FIELDS = GGUF_EXPERTS | {
    "attention.key_length_mla": "qk_nope_head_dim",  # with the rotated part
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim",
    "rope.dimension_count": "qk_rope_head_dim",
    "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
}
GGUF_FLAGS = {"attention_bias": "self_attn.kv_a_proj_with_mqa.bias"}
EPS = 1e-6  # of the norms of latent vectors, whatever rms_norm_eps is
MANY = 256  # tokens of a sequence in a step, with which K and V are worth making, however long its context is


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """As in llama.py. The sizes of attention and of experts have no defaults."""
    is_v3 = architecture == "DeepseekV3ForCausalLM"
    fields = replace(fields, values={"norm_topk_prob": is_v3} | fields.values)
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
    }
    for name, choices in supported.items():
        if (value := fields.values.get(name, choices[0])) not in choices:
            raise fields.unsupported(name, shown(value), choices)
    if (quantization := fields.values.get("quantization_config")) is not None:
        raise replace(fields, instead=FLOATS).unsupported("quantization_config", shown(quantization))
    return is_v3 or fields.values.get("topk_method") == "group_limited_greedy"


def complete_gguf(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json that GGUF files have in another form or lack. Files without a number of groups have one
    group, as in llama.cpp."""
    is_v3, num_groups = config.get("scoring_func") == "sigmoid", config.get("n_group", 1)
    missing = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    grouped = "group_limited_greedy" if num_groups > 1 else "greedy"
    k_size, scaling = config.get("qk_nope_head_dim"), config.get("rope_scaling")
    mscale = round(10 * config.get("mscale_all_dim", 0.0), 6)  # a tenth is stored
    return {name: config.get(name, value) for name, value in missing.items()} | {
        "architectures": [ARCHITECTURES[is_v3]],
        "topk_method": "noaux_tc" if is_v3 else grouped,
        "num_key_value_heads": None,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": config.get("q_lora_rank"),
        "qk_nope_head_dim": None if k_size is None else k_size - config.get("qk_rope_head_dim", 0),
        "rope_scaling": scaling and scaling | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {}),
    }


def rename(name: str, config: ModelConfig) -> str | None:
    """The name of a checkpoint's tensor in this model. None: it has none."""
    layer = re.match(r"model\.layers\.(\d{1,4})\.", name)
    return None if layer and int(layer[1]) >= config.num_layers else name


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    return LatentLayer(config, LatentAttention(config, index), make_mlp(config, index))


class LatentLayer(DecoderLayer):
    self_attn: "LatentAttention"

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        part = self.self_attn
        q, k, v = self.before(x, *step.rotations[part.rope])
        step.write(part, k, v)
        return self.after(*step.keep(part, x, part.attend(q, step)))

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, latent = self.self_attn.project(self.input_layernorm(x), cos, sin)
        return q, latent, latent


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
        self.kv_b_proj = LatentProjection(sizes, self.num_heads, config.from_gguf)
        self.o_proj = Linear(self.num_heads * sizes.v_size, hidden_size, bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q [T, num_heads, rotated + k_size] and what a token keeps [T, 1, rotated + rank], both rotated."""
        sizes = self.sizes
        q = self.q_proj(x) if sizes.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_rotated = q.unflatten(-1, (self.num_heads, -1)).split([sizes.k_size, sizes.rotated], dim=-1)
        c, k_rotated = self.kv_a_proj_with_mqa(x)[:, None].split([sizes.rank, sizes.rotated], dim=-1)
        rotated = torch.cat((q_rotated, k_rotated), dim=1)
        if sizes.interleaved:
            rotated = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        rotated = rotate(rotated, cos, sin)
        latent = torch.cat((rotated[:, -1:], self.kv_a_layernorm(c)), dim=-1)
        return torch.cat((rotated[:, :-1], q), dim=-1), latent

    def attend(self, q: Tensor, step: StepContext) -> Tensor:
        """q, as `project` makes it -> the output of attention, [T, num_heads, v_size]."""
        attention: Any = step.attention_of(self)
        many, counts = attention.query_lens >= MANY, attention.query_lens
        rows = many.repeat_interleave(counts)
        out = q.new_empty(*q.shape[:2], self.sizes.v_size)
        for index in many.nonzero().flatten().tolist():
            first, count = int(counts[:index].sum()), int(counts[index])
            which = slice(first, first + count)
            self._attend_many(q[which], attention.block_tables[index], int(attention.seq_lens[index]), step, out[which])
        if not many.all():
            w_k, w_v = self.kv_b_proj.matrices(self.kv_b_proj.weight)
            q_rotated, q = q[~rows].split([self.sizes.rotated, self.sizes.k_size], dim=-1)
            q = torch.cat((q_rotated, torch.einsum("thk,hkr->thr", q, w_k)), dim=-1)
            tables, lens = attention.block_tables[~many], attention.seq_lens[~many]
            few = replace(attention, block_tables=tables, query_lens=counts[~many], seq_lens=lens)
            attended = few.attend(q, step.kv_caches[self.index], self.scoring)[..., self.sizes.rotated :]
            out[~rows] = torch.einsum("thr,hvr->thv", attended, w_v)
        return out

    def _attend_many(self, q: Tensor, table: Tensor, length: int, step: StepContext, out: Tensor) -> None:
        """Attention of the last tokens of a sequence of `length` tokens, with its block table, to `out`."""
        kv_cache = step.kv_caches[self.index]
        blocks = -(-length // (kv_cache.shape[3] // self.head_dim))
        latent = gather(kv_cache, table[None, :blocks], self.head_dim)[1][0, 0, :length].to(q.dtype)
        k_rotated, c = latent.split([self.sizes.rotated, self.sizes.rank], dim=-1)
        places = torch.arange(length, device=q.device)
        mask = places <= places[-len(q) :, None]
        for head, (w_k, w_v) in enumerate(
            zip(*self.kv_b_proj.matrices(self.kv_b_proj.weight), strict=True)
        ):  # one by one, to save memory
            k, v = torch.cat((k_rotated, c @ w_k.mT), dim=-1), c @ w_v.mT
            made = q[None, :, head], k[None], v[None]
            out[:, head] = F.scaled_dot_product_attention(*made, attn_mask=mask, scale=self.scoring.scale)[0]


class LatentProjection(Gate):
    """W_K and W_V of all heads, which are never quantized: [heads * (k_size + v_size), rank].

    Args: is_split: whether files have them in two tensors, W_K transposed.
    """

    def __init__(self, sizes: LatentConfig, num_heads: int, is_split: bool):
        super().__init__(sizes.rank, num_heads * (sizes.k_size + sizes.v_size))
        self.shape, self.sizes, self.is_split = (num_heads, -1), [sizes.k_size, sizes.v_size], is_split

    def matrices(self, weight: Tensor) -> tuple[Tensor, ...]:
        """W_K and W_V of each head: [num_heads, k_size, rank] and [num_heads, v_size, rank]."""
        return weight.unflatten(0, self.shape).split(self.sizes, dim=1)

    def slots(self, parameter: Tensor) -> dict[str, Tensor]:
        """As `Linear.slots`."""
        if not self.is_split:
            return {"": parameter}
        w_k, w_v = self.matrices(parameter)
        return {"k_b_proj": w_k.transpose(1, 2), "v_b_proj": w_v}
