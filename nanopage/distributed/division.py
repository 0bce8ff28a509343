"""Division: the shape of the part of a model that each of several workers has."""

from dataclasses import replace

from nanopage.config.model import ExpertsConfig, ModelConfig


def divide(model: ModelConfig, tp_size: int, expert_parallel: bool = False) -> ModelConfig:
    """The shape of the part of every layer that each of `tp_size` workers has.

    Heads, inputs of the feed-forward layer and the vocabulary are divided. Where there are fewer KV heads than workers,
    several workers have the same one. With `expert_parallel`, experts stay whole.

    Raises: ValueError naming a size that cannot be divided, or a family.
    """
    if tp_size > 1 and model.undivided is not None:
        raise ValueError(f"tensor_parallel_size={tp_size} does not work with {model.architecture}: {model.undivided}")
    sizes = {"num_heads": "num_attention_heads", "intermediate_size": "intermediate_size", "vocab_size": "vocab_size"}
    if model.experts is not None and all(model.experts.layers):
        del sizes["intermediate_size"]  # no layer has it
    for name, known_as in sizes.items():
        if getattr(model, name) % tp_size:
            raise ValueError(f"tensor_parallel_size={tp_size} does not divide {known_as}={getattr(model, name)}")
    if model.num_kv_heads % tp_size and tp_size % model.num_kv_heads:
        raise ValueError(
            f"tensor_parallel_size={tp_size} is neither a divisor nor a multiple of num_key_value_heads="
            f"{model.num_kv_heads}"
        )
    return replace(
        model,
        num_heads=model.num_heads // tp_size,
        num_kv_heads=max(1, model.num_kv_heads // tp_size),
        intermediate_size=model.intermediate_size // tp_size,
        vocab_size=model.vocab_size // tp_size,
        experts=None if model.experts is None else _divide_experts(model.experts, tp_size, expert_parallel),
    )


def _divide_experts(experts: ExpertsConfig, tp_size: int, expert_parallel: bool) -> ExpertsConfig:
    """As `divide`. `num_experts` does not change, because experts keep their numbers."""
    if expert_parallel and experts.num_experts % tp_size:
        raise ValueError(
            f"tensor_parallel_size={tp_size} with enable_expert_parallel does not divide num_experts="
            f"{experts.num_experts}"
        )
    if not expert_parallel and experts.intermediate_size % tp_size:
        raise ValueError(
            f"tensor_parallel_size={tp_size} does not divide intermediate_size={experts.intermediate_size} of each "
            "expert: enable_expert_parallel divides the number of experts instead"
        )
    if experts.shared_size % tp_size:
        name = "shared_expert_intermediate_size" if experts.shared_gate else "n_shared_experts * moe_intermediate_size"
        raise ValueError(f"tensor_parallel_size={tp_size} does not divide {name}={experts.shared_size}")
    size = experts.intermediate_size if expert_parallel else experts.intermediate_size // tp_size
    return replace(experts, intermediate_size=size, shared_size=experts.shared_size // tp_size)


def layers_of_stage(model: ModelConfig, pp_rank: int, pp_size: int) -> range:
    """The layers of one of `pp_size` stages. If they do not divide evenly, the first stages have one layer more.

    Raises: ValueError if there are more stages than layers, or if layers share what a stage does not hand on.
    """
    if pp_size > 1 and (model.kv_sources or model.mixer.get("input_size")):
        what = "its layers share K and V, or get inputs of their own"
        raise ValueError(f"pipeline_parallel_size={pp_size} does not work with {model.architecture}: {what}")
    if pp_size > model.num_layers:
        raise ValueError(f"pipeline_parallel_size={pp_size} is more than the model's {model.num_layers} layers")
    each, more = divmod(model.num_layers, pp_size)
    first = pp_rank * each + min(pp_rank, more)
    return range(first, first + each + (pp_rank < more))
