"""StoredQuantization: how the matrices of a checkpoint are stored, read from quantization_config.

Sources: AutoAWQ; GPTQModel; FineGrainedFP8Config of transformers, for fp8 as DeepSeek-V3 and Qwen3 have it;
compressed-tensors; NVIDIA's ModelOpt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanopage.checks.fields import Fields
from nanopage.files.model_files import shown

# Values of the option `quantization` that only repeat config.json. "fp8" is not one: it rounds floats to fp8.
STORED_QUANTIZATIONS = ("awq", "gptq", "mxfp4", "compressed-tensors", "modelopt")
FLOATS = "the checkpoint that is not quantized runs, also with quantization='int8'"  # instead of one that is refused
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale, and sizes of a block
NVFP4_GROUP = 16
# What compressed-tensors calls a format: our name, its type and bits, and which weights may share a scale.
FORMATS: dict[str, tuple[str, str, tuple[int, ...], tuple[str, ...]]] = {
    "float-quantized": ("fp8", "float", (8,), ("tensor", "channel", "block")),
    "int-quantized": ("int8", "int", (8,), ("tensor", "channel")),
    "pack-quantized": ("packed", "int", (4, 8), ("channel", "group")),
    "nvfp4-pack-quantized": ("nvfp4", "float", (4,), ("tensor_group",)),
}


@dataclass(frozen=True)
class StoredQuantization:
    """How quantized matrices are stored. The tensors of the files say which matrices are. Names and patterns in
    config.json (`ignore`, `targets`, `modules_to_not_convert`) say it a second time, and are not read: a pattern is
    code of a stranger.

    method: quant_method.
    layout: the tensors of a matrix, a name in LAYOUTS (quantization/layouts.py).
    bits: of a weight.
    group_size: adjacent inputs that share a scale and a zero point; None: all inputs.
    desc_act: whether the inputs of a group are not adjacent (act-order).
    zero_offset: what is added to the stored zero points: 1 in GPTQ's first format.
    block_rows: adjacent outputs that share a scale, if scales are those of blocks. None: each output has its own, or
        all share one.
    symmetric: whether there are no zero points.
    """

    method: str
    layout: str
    bits: int
    group_size: int | None
    desc_act: bool = False
    zero_offset: int = 0
    block_rows: int | None = None
    symmetric: bool = False

    @property
    def fits_tiles(self) -> bool:
        """Whether tiles on a CPU (cpu/tile_linear.py) can hold the integers. Tiles need inputs in order."""
        in_order = self.group_size is None or not self.desc_act
        return self.layout in ("awq", "gptq", "packed", "int8") and in_order


def read_stored_quantization(fields: Fields) -> StoredQuantization:
    """`fields` is quantization_config. Raises: ValueError naming what is not supported."""
    readers: dict[str, Callable[[Fields], StoredQuantization]] = {
        "awq": _read_awq,
        "gptq": _read_gptq,
        "fp8": _read_fp8,
        "mxfp4": lambda fields: StoredQuantization("mxfp4", "mxfp4", 4, 32),  # only experts (quantization/mxfp4.py)
        "compressed-tensors": _read_compressed_tensors,
        "modelopt": _read_modelopt,
    }
    method = _one_of(fields, "quant_method", tuple(readers))
    for name in ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"):
        skipped = fields.values.get(name) or []
        if not isinstance(skipped, list) or not all(isinstance(module, str) for module in skipped):
            raise fields.error(name, f"must be a list of names, got {shown(skipped)}")
    return readers[method](fields)


def _read_awq(fields: Fields) -> StoredQuantization:
    for name in ("version", "format"):
        _one_of(fields, name, ("gemm", "GEMM", None))
    if not fields.flag("zero_point", True):
        raise fields.unsupported("zero_point", "false", ["true"])
    return StoredQuantization("awq", "awq", fields.choice("bits", (4,)), _group_size(fields))


def _read_gptq(fields: Fields) -> StoredQuantization:
    layouts = [_one_of(fields, name, ("gptq", "gptq_v2", None)) for name in ("checkpoint_format", "format")]
    for name in ("lm_head", "is_marlin_format"):
        if fields.flag(name):
            raise fields.unsupported(name, "true")
    _refuse(fields, "dynamic", "modules_in_block_to_quantize")  # other settings for some of the layers
    _one_of(fields, "pack_dtype", ("int32", None))
    return StoredQuantization(
        method="gptq",
        layout="gptq",
        bits=fields.choice("bits", (4, 8)),
        group_size=_group_size(fields),
        desc_act=fields.flag("desc_act"),
        zero_offset=int("gptq_v2" not in layouts),
    )


def _read_fp8(fields: Fields) -> StoredQuantization:
    _one_of(fields, "fmt", ("e4m3", None))
    _one_of(fields, "activation_scheme", ("dynamic", "static", None))
    _one_of(fields, "expert_dtype", ("fp8", None))
    rows, columns = _block(fields, "weight_block_size")
    return StoredQuantization("fp8", "fp8", 8, columns, block_rows=rows, symmetric=True)


def _read_compressed_tensors(fields: Fields) -> StoredQuantization:
    sparsity = fields.object("sparsity_config")
    _one_of(sparsity, "format", ("dense", None), prefix="sparsity_config.")
    _refuse(fields, "transform_config", "moe_sparsity_config")
    _check_kv_cache(fields)
    groups, found = fields.object("config_groups"), None
    for name in groups.values:
        group = groups.object(name)
        if group.values.get("weights") is None:
            continue
        form = _one_of(group if group.values.get("format") else fields, "format", tuple(FORMATS))
        weights = Fields(group.object("weights").values, f"{fields.source}: config_groups.{name}.weights")
        scheme = _read_scheme(weights, form)
        if found not in (None, scheme):
            raise fields.error("config_groups", "of different formats are not supported: weights must share one")
        found = scheme
    if found is None:
        raise fields.error("config_groups", "has no group with weights")
    return found


def _read_scheme(weights: Fields, form: str) -> StoredQuantization:
    """One scheme of compressed-tensors, with its defaults."""
    layout, kind, bits, strategies = FORMATS[form]
    given = {"type": "int", "num_bits": 8} | weights.values
    group = given.get("group_size")
    if given.get("strategy") is None:
        given["strategy"] = "tensor" if group is None else "channel" if group == -1 else "group"
    weights = Fields(given, weights.source)
    _one_of(weights, "type", (kind,))
    strategy = _one_of(weights, "strategy", strategies)
    num_bits, symmetric = weights.choice("num_bits", bits), weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("symmetric", "false is not supported for floats")
    if weights.values.get("dynamic") is not None and weights.flag("dynamic"):
        raise weights.error("dynamic", "true is not supported for weights")
    order = _one_of(weights, "actorder", ("group", "dynamic", "weight", "static", False, None))
    rows = size = None
    if strategy == "block":
        rows, size = _block(weights, "block_structure", needed=True)
    elif strategy in ("group", "tensor_group"):
        size = weights.choice("group_size", GROUP_SIZES if strategy == "group" else (NVFP4_GROUP,))
    elif group not in (None, -1):
        raise weights.error("group_size", f"{shown(group)} is not supported for the strategy {strategy!r}")
    if order in ("group", "dynamic") and strategy != "group":
        raise weights.error("actorder", f"{order!r} is not supported for the strategy {strategy!r}")
    in_groups = order in ("group", "dynamic")
    return StoredQuantization("compressed-tensors", layout, num_bits, size, in_groups, 0, rows, symmetric)


def _read_modelopt(fields: Fields) -> StoredQuantization:
    algorithm = _one_of(fields, "quant_algo", ("FP8", "NVFP4"))
    _one_of(fields, "kv_cache_quant_algo", ("FP8", None))
    _check_kv_cache(fields)
    if algorithm == "FP8":
        return StoredQuantization("modelopt", "fp8", 8, None, symmetric=True)
    if fields.values.get("group_size") is not None:
        fields.choice("group_size", (NVFP4_GROUP,))
    return StoredQuantization("modelopt", "nvfp4", 4, NVFP4_GROUP, symmetric=True)


def _check_kv_cache(fields: Fields) -> None:
    """The loader reads the scales of K and V, which are those of fp8."""
    if fields.values.get("kv_cache_scheme") is not None:
        scheme = fields.object("kv_cache_scheme")
        for name, value in (("type", "float"), ("num_bits", 8)):
            _one_of(scheme, name, (value,), prefix="kv_cache_scheme.")


def _one_of(fields: Fields, name: str, supported: tuple, prefix: str = "") -> Any:
    """A field with one of a few values; with None among them, it may be missing."""
    value = fields.values.get(name)
    if not any(type(value) is type(one) and value == one for one in supported):
        raise fields.unsupported(prefix + name, shown(value), [one for one in supported if one is not None])
    return value


def _refuse(fields: Fields, *names: str) -> None:
    for name in names:
        if fields.values.get(name):
            raise fields.unsupported(name, shown(fields.values[name]))


def _group_size(fields: Fields) -> int | None:
    size = fields.choice("group_size", (*GROUP_SIZES, -1))
    return None if size == -1 else size


def _block(fields: Fields, name: str, needed: bool = False) -> tuple[int | None, int | None]:
    """The outputs and inputs of a block that shares a scale. (None, None): there are no blocks."""
    block = fields.values.get(name)
    if block is None and not needed:
        return None, None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n in GROUP_SIZES for n in block):
        raise fields.unsupported(name, shown(block), [f"two of {', '.join(map(str, GROUP_SIZES))}"])
    return block[0], block[1]
