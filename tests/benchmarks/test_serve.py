"""benchmarks/serve.py: its figures against schedules worked out by hand, on a clock and an engine that are not real;
bench.py serve on a tiny model; its JSON against serve.schema.json; its refusals."""

import itertools
import json
import math
import random
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import run_bench

from benchmarks import metrics, serve
from benchmarks.datasets import Requests
from benchmarks.outputs import Stopped
from benchmarks.peers.protocol import Work
from benchmarks.report import console, figure
from benchmarks.utilization import Step
from nanopage import LLMEngine
from nanopage.outputs import RequestMetrics, StepStats
from nanopage.view.picture import Picture, read_recording

SCHEMA = json.loads((Path(serve.__file__).parent / "serve.schema.json").read_text())

RUN_PATTERNS = SCHEMA["properties"]["runs"]["items"]["patternProperties"]


class FakeEngine:
    """Each step takes a second and gives a token to each of the first `batch` requests. Its clock starts at 100."""

    def __init__(self, batch=2):
        self.batch, self.clock, self.requests, self.concurrent, self.listeners = batch, 100.0, {}, [], []

    def now(self):
        return self.clock

    def sleep(self, seconds):
        self.clock += seconds

    def add_request(self, request_id, prompt, params):
        if len(prompt) > 10:
            raise ValueError("too long")
        self.requests[request_id] = params.max_tokens, RequestMetrics(self.clock)

    def step(self):
        self.concurrent.append(len(self.requests))
        self.clock += 1
        outputs = []
        for request_id in list(self.requests)[: self.batch]:
            asked, metrics = self.requests[request_id]
            metrics.token_times.append(self.clock)
            count = len(metrics.token_times)
            finished = count == asked or count == 5  # where no more tokens fit
            completion = SimpleNamespace(token_ids=[7] * count, finish_reason="length" if finished else None)
            outputs.append(SimpleNamespace(
                request_id=request_id, finished=finished, outputs=[completion], metrics=metrics
            ))  # fmt: skip
            if finished:
                del self.requests[request_id]
        running = min(self.batch, len(self.requests))
        for listener in self.listeners:
            listener(StepStats(running=running, waiting=len(self.requests) - running, prefill_tokens=1))
        return outputs


ARRIVALS = [0.0, 0.5, 0.5, 6.0]
WORK = [Work([1], 2), Work([1] * 2, 3), Work([1] * 3, 1), Work([1] * 4, 1)]


def driven(work=WORK, arrivals=ARRIVALS, max_concurrency=None):
    engine = FakeEngine()
    run = serve.planned(work, arrivals)
    serve.drive(run, engine, work, max_concurrency, engine.now, engine.sleep)
    return engine, run


def test_metrics_are_those_of_a_schedule_worked_out_by_hand():
    """Steps end at 1, 2, 3, 4, then nothing until 6, and at 7. The second and third request wait for the first step,
    the third also for a place in the batch of two."""
    _, run = driven()
    assert [r.token_times for r in run.requests] == [[1, 2], [2, 3, 4], [3], [7]]
    queues = [(s.time, s.waiting, s.running) for s in run.samples]
    assert queues == [(1, 2, 1), (2, 0, 2), (3, 0, 1), (4, 0, 0), (7, 0, 0)]
    result = metrics.summary(run, [50, 99, 99.9], {"ttft": 1500, "e2el": 2500})
    expected = {
        "duration": 7,
        "completed": 4,
        "failed": 0,
        "total_input_tokens": 10,
        "total_output_tokens": 7,
        "request_throughput": 4 / 7,
        "request_goodput": 2 / 7,  # the second is late at its end, the third at its beginning
        "output_throughput": 1,
        "total_token_throughput": 17 / 7,
        "max_output_tokens_per_s": 2,
        "max_concurrent_requests": 3,
        "mean_ttft_ms": (1 + 1.5 + 2.5 + 1) / 4 * 1000,
        "median_ttft_ms": 1250,
        "p50_ttft_ms": 1250,
        "p99_ttft_ms": 2470,  # 0.97 of the way from the third to the fourth
        "p99.9_ttft_ms": 2497,
        "std_ttft_ms": 1000 * np.std([1, 1.5, 2.5, 1]),
        "mean_tpot_ms": 1000,  # (2 - 1) / 1 and (3.5 - 1.5) / 2; the others have one token
        "median_tpot_ms": 1000,
        "mean_itl_ms": 1000,
        "std_itl_ms": 0,
        "mean_e2el_ms": (2 + 3.5 + 2.5 + 1) / 4 * 1000,
        "median_e2el_ms": 2250,
        "mean_requests_in_system": (2 + 3 + 2 + 1 + 1) / 7,  # step by step, half of the first for those who come in it
        "throughput_times_mean_e2el": 9 / 7,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limits", "good"),
    [({"tpot": 0}, 2), ({"tpot": 1000}, 4), ({"ttft": 1500}, 3), ({"ttft": 999}, 0), ({"e2el": 2000, "ttft": 1e9}, 2)],
)
def test_goodput_counts_requests_that_keep_every_limit(limits, good):
    """A single token has no TPOT and keeps every limit of it, as in vLLM."""
    _, run = driven()
    assert metrics.summary(run, [], limits)["request_goodput"] == pytest.approx(good / 7)


def test_waiting_for_max_concurrency_counts_from_the_scheduled_arrival():
    engine, run = driven(arrivals=[*ARRIVALS[:3], 6.5], max_concurrency=1)
    assert [r.token_times for r in run.requests] == [[1, 2], [3, 4, 5], [6], [7.5]]
    assert [r.ttft for r in run.requests] == [1, 2.5, 5.5, 1]
    assert [s.waiting for s in run.samples] == [2, 2, 1, 1, 1, 0, 0]  # outside the engine
    assert max(engine.concurrent) == run.max_in_engine == 1
    result = metrics.summary(run, [], {})
    assert result["mean_requests_in_system"] == pytest.approx(result["throughput_times_mean_e2el"])
    assert result["request_goodput"] is None


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_max_concurrency_is_never_exceeded(limit):
    rng = np.random.default_rng(limit)
    work = [Work([1], int(n)) for n in rng.integers(1, 5, 40)]
    arrivals = serve.arrival_times(40, 3.0, 0.5, seed=limit)
    engine, run = driven(work, arrivals, limit)
    assert max(engine.concurrent) == run.max_in_engine <= limit
    assert all(r.error is None and r.ttft > 0 for r in run.requests)
    result = metrics.summary(run, [], {})
    assert result["mean_requests_in_system"] == pytest.approx(result["throughput_times_mean_e2el"], rel=0.1)


def test_a_run_that_was_stopped_before_its_first_request_has_a_summary():
    requests = [metrics.Served(arrival, 5, 3) for arrival in (0.0, 1.0)]
    result = metrics.summary(metrics.Run(requests), [99], {"ttft": 100})
    assert (result["completed"], result["unfinished"], result["duration"]) == (0, 2, 0.0)
    assert result["request_throughput"] == result["request_goodput"] == result["output_throughput"] == 0


def test_failed_requests_are_counted_said_and_left_out_of_the_rest():
    work = [Work([1], 2), Work([1] * 11, 2), Work([1], 9), Work([1] * 11, 2)]
    _, run = driven(work, [0.0, 0.0, 1.0, 20.0])
    result = metrics.summary(run, [99], {"ttft": 1e9})
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (1, 3, 2)
    assert result["errors"] == [
        "request 1: too long",
        "request 2: 5 of 9 tokens, finish_reason 'length'",
        "request 3: too long",
    ]
    with console.capture() as printed:
        metrics.show({"request_rate": "inf"} | result, None, list(metrics.METRICS), [99])
    assert "failed: request 2: 5 of 9 tokens" in printed.get()


def test_the_table_is_that_of_vllm():
    _, run = driven(max_concurrency=3)
    result = {"request_rate": 0.5} | metrics.summary(run, [99], {"ttft": 1500})
    with console.capture() as printed:
        metrics.show(result, 3, ["ttft", "e2el"], [99])
    assert (
        printed.get()
        == """\
============ Serving Benchmark Result ============
Successful requests:                     4
Failed requests:                         0
Maximum request concurrency:             3
Request rate configured (RPS):           0.50
Benchmark duration (s):                  7.00
Total input tokens:                      10
Total generated tokens:                  7
Request throughput (req/s):              0.57
Request goodput (req/s):                 0.43
Output token throughput (tok/s):         1.00
Peak output token throughput (tok/s):    2.00
Peak concurrent requests:                3.00
Total token throughput (tok/s):          2.43
---------------Time to First Token----------------
Mean TTFT (ms):                          1500.00
Median TTFT (ms):                        1250.00
P99 TTFT (ms):                           2470.00
----------------End-to-end Latency----------------
Mean E2EL (ms):                          2250.00
Median E2EL (ms):                        2250.00
P99 E2EL (ms):                           3470.00
----------------------Engine----------------------
Preemptions:                             0
Prefix cache hit rate (%):               0.00
-------------------Little's Law-------------------
Mean requests in system, counted:        1.29
Request throughput x mean E2EL:          1.29
Ratio:                                   1.00
==================================================
"""
    )


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_variation_of_their_distribution(burstiness):
    """A gamma distribution of shape k varies by 1 / sqrt(k) of its mean; of a Poisson process, k = 1."""
    times = serve.arrival_times(20_000, 5.0, burstiness, seed=3)
    gaps = np.diff([0.0, *times])
    assert times[-1] == pytest.approx(20_000 / 5) and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 5)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    if burstiness == 1:  # and its gaps have no memory
        assert (gaps > 1 / 5).mean() == pytest.approx(1 / math.e, rel=0.05)
    again, other = (serve.arrival_times(20_000, 5.0, burstiness, seed) for seed in (3, 4))
    assert times == again != other


def test_other_rates_stretch_the_same_arrivals_and_inf_is_all_at_once():
    slow, fast = (serve.arrival_times(9, rate, 1.0, seed=0) for rate in (2.0, 4.0))
    assert slow == pytest.approx([2 * time for time in fast])
    assert serve.arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    assert serve.arrival_times(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1, 1.5, 2])


def test_gaps_too_small_for_a_float_are_no_gaps(monkeypatch):
    """One gap of a very small shape is often 0, and the last arrival with it."""
    monkeypatch.setattr(np.random, "default_rng", lambda seed: SimpleNamespace(gamma=lambda *_: np.zeros(2)))
    assert serve.arrival_times(2, 4.0, 0.01, 0) == pytest.approx([0.25, 0.5])


def run_serve(model, tmp_path, *arguments):
    """The exit code, what was printed, and the JSON."""
    file = tmp_path / "result.json"
    options = ["--model", str(model), "--dtype", "float32", "--eager", "--json", str(file)]
    done = run_bench("serve", *options, *arguments)
    result = json.loads(file.read_text()) if file.exists() else None
    return done.exit_code, done.output, result


def check(value, schema, path="$"):
    """Hold a value against the parts of JSON Schema that serve.schema.json uses."""
    known = {"description", "title", "$schema", "type", "enum", "anyOf", "minimum", "maximum", "exclusiveMinimum"}
    known |= {"items", "properties", "patternProperties", "additionalProperties", "required"}
    assert schema.keys() <= known
    if "anyOf" in schema:
        assert any(fits(value, option) for option in schema["anyOf"]), path
    if "enum" in schema:
        assert value in schema["enum"], path
    if "type" in schema:
        kinds = {
            "object": dict,
            "array": list,
            "string": str,
            "integer": int,
            "number": (int, float),
            "null": type(None),
            "boolean": bool,
        }
        names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
        assert any(isinstance(value, kinds[name]) for name in names), path
        assert isinstance(value, bool) == (names == ["boolean"]), path
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf), path
        assert value > schema.get("exclusiveMinimum", -math.inf), path
    if isinstance(value, list):
        for i, item in enumerate(value):
            check(item, schema["items"], f"{path}[{i}]")
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= value.keys(), path
        for name, item in value.items():
            patterns = [s for p, s in schema.get("patternProperties", {}).items() if re.search(p, name)]
            rest = schema.get("additionalProperties", {})
            (inner,) = [s for n, s in schema.get("properties", {}).items() if n == name] or patterns or [rest]
            assert inner is not False, f"{path}.{name}"
            check(item, inner, f"{path}.{name}")


def fits(value, schema):
    try:
        check(value, schema)
    except AssertionError:
        return False
    return True


def test_serve_prints_a_table_for_each_rate_and_writes_what_the_schema_says(model, tmp_path):
    plot = tmp_path / "serve.svg"
    lengths = ["--num-prompts", 12, "--input-len", "4-12", "--output-len", "2-5", "--prefix-len", 32]
    goodput = ["--goodput", "ttft:60000", "e2el:60000"]
    options = [
        "--request-rate",
        "50,inf",
        "--burstiness",
        0.5,
        "--max-concurrency",
        3,
        "--metric-percentiles",
        "50,99.9",
    ]
    code, printed, result = run_serve(
        model, tmp_path, *lengths, *options, *goodput, "--save-detailed", "--plot", plot, "--num-warmups", 2
    )
    assert code == 0, printed
    check(result, SCHEMA)
    assert "serve, 12 requests, input 32 common tokens and 4-12" in result["header"]["bench"]
    assert "request rate 50, inf, burstiness 0.5, at most 3 at once, seed 0" in result["header"]["bench"]
    assert printed.count("Serving Benchmark Result") == 2 and "P99.9 TTFT (ms)" in printed
    slow, fast = result["runs"]
    heading, *rows = printed.split("All rates (times in ms)")[1].splitlines()[1:6]
    assert "TTFT" in heading and [row.split()[0] for row in rows[-2:]] == ["50", "inf"], printed
    assert rows[-2].split()[1] == figure(slow["request_throughput"])
    assert max(map(len, rows)) <= 80
    assert (slow["request_rate"], fast["request_rate"]) == (50, "inf") and result["burstiness"] == 0.5
    assert result["goodput_ms"] == {"ttft": 60000, "e2el": 60000}
    for run in result["runs"]:
        requests = run["requests"]
        assert run["completed"] == len(requests) == 12 and run["failed"] == 0
        assert run["max_concurrent_requests"] <= 3 and max(run["timeline"]["running"]) <= 3
        assert all(len(r["token_times"]) == r["output_len"] and 36 <= r["input_len"] <= 44 for r in requests)
        e2els = [r["token_times"][-1] - r["arrival"] for r in requests]
        assert run["mean_e2el_ms"] == pytest.approx(1000 * np.mean(e2els))
        assert run["throughput_times_mean_e2el"] == pytest.approx(sum(e2els) / run["duration"])
        assert run["request_goodput"] == run["request_throughput"] > 0
        assert run["prefix_cache_hit_rate"] > 0.3  # all but the first find 32 of some 40 tokens
    assert [r["arrival"] for r in fast["requests"]] == [0] * 12
    assert slow["requests"][-1]["arrival"] == pytest.approx(12 / 50)
    assert [r["output_len"] for r in slow["requests"]] == [r["output_len"] for r in fast["requests"]]
    assert plot.read_text().count("<svg") == 1


def test_a_trace_is_served_at_its_times_and_lengths(model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 7 + t, "input_length": i, "output_length": o} for t, i, o in ((0, 5, 1), (0.1, 40, 3))]
    trace.write_text("\n".join(map(json.dumps, lines)))
    code, printed, result = run_serve(model, tmp_path, "--trace", trace, "--save-detailed", "--num-warmups", 0)
    assert code == 0, printed
    check(result, SCHEMA)
    (run,) = result["runs"]
    assert run["request_rate"] == "trace" and "Request rate configured" not in printed
    requests = [(r["arrival"], r["input_len"], r["output_len"]) for r in run["requests"]]
    assert requests == [(0, 5, 1), (pytest.approx(0.1), 40, 3)]


def test_the_schema_would_notice(model, tmp_path):
    options = ["--num-prompts", 2, "--input-len", 4, "--output-len", 1, "--num-warmups", 0]
    code, printed, result = run_serve(model, tmp_path, *options)
    assert code == 0, printed
    check(result, SCHEMA)
    run = result["runs"][0]
    assert run["mean_tpot_ms"] is run["p99_itl_ms"] is None and "requests" not in run  # single tokens
    with pytest.raises(AssertionError):
        check(result | {"complete": 1}, SCHEMA)
    for damage in ({"speed": 1}, {"duration": "1"}, {"failed": -1}, {"request_rate": "fast"}, {"completed": None}):
        with pytest.raises(AssertionError):
            check(result | {"runs": [run | damage]}, SCHEMA)
    with pytest.raises(AssertionError):
        check(result | {"runs": [{name: value for name, value in run.items() if name != "mean_itl_ms"}]}, SCHEMA)


def test_ctrl_c_shows_and_writes_what_was_served(model, tmp_path, monkeypatch):
    """The third request, which runs alone, has two tokens by then; the fourth has not arrived."""
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": t, "input_length": 5, "output_length": 3} for t in (0, 0, 0, 60)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    step, count = LLMEngine.step, itertools.count(1)

    def stopped_step(self):
        if next(count) == 9:
            raise Stopped(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(LLMEngine, "step", stopped_step)
    options = ["--trace", trace, "--max-concurrency", 1, "--num-warmups", 0, "--save-detailed"]
    code, printed, result = run_serve(model, tmp_path, *options, "--plot", tmp_path / "x.png")
    assert code == 130
    check(result, SCHEMA)
    assert result["complete"] is False
    (run,) = result["runs"]
    assert (run["completed"], run["failed"], run["unfinished"]) == (2, 0, 2)
    assert run["total_output_tokens"] == 6 and run["mean_ttft_ms"] > 0 and run["errors"] == []
    assert [len(r["token_times"]) for r in run["requests"]] == [3, 3, 0, 0]
    assert re.search("Unfinished requests: +2", printed) and "Little's Law" not in printed
    assert not (tmp_path / "x.png").exists()


def test_the_exit_code_says_that_a_request_failed(model, tmp_path, monkeypatch):
    def refuse(*_):
        raise ValueError("no [such] request")

    monkeypatch.setattr(LLMEngine, "add_request", refuse)
    code, printed, result = run_serve(model, tmp_path, "--num-prompts", 2, "--num-warmups", 0)
    assert code == 1 and "failed: request 1: no [such] request" in printed
    check(result, SCHEMA)
    assert result["runs"][0]["failed"] == 2


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--request-rate", "1,0"], "--request-rate.*0 is not a positive"),
        (["--request-rate", "nan"], "--request-rate.*nan"),
        (["--request-rate", "-1"], "--request-rate.*-1 is not a positive"),
        (["--request-rate", "1,,2"], "--request-rate.*not a number"),
        (["--request-rate", "1,1e-300"], "--request-rate.*32 requests at 1e-300 a second take 3.2e[+]301 s"),
        (["--request-rate", "1e-320"], "--request-rate.*take inf s"),
        (["--burstiness", "1"], "--burstiness.*--request-rate below inf"),
        (["--burstiness", "0", "--request-rate", "1"], "--burstiness.*0 is not 0.01 or more"),
        (["--burstiness", "1e-300", "--request-rate", "1"], "--burstiness.*1e-300 is not 0.01 or more"),
        (["--burstiness", "nan", "--request-rate", "1"], "--burstiness.*nan"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--goodput", "itl:3"], "--goodput.*'itl' is not one of: ttft, tpot, e2el"),
        (["--goodput", "ttft"], "--goodput.*write KEY:MS, such as ttft:200"),
        (["--goodput", "ttft:"], "--goodput.*write KEY:MS, such as ttft:200"),
        (["--goodput", "ttft:soon"], "--goodput.*write KEY:MS, such as ttft:200"),
        (["--goodput", "ttft:1,2"], "--goodput.*write KEY:MS, such as ttft:200"),
        (["--goodput", "ttft:-1"], "--goodput.*milliseconds"),
        (["--goodput", "ttft:nan"], "--goodput.*milliseconds"),
        (["--goodput", "ttft:inf"], "--goodput.*milliseconds"),
        (["--goodput", "ttft:1", "ttft:2"], "--goodput.*ttft is given twice"),
        (["tpot:50"], "tpot:50: limits come after --goodput"),
        (["--percentile-metrics", "ttft,speed"], "--percentile-metrics.*'speed'"),
        (["--metric-percentiles", "101"], "--metric-percentiles.*101"),
        (["--metric-percentiles", "nan"], "--metric-percentiles.*nan"),
        (["--request-rate", "1" + 100 * ",1"], "--request-rate.*101 numbers are more than 100"),
        (["--request-rate", ""], "--request-rate.*not a number"),
        (["--save-detailed"], "--save-detailed.*needs --json or --save-result"),
        (["--json", "x.json", "--save-result"], "'--json' / '--save-result'"),
        (["--result-filename", "x.json"], "--result-filename.*needs --save-result"),
        (["--result-dir", "x"], "--result-dir.*needs --save-result"),
        (["--save-result", "--result-dir", __file__], "--result-dir.*File exists"),
        (["--save-result", "--result-filename", "no/such/x.json"], "--save-result.*no such folder"),
        (["--trace", "no.jsonl", "--random-input-len", "1"], "--random-input-len.*arrivals and lengths of its own"),
        (["--trace", "no.jsonl", "--input-len", ""], "--input-len.*arrivals and lengths of its own"),
        (["--trace", "no.jsonl"], "--trace.*No such file"),
        (["--trace", "no.jsonl", "--request-rate", "1"], "--request-rate.*arrivals and lengths of its own"),
        (["--trace", "no.jsonl", "--prefix-len", "1"], "--prefix-len"),
        (["--dataset-name", "custom", "--dataset-path", "no.txt"], "--dataset-path.*No such file"),
        (["--json", "/no/such/folder/x.json"], "--json.*/no/such/folder"),
        (["--plot", "/no/such/folder/x.png"], "--plot.*/no/such/folder"),
        (["--plot", "x.docx"], "--plot.*x.docx.*[.]png"),
        (["--input-len", "9-3"], "--input-len"),
        (["--record", "/no/such/folder/x.jsonl"], "--record.*/no/such/folder"),
        (["--record", "x", "--json", "x"], "name the same file"),
        (["--record", "x", "--base-url", "http://127.0.0.1:1"], "--record.*a server has /view"),
        (["--view"], "--view.*needs a terminal"),
    ],
)
def test_a_bad_option_is_named_before_a_model_is_loaded(arguments, names):
    done = run_bench("serve", "--model", "/no/such/model", *arguments)
    assert done.exit_code == 2
    assert re.search(names, " ".join(done.output.split())), done.output


def test_a_recording_has_the_steps_of_all_rates_without_the_warm_up(model, tmp_path):
    file = tmp_path / "run.jsonl"
    options = ["--num-prompts", 3, "--input-len", 7, "--output-len", 4, "--record", file]
    code, output, _ = run_serve(model, tmp_path, *map(str, options), "--request-rate", "inf,inf")
    assert code == 0, output
    picture = Picture()
    for frame in read_recording(file):
        picture.apply(frame)
    assert (picture.key["model"], picture.output_tokens, picture.queues) == (model.name, 2 * 3 * 4, [[], [], []])


def test_the_spellings_of_vllm_are_understood(model, tmp_path, monkeypatch):
    """The file has vLLM's kind of name, in the current folder or in one that is made."""
    monkeypatch.chdir(tmp_path)
    options = ["--model", model, "--eager", "--num-prompts", 2, "--random-input-len", 7, "--random-output-len", 2]
    options += ["--num-warmups", 0, "--save-result", "--save-detailed"]
    done = run_bench("serve", *options, "--request-rate", "50,inf", "--max-concurrency", 2)
    assert done.exit_code == 0, done.output
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(rf"nanopage-50,infqps-concurrency2-{model.name}-\d{{8}}-\d{{6}}\.json", file.name)
    assert f"wrote {file.name}" in done.output
    result = json.loads(file.read_text())
    check(result, SCHEMA)
    assert [(r["input_len"], r["output_len"]) for r in result["runs"][0]["requests"]] == [(7, 2)] * 2
    done = run_bench("serve", *options, "--result-dir", "new/folder", "--result-filename", "x.json")
    assert done.exit_code == 0, done.output
    check(json.loads((tmp_path / "new" / "folder" / "x.json").read_text()), SCHEMA)


def test_names_of_results():
    name = serve.result_name("Qwen/Qwen3-0.6B", [math.inf], None)
    assert name.startswith("nanopage-infqps-Qwen3-0.6B-2")
    assert serve.result_name(".", [], None).startswith(f"nanopage-trace-{Path.cwd().name}-")


def test_percentiles_have_names_that_tell_them_apart():
    assert [metrics.percentile_name(p) for p in (50.0, 99.9, 0.0)] == ["p50", "p99.9", "p0"]
    names = [metrics.percentile_name(p) for p in serve.parse_percentiles("1e-05,-0,0,99.9999999,99.99999999,100")]
    assert len(set(names)) == 5
    assert all(re.search(next(iter(RUN_PATTERNS)), f"{name}_ttft_ms") for name in names)


def test_every_warm_up_request_that_was_asked_for_is_made():
    requests = Requests([(3, 1), (5, 2)], [])
    work = serve.warm_up_work(
        requests, random.Random(0), SimpleNamespace(model_config=SimpleNamespace(vocab_size=9)), 5
    )
    assert [len(w.prompt) for w in work] == [3, 5, 3, 5, 3]


def test_requests_that_do_not_fit_are_refused(model, tmp_path):
    code, printed, _ = run_serve(model, tmp_path, "--input-len", 1000, "--output-len", 100)
    assert code == 2 and "1100 tokens are more than the model's 1024" in " ".join(printed.split())


def test_a_picture_takes_the_names_of_files_as_they_are(tmp_path):
    """And not as formulas, of which this would be a broken one."""
    from benchmarks import plots  # Matplotlib takes half a second

    header = {"bench": r"x$\frac$.jsonl", "model": "m", "device": "d"}
    assert plots.throughput([], header, tmp_path / "x.svg")


def test_a_missing_plotting_library_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = run_bench("serve", "--plot", "x.png")
    assert done.exit_code == 2 and "needs matplotlib: pip install -e '.[plot]'" in done.output


def test_throughput_draws_decode_steps_against_their_batch(tmp_path):
    from benchmarks import plots

    steps = [Step(StepStats(decode_tokens=batch), 0.01 * batch**0.5) for batch in (1, 2, 2, 8)]
    steps.append(Step(StepStats(decode_tokens=4, prefill_tokens=9), 1.0))  # not of decodes alone
    file = tmp_path / "x.png"
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots.Axes, "plot", lambda self, *data, **options: drawn.append(data[:2]))
        patch.setattr(plots.Axes, "legend", lambda self: None)
        plots.throughput(steps, {"bench": "b", "model": "m", "device": "d"}, file)
    ((batches, speeds),) = drawn
    assert batches == [1, 2, 8] and speeds == pytest.approx([100 * batch**0.5 for batch in batches])
    assert file.read_bytes().startswith(b"\x89PNG")
