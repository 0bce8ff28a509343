import pytest

from nanopage.server.routing import Router


def router_of(*replicas: str, **options) -> Router:
    router = Router(**options)
    for replica in replicas:
        router.add(replica)
    return router


def test_a_prompt_goes_where_its_beginning_has_been():
    router = router_of("a", "b")
    assert router.choose(["1", "2"], 16, 40) == "a"
    assert router.choose(["3", "4"], 16, 40) == "b"
    router.finish("b", 40)
    assert router.choose(["1", "9"], 64, 40) == "a"  # 64 known tokens are worth more than 40 outstanding ones


def test_a_replica_that_is_busier_by_more_than_the_known_prefix_is_passed_over():
    router = router_of("a", "b", margin=2.0)
    router.choose(["1", "2"], 16, 64)
    assert router.choose(["1", "2"], 16, 1) == "a"  # 2 * 32 forgives exactly 64: the first of equals
    assert router.choose(["1", "2"], 16, 1) == "b"


def test_a_margin_of_zero_is_the_policy_least():
    prefix, least = router_of("a", "b", "c", margin=0), router_of("a", "b", "c", policy="least")
    for length in (5, 3, 1, 7, 2, 2, 9):
        assert prefix.choose(["1"], 16, length) == least.choose(["1"], 16, length)


def test_round_robin_takes_turns_whatever_the_load():
    router = router_of("a", "b", "c", policy="round-robin")
    assert [router.choose(["1"], 16, 100) for _ in range(5)] == ["a", "b", "c", "a", "b"]


def test_finished_tokens_are_no_longer_outstanding():
    router = router_of("a", "b", policy="least")
    assert router.choose([], 16, 100) == "a"
    assert router.choose([], 16, 60) == "b"
    router.finish("a", 80)
    assert router.choose([], 16, 1) == "a"
    router.finish("gone", 5)  # a replica that has died: nothing to do


def test_a_removed_replica_gets_nothing_and_comes_back_without_memory():
    router = router_of("a", "b")
    router.choose(["1"], 16, 1)
    router.remove("a")
    assert router.choose(["1"], 16, 1) == "b"
    router.add("a")
    assert not router.loads["a"].parts


def test_excluded_replicas_get_nothing():
    router = router_of("a", "b")
    assert router.choose([], 16, 0, exclude=["a"]) == "b"
    with pytest.raises(LookupError, match="no replica"):
        router.choose([], 16, 0, exclude=["a", "b"])


def test_only_so_many_parts_are_remembered_and_ends_are_forgotten_first():
    router = router_of("a", max_parts=3)
    router.choose(["1", "2"], 16, 1)
    router.choose(["1", "3", "4"], 16, 1)
    assert set(router.loads["a"].parts) == {"1", "3", "4"}
    router.choose(["5"], 16, 1)
    assert set(router.loads["a"].parts) == {"1", "3", "5"}


@pytest.mark.parametrize(
    "options, message",
    [({"policy": "random"}, "random"), ({"margin": -1}, "margin"), ({"max_parts": 0}, "max_parts")],
)
def test_bad_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Router(**options)
