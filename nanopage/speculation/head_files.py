"""Reads heads (heads.py): an EAGLE-3 head from a directory of its own, an MTP head from the model's checkpoint."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanopage.checks.fields import Fields
from nanopage.checks.speculation import SpeculativeConfig
from nanopage.config.model import ModelConfig
from nanopage.cpu.packed import pack
from nanopage.cpu.packed_linear import can_pack
from nanopage.experts.moe import group_experts
from nanopage.files.model_files import read_json, shown
from nanopage.files.safetensors_checkpoint import StoredTensor, read_tensors
from nanopage.models.meta import family_of
from nanopage.reading.config import config_from_dict
from nanopage.speculation.heads import EagleHead, MTPHead
from nanopage.weights import hub
from nanopage.weights.allocation import materialize
from nanopage.weights.loader import Checkpoint, check_fit, fill, slots, stored_tensors_of

EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TAPS = "eagle_aux_hidden_state_layer_ids"  # the name of vLLM
# Names of DeepSeek and GLM, and Qwen's, which are ours. Tensors in SHARED are copies of the model's.
MTP_NAMES = {
    "enorm.": "pre_fc_norm_embedding.",
    "hnorm.": "pre_fc_norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "norm.",
}
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


@dataclass(frozen=True)
class HeadFiles:
    """A head whose weights are not read yet.

    head    on the meta device
    config  of its layer
    names   the tensors that fill it, with their names in it
    d2t     of an EAGLE-3 head: for each of its tokens, how far the model's token is from it
    """

    head: MTPHead | EagleHead
    config: ModelConfig
    names: dict[StoredTensor, str]
    path: Path
    d2t: StoredTensor | None = None

    def load(self, dtype: torch.dtype, device: torch.device) -> MTPHead | EagleHead:
        """Read the weights. Raises: ValueError, MemoryError as `load_model`."""
        head: Any = self.head
        if device.type == "cuda":
            group_experts(head)
        materialize(head, dtype, device)
        own = {tensor.name: name for tensor, name in self.names.items()}
        pieces = ((own[name], start, rows) for name, start, rows in read_tensors(self.names))
        fill(head, slots(head), pieces, {name: tensor.file for tensor, name in self.names.items()})
        if self.d2t is not None:
            offsets = torch.cat([rows.long() for _, _, rows in read_tensors([self.d2t])])
            head.targets = offsets.add_(torch.arange(len(offsets))).to(device)
            if not 0 <= int(head.targets.min()) <= int(head.targets.max()) < self.config.vocab_size:
                raise ValueError(f"{self.d2t.file}: d2t names tokens beyond the model's {self.config.vocab_size:,}")
        if device.type == "cpu" and can_pack(dtype):
            pack(head)
        return head.eval().requires_grad_(False)


def open_head(speculation: SpeculativeConfig, model: ModelConfig, checkpoint: Checkpoint) -> HeadFiles:
    """Read what files say about a head.

    Args: model, checkpoint: of the model.
    Raises: FileNotFoundError, ValueError naming what is not there, is not supported or does not fit the model.
    """
    if speculation.method == "mtp":
        return _open_mtp(model, checkpoint)
    path = hub.resolve(speculation.model)
    if path.suffix == ".gguf":
        raise ValueError(f"speculative_config: {path} is a .gguf file; a head for method='eagle3' is a directory")
    return _open_eagle(path, model)


def _open_mtp(model: ModelConfig, checkpoint: Checkpoint) -> HeadFiles:
    if not isinstance(checkpoint, Path) or model.quantization is not None:
        kind = "a .gguf file" if model.quantization is None else "quantized"
        raise ValueError(f"speculative_config: method='mtp' does not read the head of a checkpoint that is {kind}")
    names, last = {}, rf"(?:model\.)?(?:mtp|layers\.{model.num_layers})\.(.+)"
    for tensor in stored_tensors_of(checkpoint):
        if (match := re.fullmatch(last, tensor.name)) and match[1] not in SHARED:
            names[tensor] = _name_in_mtp(match[1], "mtp." in tensor.name)
    if not names:
        raise ValueError(
            f"speculative_config: method='mtp', but {checkpoint} has no tensors of a head, neither mtp.* nor "
            f"model.layers.{model.num_layers}.*"
        )
    experts = None if model.experts is None else replace(model.experts, layers=(True,))
    config = replace(model, num_layers=1, sliding_windows=(None,), experts=experts, state=())
    with torch.device("meta"):
        head = MTPHead(config, family_of(model).make_layer(config, 0), model.num_layers)
    return _checked(HeadFiles(head, config, names, checkpoint))


def _name_in_mtp(name: str, is_ours: bool) -> str:
    if is_ours:
        return name
    start = next((start for start in MTP_NAMES if name.startswith(start)), None)
    return f"layers.0.{name}" if start is None else MTP_NAMES[start] + name.removeprefix(start)


def _open_eagle(path: Path, model: ModelConfig) -> HeadFiles:
    values = read_json(path / "config.json")
    fields = Fields(values, str(path / "config.json"))
    if values.get("architectures") not in [[name] for name in EAGLE]:
        raise fields.unsupported("architectures", shown(values.get("architectures")), EAGLE)
    wanted = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "num_hidden_layers": 1}
    for name, ours in {**wanted, "target_hidden_size": model.hidden_size}.items():
        if name in wanted or values.get(name) is not None:
            fields.choice(name, (ours,))
    config = config_from_dict(values | {"architectures": ["LlamaForCausalLM"]}, fields.source)
    if config.quantization is not None:
        raise fields.unsupported("quantization_config", "of a head")
    special = fields.object("eagle_config")
    if not special.flag("use_aux_hidden_state", True):
        raise special.unsupported("use_aux_hidden_state", "false")
    taps = _read_taps(special.values.get(TAPS, values.get(TAPS)), fields, model.num_layers)
    names = {tensor: tensor.name.removeprefix("model.") for tensor in stored_tensors_of(path)}
    names = {tensor: name.replace("layers.0.", "midlayer.") for tensor, name in names.items() if name != "t2d"}
    d2t = next((tensor for tensor, name in names.items() if name == "d2t"), None)
    if d2t is not None and (len(d2t.shape) != 1 or not d2t.shape[0] or d2t.dtype not in ("I64", "I32")):
        raise ValueError(f"{d2t.file}: d2t is {d2t.dtype} {list(d2t.shape)}; wanted: I64, one number for each logit")
    num_logits = config.vocab_size if d2t is None else d2t.shape[0]
    if values.get("draft_vocab_size") is not None:
        fields.choice("draft_vocab_size", (num_logits,))
    names = {tensor: name for tensor, name in names.items() if tensor != d2t}
    with torch.device("meta"):
        head = EagleHead(
            config, taps, num_logits, "embed_tokens.weight" in names.values(), fields.flag("norm_before_residual")
        )
    return _checked(HeadFiles(head, config, names, path, d2t))


def _read_taps(given: Any, fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers whose inputs an EAGLE-3 head reads. The default is that of its authors, and of vLLM."""
    taps = [2, num_layers // 2, num_layers - 3] if given is None else given
    if not isinstance(taps, list) or not taps or not all(type(tap) is int for tap in taps):
        raise fields.error(TAPS, f"must be a list of layers, got {shown(given)}")
    if not 0 <= min(taps) <= max(taps) <= num_layers:
        raise fields.error(TAPS, f"is {taps}, and the model has {num_layers} layers")
    return tuple(taps)


def _checked(files: HeadFiles) -> HeadFiles:
    head: Any = files.head
    check_fit(slots(head), [replace(tensor, name=name) for tensor, name in files.names.items()], files.path)
    return files
