"""Traces of bench.py simulate: what files say, what prompts share, what is refused."""

import itertools
import json
import random
from pathlib import Path

import pytest
import typer

from benchmarks import traces
from benchmarks.traces import PART_TOKENS, Request, read_trace

MADE_UP = Path(traces.__file__).parent / "made_up_trace.jsonl"


def made_up_lines(seed=0, num_conversations=45):
    """Conversations of one to seven turns in ten minutes. All begin with the same 600 tokens; each turn's prompt is all
    of the conversation before it and a new message."""
    rng, ids, turns = random.Random(seed), itertools.count(1), []
    for _ in range(num_conversations):
        time, tokens, parts = rng.randrange(400_000), 600, [0]
        for _ in range(rng.randint(1, 7)):
            tokens += rng.randint(20, 900)
            full = tokens // PART_TOKENS
            parts = parts[:full] + [next(ids) for _ in range(full - len(parts))]
            output = rng.randint(5, 300)
            last = [next(ids)] if tokens % PART_TOKENS else []
            turns.append((time, tokens, output, parts + last))
            tokens += output
            time += rng.randint(10_000, 40_000)
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return [json.dumps(dict(zip(names, turn, strict=True))) for turn in sorted(turns)]


def test_the_made_up_trace_is_what_its_generator_makes():
    lines = MADE_UP.read_text().splitlines()
    assert lines == made_up_lines()
    trace = read_trace(MADE_UP)
    assert len(trace.requests) == len(lines)
    shared = sum(len(set(a.parts(512)) & set(b.parts(512))) > 1 for a, b in itertools.combinations(trace.requests, 2))
    assert shared > 100  # turns of a conversation


AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.9799600,3180,8
2023-11-16 18:17:06.0000000,7,3
"""


def written(tmp_path, text, name="trace.csv"):
    file = tmp_path / name
    file.write_text(text)
    return file


def test_azures_trace(tmp_path):
    first, second, third = read_trace(written(tmp_path, AZURE)).requests
    assert (first.number, first.arrival, first.input_len, first.output_len) == (0, 0.0, 4808, 10)
    assert (second.number, second.arrival, second.input_len, second.output_len) == (1, 1.0, 3180, 8)
    assert third.arrival == pytest.approx(2.02004, abs=1e-6)
    assert not set(first.prompt(512)) & set(second.prompt(512)) and len(second.prompt(512)) == 3180
    assert first.parts(512) == []


MOONCAKE = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 3]},
    {"timestamp": 3500, "input_length": 600, "output_length": 7, "hash_ids": [4, 5], "other": "not read"},
]


def mooncake(tmp_path, lines=MOONCAKE):
    return written(tmp_path, "\n".join(json.dumps(line) for line in lines) + "\n", "trace.jsonl")


def test_mooncakes_prompts_share_the_parts_that_have_the_same_ids(tmp_path):
    requests = read_trace(mooncake(tmp_path)).requests
    assert [request.arrival for request in requests] == [0.0, 2.5, 2.5]
    first, second, third = (request.prompt(512) for request in requests)
    assert list(map(len, (first, second, third))) == [1100, 1030, 600]
    assert first[:1024] == second[:1024] and first[1024] != second[1024] and first[0] != third[0]
    assert requests[0].parts(512) == requests[1].parts(512) == [0, 1]  # the last part is not full
    assert all(request.own_token not in (*first, *second, *third) for request in requests)


def test_tokens_that_no_id_names_are_the_requests_own():
    request = Request(3, 0.0, 40, 5, [7])
    assert request.prompt(16) == [14] * 16 + [7] * 24


def test_a_trace_is_cut_sped_up_and_repeated(tmp_path):
    requests = read_trace(mooncake(tmp_path), count=5, speed=2, repeat=2).requests
    assert [request.number for request in requests] == [0, 1, 2, 3, 4]
    span = 2.5 * 3 / 2  # with the mean gap of 1.25 s at its end
    assert [request.arrival for request in requests] == [0, 1.25, 1.25, span / 2, (span + 2.5) / 2]
    prompts = [request.prompt(512) for request in requests]
    assert prompts[3][:1024] == prompts[4][:1024]  # shared within a time, not between times
    assert not set(prompts[3]) & set(prompts[0])


def azure(line):
    return "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,5,1\n" + line


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", "", "line 1: no column TIMESTAMP"),
        ("t.csv", "TIMESTAMP,ContextTokens\n", "line 1: no column GeneratedTokens"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("t.csv", azure("2023-11-16 18:17:04,5"), "line 3: 2 columns instead of 3"),
        ("t.csv", azure("yesterday,5,1"), "line 3: TIMESTAMP 'yesterday' is not a date"),
        ("t.csv", azure("2023-11-16 18:17:04+01:00,5,1"), "line 3: TIMESTAMP '2023-11-16 18:17:04+01:00' is not"),
        ("t.csv", azure("2023-11-16 18:17:03,5,1"), "line 3: TIMESTAMP '2023-11-16 18:17:03' is before the line above"),
        ("t.csv", azure("2024-11-16 18:17:03,5,1"), "more than a week"),
        ("t.csv", azure("2023-11-16 18:17:04,0,1"), "line 3: ContextTokens must be a positive integer, not '0'"),
        ("t.csv", azure("2023-11-16 18:17:04,5,-1"), "line 3: GeneratedTokens must be a positive integer"),
        ("t.csv", azure(f"2023-11-16 18:17:04,5,{10**30}"), "line 3: GeneratedTokens"),
        ("t.jsonl", "", "has no requests"),
        ("t.jsonl", "{}", 'line 1: "timestamp" must be a number'),
        ("t.jsonl", "[", "line 1: not JSON"),
        ("t.jsonl", '{"timestamp": 0}', 'line 1: "input_length" must be a positive integer'),
        ("t.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 0}', 'line 1: "output_length"'),
        ("t.jsonl", '{"timestamp": -1, "input_length": 5, "output_length": 1}', 'line 1: "timestamp"'),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}',
            'line 1: "hash_ids" must be a list of integers',
        ),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            'line 1: 2 "hash_ids" are too many for 512 tokens',
        ),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_line(tmp_path, name, text, says):
    with pytest.raises(typer.BadParameter) as raised:
        read_trace(written(tmp_path, text, name))
    assert says in str(raised.value) and name in str(raised.value)


def test_arrivals_do_not_fall_and_milliseconds_are_no_seconds(tmp_path):
    lines = [MOONCAKE[1], MOONCAKE[0]]
    with pytest.raises(typer.BadParameter, match='line 2: "timestamp" 1000 is before the line above'):
        read_trace(mooncake(tmp_path, lines))
    lines = [MOONCAKE[0], MOONCAKE[1] | {"timestamp": 10**12}]
    with pytest.raises(typer.BadParameter, match="line 2: 1e\\+09 s after the first request, more than a week"):
        read_trace(mooncake(tmp_path, lines))


@pytest.mark.parametrize(
    ("options", "says"),
    [({"count": 7, "repeat": 2}, "has only 6"), ({"repeat": 10**6}, "3,000,000 requests are more than 1,000,000")],
)
def test_too_few_and_too_many_requests(tmp_path, options, says):
    with pytest.raises(typer.BadParameter, match=says):
        read_trace(mooncake(tmp_path), **options)
