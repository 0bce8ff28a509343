"""StopStringSearch against a plain search of the whole text after every character."""

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from nanopage import SamplingParams
from nanopage.text.stop_strings import StopStrings, StopStringSearch

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
    search, found, fed = StopStringSearch(StopStrings(strings)), None, ""
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


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        ([f"{i:03} is not in it" for i in range(800)], "where is the cat? " * 50),
        (["=" * 16_383 + "x"], "=" * 17_000),
        (["=" * 8000 + "x", "=" * 8000 + "y"], ("=" * 8100 + "-") * 2),
        (["a" * n + "b" for n in range(150)], "a" * 1000),
        (["ab" * 4000 + "c", "ba" * 4000 + "d"], "ab" * 6000),
        ([f"{'xy' * n}z" for n in range(1, 120)], "xyxy" * 500),
    ],
)
def test_a_search_takes_two_lookups_for_each_character_whatever_the_strings(strings, text):
    class Counted(dict):
        lookups = 0

        def get(self, key):
            self.lookups += 1
            return super().get(key)

    stops = StopStrings(strings)
    counted = stops.edges = Counted(stops.edges)
    search = StopStringSearch(stops)
    assert search.feed(text) is None
    assert counted.lookups <= 2 * len(text)


def test_strings_that_are_too_long_in_all_are_refused_with_the_numbers():
    SamplingParams(stop=["x" * 8192, "y" * 8192])
    with pytest.raises(ValueError, match=r"stop has 10,000 strings with 10,000,000 characters.*16,384"):
        SamplingParams(stop=["x" * 1000] * 10_000)
