"""DRY ("don't repeat yourself"): a penalty on tokens that would lengthen a repetition in the output (p-e-w 2024, in
text-generation-webui and llama.cpp).

If the last L tokens of the output have occurred in it before, the token that followed them there loses
`dry_multiplier` * `dry_base` ** (L - `dry_allowed_length`), if L is at least `dry_allowed_length`. Of several earlier
places, the longest match counts. A repetition does not reach across a breaker, a token with one of the texts of
`dry_sequence_breakers`, and breakers are never penalized. llama.cpp looks at the prompt, too; here, an answer may
repeat the question.

Like the other penalties, it is computed from the sequence table alone, where drafts stand as well. The work for a token
is bounded: MOST_TOKENS earlier places are compared with the last LONGEST_MATCH tokens.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from nanopage.device import to_device
from nanopage.params import LONGEST_MATCH
from nanopage.state.sequence_table import SequenceTable

MOST_TOKENS = 2048  # of the output, the last ones


def apply_dry(table: SequenceTable, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
    """Apply DRY to the rows of a table that have it, in place. Does not synchronize with the device. Args: as of
    `Constraints.apply`."""
    lengths = np.minimum(positions - table.num_prompt_tokens[rows], MOST_TOKENS)
    which = np.flatnonzero(table.sampling.dry[rows] & (lengths > 1))  # P rows of the logits
    if not len(which):
        return
    sampling, vocab_size, device = table.sampling, logits.shape[1], logits.device
    numbers = np.stack([rows[which], positions[which], lengths[which], which])
    row, position, length, in_logits = to_device(torch.from_numpy(numbers), device)
    back = torch.arange(int(lengths[which].max()), device=device)
    # [P, W]: the output, the last token first, and -1 behind its beginning.
    tokens = table.tokens[row[:, None], (position[:, None] - 1 - back).clamp(min=0)]
    tokens.masked_fill_(back >= length[:, None], -1)
    padded = pad(tokens, (0, LONGEST_MATCH), value=-1)
    assert sampling.breakers is not None
    breaks = sampling.breakers[row[:, None], padded[:, :LONGEST_MATCH].clamp(min=0)]
    unbroken = count_first(~breaks)
    # C earlier places of the last token. A GPU takes all places: choosing some would mean synchronizing.
    same = tokens[:, 1:] == tokens[:, :1]
    each = torch.arange(same.numel(), device=device) if device.type != "cpu" else same.flatten().nonzero().squeeze(1)
    sequence, place = each // same.shape[1], each % same.shape[1]
    row, following = row[sequence], tokens[sequence, place].long().clamp_(min=0)
    ending_there = padded.unfold(1, LONGEST_MATCH, 1)[sequence, place + 1]  # [C, LONGEST_MATCH]
    matches = count_first(ending_there == padded[sequence, :LONGEST_MATCH])
    multiplier, base, allowed = sampling.dry_numbers[:, row]
    excess = torch.minimum(matches, unbroken[sequence]) - allowed
    penalties = multiplier * base**excess
    penalties.masked_fill_((excess < 0) | sampling.breakers[row, following], 0)
    index, flat = in_logits[sequence] * vocab_size + following, logits.view(-1)
    values = flat.index_select(0, index) - penalties.to(logits.dtype)
    flat.scatter_reduce_(0, index, values, "amin")


def count_first(flags: Tensor) -> Tensor:
    """How many of the last dimension's flags are true before the first that is false: uint8 [...].

    Args: flags: bool [..., n], n < 256.
    """
    size = flags.shape[-1]
    left = torch.arange(size, 0, -1, dtype=torch.uint8, device=flags.device)
    return size - (left * ~flags).amax(dim=-1)
