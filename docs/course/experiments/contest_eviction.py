"""Your eviction policy beside nanopage's and one that knows the future, on three traces.

python docs/course/experiments/contest_eviction.py                # with exercises/eviction.py
python docs/course/experiments/contest_eviction.py --solutions    # with ours
"""

import random
from types import ModuleType

import contest
import routers

from nanopage.engine.block_manager import BlockManager

SIZE = 4  # tokens of a block
NUM_BLOCKS = 40

Trace = list[list[int]]
"""Requests, each with the names of its blocks. A name stands for a block and all blocks before it."""


def documents() -> Trace:
    """Chats of three applications, each with a beginning of 4 blocks, and long documents that nobody sends twice."""
    rng, trace = random.Random(0), []
    for number in range(300):
        own = 1000 + 100 * number
        if rng.random() < 0.3:
            trace.append([*range(own, own + 24)])
        else:
            beginning = 10 * rng.randrange(3)
            trace.append([*range(beginning, beginning + 4), own, own + 1])
    return trace


def fashions() -> Trace:
    """Questions about 8 subjects of 4 blocks each. After every 100 questions, the subjects change."""
    rng, trace = random.Random(0), []
    for number in range(300):
        subject = 10 * (8 * (number // 100) + rng.randrange(8))
        trace.append([*range(subject, subject + 4), 100_000 + number])
    return trace


def conversations() -> Trace:
    """The trace of chapter 8. A block stands for 512 tokens."""
    return [request.hash_ids for request in routers.conversations().requests]


TRACES = {"many long documents": documents, "fashions": fashions, "conversations": conversations}


class Foresight(BlockManager):
    """Evicts the block that is needed last (Belady, 1966). No real policy knows which one that is."""

    def __init__(self, num_blocks: int, block_size: int, trace: Trace):
        super().__init__(num_blocks, block_size)
        self.now = 0
        self.uses: dict[int, list[int]] = {}  # block -> the requests that have it, the next one last
        for number, names in reversed([*enumerate(trace)]):
            for name in names:
                self.uses.setdefault(name, []).append(number)

    def allocate(self, seq_id: int, *args, **kwargs) -> int:
        self.now = seq_id
        return super().allocate(seq_id, *args, **kwargs)

    def _next_use(self, block: int) -> float:
        uses = self.uses[self.prefixes.cached[block].tokens[0]]
        while uses and uses[-1] <= self.now:
            uses.pop()
        return uses[-1] if uses else float("inf")

    def _take_block(self) -> int:
        if not self._free:
            # Of blocks that nobody needs again, the least recently used: no block before those that continue it.
            self.prefixes.cached.move_to_end(max(self.prefixes.cached, key=self._next_use), last=False)
        return super()._take_block()


def hit_share(manager: BlockManager, trace: Trace) -> float:
    """Serve the requests of a trace, one after the other. Returns the percentage of their blocks that was cached."""
    for number, names in enumerate(trace):
        tokens = [name for name in names for _ in range(SIZE)] + [number]  # the last token is computed in any case
        hit = manager.allocate(number, manager.lookup(tokens), len(tokens))
        if not manager.grow(number, hit, len(tokens)):
            raise RuntimeError("the pool is too small")
        manager.register(number, tokens, len(tokens))
        manager.free(number)
    return 100 * manager.num_hit_tokens / (SIZE * sum(map(len, trace)))


def run(exercise: ModuleType) -> None:
    rows = {}
    for name, make in TRACES.items():
        trace = make()
        rows[name] = {
            "least recent": hit_share(BlockManager(NUM_BLOCKS, SIZE), trace),
            "yours": hit_share(exercise.FrequencyBlockManager(NUM_BLOCKS, SIZE), trace),
            "knows the future": hit_share(Foresight(NUM_BLOCKS, SIZE, trace), trace),
        }
    contest.show(f"blocks found in the cache, in percent, with a pool of {NUM_BLOCKS} blocks", rows, ".1f")


if __name__ == "__main__":
    contest.main("eviction", run)
