"""ItemRows: what a worker knows of the items of its running sequences, and their rows of the first layer's input.

An encoder runs when a chunk of a prompt first reaches an item of its kind, for all items of a step that have the same
shape together. Its output is kept by the hash of the item: for the next chunks, for other sequences, and for the next
turn of a conversation, whose prompt has the item again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from nanopage.config.model import ModelConfig
from nanopage.device import to_device
from nanopage.items.axes import Axes
from nanopage.models.meta import family_of
from nanopage.step import Batch, EncoderCache, Item

CACHE_BYTES = 256 * 2**20  # outputs of encoders
# The most that the items in one call of an encoder may cost together. A step's budget does not count items that are
# encoded again because their outputs were evicted halfway.
MOST_TOGETHER = 8192


class ItemRows:
    """The items of running sequences.

    Args:
        encoders: of the model, by kind of item (see `Decoder.encoders`).
        dtype: of the hidden states.
        most_bytes: the most that outputs of encoders may take together. The newest is kept in any case.

    cache: counts the outputs that are kept.
    axes: of a model whose images have positions of three axes (startup/worker.py sets it).
    embeds: whether rows take the place of embeddings. No: a later stage gets hidden states.
    """

    def __init__(
        self,
        config: ModelConfig,
        encoders: Mapping[str, Callable[[dict[str, Tensor]], Tensor]],
        dtype: torch.dtype,
        device: torch.device,
        most_bytes: int = CACHE_BYTES,
    ):
        self.encoders, self.dtype, self.device, self.most_bytes = encoders, dtype, device, most_bytes
        # Gemma, for example, multiplies its own embeddings only.
        self.scale = config.embedding_scale if getattr(family_of(config), "SCALES_EMBEDS", False) else 1.0
        self.axes: Axes | None = None
        self.embeds = True
        self.left: dict[int, list[Item]] = {}  # row of the sequence table -> its items that steps have not passed
        self.encoded: dict[int, int] = {}  # row -> how many positions of an encoder the decoder attends to
        self.outputs: OrderedDict[bytes, Tensor] = OrderedDict()  # by hash, the least recently used first
        self.cache = EncoderCache()

    def update(self, batch: Batch) -> None:
        """Learn the items of new sequences, and forget those that lie before this step."""
        for new in batch.new:
            self.left[new.row], self.encoded[new.row] = new.items, sum(item.cost for item in new.items)
        for fork in batch.forks:  # the parent has computed the prompt
            self.left[fork.row], self.encoded[fork.row] = [], self.encoded[fork.parent]
        if self.axes is not None:
            self.axes.update(batch)
        for row, start in zip(batch.rows, batch.starts, strict=True):
            if items := self.left.get(row):
                self.left[row] = [item for item in items if item.position + max(item.length, 1) > start]

    def encoded_of(self, rows: list[int]) -> np.ndarray:
        """How many positions of an encoder each of B rows attends to: int64 [B]."""
        return np.array([self.encoded[row] for row in rows])

    def reaches(self, batch: Batch) -> bool:
        """Whether a token of the batch belongs to an item."""
        return any(True for _ in self._parts(batch))

    def embeds_of(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The tokens of a step of T tokens that belong to items: their indices among them, int64 [N], and their rows,
        [N, hidden_size]. None if there are none."""
        parts = list(self._parts(batch))
        if not parts or not self.embeds:
            return None
        places = np.concatenate([np.arange(place, place + end - first) for place, _, first, end in parts])
        met = [(item, first) for _, item, first, _ in parts if item.kind != "embeds"]
        begun, later = [item for item, first in met if not first], [item for item, first in met if first]
        outputs = self.outputs_of(begun, later)
        rows = torch.cat([self._rows(item, first, end, outputs) for _, item, first, end in parts])
        return to_device(torch.from_numpy(places), self.device), rows

    def positions_of(self, batch: Batch, places: Tensor) -> Tensor:
        """The positions of the T tokens of a batch: int64 [T], or [T, 3] (see items/axes.py).

        Args: places: of the tokens in their sequences, int64 [T].
        """
        return places if self.axes is None else self.axes.of(batch, places)

    def positions_after(self, rows: Tensor, places: Tensor) -> Tensor:
        """The same of B tokens that lie behind all items of their sequences: int64 [B]. A CUDA graph may capture it.

        Args: rows: of the sequence table, int64 [B].
        """
        return places if self.axes is None else places + self.axes.shifts[rows]

    def outputs_of(self, begun: Sequence[Item], later: Sequence[Item] = ()) -> dict[bytes, Tensor]:
        """The outputs of items' encoders, by hash: [length, hidden_size] each, or what cross-attention reads.

        Args:
            begun: items whose first token is in this step.
            later: items that an earlier step has begun.
        """
        items = [*begun, *later]
        self.cache.queries += len(begun)
        self.cache.hits += sum(item.hash in self.outputs for item in begun)
        missing = {item.hash: item for item in items if item.hash not in self.outputs}
        groups: dict[tuple, list[Item]] = {}  # by kind and shape
        for item in missing.values():
            shape = item.kind, *(array.shape for array in item.payload.values())
            groups.setdefault(shape, []).append(item)
        for group in groups.values():
            size = max(1, MOST_TOGETHER // max(1, group[0].cost))
            for first in range(0, len(group), size):
                self._encode(group[first : first + size])
        for item in items:
            self.outputs.move_to_end(item.hash)
        found = {item.hash: self.outputs[item.hash] for item in items}
        while len(self.outputs) > 1 and self.cache.num_bytes > self.most_bytes:
            self.cache.num_bytes -= self.outputs.popitem(last=False)[1].nbytes
        self.cache.entries = len(self.outputs)
        return found

    def forget(self) -> None:
        """Forget all outputs of encoders."""
        self.outputs.clear()
        self.cache.entries = self.cache.num_bytes = 0

    def _encode(self, items: list[Item]) -> None:
        """Keep the outputs of items of one kind, whose payloads have the same shapes."""
        arrays = {name: np.stack([item.payload[name] for item in items]) for name in items[0].payload}
        payload = {name: to_device(torch.from_numpy(array), self.device) for name, array in arrays.items()}
        for item, output in zip(items, self.encoders[items[0].kind](payload), strict=True):
            self.outputs[item.hash] = output.clone()  # a view would hold all of them in memory
            self.cache.num_bytes += output.nbytes

    def _parts(self, batch: Batch) -> Iterator[tuple[int, Item, int, int]]:
        """Where the tokens of a batch meet items: (index of the first such token in the batch, item, the first and the
        end of the item's rows)."""
        shift = 0  # from the positions of a sequence to the places of its tokens in the batch
        for row, start, count in zip(batch.rows, batch.starts, batch.counts, strict=True):
            for item in self.left.get(row, ()):
                first, end = max(start, item.position), min(start + count, item.position + item.length)
                if first < end:
                    yield shift + first - start, item, first - item.position, end - item.position
            shift += count

    def _rows(self, item: Item, first: int, end: int, outputs: dict[bytes, Tensor]) -> Tensor:
        if item.kind != "embeds":
            return outputs[item.hash][first:end].to(self.dtype)
        rows = torch.tensor(item.payload["embeds"][first:end]).to(self.dtype)  # a copy: messages are not writable
        return to_device(rows, self.device) * self.scale
