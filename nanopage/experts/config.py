"""ExpertsConfig, read from config.json."""

from nanopage.checks.fields import Fields
from nanopage.config.model import ExpertsConfig
from nanopage.files.model_files import shown

MAX_EXPERTS = 2**16  # in all layers together


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
