"""Logits processors: functions of the caller's that change the logits of single requests."""

import pytest
import torch
from helpers import BytesExecutor, finish, tiny_model

from nanopage import EngineConfig, SamplingParams, StructuredOutputsParams
from nanopage.build import build_engine
from nanopage.processors.setup import attach_processors

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("processors"))


def run(model, requests, **options):
    """name -> the completions of its request. Requests run together."""
    defaults = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
    engine = build_engine(EngineConfig(model=str(model), **defaults | {"enforce_eager": True} | options))
    for name, params in requests.items():
        engine.add_request(name, {"prompt_token_ids": PROMPT}, params)
    return finish(engine)


def count_up(output, logits):
    """The tokens 40, 41, 42, ..."""
    logits[:] = -torch.inf
    logits[40 + len(output)] = 0.0
    return logits


def repeat_prompt(prompt, output, logits):
    assert len(output) < len(prompt)
    return torch.nn.functional.one_hot(torch.tensor(prompt[len(output)]), len(logits)) * 1e6


def ask(*processors, **options):
    return SamplingParams(**{"max_tokens": 5, "ignore_eos": True, "logits_processors": list(processors)} | options)


WORLDS = {
    "plain": {},
    "async": {"async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "recomputed": {"num_gpu_blocks_override": 8, "block_size": 4, "preemption_mode": "recompute", "max_model_len": 24},
}


@pytest.mark.parametrize("world", WORLDS)
def test_each_request_has_its_own_processors(model, world):
    def favour(output, logits):
        return logits + torch.arange(len(logits)) % (2 + len(output))

    free = ask(seed=1, max_tokens=8)
    (alone,) = run(model, {"free": free})["free"].outputs
    expected = run(model, {"changed": ask(favour, seed=3, max_tokens=8, n=2)})["changed"].outputs
    requests = {
        "count": ask(count_up, temperature=0, logprobs=1),
        "repeat": ask(repeat_prompt, seed=2, n=2),
        "both": ask(repeat_prompt, count_up, temperature=0),
        "free": free,
        "changed": ask(favour, seed=3, max_tokens=8, n=2),
    }
    done = run(model, requests, **WORLDS[world])
    assert done["count"].outputs[0].token_ids == done["both"].outputs[0].token_ids == [40, 41, 42, 43, 44]
    assert [output.token_ids for output in done["repeat"].outputs] == [PROMPT, PROMPT]
    assert done["free"].outputs[0].token_ids == alone.token_ids
    assert [o.token_ids for o in done["changed"].outputs] == [o.token_ids for o in expected] != [alone.token_ids] * 2
    assert done["count"].outputs[0].logprobs[0][40].logprob < 0  # the model's own


def test_a_grammar_still_holds(model):
    structured = StructuredOutputsParams(regex="[a-c]{4}")
    params = {"structured_outputs": structured, "ignore_eos": False, "temperature": 0, "max_tokens": 9}
    plain, flipped = ask(**params), ask(lambda output, logits: -logits, **params)
    done = run(model, {"plain": plain, "flipped": flipped})
    texts = [done[name].outputs[0].text for name in done]
    assert all(len(text) == 4 and {*text} <= {*"abc"} for text in texts) and texts[0] != texts[1]


def test_a_processor_that_fails_ends_its_request_alone(model):
    def broken(output, logits):
        return logits if len(output) < 2 else 1 / 0

    requests = {"free": ask(seed=1), "broken": ask(broken), "short": ask(lambda output, logits: logits[:3])}
    done = run(model, requests | {"none": ask(lambda output, logits: None)})
    (alone,) = run(model, {"free": ask(seed=1)})["free"].outputs
    assert done["free"].outputs[0].token_ids == alone.token_ids
    for name, what in (("broken", "division by zero"), ("short", "must return"), ("none", "not NoneType")):
        assert what in done[name].error and done[name].outputs[0].finish_reason == "error"


def test_where_no_processor_can_run_they_are_refused(model):
    engine = build_engine(EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=64, enforce_eager=True))
    engine.executor.shutdown()
    attach_processors(engine, BytesExecutor(engine.executor))  # as for workers in other processes
    make = engine.input_processor.make_request
    make("one", {"prompt_token_ids": PROMPT}, ask(max_tokens=1))
    with pytest.raises(ValueError, match="logits_processors do not work with workers in other processes"):
        make("one", {"prompt_token_ids": PROMPT}, ask(count_up))
