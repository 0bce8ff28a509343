import random

import pytest
import torch

from nanopage.sampling.masks import apply_masks

TOKENS = ["", "y", "es", "yes", "n", "o", "no", "ma", "may", "e", "s"]


def of_words(exercise, *words):
    """An automaton that allows these words, letter by letter."""
    moves, numbers = {}, {"": 0}
    for word in words:
        for end in range(1, len(word) + 1):
            numbers.setdefault(word[:end], len(numbers))
            moves[numbers[word[: end - 1]], word[end - 1]] = numbers[word[:end]]
    return exercise.Automaton(moves, {numbers[word] for word in words}), numbers


def texts(allowed):
    return {TOKENS[token] for token in allowed}


def test_a_text_leads_from_state_to_state(exercise):
    automaton, numbers = of_words(exercise, "yes", "no")
    assert exercise.walk(automaton, 0, "yes") == numbers["yes"]
    assert exercise.walk(automaton, numbers["y"], "e") == numbers["ye"]
    assert exercise.walk(automaton, 0, "") == 0
    for text in ("yo", "x", "yess", "nno"):
        assert exercise.walk(automaton, 0, text) is None


def test_tokens_of_several_letters_are_allowed_where_all_letters_are(exercise):
    automaton, numbers = of_words(exercise, "yes", "no")
    found = exercise.index(automaton, TOKENS)
    assert texts(found[0]) == {"y", "yes", "n", "no"}
    assert texts(found[numbers["y"]]) == {"es", "e"}
    assert found[numbers["yes"]] == {}
    assert found[0][TOKENS.index("yes")] == numbers["yes"]


def test_a_token_that_leads_nowhere_is_not_allowed(exercise):
    automaton, numbers = of_words(exercise, "yes", "maybe")  # no token for the "b"
    found = exercise.index(automaton, TOKENS)
    assert texts(found[0]) == {"y", "yes"}
    assert numbers["may"] not in found


def test_states_that_no_tokens_reach_are_left_out(exercise):
    automaton, numbers = of_words(exercise, "yes", "no")
    found = exercise.index(automaton, ["yes", "no"])
    assert found.keys() == {0, numbers["yes"], numbers["no"]}


def test_a_loop_is_followed(exercise):
    automaton = exercise.Automaton({(0, "a"): 1, (1, "a"): 0}, {0})  # an even number of "a"
    assert exercise.index(automaton, ["a", "aa", "b"]) == {0: {0: 1, 1: 0}, 1: {0: 0, 1: 1}}


def test_the_mask_is_what_the_sampler_takes(exercise):
    bits = exercise.mask({1: 5, 9: 6}, False, 2, 12)
    assert bits == bytes([0b10, 0b10])
    logits = torch.zeros(2, 12)
    apply_masks(logits, {1: exercise.mask({1: 5, 9: 6}, True, 2, 12)})
    assert logits[0].isfinite().all()
    assert logits[1].isfinite().nonzero().flatten().tolist() == [1, 2, 9]


@pytest.mark.parametrize("seed", range(4))
def test_random_automata(exercise, seed):
    """A walk that takes only allowed tokens never gets stuck, and every token that is not allowed would get stuck."""
    rng = random.Random(seed)
    for _ in range(20):
        moves = {(rng.randrange(8), rng.choice("abc")): rng.randrange(8) for _ in range(12)}
        automaton = exercise.Automaton(moves, {rng.randrange(8)})
        tokens = ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(6)]
        found = exercise.index(automaton, tokens)

        def completes(state, automaton=automaton, tokens=tokens):
            """Whether tokens lead to a final state."""
            seen, left = set(), [state]
            while left:
                state = left.pop()
                if state not in seen and state is not None:
                    seen.add(state)
                    left += [exercise.walk(automaton, state, token) for token in tokens]
            return bool(seen & automaton.final)

        assert (0 in found) == completes(0)
        for state, allowed in found.items():
            assert completes(state)
            for token, text in enumerate(tokens):
                after = exercise.walk(automaton, state, text)
                assert (token in allowed) == (after is not None and completes(after))
                assert allowed.get(token, after) == after
