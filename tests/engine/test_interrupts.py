"""An exception at any line of the engine or its worker loses nothing: the next call goes on with every request.

A scene with every kind of request is first run undisturbed, which shows the lines there are; then again and again, with
an error at one of the lines. For the lines of the engine it runs on an executor that computes no model: a token is a
hash of the tokens before it. For those of the worker it runs on a tiny model, also as a GPU would run it: one step
ahead, on static buffers, all rows sampled at once.

    NANOPAGE_ATTACKS=1000 pytest tests/engine/test_interrupts.py -s    five visits of every line, counts by outcome
"""

import dataclasses
import hashlib
import logging
import os
import random
import sys
from collections import Counter, defaultdict, deque
from pathlib import Path

import pytest
from helpers import EOS, VOCAB_SIZE, tiny_model
from on_a_cpu import graphs_for, make_sample_all

import nanopage
from nanopage import BeamSearchParams, EngineConfig, LLMEngine, SamplingParams
from nanopage.beams.requests import make_request
from nanopage.build import build_engine
from nanopage.params import RequestOutputKind
from nanopage.step import Batch, BatchResult, Capacity, LogprobTable, PromptLogprobs, SamplingSettings
from nanopage.text.tokenizer import Tokenizer
from nanopage.view.invariants import check_blocks
from nanopage.weights import loader
from nanopage.worker.eager import Eager

VISITS = 5 if os.environ.get("NANOPAGE_ATTACKS", "0") != "0" else 0  # of every line; 0: one visit of SOME
SOME = 4
PACKAGE = Path(nanopage.__file__).parent
ENGINE = [PACKAGE / "engine", PACKAGE / "text"]
WORKER = [PACKAGE / name for name in ("worker", "sampling", "models", "layers", "kernels", "device.py")]
# What is returned is on its way to the caller, and what is not changed cannot be broken.
NOT_DISTURBED = {"step", "abort", "take", "has_unfinished_requests", "num_free_blocks"}
BLOCK_SIZE = 4
PREFIX = list(range(20, 37))
FINAL = RequestOutputKind.FINAL_ONLY
LONG = SamplingParams(temperature=1, seed=5, max_tokens=14, ignore_eos=True)
REQUESTS = {  # request_id -> (arrives at step, prompt, parameters, priority)
    "greedy": (0, PREFIX, SamplingParams(temperature=0, max_tokens=12), 0),
    "same prefix": (1, [*PREFIX, 7, 8], SamplingParams(seed=3, max_tokens=12, logprobs=1), 0),
    "three": (0, [9, 10, 11, 12, 13], SamplingParams(n=3, seed=4, max_tokens=10, top_p=0.9, stop=["a", "th"]), 1),
    "beams": (2, [50, 51, 52], BeamSearchParams(width=3, max_tokens=8), 1),
    "best": (3, PREFIX[:9], SamplingParams(n=1, best_of=2, seed=6, max_tokens=7), 1),
    "aborted": (0, [60, 61], LONG, 2),
    "urgent": (6, list(range(90, 110)), LONG, -1),
    "stopped": (4, [70] * 9, SamplingParams(seed=9, max_tokens=30, stop=["e"], min_tokens=3), 0),
    "scored": (3, PREFIX[:11], SamplingParams(seed=2, max_tokens=4, prompt_logprobs=2, output_kind=FINAL), 0),
    "penalized": (
        5,
        [30, 31] * 4,
        SamplingParams(n=2, seed=8, max_tokens=9, frequency_penalty=0.5, bad_words=["the", "zz"], output_kind=FINAL),
        1,
    ),
}
ABORTED_AT = 7
RESET_AT = 9  # the prefix cache


@pytest.fixture(autouse=True)
def _no_warnings(caplog):
    caplog.set_level(logging.ERROR, "nanopage")


@dataclasses.dataclass
class Row:
    tokens: list[int]
    num_prompt_tokens: int
    seed: int
    settings: SamplingSettings
    blocks: list[int] = dataclasses.field(default_factory=list)


class HashExecutor:
    """Stands in for the workers, and knows nothing but what the batches say. The K and V of a token are all the tokens
    up to it; a token is sampled from what the blocks of its sequence hold."""

    def __init__(self, capacity: Capacity):
        self.capacity = capacity
        self.rows: dict[int, Row] = {}
        self.cache: dict[int, list] = {block: [None] * BLOCK_SIZE for block in range(capacity.num_blocks)}
        self.host: dict[int, list] = {}
        self.results: deque[BatchResult] = deque()

    def start(self) -> Capacity:
        return self.capacity

    def submit(self, batch: Batch) -> None:
        self.move(batch)
        self.update(batch)
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            self.compute(self.rows[row], start, start + count)
        result = BatchResult()
        tokens = [
            (row, position)
            for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True)
            for position in range(start, start + count)
        ]
        for token, sampled_row in zip(batch.sampled_from, batch.sampled_rows, strict=True):
            row, (computed, position) = self.rows[sampled_row], tokens[token]
            end = position + 1
            assert len(row.tokens) >= end
            token_id, table = self.sample(row, self.read(self.rows[computed], end))
            row.tokens[end:] = [token_id]
            if table is not None:
                result.logprobs[len(result.token_ids)] = table
            result.token_ids.append(token_id)
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            result.prompt_logprobs += self.score(row, start, start + count)
        self.results.append(result)

    def result(self) -> BatchResult:
        return self.results.popleft()

    def discard(self) -> None:
        self.results.clear()

    def rest(self) -> None:
        pass

    def move(self, batch: Batch) -> None:
        for block, host_block in batch.swap_out:
            self.host[host_block] = list(self.cache[block])
        for host_block, block in batch.swap_in:
            self.cache[block] = list(self.host[host_block])
        self.cache |= {target: list(self.cache[source]) for source, target in batch.copies}
        for block in batch.cleared:
            self.cache[block] = [None] * BLOCK_SIZE

    def update(self, batch: Batch) -> None:
        for new in batch.new:
            self.rows[new.row] = Row(list(new.token_ids), new.num_prompt_tokens, new.seed, new.sampling)
        parents = [self.rows[fork.parent] for fork in batch.forks]
        for fork, parent in zip(batch.forks, parents, strict=True):
            num_blocks = -(-fork.num_tokens // BLOCK_SIZE)
            self.rows[fork.row] = Row(
                parent.tokens[: fork.num_tokens],
                parent.num_prompt_tokens,
                fork.seed,
                parent.settings,
                parent.blocks[:num_blocks],
            )
        for update in batch.blocks:
            self.rows[update.row].blocks[update.first :] = update.blocks
        for row, position, token_id in batch.tokens:
            self.rows[row].tokens[position:] = [token_id]

    def compute(self, row: Row, start: int, end: int) -> None:
        assert 0 <= start < end <= len(row.tokens)
        for position in range(start, end):
            block, offset = divmod(position, BLOCK_SIZE)
            self.cache[row.blocks[block]][offset] = tuple(row.tokens[: position + 1])

    def read(self, row: Row, end: int) -> tuple[int, ...]:
        """What the cache says of a sequence, whose every token must have been computed behind the same ones."""
        held = [self.cache[row.blocks[position // BLOCK_SIZE]][position % BLOCK_SIZE] for position in range(end)]
        assert all(tokens == held[-1][: len(tokens)] and len(tokens) == i + 1 for i, tokens in enumerate(held))
        return held[-1]

    def sample(self, row: Row, tokens: tuple[int, ...]) -> tuple[int, LogprobTable | None]:
        seed = 0 if row.settings.temperature == 0 else row.seed
        rng = random.Random(hashlib.sha256(repr((seed, tokens)).encode()).digest())
        ids = rng.sample([i for i in range(VOCAB_SIZE) if i != EOS or rng.random() < 0.1], row.settings.logprobs or 1)
        table = {token_id: (-0.1 - rng.random(), rank) for rank, token_id in enumerate(ids, start=1)}
        return ids[0], None if row.settings.logprobs is None else table

    def score(self, row: int, start: int, end: int) -> list[PromptLogprobs]:
        tokens, end = self.rows[row].tokens, min(end, self.rows[row].num_prompt_tokens - 1)
        if self.rows[row].settings.prompt_logprobs is None or start >= end:
            return []
        tables = [{tokens[position + 1]: (-float(position), 1)} for position in range(start, end)]
        return [PromptLogprobs(row, start + 1, tables)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"), hidden_size=32, intermediate_size=32, num_hidden_layers=1)


@pytest.fixture(
    scope="module",
    params=[(half, ahead) for half in ("engine", "worker") for ahead in (False, True)],
    ids=["engine, in turn", "engine, one step ahead", "worker, in turn", "worker, one step ahead"],
)
def scene(request, model):
    half, ahead = request.param
    with pytest.MonkeyPatch.context() as patch:
        if half == "worker":
            patch.setattr("nanopage.sampling.truncation.CANDIDATES", 4)
        yield Scene(model, half == "worker", ahead)


class Scene:
    """Makes engines to run the requests on, and knows the files of which to disturb lines."""

    def __init__(self, model: Path, computes: bool, ahead: bool):
        self.model, self.computes, self.ahead = model, computes, ahead
        places = WORKER if computes else ENGINE
        files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
        self.files = {str(file) for file in files}
        self.engine = self.make_engine()
        first = Disturbance(self.files)
        self.expected = play(self.engine, first)
        again = Disturbance(self.files)
        compare(play(self.engine, again), self.expected)
        assert self.engine.scheduler.queues.num_preemptions > 0
        self.lines = again.seen
        self.lines_of_first_use = sorted(first.seen.keys() - again.seen.keys())

    def make_engine(self) -> LLMEngine:
        config = EngineConfig(
            model=str(self.model),
            device="cpu",
            dtype="float64",
            enforce_eager=True,
            max_model_len=64,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=22,  # so few that there are preemptions
            max_num_batched_tokens=24,
            max_num_seqs=8,
            scheduling_policy="priority",
            async_scheduling=self.ahead,
        )
        if not self.computes:
            checkpoint = loader.open_checkpoint(self.model)
            tokenizer = Tokenizer(checkpoint, VOCAB_SIZE)
            executor = HashExecutor(Capacity("cpu", "float64", 22, 22, 64))
            engine = LLMEngine(config, loader.read_config(checkpoint), self.model, tokenizer, executor)
            engine.input_processor.make_search = make_request
            return engine
        engine = build_engine(config)
        if self.ahead:
            worker = engine.executor.worker
            made = worker.model, worker.kv_cache, worker.runner.table
            worker.runner.ways = [graphs_for(*made), Eager(*made)]
            worker.runner.sampler.sample_all = make_sample_all()
        return engine

    def try_errors(self, engine: LLMEngine, places: list[tuple[str, int, int]], error: type[BaseException]) -> int:
        """Run the requests with an error at each of the places. Returns how many were raised."""
        disturbance = Disturbance(self.files, places, [error] * len(places))
        try:
            compare(play(engine, disturbance), self.expected)
        except Exception as failure:
            where = ", ".join(f"{Path(file).name}:{line}, visit {visit}" for file, line, visit in places)
            raise AssertionError(f"after {error.__name__} at {where}") from failure
        return disturbance.raised


class Disturbance:
    """Raises an error where asked: at the n-th event of (file, line)."""

    def __init__(self, files, places=(), errors=()):
        self.files = files
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
        return self.visit if code.co_filename in self.files and code.co_name not in NOT_DISTURBED else None

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
                        if name not in engine.output_processor.requests:  # else it was queued before the error
                            engine.add_request(name, prompt, params, priority)
                        del waiting[name]
                if to_abort and step >= ABORTED_AT:
                    if output := engine.abort(to_abort):
                        take([output])
                    to_abort = None
                if step == RESET_AT:
                    engine.reset_prefix_cache()
                take(engine.step())
            except (KeyboardInterrupt, MemoryError):
                pass
            step += 1
    for name, output in done.items():
        if isinstance(REQUESTS[name][2], SamplingParams) and not REQUESTS[name][2].ranks:
            for completion in output.outputs:
                assert deltas[name][completion.index] == completion.text
    manager = engine.scheduler.block_manager
    check_blocks(manager)
    assert manager.num_free_blocks == manager.num_blocks
    assert not (
        engine.has_unfinished_requests() or engine.scheduler.has_unfinished() or engine.scheduler.queues.suspects
    )
    assert sorted(engine.scheduler.writer.free_rows) == list(range(engine.config.max_num_seqs))
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
            assert ours.stop_reason == theirs.stop_reason
            assert close(ours.cumulative_logprob, theirs.cumulative_logprob) and close(ours.score, theirs.score)
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            assert ours.logprobs is None or [*map(list, ours.logprobs)] == [*map(list, theirs.logprobs)]
        assert (output.prompt_logprobs is None) == (expected[name].prompt_logprobs is None)
        for ours, theirs in zip(output.prompt_logprobs or [], expected[name].prompt_logprobs or [], strict=True):
            assert (ours is None) == (theirs is None) and list(ours or {}) == list(theirs or {})


def close(one: float | None, other: float | None) -> bool:
    """Chunks of other sizes round differently."""
    return one == other or (None not in (one, other) and one == pytest.approx(other, abs=1e-9))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError], ids=lambda error: error.__name__)
def test_an_error_at_any_line_changes_no_output(scene, error):
    rng = random.Random(error.__name__)
    lines = [*scene.lines.items()] if VISITS else rng.sample([*scene.lines.items()], SOME)
    tried = raised = 0
    for place, visits in lines:
        for visit in rng.sample(range(1, visits + 1), min(visits, max(1, VISITS))):
            raised += scene.try_errors(scene.engine, [(*place, visit)], error)
            tried += 1
    print(f"\n{error.__name__}: {raised} raised at {len(lines)} of {len(scene.lines)} lines, no output changed")
    assert len(scene.lines) > 300 and raised > 0.9 * tried


def test_an_error_at_the_first_use_of_what_is_made_then_changes_no_output(scene):
    for place in scene.lines_of_first_use:
        assert scene.try_errors(scene.make_engine(), [(*place, 1)], KeyboardInterrupt) == 1
    assert bool(scene.lines_of_first_use) == scene.computes


def test_several_errors_one_after_the_other_change_no_output(scene):
    """Also while the engine recovers from the previous one."""
    rng = random.Random(7)
    places = [(*place, visit) for place, visits in scene.lines.items() for visit in range(1, 2 * visits)]
    recovering = [place for place in scene.lines if scene.lines[place] < 3]
    for _ in range(SOME // 3 + 50 * VISITS):
        chosen = rng.sample(places, 4) + [(*place, rng.randint(1, 2)) for place in rng.sample(recovering, 2)]
        scene.try_errors(scene.engine, chosen, KeyboardInterrupt)
