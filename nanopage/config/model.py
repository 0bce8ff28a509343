"""ModelConfig: config.json as data. reading/config.py reads it."""

from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from nanopage.checks.pooling import PoolingConfig
from nanopage.checks.stored_quantization import StoredQuantization
from nanopage.config.rope import RopeConfig


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts of a model (see experts/moe.py).

    num_experts: of each mixture. num_chosen: how many of them compute a token.
    intermediate_size: of each expert.
    shared_size: the intermediate size of an expert that computes all tokens; 0: there is none.
    shared_gate: whether that expert has a gate.
    normalize: whether the weights of a token's experts are divided by their sum.
    layers: whether each layer of the model has a mixture. Others have a plain feed-forward layer.
    corrected, groups, scaling: the bias, groups and scaling of `experts.routing.route`.
    swiglu: alpha and limit of the activation, which is GPT-OSS's. None: it is the model's, and experts have no biases.
    place, parts: the names in checkpoints: of the experts in a layer, and of an expert's gate, up and down projections.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_size: int
    normalize: bool
    layers: tuple[bool, ...]
    swiglu: tuple[float, float] | None = None
    place: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_gate: bool = True
    corrected: bool = False
    groups: tuple[int, int] = (1, 1)
    scaling: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether experts are chosen by a softmax alone, as the compiled code of a CPU does."""
        return not self.corrected and self.groups[0] == 1 and self.scaling == 1


@dataclass(frozen=True)
class LatentConfig:
    """The sizes of latent attention (see families/deepseek.py).

    rank, rotated: of the two parts of the vector that a token keeps.
    q_rank: of the vector from which queries are made. None: from the layer's input.
    k_size, v_size: of each head of K, without its rotated part, and of V.
    interleaved: whether neighbors are rotated together, not dimensions of two halves.
    """

    rank: int
    rotated: int
    q_rank: int | None
    k_size: int
    v_size: int
    interleaved: bool


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a transformer, whatever config.json called it.

    Fields that only some families set, and others leave at their defaults:

    activation: of the feed-forward layer, one of ACTIVATIONS.
    norm_offset: as in layers/norm.py. head_norms: whether the heads of q and k have norms.
    attention_scale: of the products of q and K. None: head_dim ** -0.5.
    attention_softcap, logit_softcap: x becomes softcap * tanh(x / softcap), for the scores of attention and for logits.
        0: x stays.
    embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the hidden states.
    logit_divisor: logits are divided by it.
    other_rope: a second rope, such as UNROTATED, of `other_rope_layers`. If a family does not name these layers, they
        are the layers with a window.
    state: the shapes of what each layer with STATE in `sliding_windows` keeps of a sequence instead of K and V (see
        recurrent/states.py).
    encoded_positions: how many positions of an encoder the layers with STATE attend to. Their state is then K and V in
        the layout of a block. 0: they keep something else.
    latent: the sizes of latent attention. A token's K is then its V, too, and the only one of all heads.
    full_heads: num_kv_heads and head_dim of layers without a window. None: as in other layers.
    kv_sources: of each layer, the layer whose K and V it attends to. (): its own.
    mixer: what else a family says of its layers, such as the fields of a Mamba2Config (recurrent/mamba2.py).
    residual_in_float32: whether hidden states are in float32, or in float64, between layers.
    undivided: why tensor parallelism does not work with the family.
    type_vocab_size, first_position: of an encoder, which has no `rope`: how many texts token types tell apart, and the
        row of the first token in the position embeddings. Its norms are not RMS norms.
    from_gguf: whether tensors are divided, ordered and named as in GGUF files.
    model_impl: what computes the model: "nanopage", or "transformers" (see transformers_impl/).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    sliding_windows: tuple[int | None, ...]  # one per layer; None attends to everything; STATE: keeps no K and V
    dtype: str
    eos_token_ids: frozenset[int]
    quantization: StoredQuantization | None = None
    experts: ExpertsConfig | None = None
    attention_bias: bool = False
    head_norms: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    norm_offset: float | None = None
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    other_rope: RopeConfig | None = None
    other_rope_layers: frozenset[int] = frozenset()
    state: tuple[tuple[int, ...], ...] = ()
    encoded_positions: int = 0
    latent: LatentConfig | None = None
    full_heads: tuple[int, int] | None = None
    kv_sources: tuple[int, ...] = ()
    mixer: dict[str, Any] = field(default_factory=dict)
    residual_in_float32: bool = False
    undivided: str | None = None
    type_vocab_size: int = 0
    first_position: int = 0
    pooling: PoolingConfig | None = None  # what is made instead of text
    from_gguf: bool = False
    encoders: dict[str, Any] = field(default_factory=dict)  # by the kind of items that they read, such as "image"
    model_impl: str = "nanopage"

    @property
    def is_encoder(self) -> bool:
        """Whether every token sees all others, so that layers keep nothing of a sequence."""
        return self.type_vocab_size > 0

    @property
    def kv_parts(self) -> int:
        """How many tensors of pages a layer has: K and V, or one for both (see state/pages.py)."""
        return 2 if self.latent is None else 1

    @property
    def heads(self) -> list[tuple[int, int]]:
        """num_kv_heads and head_dim of each layer."""
        own = self.num_kv_heads, self.head_dim
        return [own if window is not None else self.full_heads or own for window in self.sliding_windows]

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The same for sequences of up to `max_model_len` tokens. None: for the model's own limit."""
        if max_model_len is None:
            return self
        other_rope = None if self.other_rope is None else self.other_rope.for_length(max_model_len)
        return replace(self, rope=self.rope.for_length(max_model_len), other_rope=other_rope)


def num_numbers(shapes: tuple[tuple[int, ...], ...]) -> int:
    """How many numbers tensors of these shapes have together."""
    return sum(map(prod, shapes))
