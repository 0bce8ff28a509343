"""TokenBudget: steps stay short whatever the machine, and prompts always go on."""

import pytest

from nanopage.config.options import EngineConfig
from nanopage.engine.token_budget import LEAST, START, TokenBudget, choose_budget
from nanopage.outputs import StepStats


def run(seconds_of, num_running=0, steps=30, most=2048, target=1.0):
    """The budget after steps that are full of prompt tokens, on a machine where n tokens take seconds_of(n)."""
    budget = TokenBudget(most, target)
    history = []
    for _ in range(steps):
        tokens = max(1, budget.tokens - num_running)
        history.append(tokens)
        budget.observe(StepStats(prefill_tokens=tokens, running=num_running, seconds=seconds_of(tokens + num_running)))
    return history


@pytest.mark.parametrize("rate", [50, 200, 500, 1000, 4000, 10**5])
@pytest.mark.parametrize("fixed", [0, 0.01])
def test_steps_become_as_long_as_they_may_be_and_the_budget_settles(rate, fixed):
    history = run(lambda n: fixed + n / rate)
    assert history[0] == START and max(history[15:]) - min(history[15:]) <= 2
    tokens = history[-1]
    assert LEAST <= tokens <= 2048
    assert fixed + tokens / rate <= 1.02 or tokens == LEAST
    assert fixed + tokens / rate >= 0.98 or tokens == 2048


def test_one_slow_step_halves_the_budget_at_most_and_it_recovers():
    seconds = iter([0.3] * 10 + [60.0] + [0.3] * 10)
    history = run(lambda n: next(seconds) * n / 512, steps=21, target=0.3)
    assert history[10] == START and START // 2 <= history[11] < START // 2 + 10
    assert history[-1] >= START - 2


def test_running_sequences_do_not_take_the_tokens_of_prompts():
    assert run(lambda n: 10.0, num_running=200)[-1] == LEAST
    assert run(lambda n: 0.0, num_running=200)[-1] == 2048 - 200


def test_an_explicit_limit_is_never_exceeded():
    assert max(run(lambda n: 0.0, most=300)) == 300 and max(run(lambda n: 0.0, most=5)) == 5


def test_steps_without_many_prompt_tokens_change_nothing():
    budget = TokenBudget(2048, 1.0)
    for prefill in (0, 1, START // 2):
        budget.observe(StepStats(prefill_tokens=prefill, decode_tokens=200, running=10, seconds=9.0))
        assert budget.tokens == START + 10


def test_without_a_time_every_step_may_have_the_most():
    budget = TokenBudget(2048)
    budget.observe(StepStats(prefill_tokens=2048, running=10, seconds=9.0))
    assert budget.tokens == 2048


@pytest.mark.parametrize(
    ("use", "on_cpu", "on_gpu"),
    [
        ("steps", (2048, None), (8192, None)),
        ("LLM", (512, None), (8192, None)),
        ("AsyncLLM", (2048, 0.3), (8192, 0.05)),
    ],
)
def test_the_budget_depends_on_who_steps_the_engine_unless_it_is_given(use, on_cpu, on_gpu):
    for device, expected in (("cpu", on_cpu), ("cuda", on_gpu)):
        budget = choose_budget(EngineConfig(), device, use)
        assert (budget.most, budget.seconds) == expected
        given = choose_budget(EngineConfig(max_num_batched_tokens=7), device, use)
        assert (given.most, given.seconds, given.tokens) == (7, None, 7)
