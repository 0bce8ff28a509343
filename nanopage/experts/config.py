"""ExpertsConfig, read from config.json."""

from dataclasses import replace

from nanopage.checks.fields import Fields
from nanopage.config.model import ExpertsConfig
from nanopage.files.model_files import shown

MAX_EXPERTS = 2**16  # in all layers together
EXPERT_TENSORS = {  # in GGUF files: in checkpoints
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}


def read_experts(
    fields: Fields,
    num_experts: int,
    num_chosen: int,
    intermediate_size: int,
    shared_size: int = 0,
    normalize: bool = True,
) -> ExpertsConfig:
    """A mixture of these sizes in every layer that `mlp_only_layers` and `decoder_sparse_step` do not exclude."""
    num_layers, step = fields.size("num_hidden_layers"), fields.size("decoder_sparse_step", 1)
    plain = fields.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in plain):
        raise fields.error("mlp_only_layers", f"must be a list of integers, got {shown(plain)}")
    if num_experts * num_layers > MAX_EXPERTS:
        problem = f"{num_experts:,} in {num_layers:,} layers is more than {MAX_EXPERTS:,} experts"
        raise fields.error("num_experts", problem)
    if num_chosen > num_experts:
        raise fields.error("num_experts_per_tok", f"must be at most num_experts={num_experts}, got {num_chosen}")
    layers = tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers))
    return ExpertsConfig(num_experts, num_chosen, intermediate_size, shared_size, normalize, layers)


def read_qwen_experts(fields: Fields, defaults: tuple[int, int, int, int], normalize: bool = True) -> ExpertsConfig:
    """Experts under Qwen's names of fields. Args: defaults: of the four sizes. normalize: as in ExpertsConfig."""
    names = "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"
    num_experts, num_chosen, inner, shared = map(fields.size, names, defaults)
    return read_experts(fields, num_experts, num_chosen, inner, shared, normalize)


def read_grouped_experts(fields: Fields, corrected: bool, in_groups: bool = True) -> ExpertsConfig:
    """Experts under DeepSeek's names of fields, which other families have, too. `fields` has norm_topk_prob.

    Args: corrected: as in ExpertsConfig. in_groups: whether `n_group` and `topk_group` have an effect.
    """
    names = "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"
    num_experts, num_chosen, inner, num_shared = map(fields.size, names)
    normalize, dense = fields.flag("norm_topk_prob"), fields.values.get("first_k_dense_replace")
    if dense != 0:
        dense = fields.size("first_k_dense_replace")
    experts = read_experts(fields, num_experts, num_chosen, inner, num_shared * inner, normalize)
    groups = (fields.size("n_group"), fields.size("topk_group")) if in_groups else (1, 1)
    size = num_experts // groups[0]
    if num_experts % groups[0] or (groups[0] > 1 and size < 2):
        problem = f"{groups[0]} does not divide n_routed_experts={num_experts} into groups of at least 2"
        raise fields.error("n_group", problem)
    if groups[1] > groups[0] or num_chosen > groups[1] * size:
        problem = f"{groups[1]} of n_group={groups[0]} groups do not have num_experts_per_tok={num_chosen} experts"
        raise fields.error("topk_group", problem)
    return replace(
        experts,
        layers=tuple(index >= dense for index in range(len(experts.layers))),
        shared_gate=False,
        corrected=corrected,
        groups=groups,
        scaling=fields.number("routed_scaling_factor"),
    )
