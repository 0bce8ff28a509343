"""Runs a world on an engine, watches its steps, and stops at the first thing that is wrong."""

import traceback
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from nanopage.grading.worlds import World

Key = tuple[str, int]  # request id, index of the answer
Answers = dict[Key, list[int | None]]  # None: any token is right
MOST_STEPS = 300  # without a new token: more than the longest prompts take, token by token


@dataclass(frozen=True)
class Seen:
    """A sequence at one moment."""

    token_ids: tuple[int, ...]
    num_computed: int
    table: tuple[int, ...]


@dataclass
class Step:
    number: int
    running: dict[Key, Seen] = field(default_factory=dict)  # when `compute` is called
    computed: dict[Key, range] = field(default_factory=dict)  # positions
    after: dict[Key, Seen] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """What is wrong, and why: two sentences. Of wrong tokens the cause is still to be found, and empty."""

    step: int
    what: str
    cause: str = ""
    key: Key | None = None
    block: int | None = None


@dataclass
class Run:
    world: World
    steps: list[Step] = field(default_factory=list)
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    failure: Failure | None = None


def play(package: ModuleType, model_dir: Path, world: World, expected: Answers) -> Run:
    """Run a world on `package.engine.Engine`."""
    run, number, last = Run(world, [Step(0)]), 0, 0
    try:
        engine = package.engine.Engine(model_dir, **world.sizes)
        watch(engine, run)
        while engine.has_unfinished() or any(request.arrival >= number for request in world.requests):
            run.steps.append(step := Step(number))
            for request in world.requests:
                if request.arrival == number:
                    given = {
                        name: value for name, value in asdict(request).items() if name not in ("arrival", "abort_at")
                    }
                    engine.add_request(**given | {"prompt_ids": list(request.prompt_ids)})
                if request.abort_at == number:
                    engine.abort(request.request_id)
            new = engine.step() if engine.has_unfinished() else {}
            step.after, last = see(engine), number if new or not engine.has_unfinished() else last
            run.failure = judge(run, new, expected) or count(engine, world, step)
            if number - last > MOST_STEPS:
                what = f"{MOST_STEPS} steps have given no token, and has_unfinished() is still true."
                run.failure = Failure(number, what, "A sequence never ends, or one that waits is never admitted.")
            if run.failure:
                return run
            number += 1
    except (Exception, KeyboardInterrupt) as error:  # Ctrl-C: in a loop without end
        run.failure = raised(error, number, Path(package.__path__[0]))
        return run
    aborted = {request.request_id for request in world.requests if request.abort_at is not None}
    for key, wanted in expected.items():
        if (got := len(run.tokens.get(key, []))) < len(wanted) and key[0] not in aborted:
            what = f"{name(key)} has ended with {got} tokens, and should have {len(wanted)}."
            run.failure = Failure(
                number, what, "An answer ends with max_tokens, a stop id or abort, and not otherwise."
            )
    return run


def watch(engine: Any, run: Run) -> None:
    """Look at the sequences whenever `compute(batch)` is called."""
    compute = engine.compute

    def watched(batch):
        step, ends = run.steps[-1], [(seq, seq.num_computed + count) for seq, count in batch]
        step.running = see(engine)
        step.computed = {(seq.request_id, seq.index): range(seq.num_computed, end) for seq, end in ends}
        return compute(batch)

    engine.compute = watched


def see(engine: Any) -> dict[Key, Seen]:
    return {
        (seq.request_id, seq.index): Seen(tuple(seq.token_ids), seq.num_computed, tuple(seq.block_table))
        for seq in engine.running
    }


def judge(run: Run, new: dict[Key, list[int]], expected: Answers) -> Failure | None:
    """Compare the new tokens of a step with those expected."""
    number, requests = run.steps[-1].number, {request.request_id: request for request in run.world.requests}
    for key, tokens in new.items():
        got = run.tokens.setdefault(key, [])
        if key not in expected:
            return Failure(number, f"{key} gets tokens.", "No request has this id and so many answers.", key)
        abort_at, max_tokens = requests[key[0]].abort_at, requests[key[0]].max_tokens
        if abort_at is not None and number >= abort_at:
            cause = "abort must end all answers of a request, whether they run or wait."
            return Failure(number, f"{name(key)} gets a token after abort({key[0]!r}).", cause, key)
        for token in tokens:
            place, wanted = len(got), expected[key]
            if place == len(wanted):
                what = f"{name(key)} must end after {place} tokens, with {got[-1]}, and gets {token}."
                stop = f"A stop id must end an answer{', also as its first token' if place == 1 else ''}."
                return Failure(number, what, "max_tokens must end an answer." if place == max_tokens else stop, key)
            if wanted[place] not in (None, token):
                what = f"token {place + 1} of {name(key)} is {token} and must be {wanted[place]}."
                return Failure(number, what, "", key)
            got.append(token)
    return None


def count(engine: Any, world: World, step: Step) -> Failure | None:
    """Check the numbers of a step: tokens, sequences, blocks."""
    tokens, running = sum(map(len, step.computed.values())), max(len(step.running), len(step.after))
    for counted, limit in ((tokens, "max_num_batched_tokens"), (running, "max_num_seqs")):
        if counted > world.sizes[limit]:
            what = f"{limit} is {world.sizes[limit]}, and the step has {counted}."
            return Failure(step.number, what, f"The scheduler exceeds {limit}.")
    owners = Counter(block for seen in step.after.values() for block in seen.table)
    for block in sorted({*owners, *engine.blocks.ref_counts}):
        if (counted := engine.blocks.ref_counts.get(block, 0)) != owners[block]:
            what = f"block {block} is in {owners[block]} tables, and ref_counts says {counted}."
            fewer = "A block was given to a table without being counted, or was dropped twice."
            more = "A sequence that ended did not drop its blocks."
            return Failure(step.number, what, fewer if counted < owners[block] else more, block=block)
    free, num_blocks = engine.blocks.num_free, world.sizes["num_blocks"]
    if free + len(owners) != num_blocks:
        what = f"{len(owners)} blocks are in tables and num_free is {free}, but there are {num_blocks} blocks."
        more = "A block was freed twice, or is in use and free at the same time."
        fewer = "A block was lost: it is in no table, and not free."
        return Failure(step.number, what, more if free + len(owners) > num_blocks else fewer)
    return None


def raised(error: BaseException, number: int, folder: Path) -> Failure:
    """An exception, with the last line of the package that it came through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent == folder]
    cause = "the engine refuses a request that it can run, or lacks a part of the interface."
    if frames:
        last = frames[-1]
        cause = f"{last.name} in {Path(last.filename).name}, line {last.lineno}: {last.line}"
    return Failure(number, f"{type(error).__name__}: {error}", cause)


def name(key: Key) -> str:
    return f"{key[0]}[{key[1]}]"
