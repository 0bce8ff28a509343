"""The rotary embedding of a model, read from config.json."""

from nanopage.checks.fields import RANGES, Fields
from nanopage.config.rope import RopeConfig
from nanopage.files.model_files import shown

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "proportional")

# rope type -> (required numbers, optional numbers)
ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "dynamic": (("factor",), ()),
    "longrope": (("original_max_position_embeddings",), ("factor", "attention_factor")),
    "proportional": ((), ("factor",)),
}


def read_rope(
    config: Fields, layer_type: str | None = None, default_theta: float = 10000.0, partial: bool = False
) -> RopeConfig:
    """The rope of a model. transformers 5 writes rope_parameters. transformers 4 wrote rope_theta and rope_scaling,
    whose key "rope_type" was once "type".

    Args:
        layer_type: whose rope to read, if rope_parameters has one for each layer type. None: the model has one rope.
        default_theta: rope_theta if config.json has none.
        partial: whether the family knows partial_rotary_factor. Other families refuse it.
    """
    name = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    rope, max_position_embeddings = config.object(name), config.size("max_position_embeddings")
    if any(isinstance(value, dict) for value in rope.values.values()):
        if layer_type is None:
            raise config.unsupported("rope_parameters", "of each layer type")
        name, rope = f"{name}: {layer_type}", rope.object(layer_type)
    theta = _first_number("rope_theta", rope, config, default_theta)
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type  # the first name of longrope
    if rope_type not in ROPE_TYPES:
        raise config.unsupported(name, f"of type {shown(rope_type)}", ROPE_TYPES)
    rotated = _first_number("partial_rotary_factor", rope, config, 1.0)
    if rotated != 1 and not partial and rope_type != "proportional":
        raise config.unsupported("partial_rotary_factor", f"{rotated:g}", ["1.0"])
    others = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    params = {key: value for key, value in rope.values.items() if key not in others}
    if config.values.get("original_max_position_embeddings") is not None:  # transformers gives it priority
        params["original_max_position_embeddings"] = config.values["original_max_position_embeddings"]
    if rope_type == "yarn" and params.get("original_max_position_embeddings") is None:
        params["original_max_position_embeddings"] = max_position_embeddings
    if params.get("mrope_section") is not None:
        raise config.unsupported(name, "with mrope_section (mrope)")
    numbers = Fields(params, f"{config.source}: {name} of type {rope_type!r}")
    needed, optional = ROPE_NUMBERS[rope_type]
    for key in needed:
        params[key] = numbers.number(key)
    for key in optional:
        if params.get(key) is not None:
            numbers.number(key)
    if rope_type == "llama3" and params["low_freq_factor"] >= params["high_freq_factor"]:
        raise numbers.error("low_freq_factor", "must be less than high_freq_factor")
    if rope_type == "yarn":
        numbers.flag("truncate", True)
    if rope_type == "longrope":
        params["max_position_embeddings"] = params["length"] = max_position_embeddings
    if rope_type == "proportional":  # the others have a frequency of 0
        params, rotated = {"factor": 1.0, "partial_rotary_factor": rotated} | params, 1.0
    return RopeConfig(theta, rope_type, params, rotated)


def _first_number(name: str, rope: Fields, config: Fields, default: float) -> float:
    """A number in the rope's object, or else in config.json, or else the default."""
    owner = rope if rope.values.get(name) is not None else config
    return owner.number(name) if owner.values.get(name) is not None else default


def check_rope(config: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Raises: ValueError for a rope that does not fit heads of this size."""
    rotated = rope.num_rotated(head_dim)
    if rotated < 2 or rotated % 2:
        problem = f"{rope.partial:g} rotates {rotated} of {head_dim} dimensions: rotary embeddings need pairs"
        raise config.error("partial_rotary_factor", problem)
    if rope.rope_type != "longrope":
        return
    if rope.params["original_max_position_embeddings"] < 2:
        raise config.error("original_max_position_embeddings", "of a rope of type 'longrope' must be at least 2")
    low, high = RANGES["factor"]
    for name in ("short_factor", "long_factor"):
        values = rope.params.get(name)
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high for value in values
        )
        if not isinstance(values, list) or not numbers or len(values) != rotated // 2:
            problem = f"of a rope of type 'longrope' must be {rotated // 2} numbers from {low:g} to {high:g}"
            raise config.error(name, f"{problem}, got {shown(values)}")
