"""The file that whisper.cpp reads: tensors and tokens."""

import io
import struct

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from benchmarks.whisper_cpp import BLOCK, FLOAT16, FLOAT32, INTEGERS, token_bytes, write_tensor


def read_tensor(content):
    """(name, kind, values) of a tensor, read as whisper.cpp does."""
    num_dims, length, kind = struct.unpack_from("<3i", content)
    shape = struct.unpack_from(f"<{num_dims}i", content, 12)[::-1]
    start = 12 + 4 * num_dims
    name, data = content[start : start + length].decode(), content[start + length :]
    if kind != INTEGERS:
        return name, kind, np.frombuffer(data, "<f4" if kind == FLOAT32 else "<f2").reshape(shape)
    blocks = np.frombuffer(data, np.int8).reshape(-1, BLOCK + 2)
    scales = np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)
    return name, kind, (scales * blocks[:, 2:]).reshape(shape)


@pytest.mark.parametrize("kind", [FLOAT16, INTEGERS])
def test_tensors_are_in_the_types_that_whisper_cpp_expects(kind):
    tensors = {
        "decoder.blocks.0.mlp.0.weight": ((6, 2 * BLOCK), kind),
        "encoder.positional_embedding": ((5, BLOCK), FLOAT32),
        "encoder.conv1.weight": ((4, 3, 3), FLOAT16),
        "encoder.conv1.bias": ((4,), FLOAT32),
        "decoder.ln.weight": ((7,), FLOAT32),
    }
    for name, (shape, expected) in tensors.items():
        values, out = np.random.default_rng(0).normal(size=shape).astype(np.float32), io.BytesIO()
        if len(shape) == 2:
            values[0, :BLOCK] = 0
        write_tensor(out, name, values, kind)
        got = read_tensor(out.getvalue())
        assert got[:2] == (name, expected)
        assert got[2].shape == ((4, 1) if name.endswith("conv1.bias") else shape)
        assert np.abs(got[2].reshape(shape) - values).max() < (0.02 if expected == INTEGERS else 2e-3)


def test_tokens_are_bytes():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"Ġthe": 0, "Ã©": 1} | {letter: index for index, letter in enumerate(alphabet, 2)}
    the, accent, *single = token_bytes(vocabulary)
    assert (the, accent) == (b" the", "é".encode()) and sorted(single) == [bytes([byte]) for byte in range(256)]
