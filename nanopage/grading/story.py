"""Tells why a world fails, from what was seen of its steps."""

from collections import defaultdict
from dataclasses import dataclass, field, replace

from nanopage.grading.play import Key, Run, Seen, Step, name
from nanopage.grading.worlds import AMPLE


@dataclass(frozen=True)
class Write:
    """K and V of a token: written in which step, of which sequence, behind which tokens (itself is the last)."""

    step: int
    key: Key
    tokens: tuple[int, ...]


@dataclass
class Life:
    """A sequence since it was last admitted."""

    start: int  # step
    claimed: int  # num_computed before it had computed anything
    kept: int | None  # num_computed when it was preempted, if it was
    latest: int = 0  # num_computed after the last step
    wrote: set[int] = field(default_factory=set)  # positions


class Blocks:
    """What each place of the pool contains, if each step does what the tables say."""

    def __init__(self, size: int):
        self.size = size
        self.places: dict[tuple[int, int], list[Write]] = defaultdict(list)  # (block, offset) -> writes
        self.events: dict[int, list[str]] = defaultdict(list)  # block -> what happened to it
        self.lives: dict[Key, Life] = {}
        self.before: dict[Key, Seen] = {}
        self.copied = False  # whether a block has ever taken the place of another one

    def follow(self, step: Step) -> None:
        for key, seen in step.running.items():
            self.meet(step, key, seen)
        for key, positions in step.computed.items():
            seen, written = step.running.get(key, Seen((), 0, ())), defaultdict(list)
            if key in self.lives:
                self.lives[key].wrote.update(positions)
            for position in range(positions.start, min(positions.stop, len(seen.table) * self.size)):
                block = seen.table[position // self.size]
                written[block].append(position)
                write = Write(step.number, key, seen.token_ids[: position + 1])
                self.places[block, position % self.size].append(write)
            for block, places in written.items():
                self.events[block].append(f"step {step.number}: {name(key)} wrote {span(places)}")
        known = self.before | step.running
        for key in known.keys() - step.after.keys():
            for block in known[key].table:
                self.events[block].append(f"step {step.number}: {name(key)} gave it up")
        self.before = step.after
        for key in step.after.keys() & self.lives.keys():
            self.lives[key].latest = step.after[key].num_computed

    def meet(self, step: Step, key: Key, seen: Seen) -> None:
        """A sequence before its tokens are computed: it may be new, and some of its blocks may be."""
        old, life = self.before.get(key), self.lives.get(key)
        if begins := old is None or life is None:  # forks are seen before they run
            self.lives[key] = Life(step.number, seen.num_computed, life.latest if life else None)
        for index, block in enumerate(seen.table):
            was = old.table[index] if old and index < len(old.table) else None
            if was is None:
                verb = "began with" if begins and index * self.size < seen.num_computed else "got"
                self.events[block].append(f"step {step.number}: {name(key)} {verb} it")
            elif was != block:
                self.copied = True
                self.events[block].append(f"step {step.number}: it took the place of block {was} for {name(key)}")
                for offset in range(self.size):
                    self.places[block, offset] += self.places[was, offset][-1:]

    def first_wrong(self, key: Key, seen: Seen, end: int) -> int | None:
        """The first position before `end` whose K and V are not those of the sequence."""
        for position in range(min(end, len(seen.table) * self.size)):
            writes = self.places[seen.table[position // self.size], position % self.size]
            latest = [write.tokens for write in writes if write.step == writes[-1].step]
            if {*latest} != {seen.token_ids[: position + 1]}:
                return position
        return None

    def explain(self, key: Key, seen: Seen, position: int) -> str:
        """Why K and V of a position are not those of its sequence."""
        life, block, mine = self.lives[key], seen.table[position // self.size], seen.token_ids[: position + 1]
        writes, begin = self.places[block, position % self.size], f"{name(key)} began in step {self.lives[key].start}"
        if position >= life.claimed and position not in life.wrote:
            return f"No step computed position {position} of {name(key)}. A step must go on where the last one ended."
        held = next((write for write in reversed(writes) if write.step < life.start), None)
        if position < life.claimed and (held is None or held.tokens != mine):
            if life.kept == life.claimed:
                named = "" if life.kept % self.size else ", and a block that is evicted must lose its name"
                return (
                    f"{begin} again, after it was preempted, with num_computed={life.kept}. But its new blocks do not "
                    f"hold these tokens. Preemption must set num_computed to 0{named}."
                )
            if held is None:
                return f"{begin} with block {block}, to which nobody had written position {position}."
            other, begin = name(held.key), f"{begin} with block {block} as a part of its prefix"
            if any(write.tokens == mine for write in writes):
                return (
                    f"{begin}, but {other} had written its own tokens there in step {held.step}. A block that is "
                    "evicted must lose its name."
                )
            own = -1 - position % self.size
            if held.tokens[own:] == mine[own:]:
                return (
                    f"{begin}. {other} wrote the same tokens there, but behind other ones. The hash of a block must "
                    "contain all tokens before it."
                )
            return f"{begin}, but {other} had written other tokens there in step {held.step}."
        wrong = next((write for write in reversed(writes) if write.tokens != mine), None)
        if wrong is None:
            return f"The table of {name(key)} names block {block} in a place where it had another one."
        other = f"{name(wrong.key)} wrote its position {len(wrong.tokens) - 1} to block {block} in step {wrong.step}"
        first = position // self.size * self.size
        if (wrong.key[0] == key[0] and wrong.key != key) or wrong.tokens[:first] == mine[:first] != ():
            return f"{other}, while {name(key)} shared it. A shared block must be copied before it is written to."
        return f"{other}. The block was handed to it while the table of {name(key)} still named this block."


def span(positions: list[int] | range) -> str:
    first, last = positions[0], positions[-1]
    return f"position {first}" if first == last else f"positions {first} to {last}"


def tell(run: Run) -> str:
    """The story of a run that failed: the world, what was wrong first, the block behind it, and the likely cause."""
    failure, step, world = run.failure, run.steps[-1], run.world
    assert failure is not None
    sizes = ", ".join(f"{name}={size}" for name, size in world.sizes.items())
    lines = [f"Engine({sizes})", *(f"    {request}" for request in world.requests), ""]
    if parts := [f"{name(key)} {span(positions)}" for key, positions in step.computed.items() if positions]:
        lines.append(f"Step {step.number} computes {', '.join(parts)}.")
    lines.append(f"The first thing that is wrong, in step {failure.step}: {failure.what}")
    blocks = Blocks(world.sizes["block_size"])
    for each in (*run.steps[:-1], replace(step, after=step.running)):
        blocks.follow(each)
    block, cause = failure.block, failure.cause
    for key, seen in step.running.items():
        end = seen.num_computed + len(step.computed.get(key, ()))
        wrong = None if cause and block not in seen.table else blocks.first_wrong(key, seen, end)
        if wrong is not None and (cause or key == failure.key):
            block, cause = seen.table[wrong // blocks.size], blocks.explain(key, seen, wrong)
            lines.append(f"Block {block}, which {name(key)} reads, does not have K and V of its position {wrong}.")
            break
    if block is not None:
        lines += [f"What happened to block {block}:", *(f"    {event}" for event in blocks.events[block][-8:])]
    return "\n".join([*lines, f"Likely cause: {cause or guess(run, blocks.copied)}"])


def guess(run: Run, copied: bool) -> str:
    """Why tokens are wrong in right blocks: by what the world needs to fail, since without any of it, it passes."""
    world, key = run.world, run.failure and run.failure.key
    request = next(each for each in world.requests if key and each.request_id == key[0])
    if copied:
        return "A block took the place of a shared one. Its K and V must be copied there before the step is computed."
    if request.temperature:
        return (
            "Noise depends on what ran beside the request or before it. It must depend on the seed, the index of the "
            "answer and the position of the token, and on nothing else."
        )
    if len(world.requests) > 1:
        return "The request is right alone. A token must see its own sequence and no other."
    if world.sizes["max_num_batched_tokens"] < AMPLE["max_num_batched_tokens"]:
        return "The prompt is right in one piece. In chunks, tokens have wrong positions or see wrong tokens."
    if world.sizes["block_size"] > 1:
        return (
            "The request is right with blocks of 1. K and V of a position belong in slot "
            "block * block_size + position % block_size."
        )
    return "One request alone is wrong, with blocks of 1: look at the model and at attention, milestones 1 to 5."
