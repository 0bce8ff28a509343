"""nanopage/terminal/guard.py: loops are found, and what people write on purpose is not taken for one."""

import pytest

from nanopage.terminal.guard import MAX_PERIOD, MIN_PERIODS, MIN_TOKENS, is_loop


@pytest.mark.parametrize("period", [1, 2, 7, 40, 41, MAX_PERIOD])
def test_a_loop_is_found_when_it_is_long_enough_and_not_before(period):
    intro = list(range(1000, 1100))
    loop = list(range(period)) * 1000
    needed = max(MIN_TOKENS, MIN_PERIODS * period)
    assert not is_loop(intro + loop[: needed - 1])
    assert is_loop(intro + loop[:needed])
    assert not is_loop([*loop[:needed], 2000])  # it has found its way out


def test_longer_periods_and_near_repetitions_are_no_loops():
    assert not is_loop(list(range(MAX_PERIOD + 1)) * 100)
    assert not is_loop([token for i in range(300) for token in (1, 2, 3, 100 + i)])  # a numbered list


def test_short_replies_are_no_loops():
    assert not is_loop([])
    assert not is_loop([5])
    assert not is_loop([5] * (MIN_TOKENS - 1))


ZEROS = "| 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |\n"


@pytest.mark.parametrize(
    "text",
    [
        ZEROS * 12,
        "ha " * 150,
        "Row, row, row your boat,\nGently down the stream.\nMerrily, merrily, merrily, merrily,\n"
        "Life is but a dream.\n\n" * 6,
        "    values.append(0)\n" * 30,
        "<td></td>\n" * 40,
        "=" * 300,
    ],
    ids=["zeros", "laughter", "refrain", "code", "html", "rule"],
)
def test_repetition_that_is_meant_is_not_cut(text, default_tokenizer):
    ids = default_tokenizer.encode(text, add_special_tokens=False)
    assert not any(is_loop(ids[:end]) for end in range(len(ids) + 1))


@pytest.fixture(scope="module")
def default_tokenizer(default_model):
    from nanopage.text.tokenizer import Tokenizer

    return Tokenizer(default_model)
