import pytest
from built.blocks import BlockManager, Sequence
from built.generate import generate
from built.scheduler import Scheduler


def scheduled(scheduler):
    return [(seq.request_id, count) for seq, count in scheduler.schedule()]


def computed(scheduler):
    """As if the step had been computed: each sequence has one token more, which is left to compute."""
    for seq in scheduler.running:
        seq.num_computed = len(seq.token_ids)
        seq.token_ids.append(0)


def test_a_request_that_comes_later_joins_the_next_step():
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=2, max_num_batched_tokens=100)
    seqs = [Sequence(name, [1] * length, 9) for name, length in (("A", 6), ("B", 3), ("C", 5))]
    scheduler.waiting.append(seqs[0])
    assert scheduled(scheduler) == [("A", 6)]
    computed(scheduler)
    scheduler.waiting += seqs[1:]
    assert scheduled(scheduler) == [("A", 1), ("B", 3)], "two places, so C waits"
    computed(scheduler)
    scheduler.finish(seqs[0])
    assert scheduled(scheduler) == [("B", 1), ("C", 5)]


def test_the_last_one_gives_up_its_blocks_when_they_run_out():
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=9, max_num_batched_tokens=100)
    a, b = Sequence("A", list(range(7)), 9), Sequence("B", list(range(50, 58)), 9)
    scheduler.waiting += [a, b]
    assert scheduled(scheduler) == [("A", 7), ("B", 8)]
    computed(scheduler)
    assert scheduled(scheduler) == [("A", 1)], "the ninth token of B needs a third block"
    assert list(scheduler.waiting) == [b] and b.num_computed == 0 and b.block_table == [] and len(b.token_ids) == 9
    assert scheduler.running == [a] and scheduler.num_preemptions == 1


def test_nobody_starts_without_blocks_for_all_its_tokens():
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=9, max_num_batched_tokens=100)
    scheduler.waiting += [Sequence(name, [1] * length, 9) for name, length in (("A", 7), ("B", 12), ("C", 2))]
    assert scheduled(scheduler) == [("A", 7)], "B does not fit, and C does not overtake it"


def test_answers_are_those_of_each_request_alone(model, prompts, start, run):
    engine = start(num_blocks=12, max_num_seqs=4)
    requests = prompts([5, 11, 3, 17, 8, 2, 9])
    tokens = {}
    for number, prompt in enumerate(requests):
        engine.add_request(str(number), prompt, max_tokens=6 + number)
        for key, new in engine.step().items():
            tokens.setdefault(key, []).extend(new)
    run(engine, tokens)
    assert engine.scheduler.num_preemptions > 0
    for number, prompt in enumerate(requests):
        assert tokens[str(number), 0] == generate(model, prompt, 6 + number)


def test_requests_share_steps_and_stop_on_their_own(model, prompts, start):
    engine = start()
    a, b = prompts([4, 6])
    stop = generate(model, a, 8)[2]
    engine.add_request("A", a, max_tokens=8, stop_ids=(stop,))
    engine.add_request("B", b, max_tokens=8)
    steps = []
    while engine.has_unfinished():
        steps.append(sorted(request_id for request_id, _ in engine.step()))
    length = len(generate(model, a, 8, (stop,)))
    assert steps == [["A", "B"]] * length + [["B"]] * (8 - length)


def test_what_cannot_run_is_refused_and_what_nobody_wants_ends(prompts, start, run):
    engine = start(num_blocks=4)
    (prompt,) = prompts([6])
    for wrong in ({"prompt_ids": []}, {"max_tokens": 0}, {"max_tokens": 11}, {"prompt_ids": [300]}):
        with pytest.raises(ValueError, match="R"):
            engine.add_request("R", **{"prompt_ids": prompt, "max_tokens": 10} | wrong)
    engine.add_request("R", prompt, max_tokens=10)
    with pytest.raises(ValueError, match="R"):
        engine.add_request("R", prompt, max_tokens=10)
    engine.add_request("S", prompt, max_tokens=10)
    engine.step()
    engine.abort("R")
    engine.abort("nobody")
    assert run(engine).keys() == {("S", 0)}
