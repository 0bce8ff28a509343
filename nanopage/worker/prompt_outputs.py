"""What a step returns for prompts in addition to tokens: log-probabilities of prompt tokens, and pooled states."""

from torch import Tensor

from nanopage.models.decoder import Decoder
from nanopage.sampling.logprobs import make_tables, top_logprobs
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import Batch, PromptLogprobs

PROMPT_LOGPROB_ROWS = 256  # prompt positions whose logits are in memory at once: [256, vocab_size]


def wants_prompt_logprobs(batch: Batch, table: SequenceTable) -> bool:
    """Whether a sequence of the batch asked for log-probabilities of its prompt."""
    return any(table.sampling.settings[row].prompt_logprobs is not None for row in batch.rows)


def prompt_logprobs(model: Decoder, table: SequenceTable, batch: Batch, hidden: Tensor) -> list[PromptLogprobs]:
    """Log-probabilities of prompt tokens, for the sequences that asked for them.

    Args: hidden: [T, hidden_size], of all tokens of the batch. Each predicts the next token of its prompt.
    """
    results = []
    parts = hidden.split(batch.counts)
    for row, start, part in zip(batch.rows, batch.starts, parts, strict=True):
        num = table.sampling.settings[row].prompt_logprobs
        end = min(start + len(part), int(table.num_prompt_tokens[row]) - 1)
        if num is None or start >= end:
            continue
        tables = []
        for begin in range(start, end, PROMPT_LOGPROB_ROWS):
            stop = min(begin + PROMPT_LOGPROB_ROWS, end)
            logits = model.logits(part[begin - start : stop - start])
            targets = table.tokens[row, begin + 1 : stop + 1].long()  # position i predicts token i + 1
            top = [tensor.cpu() for tensor in top_logprobs(logits, targets, num)]
            tables += make_tables(targets.tolist(), top)
        results.append(PromptLogprobs(row, start + 1, tables))
    return results


def pool(model: Decoder, table: SequenceTable, batch: Batch, hidden: Tensor) -> list[tuple[int, int, Tensor]]:
    """Pool the hidden states of each sequence that asked for it (see `PooledStates`).

    Args: hidden: [T, hidden_size], of all tokens of the batch, before the last norm.
    Returns: (row, first position, float32 vector).
    """
    results = []
    for row, start, states in zip(batch.rows, batch.starts, hidden.split(batch.counts), strict=True):
        pooling_type = table.sampling.settings[row].pooling_type
        if pooling_type == "MEAN":
            results.append((row, start, model.norm(states).float().sum(0)))
        elif pooling_type is not None and start + len(states) >= table.num_prompt_tokens[row]:
            state = model.norm(states[:1] if pooling_type == "CLS" else states[-1:])
            results.append((row, start, (state if model.score is None else model.score(state))[0].float()))
    return results
