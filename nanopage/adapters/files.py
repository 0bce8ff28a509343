"""LoRA adapters (Hu et al. 2021) as PEFT saves them: reads and checks what an adapter's files say.

An adapter adds scale * B A to the weights of some linear layers. Its directory has adapter_config.json, which is read
as data, and adapter_model.safetensors. `read_adapter` checks both against the model without reading the weights, so a
bad adapter is refused before its request is queued. adapters/weights.py reads the weights.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from nanopage.config.model import ModelConfig
from nanopage.files.model_files import exists, read_json, shown
from nanopage.files.safetensors_checkpoint import StoredTensor, opened, stored_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_ALPHA = 1e6
TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\.([\w.]{1,60})\.lora_([AB])(?:\.default)?\.weight", re.ASCII
)
# Transformers 5 has the weights of all experts of a layer in these two parameters, which PEFT adapts by
# `target_parameters` (its ParamWrapper). Each tensor of an adapter holds all experts, side by side:
#   A [experts * rank, in]: first the rows of expert 0, then the rows of expert 1, ...
#   B [out, rank * experts]: the columns alternate between the experts
# PEFT before 0.19 exchanges `in` and `out`, and multiplies by the transposed product.
GATE_UP, DOWN = FUSED = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
NOT_TRANSPOSED = re.compile(r"0\.(19|[2-9]\d)\.|[1-9]")  # PEFT versions that do not transpose
NUMBERED = re.compile(r"\.experts\.\d")
GATE_UP_PATTERN = r".*\.gate_up_proj"  # a key of rank_pattern, which PEFT writes when it fuses separate targets
# Fields of adapter_config.json that can change the result, with the values that do not change it.
NEUTRAL: dict[str, tuple] = {
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "exclude_modules": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
    "use_bdlora": (False, None),
}
# Fields that are read elsewhere, or that only say how an adapter was trained or begun, or where it comes from.
KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
    "target_parameters",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "ensure_weight_tying",
}
# The other values subtract something from the base model's weights, which PEFT does when it loads the adapter.
INITS = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class StoredAdapter:
    """What the files of an adapter say.

    scale, gate_up_scale: the factors of B A. The second one is for GATE_UP.
    tensors: (layer, module, "A" or "B") -> the tensor. Modules are named as in `module_shapes`.
    """

    scale: float
    gate_up_scale: float
    file: Path
    tensors: dict[tuple[int, str, str], StoredTensor]


Place = tuple[int, str]
"""The number of a layer, and the name of a module in that layer, as in `module_shapes`."""


class Shape(NamedTuple):
    """The sizes of what an adapter changes. rank: rows of A, and columns of B."""

    outputs: int
    inputs: int
    rank: int


@dataclass(frozen=True)
class Targets:
    """What the configuration of an adapter says about its tensors.

    allowed: the places that may have tensors. wanted: the places that must have tensors.
    optional: the places of `wanted` that have no tensors if the adapter was made with transformers 5, where the same
        `target_modules` do not match experts.
    """

    allowed: set[Place]
    wanted: set[Place]
    optional: set[Place]


def module_shapes(model: ModelConfig, layer: int, fused: bool = False) -> dict[str, tuple[int, int]]:
    """The modules that an adapter may change in a decoder layer: name -> (outputs, inputs).

    Args: fused: whether experts are GATE_UP and DOWN. Their shapes are then the shapes of one expert.
    """
    hidden, experts = model.hidden_size, model.experts
    num_kv_heads, head_dim = model.heads[layer]
    heads, kv_heads = model.num_heads * head_dim, num_kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
    }

    def add(place: str, inner: int, names: Iterable[str] = ("gate_proj", "up_proj", "down_proj")) -> None:
        sizes = (inner, hidden), (inner, hidden), (hidden, inner)
        shapes.update({f"{place}.{name}": size for name, size in zip(names, sizes, strict=True)})

    if experts is None or not experts.layers[layer]:
        add("mlp", model.intermediate_size)
        return shapes
    if experts.shared_size:
        add("mlp.shared_expert" if experts.shared_gate else "mlp.shared_experts", experts.shared_size)
    inner = experts.intermediate_size
    if fused:
        return shapes | {GATE_UP: (2 * inner, hidden), DOWN: (hidden, inner)}
    for expert in range(experts.num_experts):
        add(f"{experts.place}.{expert}", inner, experts.parts)
    return shapes


def read_adapter(directory: Path, model: ModelConfig, max_rank: int) -> StoredAdapter:
    """Read the configuration of an adapter and the header of its weights, and check them against the model.

    Raises: FileNotFoundError, ValueError; both name the file and what is not supported or does not fit.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    config = directory / CONFIG
    if not exists(config):
        raise FileNotFoundError(f"{directory} is not an adapter: it has no {CONFIG}")
    fields, of_gate_up = _take_gate_up(read_json(config))
    rank, scale = _read_scale(fields, config, max_rank)
    gate_up_rank, gate_up_scale = _read_scale(fields | of_gate_up, f"{config}: gate_up_proj", max_rank)
    _check_neutral(fields, config)
    fused, num_experts = bool(fields.get("target_parameters")), model.experts.num_experts if model.experts else 0
    ranks = {GATE_UP: gate_up_rank * num_experts, DOWN: rank * num_experts}
    places = {
        (layer, module): Shape(*shape, ranks.get(module, rank))
        for layer in range(model.num_layers)
        for module, shape in module_shapes(model, layer, fused).items()
    }
    targets = _read_targets(fields, config, places)
    file = directory / WEIGHTS
    if not exists(file):
        pickled = exists(directory / "adapter_model.bin")
        why = ": adapter_model.bin is pickled, which can run code when loaded" if pickled else ""
        raise FileNotFoundError(f"{directory} has no {WEIGHTS}{why}")
    return StoredAdapter(scale, gate_up_scale, file, _read_tensors(file, places, targets))


def _take_gate_up(fields: dict) -> tuple[dict, dict]:
    """Split off what the patterns say of GATE_UP. Returns the fields without GATE_UP, and the fields for GATE_UP."""
    own = {}
    for name, pattern in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        values = fields.get(pattern)
        if fields.get("target_parameters") and isinstance(values, dict) and [*values] == [GATE_UP_PATTERN]:
            own[name], fields = values[GATE_UP_PATTERN], fields | {pattern: {}}
    return fields, own


def _read_scale(fields: dict, config: Path | str, max_rank: int) -> tuple[int, float]:
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{config}: peft_type={shown(fields.get('peft_type'))} is not supported; supported: 'LORA'")
    rank, alpha, rslora = fields.get("r"), fields.get("lora_alpha"), fields.get("use_rslora", False)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise ValueError(f"{config}: r must be an integer from 1, not {shown(rank)}")
    if rank > max_rank:
        raise ValueError(f"{config}: r={shown(rank)} is more than max_lora_rank={max_rank}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MAX_ALPHA:
        raise ValueError(f"{config}: lora_alpha must be a number of at most {MAX_ALPHA:g}, not {shown(alpha)}")
    if not isinstance(rslora, bool | None):
        raise ValueError(f"{config}: use_rslora must be true or false, not {shown(rslora)}")
    return rank, alpha / (math.sqrt(rank) if rslora else rank)


def _check_neutral(fields: dict, config: Path) -> None:
    for name, values in NEUTRAL.items():
        value = fields.get(name)
        if value is not None and not any(type(value) is type(neutral) and value == neutral for neutral in values):
            raise ValueError(f"{config}: {name}={shown(value)} is not supported")
    for name, value in fields.items():
        if name not in KNOWN and name not in NEUTRAL and value not in (None, False, [], {}, ""):
            raise ValueError(f"{config}: {shown(name)}={shown(value)} is not known, and may change the result")
    init = fields.get("init_lora_weights", True)
    if not any(type(init) is type(known) and init == known for known in INITS):
        raise ValueError(
            f"{config}: init_lora_weights={shown(init)} is not supported: it changes the base model's weights; "
            "convert the adapter to a plain one with PEFT"
        )


def _read_targets(fields: dict, config: Path, places: dict[Place, Shape]) -> Targets:
    """Raises: ValueError naming a module or a parameter that is not supported."""
    names, parameters = fields.get("target_modules"), fields.get("target_parameters") or []
    layers = fields.get("layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers is not None and not (isinstance(layers, list) and all(type(index) is int for index in layers)):
        raise ValueError(f"{config}: layers_to_transform must be a list of integers, not {shown(layers)}")
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        raise ValueError(f"{config}: target_parameters must be a list of names, not {shown(parameters)}")
    modules = [place for place in places if place[1] not in FUSED]
    wanted = _match(parameters, "target_parameters", config, [place for place in places if place[1] in FUSED])
    version = fields.get("peft_version")
    if not NOT_TRANSPOSED.match(str(version)) and any(
        places[place].outputs == places[place].inputs for place in wanted
    ):
        raise ValueError(
            f"{config}: peft_version={shown(version)}: before 0.19, PEFT transposed experts, and the shapes of this "
            "adapter do not tell: save it with a later version"
        )
    if isinstance(names, str):  # a regular expression: the tensors show what it matched
        return Targets({*modules, *wanted}, wanted, set())
    names = names or [] if parameters else names
    if not isinstance(names, list) or not (names or parameters) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{config}: target_modules must be a list of names, not {shown(names)}")
    if layers is not None:
        modules = [place for place in modules if place[0] in layers]
    wanted |= _match(names, "target_modules", config, modules)
    shared = any(".shared_expert" in module for _, module in modules)
    return Targets(wanted, wanted, {place for place in wanted if shared and NUMBERED.search(place[1])})


def _match(names: list[str], field: str, config: Path, places: Iterable[Place]) -> set[Place]:
    """The places whose names end with one of `names`."""
    ends: dict[str, set[Place]] = {}
    for layer, module in places:
        words = f"model.layers.{layer}.{module}".split(".")
        for start in range(len(words)):
            ends.setdefault(".".join(words[start:]), set()).add((layer, module))
    for name in set(names) - ends.keys():
        supported = ", ".join(dict.fromkeys(module.rpartition(".")[2] for _, module in places)) or "none"
        raise ValueError(f"{config}: {field}: {shown(name)} is not supported; supported: {supported}")
    return {place for name in names for place in ends[name]}


def _read_tensors(file: Path, places: dict[Place, Shape], targets: Targets) -> dict[tuple[int, str, str], StoredTensor]:
    found, problems = {}, []
    with opened(file) as content:
        stored = [entry.tensor for entry in stored_bytes(content, file)]
    for tensor in stored:
        match = TENSOR.fullmatch(tensor.name)
        place = match and (int(match[1]), _module_of(int(match[1]), match[2], targets))
        if match is None or place is None or place not in places:
            problems.append(f"unexpected: {shown(tensor.name)[1:-1]} {list(tensor.shape)}")
        elif place not in targets.allowed:
            problems.append(f"not one of target_{'parameters' if place[1] in FUSED else 'modules'}: {tensor.name}")
        elif (*place, match[3]) in found:
            problems.append(f"twice: {tensor.name}")
        else:
            found[*place, match[3]] = tensor
    for (layer, module, kind), tensor in found.items():
        outputs, inputs, rank = places[layer, module]
        a = found.get((layer, module, "A"))
        if module in FUSED and a is not None and a.shape[1:] == (outputs,):  # PEFT before 0.19
            outputs, inputs = inputs, outputs
        shape = (rank, inputs) if kind == "A" else (outputs, rank)
        if tensor.shape != shape:
            problems.append(f"mis-shaped: {tensor.name} is {list(tensor.shape)}, the model wants {list(shape)}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"type not supported: {tensor.name} is {tensor.dtype}; supported: {', '.join(FLOATS)}")
    given = {(layer, module) for layer, module, _ in found}
    wanted = targets.wanted - targets.optional if given.isdisjoint(targets.optional) else targets.wanted
    for layer, module in sorted(given | wanted):
        for kind in "AB":
            if (layer, module, kind) not in found:
                problems.append(f"missing: lora_{kind} of layers.{layer}.{module}")
    if not found and not problems:
        problems.append("it has no tensors")
    if problems:
        text = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise ValueError(f"{file} does not fit its configuration and the model:\n  {text}{more}")
    return found


def _module_of(layer: int, name: str, targets: Targets) -> str | None:
    """The module of a tensor's name. PEFT wraps GATE_UP first and DOWN around it; each wrapper is called `experts`."""
    both = (layer, DOWN) in targets.wanted
    wrappers = {"mlp.experts": DOWN if both else GATE_UP, "mlp.experts.base_layer": GATE_UP if both else None}
    return wrappers.get(name, None if name in FUSED else name)
