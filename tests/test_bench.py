"""bench.py: its subcommands on a tiny model, its JSON, its refusals."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import random_tokens, tiny_model

from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import transformers as transformers_peer
from benchmarks.peers.protocol import Work
from nanopage import LLM, loader

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def bench(*arguments, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), *map(str, arguments), "--eager"],  # compiling takes long
        env=os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "160"} | env,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("command", "requests", "lengths"),
    [
        ("latency", 1, ["--input-len", "12", "--output-len", "5"]),
        ("throughput", 4, ["--input-len", "4-12", "--output-len", "2-5", "--num-prompts", "4"]),
    ],
)
def test_it_measures_side_by_side_with_transformers_and_writes_json(model, tmp_path, command, requests, lengths):
    file = tmp_path / "result.json"
    options = ["--model", model, "--num-iters", 2, "--compare", "transformers", "--dtype", "float32", "--json", file]
    done = bench(command, *lengths, *options)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert f"{requests} requests" in result["header"]["bench"]
    assert result["prefix_cache_hit_tokens"] == 0
    assert set(result["runs"]) == {"nanopage", "transformers"}
    for runs in result["runs"].values():
        assert len(runs) == 2
        for run in runs:
            assert run["seconds"] > 0
            assert requests * 2 <= run["output_tokens"] < run["total_tokens"]
    ours, theirs = result["runs"]["nanopage"], result["runs"]["transformers"]
    assert [r["output_tokens"] for r in ours] == [r["output_tokens"] for r in theirs]
    ratio = statistics.median(
        a["output_tokens"] / a["seconds"] / (b["output_tokens"] / b["seconds"])
        for a, b in zip(ours, theirs, strict=True)
    )
    (row,) = [line for line in done.stdout.splitlines() if " output tok/s" in line]
    assert f"{ratio:.2f}" in row


@pytest.mark.parametrize(("command", "arguments"), [("latency", ["--compare", "transformers"]), ("memory", [])])
def test_with_dummy_weights_a_config_is_enough(model, tmp_path, command, arguments):
    shutil.copy(model / "config.json", tmp_path)
    lengths = ["--input-len", "4-8", "--output-len", "2-4"]
    options = ["--model", tmp_path, "--load-format", "dummy", "--num-iters", 1, "--json", tmp_path / "result.json"]
    done = bench(command, *lengths, *options, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dummy weights" in done.stdout
    assert json.loads((tmp_path / "result.json").read_text())["header"]["model"].endswith(", dummy weights")
    assert ("transformers" in done.stdout) == (command == "latency")


def test_dummy_weights_are_the_same_in_transformers(model, tmp_path):
    shutil.copy(model / "config.json", tmp_path)
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 16, "enforce_eager": True}
    llm = LLM(str(tmp_path), load_format="dummy", dtype="float32", **options)
    work = [Work(prompt, 8) for prompt in random_tokens([3, 17, 9])]
    theirs = transformers_peer.runner(tmp_path, torch.float32, torch.device("cpu"), "dummy")
    for one in work:
        (ours,), (same,) = nanopage_peer.runner(llm)([one]), theirs([one])
        assert ours.token_ids == same.token_ids
    weights = dict(loader.dummy_tensors(llm.engine.model_config, torch.bfloat16, torch.device("cpu")))
    hf = transformers_peer.dummy_model(tmp_path, torch.bfloat16, torch.device("cpu"))
    assert weights.keys() == dict(hf.named_parameters()).keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in hf.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["latency", "--input-len", "x"], "--input-len"),
        (["latency", "--output-len", "9-3"], "--output-len"),
        (["throughput", "--num-prompts", "0"], "--num-prompts"),
        (["throughput", "--compare", "llama"], "--compare"),
        (["throughput", "--json", "/no/such/folder/x.json"], "--json"),
        (["latency", "--model", "/no/such/model"], "/no/such/model"),
        (["latency", "--dtype", "int3"], "int3"),
        (["latency", "--quantization", "int3"], "quantization='int3'"),
        (["latency", "--load-format", "zeros"], "load_format='zeros'"),
        (["latency", "--speed", "11"], "--speed"),
    ],
)
def test_a_bad_option_is_named_and_the_exit_code_says_so(arguments, names):
    done = bench(*arguments, NO_COLOR="1")
    assert done.returncode != 0
    assert names in done.stdout + done.stderr


def test_prompts_that_do_not_fit_are_refused(model):
    done = bench("latency", "--model", model, "--input-len", "2000")
    assert done.returncode != 0
    assert "2128 tokens" in done.stderr


def test_memory_compares_forks_swaps_and_waste(model, tmp_path):
    file = tmp_path / "result.json"
    lengths = ["--input-len", "4-40", "--output-len", "2-20", "--num-prompts", "12"]
    done = bench("memory", "--model", model, *lengths, "--num-iters", 1, "--json", file)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    one, eight = result["parallel sampling"].values()
    assert one[0]["prefill_tokens"] == 512 and eight[0]["prefill_tokens"] == 8 * 512
    assert one[0]["blocks"] == 32 + 8 * 4 and eight[0]["blocks"] == 8 * (32 + 4)
    recompute, swap = result["preemption"].values()
    assert recompute[0]["preemptions"] > 0 and recompute[0]["blocks swapped out"] == 0
    assert swap[0]["blocks swapped out"] > 0 and swap[0]["tokens computed"] < recompute[0]["tokens computed"]
    assert 0 < result["waste"]["waste"] < 1
    assert "78%" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_kernels_says_what_it_can_not_measure():
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), "kernels"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "need a GPU, and torch sees none here: not measured" in " ".join(done.stdout.split())
    bad = subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), "kernels", "--dtype", "int3"], capture_output=True, text=True
    )
    assert bad.returncode != 0 and "int3" in bad.stderr


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu(tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, str(ROOT / "bench.py"), "kernels", "--num-iters", "2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["copy_gb_s"] > 0 and all(row["nanopage"] > 0 for row in result["rows"])
