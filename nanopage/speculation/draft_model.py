"""Speculative decoding with a draft model: ModelDrafter lets a small model guess the next tokens of sequences.

    known tokens ─▶ draft model, k steps ─▶ draft of k tokens ─▶ one step of the model checks them (drafts.py)

The draft model has an executor and a pool of blocks of its own. It samples with the sequence's settings, seed and
positions, so its noise is the noise of the model's samples. Where both models agree on the probabilities, they agree on
the token, at any temperature.

K and V of a draft stay in the pool. K and V of accepted tokens are right, so the next draft begins after them, and
overwrites the rest. The contents of the pool depend on the tokens alone, so a preemption or a fork of the sequence
changes nothing here. If blocks run out, the sequences that have waited longest for a draft lose their blocks, and are
computed again.
"""

import dataclasses
import logging
import time
from dataclasses import dataclass

from nanopage.checks.speculation import SpeculativeConfig
from nanopage.config.options import EngineConfig
from nanopage.engine.block_manager import BlockManager
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import Sequence
from nanopage.outputs import StepStats
from nanopage.speculation.lookup import DraftGains, StepCosts
from nanopage.step import NO_TOKEN, Batch, BlockUpdate, Capacity, Executor, NewSequence, SamplingSettings

logger = logging.getLogger("nanopage")

CATCH_UP = 16  # most missing tokens that a draft's first step computes; longer chunks are computed before it
EXPECTED_STEP = 0.3  # time of a draft model's step, in steps of the model, before one is measured
FIRST_READ = 256  # prompt tokens that are read in a step before the time of a token is known
STEPS_TO_REPAY = 64  # steps of a sequence that share the time in which the draft model reads its prompt


@dataclass(slots=True)
class Row:
    """A sequence in the draft model's table.

    tokens: the tokens in the table: the known tokens, then the last draft.
    num_known: how many of these tokens were known when the last draft was made.
    num_computed: how many of these tokens have K and V.
    """

    row: int
    tokens: list[int]
    num_known: int = 0
    num_computed: int = 0


class ModelDrafter:
    """Proposes the drafts of a draft model (a `Drafter`, see drafts.py).

    Args:
        config: of the engine.
        executor: the draft model's executor, already started.
        held: what the executor holds. Sequences that are longer than its max_model_len get no drafts.
        vocab_size: the model's. Tokens beyond it, which are padding, are not drafted.
        same_vocab: whether the draft model has as many tokens. Otherwise it gets no settings that name tokens.
    """

    def __init__(
        self,
        config: EngineConfig,
        speculation: SpeculativeConfig,
        executor: Executor,
        held: Capacity,
        vocab_size: int,
        same_vocab: bool,
    ):
        self.config, self.executor = speculation, executor
        self.manager = BlockManager(held.num_blocks, config.block_size, windows=held.windows)
        self.max_num_tokens, self.max_model_len = config.token_budget(held.device), held.max_model_len
        self.vocab_size, self.same_vocab = vocab_size, same_vocab
        self.gains = DraftGains()
        self.learn = self.gains.learn
        self.step_costs = StepCosts()  # of the draft model's steps
        self.token_seconds = 0.0  # for reading a token of a prompt
        self.seconds = 0.0  # that drafts have taken in this step, including reading prompts
        self.reading = 0.0  # that reading prompts has taken in this step
        self.rows: dict[Sequence, Row] = {}  # the sequence that has waited longest for a draft comes first
        self.free_rows = list(range(config.max_num_seqs))
        self.works = True

    # Drafter

    def propose(self, decodes: list[Sequence], most: int, schedule: Schedule) -> dict[Sequence, list[int]]:
        times = self.gains.times_of(schedule)
        if not self.works or schedule.chunks or times is None:
            return {}
        started = time.perf_counter()
        self._forget([seq for seq in self.rows if seq.finished])
        longest = self.config.num_speculative_tokens
        rooms = {seq: min(longest, self.max_model_len - len(seq.token_ids)) for seq in decodes}
        rooms = {seq: room for seq, room in rooms.items() if room > 0}
        unread = sum(max(0, len(seq.token_ids) - self._num_valid(seq) - CATCH_UP) for seq in rooms)
        of_model = self.step_costs.of(len(rooms))
        step = of_model.plain if of_model else EXPECTED_STEP * times.plain
        once = unread * self.token_seconds / STEPS_TO_REPAY
        lengths = self.gains.choose(rooms, most, schedule, lambda length: once + length * step)
        drafts = {}
        if lengths:
            try:
                drafts = self._draft(lengths, self._most_read(times.plain))
            except Exception as error:
                logger.warning(f"the draft model failed, and makes no more drafts: {error}", exc_info=error)
                self.works = False
                self.restart()
        self.seconds = time.perf_counter() - started
        return drafts

    def observe(self, stats: StepStats) -> None:
        # A prompt is read only once, so the time for reading it says nothing about later drafts.
        self.gains.observe(stats, stats.seconds - self.seconds, self.seconds - self.reading)
        self.seconds = self.reading = 0.0

    def rest(self) -> None:
        self._forget(list(self.rows))
        self.executor.rest()

    def restart(self) -> None:
        self.executor.discard()
        self.seconds = self.reading = 0.0
        self.free_rows += [row.row for row in self.rows.values()]
        self.rows.clear()
        self.manager.reset()

    # Drafts

    def _most_read(self, seconds: float) -> int:
        """How many tokens of prompts one step of the engine may read: as many as take about as long as a step of the
        model, which takes `seconds`."""
        if not self.token_seconds:
            return min(FIRST_READ, self.max_num_tokens)
        return max(CATCH_UP, min(self.max_num_tokens, int(seconds / self.token_seconds)))

    def _draft(self, lengths: dict[Sequence, int], most_read: int) -> dict[Sequence, list[int]]:
        """Drafts of at most these lengths, for the sequences that the pool has blocks for. Prompts are read first, at
        most `most_read` tokens in all. A sequence whose prompt is not read to its end gets no draft yet.
        """
        drafts: dict[Sequence, list[int]] = {}
        batch = Batch()
        for seq, length in lengths.items():
            if self._enter(seq, length, batch, lengths):
                drafts[seq] = []
        batch = self._read_ahead(drafts, batch, most_read)
        while running := [seq for seq, draft in drafts.items() if len(draft) < lengths[seq]]:
            self._step(running, batch)
            for seq in running:
                row = self.rows[seq]
                draft = row.tokens[row.num_known :]
                drafts[seq] = draft
                if len(row.tokens) == row.num_computed:  # no token could be sampled
                    lengths[seq] = len(draft)
            batch = Batch()
        for seq in drafts:  # full blocks of known tokens
            row = self.rows[seq]
            known = min(row.num_computed, row.num_known)
            self.manager.register(seq.seq_id, seq.token_ids, known, seq.cache_salt)
            self.manager.slide(seq.seq_id, known - 1)  # the last known token may be computed again
        return {seq: draft for seq, draft in drafts.items() if draft}

    def _num_valid(self, seq: Sequence) -> int:
        """How many of the first tokens of a sequence have K and V. The last token is always computed again."""
        row = self.rows.get(seq)
        if row is None:
            return 0
        end, valid = min(row.num_computed, len(seq.token_ids) - 1), min(row.num_known, row.num_computed)
        valid = min(valid, end)
        while valid < end and row.tokens[valid] == seq.token_ids[valid]:
            valid += 1
        return valid

    def _enter(self, seq: Sequence, length: int, batch: Batch, kept: dict[Sequence, int]) -> bool:
        """Bring a sequence's row up to date, with blocks for a draft of `length` tokens.

        Args: kept: sequences that must not lose their blocks.
        Returns: whether there were enough rows and blocks.
        """
        manager, end = self.manager, len(seq.token_ids) + length - 1
        row = self.rows.pop(seq, None)
        if row is None:
            if not self.free_rows and not self._make_room(kept):
                return False
            row = Row(self.free_rows.pop(), [])
            prefix = manager.lookup(seq.token_ids, seq.cache_salt)
            row.num_computed = manager.allocate(seq.seq_id, prefix, len(seq.token_ids))
            new = NewSequence(row.row, [], seq.num_prompt_tokens, seq.seed, self._settings(seq.settings))
            num_sent = 0
        else:
            self.rows[seq] = row
            row.num_computed = self._num_valid(seq)
            new, num_sent = None, len(manager.block_tables[seq.seq_id])
        self.rows[seq] = row
        self.rows[seq] = self.rows.pop(seq)  # move it to the end: it has not waited
        while not manager.grow(seq.seq_id, row.num_computed, end):
            if not self._make_room(kept):
                self._forget([seq])
                return False
        table = manager.block_tables[seq.seq_id]
        if new is not None:
            new.token_ids = list(seq.token_ids)
            batch.new.append(new)
        else:
            first = max(row.num_computed, row.num_known)  # the table has the tokens before this one
            batch.tokens += [(row.row, first + i, token_id) for i, token_id in enumerate(seq.token_ids[first:])]
        if len(table) > num_sent:
            batch.blocks.append(BlockUpdate(row.row, num_sent, table[num_sent:]))
            batch.cleared += table[max(num_sent, manager.blocks_for(row.num_computed)) :]
        row.tokens, row.num_known = list(seq.token_ids), len(seq.token_ids)
        return True

    def _read_ahead(self, drafts: dict[Sequence, list[int]], batch: Batch, most: int) -> Batch:
        """Compute long chunks of known tokens, so that few are left for the first step of the drafts. Removes from
        `drafts` the sequences that have more tokens left.

        Args: batch: changes of the table, for the first step that runs. most: most tokens to compute, at least 1.
        Returns: the batch for the next step.
        """
        for seq in list(drafts):
            row = self.rows[seq]
            while (missing := row.num_known - row.num_computed) > CATCH_UP:
                if most == 0:
                    del drafts[seq]
                    break
                count, started = min(missing - 1, self.max_num_tokens, most), time.perf_counter()
                batch.rows, batch.starts, batch.counts = [row.row], [row.num_computed], [count]
                self._run(batch)
                row.num_computed += count
                most -= count
                seconds = time.perf_counter() - started
                self.reading += seconds
                each = seconds / count
                self.token_seconds = each if not self.token_seconds else 0.8 * self.token_seconds + 0.2 * each
                batch = Batch()
        return batch

    def _step(self, seqs: list[Sequence], batch: Batch) -> None:
        """Compute the missing tokens of each sequence, and sample the next one."""
        started = time.perf_counter()
        order = sorted(seqs, key=lambda seq: len(self.rows[seq].tokens) - self.rows[seq].num_computed > 1)
        total = 0
        for seq in order:
            row = self.rows[seq]
            count = len(row.tokens) - row.num_computed
            total += count
            batch.rows.append(row.row)
            batch.starts.append(row.num_computed)
            batch.counts.append(count)
            batch.sampled_from.append(total - 1)
            batch.sampled_rows.append(row.row)
        for seq, token_id in zip(order, self._run(batch), strict=True):
            row = self.rows[seq]
            row.num_computed = len(row.tokens)
            if token_id != NO_TOKEN and token_id < self.vocab_size:
                row.tokens.append(token_id)
        if total == len(seqs):
            self.step_costs.add(len(seqs), 0, time.perf_counter() - started)

    def _run(self, batch: Batch) -> list[int]:
        batch.copies = self.manager.take_copies()
        self.executor.submit(batch)
        return self.executor.result().token_ids

    def _settings(self, settings: SamplingSettings) -> SamplingSettings:
        settings = dataclasses.replace(settings, logprobs=None, prompt_logprobs=None)
        if self.same_vocab:
            return settings
        return dataclasses.replace(
            settings, logit_bias={}, allowed_token_ids=None, bad_words_token_ids=[], ending_token_ids=[]
        )

    # Rows

    def _make_room(self, kept: dict[Sequence, int]) -> bool:
        """Take the row and the blocks of the sequence that has waited longest for a draft. Returns whether one had."""
        seq = next((seq for seq in self.rows if seq not in kept), None)
        if seq is None:
            return False
        self._forget([seq])
        return True

    def _forget(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.free_rows.append(self.rows.pop(seq).row)
            self.manager.free(seq.seq_id)
