"""TranscriptSampler: the one rule of Whisper's timestamps that needs logits."""

import numpy as np
import torch
from torch import Tensor

from nanopage.audio.mel import NUM_TIMESTAMPS
from nanopage.sampling.sampler import Sampler
from nanopage.sampling.samples import Samples


class TranscriptSampler(Sampler):
    """Samples a timestamp if all timestamps together are likelier than any other token alone: the model says that a
    segment ends, and is not sure when. This holds for rows with masks, which are transcripts (rules.py).

    The log-probabilities of such a row are those that the rules leave, as Whisper's thresholds expect. Those of its
    first token are the model's own: they show whether anybody speaks. Only there are other tokens listed.
    """

    def __call__(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray, masks: dict[int, bytes] | None = None
    ) -> Samples:
        """See `Sampler`."""
        if not masks:
            return super().__call__(logits, rows, positions, masks)
        masked = np.isin(np.arange(len(rows)), list(masks))
        later = masked & (positions > self.table.num_prompt_tokens[rows])
        changed = self.change(logits, rows, positions, masks)
        prefer_timestamps(changed, torch.from_numpy(masked).to(logits.device))
        tokens = self.sample(changed, rows, positions)
        self.table.record(rows, positions, tokens)
        shown = torch.where(torch.from_numpy(later).to(logits.device)[:, None], changed, logits.to(changed.dtype))
        num_logprobs = self.table.sampling.num_logprobs[rows]
        return Samples(tokens, shown, np.where(later, np.minimum(num_logprobs, 0), num_logprobs))


def prefer_timestamps(logits: Tensor, which: Tensor) -> None:
    """Set all logits but those of timestamps to -inf where the rule asks for it, in place.

    Args:
        logits: [B, vocab_size].
        which: the rows that have the rule: bool [B].
    """
    others, times = logits[:, :-NUM_TIMESTAMPS], logits[:, -NUM_TIMESTAMPS:]
    which = which & (times.logsumexp(-1) > others.amax(-1))
    others.masked_fill_(which[:, None], -torch.inf)
