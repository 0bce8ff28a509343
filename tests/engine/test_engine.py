"""LLMEngine: requests in, outputs out; errors before anything runs; nothing lost, nothing left."""

import dataclasses
import logging
import re
import shutil

import pytest
import torch
from helpers import EOS, VOCAB_SIZE, finish, tiny_model
from safetensors.torch import load_file, save_file

from nanopage import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopage.build import build_engine
from nanopage.device import resolve_dtype, resolve_kv_dtype, set_cuda_precision
from nanopage.engine.statistics import count_state
from nanopage.params import RequestOutputKind
from nanopage.startup.options import refused
from nanopage.state.kv_cache import KVCache
from nanopage.state.pages import views
from nanopage.step import Batch
from nanopage.view.invariants import check_blocks
from nanopage.weights import loader
from nanopage.worker.model_runner import Launched

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def make_engine(model, **options) -> LLMEngine:
    defaults = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
    return build_engine(EngineConfig(model=str(model), **defaults | options))


def run(engine, **requests) -> dict:
    """Run requests (name -> (prompt, params)) together; name -> finished output."""
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    return finish(engine)


def fail_once(monkeypatch, engine) -> None:
    """Let the next launch of a batch fail, and only that one."""
    launch = engine.executor.worker.launch

    def fail(batch):
        monkeypatch.setattr(engine.executor.worker, "launch", launch)
        raise ValueError("once")

    monkeypatch.setattr(engine.executor.worker, "launch", fail)


def idle(engine) -> bool:
    manager = engine.scheduler.block_manager
    check_blocks(manager)
    return manager.num_free_blocks == manager.num_blocks and not engine.output_processor.requests


@pytest.mark.parametrize(
    ("prompt", "params", "error", "names"),
    [
        ("", GREEDY, ValueError, "empty"),
        ([], GREEDY, ValueError, "empty"),
        ({"prompt": ""}, GREEDY, ValueError, "empty"),
        ({}, GREEDY, ValueError, "prompt"),
        ({"prompt": 5, "prompt_token_ids": [5]}, GREEDY, TypeError, "a prompt must be a string"),
        ({"prompt": "a", "multi_modal_data": {}}, GREEDY, ValueError, "multi_modal_data"),
        ({"prompt": "a", "cache_salt": 3}, GREEDY, TypeError, "cache_salt"),
        (17, GREEDY, TypeError, "17"),
        (None, GREEDY, TypeError, "None"),
        ({"prompt": 3}, GREEDY, TypeError, "3"),
        ((5, 6), GREEDY, TypeError, "(5, 6)"),
        ([5, "x"], GREEDY, TypeError, "'x'"),
        ([5, True], GREEDY, TypeError, "True"),
        ([5, -1], GREEDY, ValueError, "-1"),
        ([5, VOCAB_SIZE], GREEDY, ValueError, str(VOCAB_SIZE)),
        ([5] * 128, GREEDY, ValueError, "max_model_len=128"),
        ("word " * 500, GREEDY, ValueError, "max_model_len=128"),
        ("a", {"temperature": 0}, TypeError, "sampling_params"),
        ("a", SamplingParams(stop_token_ids=[VOCAB_SIZE]), ValueError, "stop_token_ids"),
        ("a", SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), ValueError, "logit_bias"),
        ("a", SamplingParams(allowed_token_ids=[5, VOCAB_SIZE]), ValueError, "allowed_token_ids"),
        ("a", SamplingParams(allowed_token_ids=[EOS], min_tokens=3), ValueError, "allowed_token_ids"),
    ],
)
def test_a_bad_request_is_refused_by_name_and_leaves_nothing(model, prompt, params, error, names):
    engine = make_engine(model)
    with pytest.raises(error, match=".*" + names.replace("(", r"\(").replace(")", r"\)")):
        engine.add_request("bad", prompt, params)
    assert not engine.has_unfinished_requests()
    assert idle(engine)
    assert run(engine, bad=("the cat", GREEDY))["bad"].finished  # its name is still free


def test_parameters_changed_into_nonsense_after_construction_are_refused(model):
    params = SamplingParams()
    params.top_p = 7.0
    with pytest.raises(ValueError, match="top_p"):
        make_engine(model).add_request("a", "the cat", params)


def test_an_id_in_use_is_refused_and_free_again_when_finished(model):
    engine = make_engine(model)
    engine.add_request("a", "the cat", GREEDY)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", "the dog", GREEDY)
    finish(engine)
    assert "a" in run(engine, a=("the dog", GREEDY))


def test_a_batch_in_flight_does_not_report_on_a_request_that_has_taken_its_id(model):
    engine = make_engine(model, async_scheduling=True)
    ends = SamplingParams(temperature=0, logit_bias={EOS: 100.0}, min_tokens=3)
    run(engine, a=("the cat", ends))  # runs once too often: nobody knows yet that it has ended
    engine.add_request("a", "the dog", GREEDY)
    counts = []
    while engine.has_unfinished_requests():
        counts += [len(output.outputs[0].token_ids) for output in engine.step()]
    assert counts == list(range(1, 13))


def test_penalties_and_constraints_keep_two_steps_in_flight(model, monkeypatch):
    engine = make_engine(model, async_scheduling=True)
    executor, calls = engine.executor, []
    for name in ("submit", "result"):
        method = getattr(executor, name)
        monkeypatch.setattr(executor, name, lambda *a, name=name, method=method: calls.append(name) or method(*a))
    more = {"min_tokens": 9, "stop_token_ids": [5], "bad_words": ["a", "the cat"], "logit_bias": {7: 1.0}}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.1}
    both = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **more, **penalties)
    run(engine, a=("the cat", GREEDY), b=("the dog", both))
    assert calls == ["submit", *["submit", "result"] * 11, "result"]


def test_parameters_can_be_reused_and_changed_by_the_caller(model):
    engine, params = make_engine(model), dataclasses.replace(GREEDY)
    engine.add_request("a", "the cat", params)
    params.max_tokens = 2
    assert len(finish(engine)["a"].outputs[0].token_ids) == 12


def test_outputs_are_cumulative_and_deltas_add_up(model):
    engine = make_engine(model)
    engine.add_request("a", "the cat", GREEDY)
    text, counts = "", []
    while engine.has_unfinished_requests():
        for output in engine.step():
            text += output.outputs[0].delta
            counts.append(len(output.outputs[0].token_ids))
            assert output.outputs[0].text == text
    assert counts == list(range(1, 13))
    assert (output.prompt, output.finished, output.outputs[0].finish_reason) == ("the cat", True, "length")
    assert text == engine.tokenizer.decode(output.outputs[0].token_ids)


def test_end_of_sequence_and_stop_tokens_end_a_request_and_stay_out_of_the_text(model):
    engine = make_engine(model)
    free = run(engine, a=("the cat", GREEDY))["a"].outputs[0]
    last = free.token_ids[5]
    length = free.token_ids.index(last) + 1
    got = run(engine, a=("the cat", dataclasses.replace(GREEDY, stop_token_ids=[last])))["a"].outputs[0]
    assert got.token_ids == free.token_ids[:length]
    assert (got.finish_reason, got.stop_reason) == ("stop", last)
    assert got.text == engine.tokenizer.decode(free.token_ids[: length - 1])

    biased = SamplingParams(temperature=0, logit_bias={EOS: 100.0}, min_tokens=3, max_tokens=9)
    got = run(engine, a=("the cat", biased))["a"].outputs[0]
    assert got.token_ids.index(EOS) == 3
    assert (got.finish_reason, got.stop_reason) == ("stop", None)
    assert len(run(engine, a=("the cat", dataclasses.replace(biased, ignore_eos=True)))["a"].outputs[0].token_ids) == 9


def test_a_stop_string_ends_a_request_before_it(model):
    engine = make_engine(model)
    free = run(engine, a=("the cat", GREEDY))["a"].outputs[0].text
    stop = free[4:7]
    got = run(engine, a=("the cat", dataclasses.replace(GREEDY, stop=[stop, "never seen"])))["a"].outputs[0]
    assert got.text == free[: free.index(stop)]
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    kept = dataclasses.replace(GREEDY, stop=stop, include_stop_str_in_output=True)
    assert run(engine, a=("the cat", kept))["a"].outputs[0].text == free[: free.index(stop) + len(stop)]


def test_a_request_ends_at_the_length_of_the_model(model):
    engine = make_engine(model, max_model_len=32)
    output = run(engine, a=([5] * 30, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)))["a"]
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "length"


def test_abort_returns_what_there_is_and_frees_the_blocks(model):
    engine = make_engine(model, max_num_seqs=1)
    engine.add_request("runs", "the cat", GREEDY)
    engine.add_request("waits", "the dog", GREEDY)
    for _ in range(3):
        engine.step()
    waiting, running = engine.abort("waits"), engine.abort("runs")
    assert waiting.finished
    assert waiting.outputs[0].token_ids == []
    assert len(running.outputs[0].token_ids) == 3
    assert running.outputs[0].finish_reason == "abort"
    assert engine.abort("runs") is None
    assert not engine.has_unfinished_requests()
    assert idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_can_be_run_again(model, monkeypatch, overlap):
    expected = run(make_engine(model), a=("the cat", GREEDY), b=("a dog in the house", GREEDY))
    engine = make_engine(model, max_num_batched_tokens=6, async_scheduling=overlap)
    engine.add_request("a", "the cat", GREEDY)
    engine.add_request("b", "a dog in the house", GREEDY)
    worker = engine.executor.worker
    launch, calls = worker.launch, []

    def failing(batch):
        calls.append(batch)
        launched = launch(batch)  # the cache is written, but nobody hears of it
        if len(calls) % 3 == 0 and not engine.scheduler.queues.suspects:
            raise RuntimeError("out of memory")
        return launched

    monkeypatch.setattr(worker, "launch", failing)
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check_blocks(engine.scheduler.block_manager)
    assert len(calls) > 12
    for name in ("a", "b"):
        assert done[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
        assert done[name].error is None
    assert idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["schedule", "launch", "result", "update", "text", "output"])
def test_a_request_that_makes_every_step_fail_ends_with_an_error_and_the_others_go_on(
    model, monkeypatch, caplog, overlap, where
):
    prompts = {"a": "the cat", "bad": "a dog in the house", "c": "then they were", "d": "the man and the"}
    expected = run(make_engine(model), **{name: (prompt, GREEDY) for name, prompt in prompts.items()})
    engine = make_engine(model, max_num_batched_tokens=12, async_scheduling=overlap)

    def fail_for_bad(function, is_bad):
        def failing(*args, **kwargs):
            result = function(*args, **kwargs)
            if is_bad(*args, result):
                raise ValueError("what this request does")
            return result

        return failing

    def in_batch(batch):
        return any(seq.row in batch.rows for seq in bad.group.live)

    def in_schedule(schedule, *_):
        return any(seq.group is bad.group for seq in schedule.sequences)

    scheduler, worker, processor = engine.scheduler, engine.executor.worker, engine.output_processor
    launched = []  # (whether it is in the batch, what launching it has given)
    owner, name, is_bad = {
        "schedule": (scheduler.writer, "take", lambda _, work, *__: any(seq.group is bad.group for seq, _ in work)),
        "launch": (worker, "launch", lambda batch, _: in_batch(batch)),
        "result": (Launched, "result", lambda step, _: any(step is other and failing for failing, other in launched)),
        "update": (scheduler, "update", in_schedule),
        "text": (processor, "_read_token", lambda request, *_: request is bad),
        "output": (processor, "_output", lambda request, *_: request is bad),
    }[where]
    if where == "result":
        watched = fail_for_bad(worker.launch, lambda batch, step: launched.append((in_batch(batch), step)))
        monkeypatch.setattr(worker, "launch", watched)
    monkeypatch.setattr(owner, name, fail_for_bad(getattr(owner, name), is_bad))
    requests = {name: engine.input_processor.make_request(name, prompt, GREEDY) for name, prompt in prompts.items()}
    bad = requests["bad"]
    for request in requests.values():
        engine.submit(request)
    done = finish(engine)
    assert "what this request does" in done["bad"].error
    assert {c.finish_reason for c in done["bad"].outputs} <= {"error"}
    assert "request bad ended by an error" in caplog.text or where == "output"
    for name in ("a", "c", "d"):
        assert done[name].error is None
        assert done[name].outputs[0].token_ids == expected[name].outputs[0].token_ids
        assert done[name].outputs[0].text == expected[name].outputs[0].text
    assert idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_when_no_batch_can_run_every_request_ends_with_an_error(model, monkeypatch, overlap):
    def failing(batch):
        raise RuntimeError("the device is gone")

    engine = make_engine(model, async_scheduling=overlap)
    monkeypatch.setattr(engine.executor.worker, "launch", failing)
    engine.add_request("a", "the cat", GREEDY)
    engine.add_request("b", "a dog", GREEDY)
    done = {}
    for _ in range(20):  # an engine that never came to an end would fill the memory with its log
        done |= {output.request_id: output for output in engine.step()}
    assert all("the device is gone" in done[name].error for name in ("a", "b"))
    assert not engine.has_unfinished_requests() and idle(engine)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "params",
    [GREEDY, SamplingParams(seed=1, logprobs=2), SamplingParams(seed=1, top_p=0.9, n=2), BeamSearchParams(width=2)],
    ids=["greedy", "sampled", "truncated", "beams"],
)
def test_logits_that_are_not_finite_end_their_request_with_an_error(model, monkeypatch, value, overlap, params):
    engine = make_engine(model, async_scheduling=overlap)
    expected = run(engine, b=("a dog in the house", GREEDY))["b"]
    read_by_b = {*expected.prompt_token_ids, *expected.outputs[0].token_ids}
    poisoned = next(token_id for token_id in range(100, VOCAB_SIZE) if token_id not in read_by_b)
    engine.executor.worker.model.embed_tokens.weight.matrix[poisoned] = value
    done = run(engine, a=([5, poisoned, 7], params), b=("a dog in the house", GREEDY))
    a, b = done["a"], done["b"]
    assert "not finite" in a.error
    assert {completion.finish_reason for completion in a.outputs} == {"error"}
    assert all(completion.token_ids == [] and completion.text == "" for completion in a.outputs)
    assert (b.error, b.outputs[0].token_ids) == (None, expected.outputs[0].token_ids)
    assert idle(engine)


def test_constraints_that_forbid_every_token_end_the_request_with_an_error(model):
    engine = make_engine(model)
    (z,) = engine.tokenizer.encode("z")
    assert engine.tokenizer.encode("zz") == [z, z]
    output = run(engine, a=("the", SamplingParams(allowed_token_ids=[z], bad_words=["zz"], max_tokens=9)))["a"]
    assert "constraints that forbid every token" in output.error
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("z", "error")
    assert idle(engine)


def test_what_the_cache_held_before_does_not_matter(model):
    expected = run(make_engine(model), a=("the cat", GREEDY), b=("a dog in the house", GREEDY))
    engine = make_engine(model)
    engine.executor.worker.kv_cache.tensor.fill_(torch.nan)
    got = run(engine, a=("the cat", GREEDY), b=("a dog in the house", GREEDY))
    for name in ("a", "b"):
        assert got[name].outputs[0].token_ids == expected[name].outputs[0].token_ids


def test_a_prompt_seen_before_is_served_from_the_prefix_cache(model):
    engine = make_engine(model, block_size=4)
    prompt = list(range(10, 22))
    first, again = run(engine, a=(prompt, GREEDY))["a"], run(engine, a=(prompt, GREEDY))["a"]
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)  # the last token is always computed
    assert first.outputs[0].token_ids == again.outputs[0].token_ids
    longer = run(engine, a=(prompt + first.outputs[0].token_ids, GREEDY))["a"]
    assert longer.num_cached_tokens == 20  # the output's blocks are cached, too


def test_a_salt_keeps_prefixes_apart(model):
    engine = make_engine(model, block_size=4)
    prompt = list(range(10, 22))
    run(engine, a=({"prompt_token_ids": prompt, "cache_salt": "one"}, GREEDY))
    other = run(engine, a=({"prompt_token_ids": prompt, "cache_salt": "two"}, GREEDY))["a"]
    same = run(engine, a=({"prompt_token_ids": prompt, "cache_salt": "one"}, GREEDY))["a"]
    assert (other.num_cached_tokens, same.num_cached_tokens) == (0, 8)


def test_a_seeded_request_does_not_depend_on_its_neighbours(model):
    params = SamplingParams(temperature=1.5, seed=7, max_tokens=12, ignore_eos=True)
    alone = run(make_engine(model), a=("the cat", params))["a"].outputs[0].token_ids
    crowd = {str(i): ("the dog " * i, SamplingParams(temperature=1.0, max_tokens=9)) for i in range(1, 6)}
    assert (
        run(make_engine(model, max_num_batched_tokens=9), **crowd, a=("the cat", params))["a"].outputs[0].token_ids
        == alone
    )
    other = run(make_engine(model), a=("the cat", dataclasses.replace(params, seed=8)))["a"].outputs[0].token_ids
    assert other != alone


def test_the_engine_seed_decides_for_requests_without_one(model):
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    same, again, other = (
        [run(engine, a=("the cat", params))["a"].outputs[0].token_ids for _ in range(2)]
        for engine in (make_engine(model, seed=3), make_engine(model, seed=3), make_engine(model, seed=4))
    )
    assert same == again
    assert same != other
    assert same[0] != same[1]  # two requests are two draws


def test_two_engines_in_one_process_do_not_meet(model, tmp_path):
    other_model = tiny_model(tmp_path, family="qwen3", seed=5)
    expected = [
        run(make_engine(path), a=("the cat", GREEDY))["a"].outputs[0].token_ids for path in (model, other_model)
    ]
    engines = [make_engine(model), make_engine(other_model, block_size=8)]
    for engine in engines:
        engine.add_request("a", "the cat", GREEDY)
    done = {}
    while any(engine.has_unfinished_requests() for engine in engines):
        for i, engine in enumerate(engines):
            done |= {(i, output.request_id): output for output in engine.step() if output.finished}
    assert [done[i, "a"].outputs[0].token_ids for i in range(2)] == expected


def test_times_are_in_order(model):
    metrics = run(make_engine(model), a=("the cat", GREEDY))["a"].metrics
    times = [metrics.arrival_time, metrics.first_scheduled_time, *metrics.token_times, metrics.finished_time]
    assert times == sorted(times)
    assert len(metrics.token_times) == 12
    assert metrics.time_to_first_token == metrics.token_times[0] - metrics.arrival_time
    assert metrics.time_in_queue == metrics.first_scheduled_time - metrics.arrival_time


def test_prompt_logprobs_are_the_same_in_one_go_in_chunks_and_after_preemption(model):
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=2, ignore_eos=True)
    prompt = [(7 * i) % VOCAB_SIZE for i in range(40)]
    whole = run(make_engine(model), a=(prompt, params))["a"]
    assert whole.prompt_logprobs[0] is None
    assert len(whole.prompt_logprobs) == 40
    assert all(token in table for token, table in zip(prompt[1:], whole.prompt_logprobs[1:], strict=True))
    tight = make_engine(model, block_size=4, max_model_len=64, num_gpu_blocks_override=17, max_num_batched_tokens=7)
    crowded = run(tight, b=([5] * 10, GREEDY), a=(prompt, params), c=([6] * 20, GREEDY))["a"]
    assert tight.scheduler.queues.num_preemptions > 0
    for one, other in zip(whole.prompt_logprobs[1:], crowded.prompt_logprobs[1:], strict=True):
        assert one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-9)


@pytest.mark.parametrize("budget", [7, 256])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_prompt_logprobs_are_there_however_soon_the_request_ends(model, budget, max_tokens):
    params = SamplingParams(temperature=0, max_tokens=max_tokens, prompt_logprobs=0)
    output = run(make_engine(model, max_num_batched_tokens=budget), a=(list(range(10, 30)), params))["a"]
    assert [list(table) for table in output.prompt_logprobs[1:]] == [[token_id] for token_id in range(11, 30)]


def test_a_length_beyond_the_model_is_refused(model):
    with pytest.raises(ValueError, match="max_model_len=5000"):
        make_engine(model, max_model_len=5000)


def test_a_pool_smaller_than_one_request_is_refused_with_the_options_that_help(model):
    with pytest.raises(MemoryError, match="kv_cache_gib or gpu_memory_utilization, or lower max_model_len"):
        make_engine(model, num_gpu_blocks_override=3)
    with pytest.raises(MemoryError, match="no room for the KV cache"):
        make_engine(model, num_gpu_blocks_override=None, kv_cache_gib=1e-9)
    with pytest.raises(MemoryError, match="kv_cache_gib=100000"):
        make_engine(model, num_gpu_blocks_override=None, kv_cache_gib=100000)


def test_the_length_shrinks_to_the_pool_when_nobody_asked_for_one(model, caplog):
    with caplog.at_level(logging.INFO, "nanopage"):
        engine = make_engine(model, max_model_len=None, num_gpu_blocks_override=4)
    assert engine.max_model_len == 64
    assert "max_model_len is 64" in caplog.text


def test_the_pool_is_sized_and_printed(model, caplog):
    with caplog.at_level(logging.INFO, "nanopage"):
        engine = make_engine(
            model, num_gpu_blocks_override=None, kv_cache_gib=0.001, max_model_len=32, max_num_seqs=500
        )
    block = 2 * 2 * 16 * 2 * 16 * 8  # layers, K and V, tokens, kv heads, head_dim, bytes
    assert engine.executor.worker.kv_cache.num_blocks == int(0.001 * 2**30 // block)
    assert f"{engine.executor.worker.kv_cache.num_blocks * 16:,} tokens" in caplog.text
    assert "requests of 32 tokens" in caplog.text
    share = make_engine(model, num_gpu_blocks_override=None, max_num_seqs=3)  # never more than it can use
    assert share.executor.worker.kv_cache.num_blocks == 3 * 128 // 16


def test_a_dtype_the_machine_does_not_compute_in_is_replaced_with_one_line(model, caplog, monkeypatch):
    monkeypatch.setattr("nanopage.device.computes_natively", lambda dtype, device: dtype == "float32")
    half = tiny_model(model.parent / "half", dtype="float16")
    with caplog.at_level(logging.INFO, "nanopage"):
        engine = make_engine(half, dtype="auto", enforce_eager=True)
    assert engine.capacity.dtype == "float32"
    assert [r.message for r in caplog.records if "natively" in r.message] == [
        "this CPU does not compute in float16 natively: using float32"
    ]
    assert "KV cache in float16" in caplog.text
    output = run(engine, a=("the cat", GREEDY))["a"]
    assert output.finished and engine.executor.worker.kv_cache.tensor.dtype == torch.float16


@pytest.mark.parametrize(
    ("name", "checkpoint", "dtype", "device", "expected"),
    [
        ("auto", "bfloat16", "float32", "cpu", "bfloat16"),
        ("auto", "float16", "float32", "cpu", "float16"),
        ("auto", "float32", "float32", "cpu", "float32"),
        ("auto", "bfloat16", "bfloat16", "cpu", "bfloat16"),
        ("float32", "bfloat16", "float32", "cpu", "float32"),
        ("auto", "bfloat16", "float16", "cuda", "float16"),
    ],
)
def test_k_and_v_have_the_checkpoints_16_bits_where_float32_only_replaces_them(
    name, checkpoint, dtype, device, expected
):
    resolved = resolve_kv_dtype("auto", name, checkpoint, getattr(torch, dtype), torch.device(device))
    assert resolved == getattr(torch, expected)


def test_a_cache_in_fp8_holds_twice_the_tokens_of_one_in_16_bits(model):
    sizes = {"num_gpu_blocks_override": None, "kv_cache_gib": 0.001, "enforce_eager": True}
    sizes |= {"dtype": "bfloat16"}
    plain, fp8, e4m3 = (
        make_engine(model, kv_cache_dtype=name, **sizes).capacity.num_blocks for name in ("auto", "fp8", "fp8_e4m3")
    )
    assert 2 * plain <= fp8 == e4m3 <= 2 * plain + 1


def test_k_and_v_in_fp8_are_divided_by_the_checkpoints_scales(tmp_path):
    path = tiny_model(tmp_path)
    scales = {
        "model.layers.0.self_attn.k_scale": torch.tensor(0.05),
        "model.layers.0.self_attn.v_scale": torch.tensor(0.04),
    }
    weights = load_file(path / "model.safetensors")
    save_file(weights | scales, path / "model.safetensors")

    def k_and_v(**options):
        """Of the first layer, of the prompt."""
        engine = make_engine(path, dtype="float32", enforce_eager=True, **options)
        run(engine, a=([3, 4, 5, 6], GREEDY))
        worker = engine.executor.worker
        k_pages, v_pages = views(worker.kv_cache.tensor[0], worker.setup.part.head_dim)
        block = int(worker.runner.table.block_tables[0, 0])
        return k_pages[block, :, :, :4].float(), v_pages[block, :, :4].float()

    for exact, rounded, scale in zip(k_and_v(), k_and_v(kv_cache_dtype="fp8"), scales.values(), strict=True):
        assert 0 < (exact - rounded * float(scale)).norm() < 0.05 * exact.norm()


def test_blocks_in_fp8_are_swapped_copied_and_cleared_byte_for_byte(model):
    """Also NaN, which a block may hold where nothing has been written."""
    config = make_engine(model).model_config
    cache = KVCache(config, 8, 4, torch.float8_e4m3fn, torch.device("cpu"), num_host_blocks=3)
    held = cache.tensor.view(torch.uint8).random_()
    before = held.clone()
    cache.move(Batch(swap_out=[(1, 2), (4, 0)], copies=[(6, 1)], cleared=[7]))
    assert torch.equal(held[:, :, [1, 4, 6]], before[:, :, [6, 4, 6]]) and not held[:, :, 7].any()
    cache.move(Batch(swap_in=[(2, 3), (0, 5)]))
    assert torch.equal(held[:, :, [3, 5]], before[:, :, [1, 4]])


def test_where_fp8_is_not_supported_it_is_refused_by_name(model, monkeypatch):
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8' on a CPU needs enforce_eager=True"):
        make_engine(model, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8_e5m2' is not one of auto, fp8, fp8_e4m3"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")
    for capability, fits in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        arguments = loader.read_config(model), torch.device("cuda"), torch.bfloat16, model
        found = [*refused(EngineConfig(kv_cache_dtype="fp8_e4m3"), *arguments)]
        assert len(found) == (not fits)
        for message in found:
            assert re.match(rf"kv_cache_dtype='fp8_e4m3' .* 8.9 .* has {capability[0]}\.{capability[1]}", message)


@pytest.mark.parametrize(
    ("capability", "checkpoint", "expected"),
    [
        ((9, 0), "bfloat16", "bfloat16"),
        ((8, 0), "bfloat16", "bfloat16"),
        ((7, 5), "bfloat16", "float16"),
        ((7, 5), "float16", "float16"),
        ((7, 5), "float32", "float32"),
        ((8, 0), "float64", "float64"),
    ],
)
def test_a_gpu_computes_in_bfloat16_from_capability_8_on_and_before_in_float16(
    monkeypatch, capability, checkpoint, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dtype, why = resolve_dtype("auto", checkpoint, torch.device("cuda"))
    assert dtype == getattr(torch, expected)
    same = checkpoint == expected
    assert why == (None if same else "this GPU does not compute in bfloat16 natively: using float16")


@pytest.fixture
def coarse():
    """torch's settings at their least exact; afterwards its defaults."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    torch.set_float32_matmul_precision("medium")
    cudnn.allow_tf32 = True
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    yield
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = True
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True


def test_products_on_a_gpu_are_exact_and_a_cpu_engine_touches_no_setting(coarse, model, monkeypatch, recwarn):
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

    def settings():
        reductions = matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction
        return torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32, *reductions

    make_engine(model)
    assert settings() == ("medium", True, True, True, True)
    monkeypatch.setattr("nanopage.startup.worker.resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr("nanopage.weights.loader.load_model", lambda *_, **__: pytest.fail("no GPU is needed so far"))
    with pytest.raises(pytest.fail.Exception):
        make_engine(model, dtype="float32")
    assert settings() == ("highest", False, False, False, False)
    assert matmul.fp32_precision == "ieee"  # what Inductor reads beside the old names
    assert not [warning for warning in recwarn if "precision" in str(warning.message).lower()]


@pytest.mark.gpu
def test_a_product_of_float32_on_a_gpu_is_float32s(coarse):
    x, w = torch.randn(2, 512, 512, dtype=torch.float64, device="cuda")
    set_cuda_precision()
    error = ((x.float() @ w.float()).double() - x @ w).abs().max().item()
    assert error < 1e-3  # TF32's is some 0.03


def test_fp8_weights_are_refused_on_a_cpu(model):
    with pytest.raises(ValueError, match="quantization='fp8' works on a GPU only"):
        make_engine(model, quantization="fp8")


def test_quantized_weights_in_float64_are_refused_on_a_gpu(model, monkeypatch):
    monkeypatch.setattr("nanopage.startup.worker.resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match="quantization='int8' on a GPU does not work in float64"):
        make_engine(model, quantization="int8", dtype="float64")


def test_pages_that_the_kernels_of_a_gpu_can_not_read_are_refused(model, monkeypatch):
    monkeypatch.setattr("nanopage.startup.worker.resolve_device", lambda name: torch.device("cuda"))
    with pytest.raises(ValueError, match="block_size=12 must be a power of two on a GPU"):
        make_engine(model, block_size=12)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_integer_weights_serve_in_every_dtype_and_schedule(model, dtype, quantization):
    options = {"dtype": dtype, "quantization": quantization, "enforce_eager": True}
    prompts = {"a": ("the cat", GREEDY), "b": ([5] * 40, GREEDY), "c": ("the morning", GREEDY)}
    together = run(make_engine(model, **options, max_num_batched_tokens=16), **prompts)
    assert all(output.finished for output in together.values())
    if dtype == "float64":
        for name, prompt in prompts.items():
            alone = run(make_engine(model, **options), **{name: prompt})[name]
            assert together[name].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.fixture
def config_only(model, tmp_path):
    """A directory with config.json and nothing else."""
    shutil.copy(model / "config.json", tmp_path)
    return tmp_path


def test_dummy_weights_serve_token_ids_without_a_tokenizer(config_only, caplog):
    with caplog.at_level(logging.INFO, "nanopage"):
        engine = make_engine(config_only, load_format="dummy")
    assert engine.tokenizer is None
    assert "with dummy weights" in caplog.text
    params = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=2)
    beams = BeamSearchParams(width=2, max_tokens=5)
    done = run(engine, a=([5, 6, 7], params), b=({"prompt_token_ids": [8, 9]}, GREEDY), c=([5, 6], beams))
    completion = done["a"].outputs[0]
    assert (len(completion.token_ids), completion.text, completion.delta) == (12, "", "")
    tables = completion.logprobs + done["a"].prompt_logprobs[1:]
    assert len(tables) == 14
    assert all(entry.logprob < 0 and entry.decoded_token is None for table in tables for entry in table.values())
    assert [beam.text for beam in done["c"].outputs] == ["", ""]
    again = run(make_engine(config_only, load_format="dummy"), a=([5, 6, 7], GREEDY))["a"]
    assert again.outputs[0].token_ids == completion.token_ids
    assert idle(engine)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ("the cat", GREEDY, "a prompt of text needs a tokenizer, and .* has no tokenizer.json: give prompt_token_ids"),
        ({"prompt": "the cat"}, GREEDY, "has no tokenizer.json: give prompt_token_ids"),
        ([5], SamplingParams(stop="a"), "stop needs a tokenizer, and .* has no tokenizer.json: give stop_token_ids"),
        ([5], SamplingParams(bad_words=["a"]), "bad_words needs a tokenizer"),
    ],
)
def test_text_without_a_tokenizer_is_refused_and_leaves_nothing(config_only, prompt, params, message):
    engine = make_engine(config_only, load_format="dummy")
    with pytest.raises(ValueError, match=message):
        engine.add_request("a", prompt, params)
    assert idle(engine)


def test_dummy_weights_use_a_tokenizer_that_is_there_and_true_weights_need_one(model, config_only):
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        make_engine(config_only)
    shutil.copy(model / "tokenizer.json", config_only)
    output = run(make_engine(config_only, load_format="dummy", quantization="int8"), a=("the cat", GREEDY))["a"]
    assert output.outputs[0].text
    with pytest.raises(ValueError, match=r"has no \.safetensors weights"):
        make_engine(config_only)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_cuda_without_cuda_is_refused(model):
    with pytest.raises(ValueError, match="device='cuda'"):
        make_engine(model, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_answers_on_a_gpu_as_on_a_cpu(model, dtype):
    options = {"dtype": dtype, "max_num_batched_tokens": 9}
    requests = {str(i): ("the cat in the house " * i, GREEDY) for i in range(1, 4)}
    cpu = run(make_engine(model, enforce_eager=True, **options), **requests)
    gpu = run(make_engine(model, device="cuda", **options), **requests)
    for name in requests:
        assert gpu[name].finished
        if dtype == "float32":
            assert gpu[name].outputs[0].token_ids == cpu[name].outputs[0].token_ids


@pytest.mark.parametrize("overlap", [False, True])
def test_outputs_that_a_failing_step_could_not_return_come_with_the_next_or_with_an_abort(model, monkeypatch, overlap):
    engine = make_engine(model, async_scheduling=overlap)
    expected = run(make_engine(model), a=("the cat", GREEDY), b=("the dog", GREEDY))
    for request_id, prompt in (("a", "the cat"), ("b", "the dog")):
        engine.add_request(request_id, prompt, GREEDY)
    count, failing, deltas, last = count_state, True, {"a": "", "b": ""}, {}

    def fails_every_other_time(*arguments):
        nonlocal failing
        failing = not failing
        if failing:
            raise KeyboardInterrupt
        count(*arguments)

    monkeypatch.setattr("nanopage.engine.engine.count_state", fails_every_other_time)
    while engine.has_unfinished_requests():
        outputs = []
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            if len(deltas["b"]) > 3:
                outputs = [output for output in [engine.abort("b")] if output]
        for output in outputs:
            deltas[output.request_id] += output.outputs[0].delta
            last[output.request_id] = output.outputs[0]
    assert deltas["a"] == last["a"].text == expected["a"].outputs[0].text
    assert deltas["b"] == last["b"].text
    assert expected["b"].outputs[0].text.startswith(deltas["b"])
    assert last["b"].finish_reason == "abort"
    assert idle(engine)


def test_a_reset_of_the_prefix_cache_that_is_interrupted_loses_no_block(model, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    engine = make_engine(model)
    prompt = {"prompt_token_ids": list(range(5, 60))}
    expected = run(engine, a=(prompt, GREEDY))["a"].outputs[0].token_ids
    manager = engine.scheduler.block_manager
    assert manager.num_cached_blocks
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(manager.prefixes, "clear", interrupt)
        engine.reset_prefix_cache()
    assert run(engine, b=(prompt, GREEDY))["b"].outputs[0].token_ids == expected
    assert idle(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_listeners_see_every_step_and_lose_nothing_by_raising(model, overlap):
    engine = make_engine(model, async_scheduling=overlap)
    expected = run(engine, a=("the cat", GREEDY))["a"].outputs[0]
    seen, events = [], []

    def listen(stats):
        seen.append(stats.prefill_tokens + stats.decode_tokens)
        events.extend((event.request_id, event.kind) for event in stats.events)
        if len(seen) % 3 == 0:
            raise KeyError("stop here")

    engine.listeners.append(listen)
    engine.add_request("a", "the cat", GREEDY)
    text, calls = "", 0
    while engine.has_unfinished_requests():
        calls += 1
        try:
            outputs = engine.step()
        except KeyError:
            continue
        text += "".join(output.outputs[0].delta for output in outputs)
    assert (text, outputs[-1].outputs[0].token_ids) == (expected.text, expected.token_ids)
    assert len(seen) == calls and sum(seen) >= len(expected.token_ids)
    assert events == [("a", "added"), ("a", "started"), ("a", "finished")]
    assert idle(engine)


def test_the_events_of_a_request_whose_text_cannot_be_made(model, monkeypatch):
    engine = make_engine(model)
    kinds = []
    engine.listeners.append(lambda stats: kinds.extend(event.kind for event in stats.events))

    def fail(*_):
        raise ValueError("no text")

    monkeypatch.setattr(engine.output_processor, "_read_all", fail)
    params = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)  # read when it has finished
    output = run(engine, a=("the cat", params))["a"]
    assert "no text" in output.error
    assert [kind for kind in kinds if kind not in ("started", "preempted")] == ["added", "finished"]


def test_an_engine_without_work_submits_nothing(model, monkeypatch):
    engine = make_engine(model, async_scheduling=True)
    run(engine, a=("the cat", GREEDY))
    for _ in range(2):
        engine.step()
    submitted = []
    monkeypatch.setattr(engine.executor, "submit", submitted.append)
    for _ in range(3):
        assert engine.step() == []
    assert submitted == []


def test_the_id_of_an_output_that_has_not_been_returned_is_in_use(model):
    engine = make_engine(model)
    engine.add_request("a", "the cat", SamplingParams(temperature=0, max_tokens=1))

    def fail(stats):
        raise KeyError("listener")

    engine.listeners.append(fail)
    with pytest.raises(KeyError):
        engine.step()
    engine.listeners.clear()
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("a", "the dog", GREEDY)
    (output,) = engine.step()
    assert output.finished
    assert len(run(engine, a=("the dog", GREEDY))["a"].outputs[0].token_ids) == 12
    assert idle(engine)


@pytest.mark.parametrize("index", [None, 1])
def test_prompt_logprobs_stay_whole_when_a_prompt_is_computed_again(model, monkeypatch, index):
    prompt = {"prompt_token_ids": list(range(5, 45))}
    params = SamplingParams(
        n=2, seed=1, max_tokens=12, ignore_eos=True, prompt_logprobs=1, output_kind=RequestOutputKind.FINAL_ONLY
    )
    expected = run(make_engine(model, max_num_batched_tokens=8), a=(prompt, params))["a"].prompt_logprobs
    engine = make_engine(model, max_num_batched_tokens=8)
    engine.add_request("a", prompt, params)
    while not engine.last_step.decode_tokens:
        assert engine.step() == []
    fail_once(monkeypatch, engine)
    for _ in range(3):  # it fails, and computes two chunks of the prompt again
        engine.step()
    output = engine.abort("a", index)
    if index is not None:
        output = finish(engine)["a"]
    assert output.prompt_logprobs == expected


def test_events_tell_of_a_failed_step_and_of_an_abort_between_steps(model, monkeypatch):
    engine = make_engine(model)
    engine.add_request("a", "the cat", GREEDY)
    engine.add_request("b", "the dog", GREEDY)
    engine.step()
    kinds = []
    engine.listeners.append(lambda stats: kinds.append([(e.request_id, e.kind) for e in stats.events]))
    fail_once(monkeypatch, engine)
    engine.step()
    engine.step()
    engine.abort("b")
    finish(engine)
    assert kinds[0] == [("a", "preempted"), ("b", "preempted")]
    assert kinds[1] == [("a", "started")]
    assert kinds[2] == [("b", "finished")]
    assert kinds[-1] == [("a", "finished")]
