import random
from collections import Counter

import routers
from routers import Figures


def test_equal_beginnings_come_to_the_same_replica_and_others_are_spread(exercise):
    loads = dict.fromkeys("abcd", 1000)
    chosen = [exercise.choose_replica(beginning, loads, 10) for beginning in range(400)]
    assert chosen == [exercise.choose_replica(beginning, loads, 10) for beginning in range(400)]
    assert min(Counter(chosen)[replica] for replica in "abcd") > 60


def test_the_order_of_the_replicas_does_not_matter(exercise):
    loads = dict.fromkeys("abcd", 1000)
    backwards = dict.fromkeys("dcba", 1000)
    for beginning in range(50):
        assert exercise.choose_replica(beginning, loads, 10) == exercise.choose_replica(beginning, backwards, 10)


def test_if_a_replica_ends_only_its_prompts_move(exercise):
    four, three = dict.fromkeys("abcd", 1000), dict.fromkeys("abc", 1000)
    for beginning in range(200):
        before = exercise.choose_replica(beginning, four, 10)
        if before != "d":
            assert exercise.choose_replica(beginning, three, 10) == before


def test_a_replica_with_too_much_to_do_is_passed_over(exercise):
    loads = {"a": 220, "b": 60, "c": 60, "d": 60}  # 100 on average; with 4 more tokens, at most 202
    rng = random.Random(0)
    chosen = {exercise.choose_replica(rng.random(), loads, 4) for _ in range(200)}
    assert chosen == {"b", "c", "d"}


def test_the_bound_includes_the_request(exercise):
    loads = {"a": 90, "b": 40, "c": 35, "d": 35}
    beginning = next(each for each in range(100) if max(loads, key=lambda name: exercise.score(each, name)) == "a")
    assert exercise.choose_replica(beginning, loads, 10) == "a"  # 100 of at most 105
    assert exercise.choose_replica(beginning, loads, 20) == "a"  # 110 of at most 110
    assert exercise.choose_replica(beginning, loads, 30) != "a"  # 120 of at most 115


def test_if_none_may_take_it_the_one_with_the_least_to_do_does(exercise):
    for beginning in range(20):
        assert exercise.choose_replica(beginning, {"a": 40, "b": 10, "c": 40}, 1000) == "b"
    chosen = {exercise.choose_replica(beginning, dict.fromkeys("abc", 0), 1000) for beginning in range(40)}
    assert chosen == {"a", "b", "c"}


def test_in_the_simulator(exercise):
    """More of the prompts are in a prefix cache than behind a router that does not look at prompts."""
    ours = routers.run("prefix", 4, exercise.RendezvousRouter())
    blind = routers.run("round-robin", 4)
    assert isinstance(ours, Figures)
    assert ours.hits > blind.hits
    assert ours.ttft < blind.ttft
