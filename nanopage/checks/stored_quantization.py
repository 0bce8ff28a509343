"""StoredQuantization: the quantization_config of a checkpoint."""

import re
from dataclasses import dataclass

from nanopage.checks.fields import Fields
from nanopage.files.model_files import shown

STORED_QUANTIZATIONS = ("awq", "gptq", "mxfp4")  # of a checkpoint; `quantization` may only repeat config.json
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale in a checkpoint of one of them

# What AWQ and GPTQ checkpoints of models with experts leave as floats: the head, and what chooses experts.
EXPERT_GATES = re.compile(r"lm_head|(model\.layers\.\d+\.)?((mlp|block_sparse_moe)\.)?(shared_expert_)?gate")


@dataclass(frozen=True)
class StoredQuantization:
    """How the linear layers of a checkpoint, except the head, are stored (see quantization/quantized_checkpoint.py).

    method: "awq", with 4 bits, or "gptq", with 4 or 8. "mxfp4": only experts (see quantization/mxfp4.py).
    group_size: inputs that share a scale and a zero point; None: all inputs.
    desc_act: whether the inputs of a group are not adjacent (GPTQ's act-order).
    zero_offset: what is added to the stored zero points: 1 in GPTQ's first format.
    """

    method: str
    bits: int
    group_size: int | None
    desc_act: bool = False
    zero_offset: int = 0

    @classmethod
    def from_fields(cls, fields: Fields, has_experts: bool = False) -> "StoredQuantization":
        """`fields` is quantization_config. Raises: ValueError naming what is not supported."""
        method = fields.values.get("quant_method")
        if method not in STORED_QUANTIZATIONS:
            raise fields.unsupported("quant_method", shown(method), STORED_QUANTIZATIONS)
        if method == "mxfp4":  # the tensors say what is not converted
            return cls(method, bits=4, group_size=32)
        layouts, default = (("gemm",), "gemm") if method == "awq" else (("gptq", "gptq_v2"), "gptq")
        layout = default
        for name in ("version", "format") if method == "awq" else ("checkpoint_format", "format"):
            value = fields.values.get(name)
            if value is not None:
                layout = value.lower() if isinstance(value, str) else value
                if layout not in layouts:
                    raise fields.unsupported(name, shown(value), layouts)
        bits = fields.choice("bits", (4,) if method == "awq" else (4, 8))
        group_size = fields.choice("group_size", (*GROUP_SIZES, -1))
        if method == "awq" and not fields.flag("zero_point", True):
            raise fields.unsupported("zero_point", "false", ["true"])
        skipped = fields.values.get("modules_to_not_convert") or []
        known = EXPERT_GATES if has_experts else re.compile("lm_head")
        if not isinstance(skipped, list) or not all(
            isinstance(name, str) and known.fullmatch(name) for name in skipped
        ):
            names = ["lm_head", *(["the gates of experts"] if has_experts else [])]
            raise fields.unsupported("modules_to_not_convert", shown(skipped), names)
        for name in ("lm_head", "is_marlin_format"):
            if fields.flag(name):
                raise fields.unsupported(name, "true")
        for name in ("dynamic", "modules_in_block_to_quantize"):  # other settings for some of the layers
            if fields.values.get(name):
                raise fields.unsupported(name, shown(fields.values[name]))
        if fields.values.get("pack_dtype", "int32") != "int32":
            raise fields.unsupported("pack_dtype", shown(fields.values["pack_dtype"]), ["int32"])
        return cls(
            method=method,
            bits=bits,
            group_size=None if group_size == -1 else group_size,
            desc_act=method == "gptq" and fields.flag("desc_act"),
            zero_offset=int(method == "gptq" and layout == "gptq"),
        )
