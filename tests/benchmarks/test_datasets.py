"""benchmarks/datasets.py: random and shared prompts, files of prompts, ShareGPT's rules, traces, and their refusals."""

import json
import os
import random
from pathlib import Path

import pytest
import typer
from helpers import tiny_tokenizer

from benchmarks.datasets import dataset, read_prompts, read_sharegpt, read_trace


class Engine:
    class model_config:
        vocab_size = 300


def requests_of(model, name, path, num_prompts=None, output_len=None, seed=0):
    return dataset(name, path, num_prompts, None, output_len, 0).requests(random.Random(seed), model)


def test_a_prefix_is_common_to_the_prompts_of_a_call_and_new_in_the_next(model):
    data = dataset("random", None, 6, "3-9", "2", 20)
    rng = random.Random(1)
    requests = data.requests(rng, model)
    first, second = requests.work(rng, Engine), requests.work(rng, Engine)
    assert [len(w.prompt) for w in first] == [i for i, _ in requests.lengths] == [len(w.prompt) for w in second]
    assert all(23 <= len(w.prompt) <= 29 and w.output_len == 2 for w in first)
    assert len({tuple(w.prompt[:20]) for w in first}) == 1 and first[0].prompt[:20] != second[0].prompt[:20]
    assert len({tuple(w.prompt[20:]) for w in first}) == 6
    assert data.what == "6 requests, input 20 common tokens and 3-9, output 2"


def test_prompts_of_a_file_keep_their_order_and_lengths(model, tmp_path):
    encode = tiny_tokenizer().encode
    text, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    text.write_text("the cat\n\nthe other dog\u2028went\n")
    requests = requests_of(model, "custom", text)
    assert requests.prompts == [encode("the cat").ids, encode("the other dog\u2028went").ids]
    assert all(32 <= o <= 128 for _, o in requests.lengths)
    entries = [
        {"prompt": "the cat", "output_len": 3, "id": "not read"},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 4},
        {"prompt": "the men", "output_tokens": 5},
        {"prompt": "no length"},
    ]
    lines.write_text("\n".join(map(json.dumps, entries)))
    requests = requests_of(model, "custom", lines, num_prompts=3)
    assert requests.lengths == [(len(encode("the cat").ids), 3), (3, 4), (len(encode("the men").ids), 5)]
    assert [w.prompt for w in requests.work(random.Random(0), Engine)] == requests.prompts
    assert [o for _, o in requests_of(model, "custom", lines, output_len="9").lengths] == [9] * 4


def test_sharegpt_leaves_out_what_vllm_leaves_out(model, tmp_path):
    def turns(*values):
        return {"conversations": [{"from": "human", "value": value} for value in values]}

    file = tmp_path / "share.json"
    prompt, answer, short = "0123456789", "98765", "12"  # digits are a token each
    kept = [turns(prompt, answer), turns(prompt[::-1], answer, "more"), turns("0" * 1024, "1" * 1024)]
    dropped = [turns(prompt), {"id": 1}, turns(short, answer), turns("0" * 1025, answer), turns("0" * 1024, "1" * 1025)]
    file.write_text(json.dumps([*dropped, *kept, turns("4" * 8, short)]))
    requests = requests_of(model, "sharegpt", file)
    assert sorted(requests.lengths) == [(10, 5), (10, 5), (1024, 1024)]
    shorter = requests_of(model, "sharegpt", file, output_len="2")  # and not the answers'
    assert sorted(shorter.lengths) == [(8, 2), (10, 2), (10, 2), (1024, 2), (1024, 2)]
    orders = {tuple(requests_of(model, "sharegpt", file, seed=seed).lengths) for seed in range(20)}
    assert len(orders) > 1
    with pytest.raises(typer.BadParameter, match="the file has 3 prompts that can be used"):
        requests_of(model, "sharegpt", file, num_prompts=4)


def test_a_trace_gives_arrivals_and_lengths(tmp_path):
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": i, "output_length": o, "hash_ids": [1]} for t, i, o in
             ((5, 4, 2), (5.5, 6, 3), (9, 8, 1))]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    requests = read_trace(file, None)
    assert requests.arrivals == [0, 0.5, 4] and requests.lengths == [(4, 2), (6, 3), (8, 1)]
    assert read_trace(file, 2).arrivals == [0, 0.5]
    with pytest.raises(typer.BadParameter, match="has only 3"):
        read_trace(file, 4)


def trace(*timestamps, length=2):
    """The lines of a trace."""
    return "\n".join(json.dumps({"timestamp": t, "input_length": length, "output_length": 2}) for t in timestamps)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.jsonl", '{"prompt": "a"}\n{"prompt": ""}', "line 2.*\"prompt\" must be a text, not ''"),
        ("x.jsonl", '{"prompt": "a"}\n\n{"text": "a"}', 'line 3.*needs "prompt" or "prompt_token_ids"'),
        ("x.jsonl", '{"prompt": "a", "prompt_token_ids": [1]}', "one of them"),
        ("x.jsonl", '{"prompt_token_ids": [1, -1]}', "line 1.*list of token ids"),
        ("x.jsonl", '{"prompt_token_ids": [1, 300]}', "line 1.*300 is not in the vocabulary of 300"),
        ("x.jsonl", '{"prompt": "a", "output_len": 0}', '"output_len" must be a positive integer, not 0'),
        ("x.jsonl", '{"prompt": "a", "output_len": 1, "max_tokens": 1}', "output_len and max_tokens mean the same"),
        ("x.jsonl", '{"prompt": "a"}\n{"prompt"', "line 2: not JSON"),
        ("x.jsonl", "[1]", "line 1: not an object"),
        ("x.jsonl", "", "no prompts"),
        ("x.txt", "\n \n", "no prompts"),
        ("x.txt", b"\xff\xfe\xff", "not a text in UTF-8"),
        ("x.txt", None, "No such file"),
        ("share.json", '{"conversations": []}', "not a list of conversations"),
        ("share.json", "[\n{,\n]", "line 2: not JSON"),
        ("share.json", "[3]", "conversation 0: not an object"),
        ("share.json", '[{"conversations": 3}]', "conversation 0.*not a list"),
        ("share.json", '[{"conversations": [{"value": "a"}, {"text": "b"}]}]', 'conversation 0.*"value"'),
        ("share.json", '[{"conversations": [{"value": "a"}]}]', "no conversations of two turns"),
        ("share.json", '[{"conversations": [{"value": "1"}, {"value": "2"}]}]', "no prompt that can be used"),
        ("trace", '{"timestamp": 1, "input_length": 2}', '"output_length" must be a positive integer, not None'),
        ("trace", '{"timestamp": "1"}', "line 1.*\"timestamp\" must be a number of seconds, not '1'"),
        ("trace", '{"timestamp": NaN}', '"timestamp" must be a number of seconds, not nan'),
        (
            "trace",
            '{"timestamp": 2, "input_length": 2, "output_length": 2}\n{"timestamp": 1}',
            "line 2.*before the line above, 2.0",
        ),
        ("trace", "\n", "no requests"),
        ("trace", trace(0, 1e15), 'line 2: "timestamp" 1.*is 1e.15 s after the first, more than a week'),
        ("trace", trace(10**400), 'line 1: "timestamp" must be a number of seconds'),
        ("trace", trace(-5), 'line 1: "timestamp" must be a number of seconds, not -5'),
        ("trace", trace(0, length=10**30), 'line 1: "input_length" must be a positive integer of at most 100,000,000'),
        ("trace", "[" * 99_999, "line 1: lists or objects are nested too deeply"),
        ("trace", "9" * 9999, "line 1: an integer of more than 4300 digits"),
        ("x.jsonl", '{"a":' * 99_999, "line 1: lists or objects are nested too deeply"),
        ("x.jsonl", '{"prompt": "\\ud800"}', "line 1: half a surrogate pair, '.ud800', is no character"),
        ("x.jsonl", '{"prompt": "a", "output_len": 1e30}', '"output_len" must be a positive integer, not 1e.30'),
        ("x.jsonl", '{"prompt": "a", "output_len": 1' + "0" * 30 + "}", "positive integer of at most 100,000,000"),
        ("x.jsonl", '{"prompt_token_ids": [1' + "0" * 99 + "]}", "is not in the vocabulary of 300"),
        ("x.jsonl", '{"prompt": [' + "1, " * 9999 + "1]}", '"prompt" must be a text, not .{9,60}$'),
        ("x.txt", "a" * 10_000_001, "line 1: a text of 10,000,001 characters, more than 10,000,000"),
        ("share.json", "[" * 99_999, "nested too deeply"),
        (
            "share.json",
            '[{"conversations": [{"value": "a"}, {"value": "\\ud800"}]}]',
            "conversation 0: half a surrogate",
        ),
    ],
)
def test_a_bad_file_is_refused_by_name_and_line(model, tmp_path, name, content, says):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(typer.BadParameter, match=says) as refusal:
        if name == "trace":
            read_trace(file, None)
        else:
            requests_of(model, "sharegpt" if name == "share.json" else "custom", file)
    assert refusal.value.param_hint == ("--trace" if name == "trace" else "--dataset-path")
    assert str(file) in str(refusal.value) or "the file has" in str(refusal.value)


@pytest.mark.parametrize("read", [lambda file: read_trace(file, None), read_sharegpt, read_prompts])
@pytest.mark.parametrize(("name", "says"), [
    ("fifo", "not a regular file"), ("folder", "not a regular file"), ("/dev/zero", "not a regular file"),
    ("~nobody-of-this-name/x", "home"), ("n" * 300, "File name too long"),
])  # fmt: skip
def test_what_is_no_regular_file_is_not_read(tmp_path, monkeypatch, read, name, says):
    os.mkfifo(tmp_path / "fifo")  # to open one waits for somebody who writes
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(typer.BadParameter, match=says):
        read(Path(name))


def test_a_file_of_more_than_a_gibibyte_is_not_read(tmp_path):
    with open(tmp_path / "x.jsonl", "wb") as file:
        file.truncate(3 * 2**30)  # takes no space
    with pytest.raises(typer.BadParameter, match=r"3\.0 GiB are more than 1 GiB"):
        read_prompts(tmp_path / "x.jsonl")


def test_control_characters_of_a_file_do_not_reach_messages(tmp_path):
    file = tmp_path / "x\x1b[2J.jsonl"
    file.write_text('{"prompt": "a", "prompt\x9b": 3, "output_len": "\\u009b31m"}')
    with pytest.raises(typer.BadParameter) as refusal:
        read_prompts(file)
    assert "x\ufffd[2J.jsonl, line 1" in str(refusal.value) and r"'\x9b31m'" in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("web", None, None, None, None, 0), "--dataset-name"),
        (("random", "prompts.txt", None, None, None, 0), "--dataset-path"),
        (("custom", None, None, None, None, 0), "--dataset-path"),
        (("custom", "prompts.txt", None, "7", None, 0), "--input-len"),
        (("custom", "prompts.txt", None, None, None, 7), "--prefix-len"),
        (("custom", "prompts.txt", 3, None, None, 0), "--num-prompts"),
        (("custom", "prompts.txt", None, None, "0", 0), "--output-len"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(tmp_path, monkeypatch, arguments, option):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    name, path, *others = arguments
    with pytest.raises(typer.BadParameter) as refusal:
        dataset(name, path and tmp_path / path, *others)
    assert refusal.value.param_hint == option
