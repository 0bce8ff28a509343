"""Kinds of layers: which share a block table, and how many blocks sequences take."""

import pytest

from nanopage.state.layer_kinds import MOST_KINDS, BlockNeeds, divide_layers, first_block, one_kind


def test_layers_with_equal_windows_are_divided_so_that_blocks_have_one_size():
    kinds = divide_layers([512, 512, 512, 512, 512, None] * 3, 32768)  # Gemma 3 270M
    assert kinds.windows == (None, 512, 512, 512, 512, 512)
    assert kinds.of_layers == (1, 2, 3, 4, 5, 0) * 3
    assert kinds.num_rows == 3
    assert kinds.rows == [0] * 6 + [1] * 6 + [2] * 6


@pytest.mark.parametrize(
    ("windows", "num_kinds", "num_rows"),
    [
        ([4096, None] * 13, 2, 13),  # Gemma 2
        ([4096] * 32, 1, 32),  # Mistral
        ([None] * 28, 1, 28),
        ([512] * 22 + [None] * 4, 7, 4),  # Gemma 3 1B
        ([1024] * 52 + [None] * 10, 7, 10),  # Gemma 3 27B
        ([64] * 30 + [None], 7, 5),  # no more than MOST_KINDS
        ([64] + [None] * 30, 1, 31),  # little would be gained
        ([64, 128, 256] * 4, 3, 4),
        ([*range(1, 30)], 1, 29),
    ],
)
def test_every_layer_has_a_place_of_its_own(windows, num_kinds, num_rows):
    kinds = divide_layers(windows, 32768)
    assert len(kinds.windows) == num_kinds <= MOST_KINDS
    assert kinds.num_rows == num_rows
    places = list(zip(kinds.of_layers, kinds.rows, strict=True))
    assert len(set(places)) == len(windows)
    assert all(0 <= row < num_rows for _, row in places)
    if num_kinds > 1:
        assert [kinds.windows[kind] for kind in kinds.of_layers] == windows
    stages = [kinds.stage(range(5)), kinds.stage(range(5, len(windows)))]
    assert all(stage.windows == kinds.windows for stage in stages)
    assert stages[0].of_layers + stages[1].of_layers == kinds.of_layers


def test_layers_that_share_k_and_v_take_no_place():
    kinds = divide_layers([512, None, 512, None, 512, None], 32768, [0, 1, 2, 3, 2, 3])
    assert kinds.windows == (None, 512)
    assert kinds.of_layers == (1, 0, 1, 0, 1, 0)
    assert kinds.rows == [0, 0, 1, 1, 1, 1] and kinds.num_rows == 2
    kinds = divide_layers([512, None, 512, None], 512, [0, 1, 0, 1])
    assert (kinds.windows, kinds.of_layers) == ((None,), (0,) * 4)
    assert kinds.rows == [0, 1, 0, 1] and kinds.num_rows == 2


@pytest.mark.parametrize("max_model_len", [100, 512])
def test_a_window_that_no_sequence_outgrows_is_none(max_model_len):
    assert divide_layers([512, None] * 4, max_model_len) == one_kind(8)
    assert divide_layers([512] * 8, max_model_len) == one_kind(8)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 9])
def test_the_first_block_is_that_of_the_first_token_that_is_seen(window):
    for position in range(40):
        seen = [key for key in range(position + 1) if key > position - window]
        assert first_block(window, position, 4) == seen[0] // 4
        assert first_block(None, position, 4) == 0


@pytest.mark.parametrize("window", [1, 3, 8, 9])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_the_needs_of_a_sequence_are_the_most_that_it_has_at_any_time(window, chunk):
    """Chunks may begin and end anywhere. Blocks are given back before a chunk, or at the last block's end before it."""
    needs = BlockNeeds((None, window), 4, chunk)
    for length in range(1, 60):
        most = max(
            -(-end // 4) - first_block(window, before, 4)
            for start in range(length)
            for before in (start, start // 4 * 4)
            for end in [min(start + chunk, length)]
        )
        assert needs.of([length]) - -(-length // 4) >= most
        assert needs.of([length]) - -(-length // 4) <= most + 1


def test_the_needs_of_sequences_that_share_a_prompt():
    assert BlockNeeds((None,), 4, 8).of([10, 12, 13], shared=9) == 2 + 1 + 1 + 2
    assert BlockNeeds((None,), 4, 8).of([8], shared=0) == 2
    assert BlockNeeds((5,), 4, 8).of([1000, 1000], shared=500) == 4 + 4 + 4
    assert BlockNeeds((5, None), 4, 8).of([10, 12, 13], shared=9) == 2 * (2 + 1 + 1 + 2)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "longest"),
    [
        ((None,), 7, 28),
        ((None,), 25, 99),
        ((None,), 0, 0),
        ((5,), 4, 99),
        ((5,), 3, 12),
        ((5, None), 14, 40),
        ((5, None), 7, 12),
    ],
)
def test_the_longest_sequence_that_a_pool_holds(windows, num_blocks, longest):
    needs = BlockNeeds(windows, 4, 8)
    assert needs.longest(num_blocks, 99) == longest
    assert longest == 0 or needs.of([longest]) <= num_blocks
