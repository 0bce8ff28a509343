"""The simulator: jumps against single steps, replicas against the real engine, the router's view, processes, and
bench.py simulate."""

import itertools
import json
import math
import multiprocessing
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from helpers import run_bench

from benchmarks import serve, simulate, simulator, traces
from benchmarks.costs import Costs
from benchmarks.outputs import Stopped
from benchmarks.peers.protocol import Work
from benchmarks.report import console
from benchmarks.simulator import Configuration, Setup, SimulatedExecutor, SimulatedReplica, TraceFile, run_replicas
from benchmarks.steps import listening
from benchmarks.traces import Request, Trace
from nanopage import EngineConfig
from nanopage.build import build_engine
from nanopage.engine.token_budget import SECONDS, TokenBudget
from nanopage.server.routing import Router
from nanopage.view.invariants import check_blocks

ROOT = Path(__file__).parents[2]
MADE_UP = ROOT / "benchmarks" / "made_up_trace.jsonl"
COSTS = Costs(
    {"step": 0.011, "tokens": 3e-4, "sequences": 7e-5, "context": 3e-7, "chunk pairs": 1e-8, "tokens beyond 32": 1e-4}
)


def random_trace(seed, count=60, most=120, part_tokens=16):
    """Requests of which some share the beginnings of their prompts, in bursts."""
    rng = random.Random(seed)
    requests, now = [], 0.0
    for number in range(count):
        now += rng.choice([0.0, rng.expovariate(2.0), rng.expovariate(20.0)])
        input_len, output_len = rng.randint(1, most), rng.choice([1, rng.randint(1, 30), rng.randint(1, most)])
        family, full = rng.randrange(4), input_len // part_tokens
        parts = [100 * family + index for index in range(rng.randint(0, full))]
        requests.append(Request(number, now, input_len, output_len, parts))
    return Trace(requests, part_tokens)


def results(served):
    return [(s.numbers, s.first_token, s.last_token, s.cached, s.preemptions, s.steps, s.busy_seconds) for s in served]


@pytest.mark.parametrize("seed", range(24))
def test_jumps_change_no_result(seed):
    rng = random.Random(seed)
    trace = random_trace(seed)
    router = rng.choice(["prefix", "least", "round-robin"])
    options = {
        "num_blocks": rng.choice([60, 100, 1000]) // (rng.choice([1, 2, 4])),
        "block_size": rng.choice([4, 16]),
        "max_num_seqs": rng.choice([3, 16, 256]),
        "max_num_batched_tokens": rng.choice([None, 8, 64, 512]),
        "policy": rng.choice(list(simulator.POLICIES)),
    }
    options["num_blocks"] = max(options["num_blocks"], -(-240 // options["block_size"]))
    ran = [
        run_replicas(trace, Configuration(Setup(COSTS, **options, jumps=jumps), 1 + seed % 3, router))
        for jumps in (False, True)
    ]
    assert results(ran[0]) == results(ran[1])
    assert sorted(number for served in ran[0] for number in served.numbers) == list(range(len(trace.requests)))


def test_the_worlds_above_have_jumps_preemptions_and_shared_prefixes():
    trace = random_trace(0)
    setup = Setup(COSTS, 60, block_size=4)
    steps = []

    class Counting(SimulatedReplica):
        def _step(self):
            steps.append(self.executor.clock)
            super()._step()

    replica = Counting(setup, trace.part_tokens)
    for request in trace.requests:
        replica.advance(request.arrival)
        replica.submit(request)
    replica.advance(math.inf)
    check_blocks(replica.block_manager)
    assert 0 < len(steps) < replica.served.steps / 2
    assert replica.served.preemptions > 0 and sum(replica.served.cached) > 0


class OnAVirtualClock:
    """Wraps a real executor: a step takes as long as COSTS say. Keeps what each batch computed."""

    def __init__(self, executor):
        self.executor, self.clock, self.batches = executor, 0.0, []

    def __getattr__(self, name):
        return getattr(self.executor, name)

    def submit(self, batch):
        self.executor.submit(batch)
        self.clock += COSTS.of(batch)
        self.batches.append((batch.starts, batch.counts))

    def sleep(self, seconds):
        self.clock += seconds


class Recording(SimulatedExecutor):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.batches = []

    def submit(self, batch):
        super().submit(batch)
        self.batches.append((batch.starts, batch.counts))


@pytest.mark.parametrize(
    ("budget", "gib", "max_num_seqs"),
    [(None, 0.01, 256), (None, 0.0003, 256), (48, 0.01, 4), (512, 0.0003, 16)],
    ids=["roomy", "preempting", "small steps", "few blocks"],
)
def test_a_replica_does_what_the_engine_does(model, monkeypatch, one_thread, budget, gib, max_num_seqs):
    """A real model, whose steps take on a virtual clock what the costs say: the same batches at the same times."""
    engine = build_engine(
        EngineConfig(
            model=str(model),
            device="cpu",
            enforce_eager=True,
            kv_cache_gib=gib,
            max_model_len=256,
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
        )
    )
    executor = engine.executor = OnAVirtualClock(engine.executor)
    trace = random_trace(5, count=30)
    for request in trace.requests:
        request.arrival /= 10
    names = {token: 3 + index for index, token in enumerate(dict.fromkeys(
        token for request in trace.requests for token in request.prompt(16)
    ))}  # fmt: skip
    assert len(names) < 290, "each has a token id of the tiny model"
    work = [Work([names[token] for token in request.prompt(16)], request.output_len) for request in trace.requests]
    run = serve.planned(work, [request.arrival for request in trace.requests])
    monkeypatch.setattr(time, "perf_counter", lambda: executor.clock)
    if budget is None:
        engine.scheduler.token_budget = TokenBudget(engine.scheduler.token_budget.most, SECONDS["cpu"])
    with listening(engine, engine.scheduler.token_budget.observe):
        serve.drive(run, engine, work, now=lambda: executor.clock, sleep=executor.sleep)
    monkeypatch.undo()

    monkeypatch.setattr(simulator, "SimulatedExecutor", Recording)
    setup = Setup(
        COSTS,
        engine.capacity.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        jumps=False,
    )
    replica = SimulatedReplica(setup, 16)
    for request in trace.requests:
        replica.advance(request.arrival)
        replica.submit(request)
    replica.advance(math.inf)
    assert replica.executor.batches == executor.batches
    served = replica.served
    assert (engine.scheduler.queues.num_preemptions > 0) == (gib < 0.001) and served.preemptions == run.preemptions
    for number, first, last in zip(served.numbers, served.first_token, served.last_token, strict=True):
        times = run.requests[number].token_times
        assert (first, last) == pytest.approx((times[0], times[-1]), abs=1e-9)


SECOND = Costs({"step": 1.0})  # every step takes a second


def test_times_are_those_of_a_schedule_worked_out_by_hand():
    """The first request runs from 0 on, the second waits for the step from 0 to 1, the third finds nothing running."""
    requests = [Request(0, 0.0, 5, 3, []), Request(1, 0.5, 5, 1, []), Request(2, 10.25, 5, 2, [])]
    for jumps in (False, True):
        (served,) = run_replicas(Trace(requests), Configuration(Setup(SECOND, 100, jumps=jumps), 1, "least"))
        assert served.numbers == [1, 0, 2]
        assert served.first_token == [2.0, 1.0, 11.25] and served.last_token == [2.0, 3.0, 12.25]
        assert served.steps == 5 and served.busy_seconds == 5.0
    outcome = simulator.outcome_of(Trace(requests), [served])
    figures = simulator.summary(outcome, {"ttft": 1200, "e2el": 2500})
    expected = {
        "duration": 12.25,
        "completed": 3,
        "total_input_tokens": 15,
        "total_output_tokens": 6,
        "request_throughput": 3 / 12.25,
        "output_throughput": 6 / 12.25,
        "good_share": 1 / 3,  # the first takes 3 s in all, the second 1.5 s to its first token
        "request_goodput": 1 / 12.25,
        "mean_ttft_ms": 1000 * (1 + 1.5 + 1) / 3,
        "p50_ttft_ms": 1000,
        "mean_tpot_ms": 1000,  # the second has a single token
        "mean_e2el_ms": 1000 * (3 + 1.5 + 2) / 3,
        "busy_share": 5 / 12.25,
        "preemptions": 0,
        "prefix_cache_hit_rate": 0,
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)


def test_a_router_knows_what_was_computed_by_the_time_of_an_arrival(monkeypatch):
    """Steps end at 1, 2, ... The first token of a request counts for its prompt, too."""
    known = []

    class Watching(Router):
        def choose(self, *arguments, **options):
            known.append({name: load.outstanding for name, load in self.loads.items()})
            return super().choose(*arguments, **options)

    monkeypatch.setattr(simulator, "Router", Watching)
    requests = [
        Request(0, 0.0, 10, 5, []),  # to the first replica: 15 tokens
        Request(1, 0.0, 20, 5, []),  # to the second: 25
        Request(2, 0.9, 1, 50, []),  # the first steps have not ended: to the first, 15 < 25
        Request(3, 1.0, 1, 1, []),  # they have: 11 tokens are computed there, 21 here
        Request(4, 2.5, 1, 1, []),  # two steps of each
    ]
    run_replicas(Trace(requests), Configuration(Setup(SECOND, 100), 2, "least"))
    assert known == [
        {"0": 0, "1": 0},
        {"0": 15, "1": 0},
        {"0": 15, "1": 25},
        {"0": 15 + 51 - 11, "1": 25 - 21},
        {"0": 15 + 51 - 11 - 1 - 2, "1": 25 - 21 + 2 - 1 - 2},
    ]


def test_the_router_prefix_keeps_conversations_together_and_round_robin_does_not():
    hits = {}
    for router in ("prefix", "least", "round-robin"):
        trace = traces.read_trace(MADE_UP)
        served = run_replicas(trace, Configuration(Setup(COSTS, 5000), 4, router))
        hits[router] = simulator.summary(simulator.outcome_of(trace, served), {})["prefix_cache_hit_rate"]
    assert hits["prefix"] > 1.2 * max(hits["least"], hits["round-robin"])


def test_a_policy_changes_who_waits():
    requests = [Request(0, 0.0, 500, 1, [])] + [Request(n, 0.5, 300 - n, 1, []) for n in range(1, 9)]
    firsts = {}
    for policy in simulator.POLICIES:
        setup = Setup(COSTS, 1000, max_num_batched_tokens=512, max_num_seqs=1, policy=policy)
        (served,) = run_replicas(Trace(requests), Configuration(setup, 1, "least"))
        firsts[policy] = served.numbers
    assert firsts["fcfs"] == firsts["shortest-output"] == list(range(9))
    assert firsts["shortest-prompt"][-1] == 1 and firsts["shortest-prompt"] != firsts["fcfs"]


def test_processes_change_no_result():
    """Replicas behind a round-robin router are divided among processes."""
    file = TraceFile(MADE_UP, speed=4)
    setup = Setup(COSTS, 2000)
    configurations = [Configuration(setup, count, router) for count, router in ((1, "least"), (5, "round-robin"))]
    ran = [sorted(simulator.simulate(file, configurations, processes), key=lambda one: one[0]) for processes in (1, 2)]
    for (index, alone, _), (other, divided, _) in zip(*ran, strict=True):
        assert index == other
        for name, value in vars(alone).items():
            assert np.array_equal(value, vars(divided)[name]), name


# bench.py simulate


@pytest.fixture
def costs_file(tmp_path):
    file = tmp_path / "costs.json"
    engine = {"num_blocks": 3000, "block_size": 16, "max_num_seqs": 64, "device": "cpu"}
    measured = {"tokens": 2048, "sequences": 64, "context": 9000}
    record = Costs(COSTS.seconds, {"model": "made up", "device": "none", "versions": "-"}, engine, measured)
    file.write_text(json.dumps({"costs": record.to_json()}))
    return file


def test_it_runs_where_torch_cannot_be_imported_in_all_processes(tmp_path, costs_file):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')")
    command = [sys.executable, "bench.py", "simulate", "--trace", MADE_UP, "--costs", costs_file, "--replicas", 1]
    plot = ["--plot", tmp_path / "plot.png"]
    done = subprocess.run(
        list(map(str, [*command, *plot])),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "replicas: 1" in done.stdout and (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.fixture
def in_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})


@pytest.mark.usefixtures("in_this_process")
def test_simulate_prints_tables_of_80_columns_and_writes_json(tmp_path, monkeypatch, costs_file):
    monkeypatch.setattr(console, "width", 80)
    file = tmp_path / "result.json"
    options = ["--replicas", "1,3", "--router", "prefix,round-robin", "--goodput", "ttft:2000", "tpot:60"]
    done = run_bench("simulate", "--trace", MADE_UP, "--costs", costs_file, *options, "--speed", 2, "--json", file)
    assert done.exit_code == 0, done.output
    assert "costs  measured with" in done.stdout
    table = done.stdout[done.stdout.index("replicas: 1") :].split("wrote")[0]
    assert max(map(len, table.splitlines())) <= 80 and "prefix hits (%)" in table and "good requests (%)" in table
    written = json.loads(file.read_text())
    assert written["complete"] is True and written["goodput_ms"] == {"ttft": 2000, "tpot": 60}
    runs = written["runs"]
    assert [(run["replicas"], run["router"]) for run in runs] == [
        (1, "prefix"), (1, "round-robin"), (3, "prefix"), (3, "round-robin"),
    ]  # fmt: skip
    assert all(run["completed"] == 189 and run["seconds"] >= 0 for run in runs)
    assert runs[2]["mean_ttft_ms"] < runs[0]["mean_ttft_ms"] and runs[0]["margin"] == 1
    assert f"{runs[2]['output_throughput']:.0f}" in table


@pytest.mark.usefixtures("in_this_process")
def test_the_fewest_replicas_of_a_goodput_are_found(tmp_path, costs_file):
    file = tmp_path / "result.json"
    common = ["--trace", MADE_UP, "--costs", costs_file, "--speed", 20, "--goodput", "ttft:3000", "--json", file]
    done = run_bench("simulate", *common, "--target-share", 0.9, "--router", "least")
    assert done.exit_code == 0, done.output
    fewest = json.loads(file.read_text())["fewest"]["least"]
    done = run_bench("simulate", *common, "--replicas", f"{fewest - 1},{fewest}", "--router", "least")
    before, enough = (run["good_share"] for run in json.loads(file.read_text())["runs"])
    assert fewest > 1 and before < 0.9 <= enough


@pytest.mark.usefixtures("in_this_process")
def test_a_goodput_that_no_number_of_replicas_reaches_is_said(monkeypatch, tmp_path, costs_file):
    monkeypatch.setattr(simulate, "MAX_REPLICAS", 3)
    file = tmp_path / "result.json"
    options = ["--goodput", "ttft:1", "--target-share", 1, "--router", "least", "--json", file]
    done = run_bench("simulate", "--trace", MADE_UP, "--costs", costs_file, *options)
    assert done.exit_code == 0 and "not even 3 replicas" in done.stdout
    assert json.loads(file.read_text())["fewest"] == {"least": None}


@pytest.mark.usefixtures("in_this_process")
def test_what_has_ended_is_written_when_it_is_stopped(monkeypatch, tmp_path, costs_file):
    file, ran = tmp_path / "result.json", itertools.count()

    def stop(*arguments):
        if next(ran) == 1:
            raise Stopped(2)
        return run_replicas(*arguments)

    monkeypatch.setattr(simulator, "run_replicas", stop)
    done = run_bench("simulate", "--trace", MADE_UP, "--costs", costs_file, "--router", "least,prefix", "--json", file)
    written = json.loads(file.read_text())
    assert done.exit_code == 130 and written["complete"] is False
    assert [run["router"] for run in written["runs"]] == ["least"]


def test_no_process_is_left_when_it_is_terminated(costs_file, tmp_path):
    file = tmp_path / "result.json"
    command = [sys.executable, "bench.py", "simulate", "--trace", MADE_UP, "--costs", costs_file, "--json", file]
    command += ["--repeat", 500, "--replicas", 2, "--router", "least,prefix"]
    with subprocess.Popen(list(map(str, command)), cwd=ROOT, stdout=subprocess.PIPE, text=True) as bench:
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 2 and bench.poll() is None and time.monotonic() < deadline:
            children = psutil.Process(bench.pid).children(recursive=True)
            time.sleep(0.05)
        bench.terminate()
        bench.communicate(timeout=60)
    assert len(children) >= 2 and bench.returncode == 143
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert json.loads(file.read_text())["complete"] is False


def test_a_process_that_is_killed_is_an_error():
    """As by a system that is out of memory."""
    file = TraceFile(MADE_UP, repeat=500)
    configurations = [Configuration(Setup(COSTS, 2000), 2, router) for router in ("least", "prefix")]

    def kill():
        while not multiprocessing.active_children():
            time.sleep(0.05)
        multiprocessing.active_children()[0].kill()

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RuntimeError, match="was killed: too little memory"):
        list(simulator.simulate(file, configurations, 2))
    killer.join()
    assert not multiprocessing.active_children()


def test_an_error_in_a_process_is_raised_here():
    file, configuration = TraceFile(MADE_UP), Configuration(Setup(COSTS, 2000), 1, "no router")
    with pytest.raises(ValueError, match="router policy 'no router' is not known"):
        list(simulator.simulate(file, [configuration] * 2, 2))
    assert not multiprocessing.active_children()


@pytest.mark.usefixtures("in_this_process")
def test_what_goes_beyond_the_measured_steps_is_said(costs_file):
    options = ["--router", "least", "--max-num-seqs", 100, "--num-prompts", 5]
    done = run_bench("simulate", "--trace", MADE_UP, "--costs", costs_file, *options)
    assert done.exit_code == 0 and "measured up to 64 sequences at once; here up to 100" in done.stdout
    assert "contexts" not in done.stdout


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--replicas", "0"], "--replicas: '0' is not a number from 1 to 1024"),
        (["--replicas", "1,x"], "--replicas: 'x'"),
        (["--router", "random"], "--router: 'random' is not one of"),
        (["--policy", "random"], "--policy: 'random' is not one of"),
        (["--margin", "-1"], "--margin: -1 is not"),
        (["--margin", "2", "--router", "least"], "--margin: is for the router prefix"),
        (["--speed", "0"], "--speed: 0 is not a positive number"),
        (["--speed", "nan"], "--speed: nan is not a positive number"),
        (["--speed", "1e-4"], "--speed: at 0.0001 the requests take"),
        (["--repeat", "1000000"], "--num-prompts: 189,000,000 requests are more than"),
        (["--num-prompts", "1000"], "--num-prompts"),
        (["--goodput", "itl:5"], "--goodput: 'itl' is not one of"),
        (["--target-share", "0.9"], "--target-share: needs limits: --goodput"),
        (["--target-share", "2", "--goodput", "ttft:5"], "--target-share: 2 is not a share"),
        (["--target-share", "0.9", "--goodput", "ttft:5", "--replicas", "2"], "'--target-share' / '--replicas'"),
        (["--num-blocks", "10"], "--num-blocks: request"),
        (["--json", "/no/such/folder/x.json"], "--json: no such folder"),
        (["--plot", "/no/such/folder/x.png"], "--plot: no such folder"),
        (["--plot", "x.txt"], "--plot: 'x.txt' does not end in"),
        (["--costs", "/no/such/file"], "--costs: /no/such/file: No such file"),
        (["--costs", str(MADE_UP)], "--costs"),
        (["--trace", "/no/such/file.csv"], "--trace: /no/such/file.csv: No such file"),
    ],
)
def test_a_bad_option_is_named(costs_file, options, says):
    given = [] if "--costs" in options else ["--costs", costs_file]
    given += [] if "--trace" in options else ["--trace", MADE_UP]
    done = run_bench("simulate", *given, *options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_without_costs_it_says_how_to_measure_them(monkeypatch, tmp_path):
    monkeypatch.setattr(simulate, "DEFAULT_COSTS", tmp_path / "none.json")
    done = run_bench("simulate", "--trace", MADE_UP)
    assert done.exit_code == 2 and "python bench.py costs --json costs.json" in " ".join(done.output.split())
