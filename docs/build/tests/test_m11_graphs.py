from functools import partial

import pytest
from built.attention import paged_attention
from built.graphs import capture_sizes, padding


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (20, [1, 2, 4, 8, 16, 20]), (24, [1, 2, 4, 8, 16, 24])],
)
def test_few_sizes_are_recorded(most, sizes):
    assert capture_sizes(most) == sizes


def test_padding_touches_no_block_of_a_sequence(model, start):
    engine, step = start(), padding(3, max_blocks=5)
    assert [value.shape for value in vars(step).values()] == [(3,)] * 4 + [(3, 5), (3,)]
    before = engine.cache.kv.clone()
    hidden = model.forward(step.token_ids, step.positions, partial(engine.cache.attend, step, paged_attention))
    assert hidden.isfinite().all() and (engine.cache.kv != before).any(dim=(0, 1, 3, 4, 5)).tolist() == [
        False
    ] * 100 + [True]
    assert len({value.data_ptr() for value in vars(step).values()}) == 6


def test_decodes_are_replayed_and_no_answer_changes(prompts, start, run, watch_sizes):
    requests, answers = prompts([9, 3, 12, 5]), []
    for captured in (False, True):
        engine = start(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=20)
        if captured:
            engine.capture()
        sizes = watch_sizes(engine.model)
        for number, prompt in enumerate(requests):
            engine.add_request(str(number), prompt, max_tokens=4 + number, temperature=0.5, seed=number)
        answers.append((run(engine), sizes))
    (plain, all_steps), (replayed, steps) = answers
    assert plain == replayed
    assert len(steps) < len(all_steps), "Python computes only steps with prompts"
    chunk = padding(4, max_blocks=5)
    chunk.last = chunk.last[:3]
    assert [engine.graphs.fits(step) for step in (padding(4, 5), padding(5, 5), chunk)] == [True, False, False]
