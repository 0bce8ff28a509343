"""Requests with several sequences, and what the memory manager does for them: fork, swap, priorities, beam search."""

import dataclasses
import gc
import itertools

import pytest
import torch
from helpers import EOS, LONG, tiny_model

from nanopage import LLM, BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopage.beams.search import Beam, BeamSearch
from nanopage.build import build_engine
from nanopage.engine.input_processor import branch_seed
from nanopage.view.invariants import check_blocks
from nanopage.worker.memory import GIB, block_bytes

SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(20, 53))  # 33 tokens: two blocks and one slot of a third


def make_engine(model, host_blocks=None, **options) -> LLMEngine:
    defaults = {"dtype": "float64", "device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64}
    engine = build_engine(EngineConfig(model=str(model), **defaults | options))
    if host_blocks is None:
        return engine
    size = block_bytes(engine.model_config, engine.config.block_size, torch.float64)
    return make_engine(model, swap_space=host_blocks * size / GIB, **options)


def finish(engine) -> dict:
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check_blocks(engine.scheduler.block_manager)
    manager = engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks and not manager.host.tables
    return done


def run(engine, **requests) -> dict:
    for name, (prompt, params, *priority) in requests.items():
        engine.add_request(name, prompt, params, *priority)
    return finish(engine)


def step_until(engine, what):
    while not getattr(engine.last_step, what):
        assert engine.has_unfinished_requests(), f"nothing was {what}"
        engine.step()


def token_ids(output) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


# Parallel sampling


@pytest.mark.parametrize("prompt_logprobs", [None, 0])
def test_the_head_reads_the_end_of_a_prompt_once_for_all_completions(model, monkeypatch, prompt_logprobs):
    engine = make_engine(model, max_num_batched_tokens=64)
    worker, rows = engine.executor.worker, []
    logits = worker.model.logits
    monkeypatch.setattr(worker.model, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    run(engine, a=(PROMPT, dataclasses.replace(SAMPLED, n=4, max_tokens=2, prompt_logprobs=prompt_logprobs)))
    assert rows == ([1, 4] if prompt_logprobs is None else [1, len(PROMPT) - 1, 4])


def test_completions_differ_and_the_first_is_the_one_of_n_1(model):
    engine = make_engine(model)
    four = run(engine, a=(PROMPT, dataclasses.replace(SAMPLED, n=4)))["a"]
    one = run(make_engine(model), a=(PROMPT, SAMPLED))["a"]
    assert [completion.index for completion in four.outputs] == [0, 1, 2, 3]
    assert token_ids(four)[0] == token_ids(one)[0]
    assert len(set(map(tuple, token_ids(four)))) == 4
    assert token_ids(run(engine, a=(PROMPT, dataclasses.replace(SAMPLED, n=4)))["a"]) == token_ids(four)


def test_each_completion_is_a_request_of_its_own_seed_whatever_the_sampler_has_to_remember(model):
    """Of the tokens before a fork, and of those each has sampled since: penalties, and words of several tokens."""
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "bad_words": ["th", "zzz"], "temperature": 2.0}
    params = dataclasses.replace(SAMPLED, **options, min_tokens=3)
    (z,) = make_engine(model).tokenizer.encode("z")
    params.logit_bias = {z: 40.0}
    output = run(make_engine(model), a=(PROMPT, dataclasses.replace(params, n=4)))["a"]
    for index, completion in enumerate(output.outputs):
        seed = branch_seed(params.seed, index) if index else params.seed
        alone = run(make_engine(model), a=(PROMPT, dataclasses.replace(params, seed=seed)))["a"].outputs[0]
        assert completion.token_ids == alone.token_ids
    runs = [len(list(run)) for ids in token_ids(output) for token_id, run in itertools.groupby(ids) if token_id == z]
    assert max(runs) == 2


def test_the_prompt_is_computed_once_and_its_blocks_are_shared(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT, dataclasses.replace(SAMPLED, n=4))
    engine.step()
    assert (engine.last_step.prefill_tokens, engine.last_step.output_tokens) == (33, 4)
    assert engine.last_step.used_blocks == 3
    engine.step()  # each writes behind the prompt: three copies of its last block, the fourth keeps it
    assert (engine.last_step.decode_tokens, engine.last_step.copied) == (4, 3)
    assert engine.last_step.used_blocks == 2 + 4
    finish(engine)


def test_a_prompt_that_ends_with_a_block_needs_no_copy(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT[:32], dataclasses.replace(SAMPLED, n=3))
    for _ in range(3):
        engine.step()
        assert engine.last_step.copied == 0
    assert engine.last_step.used_blocks == 2 + 3
    finish(engine)


def test_best_of_returns_the_likeliest_and_only_at_the_end(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT, dataclasses.replace(SAMPLED, n=2, best_of=5))
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (output,) = outputs
    everything = run(engine, a=(PROMPT, dataclasses.replace(SAMPLED, n=5, logprobs=0)))["a"].outputs
    ranked = sorted(everything, key=lambda completion: -completion.cumulative_logprob)
    assert token_ids(output) == [completion.token_ids for completion in ranked[:2]]
    assert [c.cumulative_logprob for c in output.outputs] == pytest.approx([c.cumulative_logprob for c in ranked[:2]])
    assert all(completion.logprobs is None for completion in output.outputs)


def test_completions_that_compete_can_not_be_aborted_one_by_one(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT, dataclasses.replace(SAMPLED, n=1, best_of=2))
    engine.step()
    with pytest.raises(ValueError, match="index=1"):
        engine.abort("a", 1)
    assert len(engine.abort("a").outputs) == 1
    assert finish(engine) == {}


def test_one_completion_can_be_aborted_even_the_one_that_computes_the_prompt(model):
    params = dataclasses.replace(SAMPLED, n=3)
    expected = token_ids(run(make_engine(model), a=(PROMPT, params))["a"])
    for steps, index in itertools.product(range(5), range(3)):
        engine = make_engine(model, max_num_batched_tokens=16)  # three steps for the prompt
        engine.add_request("a", PROMPT, params)
        for _ in range(steps):
            engine.step()
        partial = engine.abort("a", index)
        assert partial.outputs[index].finish_reason == "abort" and not partial.finished
        assert engine.abort("a", index) is None and engine.abort("a", 3) is None
        done = finish(engine)["a"]
        for i in range(3):
            assert token_ids(done)[i] == (token_ids(partial)[i] if i == index else expected[i])


def test_the_end_of_one_completion_does_not_end_the_others(model):
    params = dataclasses.replace(SAMPLED, n=4, max_tokens=40, ignore_eos=False, stop_token_ids=list(range(10, 60)))
    output = run(make_engine(model), a=(PROMPT, params))["a"]
    assert len({len(ids) for ids in token_ids(output)}) > 1
    assert {completion.finish_reason for completion in output.outputs} <= {"stop", "length"}


@pytest.mark.parametrize(
    ("prompt", "params", "names"),
    [
        (PROMPT, dataclasses.replace(SAMPLED, n=9), "n=9.*max_num_seqs=8"),
        (PROMPT, dataclasses.replace(SAMPLED, n=1, best_of=9), "best_of=9.*max_num_seqs=8"),
        (PROMPT, BeamSearchParams(width=9), "width=9.*max_num_seqs=8"),
        (PROMPT, dataclasses.replace(SAMPLED, n=5, max_tokens=90), "n=5.*blocks.*kv_cache_gib"),
        (PROMPT, BeamSearchParams(width=5, max_tokens=90), "width=5.*blocks.*kv_cache_gib"),
    ],
)
def test_more_completions_than_can_ever_run_are_refused(model, prompt, params, names):
    engine = make_engine(model, max_num_seqs=8, num_gpu_blocks_override=24)
    with pytest.raises(ValueError, match=names):
        engine.add_request("a", prompt, params)
    assert not engine.has_unfinished_requests()


# Beam search


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 3.0, -1.0])
def test_beam_search_equals_transformers(tmp_path, early_stopping, length_penalty):
    path = tiny_model(tmp_path)
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    # A likely end of sequence, so that beams end at all lengths.
    hf_model.lm_head.weight.data[EOS] = hf_model.lm_head.weight.data.mean(0) + 0.05
    hf_model.save_pretrained(path)
    llm = LLM(str(path), dtype="float64", device="cpu", max_model_len=128, num_gpu_blocks_override=64)
    prompts = [PROMPT, [20], [25, 31, 47, 33] * 5, [30 + i * i % 60 for i in range(17)]]
    params = BeamSearchParams(width=4, max_tokens=9, length_penalty=length_penalty, early_stopping=early_stopping)
    for prompt, output in zip(prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=True):
        theirs = hf_model.generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            do_sample=False,
            max_new_tokens=9,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=EOS,
            pad_token_id=EOS,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[len(prompt) :].tolist() for row in theirs.sequences]
        assert token_ids(output) == [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]
        scores = torch.tensor([completion.score for completion in output.outputs])
        assert torch.allclose(scores, theirs.sequences_scores.float(), atol=1e-5)


def test_a_beams_past_is_not_computed_again(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT, BeamSearchParams(width=4, max_tokens=10))
    steps = []
    while engine.has_unfinished_requests():
        engine.step()
        steps.append(engine.last_step)
    assert sum(s.prefill_tokens for s in steps) == len(PROMPT)
    assert all(s.decode_tokens <= 4 for s in steps)


def test_a_beam_search_can_be_aborted_whole_only(model):
    engine = make_engine(model)
    engine.add_request("a", PROMPT, BeamSearchParams(width=3, max_tokens=10))
    for _ in range(4):
        assert engine.step() == []
    with pytest.raises(ValueError, match="index=1"):
        engine.abort("a", 1)
    output = engine.abort("a")
    assert output.finished and {completion.finish_reason for completion in output.outputs} == {"abort"}
    assert finish(engine) == {}


def test_the_search_ends_with_what_it_has_if_nothing_can_follow():
    search = BeamSearch(2, 5, 1.0, False, frozenset([0]))
    step = search.choose([Beam([], 0.0, {0: -0.1})])
    assert step.live == [] and step.finished and [h.token_ids for h in step.hypotheses] == [[0]]
    assert search.hypotheses == []
    search.accept(step)
    assert search.finished and search.hypotheses == step.hypotheses


def test_beam_search_takes_the_forms_of_generate_and_names_what_it_can_not_use(model):
    llm = LLM(str(model), dtype="float64", device="cpu", max_model_len=128, num_gpu_blocks_override=64)
    params = BeamSearchParams(width=2, max_tokens=4)
    (one,) = llm.beam_search("the cat", params, use_tqdm=False)
    two = llm.beam_search(
        ["the cat", {"prompt": "a dog"}], [params, dataclasses.replace(params, width=3)], use_tqdm=False
    )
    assert token_ids(one) == token_ids(two[0]) and len(two[1].outputs) == 3
    assert one.outputs[0].text == llm.get_tokenizer().decode(one.outputs[0].token_ids)
    for wrong in (None, SamplingParams(), [SamplingParams()], 4):
        with pytest.raises(TypeError, match="BeamSearchParams"):
            llm.beam_search("the cat", wrong)
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams"):
        llm.generate("the cat", params)
    with pytest.raises(ValueError, match=r"prompts\[1\].*empty"):
        llm.beam_search(["the cat", ""], params)
    assert not llm.engine.has_unfinished_requests()


# Swapping


WORK = {
    "a": (PROMPT, dataclasses.replace(SAMPLED, n=3, max_tokens=40)),
    "b": (PROMPT[5:], dataclasses.replace(SAMPLED, n=3, max_tokens=40)),
    "c": (PROMPT[9:], dataclasses.replace(GREEDY, max_tokens=40)),
}


@pytest.mark.parametrize(
    ("mode", "host_blocks", "swaps"),
    [("recompute", None, False), ("swap", 100, True), (None, 100, True), (None, 0, False), ("swap", 1, False)],
)
def test_preemption_by_swap_and_by_recomputation_give_the_same_tokens(model, mode, host_blocks, swaps):
    plenty = {name: token_ids(output) for name, output in run(make_engine(model), **WORK).items()}
    engine = make_engine(model, host_blocks, num_gpu_blocks_override=20, preemption_mode=mode)
    for name, (prompt, params) in WORK.items():
        engine.add_request(name, prompt, params)
    steps, done = [], {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
        steps.append(engine.last_step)
    assert {name: token_ids(output) for name, output in done.items()} == plenty
    assert sum(s.preempted for s in steps) > 0
    assert (sum(s.swapped_out for s in steps) > 0) == swaps
    assert sum(s.swapped_in for s in steps) == sum(s.swapped_out for s in steps)
    assert (max(s.swapped for s in steps) > 0) == swaps


def test_by_default_one_sequence_is_recomputed_and_several_are_swapped(model):
    for n, swapped in ((1, 0), (2, 2)):
        engine = make_engine(model, num_gpu_blocks_override=12)
        engine.add_request("old", PROMPT, dataclasses.replace(GREEDY, max_tokens=80))
        engine.add_request("young", PROMPT[1:], dataclasses.replace(SAMPLED, n=n, max_tokens=80))
        step_until(engine, "preempted")
        assert engine.last_step.swapped == swapped
        finish(engine)


def test_a_swapped_request_can_be_aborted(model):
    engine = make_engine(model, num_gpu_blocks_override=12, preemption_mode="swap")
    engine.add_request("old", PROMPT, dataclasses.replace(GREEDY, max_tokens=80))
    engine.add_request("young", PROMPT[1:], dataclasses.replace(SAMPLED, n=2, max_tokens=60))
    step_until(engine, "swapped")
    assert not engine.abort("young", 0).finished
    assert engine.abort("young", 1).finished
    assert not engine.scheduler.block_manager.host.tables
    assert finish(engine).keys() == {"old"}


# Priorities and admission


def test_a_lower_priority_goes_first_and_takes_the_place_of_a_higher_one(model):
    engine = make_engine(model, max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("last", 5), ("second", 1), ("third", 1), ("first", -3)):
        engine.add_request(name, "the cat", GREEDY, priority)
    assert list(finish(engine)) == ["first", "second", "third", "last"]
    engine.add_request("slow", "the cat", GREEDY, 1)
    for _ in range(3):
        engine.step()
    engine.add_request("equal", "a dog", GREEDY, 1)
    engine.add_request("urgent", "a house", GREEDY, 0)
    engine.step()
    assert engine.last_step.preempted == 1
    assert list(finish(engine)) == ["urgent", "slow", "equal"]


def test_nobody_is_preempted_for_what_would_not_fit_anyway(model):
    engine = make_engine(model, num_gpu_blocks_override=8, scheduling_policy="priority")
    engine.add_request("same", PROMPT + PROMPT, GREEDY, 0)  # five blocks
    engine.add_request("low", [20], GREEDY, 9)
    engine.step()
    engine.add_request("high", PROMPT[::-1] + PROMPT, GREEDY, 0)
    engine.step()
    assert (engine.last_step.preempted, engine.last_step.waiting) == (0, 1)
    assert finish(engine).keys() == {"same", "low", "high"}


def test_blocks_that_others_keep_are_not_counted_as_gained(model):
    """A lower priority shares its prompt with one that stays: preempting it would give back next to nothing."""
    engine = make_engine(model, num_gpu_blocks_override=9, scheduling_policy="priority")
    run(engine, warm=(PROMPT + PROMPT, GREEDY))
    engine.add_request("same", PROMPT + PROMPT, GREEDY, 0)
    engine.add_request("low", PROMPT + PROMPT[:30], GREEDY, 9)
    engine.step()
    assert engine.last_step.running == 2
    engine.add_request("high", PROMPT[::-1] * 3, GREEDY, 0)  # seven blocks
    engine.step()
    assert (engine.last_step.preempted, engine.last_step.waiting) == (0, 1)
    assert finish(engine).keys() == {"same", "low", "high"}


def test_an_admitted_group_keeps_the_blocks_it_has_yet_to_take(model):
    """Four completions need a block each after the prompt: whoever comes next must not get them."""
    engine = make_engine(model, num_gpu_blocks_override=10)
    engine.add_request("four", PROMPT[:32], dataclasses.replace(SAMPLED, n=4))
    engine.add_request("next", PROMPT[::-1] * 2, GREEDY)  # five blocks
    for _ in range(3):
        engine.step()
        assert engine.last_step.preempted == 0
    assert engine.last_step.waiting == 1
    assert finish(engine).keys() == {"four", "next"}
    assert engine.scheduler.queues.num_preemptions == 0


def test_an_older_request_is_not_overtaken_by_a_swapped_one(model):
    engine = make_engine(model, num_gpu_blocks_override=14)
    engine.add_request("first", PROMPT, dataclasses.replace(GREEDY, max_tokens=90))
    engine.add_request("second", PROMPT[1:], dataclasses.replace(GREEDY, max_tokens=90))
    engine.add_request("third", PROMPT[2:], dataclasses.replace(SAMPLED, n=2, max_tokens=70))
    before, came_back = [], 0
    while engine.has_unfinished_requests():
        engine.step()
        running = [group.request_id for group in engine.scheduler.running]
        waiting = [group.request_id for group in engine.scheduler.waiting]
        if "third" in running and "third" not in before:
            came_back += 1
            assert "second" not in waiting, "overtaken"
        before = running
    assert came_back > 1  # the first time it came in


def test_more_swap_space_than_there_is_memory_is_refused(model):
    with pytest.raises(MemoryError, match="swap_space=1e"):
        make_engine(model, swap_space=1e9)


def test_a_priority_without_its_policy_is_refused(model):
    with pytest.raises(ValueError, match=r"priority=1.*scheduling_policy"):
        make_engine(model).add_request("a", "the cat", GREEDY, 1)
    with pytest.raises(TypeError, match="priority"):
        make_engine(model, scheduling_policy="priority").add_request("a", "the cat", GREEDY, "high")
    options = {"dtype": "float64", "max_model_len": 128, "num_gpu_blocks_override": 64}
    llm = LLM(str(model), scheduling_policy="priority", **options)
    with pytest.raises(ValueError, match="1 values of priority for 2 prompts"):
        llm.generate(["a", "b"], GREEDY, priority=[1])
    with pytest.raises(TypeError, match="priority must be"):
        llm.generate(["a", "b"], GREEDY, priority="high")
    assert len(llm.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, 0])) == 2


def test_admission_leaves_one_percent_of_the_pool_to_those_that_run(model):
    engine = make_engine(model, num_gpu_blocks_override=200, block_size=1)
    engine.add_request("old", [20] * 100, dataclasses.replace(GREEDY, max_tokens=20))
    engine.step()
    engine.add_request("young", [30] * 99, GREEDY)  # fits the hundred free blocks, but for the watermark of two
    engine.step()
    assert (engine.last_step.running, engine.last_step.waiting) == (1, 1)
    assert finish(engine).keys() == {"old", "young"}
    assert engine.scheduler.queues.num_preemptions == 0


# Prefix cache, statistics, memory


def test_the_prefix_cache_can_be_reset(model):
    engine = make_engine(model)
    run(engine, a=(PROMPT, GREEDY))
    assert run(engine, a=(PROMPT, GREEDY))["a"].num_cached_tokens == 32
    manager = engine.scheduler.block_manager
    assert (manager.num_query_tokens, manager.num_hit_tokens) == (66, 32)
    engine.reset_prefix_cache()
    assert manager.num_cached_blocks == 0
    assert run(engine, a=(PROMPT, GREEDY))["a"].num_cached_tokens == 0


def test_what_runs_during_a_reset_goes_on_and_is_not_cached(model):
    engine = make_engine(model)
    expected = token_ids(run(engine, a=(PROMPT, SAMPLED))["a"])
    engine.reset_prefix_cache()
    engine.add_request("a", PROMPT, SAMPLED)
    engine.step()
    engine.reset_prefix_cache()
    assert token_ids(finish(engine)["a"]) == expected
    assert engine.scheduler.block_manager.num_cached_blocks == 0


def test_a_step_says_what_it_did(model):
    engine = make_engine(model, max_num_batched_tokens=40)
    engine.add_request("a", PROMPT, GREEDY)
    engine.add_request("b", [5, *PROMPT[1:]], dataclasses.replace(SAMPLED, n=2))  # nothing to wait for
    engine.step()
    first = engine.last_step
    assert (first.prefill_tokens, first.decode_tokens, first.output_tokens) == (40, 0, 1)
    assert first.context_tokens == 33 + 7
    assert (first.waiting, first.running, first.swapped) == (0, 3, 0)
    assert first.used_blocks + first.free_blocks + first.cached_blocks == 64
    engine.step()
    second = engine.last_step
    assert (second.prefill_tokens, second.decode_tokens, second.output_tokens) == (26, 1, 3)
    assert second.context_tokens == 34 + 33
    assert second.model_seconds > 0 and second.schedule_seconds > 0 and second.output_seconds > 0
    finish(engine)
    engine.add_request("c", PROMPT, GREEDY)
    engine.step()
    assert (engine.last_step.cached_tokens, engine.last_step.prefill_tokens) == (32, 1)
    assert engine.last_step.context_tokens == 33
    assert engine.last_step.cached_blocks + engine.last_step.used_blocks + engine.last_step.free_blocks == 64


def test_memory_after_thousands_of_requests_is_that_after_a_hundred(model):
    engine = make_engine(model, max_num_seqs=64)
    params = dataclasses.replace(SAMPLED, n=2, max_tokens=2, detokenize=False)

    def serve(numbers):
        for chunk in itertools.batched(numbers, 32) if hasattr(itertools, "batched") else chunks(numbers, 32):
            for i in chunk:
                engine.add_request(str(i), [20 + i % 50, 20 + i // 50 % 50, 20 + i // 2500 % 50] * 6, params)
            while engine.has_unfinished_requests():
                engine.step()
        gc.collect()
        return len(gc.get_objects())

    serve(range(100))  # the cache fills with prefixes
    after_100 = serve(range(100, 200))
    after_thousands = serve(range(200, 10_200 if LONG else 1_200))
    assert abs(after_thousands - after_100) < 200
    assert finish(engine) == {}


def chunks(values, size):
    return [values[i : i + size] for i in range(0, len(values), size)]
