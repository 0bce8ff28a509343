"""What the benchmark of speech to text counts."""

import pytest

from benchmarks.transcriptions import equal_clips, gap_and_repeat, word_errors


@pytest.mark.parametrize(
    ("heard", "wrong", "gap_repeat"),
    [
        ("It is Easy, to tell!", 0, (0, 0)),
        ("it was easy to tell", 1, (0, 0)),
        ("it is tell", 2, (2, 0)),
        ("it is easy it is easy to tell", 3, (0, 3)),
        ("", 5, (5, 0)),
    ],
)
def test_words_that_are_wrong_missing_and_repeated(heard, wrong, gap_repeat):
    said = "it is easy to tell"
    assert word_errors(said, heard) == (wrong, 5) and gap_and_repeat(said, heard) == gap_repeat


def test_clips_are_equal_if_all_tokens_are():
    assert equal_clips([[[1, 2], [9, 1, 2]], [[3], [9, 3]]], [[[1, 2], [9, 1, 2]], [[3], [8, 3]]]) == [2, 1]
