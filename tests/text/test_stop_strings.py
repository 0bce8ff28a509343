"""StopStringSearch against a plain search of the whole text after every character."""

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopage import SamplingParams
from nanopage.text.stop_strings import StopStringSearch, build_trie

LETTERS = st.text("ab", min_size=1, max_size=6)


def by_hand(text: str, strings: list[str], search_from: int) -> tuple[int, str] | None:
    for end in range(search_from + 1, len(text) + 1):
        if ending := [string for string in strings if text[:end].endswith(string)]:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=examples(500), deadline=None, derandomize=True)
@given(st.lists(LETTERS, min_size=1, max_size=6), st.lists(st.text("ab", max_size=5), max_size=8), st.integers(0, 8))
def test_the_string_that_ends_first_is_found_however_the_text_is_cut(strings, pieces, search_from):
    text = "".join(pieces)
    search_from = len("".join(pieces[:search_from]))
    search, found, fed = StopStringSearch(build_trie(strings)), None, ""
    for piece in pieces:
        found = search.feed(piece, len(fed) >= search_from)
        fed += piece
        if found:
            break
        begun = [
            at for at in range(len(fed)) if any(s.startswith(fed[at:]) and len(s) > len(fed) - at for s in strings)
        ]
        assert search.begun == min(begun, default=len(fed))
    assert found == by_hand(text, strings, search_from)


def test_a_search_costs_what_has_begun_not_how_many_strings_there_are():
    class Counted(dict):
        lookups = 0

        def __contains__(self, key):
            Counted.lookups += 1
            return super().__contains__(key)

    def counted(node):
        return Counted({key: counted(child) if isinstance(child, dict) else child for key, child in node.items()})

    counts = []
    for number in (1, 800):
        Counted.lookups = 0
        strings = [f"{i:03} is not in it" for i in range(number)]
        assert StopStringSearch(counted(build_trie(strings))).feed("where is the cat? " * 50) is None
        counts.append(Counted.lookups)
    assert counts[1] < 3 * counts[0]


def test_strings_that_are_too_long_in_all_are_refused_with_the_numbers():
    SamplingParams(stop=["x" * 8192, "y" * 8192])
    with pytest.raises(ValueError, match=r"stop has 10,000 strings with 10,000,000 characters.*16,384"):
        SamplingParams(stop=["x" * 1000] * 10_000)
