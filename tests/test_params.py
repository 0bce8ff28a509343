"""SamplingParams and BeamSearchParams: what is refused, under which name, and what passes."""

import dataclasses
import math

import pytest
import torch
from helpers import by_field

from nanopage import BeamSearchParams, SamplingParams, StructuredOutputsParams
from nanopage.params import RequestOutputKind
from nanopage.state.sampling_table import SamplingTable
from nanopage.step import NewSequence, SamplingSettings

NAN, INF, HUGE = math.nan, math.inf, 10**400  # HUGE has no float
TOO_LARGE = [2**63, HUGE, -HUGE, 10**5000]  # Python does not print the last

INTEGERS = {  # field -> (the lowest and highest that pass, those that do not)
    "n": ([1, 2, 100], [0, -1, *TOO_LARGE]),
    "best_of": ([None, 1, 3], [0, -1, *TOO_LARGE]),
    "top_k": ([-1, 0, 1, 10**6], [-2, *TOO_LARGE]),
    "seed": ([None, -(2**63), 0, 2**63 - 1], [-(2**63) - 1, *TOO_LARGE]),
    "max_tokens": ([None, 1, 10**6], [0, -1, *TOO_LARGE]),
    "min_tokens": ([0, 16], [-1, 17, *TOO_LARGE]),
    "dry_allowed_length": ([1, 2, 32], [0, -1, 33, *TOO_LARGE]),
    "logprobs": ([None, 0, 20], [-1, 21, *TOO_LARGE]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, *TOO_LARGE]),
    "thinking_token_budget": ([None, -1, 0, 10**6], [-2, *TOO_LARGE]),
}
NUMBERS = {
    "temperature": ([0, 0.0, 1e-9, 1, 100.0], [-0.1, -1, 100.1, *TOO_LARGE]),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0001]),
    "min_p": ([0, 0.5, 1, 1.0], [-0.1, 1.0001]),
    "repetition_penalty": ([0.01, 1, 2.5, 100], [0, 0.0, -1.0, 0.009, 101]),
    "presence_penalty": ([-2, -2.0, 0, 2], [-2.001, 2.001]),
    "frequency_penalty": ([-2, -2.0, 0, 2], [-2.001, 2.001]),
    "dry_multiplier": ([0, 0.8, 100], [-0.1, 100.1]),
    "dry_base": ([1, 1.75, 10], [0, 0.99, 10.1]),
}
FLAGS = ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "stop_in_reasoning"]
LISTS = {  # field -> (those that pass, those of a wrong type)
    "stop": ([None, [], "a", ["a", "bc"], ("a",)], [0, False, 1.5, b"a", {"a": 1}, [1], [b"a"], ["a", None], [True]]),
    "bad_words": ([None, [], ["a", "bc"], ("a",)], [0, False, "a", "", {"a": 1}, {}, [1], ["a", None], [["a"]]]),
    "dry_sequence_breakers": ([[], ["a", "bc"], ("a",)], [0, "a", "", {}, [1], ["a", None]]),
    "stop_token_ids": ([None, [], [0], (1, 2), {3}], [0, 7, False, "", "7", {}, ["7"], [1.0], [True], [None]]),
    "allowed_token_ids": ([None, [0], (1, 2), {3}], [0, 7, "", "7", {}, {7: 1}, ["7"], [1.0], [True], [NAN], [None]]),
}
LOGIT_BIAS = (
    [None, {}, {0: -100, 1: 100.0, 2: 0}],
    [{1: 100.1}, {1: -101}, {1: NAN}, {1: INF}, {1: -INF}, {1: HUGE}, {10**5000: 101}],
    [0, [], [(1, 2.0)], "1", {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {None: 1.0}, {1: "1"}, {1: None}, {1: True}],
)


PASS = by_field(
    [
        *(([field], good) for field, (good, _) in (INTEGERS | NUMBERS | LISTS).items()),
        (FLAGS, [True, False]),
        (["logit_bias"], LOGIT_BIAS[0]),
        (["output_kind"], RequestOutputKind),
        (["structured_outputs"], [None, StructuredOutputsParams(regex="a")]),
        (["logits_processors"], [None, [], [max, min]]),
    ]
)
OUT_OF_RANGE = by_field(
    [
        *(([field], bad) for field, (_, bad) in (INTEGERS | NUMBERS).items()),
        (NUMBERS, [NAN, INF, -INF, HUGE]),
        (["stop", "bad_words", "dry_sequence_breakers"], [[""], ["a", ""]]),
        (["dry_sequence_breakers"], [["a"] * 17, ["a" * 65]]),
        (["stop"], [""]),
        (["allowed_token_ids"], [[]]),
        (["logit_bias"], LOGIT_BIAS[1]),
    ]
)
WRONG_TYPE = by_field(
    [
        (INTEGERS, [True, False, "1", 1.0, 1.5, NAN, INF, [1]]),
        (["n", "top_k", "min_tokens"], [None]),
        (NUMBERS, [True, False, "1", None, [1.0], 1j]),
        (FLAGS, [0, 1, None, "yes", 1.0]),
        *(([field], bad) for field, (_, bad) in LISTS.items()),
        (["logit_bias"], LOGIT_BIAS[2]),
        (["output_kind"], [None, True, 0, 2, "FINAL_ONLY", RequestOutputKind]),
        (["logits_processors"], [0, "a", len, [1], [None], {1: len}, (len,)]),
        (["structured_outputs"], [{}, {"regex": "a"}, "a", False, StructuredOutputsParams]),
    ]
)


@pytest.mark.parametrize(
    ("table", "exempt"),
    [
        (PASS, set()),
        (WRONG_TYPE, set()),
        (OUT_OF_RANGE, {*FLAGS, "stop_token_ids", "output_kind", "structured_outputs", "logits_processors"}),
    ],
)
def test_the_tables_have_every_field(table, exempt):
    assert table.keys() | exempt == {field.name for field in dataclasses.fields(SamplingParams)}


def test_defaults_pass():
    params = SamplingParams()
    assert (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])


@pytest.mark.parametrize("field", PASS)
def test_values_in_range_pass(field):
    for value in PASS[field]:
        kept = getattr(SamplingParams(**{field: value}), field)
        if field in LISTS:
            texts = [value] if isinstance(value, str) else value
            assert kept == (None if value is None and field == "allowed_token_ids" else list(texts or []))
        else:
            assert kept == value and type(kept) is type(value)


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_a_value_out_of_range_is_an_error_that_names_the_field(field):
    for value in OUT_OF_RANGE[field]:
        with pytest.raises(ValueError, match=rf"\b{field}\b"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize("field", WRONG_TYPE)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_field(field):
    for value in WRONG_TYPE[field]:
        with pytest.raises(TypeError, match=rf"\b{field}\b"):
            SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["temprature", "beam_width", "use_beam_search", "max_new_tokens"])
def test_an_unknown_field_is_an_error_that_names_it(field):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: 1})


def test_fields_that_vllm_has_in_no_fixed_order_are_given_by_name():
    positions = [field.name for field in dataclasses.fields(SamplingParams) if not field.kw_only]
    values = [getattr(SamplingParams(), name) for name in positions]
    assert SamplingParams(*values) == SamplingParams()
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(*values, None)
    with pytest.raises(TypeError, match="positional"):
        BeamSearchParams(2, 16, 1.0)


def test_min_tokens_above_max_tokens_names_both():
    with pytest.raises(ValueError, match=r"min_tokens=5.*max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=5, max_tokens=None).min_tokens == 5


def test_stop_strings_without_detokenizing_name_both():
    with pytest.raises(ValueError, match=r"stop.*detokenize"):
        SamplingParams(stop="a", detokenize=False)
    assert not SamplingParams(stop_token_ids=[1], detokenize=False).detokenize


def test_a_copy_is_checked_again():
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature"):
        dataclasses.replace(params)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"]),
        ("bad_words", ["a"]),
        ("stop_token_ids", [1]),
        ("allowed_token_ids", [1]),
        ("logit_bias", {1: 2.0}),
    ],
)
def test_what_the_caller_does_to_a_list_or_dict_later_does_not_change_the_params(field, value):
    params = SamplingParams(**{field: value})
    copied = dataclasses.replace(params)
    value.clear()
    assert getattr(params, field)
    getattr(params, field).clear()
    assert getattr(copied, field)


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (0.0, True), (9e-6, True), (1e-5, False), (1.0, False)])
def test_a_temperature_near_zero_is_greedy(temperature, greedy):
    assert SamplingParams(temperature=temperature).greedy is greedy
    table = SamplingTable(1, 100, torch.device("cpu"))
    table.add([NewSequence(0, [5], 1, 0, SamplingSettings(temperature=temperature))])
    assert (table.greedy[0], table.temperature[0].item()) == (greedy, 0 if greedy else temperature)


@pytest.mark.parametrize(
    ("fields", "truncates", "penalizes"),
    [
        ({}, False, False),
        ({"top_k": -1}, False, False),
        ({"top_k": 1}, True, False),
        ({"top_k": 99}, True, False),
        ({"top_k": 100}, False, False),  # the size of the vocabulary
        ({"top_p": 0.99}, True, False),
        ({"min_p": 0.01}, True, False),
        ({"repetition_penalty": 0.9}, False, True),
        ({"presence_penalty": -0.1}, False, True),
        ({"frequency_penalty": 0.1}, False, True),
        ({"dry_multiplier": 0.1}, False, False),  # a stage of its own
    ],
)
def test_the_sampler_knows_who_is_truncated_and_who_is_penalized(fields, truncates, penalizes):
    table = SamplingTable(1, 100, torch.device("cpu"))
    table.add([NewSequence(0, [5], 1, 0, SamplingSettings(**fields))])
    assert (table.truncated[0], table.penalized[0]) == (truncates, penalizes)


def test_best_of_below_n_names_both():
    with pytest.raises(ValueError, match=r"best_of=2.*n=3"):
        SamplingParams(n=3, best_of=2)
    assert SamplingParams(n=2, best_of=3).num_sequences == 3


@pytest.mark.parametrize(("fields", "name"), [({"n": 2}, "n=2"), ({"best_of": 3}, "best_of=3")])
def test_several_greedy_completions_are_refused(fields, name):
    with pytest.raises(ValueError, match=rf"{name}.*temperature=0"):
        SamplingParams(temperature=0, **fields)


SEARCH = {  # field -> (values that pass, values out of range, values of the wrong type)
    "width": ([1, 4, 1000], [0, -1], [None, True, "4", 4.0]),
    "max_tokens": ([1, 10**6], [0, -1], [None, True, "4", 4.0]),
    "length_penalty": ([-10, 0, 0.5, 10], [-10.1, 11, NAN, INF, HUGE], [None, True, "1"]),
    "early_stopping": ([True, False, "never"], ["always", "", 0, 1, None], []),
    "skip_special_tokens": ([True, False], [], [0, 1, None, "yes"]),
}


def test_the_table_has_every_field_of_beam_search():
    assert SEARCH.keys() == {field.name for field in dataclasses.fields(BeamSearchParams)}


@pytest.mark.parametrize("field", SEARCH)
def test_beam_search_params_are_checked(field):
    good, out_of_range, wrong_type = SEARCH[field]
    for value in good:
        assert getattr(BeamSearchParams(**{"width": 2} | {field: value}), field) == value
    for error, values in ((ValueError, out_of_range), (TypeError, wrong_type)):
        for value in values:
            with pytest.raises(error, match=rf"\b{field}\b"):
                BeamSearchParams(**{"width": 2} | {field: value})
