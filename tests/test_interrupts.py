"""An exception at any line of the scheduler and the engine loses nothing: the next call goes on with every request.

A scene with every kind of request runs on a runner that computes no model: a token is a hash of the tokens before it.
It is first run undisturbed, which shows the lines there are; then again and again, with an error at one of the lines.

    NANOPAGE_ATTACKS=1000 pytest tests/test_interrupts.py -s      five visits of every line, and counts by outcome
"""

import hashlib
import logging
import os
import random
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from helpers import EOS, VOCAB_SIZE, tiny_model

import nanopage
from nanopage import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopage.request import SampledToken

VISITS = 5 if os.environ.get("NANOPAGE_ATTACKS", "0") != "0" else 0  # of every line; 0: one visit of some
PACKAGE = Path(nanopage.__file__).parent
MODULES = ("engine/scheduler", "engine/block_manager", "engine/beam_search", "engine/engine", "request")
FILES = {str(PACKAGE / f"{name}.py") for name in MODULES}
# What is returned is on its way to the caller, and what is not changed cannot be broken.
NOT_DISTURBED = {"step", "abort", "has_unfinished_requests", "check_invariants", "num_free_blocks", "ranks"}
PREFIX = list(range(20, 37))
LONG = SamplingParams(temperature=1, seed=5, max_tokens=14, ignore_eos=True)
REQUESTS = {  # request_id -> (arrives at step, prompt, parameters, priority)
    "greedy": (0, PREFIX, SamplingParams(temperature=0, max_tokens=12), 0),
    "same prefix": (1, [*PREFIX, 7, 8], SamplingParams(seed=3, max_tokens=12, logprobs=1), 0),
    "three": (0, [9, 10, 11, 12, 13], SamplingParams(n=3, seed=4, max_tokens=10, stop=["a", "th"]), 1),
    "beams": (2, [50, 51, 52], BeamSearchParams(width=3, max_tokens=8), 1),
    "best": (3, PREFIX[:9], SamplingParams(n=1, best_of=2, seed=6, max_tokens=7), 1),
    "aborted": (0, [60, 61], LONG, 2),
    "urgent": (6, list(range(90, 110)), LONG, -1),
    "stopped": (4, [70] * 9, SamplingParams(seed=9, max_tokens=30, stop=["e"], min_tokens=3), 0),
}
ABORTED_AT = 7


@pytest.fixture(autouse=True)
def _no_warnings(caplog):
    caplog.set_level(logging.ERROR, "nanopage")


class Samples:
    def __init__(self, sampled):
        self.sampled = sampled

    def result(self):
        return self.sampled


class HashRunner:
    """Stands in for the ModelRunner."""

    def __init__(self):
        self.last = []

    def use_graphs(self):
        pass

    make_graphs = use_graphs

    def launch(self, batch, stats):
        sampled = [self.sample(seq) for s in batch.sequences for seq in s.samplers]
        self.last = [token.token_id for token in sampled]
        return Samples(sampled)

    def sample(self, seq) -> SampledToken:
        tokens = [token if token >= 0 else self.last[-token - 1] for token in seq.token_ids]
        seed = 0 if seq.params.seed is None else seq.seed
        rng = random.Random(hashlib.sha256(repr((seed, tokens)).encode()).digest())
        count = max(1, seq.num_candidates)
        ids = rng.sample([i for i in range(VOCAB_SIZE) if i != EOS or rng.random() < 0.1], count)
        table = {token_id: (-0.1 - rng.random(), rank) for rank, token_id in enumerate(ids, start=1)}
        return SampledToken(ids[0], None if seq.num_logprobs is None else table)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


@pytest.fixture(scope="module", params=[False, True], ids=["one step at a time", "one step ahead"])
def engine(request, model):
    engine = LLMEngine(
        EngineConfig(
            model=str(model),
            device="cpu",
            enforce_eager=True,
            max_model_len=64,
            block_size=4,
            num_gpu_blocks_override=22,  # so few that there are preemptions
            max_num_batched_tokens=24,
            max_num_seqs=8,
            scheduling_policy="priority",
            async_scheduling=request.param,
        )
    )
    engine.runner = HashRunner()
    return engine


class Disturbance:
    """Raises an error where asked: at the n-th event of (file, line)."""

    def __init__(self, places=(), errors=()):
        self.places = dict(zip(places, errors, strict=True))
        self.seen: Counter = Counter()
        self.raised = 0

    def __enter__(self):
        sys.settrace(self.enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def enter(self, frame, event, _):
        code = frame.f_code
        return self.visit if code.co_filename in FILES and code.co_name not in NOT_DISTURBED else None

    def visit(self, frame, event, _):
        if event == "line":
            place = frame.f_code.co_filename, frame.f_lineno
            self.seen[place] += 1
            if (error := self.places.pop((*place, self.seen[place]), None)) is not None:
                self.raised += 1
                raise error("here")
        return self.visit


def play(engine, disturbance) -> dict:
    """Run the scene. Returns the finished outputs."""
    done, deltas = {}, defaultdict(lambda: defaultdict(str))
    waiting = dict(REQUESTS)
    step, to_abort = 0, "aborted"

    def take(outputs):
        for output in outputs:
            for completion in output.outputs:
                deltas[output.request_id][completion.index] += completion.delta
            if output.finished:
                assert output.request_id not in done, "finished twice"
                done[output.request_id] = output

    with disturbance:
        while waiting or engine.has_unfinished_requests():
            assert step < 2000, "no progress"
            try:
                for name, (arrival, prompt, params, priority) in list(waiting.items()):
                    if arrival <= step:
                        if name not in engine._requests:  # else it was queued before the error
                            engine.add_request(name, prompt, params, priority)
                        del waiting[name]
                if to_abort and step >= ABORTED_AT:
                    if output := engine.abort(to_abort):
                        take([output])
                    to_abort = None
                take(engine.step())
            except (KeyboardInterrupt, MemoryError):
                pass
            step += 1
    for name, output in done.items():
        if isinstance(REQUESTS[name][2], SamplingParams) and not REQUESTS[name][2].ranks:
            for completion in output.outputs:
                assert deltas[name][completion.index] == completion.text
    manager = engine.scheduler.block_manager
    manager.check_invariants()
    assert manager.num_free_blocks == manager.num_blocks
    assert not (engine._requests or engine._outputs or engine.scheduler.has_unfinished() or engine.scheduler.suspects)
    engine.reset_prefix_cache()
    return done


def compare(done, expected) -> None:
    assert done.keys() == expected.keys()
    for name, output in done.items():
        assert output.error is None
        for ours, theirs in zip(output.outputs, expected[name].outputs, strict=True):
            if name == "aborted":
                assert (
                    ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                    or theirs.token_ids == (ours.token_ids[: len(theirs.token_ids)])
                )
                continue
            assert (ours.token_ids, ours.text, ours.finish_reason) == (
                theirs.token_ids,
                theirs.text,
                theirs.finish_reason,
            )
            assert (ours.stop_reason, ours.cumulative_logprob, ours.score) == (
                theirs.stop_reason,
                theirs.cumulative_logprob,
                theirs.score,
            )
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            assert ours.logprobs is None or [*map(list, ours.logprobs)] == [*map(list, theirs.logprobs)]


@pytest.fixture(scope="module")
def undisturbed(engine) -> tuple[dict, Counter]:
    disturbance = Disturbance()
    done = play(engine, disturbance)
    assert engine.scheduler.num_preemptions > 0
    return done, disturbance.seen


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=lambda error: error.__name__)
def test_an_error_at_any_line_changes_no_output(engine, undisturbed, error):
    expected, lines = undisturbed
    rng = random.Random(error.__name__)
    happened: Counter = Counter()
    places = lines.items() if VISITS else rng.sample([*lines.items()], 40)
    for (file, line), visits in places:
        for visit in rng.sample(range(1, visits + 1), min(visits, max(1, VISITS))):
            disturbance = Disturbance([(file, line, visit)], [error])
            try:
                compare(play(engine, disturbance), expected)
            except Exception as failure:
                raise AssertionError(f"after {error.__name__} at {Path(file).name}:{line}, visit {visit}") from failure
            happened["raised" if disturbance.raised else "not reached"] += 1
    print(f"\n{error.__name__}: {dict(happened)} at {len(places)} of {len(lines)} lines, no output changed")
    assert len(lines) > 300 and happened["raised"] > 0.9 * happened.total()


def test_several_errors_one_after_the_other_change_no_output(engine, undisturbed):
    """Also while the engine recovers from the one before."""
    expected, lines = undisturbed
    rng = random.Random(7)
    places = [(*place, visit) for place, visits in lines.items() for visit in range(1, 2 * visits)]
    recovering = [place for place in lines if lines[place] < 3]
    for _ in range(30 + 50 * VISITS):
        chosen = rng.sample(places, 4) + [(*place, rng.randint(1, 2)) for place in rng.sample(recovering, 2)]
        compare(play(engine, Disturbance(chosen, [KeyboardInterrupt] * len(chosen))), expected)
