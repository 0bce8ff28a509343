"""A .gguf file read as if it were a Hugging Face directory: config, tokenizer and tensors under their usual names.

gguf_reader.py reads the file and the `gguf` package dequantizes. This module undoes llama.cpp's conversion: its names,
its reordering of q and k rows in some architectures, what it computes of some vectors, and its flat list of vocabulary
and merges. Families know what else differs, by `ModelConfig.from_gguf`.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from einops import rearrange
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from nanopage.checks.fields import MAX_SIZES, RANGES
from nanopage.config.model import ModelConfig
from nanopage.config.rope import RopeConfig
from nanopage.files.model_files import listed, rust_errors, shown
from nanopage.files.safetensors_checkpoint import MAX_MATRICES
from nanopage.quantization.gguf_reader import TensorInfo, read_header, read_rows
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

NONE = {"sliding_window": None, "first_k_dense_replace": 0}  # sizes that may be 0: what config.json then has
FLAGS = {"attention_bias": "self_attn.q_proj.bias"}  # in config.json: a tensor that files have if it is true
YARN_FIELDS = {  # last parts of keys of files with yarn -> names in config.json
    "attn_factor": "attention_factor",  # in the first files of OLMo 3
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}

SOFTMAX, SIGMOID = 1, 2  # expert_gating_func; 0: the default of the architecture
UNDEFINED, NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(7)  # tokenizer.ggml.token_type
MAX_PIECE = 256  # characters of a SentencePiece token; SentencePiece's own limit is 16 unless a trainer raises it
PIECE_ELEMENTS = 2**17  # dequantized at once: few enough for a core's cache, which makes it twice as fast

LLAMA3 = ("llama-bpe", "lfm2")  # pre-tokenizers that split as Llama 3's
NEOX = ("mpt", "olmo")  # those of GPT-NeoX's vocabulary, which Mamba-2 has: they split as GPT-2's
INSTEAD = "the model's safetensors checkpoint may run"

_REQUIRED: Any = object()  # the default of a field that must be present


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
        self.fields, self._state = header.fields, header.state
        self.architecture = self._string("general.architecture")
        from nanopage.models import load_families  # they import torch, which reading the tokenizer does not need

        families = {family.GGUF_ARCHITECTURE: family for family in load_families() if family.GGUF_ARCHITECTURE}
        self.has_experts = self._field("{arch}.expert_count", int, "an integer", 0) > 0
        has_windows = self._field("{arch}.attention.sliding_window", int, "an integer", 0) > 0
        features = (("experts", self.has_experts), ("windows", has_windows))
        names = [f"{self.architecture} with {feature}" for feature, has in features if has]
        family = next((name for name in names if name in families), self.architecture)
        if family not in families:
            problem = f"GGUF architecture {shown(self.architecture):.80} is not supported"
            raise ValueError(f"{path}: {problem}; supported: {listed(families)}; {INSTEAD}")
        self.family = families[family]
        num_files = self._field("split.count", int, "an integer", 1)
        if num_files != 1:
            raise self._error("split.count", f"is {num_files}: merge them with llama.cpp's 'llama-gguf-split --merge'")
        # Layers after the last one predict further tokens. They are not used.
        num_others = self._field("{arch}.nextn_predict_layers", int, "an integer", 0)
        self.num_layers = self._size("{arch}.block_count", "num_hidden_layers") - num_others
        if num_others < 0 or self.num_layers < 1:
            raise self._error("{arch}.nextn_predict_layers", f"is {num_others}, with {self.num_layers} other layers")
        others = tuple(f"blk.{self.num_layers + index}." for index in range(num_others))
        tensors = {name: tensor for name, tensor in header.tensors.items() if not name.startswith(others)}
        self._rope_freqs = tensors.pop("rope_freqs.weight", None)  # in config()
        self._rope_factors = {kind: tensors.pop(f"rope_factors_{kind}.weight", None) for kind in ("short", "long")}
        self.weights: dict[str, TensorInfo] = {}
        for tensor in tensors.values():
            self.weights.update(self._named(tensor))
            if len(self.weights) > MAX_MATRICES:
                raise ValueError(f"{path} has more than {MAX_MATRICES:,} tensors, each expert's counted")
        for kind in {tensor.kind for tensor in self.weights.values()}:
            self._check_kind(kind)

    def model_config(self) -> ModelConfig:
        """Raises: ValueError as config_from_dict, naming the file."""
        return replace(config_from_dict(self.config(), str(self.path), INSTEAD), from_gguf=True)

    def config(self) -> dict[str, Any]:
        """The file's hyperparameters as the contents of a config.json."""
        # llama.cpp writes 0 for the sizes of attention and of feed-forward layers that a model does not have.
        has_attention = self._has("self_attn.o_proj.weight")
        num_heads = self._size("{arch}.attention.head_count", "num_attention_heads") if has_attention else 1
        of_expert = self._size("{arch}.expert_feed_forward_length", "moe_intermediate_size", None)
        default = of_expert or (_REQUIRED if has_attention else 1)  # models may have experts in all layers
        inner = self._size("{arch}.feed_forward_length", "intermediate_size", default) if has_attention else 1
        config: dict[str, Any] = {
            "architectures": [self.family.ARCHITECTURES[0]],
            "model_type": self.architecture,
            "vocab_size": len(self.tokens),
            "hidden_size": self._size("{arch}.embedding_length", "hidden_size"),
            "intermediate_size": inner,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._num_kv_heads(num_heads),
            "max_position_embeddings": self._size("{arch}.context_length", "max_position_embeddings"),
            "rms_norm_eps": self._number("{arch}.attention.layer_norm_rms_epsilon", "rms_norm_eps"),
            "hidden_act": "silu",
            "tie_word_embeddings": "lm_head.weight" not in self.weights,
            "dtype": "bfloat16",
            "rope_theta": self._number("{arch}.rope.freq_base", "rope_theta", 10000.0),
        }
        config |= {flag: self._has(tensor) for flag, tensor in (FLAGS | self._option("GGUF_FLAGS", {})).items()}
        if self.has_experts:
            config |= self._experts(inner)
        sections = "{arch}.rope.dimension_sections"  # of models that see images
        if self._key(sections) in self.fields and not self._option("GGUF_SECTIONS", False):
            raise self._unsupported(sections)
        default = config["hidden_size"] // num_heads
        rotated = self._size("{arch}.rope.dimension_count", "head_dim", None)
        partial = self._option("GGUF_PARTIAL_ROPE", False)
        head_dim = self._size("{arch}.attention.key_length", "head_dim", None if partial else rotated) or default
        config["head_dim"] = head_dim
        if rotated is not None and partial and rotated <= head_dim:
            config["partial_rotary_factor"] = min(1.0, math.nextafter(rotated / head_dim, 1))  # must not round down
        elif rotated not in (None, head_dim):
            raise self._unsupported("{arch}.rope.dimension_count")
        if scaling := self._rope_scaling(head_dim, config["rope_theta"]):
            config["rope_scaling"] = scaling
        for suffix, name in self._option("GGUF_FIELDS", {}).items():
            key = f"{{arch}}.{suffix}"
            if self._key(key) not in self.fields:
                continue
            if name == "layer_types":
                config[name] = self._layer_types(key)
            elif name in RANGES:
                config[name] = self._number(key, name)
            elif name not in MAX_SIZES:
                config[name] = self._flag(key, False)
            elif name in NONE and self._field(key, int, "an integer", None) == 0:
                config[name] = NONE[name]
            else:
                config[name] = self._size(key, name)
        if (complete := self._option("complete_gguf", None)) is not None:
            config |= complete(config)
        if (bos := self._token_id("bos")) is not None:
            config["bos_token_id"] = bos
        if ends := self._end_ids():
            config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return config

    def _end_ids(self) -> list[int]:
        """The tokens that end a reply by the file's fields: the ends of a text, a turn, a message or a file, as in
        llama.cpp. The tokenizer knows others by their names.

        Raises: ValueError if the end of a text is no token, and there is no other end.
        """
        names = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
        ids = {token_id for name in names if (token_id := self._token_id(name)) is not None}
        eos = self.fields.get("tokenizer.ggml.eos_token_id")
        if not (ids or eos is None or any(token.special and _is_end(token.content) for token in self._added_tokens())):
            raise self._error("tokenizer.ggml.eos_token_id", f"= {eos} is no token, and no other token ends a reply")
        return sorted(ids)

    def _num_kv_heads(self, num_heads: int) -> int:
        """The heads of K. LFM2's files have an array, with 0 for the layers that have a convolution."""
        key = "{arch}.attention.head_count_kv"
        heads = self.fields.get(self._key(key))
        if isinstance(heads, np.ndarray) and "attention.head_count_kv" in self._option("GGUF_FIELDS", {}):
            if heads.dtype.kind not in "iu" or len({*heads.tolist()} - {0}) > 1:
                raise self._error(key, f"must be one number for all layers with attention, got {shown(heads)}")
            return int(heads.max(initial=0)) or num_heads
        return self._size(key, "num_key_value_heads", num_heads)

    def _layer_types(self, key: str) -> list[str]:
        """The layers' types, from a field that says for each layer whether it has a window, or how many heads of K."""
        if key.endswith("head_count_kv"):
            heads = self._field(key, np.ndarray, "an array of numbers", _REQUIRED)
            return ["full_attention" if count else self._option("GGUF_MIXER_KIND", "conv") for count in heads]
        windows = self._field(key, np.ndarray, "an array of true and false", _REQUIRED)
        if windows.dtype != bool:
            raise self._error(key, f"must be an array of true and false, got {shown(windows)}")
        return ["sliding_attention" if window else "full_attention" for window in windows]

    def _experts(self, intermediate_size: int) -> dict[str, Any]:
        """The fields of a model with experts, under every name that a family has for them."""
        gating = self._field("{arch}.expert_gating_func", int, "an integer", None)
        if gating not in (None, *self._option("GGUF_GATINGS", (0, SOFTMAX))):
            raise self._unsupported("{arch}.expert_gating_func")
        for name in ("expert_weights_scale", "expert_group_count"):  # of some families only; others have 1
            number = self._field(f"{{arch}}.{name}", (int, float), "a number", 1)
            if number not in (0, 1) and name not in self._option("GGUF_FIELDS", {}):
                raise self._unsupported(f"{{arch}}.{name}")
        num_experts = self._size("{arch}.expert_count", "num_experts")
        num_chosen = self._size("{arch}.expert_used_count", "num_experts_per_tok")
        size = max(1, intermediate_size // num_chosen)  # as in llama.cpp, because the first files lack the field
        shared_size = "shared_expert_intermediate_size"
        return {
            "num_experts": num_experts,
            "num_local_experts": num_experts,
            "n_routed_experts": num_experts,
            "scoring_func": "sigmoid" if gating == SIGMOID else "softmax",
            "num_experts_per_tok": num_chosen,
            "moe_intermediate_size": self._size("{arch}.expert_feed_forward_length", "moe_intermediate_size", size),
            shared_size: self._size("{arch}.expert_shared_feed_forward_length", shared_size, intermediate_size),
            # llama.cpp decides this by the architecture, if files do not say.
            "norm_topk_prob": self._flag("{arch}.expert_weights_norm", self._option("GGUF_NORMALIZED", True)),
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
        num_heads = self._size("{arch}.attention.head_count", "num_attention_heads")
        if part == "k_proj":
            num_heads = self._num_kv_heads(num_heads)
        tensor = self.weights[name]
        if tensor.shape[0] % (2 * num_heads):
            raise ValueError(
                f"{self.path}: {shown(tensor.name)} has {tensor.shape[0]} rows, which {num_heads} heads cannot share"
            )
        return num_heads

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises: ValueError for a kind or pre-tokenizer that is not supported, and for fields that contradict each other.
        """
        kind = self._string("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer = self._byte_level_bpe()
        elif kind == "llama":
            tokenizer = self._sentencepiece_bpe()
        else:
            problem = f"tokenizer {shown(kind)} is not supported; supported: gpt2, llama"
            raise ValueError(f"{self.path}: {problem}; {INSTEAD}")
        added = self._added_tokens()
        bos = self._token_id("bos")
        # llama.cpp's defaults, if the file says nothing.
        adds_bos = kind == "llama" or self._string("tokenizer.ggml.pre", "") in LLAMA3
        adds_bos = self._flag("tokenizer.ggml.add_bos_token", adds_bos)
        if self._flag("tokenizer.ggml.add_eos_token", False):
            raise self._unsupported("tokenizer.ggml.add_eos_token")
        with rust_errors(f"{self.path}: tokenizer.ggml.tokens"):
            tokenizer.add_tokens(added)
            # Set the special flag again, because add_tokens does not change tokens that are already in the vocabulary.
            tokenizer.add_special_tokens([token for token in added if token.special])
            if adds_bos and bos is not None:
                tokenizer.post_processor = processors.TemplateProcessing(
                    single="bos:0 $A:0",
                    pair="bos:0 $A:0 $B:1",
                    special_tokens=[{"id": "bos", "ids": [bos], "tokens": [self.tokens[bos]]}],
                )
        return tokenizer

    def _added_tokens(self) -> list[AddedToken]:
        """The tokens that a text is divided at. Some files call an end of a reply user-defined: it is special. "</s>"
        may be text, as in Gemma's files."""
        return [
            AddedToken(token, special=kind != USER_DEFINED or (_is_end(token) and token != "</s>"), normalized=False)
            for token, kind in zip(self.tokens, self._token_types(), strict=True)
            if kind in (UNKNOWN, CONTROL, USER_DEFINED)
        ]

    def tokenizer_config(self) -> dict[str, Any]:
        """The special tokens and the chat templates as the contents of a tokenizer_config.json."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (token_id := self._token_id(key)) is not None:
                config[f"{name}_token"] = self.tokens[token_id]
        # llama.cpp's converter writes a template with another name, such as tool_use, as a separate field.
        keys = [key for key in self.fields if key.startswith("tokenizer.chat_template.")]
        named = {key.removeprefix("tokenizer.chat_template."): self._string(key) for key in keys}
        if template := self._string("tokenizer.chat_template", ""):
            named = {"default": template} | named
        if named:
            listed = [{"name": name, "template": text} for name, text in named.items()]
            config["chat_template"] = template if [*named] == ["default"] else listed
        config["model_max_length"] = self._size("{arch}.context_length", "max_position_embeddings")
        return config

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        (directory / "tokenizer.json").write_text(self.tokenizer().to_str(pretty=True), encoding="utf-8")
        (directory / "tokenizer_config.json").write_text(json.dumps(self.tokenizer_config(), indent=2))

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, by id. Empty tokens get distinct names, as in llama.cpp."""
        tokens = self._strings("tokenizer.ggml.tokens")
        tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
        ids: dict[str, int] = {}
        for i, token in enumerate(tokens):
            if ids.setdefault(token, i) != i:
                raise self._error("tokenizer.ggml.tokens", f"has {shown(token)} twice, as {ids[token]} and as {i}")
        return tokens

    def _option(self, name: str, default: Any) -> Any:
        """An option that the family's module sets for its files, or the default."""
        return getattr(self.family, name, default)

    # Fields, checked. `{arch}` in a key is the file's architecture.

    def _error(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.path}: {self._key(key)} {problem}")

    def _unsupported(self, key: str) -> ValueError:
        """The error for a field that would change the output."""
        return self._error(key, f"= {shown(self.fields[self._key(key)])} is not supported; {INSTEAD}")

    def _key(self, key: str) -> str:
        return key.replace("{arch}", self.architecture) if "{arch}" in key else key

    def _field(self, key: str, kinds: type | tuple[type, ...], what: str, default: Any) -> Any:
        value = self.fields.get(self._key(key), default)
        if value is _REQUIRED:
            raise self._error(key, "is missing from the metadata")
        is_kind = isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))
        if value is not default and not is_kind:
            raise self._error(key, f"must be {what}, got {shown(value)}")
        return value

    def _string(self, key: str, default: Any = _REQUIRED) -> str:
        return self._field(key, str, "a string", default)

    def _flag(self, key: str, default: bool) -> bool:
        return self._field(key, bool, "true or false", default)

    def _size(self, key: str, name: str, default: Any = _REQUIRED) -> int:
        """A size that config.json calls `name`, within its bounds."""
        value = self._field(key, int, "an integer", default)
        if value is not default and not 1 <= value <= MAX_SIZES[name]:
            raise self._error(key, f"must be from 1 to {MAX_SIZES[name]:,}, got {value}")
        return value

    def _number(self, key: str, name: str, default: Any = _REQUIRED) -> float:
        """A number that config.json calls `name`, within its range, as the shortest decimal with the same float32."""
        value = self._field(key, (int, float), "a number", default)
        low, high = RANGES[name]
        if not low <= value <= high:
            raise self._error(key, f"must be from {low:g} to {high:g}, got {value}")
        return float(str(np.float32(value)))  # 9.999999747378752e-06 is 1e-05

    def _strings(self, key: str) -> list[str]:
        return self._field(key, list, "an array of strings", _REQUIRED)

    def _one_for_each_token(self, key: str, kinds: str, what: str) -> list:
        """An array of numbers whose numpy dtype is of one of `kinds`."""
        values = self._field(key, np.ndarray, f"an array of {what}", _REQUIRED)
        if values.dtype.kind not in kinds:
            raise self._error(key, f"must be an array of {what}, got {shown(values)}")
        if len(values) != len(self.tokens):
            raise self._error(key, f"has {len(values):,} values for {len(self.tokens):,} tokens")
        return values.tolist()

    def _token_id(self, name: str) -> int | None:
        """The id of a special token; None if there is none. Files then leave the field out, or have an id that is not
        in the vocabulary, such as -1 or 2^32 - 1."""
        token_id = self._field(f"tokenizer.ggml.{name}_token_id", int, "a token id", None)
        return token_id if token_id is not None and 0 <= token_id < len(self.tokens) else None

    def _token_types(self) -> list[int]:
        key = "tokenizer.ggml.token_type"
        if key not in self.fields:
            return [NORMAL] * len(self.tokens)
        types = self._one_for_each_token(key, "iu", "integers")
        if unknown := set(types) - set(range(7)):
            raise self._error(key, f"has values that are not supported: {shown(sorted(unknown))}")
        return types

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
        names = (LAYER_TENSORS if match else TENSORS) | self.family.GGUF_TENSORS
        stem, _, kind = part.rpartition(".")
        if part in names:  # neither a weight nor a bias in transformers
            return place + names[part]
        if stem in names:
            return f"{place}{names[stem]}.{kind}"
        raise ValueError(f"{self.path}: tensor {shown(name)} is not one of a {self.architecture} model; {INSTEAD}")

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

    def _rope_scaling(self, head_dim: int, theta: float) -> dict[str, Any] | None:
        if any(tensor is not None for tensor in self._rope_factors.values()):
            return self._longrope()
        kind = self._string("{arch}.rope.scaling.type", "none")
        for name in ("yarn_ext_factor", *([] if kind == "yarn" else YARN_FIELDS)):
            if f"{self.architecture}.rope.scaling.{name}" in self.fields:
                raise self._unsupported(f"{{arch}}.rope.scaling.{name}")
        if kind == "none":
            return None if self._rope_freqs is None else self._llama3_scaling(self._rope_freqs, head_dim, theta)
        if self._rope_freqs is not None:
            raise self._error("{arch}.rope.scaling.type", f"is {shown(kind)}, and there is rope_freqs.weight, too")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._number("{arch}.rope.scaling.factor", "factor")}
        if original := self._size("{arch}.rope.scaling.original_context_length", "max_position_embeddings", None):
            scaling["original_max_position_embeddings"] = original
        for name, known_as in YARN_FIELDS.items():
            if self._key(key := f"{{arch}}.rope.scaling.{name}") in self.fields:
                scaling[known_as] = self._number(key, known_as)
        return scaling

    def _longrope(self) -> dict[str, Any]:
        """Phi-3's rope scaling. llama.cpp stores its divisors of frequencies as tensors."""
        scaling: dict[str, Any] = {"rope_type": "longrope"}
        for kind, tensor in self._rope_factors.items():
            known = tensor is not None and len(tensor.shape) == 1 and tensor.shape[0] <= MAX_SIZES["head_dim"]
            if tensor is None or not known or tensor.kind != gguf.GGMLQuantizationType.F32:
                raise ValueError(f"{self.path}: rope_factors_{kind}.weight must be a vector of float32")
            scaling[f"{kind}_factor"] = self._dequantize(tensor, 0, tensor.shape[0]).tolist()
        scaling["attention_factor"] = self._number("{arch}.rope.scaling.attn_factor", "attention_factor", 1.0)
        original = self._size("{arch}.rope.scaling.original_context_length", "max_position_embeddings")
        return scaling | {"original_max_position_embeddings": original}

    def _llama3_scaling(self, tensor: TensorInfo, head_dim: int, theta: float) -> dict[str, Any]:
        """Llama 3's rope scaling, stored by llama.cpp as divisors of frequencies. Raises ValueError for any other."""
        problem = ValueError(
            f"{self.path}: rope_freqs.weight is not Llama 3's rope scaling, the only one supported; {INSTEAD}"
        )
        if tensor.shape != (head_dim // 2,) or tensor.kind != gguf.GGMLQuantizationType.F32:
            raise problem
        stored = self._dequantize(tensor, 0, head_dim // 2)
        low, high = RANGES["factor"]
        if not ((stored >= low) & (stored <= high)).all():
            raise problem
        scaling = {
            "rope_type": "llama3",
            "factor": stored.max().item(),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,  # of every Llama 3.x
        }
        from nanopage.layers.rotary import inverse_frequencies  # imports torch

        plain, _ = inverse_frequencies(head_dim, RopeConfig(theta))
        scaled, _ = inverse_frequencies(head_dim, RopeConfig(theta, "llama3", scaling))
        if not np.allclose((plain / scaled).numpy(), stored, rtol=1e-3):
            raise problem
        return scaling

    def _byte_level_bpe(self) -> Tokenizer:
        from nanopage.text.tokenizer_bounds import SPLITS  # not for the processes that compile: they need no tokenizer

        pre, known = self._string("tokenizer.ggml.pre"), ("gpt-2", *NEOX, "smollm", "refact", *SPLITS)
        if pre not in known:
            problem = f"pre-tokenizer {shown(pre)} is not supported; supported: {', '.join(known)}"
            raise ValueError(f"{self.path}: {problem}; {INSTEAD}")
        merges = []
        for merge in self._strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left and right):
                raise self._error("tokenizer.ggml.merges", f"has {shown(merge)}, which is not two tokens and a space")
            merges.append((left, right))
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        with rust_errors(f"{self.path}: tokenizer.ggml.merges"):
            tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in (*LLAMA3, "tekken")))
        if pre in SPLITS:
            splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS[pre]]
            parts = [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:
            parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            if pre in ("smollm", "refact"):
                parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
        if pre in ("qwen2", "qwen35", *NEOX):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece_bpe(self) -> Tokenizer:
        """SentencePiece BPE has scores, not merges: any pair whose result is a token merges, best score first."""
        types, scores = self._token_types(), self._one_for_each_token("tokenizer.ggml.scores", "f", "numbers")
        if not all(map(math.isfinite, scores)):
            raise self._error("tokenizer.ggml.scores", "has values that are not finite")
        vocabulary = {token: i for i, token in enumerate(self.tokens)}
        merges = []
        for i, token in enumerate(self.tokens):
            if types[i] != NORMAL:
                continue
            if len(token) > MAX_PIECE:
                raise self._error("tokenizer.ggml.tokens", f"has a token of {len(token):,} characters: {shown(token)}")
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
        merges.sort()
        unknown = self._token_id("unknown") or 0
        with rust_errors(f"{self.path}: tokenizer.ggml.tokens"):
            tokenizer = Tokenizer(
                models.BPE(
                    vocabulary,
                    [(left, right) for *_, left, right in merges],
                    unk_token=self.tokens[unknown],
                    fuse_unk=True,
                    byte_fallback=True,
                )
            )
        spaces = normalizers.Replace(" ", "▁")
        decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self._flag("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            decoding.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoding)
        return tokenizer


def _original_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in transformers. llama.cpp drops and adds dimensions of 1, and divides norms by groups."""
    if name.endswith("mlp.shared_expert_gate.weight") and len(shape) == 1:
        return 1, *shape
    if name.endswith(("conv.conv.weight", "conv1d.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (prod(shape),) if name.endswith((".A_log", ".D", ".norm.weight")) else shape


def _is_end(token: str) -> bool:
    from nanopage.text.tokenizer import ENDS  # as in _byte_level_bpe

    return token in ENDS


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of q or k: llama.cpp rotates neighbouring rows, transformers the two halves of a head."""
    return rearrange(weight, "(h half two) ... -> (h two half) ...", h=num_heads, two=2)
