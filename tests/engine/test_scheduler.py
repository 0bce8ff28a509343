"""Scheduler: whole lives of requests, with a fake model that is a function of the tokens so far."""

import subprocess
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import nanopage
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.preemption import preempt
from nanopage.engine.schedule import Schedule
from nanopage.engine.scheduler import Scheduler
from nanopage.engine.sequence import Sequence, SequenceGroup, Status
from nanopage.state.layer_kinds import BlockNeeds, first_block
from nanopage.step import NO_BLOCK, Batch, BatchResult, BlockUpdate, Fork, NewSequence, SamplingSettings
from nanopage.view.invariants import check_blocks


def fake_model(token_ids: list[int], seed: int = 0) -> int:
    """The next token, 0 to 4."""
    return (sum(i * token for i, token in enumerate(token_ids, 1)) * 7 + len(token_ids) + seed) % 5


class Worker:
    """What a worker does, on lists. It knows what the batches say and nothing else.

    The K and V of a token depend on every token before it, so its slot holds (salt, all tokens up to it). A slot of the
    layers of another kind than the first also holds the kind. Only what windows reach is read.
    """

    def __init__(self, num_rows: int, num_blocks: int, block_size: int, num_host_blocks: int, model, windows=(None,)):
        self.block_size, self.model, self.windows = block_size, model, windows
        self.tokens: list[list[int]] = [[] for _ in range(num_rows)]
        self.blocks: list[list[int]] = [[] for _ in range(num_rows)]
        self.seeds = [0] * num_rows
        self.slots = [["never written"] * block_size for _ in range(num_blocks)]
        self.host: list[list] = [[] for _ in range(num_host_blocks)]

    def run(self, batch: Batch, salts: list[str]) -> BatchResult:
        self.move(batch)
        self.update(batch)
        self.compute(batch, salts)
        result = BatchResult()
        for token, row in zip(batch.sampled_from, batch.sampled_rows, strict=True):
            index, number = place_of(batch, token)
            end = batch.starts[index] + number + 1
            assert self.tokens[row][:end] == self.tokens[batch.rows[index]][:end]
            result.token_ids.append(self.model(self.tokens[row][:end], self.seeds[row]))
            self.tokens[row][end:] = result.token_ids[-1:]
        return result

    def move(self, batch: Batch) -> None:
        for block, host_block in batch.swap_out:
            self.host[host_block] = list(self.slots[block])
        for host_block, block in batch.swap_in:
            self.slots[block] = list(self.host[host_block])
        copied = [list(self.slots[source]) for source, _ in batch.copies]
        for (_, target), slots in zip(batch.copies, copied, strict=True):
            self.slots[target] = slots
        for block in batch.cleared:
            self.slots[block] = [None] * self.block_size

    def update(self, batch: Batch) -> None:
        for new in batch.new:
            self.tokens[new.row], self.blocks[new.row], self.seeds[new.row] = list(new.token_ids), [], new.seed
        for fork in batch.forks:
            self.tokens[fork.row] = self.tokens[fork.parent][: fork.num_tokens]
            num_blocks = -(-fork.num_tokens // self.block_size) * len(self.windows)
            self.blocks[fork.row] = self.blocks[fork.parent][:num_blocks]
            self.seeds[fork.row] = fork.seed
        for update in batch.blocks:
            assert update.first <= len(self.blocks[update.row])
            self.blocks[update.row][update.first :] = update.blocks
        for row, position, token_id in batch.tokens:
            self.tokens[row][position:] = [token_id]

    def compute(self, batch: Batch, salts: list[str]) -> None:
        """Read all there is to read, and write the tokens of this step."""
        work = list(zip(batch.rows, batch.starts, batch.counts, salts, strict=True))
        assert len(set(batch.rows)) == len(work) and len(set(batch.sampled_rows)) == len(batch.sampled_rows)
        for row, start, _, salt in work:
            for kind in range(len(self.windows)):
                first, slots = self.slots_of(row, kind, start, start)
                expected = [self.contents(row, kind, salt, position) for position in range(first, start)]
                assert slots[: start - first] == expected, "a cache that holds something else"
        for row, start, num_tokens, salt in work:
            assert len(self.tokens[row]) >= start + num_tokens, "a token that the worker does not know"
            for position in range(start, start + num_tokens):
                index, offset = divmod(position, self.block_size)
                for kind in range(len(self.windows)):
                    block = self.blocks[row][index * len(self.windows) + kind]
                    self.slots[block][offset] = self.contents(row, kind, salt, position)
        for row, start, num_tokens, _ in work:
            for kind in range(len(self.windows)):
                first, slots = self.slots_of(row, kind, start, start + num_tokens)
                behind = slots[start + num_tokens - first :]
                assert behind == [None] * len(behind), "what attention reads and masks was not cleared"

    def contents(self, row: int, kind: int, salt: str, position: int) -> tuple:
        return (salt, tuple(self.tokens[row][: position + 1])) + (() if kind == 0 else (kind,))

    def slots_of(self, row: int, kind: int, start: int, end: int) -> tuple[int, list]:
        """The slots of one kind that queries from `start` to `end` read, and the position of the first slot."""
        first, last = first_block(self.windows[kind], start, self.block_size), -(-end // self.block_size)
        blocks = self.blocks[row][kind :: len(self.windows)][first:last]
        assert NO_BLOCK not in blocks, "a block that was given back"
        return first * self.block_size, [slot for block in blocks for slot in self.slots[block]]


def place_of(batch: Batch, token: int) -> tuple[int, int]:
    """The index in `rows` of a token of the step, and its number in that sequence's tokens."""
    index = 0
    while token >= batch.counts[index]:
        token, index = token - batch.counts[index], index + 1
    return index, token


@dataclass
class Work:
    """What a schedule says of one sequence."""

    seq: Sequence
    start: int
    num_tokens: int
    samplers: list[Sequence]


def work_of(schedule: Schedule) -> list[Work]:
    batch = schedule.batch
    work = [
        Work(*of_one, []) for of_one in zip(schedule.sequences, batch.starts, batch.counts, strict=True)
    ]  # fmt: skip
    for token, seq in zip(batch.sampled_from, schedule.samplers, strict=True):
        index, number = place_of(batch, token)
        assert number + 1 == batch.counts[index]
        work[index].samplers.append(seq)
    return work


class World:
    """The engine's loop. Every step is checked against the scheduler's rules, and by a worker that sees its batch."""

    def __init__(
        self,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        budget=64,
        caching=True,
        model=fake_model,
        num_host_blocks=0,
        mode=None,
        windows=(None,),
    ):
        self.manager = BlockManager(num_blocks, block_size, caching, num_host_blocks, windows)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget, mode)
        self.worker = Worker(max_num_seqs, num_blocks, block_size, num_host_blocks, model, windows)
        self.sequences: list[Sequence] = []
        self.results: dict[int, BatchResult] = {}  # of schedules that were not taken in yet, by id
        self.in_flight: Schedule | None = None

    def add(self, prompt: list[int], **params) -> Sequence:
        return self.add_group(prompt, 1, **params)[0]

    def add_group(
        self,
        prompt: list[int],
        num_sequences: int,
        *,
        eos=(),
        limit: int | None = None,
        salt="",
        max_tokens: int | None = 16,
        min_tokens=0,
        ignore_eos=False,
        stop_token_ids=(),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        priority=0,
    ) -> list[Sequence]:
        limit = limit or self.manager.num_blocks * self.manager.block_size
        sampling = SamplingSettings(min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        seqs = [
            Sequence(
                len(self.sequences) + seed,
                prompt,
                sampling,
                seed,
                frozenset() if ignore_eos else frozenset(eos),
                frozenset(stop_token_ids),
                limit if max_tokens is None else min(limit, len(prompt) + max_tokens),
                logprobs,
                salt,
            )
            for seed in range(num_sequences)
        ]
        self.scheduler.add(SequenceGroup(f"request {len(self.sequences)}", seqs, priority))
        self.sequences += seqs
        return seqs

    def finish(self, seq: Sequence, *reason) -> None:
        self.scheduler.queues.finish(seq.group, seq, *reason)

    @property
    def running(self) -> list[Sequence]:
        return [seq for group in self.scheduler.running for seq in group.seqs]

    @property
    def waiting(self) -> list[Sequence]:
        return [seq for group in self.scheduler.waiting for seq in group.seqs]

    def step(self) -> Schedule:
        schedule = self.schedule()
        self.update(schedule)
        return schedule

    def run(self, steps: int = 10_000) -> None:
        """Step until every request has ended. Every step takes the oldest request forward: see `check_work`."""
        while self.scheduler.has_unfinished():
            assert steps, "not done in time"
            self.step()
            steps -= 1

    def schedule(self) -> Schedule:
        running = self.running
        tables = {seq_id: list(table) for seq_id, table in self.manager.block_tables.items()}
        schedule = self.scheduler.schedule()
        self.submit(schedule)
        self.check_queues()
        self.check_work(schedule)
        self.check_preemptions(schedule, running, tables)
        self.check_admissions(schedule, running)
        self.check_cleared(schedule, tables)
        return schedule

    def submit(self, schedule: Schedule) -> None:
        check_blocks(self.manager)
        batch = schedule.batch
        assert batch.rows == [seq.row for seq in schedule.sequences]
        assert batch.sampled_rows == [seq.row for seq in schedule.samplers]
        singles = [num_tokens == 1 for num_tokens in batch.counts]
        assert singles == sorted(singles, reverse=True), "single tokens come first"
        self.results[id(schedule)] = self.worker.run(batch, [seq.cache_salt for seq in schedule.sequences])
        for w in work_of(schedule):
            table = self.manager.block_tables[w.seq.seq_id]
            known = self.worker.blocks[w.seq.row][: len(table)]
            assert [k if block != NO_BLOCK else NO_BLOCK for k, block in zip(known, table, strict=True)] == table
            for block in table[w.start // self.manager.block_size * self.manager.num_kinds :]:
                assert self.manager.ref_counts[block] == 1, "written while another sequence reads it"
        self.check_rows()

    def update(self, schedule: Schedule) -> None:
        self.scheduler.advance(schedule)
        self.scheduler.update(schedule, self.results.pop(id(schedule)))
        check_blocks(self.manager)
        self.check_queues()

    def step_ahead(self) -> Schedule:
        """Submit a batch before the results of the previous one are taken in, as the engine does."""
        schedule = self.scheduler.schedule()
        self.submit(schedule)
        self.complete()
        self.scheduler.advance(schedule)
        check_blocks(self.manager)
        self.in_flight = schedule
        return schedule

    def complete(self) -> None:
        if self.in_flight is not None:
            self.scheduler.update(self.in_flight, self.results.pop(id(self.in_flight)))
            self.in_flight = None
            check_blocks(self.manager)
            self.check_rows()

    def check_rows(self):
        """Rows are those of running sequences, each its own, and the others are free."""
        rows = [seq.row for seq in self.sequences if seq.row is not None]
        assert sorted(rows + self.scheduler.writer.free_rows) == list(range(self.scheduler.admission.max_num_seqs))
        assert all(seq.row is None or seq.group.status is Status.RUNNING for seq in self.sequences)

    def check_queues(self):
        running, waiting = self.running, self.waiting
        ids = [seq.seq_id for seq in [*running, *waiting]]
        assert ids == sorted(ids), "running ones are the oldest, and both queues are in order of arrival"
        assert len(running) <= self.scheduler.admission.max_num_seqs
        assert self.manager.block_tables.keys() == {seq.seq_id for seq in running}
        assert all(seq.group.status is Status.RUNNING for seq in running)
        assert all(seq.group.status is Status.WAITING and seq.num_computed_tokens == 0 for seq in waiting)
        assert all(seq.row is None and seq.num_sent_blocks == 0 for seq in waiting)

    def check_work(self, schedule):
        work = sorted(work_of(schedule), key=lambda w: w.seq.seq_id)
        running, budget = self.running, self.scheduler.token_budget.tokens
        assert bool(work) == self.scheduler.has_unfinished(), "a step without work"
        assert [w.seq for w in work] == running[: len(work)], "the oldest run first, and only running ones"
        assert schedule.batch.num_tokens == sum(w.num_tokens for w in work)
        for w in work:
            assert w.start == w.seq.num_computed_tokens
            assert w.num_tokens == min(w.seq.num_tokens - w.start, budget) > 0
            assert w.samplers == ([w.seq] if w.start + w.num_tokens == w.seq.num_tokens else [])
            table = self.manager.block_tables[w.seq.seq_id]
            assert len(table) == self.manager.blocks_for(w.start + w.num_tokens)
            budget -= w.num_tokens
        assert budget >= 0
        assert len(work) == len(running) or budget == 0, "a running sequence was left out"
        order = [(w.num_tokens > 1, w.seq.seq_id) for w in work_of(schedule)]
        assert order == sorted(order), "single tokens come first, and otherwise the oldest"

    def check_preemptions(self, schedule, running, tables):
        gone = [seq for seq in running if seq not in self.running]
        assert preempted(schedule) == gone[::-1] == running[len(running) - len(gone) :][::-1], "not the youngest"
        assert self.waiting[: len(gone)] == gone, "not at the front of the queue"
        if gone:
            last, kept = gone[0], running[: -len(gone)]
            shared = {block for seq in kept for block in tables[seq.seq_id]}
            given_back = len(set(tables[last.seq_id]) - shared)
            wanted = self.manager.blocks_for(last.num_tokens) - len(tables[last.seq_id])
            assert self.manager.num_free_blocks - given_back < max(wanted, 0), "preempted without need"

    def check_admissions(self, schedule, running):
        scheduler, manager = self.scheduler, self.manager
        admitted = [seq for seq in self.running if seq not in running]
        assert {new.row for new in schedule.batch.new} == {seq.row for seq in admitted}
        if schedule.preempted:
            assert not admitted
        elif (
            scheduler.waiting
            and len(scheduler.running) < scheduler.admission.max_num_seqs
            and schedule.batch.num_tokens < scheduler.token_budget.tokens
        ):
            seq = self.waiting[0]
            prefix = [] if seq.settings.prompt_logprobs is not None else manager.lookup(seq.token_ids, seq.cache_salt)
            shared = sum(manager.ref_counts[entry.blocks[0]] > 0 for entry in prefix)
            short = manager.blocks_for(seq.num_tokens) - shared > manager.num_free_blocks
            assert short or self.computes_next_block_of(seq, len(prefix), schedule), "kept waiting without need"

    def computes_next_block_of(self, seq, num_cached_blocks, schedule):
        """Whether the batch writes, in a chunk of a prompt, the block that `seq` would have to compute first."""
        if seq.settings.prompt_logprobs is not None or not self.manager.prefixes.enabled:
            return False
        first = num_cached_blocks * self.manager.block_size
        end = first + self.manager.block_size
        written = {
            (w.seq.cache_salt, tuple(w.seq.token_ids[:end]))
            for w in work_of(schedule)
            if w.num_tokens > 1 and w.start < end <= w.start + w.num_tokens
        }
        return end < seq.num_tokens and (seq.cache_salt, tuple(seq.token_ids[:end])) in written

    def check_cleared(self, schedule, tables):
        """Of the blocks that are handed out, those that the step does not fill are cleared."""
        block_size, num_kinds, new, cleared = self.manager.block_size, self.manager.num_kinds, [], []
        for w in work_of(schedule):
            held = len(tables.get(w.seq.seq_id, ())) or w.start // block_size * num_kinds
            fresh = self.manager.block_tables[w.seq.seq_id][held:]
            new += fresh
            cleared += fresh[-num_kinds:] if (w.start + w.num_tokens) % block_size else []
        assert len(set(new)) == len(new)
        assert sorted(schedule.batch.cleared) == sorted(cleared)


def work(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(sequence, first position, number of tokens), in the batch's order."""
    return [(w.seq.seq_id, w.start, w.num_tokens) for w in work_of(schedule)]


def queue(world: World) -> list[int]:
    return [seq.seq_id for seq in world.waiting]


def running(world: World) -> list[int]:
    return [seq.seq_id for seq in world.running]


def preempted(schedule: Schedule) -> list[Sequence]:
    return [seq for group in schedule.preempted for seq in group.seqs]


def test_the_scheduler_and_the_block_manager_work_without_torch():
    program = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, NoTorch())
try:
    import torch
except ImportError:
    pass
else:
    sys.exit("the block does not work")
import nanopage.engine.block_manager
import nanopage.engine.scheduler
assert "torch" not in sys.modules
print(nanopage.engine.scheduler.Scheduler(nanopage.engine.block_manager.BlockManager(4, 2), 1, 8).schedule())
"""
    root = Path(nanopage.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Schedule(batch=Batch(" in done.stdout


# Whole worlds

tokens = st.integers(0, 1)
requests = st.fixed_dictionaries(
    {
        "prompt": st.one_of(st.lists(tokens, min_size=1, max_size=12), st.integers(1, 12).map(lambda n: [0] * n)),
        "max_tokens": st.sampled_from([None, None, 1, 4, 12]),
        "min_tokens": st.sampled_from([0, 0, 1]),
        "eos": st.sampled_from([(), (), (4,)]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([[], [], [3], [4]]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "salt": st.sampled_from(["", "", "a"]),
    }
)
events = st.one_of(
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("add"), requests),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 9)),
    st.tuples(st.just("abort during the step"), st.integers(0, 9)),
)


def alone(
    prompt: list[int],
    limit: int,
    seed: int = 0,
    *,
    max_tokens: int | None = None,
    min_tokens: int = 0,
    eos=(),
    ignore_eos=False,
    stop_token_ids=(),
    **_,
) -> tuple[list[int], str, int | None]:
    """What a request gets with nobody beside it: (output, finish_reason, stop_reason)."""
    output: list[int] = []
    while True:
        token = fake_model(prompt + output, seed)
        output.append(token)
        if len(output) >= min_tokens:
            if token in eos and not ignore_eos:
                return output, "stop", None
            if token in stop_token_ids:
                return output, "stop", token
        if len(output) >= (max_tokens or limit) or len(prompt + output) >= limit:
            return output, "length", None


@given(
    num_blocks=st.integers(2, 8),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 4),
    budget=st.integers(1, 10),
    caching=st.sampled_from([True, True, False]),
    first=st.lists(requests, min_size=2, max_size=4),
    events=st.lists(events, max_size=12),
)
@settings(max_examples=examples(400), deadline=None)
def test_in_any_world_every_request_ends_as_if_it_were_alone(
    num_blocks, block_size, max_num_seqs, budget, caching, first, events
):
    world = World(num_blocks, block_size, max_num_seqs, budget, caching)
    pool = num_blocks * block_size
    asked, aborted = [], set()

    def abort(index):
        unfinished = [seq for seq in world.sequences if not seq.finished]
        if unfinished:
            seq = unfinished[index % len(unfinished)]
            world.finish(seq, "abort")
            aborted.add(seq)

    for kind, detail in [*(("add", request) for request in first), *events]:
        if kind == "add":
            request = dict(detail)
            prompt = request.pop("prompt")[: pool - 1]  # the engine refuses one that leaves no room for output
            if prompt:
                if request["max_tokens"] is not None:
                    request["min_tokens"] = min(request["min_tokens"], request["max_tokens"])
                world.add(prompt, **request)
                asked.append({"prompt": list(prompt), **request})
        elif kind == "abort":
            abort(detail)
        elif kind == "abort during the step":
            schedule = world.schedule()
            abort(detail)
            world.update(schedule)
        else:
            for _ in range(detail):
                world.step()
    # Each step runs at least one token of the oldest request: no world needs more than this.
    world.run(steps=sum(seq.max_total_tokens for seq in world.sequences))
    for seq, request in zip(world.sequences, asked, strict=True):
        output, finish_reason, stop_reason = alone(limit=pool, **request)
        assert seq.token_ids[: seq.num_prompt_tokens] == request["prompt"]
        assert seq.output_token_ids == output[: seq.num_output_tokens]
        if seq in aborted:
            assert seq.finish_reason == "abort"
        else:
            assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (output, finish_reason, stop_reason)
        assert len(seq.group.metrics.token_times) == seq.num_output_tokens
    assert world.manager.num_free_blocks == num_blocks
    assert world.manager.block_tables == {}
    assert sum(seq.group.metrics.num_preemptions for seq in world.sequences) == world.scheduler.queues.num_preemptions


# Who runs, and how much


def test_without_requests_there_is_nothing_to_do():
    world = World()
    assert not world.scheduler.has_unfinished()
    assert world.step() == Schedule()


def test_a_prompt_runs_at_once_and_then_a_token_a_step():
    world = World()
    prompt = [1] * 6
    world.add(prompt, max_tokens=3)
    assert [work(world.step()) for _ in range(3)] == [[(0, 0, 6)], [(0, 6, 1)], [(0, 7, 1)]]
    assert not world.scheduler.has_unfinished()
    assert prompt == [1] * 6


def test_a_long_prompt_runs_in_chunks_of_the_budget_and_only_the_last_samples():
    world = World(budget=4)
    seq = world.add([1] * 10, max_tokens=2)
    seen = [[(w.start, w.num_tokens, bool(w.samplers)) for w in work_of(world.step())] for _ in range(4)]
    assert seen == [[(0, 4, False)], [(4, 4, False)], [(8, 2, True)], [(10, 1, True)]]
    assert seq.finished


def test_decodes_come_first_in_the_batch_and_chunks_share_what_budget_is_left():
    world = World(budget=6, caching=False)
    world.add([1] * 9, max_tokens=4)
    assert work(world.step()) == [(0, 0, 6)]
    world.add([2], max_tokens=4)
    world.add([3] * 9, max_tokens=4)
    assert work(world.step()) == [(1, 0, 1), (0, 6, 3), (2, 0, 2)]
    assert work(world.step()) == [(0, 9, 1), (1, 1, 1), (2, 2, 4)]


def test_running_sequences_come_before_waiting_ones():
    world = World(budget=4)
    world.add([1] * 8, max_tokens=4)
    world.step()
    world.add([2] * 2, max_tokens=4)
    assert work(world.step()) == [(0, 4, 4)]
    assert queue(world) == [1]
    assert work(world.step()) == [(0, 8, 1), (1, 0, 2)]


def test_a_budget_spent_on_running_sequences_admits_nobody():
    world = World(budget=2, caching=False)
    for token in (1, 2):
        world.add([token], max_tokens=3)
    world.step()
    world.add([3], max_tokens=3)
    assert work(world.step()) == [(0, 1, 1), (1, 1, 1)]
    assert work(world.step()) == [(0, 2, 1), (1, 2, 1)]
    assert work(world.step()) == [(2, 0, 1)]


def test_no_more_than_max_num_seqs_run():
    world = World(max_num_seqs=2)
    for token in range(3):
        world.add([token] * 2, max_tokens=2 + token)
    world.step()
    assert (running(world), queue(world)) == ([0, 1], [2])
    world.step()
    assert (running(world), queue(world)) == ([1], [2])
    world.step()
    assert (running(world), queue(world)) == ([2], [])


def test_a_request_that_fits_does_not_overtake_an_older_one_that_does_not():
    world = World(num_blocks=4, block_size=2)
    world.add([1] * 4, max_tokens=3)
    world.step()
    world.add([2] * 6, max_tokens=2)
    world.add([3], max_tokens=2)
    world.step()
    assert (running(world), queue(world)) == ([0], [1, 2])


def test_a_request_is_admitted_when_the_whole_of_its_prompt_fits_not_its_first_chunk():
    world = World(num_blocks=4, block_size=2, budget=2, caching=False)
    world.add([1, 1], max_tokens=2)
    world.step()
    world.add([2] * 6, max_tokens=2)
    assert work(world.step()) == [(0, 2, 1)]
    assert queue(world) == [1]
    assert work(world.step()) == [(1, 0, 2)]


def test_blocks_shared_with_a_running_sequence_count_as_there():
    world = World(num_blocks=4, block_size=2)
    world.add([1, 1, 1, 1, 2], max_tokens=3)
    world.step()
    world.add([1, 1, 1, 1, 3], max_tokens=3)
    assert work(world.step()) == [(0, 5, 1), (1, 4, 1)]


def test_cached_blocks_that_nobody_uses_count_once():
    world = World(num_blocks=4, block_size=2)
    world.add([1, 1, 1, 1, 2], max_tokens=1)
    world.run()
    world.add([5, 5, 5], max_tokens=2)
    world.step()
    assert len(world.manager.lookup([1, 1, 1, 1, 3])) == 2
    world.add([1, 1, 1, 1, 3], max_tokens=1)  # two cached blocks and one more, of two that can be handed out
    world.step()
    assert (running(world), queue(world)) == ([], [2])
    assert work(world.step()) == [(2, 4, 1)]


# Preemption


def crowd(*prompts, num_blocks, **params) -> World:
    """A world of blocks of one token whose pool the given prompts fill."""
    world = World(num_blocks, block_size=1, caching=params.pop("caching", False), **params)
    for prompt in prompts:
        world.add(prompt, max_tokens=4)
    return world


def test_the_youngest_is_preempted_and_runs_again_from_its_tokens():
    world = crowd([1, 1, 1], [2, 2, 2], num_blocks=6)
    world.step()
    young = world.sequences[1]
    schedule = world.step()
    assert work(schedule) == [(0, 3, 1)]
    assert preempted(schedule) == [young]
    assert (young.group.status, young.num_computed_tokens, young.num_tokens) == (Status.WAITING, 0, 4)
    assert queue(world) == [1]
    assert work(world.step()) == [(0, 4, 1)]
    assert world.sequences[0].finished
    assert work(world.step()) == [(1, 0, 4)]
    assert (young.group.metrics.num_preemptions, world.scheduler.queues.num_preemptions) == (1, 1)


def test_the_preempted_go_before_those_who_never_ran_and_keep_their_order():
    world = crowd([0] * 4, [1], [2], [3], num_blocks=7, budget=7)
    world.step()
    assert (running(world), queue(world)) == ([0, 1, 2, 3], [])
    late = world.add([9])
    world.step()
    assert (running(world), queue(world)) == ([0, 1], [2, 3, late.seq_id])
    world.schedule()
    assert (running(world), queue(world)) == ([0], [1, 2, 3, late.seq_id])


def test_no_more_are_preempted_than_needed():
    world = crowd([0], [1], [2, 2, 2, 2], num_blocks=6)
    world.step()
    schedule = world.step()
    assert [seq.seq_id for seq in preempted(schedule)] == [2]
    assert work(schedule) == [(0, 1, 1), (1, 1, 1)]


def test_a_sequence_gives_up_its_own_blocks_when_it_is_the_youngest():
    world = crowd([0] * 3, [1] * 3, num_blocks=7)
    world.step()
    schedule = world.step()
    assert work(schedule) == [(0, 3, 1)]
    assert [seq.seq_id for seq in preempted(schedule)] == [1]


def test_a_chunk_that_waits_for_budget_can_be_preempted():
    world = crowd([0] * 2, [1] * 4, num_blocks=6, budget=3)
    assert work(world.step()) == [(1, 0, 1), (0, 0, 2)]
    assert work(world.step()) == [(0, 2, 1), (1, 1, 2)]
    schedule = world.step()
    assert work(schedule) == [(0, 3, 1)]
    assert [seq.seq_id for seq in preempted(schedule)] == [1]
    world.run()


def test_what_a_preempted_sequence_wrote_is_found_when_it_runs_again():
    world = World(num_blocks=5, block_size=2)
    world.add([1, 1, 1, 1], max_tokens=5)
    world.add([2, 2, 2, 2], max_tokens=3)
    world.step()
    assert [seq.seq_id for seq in preempted(world.step())] == [1]
    while queue(world):
        schedule = world.step()
    assert work(schedule)[-1] == (1, 2, 3), "one block of two was evicted, the head is still there"


# The prefix cache


def test_a_prompt_seen_before_is_computed_from_its_last_block_on():
    world = World()
    world.add([1] * 9, max_tokens=1)
    world.run()
    again = world.add([1] * 9, max_tokens=1)
    assert work(world.step()) == [(1, 8, 1)]
    assert again.group.num_cached_tokens == 8
    other = world.add([1] * 9, max_tokens=1, salt="bob")
    assert work(world.step()) == [(2, 0, 9)]
    assert other.group.num_cached_tokens == 0


def test_a_prompt_of_whole_blocks_computes_its_last_block_again():
    world = World()
    world.add([1] * 8, max_tokens=1)
    world.run()
    world.add([1] * 8, max_tokens=1)
    assert work(world.step()) == [(1, 4, 4)]


def test_blocks_are_shared_the_step_after_they_are_written():
    world = World()
    world.add([1] * 9, max_tokens=4)
    # It arrives at the same time and waits a step for what it need not compute again; the one behind it waits, too.
    together = world.add([1] * 9, max_tokens=4)
    behind = world.add([2] * 9, max_tokens=4)
    assert work(world.step()) == [(0, 0, 9)]
    after = world.add([1] * 9, max_tokens=4)
    assert work(world.step()) == [(0, 9, 1), (1, 8, 1), (3, 8, 1), (2, 0, 9)]
    assert [seq.group.num_cached_tokens for seq in (together, behind, after)] == [8, 0, 8]


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([1] * 3 + [2] + [1] * 5, {}),
        ([1] * 4, {}),  # its last token has to be computed anyway
        ([1] * 9, {"prompt_logprobs": 0}),
        ([1] * 9, {"salt": "another"}),
    ],
    ids=["another block", "no whole block before the last token", "prompt log-probabilities", "another salt"],
)
def test_who_can_not_share_what_is_being_computed_does_not_wait_for_it(prompt, params):
    world = World()
    world.add([1] * 9, max_tokens=4)
    world.add(prompt, max_tokens=4, **params)
    assert work(world.step()) == [(0, 0, 9), (1, 0, len(prompt))]


def test_a_prompt_in_chunks_is_followed_chunk_by_chunk():
    world = World(budget=8)
    world.add([1] * 12 + [2] * 4, max_tokens=4)
    world.add([1] * 12 + [3] * 4, max_tokens=4)
    assert work(world.step()) == [(0, 0, 8)]
    assert work(world.step()) == [(0, 8, 8)]
    assert work(world.step()) == [(0, 16, 1), (1, 12, 4)]


def test_cached_tokens_are_those_of_the_first_time_it_ran():
    world = World(num_blocks=5, block_size=2)
    world.add([1, 1, 1, 1], max_tokens=5)
    young = world.add([2, 2, 2, 2], max_tokens=3)
    world.run()
    assert young.group.metrics.num_preemptions == 1
    assert world.manager.num_hit_tokens > 0, "its blocks were found when it ran again"
    assert young.group.num_cached_tokens == 0


def test_a_request_for_prompt_logprobs_computes_its_whole_prompt():
    world = World()
    world.add([1] * 9, max_tokens=1)
    world.run()
    seq = world.add([1] * 9, max_tokens=1, prompt_logprobs=0)
    assert work(world.step()) == [(1, 0, 9)]
    assert seq.group.num_cached_tokens == 0


def test_what_a_request_for_prompt_logprobs_wrote_can_be_shared():
    world = World()
    world.add([1] * 9, max_tokens=1, prompt_logprobs=5)
    world.run()
    world.add([1] * 9, max_tokens=1)
    assert work(world.step()) == [(1, 8, 1)]


def test_blocks_are_sent_once_and_those_the_step_fills_are_not_cleared():
    world = World()
    a = world.add([1] * 9, max_tokens=4)
    batch = world.step().batch
    table = list(world.manager.block_tables[a.seq_id])
    assert len(table) == 3
    assert batch.blocks == [BlockUpdate(a.row, 0, table)]
    assert batch.cleared == table[2:]
    b = world.add([1] * 9, max_tokens=1)
    batch = world.schedule().batch
    other = world.manager.block_tables[b.seq_id]
    assert other[:2] == table[:2]
    assert batch.blocks == [BlockUpdate(b.row, 0, other)]
    assert batch.cleared == other[2:], "those found in the cache are not cleared"
    assert batch.rows == [a.row, b.row]


def test_a_block_that_a_decode_begins_is_sent_and_cleared():
    world = World()
    seq = world.add([1] * 6, max_tokens=8)
    world.step()
    assert [(b.blocks, b.cleared) for b in (world.step().batch for _ in range(2))] == [([], [])] * 2
    batch = world.step().batch
    new = world.manager.block_tables[seq.seq_id][2:]
    assert (batch.blocks, batch.cleared) == ([BlockUpdate(seq.row, 2, new)], new)


# Endings


def counting(token_ids, seed):
    return token_ids[-1] + 1


@pytest.mark.parametrize(
    ("params", "output", "finish_reason", "stop_reason"),
    [
        ({}, [11, 12, 13, 14, 15, 16], "length", None),
        ({"max_tokens": 1}, [11], "length", None),
        ({"max_tokens": None, "limit": 5}, [11, 12, 13], "length", None),
        ({"max_tokens": 2, "limit": 5}, [11, 12], "length", None),
        ({"max_tokens": 4, "limit": 5}, [11, 12, 13], "length", None),
        ({"eos": [13]}, [11, 12, 13], "stop", None),
        ({"eos": [14, 12]}, [11, 12], "stop", None),
        ({"eos": [13], "ignore_eos": True}, [11, 12, 13, 14, 15, 16], "length", None),
        ({"stop_token_ids": [14, 13]}, [11, 12, 13], "stop", 13),
        ({"stop_token_ids": [13], "ignore_eos": True}, [11, 12, 13], "stop", 13),
        ({"stop_token_ids": [13], "eos": [13]}, [11, 12, 13], "stop", None),
        ({"stop_token_ids": [13], "eos": [13], "ignore_eos": True}, [11, 12, 13], "stop", 13),
        ({"stop_token_ids": [10]}, [11, 12, 13, 14, 15, 16], "length", None),
        ({"eos": [12], "min_tokens": 2}, [11, 12], "stop", None),
        ({"eos": [12], "min_tokens": 3}, [11, 12, 13, 14, 15, 16], "length", None),
        ({"eos": [12, 14], "min_tokens": 3}, [11, 12, 13, 14], "stop", None),
        ({"stop_token_ids": [12, 14], "min_tokens": 3}, [11, 12, 13, 14], "stop", 14),
        ({"max_tokens": 3, "eos": [13]}, [11, 12, 13], "stop", None),
        ({"max_tokens": 3, "stop_token_ids": [13]}, [11, 12, 13], "stop", 13),
        ({"max_tokens": 3, "min_tokens": 3, "limit": 4}, [11, 12], "length", None),
    ],
    ids=str,
)
def test_a_request_ends_where_its_parameters_say(params, output, finish_reason, stop_reason):
    world = World(model=counting)
    seq = world.add([9, 10], **{"max_tokens": 6} | params)
    world.run()
    assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (output, finish_reason, stop_reason)
    assert (seq.finished, seq.token_ids[: seq.num_prompt_tokens]) == (True, [9, 10])
    assert world.manager.num_free_blocks == 64


def test_a_prompt_that_ends_in_a_stop_token_goes_on():
    world = World(model=counting)
    seq = world.add([9, 10], eos=[10], stop_token_ids=[9], max_tokens=2)
    world.run()
    assert seq.output_token_ids == [11, 12]


def test_each_sequence_gets_the_token_that_was_sampled_for_it():
    world = World(budget=5, caching=False, model=counting)
    prompts = [[100] * 6, [200], [300] * 2, [400]]
    for prompt in prompts:
        world.add(prompt, max_tokens=3)
    world.run()
    for seq, (first, *_) in zip(world.sequences, prompts, strict=True):
        assert seq.output_token_ids == [first + 1, first + 2, first + 3]


def test_logprobs_of_sampled_tokens_are_kept_and_summed():
    world = World()
    seq = world.add([1, 2], max_tokens=2, logprobs=1)
    for token, logprob in ((7, -0.5), (8, -1.25)):
        schedule = world.schedule()
        world.scheduler.advance(schedule)
        world.scheduler.update(schedule, BatchResult([token], {0: {token: (logprob, 1), 3: (-2.0, 2)}}))
    assert seq.logprobs == [{7: (-0.5, 1), 3: (-2.0, 2)}, {8: (-1.25, 1), 3: (-2.0, 2)}]
    assert seq.cumulative_logprob == -1.75


def test_finishing_a_running_sequence_frees_its_blocks():
    world = World(num_blocks=8, caching=False)
    world.add([1] * 9, max_tokens=4)
    kept = world.add([2] * 5, max_tokens=4)
    world.step()
    assert world.manager.num_free_blocks == 3
    world.finish(world.sequences[0], "stop", "a stop string")
    assert world.manager.num_free_blocks == 6
    assert (world.sequences[0].finish_reason, world.sequences[0].stop_reason) == ("stop", "a stop string")
    assert work(world.step()) == [(kept.seq_id, 5, 1)]


def test_aborting_a_waiting_sequence_takes_it_out_of_the_queue():
    world = World(max_num_seqs=1)
    for token in range(3):
        world.add([token], max_tokens=2)
    world.step()
    world.finish(world.sequences[1], "abort")
    assert (world.sequences[1].group.status, world.sequences[1].finish_reason) == (Status.FINISHED, "abort")
    assert queue(world) == [2]
    world.run()
    assert world.sequences[2].finish_reason == "length"
    assert world.sequences[1].output_token_ids == []


def test_aborting_a_preempted_sequence_frees_nothing_twice():
    world = crowd([1, 1], [2, 2], num_blocks=5)
    world.step()
    assert world.step().preempted
    world.finish(world.sequences[1], "abort")
    assert queue(world) == []
    world.run()
    assert world.manager.num_free_blocks == 5


def test_aborting_during_a_step_drops_its_token_and_no_other():
    world = World(model=counting)
    first, second = world.add([1] * 5, max_tokens=2), world.add([20], max_tokens=2)
    schedule = world.schedule()
    world.finish(first, "abort")
    world.update(schedule)
    assert first.output_token_ids == []
    assert world.manager.lookup([1] * 5) == [], "what an aborted step wrote is not in the cache"
    world.run()
    assert second.output_token_ids == [21, 22]


# Metrics


def test_metrics_have_the_times_in_order_and_one_per_token():
    world = World(max_num_seqs=1)
    first, second = world.add([1, 2], max_tokens=3), world.add([3, 4], max_tokens=2)
    world.step()
    assert first.group.metrics.first_scheduled_time is not None and len(first.group.metrics.token_times) == 1
    waiting = second.group.metrics
    assert (waiting.first_scheduled_time, waiting.time_in_queue, waiting.finished_time) == (None, None, None)
    assert (waiting.first_token_time, waiting.time_to_first_token) == (None, None)
    world.run()
    for seq, tokens in ((first, 3), (second, 2)):
        m = seq.group.metrics
        times = [m.arrival_time, m.first_scheduled_time, *m.token_times, m.finished_time]
        assert len(times) == tokens + 3 and times == sorted(times)
        assert m.time_in_queue == m.first_scheduled_time - m.arrival_time
        assert m.first_token_time == m.token_times[0]
        assert m.time_to_first_token == m.token_times[0] - m.arrival_time
    assert second.group.metrics.first_scheduled_time >= first.group.metrics.finished_time


def test_a_preemption_keeps_the_first_scheduled_time_and_the_tokens():
    world = crowd([1, 1, 1], [2, 2, 2], num_blocks=6)
    world.step()
    metrics = world.sequences[1].group.metrics
    scheduled, tokens = metrics.first_scheduled_time, list(metrics.token_times)
    assert world.step().preempted and len(tokens) == 1
    world.run()
    assert metrics.num_preemptions == 1
    assert metrics.first_scheduled_time == scheduled
    assert metrics.token_times[:1] == tokens and len(metrics.token_times) == 3
    assert world.sequences[0].group.metrics.num_preemptions == 0


def test_a_chunk_that_samples_nothing_has_no_token_time():
    world = World(budget=4)
    seq = world.add([1] * 6, max_tokens=1)
    world.step()
    assert seq.group.metrics.token_times == []
    world.step()
    assert len(seq.group.metrics.token_times) == 1


# Rows of the worker's table


def test_a_sequence_is_sent_once_and_after_that_only_what_changes():
    world = World()
    seq = world.add([1, 2, 3], max_tokens=4)
    first = world.step().batch
    assert first.new == [NewSequence(seq.row, [1, 2, 3], 3, 0, seq.settings)]
    for _ in range(3):
        batch = world.step().batch
        assert (batch.new, batch.forks, batch.tokens, batch.rows) == ([], [], [], first.rows)
    assert seq.finished


def test_a_row_is_given_back_at_the_end_and_used_again():
    world = World(max_num_seqs=1)
    first, second = world.add([1], max_tokens=1), world.add([2, 3], max_tokens=1)
    batch = world.step().batch
    assert (first.row, first.num_sent_blocks) == (None, 0)
    again = world.step().batch
    assert again.rows == batch.rows
    assert [new.token_ids for new in again.new] == [[2, 3]]
    assert second.row is None
    assert world.scheduler.writer.free_rows == [0]


def test_an_aborted_sequence_gives_back_its_row():
    world = World(max_num_seqs=2)
    a, b = world.add([1], max_tokens=4), world.add([2], max_tokens=4)
    world.step()
    row = a.row
    world.finish(a, "abort")
    assert a.row is None and world.scheduler.writer.free_rows == [row]
    world.check_rows()
    c = world.add([3], max_tokens=4)
    world.step()
    assert c.row == row != b.row


def test_a_preempted_sequence_gives_back_its_row_and_is_sent_again_with_all_its_tokens():
    world = crowd([1, 1, 1], [2, 2, 2], num_blocks=6)
    world.step()
    young = world.sequences[1]
    output = young.output_token_ids
    assert world.step().preempted
    assert (young.row, young.num_sent_blocks) == (None, 0)
    world.step()
    batch = world.schedule().batch
    assert batch.new == [NewSequence(young.row, [2, 2, 2, *output], 3, 0, young.settings)]
    assert batch.blocks == [BlockUpdate(young.row, 0, world.manager.block_tables[young.seq_id])]


def test_siblings_fork_from_the_leaders_row_when_the_prompt_is_done():
    world = World(budget=3)
    seqs = world.add_group([1, 2, 3, 4, 5], 3, max_tokens=3)
    leader, *others = seqs
    first = world.scheduler.schedule()
    world.submit(first)
    assert (first.batch.forks, first.batch.sampled_rows) == ([], [])
    world.scheduler.advance(first)
    world.scheduler.update(first, world.results.pop(id(first)))
    second = world.scheduler.schedule()
    world.submit(second)
    assert second.batch.rows == [leader.row]
    assert second.batch.forks == [Fork(leader.row, seq.row, 5, seq.seed) for seq in others]
    assert (second.batch.counts, second.batch.sampled_from, second.samplers) == ([2], [1, 1, 1], seqs)
    world.scheduler.advance(second)
    assert [seq.num_computed_tokens for seq in seqs] == [5, 5, 5]
    world.scheduler.update(second, world.results.pop(id(second)))
    third = world.scheduler.schedule()
    world.submit(third)
    assert third.batch.forks == [] and third.batch.rows == [seq.row for seq in seqs]
    # The first two to write into the block they share get copies of it. The forked rows get their tables.
    shared = world.manager.block_tables[others[1].seq_id]
    assert [source for source, _ in third.batch.copies] == [shared[1]] * 2
    sent = {update.row: update for update in third.batch.blocks}
    assert sent[leader.row] == BlockUpdate(leader.row, 1, world.manager.block_tables[leader.seq_id][1:])
    assert sent[others[1].row] == BlockUpdate(others[1].row, 0, shared)


requests_for_several = st.fixed_dictionaries(
    {
        "prompt": st.lists(tokens, min_size=1, max_size=9),
        "num_sequences": st.integers(1, 3),
        "max_tokens": st.integers(1, 8),
        "eos": st.sampled_from([(), (4,)]),
        "salt": st.sampled_from(["", "", "a"]),
        "priority": st.sampled_from([0, 0, 1]),
        "arrival": st.integers(0, 6),
        "abort": st.none() | st.none() | st.tuples(st.integers(0, 12), st.integers(0, 2)),
    }
)


@given(
    num_blocks=st.integers(2, 10),
    block_size=st.integers(1, 4),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 10),
    caching=st.sampled_from([True, True, False]),
    num_host_blocks=st.sampled_from([0, 4, 20]),
    mode=st.sampled_from([None, None, "swap", "recompute"]),
    overlap=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (1,), (4,), (None, 3), (None, 1, 6, 6)]),
    asked=st.lists(requests_for_several, min_size=1, max_size=5),
)
@settings(max_examples=examples(400), deadline=None)
def test_what_batches_say_is_all_that_a_worker_needs_to_know(
    num_blocks, block_size, max_num_seqs, budget, caching, num_host_blocks, mode, overlap, windows, asked
):
    num_blocks *= len(windows)
    world = World(num_blocks, block_size, max_num_seqs, budget, caching, fake_model, num_host_blocks, mode, windows)
    needs = BlockNeeds(windows, block_size, budget)
    pool = needs.longest(num_blocks, 40)  # the tokens of the longest sequence
    groups: list[list[Sequence]] = [[] for _ in asked]
    aborted = set()
    for step in count():
        assert step < 2000, "no progress"
        for index, request in enumerate(asked):
            if request["arrival"] == step:
                prompt = request["prompt"] = request["prompt"][: pool - 1]
                longest = min(pool, len(prompt) + request["max_tokens"])
                most = min(request["num_sequences"], max_num_seqs)
                while most > 1 and needs.of([longest] * most, len(prompt)) > num_blocks:
                    most -= 1
                request["num_sequences"] = most
                params = {name: request[name] for name in ("max_tokens", "eos", "salt", "priority")}
                groups[index] = world.add_group(prompt, most, limit=pool, **params)
            if request["abort"] is not None and request["abort"][0] == step and groups[index]:
                seq = groups[index][request["abort"][1] % len(groups[index])]
                if not seq.finished:
                    world.finish(seq, "abort")
                    aborted.add(seq)
                    world.check_rows()
        if step > 6 and not world.scheduler.has_unfinished() and not (world.in_flight and world.in_flight.sequences):
            break
        world.step_ahead()
        if not overlap:
            world.complete()
    for seqs, request in zip(groups, asked, strict=True):
        for seq in seqs:
            output, finish_reason, _ = alone(request["prompt"], pool, seq.seed, **{
                name: request[name] for name in ("max_tokens", "eos")
            })  # fmt: skip
            if seq in aborted:
                assert seq.output_token_ids == output[: seq.num_output_tokens]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (output, finish_reason)
    assert world.manager.num_free_blocks == num_blocks
    assert len(world.manager.host.free_blocks) == num_host_blocks


# Windows


def held(world: World, seq: Sequence) -> list[int]:
    """How many blocks a sequence has for the layers of each kind."""
    manager = world.manager
    table = manager.block_tables[seq.seq_id]
    return [sum(block != NO_BLOCK for block in table[kind :: manager.num_kinds]) for kind in range(manager.num_kinds)]


def test_a_sequence_keeps_the_blocks_that_windows_reach():
    world = World(num_blocks=64, block_size=4, budget=12, caching=False, windows=(None, 6))
    seq = world.add([1] * 50, max_tokens=30)
    most = []
    while not seq.finished:
        schedule = world.schedule()
        most.append(held(world, seq))
        world.update(schedule)
    # Chunks of 12 tokens see 5 tokens before them: 17 tokens may begin and end in the middle of a block.
    assert most[:5] == [[3, 3], [6, 5], [9, 5], [12, 5], [13, 3]]
    assert max(window for _, window in most[5:]) == 3 and most[-1][0] == 20
    assert world.manager.num_free_blocks == 64


def test_a_pool_that_holds_only_the_windows_of_a_request_is_enough():
    """All layers have a window: the sequence is much longer than the pool."""
    num_blocks = BlockNeeds((6,), 4, 8).of([1000])
    assert num_blocks == 5
    world = World(num_blocks, block_size=4, budget=8, windows=(6,))
    seq = world.add([1, 2, 3] * 20, limit=1000, max_tokens=100)
    world.run()
    assert seq.num_output_tokens == 100 and world.scheduler.queues.num_preemptions == 0


def test_a_prefix_is_found_if_the_blocks_are_left_that_its_next_token_sees():
    world = World(num_blocks=40, block_size=4, budget=64, windows=(None, 6))
    prompt = [1, 2, 3, 4] * 5
    world.add(prompt, max_tokens=1)
    world.run()
    other = world.add([*prompt, 0], max_tokens=9)
    schedule = world.schedule()
    assert work(schedule) == [(1, 20, 1)]
    assert held(world, other) == [6, 3], "15 to 20 are in three blocks"
    world.update(schedule)
    world.run()


# A step ahead: scheduled before the last step's tokens are known


def ahead(world: World) -> Schedule:
    """Schedule a step and submit it, its tokens unknown."""
    schedule = world.scheduler.schedule()
    world.scheduler.advance(schedule)
    check_blocks(world.manager)
    return schedule


def sampled(*ids: int) -> BatchResult:
    return BatchResult(list(ids))


def test_a_token_in_flight_counts_and_is_appended_when_it_is_known():
    world = World()
    a, b = world.add([1, 2, 3]), world.add([4, 5])
    first = ahead(world)
    assert [(seq.token_ids, seq.num_tokens, seq.num_in_flight) for seq in (a, b)] == [([1, 2, 3], 4, 1), ([4, 5], 3, 1)]
    second = world.scheduler.schedule()
    assert work(second) == [(0, 3, 1), (1, 2, 1)]
    assert world.scheduler.update(first, sampled(8, 9)) == [a, b]
    world.scheduler.advance(second)
    assert (a.token_ids, b.token_ids) == ([1, 2, 3, 8], [4, 5, 9])
    assert (a.num_tokens, b.num_tokens) == (5, 4)
    assert (a.output_token_ids, b.output_token_ids) == ([8], [9])


def test_what_a_sequence_samples_after_its_end_is_dropped():
    world = World()
    a, b = world.add([1, 2, 3], eos=[7]), world.add([4, 5])
    first = ahead(world)
    second = world.scheduler.schedule()
    world.scheduler.update(first, sampled(7, 9))
    world.scheduler.advance(second)
    assert (a.token_ids, a.num_tokens) == ([1, 2, 3, 7], 4)
    assert world.scheduler.update(second, sampled(8, 10)) == [b]
    assert (a.token_ids, a.finish_reason) == ([1, 2, 3, 7], "stop")
    assert b.token_ids == [4, 5, 9, 10]
    assert len(a.group.metrics.token_times) == 1
    assert world.manager.block_tables.keys() == {b.seq_id}
    world.check_rows()


def test_a_row_given_back_by_one_step_is_taken_by_the_next_while_the_last_is_in_flight():
    world = World(max_num_seqs=1, model=counting)
    a = world.add([1, 2, 3], eos=[4])
    b = world.add([7], max_tokens=2)
    world.step_ahead()
    runs_once_too_often = world.step_ahead()
    assert a.finished and runs_once_too_often.sequences == [a]
    batch = world.step_ahead().batch
    assert [new.token_ids for new in batch.new] == [[7]] and batch.rows == runs_once_too_often.batch.rows
    while world.scheduler.has_unfinished():
        world.step_ahead()
    assert (a.output_token_ids, b.output_token_ids) == ([4], [8, 9])


def test_the_last_token_allowed_is_waited_for_and_nothing_runs_beyond_it():
    world = World(num_blocks=1)
    seq = world.add([1, 2], max_tokens=2, ignore_eos=True)
    first = ahead(world)
    second = world.scheduler.schedule()
    world.scheduler.update(first, sampled(5))
    world.scheduler.advance(second)
    assert world.scheduler.schedule() == Schedule()
    assert world.scheduler.has_unfinished()
    world.scheduler.update(second, sampled(6))
    assert (seq.output_token_ids, seq.finish_reason) == ([5, 6], "length")
    assert not world.scheduler.has_unfinished()


def test_an_abort_forgets_the_token_in_flight():
    world = World()
    seq = world.add([1, 2])
    schedule = ahead(world)
    assert seq.num_in_flight == 1
    world.finish(seq, "abort")
    assert (seq.token_ids, seq.num_in_flight) == ([1, 2], 0)
    assert world.scheduler.update(schedule, sampled(5)) == []
    assert (seq.token_ids, seq.num_in_flight) == ([1, 2], 0)


def test_a_preempted_sequence_still_gets_its_token():
    world = World(num_blocks=3, block_size=2)
    world.add([1, 2, 3])
    b = world.add([4])
    first = ahead(world)  # a prompt of one token comes before longer ones
    second = world.scheduler.schedule()
    world.scheduler.update(first, sampled(9, 8))
    world.scheduler.advance(second)
    third = world.scheduler.schedule()  # both need another block, and there is none
    assert third.preempted == [b.group]
    assert b.num_in_flight == 1
    world.scheduler.update(second, sampled(10, 11))
    world.scheduler.advance(third)
    assert b.token_ids == [4, 9, 11]
    assert b.num_in_flight == 0
    assert world.waiting == [b]


def test_a_token_in_flight_enters_the_prefix_cache_when_it_is_known():
    world = World(block_size=2)
    world.add([1, 2, 3])
    first = ahead(world)
    second = world.scheduler.schedule()  # fills the block of 3 and the unknown token
    assert len(world.manager.lookup([1, 2, 3, 8, 5])) == 1
    world.scheduler.update(first, sampled(8))
    world.scheduler.advance(second)
    assert [p.tokens for p in world.manager.lookup([1, 2, 3, 8, 5])] == [(1, 2), (3, 8)]


def test_siblings_with_tokens_in_flight_do_not_count_as_equal():
    world = World()
    seqs = world.add_group([1, 2], 2)
    schedule = ahead(world)
    assert [(seq.token_ids, seq.num_in_flight) for seq in seqs] == [([1, 2], 1)] * 2
    group = world.scheduler.running.pop()
    preempt(world.scheduler.queues, group, schedule, None, reason="blocks")
    check_blocks(world.manager)
    world.scheduler.preemption_mode = "recompute"
    again = world.scheduler.schedule()
    assert again.sequences == [], "it waits for its tokens"
    world.scheduler.update(schedule, sampled(5, 6))
    world.scheduler.advance(again)
    assert [seq.token_ids for seq in seqs] == [[1, 2, 5], [1, 2, 6]]
    again = world.scheduler.schedule()
    assert group.shared_len == 2
    assert [new.token_ids for new in again.batch.new] == [[1, 2, 5]]
    assert again.samplers == [], "the tokens that they fork at are known"
