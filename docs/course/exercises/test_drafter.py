import pytest
from helpers import tiny_model

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.speculation.drafts import Drafts


def test_a_draft_has_at_most_so_many_tokens(exercise):
    followers = exercise.Followers()
    followers.add([1, 2, 3, 4, 5, 6, 7, 8])
    assert [len(followers.draft([1, 2], most)) for most in (1, 3, 9)] == [1, 3, 6]


def counted(exercise):
    followers = exercise.Followers()
    followers.add([1, 2, 3, 4, 1, 2, 5, 1, 2, 5])
    return followers


def test_the_most_frequent_follower_is_drafted(exercise):
    followers = counted(exercise)
    assert followers.draft([9, 1, 2], 1) == [5]
    assert followers.draft([2, 3], 1) == [4]


def test_a_draft_goes_on_from_its_own_tokens_until_nothing_is_known(exercise):
    followers = counted(exercise)
    assert followers.draft([2, 3], 3) == [4, 1, 2]
    assert followers.draft([1, 2, 3], 4) == [4, 1, 2, 5]
    assert followers.draft([7, 8], 4) == []
    assert followers.draft([8, 2], 4) == []
    followers.add([20, 21, 22])
    assert followers.draft([20, 21], 4) == [22]


def test_of_equally_frequent_ones_the_first_is_drafted(exercise):
    followers = exercise.Followers()
    followers.add([1, 2, 7, 1, 2, 3])
    assert followers.draft([1, 2], 1) == [7]


def test_short_texts(exercise):
    followers = exercise.Followers()
    for text in ([], [1], [1, 2]):
        followers.add(text)
        assert followers.draft(text, 4) == []


def test_texts_add_up(exercise):
    followers = exercise.Followers()
    followers.add([1, 2, 3])
    followers.add([1, 2, 4])
    followers.add([1, 2, 4])
    assert followers.draft([1, 2], 1) == [4]


def run(engine, prompts, params):
    """The tokens of all answers, and the number of steps."""
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    answers, num_steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
    return answers, num_steps


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "seed": 3}], ids=str)
def test_the_second_answer_takes_fewer_steps_and_is_the_same(exercise, tmp_path, params):
    options = {"device": "cpu", "dtype": "float64", "enforce_eager": True, "enable_prefix_caching": False}
    options |= {"max_model_len": 128, "num_gpu_blocks_override": 64, "speculative_config": None}
    engine = build_engine(EngineConfig(model=str(tiny_model(tmp_path)), **options))
    params = SamplingParams(max_tokens=30, ignore_eos=True, **params)
    prompts = [[5, 6, 7, 8], [50, 60, 70]]
    first, steps_without = run(engine, prompts, params)
    drafter = exercise.AnswerDrafter()
    engine.scheduler.drafts = Drafts(drafter)
    second, _ = run(engine, prompts, params)
    third, steps_with = run(engine, prompts, params)
    assert first == second == third
    assert drafter.num_accepted > 0
    assert steps_with < steps_without / 2
