"""Speculative decoding: drafts from a sequence's own tokens, what becomes of drafts in a step, and when they pay.

`tests/test_fuzz.py` mixes drafts with everything else.
"""

import copy
import math
import random

import pytest
import torch
from helpers import VOCAB_SIZE, tiny_model

from nanopage import EngineConfig, LLMEngine, SamplingParams, StructuredOutputsParams
from nanopage.build import build_engine
from nanopage.checks.speculation import MOST_ROWS, SpeculativeConfig
from nanopage.engine.schedule import Schedule, Wait
from nanopage.engine.sequence import Sequence, SequenceGroup
from nanopage.outputs import StepStats
from nanopage.speculation.drafts import Drafts
from nanopage.speculation.lookup import (
    FORGET_AFTER,
    LOSS_PER_STEP,
    MOST_LOSS,
    Acceptance,
    DraftGains,
    NgramDrafter,
    NgramIndex,
    StepCosts,
    rounded,
    state_of,
    worths_of,
)
from nanopage.step import SamplingSettings
from nanopage.view.explain import explain
from nanopage.view.invariants import check_blocks

PROMPT = [5, 6, 7, 8, 9, 10, 11]
CONFIG = SpeculativeConfig("ngram", 4, 4, 2)


# The index


def found_slowly(token_ids: list[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - n - 1, -1, -1):
            if token_ids[start : start + n] == token_ids[-n:]:
                text = list(token_ids)
                for i in range(num_tokens):
                    text.append(text[start + n + i])
                return text[-num_tokens:]
    return []


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_is_what_followed_the_longest_n_gram_when_it_last_occurred(seed):
    rng = random.Random(seed)
    shortest = rng.randint(1, 3)
    longest = rng.randint(shortest, 5)
    index, token_ids, found = NgramIndex(longest, shortest), [], 0
    for _ in range(120):
        token_ids += [rng.randrange(4) for _ in range(rng.randint(1, 3))]
        draft, n = index.draft(token_ids, 6)
        assert draft == found_slowly(token_ids, 6, longest, shortest)
        assert draft == found_slowly(token_ids, 6, n, n) and (n > 0) == bool(draft)
        found += bool(draft)
    assert found > 20


def test_a_draft_goes_on_in_circles_where_the_text_does():
    assert NgramIndex(3, 2).draft([1, 2, 3, 1, 2, 3, 1, 2], 7) == ([3, 1, 2, 3, 1, 2, 3], 3)
    assert NgramIndex(3, 2).draft([9, 9, 9], 4) == ([9, 9, 9, 9], 2)


def test_tokens_that_have_not_occurred_before_have_no_draft():
    assert NgramIndex(4, 2).draft([1, 2, 3, 4, 5, 2], 3) == ([], 0)
    assert NgramIndex(4, 1).draft([1, 2, 3, 4, 5, 2], 3) == ([3, 4, 5], 1)
    assert NgramIndex(4, 2).draft([], 3) == NgramIndex(4, 2).draft([1], 3) == ([], 0)


# When drafts pay


def make_sequences(count: int, token_ids: list[int]) -> list[Sequence]:
    seqs = [Sequence(number, token_ids, SamplingSettings()) for number in range(count)]
    for seq in seqs:
        SequenceGroup(str(seq.seq_id), [seq])
    return seqs


def drafter_with(costs: dict[int, float], num_rows: int = 1) -> NgramDrafter:
    """costs: the seconds of a step by the number of draft tokens."""
    drafter = NgramDrafter(CONFIG)
    for num_drafted, seconds in costs.items():
        for _ in range(10):
            drafter.gains.costs.add(num_rows, num_drafted, seconds)
    return drafter


def propose(drafter: NgramDrafter, seqs: list[Sequence], most: int = 100) -> list[int]:
    """The lengths of the drafts."""
    drafts = drafter.propose(seqs, most, Schedule(singles=seqs))
    assert all(draft for draft in drafts.values())
    return [len(drafts.get(seq, [])) for seq in seqs]


LOOP = [1, 2, 3] * 4


def test_nothing_is_drafted_before_steps_without_drafts_are_measured():
    (seq,) = make_sequences(1, LOOP)
    drafter = NgramDrafter(CONFIG)
    for _ in range(2):
        assert propose(drafter, [seq]) == [0]
        drafter.observe(StepStats(decode_tokens=1, seconds=1.0))
    assert propose(drafter, [seq]) == [4]


def test_drafts_become_shorter_and_stop_as_they_are_refused_and_longer_as_they_are_accepted():
    (seq,) = make_sequences(1, LOOP)
    drafter = drafter_with({0: 1.0, 4: 1.4})
    lengths = []
    for _ in range(12):
        lengths.append(propose(drafter, [seq])[0])
        if lengths[-1]:
            drafter.learn(seq, lengths[-1], 0)
    assert lengths[0] > 0 and lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)
    for _ in range(8):
        drafter.learn(seq, 4, 4)
    assert propose(drafter, [seq]) == [4]


def test_a_sequence_whose_drafts_were_refused_is_tried_again_some_day():
    (seq,) = make_sequences(1, LOOP)
    drafter = drafter_with({0: 1.0, 1: 1.1, 4: 1.4})
    assert propose(drafter, [seq]) != [0]
    for _ in range(30):
        drafter.learn(seq, 4, 0)
    tries = []
    for step in range(2000):
        if step % 100 == 0:
            for num_drafted, seconds in ((0, 1.0), (1, 1.1), (4, 1.4)):
                for _ in range(3):
                    drafter.gains.costs.add(1, num_drafted, seconds)
        if propose(drafter, [seq]) != [0]:
            tries.append(step)
            drafter.learn(seq, 1, 0)
    assert 0 < len(tries) < 2000 * 0.03 / 0.1, "a try costs a tenth of a step"


def test_drafts_that_cost_more_time_than_they_can_save_are_not_made():
    (seq,) = make_sequences(1, LOOP)
    drafter = drafter_with({0: 1.0, 1: 2.0, 2: 3.0, 4: 5.0})
    assert propose(drafter, [seq]) == [0]
    drafter.learn(seq, 4, 4)
    assert propose(drafter, [seq]) == [0]


def test_the_best_drafts_get_the_tokens():
    good, bad = seqs = make_sequences(2, LOOP)
    drafter = drafter_with({0: 1.0, 4: 1.05, 7: 1.08}, num_rows=2)
    assert propose(drafter, seqs) == [4, 4]
    for _ in range(10):
        drafter.learn(good, 4, 4)
        drafter.learn(bad, 4, 0)
    lengths = propose(drafter, seqs, most=4)
    assert lengths == [4, 0]


def test_steps_with_chunks_of_prompts_or_many_sequences_have_no_drafts():
    (seq,) = make_sequences(1, LOOP)
    drafter = drafter_with({0: 1.0})
    assert drafter.propose([seq], 9, Schedule(singles=[seq], chunks=[(seq, 5)])) == {}
    assert drafter.propose([seq], 9, Schedule(singles=[seq])) != {}
    many, costs = make_sequences(MOST_ROWS + 1, LOOP), {0: 1.0, 96: 1.1}
    assert not any(propose(drafter_with(costs, MOST_ROWS + 1), many))
    assert any(propose(drafter_with(costs, MOST_ROWS), many[1:]))


def test_steps_with_prompt_tokens_or_swaps_are_not_measured():
    drafter = NgramDrafter(CONFIG)
    for stats in (StepStats(prefill_tokens=3), StepStats(swapped_in=1), StepStats(swapped_out=1)):
        stats.decode_tokens, stats.seconds = 1, 1.0
        drafter.observe(stats)
    drafter.observe(StepStats(seconds=1.0))  # nothing ran
    assert drafter.gains.costs.times == {}


def test_the_time_of_a_step_is_on_a_line_through_those_that_are_measured():
    costs, rng = StepCosts(), random.Random(1)
    assert costs.of(1) is None
    costs.add(1, 4, 1.0)
    costs.add(1, 0, 1.0)
    assert costs.of(1) is None, "one step without drafts"
    costs.add(1, 0, 1.0)
    assert costs.of(1).estimate(0) == 1.0 and costs.of(2) is None
    assert 1.0 < costs.of(1).estimate(4) < 1.2, "a guess"
    for _ in range(200):
        n = rng.randint(1, 10)
        costs.add(1, n, (1.2 + 0.1 * n) * rng.uniform(0.95, 1.05))
    for n in (1, 5, 10):
        assert costs.of(1).estimate(n) == pytest.approx(1.2 + 0.1 * n, rel=0.05)
    for _ in range(50):
        costs.add(1, 0, 2.0)
    assert costs.of(1).estimate(5) == pytest.approx(3.4, rel=0.05), "the same multiple"


def test_steps_with_more_drafts_never_take_less_time():
    costs = StepCosts()
    for n, seconds in ((0, 1.0), (0, 1.0), *[(2, 1.5), (8, 0.7)] * 20):
        costs.add(1, n, seconds)
    times = [costs.of(1).estimate(n) for n in range(20)]
    assert times == sorted(times) and times[0] == 1.0


def test_times_follow_the_machine_and_are_forgotten():
    costs = StepCosts()
    for _ in range(20):
        costs.add(1, 0, 1.0)
    costs.add(1, 0, 100.0)
    assert costs.of(1).plain <= 1.2, "one interruption"
    for _ in range(30):
        costs.add(1, 0, 1.5)
    assert costs.of(1).plain == pytest.approx(1.5, rel=0.01)
    for _ in range(FORGET_AFTER):
        costs.add(2, 0, 1.0)
    assert costs.of(1) is not None
    costs.add(2, 0, 1.0)
    assert costs.of(1) is None
    for _ in range(2):
        assert costs.of(1) is None
        costs.add(1, 0, 0.5)
    assert costs.of(1).plain == pytest.approx(0.5)


def test_drafts_that_lose_time_are_given_up_until_the_account_is_balanced():
    """Although they promise to save time, and are accepted."""
    gains = DraftGains()
    (seq,) = make_sequences(1, LOOP)

    def lose(count: int) -> int:
        """Returns the number of steps that had a draft, each of which takes twice the time and saves nothing."""
        drafted = 0
        for _ in range(count):
            gains.costs.times.pop(1, None)  # they are believed to be quick
            for _ in range(2):
                gains.costs.add(1, 0, 1.0)
            length = gains.choose({seq: 4}, 4, Schedule(singles=[seq])).get(seq, 0)
            gains.observe(StepStats(decode_tokens=1 + length, draft_tokens=length), 2.0 if length else 1.0)
            drafted += length > 0
        return drafted

    assert lose(100) <= MOST_LOSS + 100 * LOSS_PER_STEP + 1
    assert 1000 * LOSS_PER_STEP - 1 <= lose(1000) <= 1000 * LOSS_PER_STEP + 1


def test_what_drafts_save_may_be_lost_later_up_to_a_point():
    gains = DraftGains()
    (seq,) = make_sequences(1, LOOP)
    for _ in range(3):
        gains.observe(StepStats(decode_tokens=1), 1.0)
    gains.may_lose = 0.5
    assert gains.choose({seq: 4}, 4, Schedule(singles=[seq])) == {seq: 4}
    gains.learn(seq, 4, 1)
    gains.observe(StepStats(decode_tokens=5, draft_tokens=4), 1.25, seconds_to_make=0.25)
    assert gains.may_lose == pytest.approx(0.5 + LOSS_PER_STEP + 1 - 0.5)
    gains.learn(seq, 4, 4)
    gains.observe(StepStats(decode_tokens=5, draft_tokens=4), 1.25)
    assert gains.may_lose == MOST_LOSS


def test_a_token_is_worth_more_to_the_sequence_that_the_others_wait_for():
    seqs = make_sequences(4, LOOP)
    for seq, most in zip(seqs, (20, 20, 30, 100), strict=True):
        seq.max_total_tokens = most
    worths = worths_of(Schedule(singles=seqs), row=0.05)
    assert sum(worths.values()) == pytest.approx(1), "a token for all of them saves a step"
    assert [worths[seq] for seq in seqs[:3]] == pytest.approx([0.05] * 3, abs=1e-3)
    assert worths[seqs[3]] == pytest.approx(0.85, abs=1e-3)
    for seq in seqs:
        seq.max_total_tokens = 2**62
    assert set(worths_of(Schedule(singles=seqs), row=0.05).values()) == {0.25}


def test_while_requests_wait_a_token_is_worth_the_same_to_all():
    seqs = make_sequences(2, LOOP)
    seqs[0].max_total_tokens, seqs[1].max_total_tokens = 20, 100
    schedule = Schedule(singles=seqs, wait=Wait(seqs[0].group, "budget"))
    assert worths_of(schedule, row=0.05) == {seqs[0]: 0.5, seqs[1]: 0.5}


def test_what_is_expected_of_a_draft_depends_on_the_length_of_its_n_gram():
    short, long = make_sequences(2, LOOP)
    gains = DraftGains()
    for reason, accepted in ((2, 0), (4, 4)):
        state_of(short).reason = reason
        for _ in range(20):
            gains.learn(short, 4, accepted)
    for _ in range(3):
        gains.costs.add(1, 0, 1.0)
    for reason, length in ((2, 0), (4, 4), (3, 4)):
        state_of(long).reason = reason
        assert gains.choose({long: 4}, 4, Schedule(singles=[long])).get(long, 0) == length, reason


def test_numbers_of_tokens_are_rounded_to_three_digits():
    assert [rounded(n) for n in (0, 1, 7, 8, 9, 10, 17, 31, 100)] == [0, 1, 7, 8, 8, 10, 16, 28, 96]


def test_the_share_of_accepted_tokens():
    acceptance = Acceptance()
    assert acceptance.share(0.6) == 0.6
    acceptance.add(4, 4, 0.9)
    acceptance.add(4, 1, 0.9)
    assert (acceptance.accepted, acceptance.tried) == (pytest.approx(4.6), pytest.approx(5.6))
    assert acceptance.share(0.6) == pytest.approx(5.2 / 6.6)


# Drafts in an engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("speculation"))


def make_engine(model, **options) -> LLMEngine:
    options = {"max_model_len": 64, "block_size": 4, "num_gpu_blocks_override": 32} | options
    return build_engine(EngineConfig(model=str(model), dtype="float64", device="cpu", enforce_eager=True, **options))


class Told:
    """Drafts what a text has at the same positions.

    Args: text: token ids, those of the prompt first. most: tokens of a draft.
    """

    def __init__(self, text: list[int], most: int):
        self.text, self.most = text, most
        self.learned: list[tuple[int, int]] = []

    def propose(self, decodes, most, schedule):
        return {seq: self.text[len(seq.token_ids) :][: self.most] for seq in decodes}

    def learn(self, seq, num_drafted, num_accepted):
        self.learned.append((num_drafted, num_accepted))

    def observe(self, stats):
        self.last_step = stats

    def rest(self):
        pass

    def restart(self):
        pass


def run(engine: LLMEngine, params: SamplingParams, prompt=PROMPT, told: Told | None = None, **fields):
    """The output of a request, and the statistics of its steps."""
    engine.scheduler.drafts = None if told is None else Drafts(told)
    engine.add_request("0", {"prompt_token_ids": prompt} | fields, params)
    steps = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        steps.append(engine.last_step)
        check_blocks(engine.scheduler.block_manager)
    (output,) = outputs
    return output, steps


def params_of(max_tokens=20, **options) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options)


OPTIONS = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 5, "logit_bias": {7: 3.0}, "min_tokens": 8, "ignore_eos": False},
    {"allowed_token_ids": list(range(20, 90))},
    {"bad_words": ["a", "the", "b c"], "temperature": 2.0, "seed": 6},
    {"prompt_logprobs": 1},
    {"logprobs": 3, "temperature": 1.0, "seed": 7},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -0.7, "temperature": 1.0, "seed": 8},
    {"repetition_penalty": 1.2, "presence_penalty": -0.4, "frequency_penalty": 0.6, "logprobs": 0},
    {"dry_multiplier": 3.0, "dry_allowed_length": 1, "dry_sequence_breakers": ["a"]},
    {"structured_outputs": StructuredOutputsParams(regex="[a-m]{30}"), "ignore_eos": False, "logprobs": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "greedy")
def test_right_drafts_save_steps_and_wrong_ones_change_nothing(model, options):
    engine, params = make_engine(model), params_of(**options)
    expected, plain = run(engine, params)
    answer = expected.outputs[0].token_ids
    output, steps = run(engine, params, told=Told(PROMPT + answer, 4))
    assert output.outputs[0].token_ids == answer and output.outputs[0].text == expected.outputs[0].text
    assert params.logprobs is None or same_logprobs(output.outputs[0], expected.outputs[0])
    # The prompt's step yields one token, and each later one five.
    assert len(steps) == 1 + math.ceil((len(answer) - 1) / 5) < len(plain)
    wrong = [(token_id + 1) % VOCAB_SIZE if i % 3 == 2 else token_id for i, token_id in enumerate(answer)]
    told = Told(PROMPT + wrong, 4)
    output, steps = run(engine, params, told=told)
    assert output.outputs[0].token_ids == answer
    assert {accepted for _, accepted in told.learned} <= {0, 1, 2} and len(told.learned) > 2
    rng = random.Random(0)
    output, steps = run(engine, params, told=Told([rng.randrange(VOCAB_SIZE) for _ in range(60)], 4))
    assert output.outputs[0].token_ids == answer


def test_drafts_keep_to_the_budget_of_reasoning(model):
    engine, params = make_engine(model), params_of(30, thinking_token_budget=9, temperature=1.0, seed=3)
    answer = run(engine, params, reasoning=True)[0].outputs[0].token_ids
    ends = engine.tokenizer.encode("</think>", add_special_tokens=False)
    assert answer[9 : 9 + len(ends)] == ends
    for draft in (answer, answer[:9] + answer[:9] * 4):
        output, steps = run(engine, params, told=Told(PROMPT + draft, 4), reasoning=True)
        assert output.outputs[0].token_ids == answer
        assert sum(sum(stats.accepted_tokens) for stats in steps) > 5


def same_logprobs(completion, expected) -> bool:
    """Whether two completions have the same log-probabilities."""
    values = [[(i, p.rank, pytest.approx(p.logprob)) for i, p in table.items()] for table in expected.logprobs]
    found = [[(i, p.rank, p.logprob) for i, p in table.items()] for table in completion.logprobs]
    return found == values and completion.cumulative_logprob == pytest.approx(expected.cumulative_logprob)


def test_a_stop_string_within_a_draft_takes_back_the_log_probabilities_behind_it(model):
    engine = make_engine(model)
    sampling = {"temperature": 1.0, "seed": 8, "allowed_token_ids": list(range(40, 60)), "logprobs": 2}
    expected = run(engine, params_of(12, **sampling))[0].outputs[0]
    params = params_of(12, **sampling, stop=[expected.text[4:6]])
    alone = run(engine, params)[0].outputs[0]
    assert len(alone.token_ids) < 12
    completion = run(engine, params, told=Told(PROMPT + expected.token_ids, 11))[0].outputs[0]
    assert completion.token_ids == alone.token_ids and same_logprobs(completion, alone)


def test_completions_that_compete_without_log_probabilities_of_their_own_have_no_drafts(model):
    engine, params = make_engine(model), params_of(temperature=1.0, seed=2, n=1, best_of=2)
    expected, _ = run(engine, params)
    output, steps = run(engine, params, told=Told(PROMPT + expected.outputs[0].token_ids, 4))
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert sum(stats.draft_tokens for stats in steps) == 0


@pytest.mark.parametrize("place", [0, 2])
def test_a_token_that_the_grammar_refuses_ends_the_draft(model, place):
    engine = make_engine(model)
    params = params_of(structured_outputs=StructuredOutputsParams(regex="[a-m]{30}"), ignore_eos=False)
    answer = run(engine, params)[0].outputs[0].token_ids
    (refused,) = engine.tokenizer.encode("z", add_special_tokens=False)
    text = PROMPT + answer[: 1 + place] + [refused] + answer[2 + place :]
    told = Told(text, 4)
    output, steps = run(engine, params, told=told)
    assert output.outputs[0].token_ids == answer
    assert steps[1].draft_tokens == place and steps[1].accepted_tokens == [1] * place


def test_sequences_with_masks_keep_them_beside_others_with_drafts(model):
    """Rows with drafts move to the end of a batch, from between the rows with masks. Request 1 has a mask and no
    drafts, request 3 a mask and drafts."""
    engine = make_engine(model)
    masked = params_of(structured_outputs=StructuredOutputsParams(regex="[a-m]{9}"), ignore_eos=False)
    plain = params_of(temperature=1.0, seed=3)
    order = [plain, masked, plain, masked]
    alone = [run(engine, params)[0].outputs[0].token_ids for params in order]

    class ToldOfThree(Told):
        def propose(self, decodes, most, schedule):
            numbers = {seq: int(seq.group.request_id) for seq in decodes if seq.group.request_id != "1"}
            return {seq: alone[number][seq.num_output_tokens :][:2] for seq, number in numbers.items()}

    told = ToldOfThree([], 2)
    engine.scheduler.drafts = Drafts(told)
    for number, params in enumerate(order):
        engine.add_request(str(number), {"prompt_token_ids": PROMPT}, params)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    assert [found[str(number)] for number in range(len(order))] == alone
    assert len(told.learned) >= 8 and all(drafted == accepted for drafted, accepted in told.learned)


def test_a_stop_token_within_a_draft_ends_the_sequence_there(model):
    engine = make_engine(model)
    answer = run(engine, params_of(temperature=1.0, seed=1))[0].outputs[0].token_ids
    stop = answer[7]
    assert stop not in answer[:7]
    params = params_of(temperature=1.0, seed=1, stop_token_ids=[stop])
    told = Told(PROMPT + answer, 9)
    output, steps = run(engine, params, told=told)
    assert sum(sum(step.accepted_tokens) for step in steps) == 7  # all but the first, which the prompt's step sampled
    assert told.learned == [(7, 7)]
    assert any("2 of the 9 drafted tokens of request 0 are dropped: it has ended." in text for text in explain(engine))
    (completion,) = output.outputs
    assert (completion.token_ids, completion.finish_reason, completion.stop_reason) == (answer[:8], "stop", stop)
    assert engine.scheduler.block_manager.num_free_blocks == 32


@pytest.mark.parametrize("max_tokens", [2, 5, 6, 19])
def test_drafts_end_at_the_length_limit(model, max_tokens):
    engine = make_engine(model)
    answer = run(engine, params_of())[0].outputs[0].token_ids
    output, steps = run(engine, params_of(max_tokens), told=Told(PROMPT + answer, 50))
    assert output.outputs[0].token_ids == answer[:max_tokens] and output.outputs[0].finish_reason == "length"
    assert len(steps) == 2 and steps[1].draft_tokens == max_tokens - 2


def test_a_step_samples_no_more_tokens_than_there_may_be_sequences_or_sixteen(model):
    answer = run(make_engine(model), params_of(40))[0].outputs[0].token_ids
    for max_num_seqs, most in ((1, 16), (20, 20)):
        engine = make_engine(model, max_num_seqs=max_num_seqs)
        output, steps = run(engine, params_of(40), told=Told(PROMPT + answer, 50))
        assert output.outputs[0].token_ids == answer and max(stats.decode_tokens for stats in steps) == most


@pytest.mark.parametrize("kind", ["stream", "final"])
def test_a_stop_string_within_a_draft_ends_the_sequence_there(model, kind):
    """Even if a later token of the same step has ended the sequence by its length."""
    engine = make_engine(model)
    sampling = {"temperature": 1.0, "seed": 8, "allowed_token_ids": list(range(40, 60))}
    expected = run(engine, params_of(12, **sampling))[0].outputs[0]
    stop = expected.text[4:6]
    params = params_of(12, **sampling, stop=[stop])
    alone = run(engine, params)[0].outputs[0]
    assert len(alone.token_ids) < 12 and alone.stop_reason == stop
    completion = run(engine, params, told=Told(PROMPT + expected.token_ids, 11))[0].outputs[0]
    assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_a_draft_that_makes_logits_infinite_changes_nothing(model):
    """K and V of a token that are not finite change the attention of the tokens before it: 0 * NaN is NaN."""
    engine = make_engine(model)
    answer = run(engine, params_of())[0].outputs[0].token_ids
    poison = next(token_id for token_id in range(20, VOCAB_SIZE) if token_id not in answer)
    embedding = engine.executor.worker.model.embed_tokens
    embedding.weight = copy.deepcopy(embedding.weight)  # not the head's
    embedding.weight.matrix[poison] = torch.nan
    text = PROMPT + answer[:6] + [poison] * 20
    output, steps = run(engine, params_of(), told=Told(text, 4))
    assert output.error is None and output.outputs[0].token_ids == answer
    assert [stats.num_drafts for stats in steps if stats.num_drafts] == [1, 1], "then none for this sequence"


def test_drafts_take_only_blocks_and_tokens_that_are_free(model):
    """Two sequences of 8 tokens fill the pool but for one block."""
    prompts = [PROMPT, [20, 21, 22, 23, 24, 25, 26]]
    params = params_of(9)
    engine = make_engine(model)
    answers = [run(engine, params, prompt)[0].outputs[0].token_ids for prompt in prompts]
    engine = make_engine(model, num_gpu_blocks_override=8, max_model_len=32, max_num_batched_tokens=14)
    texts = {tuple(prompt): prompt + answer + [1] * 30 for prompt, answer in zip(prompts, answers, strict=True)}

    class Both(Told):
        def propose(self, decodes, most, schedule):
            assert most <= 14 - len(schedule.singles)
            return {seq: texts[tuple(seq.token_ids[:7])][len(seq.token_ids) :] for seq in decodes}

    engine.scheduler.drafts = Drafts(Both([], 0))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            finished[int(output.request_id)] = output.outputs[0].token_ids
        stats = engine.last_step
        assert stats.preempted == 0 and stats.prefill_tokens + stats.decode_tokens <= 14
        manager, running = engine.scheduler.block_manager, engine.scheduler.running
        held = {seq.seq_id: len(manager.block_tables[seq.seq_id]) for group in running for seq in group.live}
        needed = {seq.seq_id: -(-seq.num_tokens // 4) for group in running for seq in group.live}
        assert held == needed, "blocks of refused drafts are given back"
    assert [finished[0], finished[1]] == answers


def test_only_accepted_tokens_are_found_in_the_prefix_cache(model):
    engine = make_engine(model)
    answer = run(engine, params_of())[0].outputs[0].token_ids
    text = PROMPT + answer[:4] + [(token_id + 1) % VOCAB_SIZE for token_id in answer[4:]]
    fresh = make_engine(model)
    run(fresh, params_of(), told=Told(text, 10))
    manager = fresh.scheduler.block_manager
    assert len(manager.lookup(PROMPT + answer)) == (len(PROMPT) + len(answer) - 1) // 4
    assert len(manager.lookup([*text, 0])) == (len(PROMPT) + 4) // 4


def test_a_step_counts_its_drafts(model):
    engine = make_engine(model)
    answer = run(engine, params_of())[0].outputs[0].token_ids
    text = PROMPT + answer[:4] + [(answer[4] + 1) % VOCAB_SIZE] + answer[5:]
    told = Told(text, 5)
    _, steps = run(engine, params_of(), told=told)
    first = steps[1]
    assert (first.num_drafts, first.draft_tokens, first.accepted_tokens) == (1, 5, [1, 1, 1])
    assert (first.decode_tokens, first.output_tokens, told.learned[0]) == (6, 4, (5, 3))
    assert told.last_step is steps[-1], "a drafter sees the statistics of every step"
    assert sum(stats.output_tokens for stats in steps) == 20


def test_an_engine_with_drafts_from_its_own_tokens_says_the_same(model):
    """With times as measured, so how many tokens are drafted depends on the machine."""
    prompts = [LOOP * 2, PROMPT * 3, [3, 3, 3, 3]]
    outputs = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}):
        engine = make_engine(model, speculative_config=config)
        assert engine.async_scheduling is False
        for number, prompt in enumerate(prompts):
            params = params_of(30, temperature=number / 4, seed=number)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        finished = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                finished[output.request_id] = output.outputs[0].token_ids
        outputs.append(finished)
    assert outputs[0] == outputs[1]


def test_drafts_are_made_where_they_cost_nothing(model):
    """A sequence of one token repeats itself. Steps are said to be equally long whatever they do."""
    engine = make_engine(model, speculative_config={"method": "ngram", "num_speculative_tokens": 6})
    drafter = engine.scheduler.drafts.drafter
    observe = drafter.observe

    def as_if_equally_long(stats):
        stats.seconds = 1.0
        observe(stats)

    drafter.observe = as_if_equally_long
    engine.add_request("0", {"prompt_token_ids": PROMPT * 4}, params_of(30, allowed_token_ids=[20]))
    steps = []
    while engine.has_unfinished_requests():
        engine.step()
        steps.append(engine.last_step)
    assert sum(sum(stats.accepted_tokens) for stats in steps) > 10 and len(steps) < 20
