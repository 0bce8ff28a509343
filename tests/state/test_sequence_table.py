"""SequenceTable against lists: what batches change, and nothing else."""

import random
from dataclasses import dataclass, replace

import pytest
import torch

from nanopage.state.sequence_table import SequenceTable, write_entries
from nanopage.step import Batch, BlockUpdate, Fork, NewSequence, SamplingSettings

CPU = torch.device("cpu")
VOCAB_SIZE = 50


def make_table(num_rows=6, max_model_len=20, block_size=4):
    return SequenceTable(num_rows, max_model_len, block_size, VOCAB_SIZE, CPU)


def new(row, token_ids, num_prompt_tokens=None, seed=0, **settings):
    count = len(token_ids) if num_prompt_tokens is None else num_prompt_tokens
    return NewSequence(row, token_ids, count, seed, SamplingSettings(**settings))


def test_shapes():
    table = make_table(num_rows=6, max_model_len=18, block_size=4)
    assert table.tokens.shape == (6, 19), "a token may be sampled behind the last one that fits"
    assert table.block_tables.shape == (6, 5)
    assert table.num_bytes == (6 * 19 + 6 * 5) * 8
    assert table.num_prompt_tokens.shape == (6,)


def test_a_new_sequence_has_its_tokens_in_its_row():
    table = make_table()
    table.update(Batch(new=[new(3, [7, 8, 9], 2), new(1, [5])]))
    assert table.tokens[3, :3].tolist() == [7, 8, 9]
    assert table.tokens[1, :1].tolist() == [5]
    assert table.num_prompt_tokens[[3, 1]].tolist() == [2, 1]
    assert not table.tokens[[0, 2, 4, 5]].any()


def test_an_empty_batch_changes_nothing():
    table = make_table()
    table.update(Batch(new=[new(3, [7, 8, 9], seed=4)], blocks=[BlockUpdate(3, 0, [2])]))
    before, version = (table.tokens.clone(), table.block_tables.clone()), table.sampling.version
    table.update(Batch(rows=[3], starts=[2], counts=[1], sampled_from=[0], sampled_rows=[3]))
    assert torch.equal(table.tokens, before[0]) and torch.equal(table.block_tables, before[1])
    assert table.sampling.version == version


def test_blocks_are_written_from_the_first_that_changed():
    table = make_table()
    table.update(Batch(blocks=[BlockUpdate(2, 0, [9, 8, 7]), BlockUpdate(4, 0, [1])]))
    table.update(Batch(blocks=[BlockUpdate(2, 2, [6, 5]), BlockUpdate(0, 4, [3])]))
    assert table.block_tables[2].tolist() == [9, 8, 6, 5, 0]
    assert table.block_tables[4].tolist() == [1, 0, 0, 0, 0]
    assert table.block_tables[0].tolist() == [0, 0, 0, 0, 3]


def test_a_fork_copies_tokens_and_settings_but_has_its_own_seed():
    table = make_table()
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "logit_bias": {3: 1.0}, "logprobs": 4, "min_tokens": 2}
    table.update(Batch(new=[new(1, [1, 2, 3, 4, 5], 4, 11, **settings)], blocks=[BlockUpdate(1, 0, [7, 9])]))
    table.update(Batch(forks=[Fork(1, 4, 5, 12), Fork(1, 0, 5, -13)]))
    sampling = table.sampling
    for row, seed in ((4, 12), (0, -13), (1, 11)):
        assert table.tokens[row, :5].tolist() == [1, 2, 3, 4, 5]
        assert table.num_prompt_tokens[row] == 4
        assert sampling.seed[row] == seed
        assert (sampling.temperature[row], sampling.top_k[row], sampling.top_p[row]) == (0.5, 3, 0.9)
        assert sampling.settings[row] == SamplingSettings(**settings)
        assert (sampling.truncated[row], sampling.constrained[row]) == (True, True)
        assert (sampling.greedy[row], sampling.penalized[row], sampling.num_logprobs[row]) == (False, False, 4)


def test_a_fork_can_begin_with_a_sequence_of_the_same_batch_and_be_sent_its_blocks_there():
    table = make_table()
    table.update(
        Batch(
            new=[new(2, [1, 2, 3, 4, 5, 6], 6, 1, repetition_penalty=1.5)],
            forks=[Fork(2, 5, 6, 2)],
            blocks=[BlockUpdate(2, 0, [3, 4]), BlockUpdate(5, 0, [3, 8])],
            tokens=[(5, 6, 44)],
        )
    )
    assert table.tokens[5, :7].tolist() == [1, 2, 3, 4, 5, 6, 44]
    assert table.tokens[2, 6] == 0
    assert [table.block_tables[row, :2].tolist() for row in (2, 5)] == [[3, 4], [3, 8]]
    assert table.sampling.penalized[[2, 5]].all()


def test_a_row_that_another_sequence_gets_keeps_nothing_of_the_last():
    table = make_table()
    strict = {"temperature": 0, "min_p": 0.1, "presence_penalty": 1.0, "allowed_token_ids": [1], "logprobs": 2}
    table.update(Batch(new=[new(3, [7, 8, 9], seed=4, **strict)]))
    table.update(Batch(new=[new(3, [5], seed=6)]))
    fresh, other = table.sampling, make_table()
    other.update(Batch(new=[new(3, [5], seed=6)]))
    for name in ("greedy", "truncated", "penalized", "constrained", "num_logprobs", "settings"):
        assert getattr(fresh, name)[3] == getattr(other.sampling, name)[3], name
    assert torch.equal(fresh.numbers[:, 3], other.sampling.numbers[:, 3])
    assert torch.equal(fresh.integers[:, 3], other.sampling.integers[:, 3])
    assert table.num_prompt_tokens[3] == 1


@pytest.mark.parametrize("top_k", [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 2**62, 10**30])
def test_a_top_k_that_keeps_everything_is_off(top_k):
    table = make_table()
    table.update(Batch(new=[new(0, [1], top_k=top_k)]))
    assert table.sampling.top_k[0] == VOCAB_SIZE
    assert not table.sampling.truncated[0]


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_have_64_bits(seed):
    table = make_table()
    table.update(Batch(new=[new(0, [1], seed=seed)]))
    table.update(Batch(forks=[Fork(0, 1, 1, seed)]))
    assert table.sampling.seed[:2].tolist() == [seed, seed]


def test_write_entries():
    table = torch.zeros(3, 4, dtype=torch.int64)
    write_entries(table, [])
    write_entries(table, [(2, 1, [5, 6]), (0, 3, [7]), (1, 0, [])])
    assert table.tolist() == [[0, 0, 0, 7], [0, 0, 0, 0], [0, 5, 6, 0]]


@dataclass
class Row:
    tokens: list[int]
    blocks: list[int]
    num_prompt_tokens: int
    seed: int
    settings: SamplingSettings


@pytest.mark.parametrize("seed", range(20))
def test_any_batches_leave_in_the_table_what_they_would_leave_in_lists(seed):
    rng = random.Random(seed)
    num_rows, longest, block_size = 6, 20, rng.choice([1, 3, 4, 16])
    table = make_table(num_rows, longest, block_size)
    rows: dict[int, Row] = {}

    def draw_settings():
        some = [{"temperature": 0.0}, {"top_k": 5}, {"frequency_penalty": 0.5}, {"logit_bias": {4: 2.0}}, {}]
        return SamplingSettings(**rng.choice(some))

    for _ in range(40):
        batch = Batch()
        for row in [row for row in rows if rng.random() < 0.2]:
            del rows[row]  # given back
        begun = rng.sample(sorted(set(range(num_rows)) - rows.keys()), rng.randint(0, num_rows - len(rows)))
        for row in begun:
            parents = sorted(rows.keys() - {fork.row for fork in batch.forks})  # forks of one batch do not fork again
            if parents and rng.random() < 0.5:
                source = rows[parent := rng.choice(parents)]
                count = rng.randint(1, len(source.tokens))
                rows[row] = replace(source, tokens=source.tokens[:count], blocks=[], seed=rng.getrandbits(40))
                batch.forks.append(Fork(parent, row, count, rows[row].seed))
                continue
            tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, longest - 4))]
            made = NewSequence(row, tokens, rng.randint(1, len(tokens)), rng.getrandbits(40), draw_settings())
            batch.new.append(made)
            rows[row] = Row(list(tokens), [], made.num_prompt_tokens, made.seed, made.sampling)
        for index, row in rows.items():
            if rng.random() < 0.5 or len(row.blocks) * block_size < len(row.tokens):
                first = rng.randint(0, len(row.blocks))
                row.blocks[first:] = [rng.randrange(99) for _ in range(-(-len(row.tokens) // block_size) - first)]
                batch.blocks.append(BlockUpdate(index, first, row.blocks[first:]))
        for index, row in rows.items():
            if len(row.tokens) < longest and rng.random() < 0.4:
                token = rng.randrange(VOCAB_SIZE)
                batch.tokens.append((index, len(row.tokens), token))
                row.tokens.append(token)
        table.update(batch)
        for index, row in rows.items():
            assert table.tokens[index, : len(row.tokens)].tolist() == row.tokens
            assert table.block_tables[index, : len(row.blocks)].tolist() == row.blocks
            assert table.num_prompt_tokens[index] == row.num_prompt_tokens
            assert table.sampling.settings[index] == row.settings
            assert table.sampling.seed[index] == row.seed
            assert table.sampling.greedy[index] == (row.settings.temperature == 0)
            assert table.sampling.penalized[index] == (row.settings.frequency_penalty != 0)
