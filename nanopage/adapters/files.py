"""LoRA adapters (Hu et al. 2021) as PEFT saves them: what the files of one say.

An adapter adds scale * B A to the weights of some linear layers. Its directory has adapter_config.json, which is read
as data, and adapter_model.safetensors. `read_adapter` checks both against the model without reading the weights, so a
bad adapter is refused before its request is queued. adapters/weights.py reads the weights.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from nanopage.config.model import ModelConfig
from nanopage.files.model_files import exists, read_json, shown
from nanopage.files.safetensors_checkpoint import StoredTensor, opened, stored_bytes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_RANK = 512
MAX_ALPHA = 1e6
TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\.(self_attn|mlp)\.(\w{1,20})\.lora_([AB])(?:\.default)?\.weight"
)
# Fields of adapter_config.json that would change the result: the values that change nothing.
NEUTRAL: dict[str, tuple] = {
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "use_dora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "exclude_modules": (None, []),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
    "use_bdlora": (False, None),
}
# Fields that are read above all, that say how an adapter was trained or begun, or where it comes from.
KNOWN = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "target_modules",
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

    scale: of B A.
    tensors: (layer, module, "A" or "B") -> the tensor. Modules are named as in `module_shapes`.
    """

    rank: int
    scale: float
    file: Path
    tensors: dict[tuple[int, str, str], StoredTensor]


def module_shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """The linear layers that an adapter may change: name in a decoder layer -> (outputs, inputs)."""
    hidden, inner = model.hidden_size, model.intermediate_size
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def read_adapter(directory: Path, model: ModelConfig, max_rank: int) -> StoredAdapter:
    """Read the configuration of an adapter and the header of its weights, and check them against the model.

    Raises: FileNotFoundError, ValueError; both name the file and what is not supported or does not fit.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"no such directory: {directory}")
    config = directory / CONFIG
    if not exists(config):
        raise FileNotFoundError(f"{directory} is not an adapter: it has no {CONFIG}")
    fields = read_json(config)
    rank, scale = _read_scale(fields, config, max_rank)
    _check_neutral(fields, config)
    targets = _read_targets(fields, config, model)
    file = directory / WEIGHTS
    if not exists(file):
        pickled = exists(directory / "adapter_model.bin")
        why = ": adapter_model.bin is pickled, which can run code when loaded" if pickled else ""
        raise FileNotFoundError(f"{directory} has no {WEIGHTS}{why}")
    return StoredAdapter(rank, scale, file, _read_tensors(file, model, rank, targets))


def _read_scale(fields: dict, config: Path, max_rank: int) -> tuple[int, float]:
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


def _read_targets(fields: dict, config: Path, model: ModelConfig) -> set[tuple[int, str]] | None:
    """The (layer, module) pairs that the configuration names. None: it has an expression, so that the tensors decide.

    Raises: ValueError naming a module that is not supported.
    """
    names, layers = fields.get("target_modules"), fields.get("layers_to_transform")
    if isinstance(layers, int) and not isinstance(layers, bool):
        layers = [layers]
    if layers is not None and not (isinstance(layers, list) and all(type(index) is int for index in layers)):
        raise ValueError(f"{config}: layers_to_transform must be a list of integers, not {shown(layers)}")
    if isinstance(names, str):
        return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{config}: target_modules must be a list of names, not {shown(names)}")
    ends: dict[str, set[tuple[int, str]]] = {}  # what a module's place ends with -> the modules
    for layer in range(model.num_layers) if layers is None else set(layers) & set(range(model.num_layers)):
        for module in module_shapes(model):
            words = f"model.layers.{layer}.{module}".split(".")
            for start in range(len(words)):
                ends.setdefault(".".join(words[start:]), set()).add((layer, module))
    targets: set[tuple[int, str]] = set()
    for name in set(names):
        if name not in ends:
            supported = ", ".join(module.partition(".")[2] for module in module_shapes(model))
            raise ValueError(f"{config}: target_modules: {shown(name)} is not supported; supported: {supported}")
        targets |= ends[name]
    return targets


def _read_tensors(
    file: Path, model: ModelConfig, rank: int, targets: set[tuple[int, str]] | None
) -> dict[tuple[int, str, str], StoredTensor]:
    shapes, found, problems = module_shapes(model), {}, []
    with opened(file) as content:
        stored = [entry.tensor for entry in stored_bytes(content, file)]
    for tensor in stored:
        match = TENSOR.fullmatch(tensor.name)
        module = f"{match[2]}.{match[3]}" if match else ""
        place = (int(match[1]), module) if match else None
        if match is None or place is None or module not in shapes or place[0] >= model.num_layers:
            problems.append(f"unexpected: {shown(tensor.name)[1:-1]} {list(tensor.shape)}")
            continue
        if targets is not None and place not in targets:
            problems.append(f"not one of target_modules: {tensor.name}")
            continue
        outputs, inputs = shapes[module]
        shape = (rank, inputs) if match[4] == "A" else (outputs, rank)
        if tensor.shape != shape:
            problems.append(f"mis-shaped: {tensor.name} is {list(tensor.shape)}, the model wants {list(shape)}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"type not supported: {tensor.name} is {tensor.dtype}; supported: {', '.join(FLOATS)}")
        elif (*place, match[4]) in found:
            problems.append(f"twice: {tensor.name}")
        found[*place, match[4]] = tensor
    wanted = {(layer, module) for layer, module, _ in found} | (targets or set())
    for layer, module in sorted(wanted):
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
