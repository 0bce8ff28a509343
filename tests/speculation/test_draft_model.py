"""nanopage/speculation/draft_model.py: a small model drafts, and no output changes."""

import logging
import time

import pytest
import torch
from helpers import tiny_model

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.checks.speculation import SpeculativeConfig
from nanopage.speculation.draft_model import CATCH_UP, FIRST_READ, ModelDrafter
from nanopage.speculation.lookup import StepTimes
from nanopage.startup.options import refused
from nanopage.weights import loader

OPTIONS = {"dtype": "float64", "device": "cpu", "enforce_eager": True, "max_model_len": 200, "block_size": 8}
PROMPTS = [list(range(10, 10 + length)) for length in (5, 40, 17)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True, n=2)
PENALIZED = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, repetition_penalty=1.3)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A smaller model with the same vocabulary."""
    return tiny_model(tmp_path_factory.mktemp("other"), seed=1, num_hidden_layers=1)


def load(model, draft=None, **options) -> LLM:
    if draft is not None:
        options["speculative_config"] = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    return LLM(str(model), **OPTIONS | options)


def drafter_of(llm) -> ModelDrafter:
    return llm.engine.scheduler.drafts.drafter


@pytest.fixture
def always(monkeypatch):
    """Drafts of full length in every step that may have some."""
    monkeypatch.setattr("nanopage.speculation.lookup.LEAST_SPEEDUP", 0.0)
    monkeypatch.setattr("nanopage.speculation.draft_model.EXPECTED_STEP", 0.0)
    monkeypatch.setattr("nanopage.speculation.lookup.MOST_LOSS", 1e9)
    monkeypatch.setattr("nanopage.speculation.lookup.StepCosts.of", lambda costs, num_rows: StepTimes(1.0, 0, 0.0))


def tokens(llm, params, prompts=PROMPTS):
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PENALIZED], ids=["greedy", "sampled", "penalized"])
@pytest.mark.usefixtures("always")
def test_the_output_is_that_without_drafts(model, other, params):
    expected = tokens(load(model), params)
    for draft in (model, other):
        llm = load(model, draft)
        assert tokens(llm, params) == expected
        drafter = drafter_of(llm)
        acceptance = drafter.gains.acceptance[0]
        assert acceptance.tried > 1
        if draft == model:  # the same noise: a model accepts all of its own drafts, sampled ones, too
            assert acceptance.accepted == acceptance.tried
        assert not drafter.rows and drafter.manager.num_free_blocks == drafter.manager.num_blocks


@pytest.mark.usefixtures("always")
def test_an_abort_leaves_nothing(model):
    engine = load(model, model).engine
    engine.add_request("a", {"prompt_token_ids": PROMPTS[1]}, GREEDY)
    engine.add_request("b", {"prompt_token_ids": PROMPTS[0]}, GREEDY)
    for _ in range(4):
        engine.step()
    drafter = engine.scheduler.drafts.drafter
    assert len(drafter.rows) == 2
    engine.abort("a")
    engine.step()
    assert len(drafter.rows) == 1
    engine.abort("b")
    assert not drafter.rows and drafter.manager.num_free_blocks == drafter.manager.num_blocks


@pytest.mark.usefixtures("always")
def test_a_draft_model_that_fails_is_not_used_again(model, monkeypatch, caplog):
    llm = load(model, model)
    drafter, expected = drafter_of(llm), tokens(load(model), GREEDY)
    launch, calls = drafter.executor.worker.launch, []

    def failing(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return launch(batch)

    monkeypatch.setattr(drafter.executor.worker, "launch", failing)
    with caplog.at_level(logging.WARNING):
        assert tokens(llm, GREEDY) == expected
    assert len(calls) == 3 and "the draft model failed" in caplog.text and "out of memory" in caplog.text
    assert drafter.manager.num_free_blocks == drafter.manager.num_blocks


@pytest.mark.usefixtures("always")
def test_prompts_are_read_in_chunks_and_found_again(model):
    llm = load(model, model, max_num_batched_tokens=32)
    drafter = drafter_of(llm)
    launch, counts = drafter.executor.worker.launch, []
    drafter.executor.worker.launch = lambda batch: (counts.append(list(batch.counts)), launch(batch))[1]
    prompt = [7 + i % 40 for i in range(100)]
    tokens(llm, GREEDY, [prompt])
    assert [32] in counts and max(sum(each) for each in counts) <= 32 + CATCH_UP
    hits = drafter.manager.num_hit_tokens
    tokens(llm, GREEDY, [prompt])
    assert drafter.manager.num_hit_tokens > hits


@pytest.mark.usefixtures("always")
def test_sequences_longer_than_the_draft_model_get_no_drafts(model, tmp_path):
    short = tiny_model(tmp_path, max_position_embeddings=50)
    llm = load(model, short)
    assert tokens(llm, GREEDY, [PROMPTS[1]]) == tokens(load(model), GREEDY, [PROMPTS[1]])
    assert drafter_of(llm).max_model_len == 50


def test_drafts_that_do_not_pay_are_not_made(model, other):
    """With costs as they are: a model of the same size cannot make its own engine faster."""
    llm = load(model, other)
    drafter = drafter_of(llm)
    for _ in range(3):
        drafter.step_costs.add(1, 0, 10.0)
    calls = []
    launch = drafter.executor.worker.launch
    drafter.executor.worker.launch = lambda batch: (calls.append(batch), launch(batch))[1]
    tokens(llm, GREEDY, [PROMPTS[0]])
    assert not calls


def test_a_draft_model_with_another_vocabulary_is_refused(model, default_model):
    with pytest.raises(ValueError, match="another vocabulary"):
        load(model, default_model)


@pytest.mark.parametrize(("device", "size", "fits"), [("cuda", None, False), ("cuda", 1.0, True), ("cpu", None, True)])
def test_on_a_gpu_the_draft_model_needs_memory_that_the_cache_leaves(model, device, size, fits):
    config = EngineConfig(speculative_config={**CONFIG, "model": str(model)}, kv_cache_gib=size)
    found = refused(config, loader.read_config(model), torch.device(device), torch.float32, model)
    assert ["kv_cache_gib" in message for message in found] == [True] * (not fits)


def test_a_draft_model_that_is_not_there_is_refused_before_the_model_is_loaded(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        build_engine(EngineConfig(model=str(model), speculative_config={**CONFIG, "model": str(tmp_path / "nowhere")}))


CONFIG = {"method": "draft_model", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (CONFIG, "needs model"),
        (CONFIG | {"model": 5}, "model must be"),
        (CONFIG | {"model": ""}, "model must be"),
        (CONFIG | {"model": "x", "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"method": "ngram", "num_speculative_tokens": 4, "model": "x"}, "model is not for"),
        ({"method": "eagle", "num_speculative_tokens": 4}, "method='eagle' is not one of ngram, draft_model"),
    ],
)
def test_options_that_do_not_fit_are_named(values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        SpeculativeConfig.from_dict(values)


def test_one_worker_only():
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        EngineConfig(tensor_parallel_size=2, speculative_config=CONFIG | {"model": "x"})


@pytest.mark.usefixtures("always")
def test_a_step_reads_a_bounded_part_of_prompts(model, monkeypatch):
    """Also of several prompts together. Sequences that are not read yet have no drafts."""
    monkeypatch.setattr(ModelDrafter, "_most_read", lambda drafter, seconds: 20)
    llm = load(model, model)
    engine, drafter = llm.engine, drafter_of(llm)
    prompts = [[7 + (i * (number + 3)) % 40 for i in range(90)] for number in range(2)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    expected = tokens(load(model), params, prompts)
    counts, launch = [], drafter.executor.worker.launch
    drafter.executor.worker.launch = lambda batch: (counts.append(sum(batch.counts)), launch(batch))[1]
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    found, read, drafted = {}, [], 0
    while engine.has_unfinished_requests():
        counts.clear()
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        read.append(sum(counts[:1]))
        drafted += engine.last_step.draft_tokens
    assert max(read) <= 20 + 2 * CATCH_UP
    assert sum(count == 20 for count in read) >= 4
    assert drafted > 0
    assert [[found["0"]], [found["1"]]] == expected


def test_how_much_of_prompts_a_step_reads(model):
    drafter = drafter_of(load(model, model, max_num_batched_tokens=512))
    assert drafter._most_read(1.0) == FIRST_READ
    drafter.token_seconds = 0.01
    assert drafter._most_read(1.0) == 100
    assert drafter._most_read(1e-6) == CATCH_UP
    assert drafter._most_read(1e6) == 512


@pytest.mark.usefixtures("always")
def test_the_time_of_drafts_counts_in_the_step_that_plan_has_decided(model):
    engine = load(model, model).engine
    drafts, seconds = engine.scheduler.drafts, []
    drafter, observe = drafts.drafter, drafts.observe
    drafts.observe = lambda stats: (seconds.append((stats.seconds, drafter.seconds)), observe(stats))[1]
    engine.add_request("0", {"prompt_token_ids": PROMPTS[1]}, GREEDY)
    while engine.has_unfinished_requests():
        engine.plan()
        engine.step()
    assert any(made > 0 for _, made in seconds)
    assert all(whole > made for whole, made in seconds)


def test_the_time_of_reading_a_prompt_is_no_reason_to_make_no_drafts(model, monkeypatch):
    monkeypatch.setattr("nanopage.speculation.draft_model.EXPECTED_STEP", 0.0)
    engine = load(model, model).engine
    drafter, lost = engine.scheduler.drafts.drafter, []
    run = drafter._run

    def slow(batch):
        if batch.counts[0] > CATCH_UP:
            monkeypatch.setattr(time, "perf_counter", lambda now=time.perf_counter: now() + 1000)
        return run(batch)

    drafter._run = slow
    prompt = [7 + (i * 3) % 40 for i in range(60)]
    engine.add_request("0", {"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
        lost.append(drafter.gains.may_lose)
    assert drafter.token_seconds > 10 and min(lost) > -20
