"""Masks as packed bits, applied to logits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanopage.sampling.masks import apply_masks, unpack, unpack_there

CPU = torch.device("cpu")


def pack(allowed: set[int], num_bytes: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(num_bytes, "little")


@given(st.integers(1, 100), st.data())
def test_only_the_tokens_with_a_bit_keep_their_logits(vocab_size, data):
    num_rows, num_bytes = data.draw(st.integers(1, 5)), -(-vocab_size // 32) * 4
    rows = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1))
    allowed = {row: data.draw(st.sets(st.integers(0, num_bytes * 8 - 1))) for row in rows}
    logits = torch.randn(num_rows, vocab_size)
    changed = logits.clone()
    apply_masks(changed, {row: pack(tokens, num_bytes) for row, tokens in allowed.items()})
    for row in range(num_rows):
        for token in range(vocab_size):
            forbidden = row in allowed and token not in allowed[row]
            assert changed[row, token] == (-torch.inf if forbidden else logits[row, token])


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_a_gpu_unpacks_the_same_bits(num_masks, seed):
    packed = np.random.default_rng(seed).integers(0, 256, (num_masks, 12), dtype=np.uint8)
    for vocab_size in (96, 95, 65, 1):
        expected = unpack(packed, vocab_size, CPU)
        assert torch.equal(unpack_there(torch.from_numpy(packed), vocab_size), expected)
        assert expected.sum() > 0 or vocab_size == 1


def test_a_mask_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="masks of 4 bytes for a vocabulary of 33 tokens"):
        apply_masks(torch.zeros(1, 33), {0: bytes(4)})


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0]])
def test_masks_on_a_gpu_are_those_on_a_cpu(rows):
    masks = {row: np.random.default_rng(row).bytes(128) for row in rows}
    logits = torch.randn(3, 1000)
    expected, changed = logits.clone(), logits.cuda()
    apply_masks(expected, masks)
    apply_masks(changed, masks)
    assert torch.equal(changed.cpu(), expected)
