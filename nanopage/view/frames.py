"""The data of the live view: frames of an engine, and recordings of frames.

A *key* frame has the whole state: requests, queues, and the contents of blocks. A *step* frame has what a step did and
what has changed since the previous frame. `Picture` (picture.py) applies frames, as the page does (view/view.html). A
recording is a file of JSON lines, one frame per line, that begins with a key frame. `nanopage serve` and `bench.py
serve --record` make the same frames.

Frames have no text of a prompt or an output, and no ids of requests: requests are numbered in order of arrival.

Fields of every frame:

    frame       "key", "step" or "plan" (a step that waits for a click has been decided; only in the live view)
    time        seconds since the first frame
    step        calls of `LLMEngine.step` since the first frame
    why         [kind, request or null, sentence] of `explain`, with numbers as names of requests
    queues      waiting, running and swapped requests in order; in a step frame, only if they have changed
    requests    of each request that is new: number, prompt tokens, most tokens, completions, whether it is a beam
                search, priority, tokens, computed tokens, preemptions, and, if it has items, [position, length] of each

Of a key frame also:

    version, model, block_size, num_blocks, num_host_blocks, max_num_seqs
    date        as 2026-11-27, in UTC; `nanopage`: the version that has made the frame. Older recordings lack both
    tables      [[sequence, request, blocks]]
    host        the same, of host memory
    cached      cached blocks, the next to be evicted first

Of a step frame also:

    seconds     the duration of the whole call of `step`
    phases      seconds of PHASES
    tokens      of TOKENS
    batches     [number, submitted, arrived or null] of the batches that the step has submitted or taken the results of,
                or that are in flight; times as in `time`
    size        sequences in the submitted batch
    chunks      [request, sequence, start, count] of each sequence that computes several tokens
    progress    [request, tokens, computed tokens, preemptions] of the requests that have changed
    tables      [sequence, request, first, blocks] of each table that has changed: its blocks from `first` on
    host        [sequence, request, blocks] of each table in host memory that is new
    gone        sequences that no longer have a table on the device; `host_gone`: the same in host memory
    cached      blocks that have become cached; `uncached`: blocks that no longer are
    copies      [from, to] of blocks; `evicted`, `hits`: blocks that the prefix cache has lost, and has given
    swaps       [blocks swapped out, blocks swapped in]
    encoder     entries, bytes, queries and hits of the encoder cache, if the model has one and results have come
    events      [kind, request] of RequestEvents
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import astuple
from typing import IO

import msgspec

from nanopage import __version__
from nanopage.engine.engine import LLMEngine
from nanopage.engine.schedule import Schedule
from nanopage.engine.sequence import SequenceGroup
from nanopage.outputs import StepStats
from nanopage.step import NO_BLOCK
from nanopage.view.explain import make_sentences, told
from nanopage.view.picture import VERSION, Frame

PHASES = ("schedule", "prepare", "model", "sample", "wait", "update", "output")
TOKENS = ("prefill", "decode", "output", "cached")
MAX_ENDED = 256  # ended requests whose numbers are kept


class Frames:
    """Makes frames of one engine. Use it only between the engine's steps, on the thread that steps it.

    Begin with `key`. Then call `step` after every step, as a listener of the engine does.

    Args:
        model: its name.
        begin: the `time` of the present moment.
    """

    def __init__(self, engine: LLMEngine, model: str, begin: float = 0.0):
        self.engine, self.model = engine, model
        self.started = time.perf_counter() - begin
        self.num_steps = 0
        self._num_requests = 0
        self._numbers: dict[str, int] = {}  # request_id -> number
        self._ended: set[str] = set()  # request_ids that may come again

    def key(self) -> Frame:
        """The whole state. Step frames go on from here."""
        scheduler = self.engine.scheduler
        manager = scheduler.block_manager
        self._owners: dict[int, int] = {}  # seq_id -> request, of unfinished requests
        self._forking: set[int] = set()  # sequences of requests with several sequences
        self._shown: dict[str, tuple[int, int, int]] = {}  # request_id -> the last result of `_progress`
        requests = self._add_new(sorted(self._groups(), key=lambda group: group.order))
        self._queues = self._read_queues()
        self._tables = {seq_id: _held(table) for seq_id, table in manager.block_tables.items()}
        self._host = dict(manager.host.tables)
        self._cached = set(manager.prefixes.cached)
        return {
            "frame": "key",
            "version": VERSION,
            "time": self.now(),
            "step": self.num_steps,
            "model": self.model,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "nanopage": __version__,
            "block_size": manager.block_size,
            "num_blocks": manager.num_blocks,
            "num_host_blocks": manager.host.num_blocks,
            "max_num_seqs": scheduler.admission.max_num_seqs,
            "why": self._sentences(),
            "queues": self._queues,
            "requests": requests,
            "tables": [[seq_id, self._owners[seq_id], table] for seq_id, table in self._tables.items()],
            "host": [[seq_id, self._owners[seq_id], _held(table)] for seq_id, table in self._host.items()],
            "cached": list(manager.prefixes.cached),
        }

    def plan(self) -> Frame:
        """A frame for a step that has been decided. Requests may have come or gone since the last frame."""
        changes = self._changes_of_requests(True, set())
        return {"frame": "plan", "time": self.now(), "step": self.num_steps, "why": self._sentences()} | changes

    def step(self, stats: StepStats) -> Frame:
        """A frame of what a step did. Returns a key frame instead if the blocks have changed in a way that a step frame
        cannot express, such as after an exception."""
        self.num_steps += 1
        events = []
        for event in stats.events:
            number = self._number(event.request_id) if event.kind == "added" else self._numbers[event.request_id]
            events.append([event.kind, number])
            if event.kind == "finished":
                self._ended.add(event.request_id)
                self._shown.pop(event.request_id, None)
        last = self.engine.last
        submitted = last.scheduled if last.scheduled is not None and told(last.scheduled, "submitted") else None
        changed = {event.request_id for event in stats.events}
        frame: Frame = {
            "frame": "step",
            "time": self.now(),
            "step": self.num_steps,
            "why": self._sentences(),
            "seconds": round(stats.seconds, 6),
            "phases": [round(getattr(stats, f"{phase}_seconds"), 6) for phase in PHASES],
            "tokens": [getattr(stats, f"{kind}_tokens") for kind in TOKENS],
            "batches": [self._batch(batch) for batch in (*last.completed, *last.in_flight)],
            "swaps": [stats.swapped_out, stats.swapped_in],
            "events": events,
        }
        frame |= self._changes_of_requests(bool(stats.events), changed)
        if stats.encoder_cache is not None and stats.encoder_cache.queries:
            frame["encoder"] = astuple(stats.encoder_cache)
        if submitted is not None:
            frame["size"] = len(submitted.sequences)
            frame["chunks"] = self._chunks(submitted)
            frame["copies"] = submitted.batch.copies
        hits = {
            self._numbers[event.request_id]: event.cached_tokens // self.engine.scheduler.block_manager.block_size
            for event in stats.events
            if event.cached_tokens
        }
        frame |= self._changes_of_blocks({self._numbers[request_id] for request_id in changed}, hits, submitted)
        if len(self._ended) > 2 * MAX_ENDED:
            self._forget_ended()
        if len(self._cached) != self.engine.scheduler.block_manager.num_cached_blocks:
            return self.key()
        return frame

    # Requests

    def _groups(self) -> Iterator[SequenceGroup]:
        scheduler = self.engine.scheduler
        for queue in (scheduler.waiting, scheduler.running, scheduler.swapped):
            yield from queue

    def _number(self, request_id: str) -> int:
        """The number of an unfinished request. A new request gets a new number."""
        if request_id not in self._numbers or request_id in self._ended:
            self._ended.discard(request_id)
            self._num_requests += 1
            self._numbers.pop(request_id, None)  # so that the dictionary is in order
            self._numbers[request_id] = self._num_requests
        return self._numbers[request_id]

    def _forget_ended(self) -> None:
        """Forget ended requests, except the last ones, whose tokens may still be in flight."""
        for ended in [request_id for request_id in self._numbers if request_id in self._ended][:-MAX_ENDED]:
            del self._numbers[ended]
            self._ended.remove(ended)
        self._owners = {seq.seq_id: self._numbers[group.request_id] for group in self._groups() for seq in group.seqs}
        self._forking &= self._owners.keys()

    def _sentences(self) -> list[list]:
        """Those of `explain`, without any about a request that had ended before the first frame: it has no number."""
        numbers = self._numbers
        sentences = make_sentences(self.engine, lambda request_id: str(numbers.get(request_id, "?")))
        known = [each for each in sentences if each.request_id is None or each.request_id in numbers]
        return [[kind, numbers.get(request_id or ""), text] for kind, request_id, text in known]

    def _read_queues(self) -> list[list[int]]:
        scheduler = self.engine.scheduler
        queues = (scheduler.waiting, scheduler.running, scheduler.swapped)
        return [[self._numbers[group.request_id] for group in queue] for queue in queues]

    def _add_new(self, groups: Iterable[SequenceGroup]) -> list[list]:
        """Those of `groups` that have not been shown, as `requests` of a frame."""
        new = []
        for group in groups:
            if group.request_id not in self._shown:
                number, now = self._number(group.request_id), _progress(group)
                self._shown[group.request_id] = now
                self._owners |= {seq.seq_id: number for seq in group.seqs}
                if len(group.seqs) > 1:
                    self._forking.update(seq.seq_id for seq in group.seqs)
                is_beam_search = group.beam_search is not None
                first, most = group.seqs[0], self.engine.max_model_len
                lengths = [first.num_prompt_tokens, min(first.max_total_tokens, most)]
                items = [[[item.position, item.length] for item in group.items]] if group.items else []
                new.append([number, *lengths, len(group.seqs), is_beam_search, group.priority, *now, *items])
        return new

    def _changes_of_requests(self, moved: bool, changed: set[str]) -> Frame:
        """New requests, the queues, and the progress of requests.

        Args:
            moved: whether requests may have come, gone or changed their queue.
            changed: ids of requests to which something happened.
        """
        frame: Frame = {}
        if moved:
            frame["requests"] = self._add_new(self._groups())
            if (queues := self._read_queues()) != self._queues:
                self._queues = frame["queues"] = queues
        scheduler, shown, progress = self.engine.scheduler, self._shown, []
        stopped = [g for queue in (scheduler.waiting, scheduler.swapped) for g in queue] if changed else []
        for group in (*scheduler.running, *(group for group in stopped if group.request_id in changed)):
            request_id = group.request_id
            if shown[request_id] != (now := _progress(group)):
                shown[request_id] = now
                progress.append((self._numbers[request_id], *now))
        return frame | {"progress": progress}

    # Blocks

    def _changes_of_blocks(self, changed: set[int], hits: dict[int, int], submitted: Schedule | None) -> Frame:
        """How the block tables and the prefix cache have changed.

        Args:
            changed: requests whose tables may have changed anywhere, not only at their ends; besides requests with
                several sequences.
            hits: request -> how many blocks the prefix cache has given it.
        """
        manager, sent = self.engine.scheduler.block_manager, self._tables
        touched: set[int] = set()  # blocks that may have become cached, or no longer are
        frame: Frame = {"tables": [], "hits": []}
        tables = manager.block_tables
        if submitted is not None:
            frame["evicted"] = [block for (blocks,) in told(submitted, "evicted") for block in blocks]
            touched.update(frame["evicted"])
            for update in submitted.batch.blocks:
                touched.update(update.blocks)
        slides = manager.windows != (None,)  # tables then change at their beginnings, too
        moved: set[int] | None = None  # sequences, besides those of `changed`, whose tables the step may have changed
        if submitted is not None and not self.engine.scheduler.queues.suspects:  # after a failure, any may have changed
            moved = self._moved(submitted, slides)
            if not changed:
                tables = {seq_id: tables[seq_id] for seq_id in moved if seq_id in tables}
        for seq_id, table in tables.items():
            owner, before = self._owners[seq_id], sent.get(seq_id, [])
            if moved is not None and seq_id in sent and owner not in changed and seq_id not in moved:
                continue
            found = hits.pop(owner, 0) * manager.num_kinds
            frame["hits"] += _held(table[:found])
            table = _held(table) if slides else table
            first = min(len(before), len(table))
            anywhere = slides or owner in changed or seq_id in self._forking
            if anywhere or (first and before[first - 1] != table[first - 1]):
                first = next((i for i, (a, b) in enumerate(zip(before, table, strict=False)) if a != b), first)
            if first == len(before) == len(table) and seq_id in sent:
                continue
            touched.update(before[first:], table[first:])
            sent[seq_id] = list(table)
            frame["tables"].append([seq_id, owner, first, table[first:]])
        if len(sent) > len(manager.block_tables):
            frame["gone"] = [seq_id for seq_id in sent if seq_id not in manager.block_tables]
            for seq_id in frame["gone"]:
                touched.update(sent.pop(seq_id))
        host, shown = manager.host.tables, self._host
        if host or shown:
            new = [seq_id for seq_id, table in host.items() if shown.get(seq_id) is not table]
            frame["host"] = [[seq_id, self._owners[seq_id], _held(host[seq_id])] for seq_id in new]
            frame["host_gone"] = [seq_id for seq_id in shown if seq_id not in host]
            self._host = dict(host)
        if touched:
            cached = {block for block in touched if block in manager.prefixes.cached}
            frame["cached"] = sorted(cached - self._cached)
            frame["uncached"] = sorted((touched & self._cached) - cached)
            self._cached.difference_update(frame["uncached"])
            self._cached.update(cached)
        return frame

    def _moved(self, submitted: Schedule, slides: bool) -> set[int]:
        """The sequences whose tables a batch has extended, or whose first blocks it may have given back, and the
        sequences of requests with several sequences."""
        batch, block_size = submitted.batch, self.engine.scheduler.block_manager.block_size
        extended = {update.row for update in batch.blocks}
        moved = self._forking | {seq.seq_id for seq, _ in submitted.drafted}
        if extended:
            moved |= {seq.seq_id for seq in submitted.sequences if seq.row in extended}
        if slides:
            moved |= {
                seq.seq_id
                for seq, start, count in zip(submitted.sequences, batch.starts, batch.counts, strict=True)
                if count > 1 or (start + count) % block_size == 0
            }
        return moved

    def _chunks(self, schedule: Schedule) -> list[list[int]]:
        batch, chunks, index = schedule.batch, [], len(schedule.sequences) - 1
        while index >= 0 and (count := batch.counts[index]) > 1:  # those with one token come first
            seq = schedule.sequences[index]
            chunks.append([self._numbers[seq.group.request_id], seq.seq_id, batch.starts[index], count])
            index -= 1
        return chunks[::-1]

    def _batch(self, schedule: Schedule) -> list:
        ((number, submitted),) = told(schedule, "submitted")
        arrived = [round(when - self.started, 6) for (when,) in told(schedule, "arrived")]
        return [number, round(submitted - self.started, 6), arrived[0] if arrived else None]

    def now(self) -> float:
        """The `time` of the present moment."""
        return round(time.perf_counter() - self.started, 6)


def _held(table: list[int]) -> list[int]:
    """The blocks of a table, without the blocks that were given back behind a window."""
    return [block for block in table if block != NO_BLOCK]


def _progress(group: SequenceGroup) -> tuple[int, int, int]:
    """(known tokens: the prompt once and the tokens of all completions; computed tokens of the first live sequence;
    preemptions)."""
    seqs = group.seqs
    if len(seqs) == 1:
        seq = seqs[0]
        return len(seq.token_ids), seq.num_computed_tokens, group.metrics.num_preemptions
    live = group.live or seqs
    tokens = seqs[0].num_prompt_tokens + sum(seq.num_output_tokens for seq in seqs if not seq.dormant)
    return tokens, live[0].num_computed_tokens, group.metrics.num_preemptions


class Recorder:
    """A listener that writes a recording of an engine's steps.

    Args:
        file: gets the lines.
        model, begin: as in Frames.

    Raises: OSError, also from the engine's `step`, once the file cannot be written.
    """

    def __init__(self, engine: LLMEngine, file: IO[bytes], model: str, begin: float = 0.0):
        self.frames, self.file = Frames(engine, model, begin), file
        self._write(self.frames.key())

    def __call__(self, stats: StepStats) -> None:
        self._write(self.frames.step(stats))

    def _write(self, frame: Frame) -> None:
        self.file.write(msgspec.json.encode(frame) + b"\n")
