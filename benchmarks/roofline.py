"""The least time that a batch of requests can take on a machine, by the speed of its memory and of its arithmetic.

Memory: the weights are read once for each token of the longest output, because its tokens come one after another. The K
and V of the context are read for each token of each output but the first. A weight has as many bytes as in the
checkpoint or in the dtype, whichever is less. With int8, it has one byte. With int4, it has one byte in the head and
half a byte in the layers, plus 16 bits of scale for each 32 weights there. From a .gguf file, it has its bytes there.

Arithmetic: 2 operations for each weight of the layers and each token, and for each weight of the head and each token of
an output. In attention, 4 operations for each element of a query and each token that it attends to. A prefix that
prompts share is computed once.

The embedding counts only if it is the head, because few of its rows are read. Everything else is free, and memory and
arithmetic never wait for each other. So no engine reaches the larger limit, unless the caches hold the weights.
"""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from benchmarks.peers.protocol import Work
from nanopage.config.model import ModelConfig
from nanopage.files.safetensors_checkpoint import safetensors_files, stored_tensors
from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "float32": 4, "bfloat16": 2}
INT4_BYTES = 1 / 2 + 2 / 32  # of a weight, with its share of a scale


@dataclass
class Speed:
    """The speeds that machine.py measured."""

    read_gb_s: float
    product_gflop_s: float


@dataclass
class Roofline:
    speed: Speed
    memory_seconds: float
    arithmetic_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.arithmetic_seconds)


@dataclass
class Weights:
    """The weights of a checkpoint: the number that every token passes through, and the bytes of all."""

    in_layers: int
    in_head: int
    num_bytes: int


def roofline(work: list[Work], config: ModelConfig, weights: Weights, dtype: str, speed: Speed) -> Roofline:
    """Args: dtype: the dtype of K and V, bfloat16 or float32."""
    computed = attended = attended_by_outputs = 0  # tokens
    before: list[int] = []
    for w in sorted(work, key=lambda w: w.prompt):  # neighbours share the longest prefixes
        pairs = zip(before, w.prompt[:-1], strict=False)  # the last token is always computed, for its logits
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        end = len(w.prompt) + w.output_len - 1  # nothing follows the last token
        computed += end - shared
        attended += attended_tokens(config, shared, end)
        attended_by_outputs += attended_tokens(config, len(w.prompt), end)
        before = w.prompt
    output_lens = [w.output_len for w in work]
    num_bytes = weights.num_bytes * max(output_lens) + kv_bytes_of_a_layer(config, dtype) * attended_by_outputs
    operations = 2 * weights.in_layers * computed + 2 * weights.in_head * sum(output_lens)
    operations += 4 * config.num_heads * config.head_dim * attended
    return Roofline(speed, num_bytes / speed.read_gb_s / 1e9, operations / speed.product_gflop_s / 1e9)


def attended_tokens(config: ModelConfig, start: int, end: int) -> int:
    """How many tokens the positions from start to end - 1 attend to, including themselves, in all layers together."""
    return sum(
        num_layers * sum(min(i + 1, window or i + 1) for i in range(start, end))
        for window, num_layers in Counter(config.sliding_windows).items()
    )


def kv_bytes_of_a_layer(config: ModelConfig, dtype: str) -> int:
    """Bytes of one token's K and V in one layer."""
    return 2 * config.num_kv_heads * config.head_dim * ITEM_BYTES[dtype]


def read_weights(path: Path, config: ModelConfig, dtype: str, quantization: str | None) -> Weights:
    """Read the Weights from the headers of the checkpoint's files. Raises: as GGUFCheckpoint and `stored_tensors`."""
    head, unread = "lm_head.weight", "model.embed_tokens.weight"
    if config.tie_word_embeddings:
        head, unread = unread, head
    if path.suffix == ".gguf":
        tensors = GGUFCheckpoint(path).weights.items()
        sizes = {name: (math.prod(tensor.shape), tensor.num_bytes) for name, tensor in tensors}
    else:
        sizes = {}
        for tensor in stored_tensors(safetensors_files(path)):
            count = math.prod(tensor.shape)
            each: float = min(ITEM_BYTES[tensor.dtype], ITEM_BYTES[dtype])
            if quantization:
                each = INT4_BYTES if quantization == "int4" and tensor.name not in (head, unread) else 1
            sizes[tensor.name] = count, int(each * count)
    sizes.pop(unread, None)
    in_head, _ = sizes.get(head, (0, 0))  # without a head, no engine loads it
    counts, num_bytes = map(sum, zip(*sizes.values(), strict=True))
    return Weights(counts - in_head, in_head, num_bytes)
