"""RequestOutput: what is in it, and when there is one: after every token, or with FINAL_ONLY only at the end."""

import dataclasses

import pytest
from helpers import EOS

from nanopage import EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.engine.output_processor import OutputProcessor
from nanopage.params import RequestOutputKind
from nanopage.step import SamplingSettings
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.view.invariants import check_blocks

FINAL = RequestOutputKind.FINAL_ONLY
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["in turn", "one step ahead"])
def engine(request, model):
    engine = build_engine(
        EngineConfig(
            model=str(model),
            dtype="float64",
            device="cpu",
            max_model_len=128,
            num_gpu_blocks_override=64,
            async_scheduling=request.param,
        )
    )
    yield engine
    manager = engine.scheduler.block_manager
    check_blocks(manager)
    assert manager.num_free_blocks == manager.num_blocks
    assert not engine.has_unfinished_requests()


def outputs_of(engine, prompt, params) -> list:
    engine.add_request("a", prompt, params)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def final(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, output_kind=FINAL)


CASES = {
    "greedy": GREEDY,
    "log-probabilities": dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1),
    "several": dataclasses.replace(SAMPLED, n=3, logprobs=0),
    "best of": dataclasses.replace(SAMPLED, n=2, best_of=4),
    "end of sequence": SamplingParams(temperature=0, logit_bias={EOS: 100.0}, min_tokens=3),
    "end of sequence in the text": SamplingParams(
        temperature=0, logit_bias={EOS: 100.0}, min_tokens=3, include_stop_str_in_output=True, skip_special_tokens=False
    ),
    "no text": dataclasses.replace(GREEDY, detokenize=False),
}


@pytest.mark.parametrize("name", CASES)
def test_final_only_gives_one_output_the_last_of_the_cumulative_ones(engine, name):
    params = CASES[name]
    expected = outputs_of(engine, "the cat", params)[-1]
    (output,) = outputs_of(engine, "the cat", final(params))
    assert output.finished
    assert len(output.outputs) == params.n
    for ours, theirs in zip(output.outputs, expected.outputs, strict=True):
        assert ours == dataclasses.replace(theirs, delta=ours.delta)
        assert ours.delta == ours.text
    assert output.prompt_logprobs == expected.prompt_logprobs


def test_logprobs_have_no_text_if_nothing_is_detokenized(engine):
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=1)
    for detokenize in (True, False):
        output = outputs_of(engine, "the cat", dataclasses.replace(params, detokenize=detokenize))[-1]
        tables = output.outputs[0].logprobs + output.prompt_logprobs[1:]
        assert {entry.decoded_token is None for table in tables for entry in table.values()} == {not detokenize}


def test_final_only_ends_at_a_stop_string_in_time(engine):
    free = outputs_of(engine, "the cat", GREEDY)[-1].outputs[0]
    stop = free.text[1:3]
    params = dataclasses.replace(GREEDY, stop=stop)
    expected = outputs_of(engine, "the cat", params)[-1].outputs[0]
    (output,) = outputs_of(engine, "the cat", final(params))
    assert output.outputs[0] == dataclasses.replace(expected, delta=expected.text)
    assert (expected.finish_reason, expected.stop_reason) == ("stop", stop)
    assert len(expected.token_ids) < len(free.token_ids)


def test_final_only_makes_text_and_outputs_once(engine, monkeypatch):
    made, make = [], OutputProcessor._output

    def counted(self, request):
        made.append(request)
        return make(self, request)

    monkeypatch.setattr(OutputProcessor, "_output", counted)
    monkeypatch.setattr(IncrementalDetokenizer, "add", lambda *_: pytest.fail("nobody sees it grow"))
    (output,) = outputs_of(engine, "the cat", final(dataclasses.replace(SAMPLED, n=2)))
    assert len(made) == 1
    assert all(completion.text for completion in output.outputs)


def test_final_only_can_be_aborted_and_returns_what_there_is(engine):
    expected = outputs_of(engine, "the cat", GREEDY)[-1].outputs[0]
    engine.add_request("a", "the cat", final(GREEDY))
    for _ in range(5):
        assert engine.step() == []
    output = engine.abort("a")
    completion = output.outputs[0]
    assert output.finished
    assert (completion.finish_reason, completion.delta) == ("abort", completion.text)
    assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
    assert len(completion.token_ids) >= 4
    assert expected.text.startswith(completion.text.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_deltas_add_up_when_one_completion_is_aborted(engine, kind):
    params = dataclasses.replace(SAMPLED, n=3, output_kind=kind)
    expected = [completion.text for completion in outputs_of(engine, "the cat", params)[-1].outputs]
    engine.add_request("a", "the cat", params)
    outputs = []
    for _ in range(5):
        outputs += engine.step()
    outputs.append(engine.abort("a", 1))
    assert not outputs[-1].finished
    assert outputs[-1].outputs[1].finish_reason == "abort"
    while engine.has_unfinished_requests():
        outputs += engine.step()
    for index, completion in enumerate(outputs[-1].outputs):
        assert "".join(output.outputs[index].delta for output in outputs) == completion.text
        assert completion.text == expected[index] or index == 1
    assert (len(outputs) == 2) == (kind is FINAL)


def test_an_error_returns_the_text_so_far_with_final_only_too(engine):
    (z,) = engine.tokenizer.encode("z")
    params = SamplingParams(allowed_token_ids=[z], bad_words=["zzz"], max_tokens=9, output_kind=FINAL)
    (output,) = outputs_of(engine, "the", params)
    assert "constraints that forbid every token" in output.error
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("zz", "error")


def test_every_sampling_parameter_of_a_request_reaches_the_worker(engine):
    asked = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {5: 2.0},
        "allowed_token_ids": [5, 6, 7],
        "min_tokens": 2,
        "logprobs": 3,
        "prompt_logprobs": 4,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
    }
    request = engine.input_processor.make_request(
        "a", "the", SamplingParams(**asked, bad_words=["zz"], stop_token_ids=[9], seed=11)
    )
    (seq,) = request.group.seqs
    settings = dataclasses.asdict(seq.settings)
    assert {name: settings.pop(name) for name in asked} == asked
    assert engine.tokenizer.encode("zz") in settings.pop("bad_words_token_ids")
    ends = engine.model_config.eos_token_ids
    assert EOS in ends and settings.pop("ending_token_ids") == sorted({*ends, 9})
    assert set(engine.tokenizer.encode('\n:"*')) <= set(settings.pop("dry_breaker_ids"))
    assert settings == {"pooling_type": None, "token_types": None}
    assert seq.seed == 11
    defaults = engine.input_processor.make_request("b", "the", SamplingParams()).group.seqs[0].settings
    assert defaults == SamplingSettings(ending_token_ids=sorted(ends))
