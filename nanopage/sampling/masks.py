"""Masks: which tokens may be sampled, as bits that the engine sends with each Batch (`Batch.masks`)."""

import numpy as np
import torch
from torch import Tensor

from nanopage.device import to_device


def apply_masks(logits: Tensor, masks: dict[int, bytes]) -> None:
    """Set the logits of the tokens that masks do not allow to -inf, in place. Does not synchronize with the device.

    Args:
        logits: [B, vocab_size].
        masks: row of the logits -> its bits: token i is bit i % 8 of byte i // 8. All have the same length.

    Raises: ValueError if a mask has fewer than vocab_size bits.
    """
    num_masks, vocab_size = len(masks), logits.shape[1]
    packed = np.frombuffer(bytearray(b"".join(masks.values())), dtype=np.uint8).reshape(num_masks, -1)
    if packed.shape[1] * 8 < vocab_size:
        raise ValueError(f"masks of {packed.shape[1]} bytes for a vocabulary of {vocab_size} tokens")
    forbidden = unpack(packed, vocab_size, logits.device) == 0
    if list(masks) == list(range(len(logits))):
        logits.masked_fill_(forbidden, -torch.inf)
        return
    rows = to_device(list(masks), logits.device)
    logits.index_copy_(0, rows, logits.index_select(0, rows).masked_fill_(forbidden, -torch.inf))


def unpack(packed: np.ndarray, vocab_size: int, device: torch.device) -> Tensor:
    """The bits of uint8 [M, bytes], a byte each: uint8 [M, vocab_size] on a device."""
    if device.type == "cpu":  # with NumPy, which has a loop for this
        return torch.from_numpy(np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little"))
    return unpack_there(to_device(torch.from_numpy(packed), device), vocab_size)


def unpack_there(packed: Tensor, vocab_size: int) -> Tensor:
    """Like `unpack`, but on the device that has the packed bits."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed[:, :, None] >> shifts).bitwise_and_(1).flatten(1)[:, :vocab_size]
