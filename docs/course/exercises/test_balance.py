import pytest
import torch

from nanopage.experts.routing import route


def random_logits(num_tokens, num_experts, popular=0.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    return logits + popular * torch.linspace(-1, 1, num_experts, dtype=torch.float64)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(8, 2), (16, 4), (4, 4), (5, 1)])
def test_the_choice_and_the_weights_are_those_of_nanopage(exercise, num_experts, num_chosen):
    logits, bias = random_logits(50, num_experts), random_logits(1, num_experts, seed=1)[0]
    chosen, weights = exercise.choose(logits, bias, num_chosen)
    expected, expected_weights = route(logits, num_chosen, True, bias)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_the_bias_decides_who_is_chosen_and_nothing_else(exercise):
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    chosen, weights = exercise.choose(logits, torch.tensor([0.0, 0.0, 0.0, 5.0]), 2)
    assert chosen.tolist() == [[3, 0]]
    scores = logits.sigmoid()[0, [3, 0]]
    torch.testing.assert_close(weights[0], scores / scores.sum())


def test_a_bias_moves_towards_the_mean(exercise):
    bias = torch.tensor([0.0, 1.0, -1.0, 0.5])
    chosen = torch.tensor([[0, 1], [0, 2], [0, 1]])  # 3, 2, 1 and 0 tokens; 1.5 is the mean
    before = bias.clone()
    torch.testing.assert_close(exercise.update(bias, chosen, 0.1), torch.tensor([-0.1, 0.9, -0.9, 0.6]))
    assert torch.equal(bias, before), "a new tensor"
    even = torch.tensor([[0, 1], [2, 3]])
    assert torch.equal(exercise.update(bias, even, 0.1), bias)


def test_after_some_steps_all_experts_are_about_equally_busy(exercise):
    bias, uneven = torch.zeros(8, dtype=torch.float64), []
    for step in range(150):
        chosen, _ = exercise.choose(random_logits(256, 8, popular=1.0, seed=step), bias, 2)
        counts = chosen.flatten().bincount(minlength=8).double()
        uneven.append(float(counts.max() / counts.mean()))
        bias = exercise.update(bias, chosen, 0.01)
    assert uneven[0] > 1.7
    assert sum(uneven[-20:]) / 20 < 1.3
