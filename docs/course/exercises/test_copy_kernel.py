import pytest
import torch


def cache(num_blocks=8, kv_heads=2, page=64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, num_blocks, kv_heads, page, generator=generator)


def expected(before, pairs):
    after = before.clone()
    for source, target in pairs:
        after[:, target] = before[:, source]
    return after


@pytest.mark.parametrize("pairs", [[(0, 1)], [(5, 2), (5, 3), (1, 7)]], ids=str)
def test_blocks_are_copied_and_no_others_change(exercise, pairs):
    ours = cache()
    before = ours.clone()
    exercise.copy_blocks(ours, torch.tensor(pairs))
    torch.testing.assert_close(ours, expected(before, pairs), rtol=0, atol=0)


@pytest.mark.parametrize(("kv_heads", "page"), [(1, 16), (3, 48), (2, 80)])
def test_any_number_of_heads_and_elements(exercise, kv_heads, page):
    ours = cache(kv_heads=kv_heads, page=page)
    before = ours.clone()
    exercise.copy_blocks(ours, torch.tensor([(0, 3), (7, 4)]))
    torch.testing.assert_close(ours, expected(before, [(0, 3), (7, 4)]), rtol=0, atol=0)


def test_a_view_of_a_larger_cache(exercise):
    whole = cache(num_blocks=6, kv_heads=4, page=48)
    before = whole.clone()
    exercise.copy_blocks(whole[:, :, 1:3], torch.tensor([(0, 3)]))
    torch.testing.assert_close(whole[:, :, 1:3], expected(before[:, :, 1:3], [(0, 3)]), rtol=0, atol=0)
    torch.testing.assert_close(whole[:, :, ::3], before[:, :, ::3], rtol=0, atol=0)
