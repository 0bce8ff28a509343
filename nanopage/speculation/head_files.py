"""Reads heads (heads.py): an EAGLE-3 head from a directory of its own, an MTP head from the model's checkpoint."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanopage.checks.fields import Fields
from nanopage.checks.speculation import HEADS
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
from nanopage.worker.setup import Setup

EAGLE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TAPS = "eagle_aux_hidden_state_layer_ids"  # the name of vLLM
# Names of DeepSeek and GLM, and Qwen's, which are ours. Tensors in SHARED are copies of the model's.
MTP_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
SHARED = ("embed_tokens.weight", "shared_head.head.weight")


def load_head(setup: Setup, checkpoint: Checkpoint) -> Any:
    """The head that the options of an engine ask for. None: they ask for none. Args: checkpoint: of the model.

    Raises: FileNotFoundError; ValueError naming what is not there, is not supported or does not fit the model;
        MemoryError as `load_model`.
    """
    speculation, dtype, device = setup.config.speculation, setup.dtype, setup.device
    if speculation is None or speculation.method not in HEADS:
        return None
    if speculation.method == "mtp":
        path, names, head = _open_mtp(setup.model_config, checkpoint)
    else:
        path, names, head = _open_eagle(hub.resolve(speculation.model), setup.model_config)
    check_fit(slots(head), [replace(tensor, name=name) for tensor, name in names.items()], path)
    if device.type == "cuda":
        group_experts(head)
    materialize(head, dtype, device)
    own = {tensor.name: name for tensor, name in names.items()}
    pieces = ((own[name], start, rows) for name, start, rows in read_tensors(names))
    fill(head, slots(head), pieces, {name: tensor.file for tensor, name in names.items()})
    if device.type == "cpu" and can_pack(dtype):
        pack(head)
    return head.eval().requires_grad_(False)


def _open_mtp(model: ModelConfig, checkpoint: Checkpoint) -> tuple[Path, dict[StoredTensor, str], Any]:
    """The files of a head, the tensors in them by their names in the head, and the head without its weights."""
    if not isinstance(checkpoint, Path) or model.quantization is not None:
        raise ValueError("speculative_config: method='mtp' reads no head from .gguf files and quantized checkpoints")
    names, pattern = {}, rf"(mtp|(?:model\.)?layers\.{model.num_layers})\.(.+)"
    for tensor in stored_tensors_of(checkpoint):
        if (match := re.fullmatch(pattern, tensor.name)) and match[2] not in SHARED:
            names[tensor] = match[2] if match[1] == "mtp" else MTP_NAMES.get(match[2], f"layers.0.{match[2]}")
    if not names:
        raise ValueError(
            f"speculative_config: method='mtp', but {checkpoint} has no tensors of a head, neither mtp.* nor "
            f"model.layers.{model.num_layers}.*"
        )
    experts = None if model.experts is None else replace(model.experts, layers=(True,))
    config = replace(model, num_layers=1, sliding_windows=(None,), experts=experts, state=())
    with torch.device("meta"):
        return checkpoint, names, MTPHead(config, family_of(model).make_layer(config, 0), model.num_layers)


def _open_eagle(path: Path, model: ModelConfig) -> tuple[Path, dict[StoredTensor, str], Any]:
    """As `_open_mtp`."""
    values = read_json(path / "config.json")
    fields = Fields(values, str(path / "config.json"))
    if values.get("architectures") not in [[name] for name in EAGLE]:
        raise fields.unsupported("architectures", shown(values.get("architectures")), EAGLE)
    wanted = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "num_hidden_layers": 1}
    for name, size in wanted.items():
        fields.choice(name, (size,))
    config = config_from_dict(values | {"architectures": ["LlamaForCausalLM"]}, fields.source)
    if config.quantization is not None:
        raise fields.unsupported("quantization_config", "of a head")
    special = fields.object("eagle_config")
    if not special.flag("use_aux_hidden_state", True):
        raise special.unsupported("use_aux_hidden_state", "false")
    taps, most = special.values.get(TAPS, values.get(TAPS)), model.num_layers
    taps = [2, most // 2, most - 3] if taps is None else taps  # the default of the authors, and of vLLM
    if not isinstance(taps, list) or not all(type(tap) is int and 0 <= tap <= most for tap in taps):
        raise fields.error(TAPS, f"must be a list of layers of the model, 0 to {most}, got {shown(taps)}")
    stored = {tensor.name.removeprefix("model."): tensor for tensor in stored_tensors_of(path)}
    targets = _read_targets(stored.pop("d2t", None), model.vocab_size)
    names = {tensor: name.replace("layers.0.", "midlayer.") for name, tensor in stored.items() if name != "t2d"}
    with torch.device("meta"):
        has_embeddings, norm_first = "embed_tokens.weight" in stored, fields.flag("norm_before_residual")
        return path, names, EagleHead(config, taps, targets, has_embeddings, norm_first)


def _read_targets(d2t: StoredTensor | None, vocab_size: int) -> Tensor:
    """The token of the model for each logit of an EAGLE-3 head, int64. Args: d2t: how far it is from the logit's place.
    None: not at all."""
    if d2t is None:
        return torch.arange(vocab_size)
    if len(d2t.shape) == 1 and d2t.shape[0] and d2t.dtype in ("I64", "I32"):
        targets = torch.cat([rows.clone() for _, _, rows in read_tensors([d2t])]) + torch.arange(d2t.shape[0])
        if int(targets.min()) >= 0 and int(targets.max()) < vocab_size:
            return targets
    raise ValueError(f"{d2t.file}: d2t must be I64 or I32, and lead from each logit to one of {vocab_size:,} tokens")
