import pytest
from dry import DryEngine, Scheduler, Sequence


def waiting(*prompts):
    return [Sequence(f"{index}: {length}", [0] * length, 4) for index, length in enumerate(prompts)]


def ordered(exercise, waiting, passed_over):
    """The names, which have the place in the queue and the length of the prompt."""
    return [seq.request_id for seq in exercise.order(waiting, passed_over)]


def test_short_prompts_come_first_and_equal_ones_in_turn(exercise):
    assert ordered(exercise, waiting(30, 5, 9, 5), {}) == ["1: 5", "3: 5", "2: 9", "0: 30"]


def test_who_was_passed_over_too_often_comes_first(exercise):
    a, _, c, _ = seqs = waiting(90, 5, 30, 3)
    passed_over = {a: exercise.MOST_PASSED, c: exercise.MOST_PASSED + 2}
    assert ordered(exercise, seqs, passed_over) == ["0: 90", "2: 30", "3: 3", "1: 5"]
    assert ordered(exercise, seqs, {a: exercise.MOST_PASSED - 1}) == ["3: 3", "1: 5", "2: 30", "0: 90"]


def test_who_has_begun_to_answer_comes_before_all_others(exercise):
    a, _, c = seqs = waiting(30, 5, 90)
    c.token_ids.append(0)
    assert ordered(exercise, seqs, {a: exercise.MOST_PASSED}) == ["2: 90", "0: 30", "1: 5"]


def test_who_starts_passes_over_those_that_came_earlier(exercise):
    a, b, c, d = waiting(30, 5, 90, 2)
    arrivals, passed_over = {a: 0, b: 1, c: 2, d: 3}, {a: 1}
    exercise.count_passed([c], [a, b, d], arrivals, passed_over)
    assert passed_over == {a: 2, b: 1}
    exercise.count_passed([b, d], [a], arrivals, passed_over)
    assert passed_over == {a: 4, b: 1}
    c.num_computed = 8  # the second chunk of its prompt
    exercise.count_passed([c], [a], arrivals, passed_over)
    d.token_ids.append(0)  # it has answered, was preempted, and begins anew
    exercise.count_passed([d], [a], arrivals, passed_over)
    assert passed_over == {a: 4, b: 1}


def first_tokens(make_scheduler, arrivals, num_blocks=64):
    """Run a dry engine with one place. Returns the step of each request's first token, and the order of the starts.

    Args: arrivals: the length of the prompt that comes before each step; 0 is none.
    """
    engine = DryEngine(num_blocks, max_num_seqs=1, max_num_batched_tokens=8, make_scheduler=make_scheduler)
    came, steps, number = {}, {}, 0
    while number < len(arrivals) or engine.has_unfinished():
        if number < len(arrivals) and arrivals[number]:
            name = f"{number}: {arrivals[number]}"
            came[name] = engine.add(name, arrivals[number], max_tokens=3)
        engine.step()
        number += 1
        for name, seq in came.items():
            if seq.output:
                steps.setdefault(name, number)
    return steps


def test_the_average_request_has_its_first_token_sooner(exercise):
    arrivals = [40, 50, 30, 4, 4, 4, 4]
    ours, fcfs = first_tokens(exercise.ShortestFirst, arrivals), first_tokens(Scheduler, arrivals)
    assert ours.keys() == fcfs.keys()
    assert sum(ours.values()) < sum(fcfs.values())


def test_a_long_prompt_does_not_starve(exercise):
    arrivals = [4, 40] + [4, 0, 0] * 20  # a request takes 3 steps, and every 3 steps another one comes
    steps = first_tokens(exercise.ShortestFirst, arrivals)
    later = [name for name in steps if int(name.partition(":")[0]) > 1]
    sooner = [name for name in later if steps[name] < steps["1: 40"]]
    assert len(sooner) == exercise.MOST_PASSED


@pytest.mark.parametrize("num_blocks", [8, 12])
def test_all_requests_end_also_with_preemptions(exercise, num_blocks):
    engine = DryEngine(num_blocks, max_num_seqs=3, max_num_batched_tokens=8, make_scheduler=exercise.ShortestFirst)
    seqs = [engine.add(str(index), 1 + 3 * index, max_tokens=14) for index in range(5)]
    number = 0
    while engine.has_unfinished() and number < 500:
        engine.step()
        number += 1
    assert [len(seq.output) for seq in seqs] == [14] * 5
    assert engine.scheduler.num_preemptions > 0
    assert engine.blocks.num_free == num_blocks
