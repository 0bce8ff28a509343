"""whisper.cpp for transcriptions.py, by pywhispercpp, and the file in ggml's format that it reads.

    python3 -m venv ~/.cache/nanopage/peers/whispercpp
    ~/.cache/nanopage/peers/whispercpp/bin/pip install pywhispercpp soundfile soxr typer

The file is a header, the filters of the spectrogram, the bytes of each token and the tensors, as `whisper_model_load`
of whisper.cpp reads them.
"""

import json
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanopage.audio.mel import FFT, mel_filters
from nanopage.quantization.ctranslate2 import whisper_tensors

MAGIC = 0x67676D6C
FLOAT32, FLOAT16, INTEGERS = 0, 1, 8  # types of tensors; integers: int8 with a scale for each 32 (Q8_0)
# Types of files, and of matrices in them. Convolutions are in float16, which whisper.cpp needs, and vectors in float32.
# Files of integers have a version of their format, 2, in thousands.
FILE_TYPES = {"float32": (1, FLOAT16), "int8": (2007, INTEGERS)}
BLOCK = 32  # integers with a scale
# Parts of the names in transformers: in whisper.cpp, which has OpenAI's.
NAMES = {
    "model.": "",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "embed_tokens": "token_embedding",
    "encoder.layer_norm": "encoder.ln_post",
    "decoder.layer_norm": "decoder.ln",
    ".layers.": ".blocks.",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln",
    "self_attn": "attn",
    "encoder_attn": "cross_attn",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "out_proj": "out",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
}


def write_ggml(directory: Path, file: Path, dtype: str) -> None:
    """Write a Whisper in CTranslate2's format as a file for whisper.cpp.

    Args: dtype: int8 or float32. For float32, whisper.cpp has matrices in float16, its default.
    """
    tensors, heads = whisper_tensors(directory / "model.bin")
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    embed, conv = tensors["model.decoder.embed_tokens.weight"], tensors["model.encoder.conv1.weight"]
    sizes = []
    for part in ("encoder", "decoder"):
        layers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{part}.layers.")}
        positions, size = tensors[f"model.{part}.embed_positions.weight"].shape
        sizes += [positions, size, heads[part], len(layers)]
    filters, (file_type, kind) = mel_filters(conv.shape[1]), FILE_TYPES[dtype]
    with file.open("wb") as out:
        out.write(struct.pack("<12i", MAGIC, len(embed), *sizes, conv.shape[1], file_type))
        out.write(struct.pack("<2i", conv.shape[1], FFT // 2 + 1) + filters.astype("<f4").tobytes())
        tokens = token_bytes(tokenizer["model"]["vocab"])
        out.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            out.write(struct.pack("<i", len(token)) + token)
        for name, tensor in tensors.items():
            for there, here in NAMES.items():
                name = name.replace(there, here)
            write_tensor(out, name, tensor, kind)


def write_tensor(out: BinaryIO, name: str, tensor: np.ndarray, kind: int) -> None:
    """Write a tensor. Args: kind: of matrices."""
    if name.startswith("encoder.conv") and name.endswith("bias"):
        tensor = tensor[:, None]
    if tensor.ndim == 3:
        kind = FLOAT16
    elif tensor.ndim == 1 or not name.endswith("weight"):
        kind = FLOAT32
    shape = tensor.shape[::-1]
    out.write(struct.pack(f"<3i{len(shape)}i", len(shape), len(name), kind, *shape) + name.encode())
    out.write(as_integers(tensor) if kind == INTEGERS else tensor.astype("<f2" if kind == FLOAT16 else "<f4").tobytes())


def as_integers(matrix: np.ndarray) -> bytes:
    """Blocks of a float16 scale and 32 integers."""
    values = matrix.astype(np.float32).reshape(-1, BLOCK)
    scales = np.abs(values).max(axis=1, keepdims=True) / 127
    rounded = np.round(values / np.where(scales == 0, 1, scales)).astype(np.int8)
    return np.concatenate([scales.astype("<f2").view(np.int8), rounded], axis=1).tobytes()


def token_bytes(vocabulary: dict[str, int]) -> list[bytes]:
    """The bytes of each token of text. GPT-2's vocabulary has a printable character for each byte: itself, or one from
    256 on for those that are not printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    bytes_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return [bytes(map(bytes_of.__getitem__, token)) for token in sorted(vocabulary, key=vocabulary.__getitem__)]
