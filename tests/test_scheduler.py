"""Scheduler: whole lives of requests, with a fake model that is a function of the tokens so far."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import nanopage
from nanopage import SamplingParams
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.scheduler import Batch, Scheduler
from nanopage.request import SampledToken, Sequence, SequenceGroup, Status


def fake_model(token_ids: list[int]) -> int:
    """The next token, 0 to 4."""
    return (sum(i * token for i, token in enumerate(token_ids, 1)) * 7 + len(token_ids)) % 5


class World:
    """The engine's loop. Every step is checked against the scheduler's rules, and against what the cache holds:

    the K and V of a token depend on every token before it, so `contents` has (salt, all tokens up to it) in its slot.
    """

    def __init__(self, num_blocks=64, block_size=4, max_num_seqs=8, budget=64, caching=True, model=fake_model):
        self.manager = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(self.manager, max_num_seqs, budget)
        self.contents = [[None] * block_size for _ in range(num_blocks)]
        self.model = model
        self.sequences: list[Sequence] = []

    def add(self, prompt: list[int], *, eos=(), limit: int | None = None, salt="", **params) -> Sequence:
        seq = Sequence(
            len(self.sequences),
            f"request {len(self.sequences)}",
            prompt,
            SamplingParams(**params),
            eos_token_ids=frozenset(eos),
            max_total_tokens=limit or self.manager.num_blocks * self.manager.block_size,
            cache_salt=salt,
        )
        self.sequences.append(seq)
        seq.group = SequenceGroup([seq])
        self.scheduler.add(seq.group)
        return seq

    def finish(self, seq: Sequence, *reason) -> None:
        self.scheduler.finish(seq.group, seq, *reason)

    @property
    def running(self) -> list[Sequence]:
        return [seq for group in self.scheduler.running for seq in group.seqs]

    @property
    def waiting(self) -> list[Sequence]:
        return [seq for group in self.scheduler.waiting for seq in group.seqs]

    def step(self) -> Batch:
        batch = self.schedule()
        self.update(batch)
        return batch

    def run(self, steps: int = 10_000) -> None:
        """Step until every request has ended. Every step takes the oldest request forward: see `check_work`."""
        while self.scheduler.has_unfinished():
            assert steps, "not done in time"
            self.step()
            steps -= 1

    def schedule(self) -> Batch:
        running = self.running
        tables = {seq_id: list(table) for seq_id, table in self.manager.block_tables.items()}
        batch = self.scheduler.schedule()
        self.manager.check_invariants()
        self.check_queues()
        self.check_work(batch)
        self.check_preemptions(batch, running, tables)
        self.check_admissions(batch, running)
        self.check_cache(batch, tables)
        return batch

    def update(self, batch: Batch) -> None:
        sampled = [SampledToken(self.model(w.seq.token_ids)) for w in batch.sequences if w.samplers]
        self.scheduler.advance(batch)
        self.scheduler.update(batch, sampled)
        self.manager.check_invariants()
        self.check_queues()

    def check_queues(self):
        running, waiting = self.running, self.waiting
        ids = [seq.seq_id for seq in [*running, *waiting]]
        assert ids == sorted(ids), "running ones are the oldest, and both queues are in order of arrival"
        assert len(running) <= self.scheduler.max_num_seqs
        assert self.manager.block_tables.keys() == {seq.seq_id for seq in running}
        assert all(seq.group.status is Status.RUNNING for seq in running)
        assert all(seq.group.status is Status.WAITING and seq.num_computed_tokens == 0 for seq in waiting)

    def check_work(self, batch):
        work = sorted(batch.sequences, key=lambda w: w.seq.seq_id)
        running, budget = self.running, self.scheduler.max_num_batched_tokens
        assert bool(work) == self.scheduler.has_unfinished(), "a step without work"
        assert [w.seq for w in work] == running[: len(work)], "the oldest run first, and only running ones"
        assert batch.num_tokens == sum(w.num_tokens for w in work)
        for w in work:
            assert w.start == w.seq.num_computed_tokens
            assert w.num_tokens == min(w.seq.num_tokens - w.start, budget) > 0
            assert w.samplers == ([w.seq] if w.start + w.num_tokens == w.seq.num_tokens else [])
            assert w.block_table == self.manager.block_tables[w.seq.seq_id]
            assert len(w.block_table) == self.manager.blocks_for(w.start + w.num_tokens)
            budget -= w.num_tokens
        assert budget >= 0
        assert len(work) == len(running) or budget == 0, "a running sequence was left out"
        order = [(w.num_tokens > 1, -w.start if w.num_tokens == 1 else 0, w.seq.seq_id) for w in batch.sequences]
        assert order == sorted(order), "single tokens come first, the longest sequence first"

    def check_preemptions(self, batch, running, tables):
        gone = [seq for seq in running if seq not in self.running]
        assert preempted(batch) == gone[::-1] == running[len(running) - len(gone) :][::-1], "not the youngest"
        assert self.waiting[: len(gone)] == gone, "not at the front of the queue"
        if gone:
            last, kept = gone[0], running[: -len(gone)]
            shared = {block for seq in kept for block in tables[seq.seq_id]}
            given_back = len(set(tables[last.seq_id]) - shared)
            wanted = self.manager.blocks_for(last.num_tokens) - len(tables[last.seq_id])
            assert self.manager.num_free_blocks - given_back < max(wanted, 0), "preempted without need"

    def check_admissions(self, batch, running):
        scheduler, manager = self.scheduler, self.manager
        admitted = [seq for seq in self.running if seq not in running]
        if batch.preempted:
            assert not admitted
        elif (
            scheduler.waiting
            and len(scheduler.running) < scheduler.max_num_seqs
            and batch.num_tokens < scheduler.max_num_batched_tokens
        ):
            seq = self.waiting[0]
            prefix = [] if seq.params.prompt_logprobs is not None else manager.lookup(seq.token_ids, seq.cache_salt)
            shared = sum(manager.ref_counts[entry.block] > 0 for entry in prefix)
            short = manager.blocks_for(seq.num_tokens) - shared > manager.num_free_blocks
            assert short or self.computes_next_block_of(seq, len(prefix), batch), "kept waiting without need"

    def computes_next_block_of(self, seq, num_cached_blocks, batch):
        """Whether the batch writes, in a chunk of a prompt, the block that `seq` would have to compute first."""
        if seq.params.prompt_logprobs is not None or not self.manager.enable_prefix_caching:
            return False
        first = num_cached_blocks * self.manager.block_size
        end = first + self.manager.block_size
        written = {
            (w.seq.cache_salt, tuple(w.seq.token_ids[:end]))
            for w in batch.sequences
            if w.num_tokens > 1 and w.start < end <= w.start + w.num_tokens
        }
        return end < seq.num_tokens and (seq.cache_salt, tuple(seq.token_ids[:end])) in written

    def check_cache(self, batch, tables):
        """Clear the new blocks, read all there is to read, write the step's tokens."""
        block_size = self.manager.block_size
        for block in batch.new_blocks:
            self.contents[block] = [None] * block_size
        new = []
        for w in batch.sequences:
            held = len(tables.get(w.seq.seq_id, ())) or w.start // block_size
            new += w.block_table[held:]
        assert sorted(batch.new_blocks) == sorted(new) and len(set(new)) == len(new)
        for w in batch.sequences:
            slots = [slot for block in w.block_table for slot in self.contents[block]]
            expected = [(w.seq.cache_salt, tuple(w.seq.token_ids[: i + 1])) for i in range(w.start)]
            assert slots[: w.start] == expected, "a cache that holds something else"
        for w in batch.sequences:
            for position in range(w.start, w.start + w.num_tokens):
                block = w.block_table[position // block_size]
                assert self.manager.ref_counts[block] == 1, "written while another sequence reads it"
                held = (w.seq.cache_salt, tuple(w.seq.token_ids[: position + 1]))
                self.contents[block][position % block_size] = held


def work(batch: Batch) -> list[tuple[int, int, int]]:
    """(sequence, first position, number of tokens), in the batch's order."""
    return [(w.seq.seq_id, w.start, w.num_tokens) for w in batch.sequences]


def queue(world: World) -> list[int]:
    return [seq.seq_id for seq in world.waiting]


def running(world: World) -> list[int]:
    return [seq.seq_id for seq in world.running]


def preempted(batch: Batch) -> list[Sequence]:
    return [seq for group in batch.preempted for seq in group.seqs]


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
    assert "Batch(sequences=[]" in done.stdout


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


def alone(seq: Sequence, prompt: list[int], limit: int) -> tuple[list[int], str, int | None]:
    """What a request gets with nobody beside it: (output, finish_reason, stop_reason)."""
    output: list[int] = []
    while True:
        token = fake_model(prompt + output)
        output.append(token)
        if len(output) >= seq.params.min_tokens:
            if token in seq.eos_token_ids and not seq.params.ignore_eos:
                return output, "stop", None
            if token in seq.params.stop_token_ids:
                return output, "stop", token
        if len(output) >= (seq.params.max_tokens or limit) or len(prompt + output) >= limit:
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
    prompts, aborted = [], set()

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
                prompts.append(list(prompt))
        elif kind == "abort":
            abort(detail)
        elif kind == "abort during the step":
            batch = world.schedule()
            abort(detail)
            world.update(batch)
        else:
            for _ in range(detail):
                world.step()
    # Each step runs at least one token of the oldest request: no world needs more than this.
    world.run(steps=sum(seq.max_total_tokens for seq in world.sequences))
    for seq, prompt in zip(world.sequences, prompts, strict=True):
        output, finish_reason, stop_reason = alone(seq, prompt, pool)
        assert seq.prompt_token_ids == prompt
        assert seq.output_token_ids == output[: seq.num_output_tokens]
        if seq in aborted:
            assert seq.finish_reason == "abort"
        else:
            assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (output, finish_reason, stop_reason)
        assert len(seq.group.metrics.token_times) == seq.num_output_tokens
    assert world.manager.num_free_blocks == num_blocks
    assert world.manager.block_tables == {}
    assert sum(seq.group.metrics.num_preemptions for seq in world.sequences) == world.scheduler.num_preemptions


# Who runs, and how much


def test_without_requests_there_is_nothing_to_do():
    world = World()
    assert not world.scheduler.has_unfinished()
    assert world.step() == Batch()


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
    seen = [[(w.start, w.num_tokens, bool(w.samplers)) for w in world.step().sequences] for _ in range(4)]
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
    batch = world.step()
    assert work(batch) == [(0, 3, 1)]
    assert preempted(batch) == [young]
    assert (young.group.status, young.num_computed_tokens, young.num_tokens) == (Status.WAITING, 0, 4)
    assert queue(world) == [1]
    assert work(world.step()) == [(0, 4, 1)]
    assert world.sequences[0].finished
    assert work(world.step()) == [(1, 0, 4)]
    assert (young.group.metrics.num_preemptions, world.scheduler.num_preemptions) == (1, 1)


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
    batch = world.step()
    assert [seq.seq_id for seq in preempted(batch)] == [2]
    assert work(batch) == [(0, 1, 1), (1, 1, 1)]


def test_a_sequence_gives_up_its_own_blocks_when_it_is_the_youngest():
    world = crowd([0] * 3, [1] * 3, num_blocks=7)
    world.step()
    batch = world.step()
    assert work(batch) == [(0, 3, 1)]
    assert [seq.seq_id for seq in preempted(batch)] == [1]


def test_a_chunk_that_waits_for_budget_can_be_preempted():
    world = crowd([0] * 2, [1] * 4, num_blocks=6, budget=3)
    assert work(world.step()) == [(1, 0, 1), (0, 0, 2)]
    assert work(world.step()) == [(0, 2, 1), (1, 1, 2)]
    batch = world.step()
    assert work(batch) == [(0, 3, 1)]
    assert [seq.seq_id for seq in preempted(batch)] == [1]
    world.run()


def test_what_a_preempted_sequence_wrote_is_found_when_it_runs_again():
    world = World(num_blocks=5, block_size=2)
    world.add([1, 1, 1, 1], max_tokens=5)
    world.add([2, 2, 2, 2], max_tokens=3)
    world.step()
    assert [seq.seq_id for seq in preempted(world.step())] == [1]
    while queue(world):
        batch = world.step()
    assert work(batch)[-1] == (1, 2, 3), "one block of two was evicted, the head is still there"


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


def test_new_blocks_are_reported_once_and_hits_are_not_new():
    world = World()
    world.add([1] * 9, max_tokens=4)
    batch = world.step()
    table = list(batch.sequences[0].block_table)
    assert batch.new_blocks == table and len(table) == 3
    world.add([1] * 9, max_tokens=1)
    batch = world.step()
    assert [w.block_table[:2] for w in batch.sequences] == [table[:2]] * 2
    assert batch.new_blocks == batch.sequences[1].block_table[2:]
    assert world.step().new_blocks == []


# Endings


def counting(token_ids):
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
    assert (seq.finished, seq.prompt_token_ids) == (True, [9, 10])
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
        batch = world.schedule()
        world.scheduler.advance(batch)
        world.scheduler.update(batch, [SampledToken(token, {token: (logprob, 1), 3: (-2.0, 2)})])
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
    batch = world.schedule()
    world.finish(first, "abort")
    world.update(batch)
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


# A step ahead: scheduled before the last step's tokens are known


def ahead(world: World) -> Batch:
    """Schedule a step and send it off, its tokens unknown."""
    batch = world.scheduler.schedule()
    world.scheduler.advance(batch)
    world.manager.check_invariants()
    return batch


def tokens(*ids: int) -> list[SampledToken]:
    return [SampledToken(token_id) for token_id in ids]


def test_a_token_on_its_way_is_read_by_its_placeholder_and_put_in_its_place():
    world = World()
    a, b = world.add([1, 2, 3]), world.add([4, 5])
    first = ahead(world)
    assert (a.token_ids, b.token_ids) == ([1, 2, 3, -1], [4, 5, -2])  # rows of the samples, from 1
    assert (a.output_token_ids, b.output_token_ids) == ([], [])
    second = world.scheduler.schedule()
    assert work(second) == [(0, 3, 1), (1, 2, 1)]
    assert world.scheduler.update(first, tokens(8, 9)) == [a, b]
    world.scheduler.advance(second)
    assert (a.token_ids, b.token_ids) == ([1, 2, 3, 8, -1], [4, 5, 9, -2])
    assert (a.output_token_ids, b.output_token_ids) == ([8], [9])


def test_what_a_sequence_samples_after_its_end_is_dropped():
    world = World()
    a, b = world.add([1, 2, 3], eos=[7]), world.add([4, 5])
    first = ahead(world)
    second = world.scheduler.schedule()
    world.scheduler.update(first, tokens(7, 9))
    world.scheduler.advance(second)
    assert a.token_ids == [1, 2, 3, 7]
    assert world.scheduler.update(second, tokens(8, 10)) == [b]
    assert (a.token_ids, a.finish_reason) == ([1, 2, 3, 7], "stop")
    assert b.token_ids == [4, 5, 9, 10]
    assert len(a.group.metrics.token_times) == 1
    assert world.manager.block_tables.keys() == {b.seq_id}


def test_the_last_token_allowed_is_waited_for_and_nothing_runs_beyond_it():
    world = World(num_blocks=1)
    seq = world.add([1, 2], max_tokens=2, ignore_eos=True)
    first = ahead(world)
    second = world.scheduler.schedule()
    world.scheduler.update(first, tokens(5))
    world.scheduler.advance(second)
    assert world.scheduler.schedule() == Batch()
    assert world.scheduler.has_unfinished()
    world.scheduler.update(second, tokens(6))
    assert (seq.output_token_ids, seq.finish_reason) == ([5, 6], "length")
    assert not world.scheduler.has_unfinished()


def test_an_abort_forgets_the_token_on_its_way():
    world = World()
    seq = world.add([1, 2])
    batch = ahead(world)
    world.finish(seq, "abort")
    assert seq.token_ids == [1, 2]
    assert world.scheduler.update(batch, tokens(5)) == []
    assert seq.token_ids == [1, 2]


def test_a_preempted_sequence_still_gets_its_token():
    world = World(num_blocks=3, block_size=2)
    world.add([1, 2, 3])
    b = world.add([4])
    first = ahead(world)  # a prompt of one token comes before longer ones
    second = world.scheduler.schedule()
    world.scheduler.update(first, tokens(9, 8))
    world.scheduler.advance(second)
    third = world.scheduler.schedule()  # both need another block, and there is none
    assert third.preempted == [b.group]
    assert b.pending
    world.scheduler.update(second, tokens(10, 11))
    world.scheduler.advance(third)
    assert b.token_ids == [4, 9, 11]
    assert not b.pending
    assert world.waiting == [b]


def test_placeholders_never_enter_the_prefix_cache():
    world = World(block_size=2)
    world.add([1, 2, 3])
    first = ahead(world)
    second = world.scheduler.schedule()  # fills the block of 3 and the unknown token
    world.scheduler.update(first, tokens(8))
    world.scheduler.advance(second)
    assert [p.tokens for p in world.manager.lookup([1, 2, 3, 8, 5])] == [(1, 2), (3, 8)]
    assert len(world.manager.lookup([1, 2, 3, -1, 5])) == 1


def test_siblings_with_tokens_on_their_way_do_not_count_as_equal():
    world = World()
    seqs = [Sequence(i, "request", [1, 2], SamplingParams(n=2), seed=i) for i in range(2)]
    group = SequenceGroup(seqs)
    world.scheduler.add(group)
    batch = ahead(world)
    assert [seq.token_ids for seq in seqs] == [[1, 2, -1], [1, 2, -2]]
    world.scheduler._preempt(world.scheduler.running.pop(), batch)
    world.manager.check_invariants()
    world.scheduler.preemption_mode = "recompute"
    again = world.scheduler.schedule()
    assert group.shared_len == 2
    world.scheduler.update(batch, tokens(5, 6))
    world.scheduler.advance(again)
    assert [seq.token_ids for seq in seqs] == [[1, 2, 5], [1, 2, 6]]
