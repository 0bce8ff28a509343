import pytest
import torch


def sample(exercise, logits, n, temperature, seed=0, count=2000):
    """Sample a row of logits at `count` positions."""
    rows = torch.tensor(logits).expand(count, -1)
    temperatures = torch.full((count,), temperature, dtype=torch.float64)
    return exercise.sample_top_n_sigma(rows, n, temperatures, torch.full((count,), seed), torch.arange(count))


LOGITS = [5.0, 4.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # mean 1.5, standard deviation 2


def test_only_tokens_within_n_standard_deviations_are_sampled(exercise):
    assert set(sample(exercise, LOGITS, 0.48, 1.0).tolist()) == {0}
    assert set(sample(exercise, LOGITS, 0.6, 1.0).tolist()) == {0, 1}
    assert set(sample(exercise, LOGITS, 1.1, 1.0).tolist()) == {0, 1, 2}


def test_a_token_on_the_edge_is_kept(exercise):
    assert set(sample(exercise, LOGITS, 0.5, 1.0).tolist()) == {0, 1}


def test_a_high_temperature_adds_no_tokens(exercise):
    assert set(sample(exercise, LOGITS, 0.6, 50.0).tolist()) == {0, 1}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_kept_tokens_have_the_probabilities_of_the_softmax(exercise, temperature):
    tokens = sample(exercise, LOGITS, 1.1, temperature, count=20_000)
    shares = torch.bincount(tokens, minlength=3) / len(tokens)
    torch.testing.assert_close(shares, (torch.tensor(LOGITS[:3]) / temperature).softmax(0), atol=0.02, rtol=0)


def test_a_token_depends_only_on_its_own_row_seed_and_position(exercise):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 40, generator=generator)
    temperatures = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.5, 1.0], dtype=torch.float64)
    seeds, positions = torch.tensor([1, 2, 3, 4, 5, 6]), torch.tensor([9, 8, 7, 9, 8, 7])
    together = exercise.sample_top_n_sigma(logits, 2.0, temperatures, seeds, positions)
    for row in range(6):
        one = slice(row, row + 1)
        alone = exercise.sample_top_n_sigma(logits[one], 2.0, temperatures[one], seeds[one], positions[one])
        assert alone.item() == together[row].item()
    assert not torch.equal(sample(exercise, LOGITS, 1.1, 1.0), sample(exercise, LOGITS, 1.1, 1.0, seed=1))
