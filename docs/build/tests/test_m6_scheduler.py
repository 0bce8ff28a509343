import pytest
from built.blocks import BlockManager, Sequence
from built.generate import generate
from built.scheduler import Scheduler


def scheduled(scheduler):
    running = scheduler.running
    batch = [(seq.request_id, count) for seq, count in scheduler.schedule()]
    assert scheduler.running is running, "`running` must stay the same list: change it in place"
    assert batch == [(seq.request_id, count) for seq, (_, count) in zip(running, batch, strict=False)], (
        "a step has the first of `running`, in order"
    )
    return batch


def ids(seqs):
    return [seq.request_id for seq in seqs]


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
    assert seqs[0].block_table == [], "finish frees the blocks"
    assert scheduled(scheduler) == [("B", 1), ("C", 5)]


def test_the_last_one_gives_up_its_blocks_when_they_run_out(end_preemptions):
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=9, max_num_batched_tokens=100)
    end_preemptions(scheduler)
    a, b = Sequence("A", list(range(7)), 9), Sequence("B", list(range(50, 58)), 9)
    scheduler.waiting += [a, b]
    assert scheduled(scheduler) == [("A", 7), ("B", 8)]
    computed(scheduler)
    scheduler.waiting.append(Sequence("C", [1, 2], 9))  # would fit as soon as B has given up its blocks
    assert scheduled(scheduler) == [("A", 1)], "the ninth token of B needs a third block, and C does not overtake B"
    assert ids(scheduler.running) == ["A"] and scheduler.num_preemptions == 1
    assert ids(scheduler.waiting) == ["B", "C"], "who is preempted waits at the front"
    assert b.block_table == [], "who is preempted gives up its blocks"
    assert b.num_computed == 0, "who is preempted computes all its tokens again"
    assert len(b.token_ids) == 9, "who is preempted keeps its tokens"


def test_nobody_starts_without_blocks_for_all_its_tokens():
    scheduler = Scheduler(BlockManager(4, 4), max_num_seqs=9, max_num_batched_tokens=100)
    scheduler.waiting += [Sequence(name, [1] * length, 9) for name, length in (("A", 7), ("B", 12), ("C", 2))]
    assert scheduled(scheduler) == [("A", 7)], "B does not fit, and C does not overtake it"


def test_no_step_exceeds_the_budget():
    """Not even if prompts are divided, as from milestone 7 on."""
    scheduler = Scheduler(BlockManager(20, 4), max_num_seqs=9, max_num_batched_tokens=8)
    seqs = [Sequence(name, [1] * length, 9) for name, length in (("A", 6), ("B", 5), ("C", 4))]
    scheduler.waiting += seqs
    for _ in range(3):
        batch = scheduler.schedule()
        assert sum(count for _, count in batch) <= 8, f"max_num_batched_tokens is 8: {ids(seq for seq, _ in batch)}"
        for seq, count in batch:
            seq.num_computed += count
            if seq.num_computed == len(seq.token_ids):
                seq.token_ids.append(0)
    assert all(seq.output for seq in seqs), "a prompt that did not fit into a step comes in the next ones"


def test_answers_are_those_of_each_request_alone(model, prompts, start, run):
    engine = start(num_blocks=12, max_num_seqs=4)
    requests = prompts([5, 11, 3, 17, 8, 2, 9])
    tokens = {}
    for number, prompt in enumerate(requests):
        engine.add_request(str(number), prompt, max_tokens=6 + number)
        for key, new in engine.step().items():
            tokens.setdefault(key, []).extend(new)
    run(engine, tokens)
    assert requests == prompts([5, 11, 3, 17, 8, 2, 9]), "the prompts belong to the caller: copy them"
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
    while engine.has_unfinished() and len(steps) < 20:
        steps.append(sorted(request_id for request_id, _ in engine.step()))
    length = len(generate(model, a, 8, (stop,)))
    assert steps == [["A", "B"]] * length + [["B"]] * (8 - length)


@pytest.mark.parametrize(
    "wrong",
    [{"prompt_ids": []}, {"max_tokens": 0}, {"max_tokens": 11}, {"prompt_ids": [300]}, {"prompt_ids": [-1]}],
    ids=["empty prompt", "no tokens", "6 + 11 tokens in 16 slots", "token too large", "token below 0"],
)
def test_what_cannot_run_is_refused(wrong, prompts, start):
    engine = start(num_blocks=4)
    with pytest.raises(ValueError, match="R1"):
        engine.add_request("R1", **{"prompt_ids": prompts([6])[0], "max_tokens": 10} | wrong)
    assert not engine.has_unfinished(), "a request that is refused does not wait"


def test_an_id_is_in_use_until_its_request_ends(prompts, start, run):
    engine, (prompt,) = start(num_blocks=4), prompts([6])
    engine.add_request("R1", prompt, max_tokens=10)
    for _ in ("waiting", "running"):
        with pytest.raises(ValueError, match="R1"):
            engine.add_request("R1", prompt, max_tokens=10)
        engine.step()
    run(engine)
    engine.add_request("R1", prompt, max_tokens=10)


def test_what_nobody_wants_ends(prompts, start, run):
    engine, (prompt,) = start(max_num_seqs=2), prompts([6])
    for request_id in ("first", "second", "third", "fourth"):
        engine.add_request(request_id, prompt, max_tokens=4)
    engine.step()
    assert ids(engine.running) == ["first", "second"]
    for request_id in ("first", "third", "nobody"):
        engine.abort(request_id)
    assert ids(engine.running) == ["second"], "abort ends a request that runs"
    assert ids(engine.scheduler.waiting) == ["fourth"], "abort ends a request that waits"
    assert {request_id for request_id, _ in run(engine)} == {"second", "fourth"}
