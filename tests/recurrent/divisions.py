"""Random divisions of sequences into steps, for the tests of what computes states."""

from types import SimpleNamespace

import numpy as np
import torch

from nanopage.recurrent.sequences import divide


def check_any_division(rng, run, sequences, states, by_definition):
    """Run sequences in random steps, and compare what comes out, and the last states, with the definition.

    Also if the last tokens of steps are drafts, in half of the worlds: the state is then the one before them, and later
    steps compute them again.

    Args:
        run: computes a step: called with the tensors, the states before it and the pages.
        sequences: the tensors of each sequence, [tokens, ...] each. states: before them.
        by_definition: what a whole sequence gives: called with its tensors and its state.
    """
    lengths, states = [len(tensors[0]) for tensors in sequences], list(states)
    expected = [by_definition(*tensors, state) for tensors, state in zip(sequences, states, strict=True)]
    drafts, done = rng.random() < 0.5, [0] * len(lengths)
    while done != lengths:
        left = [i for i, length in enumerate(lengths) if done[i] < length]
        chosen = rng.sample(left, rng.randint(1, len(left)))
        counts = {i: rng.choice([1, rng.randint(1, lengths[i] - done[i])]) for i in chosen}
        kept = {i: rng.randint(1, count) if drafts else count for i, count in counts.items()}
        order = sorted(chosen, key=lambda i: counts[i] > 1)
        tokens = [[tensor[done[i] : done[i] + counts[i]] for tensor in sequences[i]] for i in order]
        before = torch.stack([states[i] for i in order])
        joined = [torch.cat(parts) for parts in zip(*tokens, strict=True)]
        step = pages([counts[i] for i in order], [kept[i] for i in order])
        out, after = run_groups(run, joined, before, step)
        torch.testing.assert_close(before, torch.stack([states[i] for i in order]), rtol=0, atol=0)  # not written to
        for i, rows, state in zip(order, out.split([counts[i] for i in order]), after, strict=True):
            torch.testing.assert_close(rows, expected[i][0][done[i] : done[i] + counts[i]], rtol=1e-10, atol=1e-10)
            states[i], done[i] = state, done[i] + kept[i]
    for state, (_, last) in zip(states, expected, strict=True):
        torch.testing.assert_close(state, last, rtol=1e-10, atol=1e-10)


def run_groups(run, tensors, before, step):
    """As `mix`: sequences with a single token by themselves. Returns the output, and the states."""
    groups = divide(step)
    tokens = zip(*(tensor.split([group.num_rows for group in groups]) for tensor in tensors), strict=True)
    states = before.split([len(group.sources) for group in groups])
    made = [run(*rows, of, group.prompts) for rows, of, group in zip(tokens, states, groups, strict=True)]
    return [torch.cat(parts) for parts in zip(*made, strict=True)]


def pages(counts, kept):
    """The StatePages of sequences with so many tokens, as far as a computation needs them."""
    counts, kept, blocks = np.array(counts), np.array(kept), torch.zeros(len(counts), dtype=torch.int64)
    return SimpleNamespace(sources=blocks, targets=blocks, starts=counts * 0, counts=counts, kept=kept, divided=None)
