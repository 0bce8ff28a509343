"""Costs of steps: what is counted, the fit, the file, and bench.py costs on a tiny model."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import typer
from helpers import run_bench, tiny_model
from scipy.optimize import nnls

from benchmarks import cost_runs
from benchmarks.costs import TERMS, Costs, RememberingExecutor, counts, fit, non_negative_least_squares, read_costs
from benchmarks.report import console
from nanopage.outputs import StepStats
from nanopage.step import Batch

pytestmark = pytest.mark.usefixtures("fast_and_wide")


def batch_of(decodes=(), chunks=(), samples=None):
    """`decodes`: contexts before the step. `chunks`: (start, count)."""
    starts = [*decodes, *(start for start, _ in chunks)]
    rows = list(range(len(starts)))
    batch = Batch(rows=rows, starts=starts, counts=[1] * len(decodes) + [count for _, count in chunks])
    batch.sampled_rows = rows[: len(rows) if samples is None else samples]
    return batch


def test_the_counts_of_a_batch_worked_out_by_hand():
    counted = dict(zip(TERMS, counts(batch_of([9, 4], [(0, 3), (16, 10)], samples=3)), strict=True))
    expected = {
        "step": 1,
        "sequences": 4,
        "chunks": 2,
        "samples": 3,
        "context": 10 + 5,
        "chunk context": 3 + 26,
        "chunk pairs": (1 + 2 + 3) + sum(range(17, 27)),
        "tokens": 15,
        "tokens up to 2": 2,
        "tokens up to 8": 8,
        "tokens up to 32": 15,
        "tokens beyond 2": 13,
        "tokens beyond 8": 7,
        "tokens beyond 32": 0,
    }
    assert {name: counted[name] for name in expected} == expected


def test_a_step_of_decodes_costs_the_same_by_both_ways():
    rng = random.Random(0)
    found = Costs({name: rng.random() for name in TERMS})
    for num_seqs in (1, 2, 7, 40, 600):
        batch = batch_of([rng.randrange(1000) for _ in range(num_seqs)])
        by_terms = sum(found.seconds[name] * count for name, count in zip(TERMS, counts(batch), strict=True))
        assert found.of(batch) == pytest.approx(by_terms, rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_least_squares_are_those_of_scipy(seed):
    rng = np.random.default_rng(seed)
    a = rng.random((40, 12)) if seed % 2 else rng.normal(size=(40, 12))
    if seed % 3 == 0:
        a[:, 5] = a[:, 1]  # two terms that cannot be told apart
    b = a @ np.maximum(0, rng.normal(size=12)) + 0.1 * rng.normal(size=40)
    x = non_negative_least_squares(a, b)
    assert (x >= 0).all()
    assert np.linalg.norm(a @ x - b) == pytest.approx(nnls(a, b)[1], rel=1e-9)


def made_up_steps(rng, noise=0.0):
    truth = Costs({"step": 0.004, "tokens up to 8": 0.001, "tokens": 3e-4, "context": 2e-6, "chunk pairs": 1e-7})
    batches = []
    for _ in range(400):
        decodes = [rng.randrange(2000) for _ in range(rng.choice([0, 1, 3, 20, 60]))]
        chunks = [(rng.randrange(1000), rng.randint(2, 500)) for _ in range(rng.choice([0, 1, 2]))]
        if decodes or chunks:
            batches.append(batch_of(decodes, chunks))
    seconds = [truth.of(batch) * (1 + noise * rng.gauss(0, 1)) for batch in batches]
    return batches, seconds, truth


def test_the_fit_predicts_steps_that_it_has_not_seen():
    batches, seconds, truth = made_up_steps(random.Random(0), noise=0.03)
    terms, errors = fit([counts(batch) for batch in batches], seconds)
    found = Costs(terms)
    for batch in made_up_steps(random.Random(1))[0]:
        assert found.of(batch) == pytest.approx(truth.of(batch), rel=0.05)
    assert errors["steps"] == len(batches) and errors["mean error"] == pytest.approx(0.024, abs=0.006)
    assert errors["predicted over measured"] == pytest.approx(1, abs=0.01)


def test_steps_that_were_interrupted_are_left_out():
    batches, seconds, truth = made_up_steps(random.Random(0), noise=0.01)
    slow = random.Random(2).sample(range(len(seconds)), 20)
    for index in slow:
        seconds[index] *= 10
    terms, errors = fit([counts(batch) for batch in batches], seconds)
    assert errors["left out"] == len(slow)
    for batch in batches:
        assert Costs(terms).of(batch) == pytest.approx(truth.of(batch), rel=0.05)


def test_too_few_steps_are_an_error():
    with pytest.raises(ValueError, match="3 steps are too few"):
        fit([[1.0] * len(TERMS)] * 3, [1.0] * 3)


def test_a_step_that_ran_again_is_not_remembered():
    submitted = []
    executor = RememberingExecutor(SimpleNamespace(submit=submitted.append, result=lambda: "result"))
    executor.submit(batch_of([9, 4]))
    executor.after_step(StepStats(seconds=0.5))
    executor.submit(batch_of([50]))
    executor.submit(batch_of([50]))
    executor.after_step(StepStats(seconds=0.7))
    executor.after_step(StepStats(seconds=0.1))  # without a batch
    assert executor.seconds == [0.5] and executor.rows == [counts(batch_of([9, 4]))]
    assert len(submitted) == 3 and executor.result() == "result" and executor.max_context == 51
    executor.forget()
    assert (executor.rows, executor.seconds, executor.max_context) == ([], [], 0)


GOOD = {"seconds": {"step": 0.01}, "engine": {"num_blocks": 5, "device": "cpu"}, "measured": {"context": 7}}


def test_costs_are_read_as_they_were_written(tmp_path):
    found = Costs(
        {"step": 0.01, "tokens": 1e-4}, {"model": "x"}, {"num_blocks": 5}, {"context": 9}, {"mean error": 0.1}
    )
    file = tmp_path / "costs.json"
    file.write_text(json.dumps({"costs": found.to_json()}))
    assert read_costs(file) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "not a file of bench.py costs --json"),
        ("{", "not JSON"),
        (json.dumps({"costs": GOOD | {"seconds": {}}}), '"seconds" must be terms with seconds'),
        (json.dumps({"costs": GOOD | {"seconds": {"step": -1}}}), '"seconds" must be terms with seconds'),
        (json.dumps({"costs": GOOD | {"seconds": {"step": "1"}}}), '"seconds" must be terms with seconds'),
        ('{"costs": {"seconds": {"step": NaN}}}', '"seconds" must be terms with seconds'),
        (json.dumps({"costs": GOOD | {"seconds": {"steps": 1}}}), "the term 'steps' is not known: measure again"),
        (json.dumps({"costs": GOOD | {"seconds": {"chunks": 1}}}), "a step of one token must take some time"),
        (json.dumps({"costs": GOOD | {"engine": []}}), '"engine" must be an object'),
        (json.dumps({"costs": GOOD | {"engine": {"num_blocks": 0}}}), '"num_blocks" must be a positive integer'),
        (json.dumps({"costs": GOOD | {"engine": {"device": "tpu"}}}), "\"device\" must be cpu or cuda, not 'tpu'"),
        (json.dumps({"costs": GOOD | {"measured": {"context": "x"}}}), '"context" must be a positive integer'),
        (json.dumps({"costs": GOOD | {"machine": {"model": 1}}}), '"machine" must have texts'),
    ],
)
def test_a_file_that_has_no_costs_is_refused(tmp_path, text, says):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(typer.BadParameter) as raised:
        read_costs(file)
    assert says in str(raised.value) and "costs.json" in str(raised.value)


def test_costs_measures_fits_and_compares(model, tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr(cost_runs, "BATCHES", (1, 4))
    monkeypatch.setattr(cost_runs, "CONTEXTS", (2,))
    monkeypatch.setattr(cost_runs, "BUDGETS", (64, 512))
    monkeypatch.setattr(cost_runs, "LONG", 200)
    monkeypatch.setattr(console, "width", 80)
    file = tmp_path / "costs.json"
    options = ["--validate", "--num-prompts", 3, "--json", file]
    done = run_bench("costs", "--model", model, "--eager", *options)
    assert done.exit_code == 0, done.output
    written = json.loads(file.read_text())
    found = read_costs(file)
    assert written["complete"] is True and found.fit["steps"] > 100
    assert found.engine["device"] == "cpu" and found.engine["num_blocks"] > 0 and found.measured["sequences"] == 4
    assert 128 < found.measured["tokens"] <= 1024 and 200 < found.measured["context"] < 256 + 64
    assert found.machine["device"].startswith("cpu")
    assert [run["request_rate"] == "inf" for run in written["validation"]] == [False, False, True] * 3
    for run in written["validation"]:
        for name in ("output_throughput", "mean_ttft_ms", "mean_tpot_ms"):
            assert run[name]["predicted"] > 0 and run[name]["measured"] > 0
    shared = [run["prefix_cache_hit_rate"] for run in written["validation"] if run["workload"] == "a common prefix"]
    assert shared[-1]["predicted"] == shared[-1]["measured"] > 0  # all at once: the same two steps
    tables = done.stdout[done.stdout.index("a step") :].split("wrote")[0]
    assert max(map(len, tables.splitlines())) <= 80 and "all at once" in tables

    given = run_bench("costs", "--model", model, "--eager", "--validate", "--num-prompts", 2, "--costs", file)
    assert given.exit_code == 0 and "a step" not in given.stdout and "common prefix" in given.stdout


def test_the_engine_is_as_it_was_after_measuring(model, monkeypatch, one_thread):
    from nanopage import EngineConfig
    from nanopage.build import build_engine

    monkeypatch.setattr(cost_runs, "BATCHES", (1,))
    monkeypatch.setattr(cost_runs, "CONTEXTS", ())
    monkeypatch.setattr(cost_runs, "BUDGETS", (64,))
    engine = build_engine(EngineConfig(model=str(model), enforce_eager=True))
    executor, budget = engine.executor, engine.scheduler.token_budget
    assert cost_runs.measure(engine, {}, random.Random(0)).seconds
    assert engine.executor is executor and engine.scheduler.token_budget == budget and not engine.listeners


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--costs", "x.json"], "--costs: needs --validate"),
        (["--num-prompts", "3"], "--num-prompts: needs --validate"),
        (["--validate", "--costs", "/no/such/file"], "--costs: /no/such/file: No such file"),
        (["--dtype", "int3"], "--dtype: dtype='int3'"),
        (["--json", "/no/such/folder/x.json"], "--json: no such folder"),
    ],
)
def test_a_bad_option_is_named(options, says):
    done = run_bench("costs", "--model", "/no/such/model", *options)
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())


def test_a_model_with_a_short_context_is_refused(tmp_path):
    short = tiny_model(tmp_path / "short", max_position_embeddings=128)
    done = run_bench("costs", "--model", short, "--eager")
    assert done.exit_code == 1 and "a context of 128 tokens is too short to measure: 256" in done.output


def test_no_term_is_the_same_as_another():
    """The fit could not tell them apart."""
    assert len(set(TERMS)) == len(TERMS) == len(counts(batch_of([1])))
