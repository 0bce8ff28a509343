"""Kinds of layers: which layers share a block table, and how many blocks sequences take with several of them.

A layer with a sliding window needs only the blocks that its window still reaches. A layer without one needs all. So
layers with different windows have different block tables. One pool of blocks serves all tables, so a block must
have the same size for each: all kinds have the same number of layers, or a few less. Layers with the same window are
divided into as many kinds as that takes. vLLM does the same, and calls a kind a KV cache group.

For example, Gemma 3 270M has 15 layers with a window of 512 tokens and 3 without, in periods of 6 layers:

    layers       0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17
    kind         1  2  3  4  5  0  1  2  3  4  5  0  1  2  3  4  5  0      kind 0 has no window

A block holds 3 layers. A sequence of 32,768 tokens in blocks of 16 has 2,048 blocks of kind 0 and 33 of each other kind
while it decodes: 2,213 blocks of 3 layers. With one kind it would have 2,048 blocks of 18 layers, 5.6 times as much.

A layer may keep a state of fixed size instead of K and V, such as the last inputs of a convolution. Then the block of a
logical block holds the state after the last of its tokens that has been computed. A step reads the state that the
previous token has left and writes the state after its own last token, so a sequence needs only the newest block of such
a kind (STATE in place of a window). A full block holds the state at its end, and another sequence that begins with the
same tokens can go on from it. So states are shared, copied, swapped and evicted like K and V.

Layers of an encoder-decoder model keep K and V of all positions of the encoder as such a state, which no step changes.
Blocks are then as large as the longest sequence.

In most models, all layers are of one kind, without a window.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

MOST_KINDS = 8  # each one is a block table more in every step
STATE = -1  # in place of the window of layers that keep a state


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The kinds of layers of a model.

    windows    of each kind: how many of the last tokens its layers see, the present one included; None for all; STATE
    of_layers  the kind of each layer
    sources    the layer whose K and V each layer attends to; (): its own
    """

    windows: tuple[int | None, ...]
    of_layers: tuple[int, ...]
    sources: tuple[int, ...] = ()

    @property
    def rows(self) -> list[int]:
        """For each layer, how many layers before its source are of the same kind: its place in a block."""
        return [self.of_layers[:i].count(self.of_layers[i]) for i in self.sources or range(len(self.of_layers))]

    @property
    def num_rows(self) -> int:
        """How many layers a block has room for."""
        return 1 + max(self.rows)

    def stage(self, layers: range) -> "LayerKinds":
        """The kinds of these layers only. All stages of a model have the same kinds, and the same block tables."""
        return replace(self, of_layers=self.of_layers[layers.start : layers.stop])


def one_kind(num_layers: int) -> LayerKinds:
    """All layers share a table, and keep all blocks."""
    return LayerKinds((None,), (0,) * num_layers)


def divide_layers(windows: Sequence[int | None], max_model_len: int, sources: Sequence[int] = ()) -> LayerKinds:
    """Divide a model's layers into kinds.

    Layers keep all blocks where little would be gained: where no sequence is longer than the window, or where windows
    would save less than an eighth of a long context's memory, because few layers have one.

    Args:
        windows: of each layer; None if it has none; STATE.
        max_model_len: most tokens of a sequence.
        sources: as in LayerKinds. The layers that have K and V of their own come first.
    """
    if sources:
        own = divide_layers(windows[: len({*sources})], max_model_len)
        return LayerKinds(own.windows, tuple(own.of_layers[source] for source in sources), tuple(sources))
    windows = [window if window is not None and window < max_model_len else None for window in windows]
    counts = Counter(windows)
    size = min(counts.values())  # of a kind
    numbers = {window: -(-count // size) for window, count in counts.items()}
    while sum(numbers.values()) > MOST_KINDS and size < len(windows):
        size += 1
        numbers = {window: -(-count // size) for window, count in counts.items()}
    little = sum(numbers.values()) > MOST_KINDS or size * numbers.get(None, 0) > 7 / 8 * len(windows)
    if little and STATE not in counts:
        return one_kind(len(windows))
    kinds: list[int | None] = [window for window, number in numbers.items() for _ in range(number)]
    kinds.sort(key=lambda window: window is not None)  # the kinds without a window first
    seen: Counter[int | None] = Counter()
    of_layers = []
    for window in windows:  # in turn, so that every stage of a pipeline has about as many layers of each kind
        of_layers.append(kinds.index(window) + seen[window] % numbers[window])
        seen[window] += 1
    return LayerKinds(tuple(kinds), tuple(of_layers))


def first_block(window: int | None, position: int, block_size: int) -> int:
    """The first logical block that queries from `position` on see. With a state: the block of the token before."""
    if window == STATE:
        return max(0, position - 1) // block_size
    return 0 if window is None else max(0, position + 1 - window) // block_size


def first_blocks(windows: Sequence[int | None], position: int, block_size: int) -> list[int]:
    """For each kind of layers, the first logical block that queries from `position` on see."""
    return [first_block(window, position, block_size) for window in windows]


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """How many blocks sequences take.

    windows    of each kind of layers
    max_chunk  most tokens of a sequence that one step computes
    """

    windows: tuple[int | None, ...]
    block_size: int
    max_chunk: int

    def of(self, lengths: list[int], shared: int = 0) -> int:
        """The most blocks that sequences of these lengths, in tokens, hold in total at any time.

        Args: shared: tokens that all have in common at their start. Each sequence has at least one block of its own.
        """
        if not self.windows:  # an encoder
            return 0
        shared //= self.block_size
        own = [max(1, -(-length // self.block_size) - shared) for length in lengths]
        return sum(
            min(shared, most) + sum(min(blocks, most) for blocks in own) for most in map(self._most, self.windows)
        )

    def longest(self, num_blocks: int, max_model_len: int) -> int:
        """The most tokens, up to `max_model_len`, of a sequence that has `num_blocks` blocks to itself."""
        if self.of([max_model_len]) <= num_blocks:
            return max_model_len
        lengths = range(self.block_size, max_model_len + 1, self.block_size)
        return self.block_size * bisect_right(lengths, num_blocks, key=lambda length: self.of([length]))

    def _most(self, window: int | None) -> int:
        """The most blocks of a kind that one sequence has: the blocks that the window reaches from the first token of a
        chunk, the blocks of the chunk, and one more because both may begin in the middle of a block. Of states: the old
        one and the new one."""
        if window == STATE:
            return 2
        if window is None:
            return 2**62
        return -(-(window - 1) // self.block_size) + -(-self.max_chunk // self.block_size) + 1
