"""Scheduling never changes the answer: random worlds against an oracle that runs one request at a time.

A world is a tiny float64 model with a random pool, block size, token budget and set of requests that arrive, share
prefixes, get preempted and are aborted at random. The oracle has one block per sequence, no prefix cache and no
neighbours. Rounding can not hide or fake a difference in float64.

    NANOPAGE_FUZZ_WORLDS=2000 pytest tests/test_fuzz.py -s      more worlds, and what happened in them
    NANOPAGE_FUZZ_SEED=7 ...                                    other worlds
"""

import os
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from helpers import tiny_model

from nanopage import EngineConfig, LLMEngine, RequestOutput, SamplingParams

WORLDS = int(os.environ.get("NANOPAGE_FUZZ_WORLDS", "200"))
SEED = int(os.environ.get("NANOPAGE_FUZZ_SEED", "0"))
MAX_LEN = 64

happened: Counter[str] = Counter()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(
        tmp_path_factory.mktemp("fuzz"),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )


@pytest.fixture(scope="module")
def oracle(model):
    return LLMEngine(
        EngineConfig(
            model=str(model),
            dtype="float64",
            device="cpu",
            block_size=MAX_LEN,
            max_model_len=MAX_LEN,
            num_gpu_blocks_override=1,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )
    )


@dataclass
class Planned:
    """A request of a world: when it arrives, when (if ever) it is aborted, what came of it."""

    request_id: str
    prompt: dict
    params: SamplingParams
    arrival: int
    abort_at: int | None
    output: RequestOutput | None = None
    streamed: str = ""
    aborted: bool = False


def draw_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    options: dict = {"max_tokens": rng.choice([1, 2, 5, 8, 12, 20, None]), "temperature": 0.0}
    ids = range(vocab_size)
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.3, 1.0, 2.5]), "seed": rng.randrange(100)}
        options |= rng.choice([{}, {"top_k": rng.choice([1, 3, 20])}, {"top_p": rng.random() or 0.5}, {"min_p": 0.05}])
        if rng.random() < 0.2:
            options |= {"top_k": 30, "top_p": 0.8, "min_p": 0.01}
    for chance, extra in (
        (0.2, {"repetition_penalty": rng.choice([0.8, 1.3])}),
        (0.2, {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}),
        (0.15, {"logit_bias": {rng.choice(ids): rng.uniform(-20, 20) for _ in range(4)}}),
        (0.1, {"allowed_token_ids": rng.sample(ids, 40)}),
        (0.1, {"bad_words": rng.sample(["a", "the", "b c", "\n"], 2)}),
        (0.2, {"stop_token_ids": rng.sample(ids, 25)}),
        (0.2, {"stop": rng.sample(["a", "e", "th", "\n", "0", "é"], 3)}),
        (0.2, {"logprobs": rng.choice([0, 1, 5])}),
        (0.1, {"prompt_logprobs": rng.choice([0, 3])}),
        (0.3, {"ignore_eos": True}),
        (0.3, {"skip_special_tokens": False}),
        (0.3, {"include_stop_str_in_output": True}),
    ):
        if rng.random() < chance:
            options |= extra
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, options["max_tokens"] or 6)
    return SamplingParams(**options)


def draw_world(rng: random.Random, vocab_size: int) -> tuple[dict, list[Planned]]:
    block_size = rng.choice([1, 2, 3, 4, 8, 16])
    max_model_len = rng.randint(24, MAX_LEN)
    blocks_of_one = -(-max_model_len // block_size)
    options = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_gpu_blocks_override": rng.choice([blocks_of_one, blocks_of_one + 2, 2 * blocks_of_one, 6 * blocks_of_one]),
        "max_num_seqs": rng.choice([1, 2, 3, 8]),
        "max_num_batched_tokens": rng.choice([1, 3, 7, 16, 64, 256]),
        "enable_prefix_caching": rng.random() < 0.85,
    }
    prefixes = [[rng.randrange(vocab_size) for _ in range(max_model_len)] for _ in range(2)]
    salts = rng.choice([[""], [""], ["", "tenant"]])
    plans = []
    for i in range(rng.randint(2, 7)):
        length = rng.randint(1, max_model_len - 2)
        shared = rng.choice([0, length // 2, length, length])
        own = [rng.randrange(vocab_size) for _ in range(length - shared)]
        prompt = {"prompt_token_ids": rng.choice(prefixes)[:shared] + own, "cache_salt": rng.choice(salts)}
        arrival = rng.choice([0, 0, rng.randrange(30)])
        abort_at = arrival + rng.randrange(25) if rng.random() < 0.15 else None
        plans.append(Planned(str(i), prompt, draw_params(rng, vocab_size), arrival, abort_at))
    return options, plans


def run_world(engine: LLMEngine, plans: list[Planned]) -> None:
    by_id = {plan.request_id: plan for plan in plans}
    manager, scheduler = engine.scheduler.block_manager, engine.scheduler
    step = 0
    while engine.has_unfinished_requests() or any(plan.arrival >= step for plan in plans):
        for plan in plans:
            if plan.arrival == step:
                engine.add_request(plan.request_id, plan.prompt, plan.params)
            if plan.abort_at == step and (output := engine.abort(plan.request_id)):
                plan.output, plan.aborted = output, True
                plan.streamed += output.outputs[0].delta
        for output in engine.step():
            plan = by_id[output.request_id]
            plan.output = output
            plan.streamed += output.outputs[0].delta
            assert plan.streamed == output.outputs[0].text
        manager.check_invariants()
        assert manager.block_tables.keys() == {seq.seq_id for seq in scheduler.running}
        assert len(scheduler.running) <= scheduler.max_num_seqs
        assert all(seq.num_computed_tokens == 0 for seq in scheduler.waiting)
        step += 1
        assert step < 5000, "no progress"
    assert manager.num_free_blocks == manager.num_blocks


def run_alone(oracle: LLMEngine, plan: Planned, max_model_len: int) -> RequestOutput:
    request = oracle.make_request("alone", plan.prompt, plan.params)
    request.seq.max_total_tokens = min(request.seq.max_total_tokens, max_model_len)
    oracle.submit(request)
    while True:
        for output in oracle.step():
            if output.finished:
                return output


def rounded(tables):
    """Log-probabilities as comparable data: tokens, ranks, and values to 9 digits."""
    if tables is None:
        return None
    return [table and {t: (round(p.logprob, 9), p.rank, p.decoded_token) for t, p in table.items()} for table in tables]


@pytest.mark.parametrize("world", range(WORLDS))
def test_a_crowd_changes_no_answer(world, model, oracle):
    rng = random.Random(f"{SEED}-{world}")
    vocab_size = oracle.model_config.vocab_size
    options, plans = draw_world(rng, vocab_size)
    engine = LLMEngine(EngineConfig(model=str(model), dtype="float64", device="cpu", **options))
    run_world(engine, plans)

    for plan in plans:
        alone = run_alone(oracle, plan, options["max_model_len"])
        expected, completion = alone.outputs[0], plan.output.outputs[0]
        if plan.aborted:
            assert completion.finish_reason == "abort"
            assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
            assert completion.text.rstrip("\ufffd") == expected.text[: len(completion.text.rstrip("\ufffd"))]
            continue
        assert completion.token_ids == expected.token_ids
        assert completion.text == expected.text
        assert (completion.finish_reason, completion.stop_reason) == (expected.finish_reason, expected.stop_reason)
        assert rounded(completion.logprobs) == rounded(expected.logprobs)
        assert rounded(plan.output.prompt_logprobs) == rounded(alone.prompt_logprobs)

    manager = engine.scheduler.block_manager
    happened["worlds"] += 1
    happened["requests"] += len(plans)
    happened["tokens"] += sum(len(plan.output.outputs[0].token_ids) for plan in plans if plan.output)
    happened["worlds that preempted"] += engine.scheduler.num_preemptions > 0
    happened["preemptions"] += engine.scheduler.num_preemptions
    happened["worlds with prefix-cache hits"] += manager.num_hit_tokens > 0
    happened["tokens found in the prefix cache"] += manager.num_hit_tokens
    happened["worlds that evicted"] += manager.num_evictions > 0
    happened["worlds with aborts"] += any(plan.aborted for plan in plans)
    happened["aborted requests"] += sum(plan.aborted for plan in plans)
    happened["requests ended by a stop"] += sum(plan.output.outputs[0].finish_reason == "stop" for plan in plans)


def test_the_worlds_were_not_easy():
    """The suite must have met what it is for."""
    print("\n" + "\n".join(f"{count:8,} {what}" for what, count in happened.items()))
    if happened["worlds"] < 100:
        pytest.skip("too few worlds were run to expect everything")
    assert happened["worlds"] == WORLDS
    for what in ("worlds that preempted", "worlds with prefix-cache hits", "worlds that evicted", "worlds with aborts"):
        assert happened[what] > WORLDS * 0.1, what
