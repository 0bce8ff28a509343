"""bench.py: its subcommands on a tiny model, its JSON, its refusals."""

import inspect
import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
import typer
from encoders import tiny_encoder, write_modules
from helpers import LONG, ForkedLink, random_tokens, run_bench, tiny_model
from programs import ROOT, forked
from safetensors.torch import load_file
from typer.testing import CliRunner

import bench as program
from benchmarks import (
    kernel_resources,
    kernels,
    llamacpp_embeddings,
    machine,
    memory,
    offline,
    parallel,
    progress,
    utilization,
)
from benchmarks.outputs import Stopped
from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import transformers as transformers_peer
from benchmarks.peers import transformers_continuous
from benchmarks.peers.protocol import Run, Work, measure
from benchmarks.report import console, figure, show_table, spread, table_of
from nanopage import LLM, EngineConfig, LLMEngine
from nanopage.build import build_engine
from nanopage.kernels import paged_attention
from nanopage.outputs import StepStats
from nanopage.step import Batch
from nanopage.weights import loader
from nanopage.worker.model_runner import Launched, record_event

pytestmark = pytest.mark.usefixtures("fast_and_wide")


def in_a_process(*arguments, cwd=None, timeout=120) -> subprocess.CompletedProcess:
    """Run bench.py as a user does."""
    return subprocess.run(
        [sys.executable, str(ROOT / "bench.py"), *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


SMALL = ["--input-len", "4-8", "--output-len", "2-4"]


@pytest.fixture
def small_memory_benchmark(monkeypatch):
    monkeypatch.setattr(memory, "FORK_LENGTHS", (32, 4))
    monkeypatch.setattr(memory, "NUM_PREEMPTED", 12)


def test_the_program_measures_and_writes_json(model, tmp_path):
    file = tmp_path / "result.json"
    done = in_a_process("latency", *SMALL, "--num-iters", 1, "--model", model, "--eager", "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    check_json("latency", file, done.stdout)
    assert " running" not in done.stderr  # no progress where there is no terminal


@pytest.mark.usefixtures("small_memory_benchmark")
@pytest.mark.parametrize("command", ["throughput", *(["memory"] if LONG else [])])
def test_a_command_measures_and_writes_json(model, tmp_path, command):
    file = tmp_path / "result.json"
    options = ["--num-iters", 1, "--num-prompts", 3, "--load-format", "dummy"]
    done = run_bench(command, *SMALL, *options, "--model", model, "--eager", "--json", file)
    assert done.exit_code == 0, done.output
    check_json(command, file, done.stdout)
    assert " running" not in done.stderr


def check_json(command, file, printed):
    result = json.loads(file.read_text())
    assert command in result["header"]["bench"] and result["complete"] is True
    assert f"wrote {file}" in printed


def test_the_program_writes_what_it_has_served_when_it_is_terminated(model, tmp_path):
    """The second request arrives after an hour."""
    trace, file = tmp_path / "trace.jsonl", tmp_path / "result.json"
    lines = [{"timestamp": t, "input_length": 5, "output_length": 3} for t in (0, 3600)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    program = forked(ROOT / "bench.py", "serve", "--trace", trace, "--model", model, "--eager", "--json", file)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(["bench.py"], preexec_fn=program, **options) as bench:
        printed = ""
        while "warm-up" not in printed and bench.poll() is None:
            printed += bench.stdout.readline()
        bench.send_signal(signal.SIGTERM)
        printed += bench.communicate(timeout=60)[0]
    assert bench.returncode == 143, printed
    result = json.loads(file.read_text())
    assert result["complete"] is False
    assert all(run["completed"] + run["unfinished"] == 2 and run["unfinished"] >= 1 for run in result["runs"])
    assert f"wrote {file}" in printed and "stopped by SIGTERM" in printed


OUTPUT_OPTIONS = [
    *((command, "--json") for command in ("latency", "throughput", "serve", "memory", "compare", "kernels", "costs")),
    *((command, "--profile") for command in ("latency", "throughput")),
    *((command, "--plot") for command in ("throughput", "serve")),
]


@pytest.mark.parametrize(("command", "option"), OUTPUT_OPTIONS)
def test_a_file_that_cannot_be_written_is_refused_before_a_model_is_loaded(tmp_path, monkeypatch, command, option):
    monkeypatch.setattr(loader, "load_model", lambda *_: pytest.fail("the model is loaded"))
    for file, says in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x.json", "no such folder"),
        ("/sys/x", "Permission denied|Read-only file system"),
    ):
        done = run_bench(command, option, file)
        assert done.exit_code == 2
        assert re.search(f"{option}: .*({says})", done.output)


@pytest.mark.usefixtures("small_memory_benchmark")
@pytest.mark.parametrize("command", ["latency", "throughput", "serve", *(["memory"] if LONG else [])])
def test_a_full_disk_costs_no_results(model, tmp_path, monkeypatch, command):
    """The table is printed, every file is kept elsewhere, and the first that fails does not hinder the others."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    full = {"--json": "full.json", "--profile": "full.trace", "--plot": "full.png"}
    options = []
    for option in [option for each, option in OUTPUT_OPTIONS if each == command]:
        (tmp_path / full[option]).symlink_to("/dev/full")
        options += [option, tmp_path / full[option]]
    iterations = [] if command == "serve" else ["--num-iters", 1]
    number = [] if command == "latency" else ["--num-prompts", 3]
    done = run_bench(command, *SMALL, *number, *iterations, *options, "--model", model, "--eager")
    assert done.exit_code == 1
    table = {"latency": "output tok/s", "throughput": "output tok/s", "serve": "Mean TTFT", "memory": "preemptions"}
    assert table[command] in done.output
    for option in options[::2]:
        assert f"error: cannot write {tmp_path / full[option]}: No space left on device" in done.output
    kept = [Path(line.removeprefix("kept in ")) for line in done.output.splitlines() if line.startswith("kept in ")]
    assert sorted(file.suffix for file in kept) == sorted(Path(full[option]).suffix for option in options[::2])
    (record,) = [json.loads(file.read_text()) for file in kept if file.suffix == ".json"]
    assert record["complete"] is True


def stop_at_step(monkeypatch, number):
    """Do what Ctrl-C does when the engine begins its step of this number, counted from 1."""
    step, count = LLMEngine.step, itertools.count(1)

    def stopped_step(self):
        if next(count) == number:
            raise Stopped(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", stopped_step)


def test_ctrl_c_writes_the_iterations_that_are_complete(model, tmp_path, monkeypatch):
    stop_at_step(monkeypatch, 4 * 3 + 2)  # of four steps in each iteration, the first of which warms up
    file, picture = tmp_path / "result.json", tmp_path / "x.png"
    options = ["--input-len", 5, "--output-len", 4, "--num-prompts", 2, "--num-iters", 7, "--compare", "transformers"]
    done = run_bench("throughput", *options, "--model", model, "--eager", "--json", file, "--plot", picture)
    assert done.exit_code == 130
    result = json.loads(file.read_text())
    assert result["complete"] is False
    assert [len(runs) for runs in result["runs"].values()] == [2, 2] and len(result["utilization"]) == 2
    assert "median [lowest-highest] of 2" in done.output and "decode steps" in done.output
    assert not picture.exists()


def test_ctrl_c_in_the_first_iteration_writes_that_there_is_none(model, tmp_path, monkeypatch):
    stop_at_step(monkeypatch, 1)
    file = tmp_path / "result.json"
    done = run_bench("latency", *SMALL, "--model", model, "--eager", "--json", file)
    assert done.exit_code == 130
    result = json.loads(file.read_text())
    assert result["complete"] is False and result["runs"] == {"nanopage": []}
    assert "load and compile" in result["setup_seconds"]


def test_an_error_while_measuring_writes_what_there_is(model, tmp_path, monkeypatch):
    monkeypatch.setattr(utilization.StepRecorder, "take", lambda _: pytest.fail("take"))
    file = tmp_path / "result.json"
    with pytest.raises(pytest.fail.Exception):
        run_bench("latency", *SMALL, "--model", model, "--eager", "--json", file, "--num-iters-warmup", 0)
    result = json.loads(file.read_text())
    assert result["complete"] is False and len(result["runs"]["nanopage"]) == 1


@pytest.mark.usefixtures("small_memory_benchmark")
def test_ctrl_c_writes_what_memory_has_measured(model, tmp_path, monkeypatch):
    stop_at_step(monkeypatch, 40)
    file = tmp_path / "result.json"
    done = run_bench("memory", *SMALL, "--model", model, "--eager", "--json", file, "--num-iters", 1)
    assert done.exit_code == 130
    result = json.loads(file.read_text())
    assert result["complete"] is False and "waste" not in result
    assert [len(runs) for runs in result["parallel sampling"].values()] == [1, 1] and "preemption" in result


@pytest.mark.parametrize(
    ("command", "requests", "peer", "lengths"),
    [
        ("latency", 1, "transformers", ["--input-len", "12", "--output-len", "5"]),
        ("latency", 1, "modules", ["--input-len", "12", "--output-len", "5"]),
        ("throughput", 4, "transformers", ["--input-len", "4-12", "--output-len", "2-5", "--num-prompts", "4"]),
    ],
)
def test_it_measures_side_by_side_with_transformers_and_writes_json(model, tmp_path, command, requests, peer, lengths):
    file = tmp_path / "result.json"
    options = ["--model", model, "--num-iters", 2, "--compare", peer, "--dtype", "float32", "--json", file]
    done = run_bench(command, *lengths, *options, "--eager")
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert f"{requests} requests" in result["header"]["bench"]
    assert result["prefix_cache_hit_tokens"] == 0
    assert set(result["runs"]) == {"nanopage", peer}
    for runs in result["runs"].values():
        assert len(runs) == 2
        for run in runs:
            assert run["seconds"] > 0
            assert requests * 2 <= run["output_tokens"] < run["total_tokens"]
    ours, theirs = result["runs"]["nanopage"], result["runs"][peer]
    assert [r["output_tokens"] for r in ours] == [r["output_tokens"] for r in theirs]
    ratio = statistics.median(
        a["output_tokens"] / a["seconds"] / (b["output_tokens"] / b["seconds"])
        for a, b in zip(ours, theirs, strict=True)
    )
    (row,) = [line for line in done.output.splitlines() if line.startswith("output tok/s")]
    assert figure(ratio) in row
    assert "median [lowest-highest] of 2" in done.output


@pytest.mark.parametrize("at_work", [False, True])
def test_a_peer_that_fails_is_named_and_nanopage_goes_on(model, tmp_path, monkeypatch, at_work):
    def fails(*_):
        raise LookupError("this peer has no [such] thing")

    monkeypatch.setattr(console, "width", 160)
    monkeypatch.setattr(transformers_peer, "runner", lambda *_: fails if at_work else fails())
    file = tmp_path / "result.json"
    options = ["--model", str(model), "--num-iters", "2", "--compare", "transformers", "--json", str(file), "--eager"]
    with console.capture() as printed:
        done = CliRunner().invoke(program.app, ["latency", "--input-len", "6", "--output-len", "3", *options])
    assert done.exit_code == 1, done.output
    assert "transformers failed and is left out" in printed.get() and "no [such] thing" in printed.get()
    result = json.loads(file.read_text())
    assert result["failures"] == {"transformers": "LookupError: this peer has no [such] thing"}
    assert list(result["runs"]) == ["nanopage"] and len(result["runs"]["nanopage"]) == 2


def test_continuous_batching_runs_in_this_process_and_can_be_stopped(model):
    before = set(threading.enumerate())
    engine, stop = transformers_continuous.runner(model, torch.float32, torch.device("cpu"), "auto", 2 * 256)
    try:
        run = measure(engine, [Work([5, 6, 7], 4), Work([8, 9], 2)])  # raises unless each gets its tokens
        assert run.output_tokens == 6 and set(threading.enumerate()) > before
    finally:
        stop()
    assert set(threading.enumerate()) == before


def test_ratios_are_pair_by_pair_for_each_peer(monkeypatch):
    monkeypatch.setattr(console, "width", 160)

    def runs(*seconds):
        return [Run(each, 10, 20) for each in seconds]

    with console.capture() as printed:
        offline.report({"nanopage": runs(1, 2, 4), "a": runs(3, 3, 3), "b": runs(1, 1, 16)}, {}, 0, "latency")
    (row,) = [line for line in printed.get().splitlines() if "output tok/s" in line]
    assert "1.50 [0.750-3.00]" in row and "1.00 [0.500-4.00]" in row


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_bytes_of_the_steps_are_those_of_the_model_and_the_lengths(tmp_path, quantization, tied):
    # Sizes that oneDNN's layout and int8 tiles hold without padding.
    model = tiny_model(tmp_path / "model", vocab_size=320, intermediate_size=128, tie_word_embeddings=tied)
    file = tmp_path / "result.json"
    options = ["--model", model, "--dtype", "float32", "--num-iters", 2, "--json", file]
    options += ["--quantization", quantization] if quantization else []
    done = run_bench("latency", "--input-len", 12, "--output-len", 5, "--batch-size", 2, *options, "--eager")
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    # qkv, o, gate and up, down; twice, then the head. The embedding is not streamed, unless it is the head.
    products = 2 * [(128, 64), (64, 64), (256, 64), (64, 128)] + [(320, 64)]
    norms = 4 * 5 * 64
    if quantization:
        weights = sum(rows * columns + 4 * rows for rows, columns in products) + norms
    else:
        weights = sum(4 * rows * columns for rows, columns in products) + norms
    kv = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
    assert (result["weight_bytes"], result["kv_bytes_of_a_token"]) == (weights, kv)
    assert len(result["utilization"]) == 2 and list(result["bandwidth_gb_s"]) == ["measured"]
    for phases in result["utilization"]:
        for name, steps, context in (("decode", 4, 2 * (13 + 14 + 15 + 16)), ("all", 5, 2 * (12 + 13 + 14 + 15 + 16))):
            phase = phases[name]
            assert (phase["steps"], phase["context_tokens"]) == (steps, context)
            assert phase["bytes_read"] == steps * weights + context * kv
            gb_s = phase["bytes_read"] / phase["seconds"] / 1e9
            assert phase["mbu"] == {"measured": pytest.approx(gb_s / result["bandwidth_gb_s"]["measured"])}
            assert phase["gpu_busy"] is None
            assert all(phase["host_us"][name] > 0 for name in ("schedule", "model", "sample", "output"))
            assert sum(phase["host_us"].values()) * steps <= 1e6 * phase["seconds"]
    assert "MBU, measured" in done.output and "host us a step, decode steps: schedule " in done.output


def test_requests_of_one_token_have_no_decode_steps(model, tmp_path):
    file = tmp_path / "result.json"
    options = ["--model", model, "--num-iters", 1, "--dtype", "float32", "--json", file]
    done = run_bench("throughput", "--num-prompts", 2, "--input-len", 6, "--output-len", 1, *options, "--eager")
    assert done.exit_code == 0, done.output
    (phases,) = json.loads(file.read_text())["utilization"]
    assert phases["decode"] is None and phases["all"]["context_tokens"] == 12


def test_profile_writes_a_trace_of_one_more_iteration(model, tmp_path):
    trace, file = tmp_path / "trace.json", tmp_path / "result.json"
    options = ["--model", model, "--num-iters", 1, "--dtype", "float32", "--json", file, "--profile", trace]
    done = run_bench("latency", "--input-len", 6, "--output-len", 3, *options, "--eager")
    assert done.exit_code == 0, done.output
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]
    assert names.count("aten::argmax") == 3  # greedy sampling, of three tokens
    assert len(json.loads(file.read_text())["runs"]["nanopage"]) == 1


def test_throughput_of_a_file_of_prompts_with_the_cache_emptied_between_iterations(model, tmp_path):
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    ids = list(range(3, 40))  # two full blocks of 16 tokens
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [*ids, i], "output_len": 30}) + "\n" for i in range(2)))
    options = ["--model", model, "--dtype", "float32", "--num-iters", 2, "--num-iters-warmup", 0, "--json", file]
    done = run_bench("throughput", "--dataset-name", "custom", "--dataset-path", prompts, *options, "--eager")
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert [run["total_tokens"] for run in result["runs"]["nanopage"]] == [2 * (38 + 30)] * 2
    assert result["prefix_cache_hit_tokens"] == 2 * 32  # the second request of each iteration
    assert "all requests of prompts.jsonl (custom)" in result["header"]["bench"]


def test_a_prefix_is_found_in_the_cache(model, tmp_path):
    file = tmp_path / "result.json"
    options = ["--model", model, "--dtype", "float32", "--num-iters", 1, "--num-iters-warmup", 0, "--json", file]
    lengths = ["--num-prompts", 300, "--prefix-len", 64, "--input-len", 8, "--output-len", 1]  # 2048 tokens a step
    done = run_bench("throughput", *lengths, *options, "--eager")
    assert done.exit_code == 0, done.output
    assert json.loads(file.read_text())["prefix_cache_hit_tokens"] >= 64
    assert "The prefix cache served" in done.output


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (3, "7/40"),
        (20, "7/40  rate 2"),
        (40, "7/40  rate 2  3 running  2 waiting"),
        (60, "7/40  rate 2  3 running  2 waiting  150 tok/s  1:02"),
        (80, "7/40  rate 2  3 running  2 waiting  150 tok/s  1:02  2 preempted"),
        (120, "7/40  rate 2  3 running  2 waiting  150 tok/s  1:02  2 preempted  75% prefix hits  9 blocks"),
    ],
)
def test_progress_begins_with_what_is_done_and_drops_fields_that_do_not_fit(width, line):
    stats = StepStats(running=3, waiting=1, swapped=1, used_blocks=9)
    state = progress.State("rate 2", 40, 7, stats, 2, computed_tokens=10, cached_tokens=30, output_tokens=9300)
    assert state.line(width, seconds=62.0) == line


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_progress_is_one_line_on_a_terminal_and_leaves_no_listener(monkeypatch, capsys, columns):
    stats = StepStats(running=3, waiting=1, swapped=1, finished=1, used_blocks=7, cached_tokens=30, prefill_tokens=10)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    engine = SimpleNamespace(listeners=[])
    for forced in ("", "1"):
        monkeypatch.setenv("FORCE_COLOR", forced)
        with progress.progress(engine, "a rather long label, as for transformers", 2):
            for listener in engine.listeners:
                listener(stats)
        lines = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().err).replace("\r", "\n").split("\n")
        assert max(map(len, lines)) < columns
        assert any(line.startswith("1/2") for line in lines) == bool(forced)
        assert all(line.startswith(("0/2", "1/2")) for line in lines if line.strip())
    assert engine.listeners == []


class Event:
    """A CUDA event, recorded at `ms`."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, later):
        return later.ms - self.ms


def test_a_gpu_is_busy_between_the_events_around_a_batch(monkeypatch):
    clock = iter((100, 104))

    class Recorded(Event):
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = next(clock)

        def synchronize(self):
            pass

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    launched = Launched(Batch(), started=record_event(torch.device("cuda")))
    launched.ended = record_event(torch.device("cuda"))
    assert launched.result().device_seconds == pytest.approx(0.004)
    assert record_event(torch.device("cpu")) is None


def test_the_data_sheet_of_an_a100_is_made_of_its_clock_and_bus():
    assert machine.data_sheet_bandwidth(1215000, 5120) == pytest.approx(1555, abs=1)  # GB/s, as NVIDIA says


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "echo '570.1, 1980 MHz, 1980 MHz, 2619 MHz, 3201 MHz, 700.00 W'",
            "driver 570.1, SM 1980 MHz of 1980 MHz, memory 2619 MHz of 3201 MHz, power limit 700.00 W",
        ),
        ('test "$1" = --id=GPU-1 && echo a, b, c, d, e, f', "driver a, SM b of c, memory d of e, power limit f"),
        ("echo 'No devices were found'", None),
        ("exit 9", None),
        (None, None),
    ],
)
def test_nvidia_smi_is_asked_and_left_out_where_it_can_not_say(tmp_path, monkeypatch, script, says):
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.nvidia_smi("GPU-1") == says


@pytest.mark.gpu
def test_both_forms_of_transformers_take_turns_on_a_gpu(model, tmp_path):
    file = tmp_path / "result.json"
    lengths = ["--input-len", "4-12", "--output-len", "2-5", "--num-prompts", 4]
    options = ["--device", "cuda", "--num-iters", 2, "--compare", "transformers", "--json", file]
    done = run_bench("throughput", "--model", model, *lengths, *options, "--eager")
    assert done.exit_code == 0, done.output
    runs = json.loads(file.read_text())["runs"]
    assert list(runs) == ["nanopage", "transformers", "transformers continuous"]
    assert len({run["output_tokens"] for column in runs.values() for run in column}) == 1


@pytest.mark.gpu
def test_a_gpu_says_how_busy_it_is(model, tmp_path):
    file = tmp_path / "result.json"
    done = run_bench(
        "latency", "--model", model, "--device", "cuda", "--output-len", 8, "--num-iters", 1, "--json", file, "--eager"
    )
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["bandwidth_gb_s"]["measured"] > 0 and "triton" in result["header"]["versions"]
    for phase in result["utilization"][0].values():
        assert 0 < phase["gpu_busy"] <= 1 and 0 < phase["mbu"]["measured"] < 1


def test_with_dummy_weights_a_config_is_enough(model, tmp_path):
    shutil.copy(model / "config.json", tmp_path)
    options = ["--model", tmp_path, "--load-format", "dummy", "--num-iters", 1, "--json", tmp_path / "result.json"]
    done = run_bench("latency", *SMALL, *options, "--compare", "transformers", "--eager")
    assert done.exit_code == 0, done.output
    assert "dummy weights" in done.output and "transformers" in done.output
    assert json.loads((tmp_path / "result.json").read_text())["header"]["model"].endswith(", dummy weights")


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


COMMANDS = typer.main.get_command(program.app).commands


@pytest.mark.parametrize("command", COMMANDS)
def test_no_value_of_an_option_ends_in_a_traceback_or_endless_work(tmp_path, monkeypatch, command):
    """All options are checked before the model, which is not there. kernels has none, and ends for want of a GPU;
    simulate has none, and its trace is not there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"simulate": ["--trace", "/no/such/file.csv"], "kernels": []}.get(command, ["--model", "/no/such/model"])
    parsed = COMMANDS[command].params
    options = [each.opts[0] for each in parsed if each.opts[0].startswith("--") and not each.is_flag]
    for option, value in itertools.product(options, ("", "0", "-1", "1e-300", "nan", "x", "~x", str(10**30))):
        done = run_bench(command, *([] if option in given else given), f"{option}={value}")
        assert done.exit_code == (1 if command == "kernels" and "need a GPU" in done.output else 2), done.output
        assert any(name in done.output for name in (option, "--model", "--trace", "--costs")) or done.exit_code == 1
        assert "Traceback" not in done.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["latency", "--input-len", "x"], "--input-len"),
        (["latency", "--input-len", "5-"], "--input-len: '5-' is not a number"),
        (["latency", "--input-len", "5-2"], "--input-len: '5-2': needs 1 <= LOW <= HIGH"),
        (["latency", "--input-len", 10**30], "--input-len"),
        (["latency", "--output-len", "9-3"], "--output-len"),
        (["latency", "--batch-size", 10**30], "--batch-size"),
        (["latency", "--num-iters", 10**30], "--num-iters"),
        (["latency", "--num-iters-warmup", -1], "--num-iters-warmup"),
        (["latency", "--seed", -1], "--seed"),
        (["latency", "--seed", 10**30], "--seed"),
        (["throughput", "--num-prompts", "0"], "--num-prompts"),
        (["throughput", "--num-prompts", 10**30], "--num-prompts"),
        (["throughput", "--prefix-len", 10**30], "--prefix-len"),
        (["throughput", "--random-input-len", "5-2"], "--random-input-len: '5-2'"),
        (["throughput", "--random-output-len", 0], "--random-output-len: '0'"),
        (
            ["throughput", "--input-len", 5, "--random-input-len", 5],
            "'--input-len' / '--random-input-len': mean the same",
        ),
        (
            ["serve", "--output-len", 5, "--random-output-len", 5],
            "'--output-len' / '--random-output-len': mean the same",
        ),
        (["serve", "--dataset-name", "custom", "--random-output-len", 5], "--random-output-len: is for random prompts"),
        (["throughput", "--compare", "llama"], "--compare"),
        (["throughput", "--json", "/no/such/folder/x.json"], "--json"),
        (["throughput", "--profile", "/no/such/folder/x.json"], "--profile"),
        (["latency", "--model", "/no/such/model"], "--model: no model at '/no/such/model'"),
        (["latency", "--dtype", "int3"], "--dtype: dtype='int3' is not one of"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["memory", "--dtype", "int3"], "--dtype"),
        (["latency", "--device", "tpu"], "--device: device='tpu' is not one of"),
        (["latency", "--quantization", "int3"], "--quantization: quantization='int3'"),
        (["latency", "--load-format", "zeros"], "--load-format: load_format='zeros'"),
        (["latency", "--speed", "11"], "--speed"),
        (["memory", "--num-prompts", 10**30], "--num-prompts"),
        (["memory", "--seed", -1], "--seed"),
        (["kernels", "--num-iters", 10**30], "--num-iters"),
    ],
)
def test_a_bad_option_is_named_and_the_exit_code_says_so(arguments, names):
    done = run_bench(*arguments)
    assert done.exit_code == 2
    assert names in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["latency", "--input-len", 2000], "--input-len' / '--output-len': 2128 tokens are more than the model's 1024"),
        (["throughput", "--prefix-len", 1000], "'--prefix-len': 1"),
        (["serve", "--input-len", 1000, "--output-len", 100], "1100 tokens are more than the model's 1024"),
        (["throughput", "--num-prompts", 200_000, "--input-len", 800], "160,000,000 tokens in all: at most"),
        (["memory", "--input-len", 1000], "--input-len' / '--output-len': 1256 tokens"),
        (["memory", "--num-prompts", 1_000_000], "512,000,000 tokens in all"),
    ],
)
def test_requests_that_do_not_fit_are_refused_before_the_model_is_loaded(model, monkeypatch, arguments, says):
    monkeypatch.setattr(loader, "load_model", lambda *_: pytest.fail("the model is loaded"))
    done = run_bench(*arguments, "--model", model, "--eager")
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_requests_that_do_not_fit_in_the_cache_are_an_error(model, monkeypatch):
    monkeypatch.setattr("nanopage.worker.memory.num_blocks_that_fit", lambda *_: 4)
    for command in ("latency", "serve"):
        done = run_bench(command, "--model", model, "--input-len", 60, "--output-len", 5, "--eager")
        assert done.exit_code == 1
        assert "65 tokens of a request are more than the KV cache holds, 64" in done.output


def test_a_broken_model_is_an_error_without_control_characters(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["\\u001b[2J\\u009b[31m[red]Llama\\n"]}')
    done = run_bench("latency", "--model", tmp_path)
    assert done.exit_code == 1
    assert "\x1b" not in done.output and "\x9b" not in done.output
    assert r"\x1b[2J\x9b[31m[red]Llama" in done.output


def test_memory_compares_forks_swaps_and_waste(model, tmp_path, monkeypatch):
    monkeypatch.setattr(console, "width", 80)
    monkeypatch.setattr(memory, "NUM_PREEMPTED", 12)
    file = tmp_path / "result.json"
    lengths = ["--input-len", "4-40", "--output-len", "2-20", "--num-prompts", "12"]
    done = run_bench("memory", "--model", model, *lengths, "--num-iters", 1, "--json", file, "--eager")
    assert done.exit_code == 0, done.output
    check_json("memory", file, done.stdout)
    result = json.loads(file.read_text())
    one, eight = result["parallel sampling"].values()
    assert one[0]["prefill_tokens"] == 512 and eight[0]["prefill_tokens"] == 8 * 512
    assert one[0]["blocks"] == 32 + 8 * 4 and eight[0]["blocks"] == 8 * (32 + 4)
    recompute, swap = result["preemption"].values()
    assert recompute[0]["preemptions"] > 0 and recompute[0]["blocks swapped out"] == 0
    assert swap[0]["blocks swapped out"] > 0 and swap[0]["tokens computed"] < recompute[0]["tokens computed"]
    assert 0 < result["waste"]["waste"] < 1
    assert "78%" in done.output
    check_that_tables_fit(done.output)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_kernels_says_what_it_can_not_measure():
    done = run_bench("kernels")
    assert done.exit_code == 1
    assert "need a GPU, and torch sees none here: not measured" in " ".join(done.stdout.split())
    bad = run_bench("kernels", "--dtype", "int3")
    assert bad.exit_code == 2 and "int3" in bad.output


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_keeps_the_lines_of_examples_and_fits_80_columns(monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    done = run_bench(*([command] if command else []), "--help")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "..." not in done.output.replace("[ARGS]...", "").replace("KEY:MS]...", "").replace("KEY:MS...", "")
    text = inspect.getdoc(COMMANDS[command].callback if command else program)
    examples = [line for part in text.split("\b\n")[1:] for line in part.split("\n\n")[0].splitlines()]
    assert any("python bench.py" in line for line in examples)
    assert [line.strip() for line in examples] == [
        line.strip() for line in lines if line.strip() in map(str.strip, examples)
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (0.0, "0"), (7, "7"), (12345, "12,345"), (12345.678, "12,346"), (123.456, "123"),
        (12.3456, "12.3"), (1.23456, "1.23"), (1.0, "1.00"), (0.123456, "0.123"), (0.0123456, "0.012"),
        (-1.2345, "-1.23"), (1e-9, "0.000"),
    ],
)  # fmt: skip
def test_figures_have_three_significant_digits(value, text):
    assert figure(value) == text


def test_a_spread_is_one_figure_if_there_is_no_difference():
    assert spread([7, 7]) == "7" and spread([1.5, None]) == "-"
    assert spread([1.5, 30.25, 2.0]) == "2.00 [1.50-30.2]"


def table_lines(printed):
    """The lines from the first title of a table on, without those of the log and the path of the results."""
    lines = [line for line in printed.splitlines() if not line.startswith(("nanopage: ", "wrote "))]
    return lines[next(i for i, line in enumerate(lines) if "───" in line) - 3 :]


@pytest.mark.parametrize("width", [80, 200])
def test_a_table_wraps_between_words_and_only_if_it_must(monkeypatch, width):
    monkeypatch.setattr(console, "width", width)
    table = table_of("a title", ["", "tokens a second", "time (s)", *(f"ratio {i}" for i in range(3))])
    for name in ("nanopage", "transformers continuous"):
        table.add_row(name, "1,072 [1,016-1,114]", "-", *3 * ["0.684 [0.678-0.701]"])
    with console.capture() as printed:
        show_table(table)
    lines = table_lines(printed.get())
    assert max(map(len, lines)) <= width and "…" not in printed.get()
    words = printed.get().split()
    assert words.count("[0.678-0.701]") == 6 and words.count("[1,016-1,114]") == 2 and "transformers" in words
    assert ("transformers continuous  1,072 [1,016-1,114]" in printed.get()) == (width == 200)


def check_that_tables_fit(printed):
    lines = table_lines(printed)
    assert max(map(len, lines)) <= 80 and "…" not in printed
    assert not re.search(r"\d\.\d{4}", "\n".join(lines))


@pytest.mark.parametrize("command", ["latency", "throughput"])
def test_tables_fit_80_columns(model, monkeypatch, command):
    monkeypatch.setattr(console, "width", 80)
    options = ["--compare", "transformers"] + ([] if command == "latency" else ["--num-prompts", 3])
    done = run_bench(command, *SMALL, *options, "--num-iters", 2, "--model", model, "--eager")
    assert done.exit_code == 0
    check_that_tables_fit(done.stdout)


@pytest.mark.parametrize("which", ["common", "every"])
def test_kernel_resources_fit_80_columns(monkeypatch, which):
    monkeypatch.setattr(console, "width", 80)
    for name in ("compile_ahead", "compile_product"):
        monkeypatch.setattr(kernel_resources, name, lambda *_: kernel_resources.Resources(255, 0, 232448))
    done = CliRunner().invoke(kernel_resources.app, [which])
    assert done.exit_code == 0
    assert max(map(len, table_lines(done.stdout))) <= 80 and "232448" in done.stdout and "…" not in done.stdout


@pytest.fixture
def kernels_on_a_fake_gpu(monkeypatch):
    """Rows of bench.py kernels without a GPU; the list of those that were measured."""
    measured = []

    def measure(kind, heads, kv_heads, head_dim, batch, tokens, queries, dtype, kv_dtype, num_iters):
        times = {"nanopage": 12.345, "reference": None, "sdpa": 1234.5, "flex": 9.9, "gb_s": 1500.0, "tflop_s": 123.4}
        row = {"kind": kind, "batch": batch, "tokens": tokens, "queries": queries, "cache": str(kv_dtype)} | times
        row["heads"] = f"{heads}/{kv_heads} x {head_dim}"
        measured.append(row)
        return row

    monkeypatch.setattr(kernels, "measure", measure)
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda: 2000.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return measured


def test_kernels_writes_its_rows(tmp_path, monkeypatch, kernels_on_a_fake_gpu):
    monkeypatch.setattr(console, "width", 80)
    file = tmp_path / "result.json"
    done = run_bench("kernels", "--json", file)
    assert done.exit_code == 0, done.output
    assert max(map(len, table_lines(done.output)[:20])) <= 80 and "12.3" in done.output and "…" not in done.output
    result = json.loads(file.read_text())
    assert result["complete"] is True and result["copy_gb_s"] == 2000
    assert len(result["rows"]) == len(kernels_on_a_fake_gpu) and result["rows"][0]["of_copy"] == 0.75
    assert "75%" in done.output and f"wrote {file}" in done.output
    assert {row["cache"] for row in result["rows"]} == {"torch.bfloat16"} and "fp8" not in done.output


def test_kernels_over_a_cache_in_fp8(kernels_on_a_fake_gpu):
    done = run_bench("kernels", "--kv-cache-dtype", "fp8")
    assert done.exit_code == 0 and "KV cache in fp8" in done.output
    assert {row["cache"] for row in kernels_on_a_fake_gpu} == {"torch.float8_e4m3fn"}
    assert any(row["queries"] == 32 and row["tokens"] == 32768 for row in kernels_on_a_fake_gpu)
    bad = run_bench("kernels", "--kv-cache-dtype", "fp4")
    assert bad.exit_code == 2 and "auto, fp8" in bad.output


def test_ctrl_c_writes_the_rows_of_kernels(tmp_path, monkeypatch, kernels_on_a_fake_gpu):
    measure = kernels.measure

    def stopped(*case):
        if len(kernels_on_a_fake_gpu) == 3:
            raise Stopped(signal.SIGINT)
        return measure(*case)

    monkeypatch.setattr(kernels, "measure", stopped)
    done = run_bench("kernels", "--json", tmp_path / "result.json")
    assert done.exit_code == 130 and "75%" in done.output
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["complete"] is False and len(result["rows"]) == 3


@pytest.mark.interpreter
@pytest.mark.parametrize(("kind", "queries"), [("decode", 1), ("prefill", 40), ("chunk", 5)])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_kernels_get_block_tables_as_the_engine_has_them(monkeypatch, kind, queries, kv_dtype):
    """int32, of which the reference next to them computes the same."""
    seen, make = [], paged_attention.make_attention

    def made(plain, *arguments):
        seen.append((plain.block_tables.dtype, make(plain, *arguments)))
        return seen[-1][1]

    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(paged_attention, "make_attention", made)
    monkeypatch.setattr(kernels, "captured", lambda function: function)
    results = []
    monkeypatch.setattr(kernels, "time_of", lambda function, num_iters: results.append(function()) or 1.0)
    monkeypatch.setattr(kernels, "flex", lambda *_: lambda: None)
    row = kernels.measure(kind, 4, 2, 16, 3, 40, queries, torch.float32, kv_dtype, 1)
    ours, plain, sdpa, _ = results
    torch.testing.assert_close(ours, plain)
    assert [dtype for dtype, _ in seen] == [torch.int32] and sdpa.shape == (3, 4, queries, 16)
    assert row["gb_s"] == 2 * 3 * 40 * 2 * 16 * kv_dtype.itemsize / 1e3 and row["reference"] == 1.0


def test_a_call_is_timed_after_a_buffer_has_been_read(monkeypatch):
    events = []

    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            events.append("record")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 0.002

    read = torch.Tensor.amax
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernels, "GIB", 2**20)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "amax", lambda self: events.append("read") or read(self))
    assert kernels.time_of(lambda: events.append("call"), 2) == 2.0
    assert events == [*["call"] * 3, *["read", "record", "call", "record"] * 2]


@pytest.mark.gpu
def test_kernels_are_measured_on_a_gpu(tmp_path):
    file = tmp_path / "result.json"
    done = in_a_process("kernels", "--num-iters", 2, "--json", file, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["copy_gb_s"] > 0 and all(row["nanopage"] > 0 for row in result["rows"])


def test_parallel_refuses_what_does_not_divide_the_model():
    result = run_bench("parallel", "--workers", 3)
    assert result.exit_code == 2
    assert "tensor_parallel_size=3 does not divide num_attention_heads=8" in " ".join(result.output.split())


def test_parallel_measures_steps_and_exchanged_bytes(model, monkeypatch):
    monkeypatch.setattr("nanopage.distributed.process_executor.ProcessLink", ForkedLink)
    monkeypatch.setattr(parallel, "OVERHEAD_SEQS", (1, 3))

    def engine_of(path, **options):
        options |= {"max_model_len": 256, "num_gpu_blocks_override": 64, "load_format": "dummy", "device": "cpu"}
        return build_engine(EngineConfig(model=str(path), **options))

    results = {}
    parallel.measure_overhead(engine_of, model, 1, results)
    assert {name: set(column) for name, column in results["overhead"].items()} == {
        "in this process": {"1", "3"},
        "in a process": {"1", "3"},
    }
    engine = engine_of(model, tensor_parallel_size=2, enforce_eager=True)
    try:
        measured = parallel.runs(engine, 2, 4, 1)
    finally:
        engine.shutdown()
    config = engine.model_config
    assert measured["output_tokens_per_second"] > 0
    assert measured["bytes_per_token"] > config.num_layers * 2 * config.hidden_size * 4


def test_embed_measures_a_peer_on_the_same_texts(tmp_path, model):
    directory, file = write_modules(tiny_encoder(tmp_path / "model")), tmp_path / "result.json"
    options = ("--num-prompts", 5, "--words", "2-4", "--iters", 2, "--warmup", 0, "--compare", "transformers")
    done = run_bench("embed", "--model", directory, *options, "--json", file)
    assert done.exit_code == 0, done.output
    results = json.loads(file.read_text())
    assert results["complete"] and results["tokens"] > 5 * 4
    for row in results["engines"].values():
        assert len(row["seconds"]) == 2 and row["texts_per_second"] > 0 and row["largest_difference"] < 1e-5
    assert run_bench("embed", "--model", model, "--num-prompts", 1).exit_code == 1  # it makes text
    assert run_bench("embed", "--model", directory, "--compare", "vllm").exit_code == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_weights_of_an_encoder_are_written_for_llamacpp(tmp_path, dtype):
    directory = tiny_encoder(tmp_path / "model")
    llamacpp_embeddings.write_gguf(directory, tmp_path / "model.gguf", dtype)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    written = {tensor.name: tensor for tensor in reader.tensors}
    weights = {name.removeprefix("bert."): w for name, w in load_file(directory / "model.safetensors").items()}
    assert len(written) == sum(w.is_floating_point() and not name.startswith("pooler.") for name, w in weights.items())
    for name, ours in {
        "blk.1.attn_q": "encoder.layer.1.attention.self.query",
        "blk.0.ffn_down": "encoder.layer.0.output.dense",
        "blk.0.layer_output_norm": "encoder.layer.0.output.LayerNorm",
    }.items():
        for part in ("weight", "bias"):
            tensor, expected = written[f"{name}.{part}"], weights[f"{ours}.{part}"]
            matrix = dtype == "bfloat16" and expected.ndim > 1
            assert tensor.tensor_type.name == ("BF16" if matrix else "F32")
            values = torch.tensor(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(expected.shape))
            assert torch.equal(values, expected.bfloat16().float() if matrix else expected)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["RobertaModel"]}))
    with pytest.raises(ValueError, match="RobertaModel"):
        llamacpp_embeddings.write_gguf(directory, tmp_path / "other.gguf", dtype)
