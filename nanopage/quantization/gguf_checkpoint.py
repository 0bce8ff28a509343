"""A .gguf file read as if it were a Hugging Face directory: config, tokenizer and tensors under their usual names.

gguf_reader.py reads the file and the `gguf` package dequantizes. This module undoes llama.cpp's conversion: its names,
its reordering of q and k rows in some architectures, and what it computes of some vectors. Families know what else
differs, by `ModelConfig.from_gguf`. gguf_tokenizer.py makes the tokenizer.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from einops import rearrange
from tokenizers import Tokenizer

from nanopage.checks.fields import MAX_SIZES, RANGES
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import listed, shown
from nanopage.files.safetensors_checkpoint import MAX_MATRICES
from nanopage.quantization.gguf_fields import INSTEAD, REQUIRED, GGUFFields
from nanopage.quantization.gguf_reader import TensorInfo, read_header, read_rows
from nanopage.quantization.gguf_rope import ROPE_TENSORS, read_scaling
from nanopage.quantization.gguf_tokenizer import GGUFVocabulary
from nanopage.reading.config import config_from_dict

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

NONE = {"sliding_window": None, "first_k_dense_replace": 0}  # sizes that may be 0: what config.json then has
FLAGS = {"attention_bias": "self_attn.q_proj.bias"}  # in config.json: a tensor that files have if it is true
SOFTMAX, SIGMOID = 1, 2  # expert_gating_func; 0: the default of the architecture
PIECE_ELEMENTS = 2**17  # dequantized at once: few enough for a core's cache, which makes it twice as fast


class GGUFCheckpoint:
    """An open .gguf file. Its metadata is read once; its weights are read by `pieces`.

    weights: the tensors by their names in transformers.

    Raises:
        FileNotFoundError; ValueError naming the file, and the field or tensor, if it is no GGUF file, is truncated,
        contradicts itself, or holds an architecture, a tokenizer or a quantization that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        header = read_header(path)
        self.fields, self._state = GGUFFields(path, header.fields), header.state
        self.vocabulary, architecture = GGUFVocabulary(self.fields), self.fields.architecture
        from nanopage.models import load_families  # they import torch, which reading the tokenizer does not need

        families = {name: each for each in load_families() if (name := getattr(each, "GGUF_ARCHITECTURE", None))}
        self.has_experts = self.fields.field("{arch}.expert_count", int, "an integer", 0) > 0
        has_windows = self.fields.field("{arch}.attention.sliding_window", int, "an integer", 0) > 0
        features = (("experts", self.has_experts), ("windows", has_windows))
        names = [f"{architecture} with {feature}" for feature, has in features if has]
        family = next((name for name in names if name in families), architecture)
        if family not in families:
            problem = f"GGUF architecture {shown(architecture):.80} is not supported"
            raise ValueError(f"{path}: {problem}; supported: {listed(families)}; {INSTEAD}")
        self.family = families[family]
        num_files = self.fields.field("split.count", int, "an integer", 1)
        if num_files != 1:
            raise self.fields.error(
                "split.count", f"is {num_files}: merge them with llama.cpp's 'llama-gguf-split --merge'"
            )
        # Layers after the last one predict further tokens. They are not used.
        num_others = self.fields.field("{arch}.nextn_predict_layers", int, "an integer", 0)
        self.num_layers = self.fields.size("{arch}.block_count", "num_hidden_layers") - num_others
        if num_others < 0 or self.num_layers < 1:
            raise self.fields.error(
                "{arch}.nextn_predict_layers", f"is {num_others}, with {self.num_layers} other layers"
            )
        others = tuple(f"blk.{self.num_layers + index}." for index in range(num_others))
        tensors = {name: tensor for name, tensor in header.tensors.items() if not name.startswith(others)}
        self._rope = {name: tensors.pop(name) for name in ROPE_TENSORS if name in tensors}  # in config()
        self.weights: dict[str, TensorInfo] = {}
        for tensor in tensors.values():
            self.weights.update(self._named(tensor))
            if len(self.weights) > MAX_MATRICES:
                raise ValueError(f"{path} has more than {MAX_MATRICES:,} tensors, each expert's counted")
        for kind in {tensor.kind for tensor in self.weights.values()}:
            self._check_kind(kind)

    def model_config(self, overrides: dict | None = None) -> ModelConfig:
        """Raises: ValueError as config_from_dict, naming the file. Args: overrides: as there."""
        return replace(config_from_dict(self.config(), str(self.path), INSTEAD, overrides), from_gguf=True)

    def config(self) -> dict[str, Any]:
        """The file's hyperparameters as the contents of a config.json."""
        # llama.cpp writes 0 for the sizes of attention and of feed-forward layers that a model does not have.
        has_attention = self._has("self_attn.o_proj.weight")
        num_heads = self.fields.size("{arch}.attention.head_count", "num_attention_heads") if has_attention else 1
        of_expert = self.fields.size("{arch}.expert_feed_forward_length", "moe_intermediate_size", None)
        default = of_expert or (REQUIRED if has_attention else 1)  # models may have experts in all layers
        inner = self.fields.size("{arch}.feed_forward_length", "intermediate_size", default) if has_attention else 1
        config: dict[str, Any] = {
            "architectures": [self.family.ARCHITECTURES[0]],
            "model_type": self.fields.architecture,
            "vocab_size": len(self.vocabulary.tokens),
            "hidden_size": self.fields.size("{arch}.embedding_length", "hidden_size"),
            "intermediate_size": inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads(num_heads),
            "max_position_embeddings": self.fields.size("{arch}.context_length", "max_position_embeddings"),
            "rms_norm_eps": self.fields.number("{arch}.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self.weights,
            "dtype": "bfloat16",
            "rope_theta": self.fields.number("{arch}.rope.freq_base", "rope_theta", 10000.0),
        }
        config |= {flag: self._has(tensor) for flag, tensor in (FLAGS | self._option("GGUF_FLAGS", {})).items()}
        if self.has_experts:
            config |= self._experts(inner)
        config |= self._heads(config["hidden_size"] // num_heads, config["rope_theta"]) | self._of_family()
        if (complete := self._option("complete_gguf", None)) is not None:
            config |= complete(config)
        if (bos := self.vocabulary.token_id("bos")) is not None:
            config["bos_token_id"] = bos
        if ends := self.vocabulary.end_ids():
            config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return config

    def _heads(self, default: int, theta: float) -> dict[str, Any]:
        """The size of heads, and their rotation. Args: default: the size if the file does not say."""
        sections = "{arch}.rope.dimension_sections"  # of models that see images
        if self.fields.has(sections) and not self._option("GGUF_SECTIONS", False):
            raise self.fields.unsupported(sections)
        rotated = self.fields.size("{arch}.rope.dimension_count", "head_dim", None)
        partial = self._option("GGUF_PARTIAL_ROPE", False)
        head_dim = self.fields.size("{arch}.attention.key_length", "head_dim", None if partial else rotated) or default
        config: dict[str, Any] = {"head_dim": head_dim}
        if rotated is not None and partial and rotated <= head_dim:
            config["partial_rotary_factor"] = min(1.0, math.nextafter(rotated / head_dim, 1))  # must not round down
        elif rotated not in (None, head_dim):
            raise self.fields.unsupported("{arch}.rope.dimension_count")
        if scaling := read_scaling(self.fields, self._rope, self._dequantize, head_dim, theta):
            config["rope_scaling"] = scaling
        return config

    def _of_family(self) -> dict[str, Any]:
        """The fields that not every family has."""
        config: dict[str, Any] = {}
        for suffix, name in self._option("GGUF_FIELDS", {}).items():
            key = f"{{arch}}.{suffix}"
            if not self.fields.has(key):
                continue
            if name == "layer_types":
                config[name] = self._layer_types(key)
            elif name in RANGES:
                config[name] = self.fields.number(key, name)
            elif name not in MAX_SIZES:
                config[name] = self.fields.flag(key, False)
            elif name in NONE and self.fields.field(key, int, "an integer", None) == 0:
                config[name] = NONE[name]
            else:
                config[name] = self.fields.size(key, name)
        return config

    def _num_kv_heads(self, num_heads: int) -> int:
        """The heads of K. LFM2's files have an array, with 0 for the layers that have a convolution."""
        key = "{arch}.attention.head_count_kv"
        heads = self.fields.values.get(self.fields.key(key))
        if isinstance(heads, np.ndarray) and "attention.head_count_kv" in self._option("GGUF_FIELDS", {}):
            if heads.dtype.kind not in "iu" or len({*heads.tolist()} - {0}) > 1:
                raise self.fields.error(key, f"must be one number for all layers with attention, got {shown(heads)}")
            return int(heads.max(initial=0)) or num_heads
        return self.fields.size(key, "num_key_value_heads", num_heads)

    def _layer_types(self, key: str) -> list[str]:
        """The layers' types, from a field that says for each layer whether it has a window, or how many heads of K."""
        if key.endswith("head_count_kv"):
            heads = self.fields.field(key, np.ndarray, "an array of numbers", REQUIRED)
            return ["full_attention" if count else self._option("GGUF_MIXER_KIND", "conv") for count in heads]
        windows = self.fields.field(key, np.ndarray, "an array of true and false", REQUIRED)
        if windows.dtype != bool:
            raise self.fields.error(key, f"must be an array of true and false, got {shown(windows)}")
        return ["sliding_attention" if window else "full_attention" for window in windows]

    def _experts(self, intermediate_size: int) -> dict[str, Any]:
        """The fields of a model with experts, under every name that a family has for them."""
        gating = self.fields.field("{arch}.expert_gating_func", int, "an integer", None)
        if gating not in (None, *self._option("GGUF_GATINGS", (0, SOFTMAX))):
            raise self.fields.unsupported("{arch}.expert_gating_func")
        for name in ("expert_weights_scale", "expert_group_count"):  # of some families only; others have 1
            number = self.fields.field(f"{{arch}}.{name}", (int, float), "a number", 1)
            if number not in (0, 1) and name not in self._option("GGUF_FIELDS", {}):
                raise self.fields.unsupported(f"{{arch}}.{name}")
        num_experts = self.fields.size("{arch}.expert_count", "num_experts")
        num_chosen = self.fields.size("{arch}.expert_used_count", "num_experts_per_tok")
        size = max(1, intermediate_size // num_chosen)  # as in llama.cpp, because the first files lack the field
        shared_size = "shared_expert_intermediate_size"
        return {
            "num_experts": num_experts,
            "num_local_experts": num_experts,
            "n_routed_experts": num_experts,
            "scoring_func": "sigmoid" if gating == SIGMOID else "softmax",
            "num_experts_per_tok": num_chosen,
            "moe_intermediate_size": self.fields.size(
                "{arch}.expert_feed_forward_length", "moe_intermediate_size", size
            ),
            shared_size: self.fields.size("{arch}.expert_shared_feed_forward_length", shared_size, intermediate_size),
            # llama.cpp decides this by the architecture, if files do not say.
            "norm_topk_prob": self.fields.flag("{arch}.expert_weights_norm", self._option("GGUF_NORMALIZED", True)),
        }

    def pieces(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, int, np.ndarray]]:
        """(name in transformers, first row, float32 rows) of these tensors, or of every tensor. A piece has at most
        2^17 elements, or one head, row or vector if that has more.

        Raises: ValueError if rows cannot be divided among the heads.
        """
        for name in self.weights if names is None else names:
            tensor = self.weights[name]
            num_rows, *row = tensor.shape
            num_heads = self._num_reordered_heads(name)
            # Rows are reordered within a head, so a piece has whole heads.
            unit = num_rows // num_heads if num_heads else 1
            is_offset = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
            offset = self._option("GGUF_NORM_OFFSET", 0.0) if is_offset else 0.0
            step = unit * max(1, PIECE_ELEMENTS // (unit * prod(row))) if row else num_rows
            for start in range(0, num_rows, step):
                piece = self._dequantize(tensor, start, min(start + step, num_rows))
                piece = piece - np.float32(offset) if offset else piece
                if name.endswith(".A_log"):  # stored as -exp(A_log)
                    with np.errstate(all="ignore"):  # as in _dequantize
                        piece = np.log(-piece)
                yield name, start, _unpermute(piece, len(piece) // unit) if num_heads else piece

    def stored_rows(self, name: str) -> np.ndarray:
        """The stored bytes of a matrix, with rows in transformers' order: uint8 [rows, bytes of a row].

        Raises: ValueError as `pieces`.
        """
        tensor = self.weights[name]
        data = read_rows(self.path, tensor, 0, tensor.shape[0], self._state)
        num_heads = self._num_reordered_heads(name)
        return np.ascontiguousarray(_unpermute(data, num_heads)) if num_heads else data

    def _num_reordered_heads(self, name: str) -> int:
        """The number of heads whose rows llama.cpp has reordered, or 0. Raises: ValueError as `pieces`."""
        part = name.split(".")[-2]
        if not self._option("GGUF_REORDERED", False) or part not in ("q_proj", "k_proj"):
            return 0
        num_heads = self.fields.size("{arch}.attention.head_count", "num_attention_heads")
        if part == "k_proj":
            num_heads = self._num_kv_heads(num_heads)
        tensor = self.weights[name]
        if tensor.shape[0] % (2 * num_heads):
            raise ValueError(
                f"{self.path}: {shown(tensor.name)} has {tensor.shape[0]} rows, which {num_heads} heads cannot share"
            )
        return num_heads

    def tokenizer(self) -> Tokenizer:
        """Raises: as `GGUFVocabulary.tokenizer`."""
        return self.vocabulary.tokenizer()

    def tokenizer_config(self) -> dict[str, Any]:
        """As `GGUFVocabulary.config`."""
        return self.vocabulary.config()

    def _option(self, name: str, default: Any) -> Any:
        """An option that the family's module sets for its files, or the default."""
        return getattr(self.family, name, default)

    # Tensors

    def _named(self, tensor: TensorInfo) -> Iterator[tuple[str, TensorInfo]]:
        """A tensor by its name in transformers, or the matrices of all experts that are stacked in it."""
        name = self._name(tensor.name)
        tensor = replace(tensor, shape=_original_shape(name, tensor.shape))
        if "{}" not in name:
            yield name, tensor
            return
        if len(tensor.shape) != (3 if name.endswith(".weight") else 2) or tensor.shape[0] > MAX_SIZES["num_experts"]:
            raise ValueError(f"{self.path}: {shown(tensor.name)} is {list(tensor.shape)}, not the matrices of experts")
        num_experts, *shape = tensor.shape
        size = tensor.num_bytes // num_experts
        for expert in range(num_experts):
            offset = tensor.offset + expert * size
            yield name.format(expert), replace(tensor, shape=tuple(shape), offset=offset, num_bytes=size)

    def _name(self, name: str) -> str:
        match = re.fullmatch(r"blk\.(0|[1-9][0-9]*)\.([\w.]+)", name)
        place, part = (f"model.layers.{match[1]}.", match[2]) if match else ("", name)
        names = (LAYER_TENSORS if match else TENSORS) | self._option("GGUF_TENSORS", {})
        stem, _, kind = part.rpartition(".")
        if part in names:  # neither a weight nor a bias in transformers
            return place + names[part]
        if stem in names:
            return f"{place}{names[stem]}.{kind}"
        raise ValueError(
            f"{self.path}: tensor {shown(name)} is not one of a {self.fields.architecture} model; {INSTEAD}"
        )

    def _has(self, tensor: str) -> bool:
        """Whether a layer has a tensor with this name in transformers."""
        return any(name.endswith(f".{tensor}") for name in self.weights)

    def _check_kind(self, kind: gguf.GGMLQuantizationType) -> None:
        """Refuse a kind of tensor that the gguf package cannot dequantize, before anything large is read."""
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError as error:
            names = [tensor.name for tensor in self.weights.values() if tensor.kind == kind]
            problem = f"{kind.name} is not supported, which {shown(names[0])} has; a file of another quantization runs"
            raise ValueError(f"{self.path}: {problem}, such as Q4_K_M or Q8_0") from error

    def _dequantize(self, tensor: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a tensor, or all of a vector, in float32."""
        each = prod(tensor.shape[1:-1])  # rows of the last dimension
        places = (0, 1) if len(tensor.shape) == 1 else (start * each, stop * each)
        data = read_rows(self.path, tensor, *places, self._state)
        with np.errstate(all="ignore"):  # the loader reports values that are not finite
            # Pass one row, because the package splits many rows into groups, which is slower.
            values = gguf.dequantize(data.reshape(1, -1), tensor.kind)
        return values.astype(np.float32, copy=False).reshape(stop - start, *tensor.shape[1:])


def _original_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in transformers. llama.cpp drops and adds dimensions of 1, and divides norms by groups."""
    if name.endswith("mlp.shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    if name.endswith(("conv.conv.weight", "conv1d.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (prod(shape),) if name.endswith((".A_log", ".D", ".norm.weight")) else shape


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of q or k: llama.cpp rotates neighbouring rows, transformers the two halves of a head."""
    return rearrange(weight, "(h half two) ... -> (h two half) ...", h=num_heads, two=2)
