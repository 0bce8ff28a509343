"""The completions of a beam search in vLLM's shape."""

from typing import cast

from nanopage.outputs import BeamSearchSequence, RequestOutput
from nanopage.text.tokenizer import Tokenizer


def read_sequences(output: RequestOutput, tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
    """Each completion, in order. Args: tokenizer: None if the model has none."""
    sequences = []
    for completion in output.outputs:
        tokens = output.prompt_token_ids + completion.token_ids
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
        total = cast(float, completion.cumulative_logprob)
        reason, stop = completion.finish_reason, completion.token_ids[-1:]
        sequences.append(BeamSearchSequence(tokens, total, text, reason, stop[0] if reason == "stop" else None))
    return sequences
