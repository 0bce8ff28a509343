"""bench.py: its subcommands on a tiny model, its JSON, its refusals."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_model

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
