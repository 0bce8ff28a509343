from collections import Counter

import pytest
import torch
from built.blocks import BlockManager, Sequence
from built.sampling import generator_for, sample

SAMPLED = {"max_tokens": 8, "temperature": 1.5}


def test_tokens_come_with_their_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -torch.inf])
    counts = Counter(sample(logits, 2.0, generator_for(0, 0, position)) for position in range(4000))
    for token, probability in enumerate((logits / 2).softmax(0).tolist()):
        assert counts[token] / 4000 == pytest.approx(probability, abs=0.03)


def test_temperature_0_takes_the_most_likely_token():
    assert sample(torch.tensor([0.0, 3.0, 2.9]), 0.0, generator_for(0, 0, 0)) == 1


def test_the_noise_is_that_of_the_page():
    logits, generator = torch.randn(50), generator_for(3, 1, 7)
    uniform = torch.rand(50, generator=generator_for(3, 1, 7), dtype=torch.float64)
    assert sample(logits, 0.7, generator) == int((logits.double() / 0.7 - (-uniform.log()).log()).argmax())


def test_a_shared_block_is_copied_before_it_is_written_to():
    blocks, parent, child = BlockManager(9, 4), Sequence("P", list(range(6)), 9), Sequence("P", list(range(6)), 9)
    assert blocks.grow(parent, 6)
    parent.num_computed = 6
    blocks.share(child, parent.block_table, 6)
    assert child.block_table == [0, 1] and child.num_computed == 6 and blocks.ref_counts == {0: 2, 1: 2}
    assert blocks.grow(parent, 7) and parent.block_table == [0, 2] and blocks.copies == [(1, 2)]
    assert blocks.grow(child, 7) and child.block_table == [0, 1], "the last owner writes in place"
    assert blocks.grow(child, 9) and blocks.copies == [(1, 2)] and blocks.ref_counts == {0: 2, 1: 1, 2: 1, 3: 1}


def test_too_few_blocks_for_a_copy_change_nothing():
    blocks, parent, child = BlockManager(2, 4), Sequence("P", list(range(6)), 9), Sequence("P", list(range(6)), 9)
    assert blocks.grow(parent, 6)
    parent.num_computed = 6
    blocks.share(child, parent.block_table, 6)
    assert not blocks.grow(parent, 7)
    assert parent.block_table == [0, 1] and blocks.copies == [] and blocks.ref_counts == {0: 2, 1: 2}


def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside(prompts, start, run):
    a, *others = prompts([6, 9, 3, 15, 7])
    engine = start()
    engine.add_request("A", a, seed=5, n=3, **SAMPLED)
    alone = run(engine)
    assert len(set(map(tuple, alone.values()))) == 3, "the answers differ"
    engine = start(num_blocks=9, max_num_batched_tokens=6, max_num_seqs=6)
    for number, prompt in enumerate(others):
        engine.add_request(str(number), prompt, seed=number, **SAMPLED)
    engine.add_request("A", a, seed=5, n=3, **SAMPLED)
    crowd = run(engine)
    assert engine.scheduler.num_preemptions > 0
    assert {key: tokens for key, tokens in crowd.items() if key[0] == "A"} == alone
    engine.add_request("A", a, seed=6, **SAMPLED)
    assert run(engine)["A", 0] != alone["A", 0]


def test_answers_share_the_blocks_of_their_prompt(prompts, start):
    engine = start()
    engine.add_request("A", prompts([10])[0], n=4, seed=1, **SAMPLED)
    assert len(engine.step()) == 4
    assert engine.blocks.ref_counts == {0: 4, 1: 4, 2: 4}
    engine.step()
    assert engine.blocks.ref_counts == {0: 4, 1: 4, 2: 1, 3: 1, 4: 1, 5: 1}, "the third block was not full"
    engine.abort("A")
    assert not engine.has_unfinished() and engine.blocks.num_free == 100


def test_answers_take_places(prompts, start):
    engine = start(max_num_seqs=4)
    a, b = prompts([5, 6])
    with pytest.raises(ValueError, match="A: n must"):
        engine.add_request("A", a, n=5, **SAMPLED)
    engine.add_request("A", a, n=3, **SAMPLED)
    engine.add_request("B", b, n=2, **SAMPLED)
    engine.step()
    engine.step()
    assert [seq.request_id for seq in engine.running] == ["A"] * 3
