"""Whisper in CTranslate2's format (model.bin, version 6), as faster-whisper's models have it, read without trusting it.

The file is a list of variables: name, shape, type, data. Lengths are compared with the size of the file before anything
is allocated. A matrix of int8 has a scale for each of its rows, in a variable of its own. `convert_whisper` writes the
model as a directory in transformers' layout, which both can load.
"""

import json
import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanopage.files.model_files import check_file, parse_json, read_json, read_text, shown

VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
MAX_VARIABLES, MAX_DIMENSIONS = 2**16, 8
DTYPES = {0: "<f4", 1: "<i1", 2: "<i2", 3: "<i4", 4: "<f2"}  # 5 is bfloat16, which NumPy lacks
FLOATS, INT8 = ("<f4", "<f2"), "<i1"
# Settings that a Whisper model has, in files that have them.
SETTINGS = {"activation": 3, "alibi": 0, "pre_norm": 1, "start_from_zero_embedding": 0, "multi_query_attention": 0}
# Names there: in transformers. A norm has gamma and beta; other layers have weight and bias.
LAYERS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention/linear_1": "self_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "ffn/layer_norm": "final_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
}
KINDS = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}
PLACES = {
    "embeddings": "embed_tokens",
    "position_encodings": "embed_positions",
    "layer_norm": "layer_norm",
    "conv1": "conv1",
    "conv2": "conv2",
}
# Fields of config.json there: of generation_config.json.
GENERATION = {
    "suppress_ids": "suppress_tokens",
    "suppress_ids_begin": "begin_suppress_tokens",
    "alignment_heads": "alignment_heads",
}


@dataclass(frozen=True, slots=True)
class Variable:
    """Where the data of a variable is in the file."""

    shape: tuple[int, ...]
    dtype: str  # NumPy's
    offset: int

    def read(self, path: Path) -> np.ndarray:
        """Raises: ValueError if the file has become shorter."""
        data = np.fromfile(path, self.dtype, prod(self.shape), offset=self.offset)
        if data.size < prod(self.shape):
            raise ValueError(f"{path} has changed while it was read")
        return data.reshape(self.shape)


def read_variables(path: Path) -> dict[str, Variable]:
    """The variables of a model.bin. Raises: FileNotFoundError; ValueError naming the file and what is wrong."""
    check_file(path)
    try:
        with open(path, "rb") as file:
            return _Reader(file, os.fstat(file.fileno()).st_size).variables()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except _Malformed as error:
        raise ValueError(f"{path} is not a Whisper model of CTranslate2: {error}") from None


class _Malformed(Exception):
    """What is wrong with the file."""


class _Reader:
    """Reads what the file says of its variables, and skips their data."""

    def __init__(self, file: BinaryIO, size: int):
        self.file, self.size, self.place = file, size, "the header"

    def variables(self) -> dict[str, Variable]:
        version = self.number("<I")
        if version != VERSION:
            raise _Malformed(f"its version is {version}; supported: {VERSION}")
        spec, revision = self.string(), self.number("<I")
        if (spec, revision) != (SPEC, REVISION):
            raise _Malformed(f"it is a {shown(spec)} of revision {revision}; supported: {SPEC} of revision {REVISION}")
        count, found = self.number("<I"), {}
        if count > MAX_VARIABLES:
            raise _Malformed(f"it has {count:,} variables, more than {MAX_VARIABLES:,}")
        for index in range(count):
            self.place = f"the name of variable {index}"
            name = self.string()
            self.place = f"variable {shown(name)}"
            if name in found:
                raise _Malformed(f"{self.place} occurs twice")
            found[name] = self.variable()
        return found

    def variable(self) -> Variable:
        rank = self.number("<B")
        if rank > MAX_DIMENSIONS:
            raise _Malformed(f"{self.place} has {rank} dimensions, more than {MAX_DIMENSIONS}")
        shape = tuple(self.number("<I") for _ in range(rank))
        kind, num_bytes = self.number("<B"), self.number("<I")
        if kind not in DTYPES:
            raise _Malformed(f"{self.place} has the type {'bfloat16' if kind == 5 else kind}, which is not supported")
        if num_bytes != prod(shape) * np.dtype(DTYPES[kind]).itemsize:
            raise _Malformed(f"{self.place} has the shape {list(shape)}, but {num_bytes:,} bytes")
        offset = self.file.tell()
        if num_bytes > self.size - offset:
            raise _Malformed(f"it ends within {self.place}")
        self.file.seek(num_bytes, os.SEEK_CUR)
        return Variable(shape, DTYPES[kind], offset)

    def number(self, kind: str) -> int:
        return struct.unpack(kind, self.take(struct.calcsize(kind)))[0]

    def string(self) -> str:
        try:
            return self.take(self.number("<H")).decode().removesuffix("\0")
        except UnicodeDecodeError:
            raise _Malformed(f"{self.place} is not UTF-8") from None

    def take(self, count: int) -> bytes:
        data = self.file.read(count)
        if len(data) < count:
            raise _Malformed(f"it ends within {self.place}")
        return data


def whisper_tensors(path: Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """The tensors of a Whisper model under transformers' names, and its numbers of heads: part -> heads.

    A bias of K, which has no effect on attention and no name in transformers, is left out.

    Raises: as `read_variables`; ValueError naming a variable that is unknown or of another type, or a setting that
        Whisper does not have.
    """
    tensors: dict[str, np.ndarray] = {}
    heads: dict[str, int] = {}
    variables = read_variables(path)
    for name, variable in variables.items():
        part, _, place = name.partition("/")
        scaled = variables.get(name.removesuffix("_scale"), variable)
        if scaled is not variable and scaled.dtype == INT8:  # _floats reads it
            continue
        if not variable.shape:
            value = int(variable.read(path))
            if place == "num_heads":
                heads[part] = value
            elif place != "scale_embeddings" and value != SETTINGS.get(place, value):
                raise ValueError(f"{path}: {shown(name)} is {value}, and Whisper's is {SETTINGS[place]}")
            continue
        if "alignment" in place:  # for timestamps of words; config.json has them as well
            continue
        if (names := _names(part, place)) is None:
            raise ValueError(f"{path}: the variable {shown(name)} is not part of Whisper")
        if not variable.shape[0] or variable.shape[0] % len(names):
            raise ValueError(f"{path}: the variable {shown(name)} has the shape {list(variable.shape)}")
        parts = np.split(_floats(path, name, variables), len(names))
        tensors |= {there: rows for there, rows in zip(names, parts, strict=True) if not there.endswith("k_proj.bias")}
    return tensors, heads


def _floats(path: Path, name: str, variables: dict[str, Variable]) -> np.ndarray:
    """The floats of a variable. Integers are divided by the scale of their row, and become float16."""
    variable, scale = variables[name], variables.get(f"{name}_scale")
    if variable.dtype in FLOATS:
        return variable.read(path)
    if variable.dtype != INT8 or scale is None or scale.shape != variable.shape[:1] or scale.dtype not in FLOATS:
        kind = np.dtype(variable.dtype).name
        known = "float32, float16 and int8 with a scale for each row"
        raise ValueError(f"{path}: the variable {shown(name)} is {kind}; supported: {known}")
    scales = scale.read(path).astype(np.float32)
    if not (scales > 0).all():
        raise ValueError(f"{path}: the variable {shown(name)} has scales that are not above 0")
    return (variable.read(path).T / scales).T.astype(np.float16)


def _names(part: str, place: str) -> list[str] | None:
    """transformers' names of the parts of a variable; None: there are none."""
    layer = re.fullmatch(r"layer_(\d{1,4})/(.+)/(\w+)", place)
    place, _, kind = place.rpartition("/") if layer is None else (layer[2], "", layer[3])
    found = PLACES.get(place) if layer is None else LAYERS.get(place)
    if part not in ("encoder", "decoder") or found is None or kind not in KINDS:
        return None
    prefix = f"model.{part}." if layer is None else f"model.{part}.layers.{int(layer[1])}."
    return [f"{prefix}{name}.{KINDS[kind]}" for name in found.split()]


def convert_whisper(source: Path, directory: Path) -> None:
    """Write a model of faster-whisper as a directory in transformers' layout.

    Args: source: a directory with model.bin, config.json and tokenizer.json.
    Raises: as `whisper_tensors`; ValueError for a model that lacks a part of Whisper.
    """
    from safetensors.numpy import save_file

    tensors, heads = whisper_tensors(source / "model.bin")
    tokenizer = read_text(source / "tokenizer.json")
    ids = {token["content"]: token["id"] for token in parse_json(tokenizer)["added_tokens"]}
    try:
        config = _config(tensors, heads, ids)
    except KeyError as error:
        raise ValueError(f"{source} lacks {error}, and every Whisper model has it") from None
    except (ValueError, IndexError):
        raise ValueError(f"{source}: a tensor has too few dimensions for Whisper") from None
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    theirs = read_json(source / "config.json")
    generation: dict[str, Any] = {key: config[key] for key in config if key.endswith("_token_id")}
    generation |= {here: theirs[there] for there, here in GENERATION.items() if there in theirs}
    generation |= {"no_timestamps_token_id": ids["<|notimestamps|>"]}
    generation |= {"is_multilingual": config["vocab_size"] > 51864, "max_length": config["max_target_positions"]}
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": config["num_mel_bins"]}
    files = {"config": config, "generation_config": generation, "preprocessor_config": extractor}
    files["tokenizer_config"] = {"tokenizer_class": "WhisperTokenizer", "model_max_length": 448}
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2))
    (directory / "tokenizer.json").write_text(tokenizer)


def _config(tensors: dict[str, np.ndarray], heads: dict[str, int], ids: dict[str, int]) -> dict[str, Any]:
    """config.json, by the shapes of the tensors."""
    vocab_size, d_model = tensors["model.decoder.embed_tokens.weight"].shape
    sizes = {}
    for part in ("encoder", "decoder"):
        layers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{part}.layers.")}
        sizes[f"{part}_layers"], sizes[f"{part}_attention_heads"] = len(layers), heads[part]
        sizes[f"{part}_ffn_dim"] = len(tensors[f"model.{part}.layers.0.fc1.weight"])
    end = ids["<|endoftext|>"]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "torch_dtype": str(tensors["model.decoder.embed_tokens.weight"].dtype),
        "vocab_size": vocab_size,
        "d_model": d_model,
        **sizes,
        "num_mel_bins": tensors["model.encoder.conv1.weight"].shape[1],
        "max_source_positions": len(tensors["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(tensors["model.decoder.embed_positions.weight"]),
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }
