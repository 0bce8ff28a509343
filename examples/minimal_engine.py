"""A complete LLM engine in one file. Read this first; each part names the files of nanopage that replace it.

    python examples/minimal_engine.py "The capital of France is" "Once upon a time,"

A language model reads tokens and predicts the next one. Attention needs the keys and values (K and V) of all earlier
tokens, so they are kept in the KV cache instead of being computed again for each new token. An engine for many users
has two problems: the cache is large and fragments, and requests start and end at different times. The two ideas here
solve them:

  Paged KV cache        The cache is a pool of small blocks. Each sequence has a block table, as a process has a page
                        table, so its blocks need not be contiguous, and it takes a block only when it needs one.
  Continuous batching   Each step chooses its sequences anew. A waiting sequence starts as soon as another one ends,
                        and a long prompt is computed in chunks beside the next tokens of others. Block tables make
                        this cheap: whichever sequences a step has, no keys or values move.

One request goes through the parts in this order: it waits in the Scheduler's queue; the Scheduler decides how many of
its tokens the next step computes, and gives it blocks for them; the Engine makes tensors of the step; the Model writes
K and V into the blocks, reads all earlier ones, and returns logits; the most likely token is appended. This repeats
until the sequence ends.

Everything is plain PyTorch, greedy, and runs on a CPU. The model is any Llama with plain attention and plain RoPE. The
tokenizer and the code that finds and reads a model's files are nanopage's.
"""

import sys
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader

# --- Sequences ------------------------------------------------------------------------ nanopage/engine/sequence.py ---


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, and where their K and V are.

    `num_computed` of the tokens have K and V in the cache. A sequence with one token left to compute is decoding; with
    more, it is in prefill.
    """

    name: str
    token_ids: list[int]
    max_tokens: int
    num_prompt_tokens: int = field(init=False)
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


# --- Blocks ---------------------------------------------------------------------- nanopage/engine/block_manager.py ---
# nanopage also shares blocks between sequences that start with the same tokens (prefix caching, forks), and may move
# the blocks of preempted sequences to host memory (swapping). `prepare` in worker/eager.py computes its slots.


class BlockManager:
    """Gives out the blocks of the KV cache: `num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int):
        self.block_size = block_size
        self.free_blocks = list(range(num_blocks - 1, -1, -1))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # rounded up

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for its first `num_tokens` tokens. Returns False if there are too few."""
        missing = self.blocks_for(num_tokens) - len(seq.block_table)
        if missing > len(self.free_blocks):
            return False
        for _ in range(missing):
            seq.block_table.append(self.free_blocks.pop())
        return True

    def free(self, seq: Sequence) -> None:
        self.free_blocks += reversed(seq.block_table)
        seq.block_table.clear()

    def slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        """Where in the cache the K and V of the tokens from `start` to `end` are: block * block_size + offset."""
        size = self.block_size
        return [seq.block_table[position // size] * size + position % size for position in range(start, end)]


# --- Scheduling ----------------------------- nanopage/engine/scheduler.py, engine/admission.py, engine/schedule.py ---
# nanopage also has priorities, groups of several completions, beams, and recovery from steps that fail.


class Scheduler:
    """Chooses what each step computes: decodes and chunks of prompts together, under one budget of tokens."""

    def __init__(self, block_manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int):
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()  # have no blocks
        self.running: list[Sequence] = []  # have blocks; oldest first
        self.num_preemptions = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, and how many tokens of each to compute. They have blocks for these tokens."""
        batch: list[tuple[Sequence, int]] = []
        budget = self.max_num_batched_tokens
        preempted = False

        # Running sequences come first. When blocks run out, preempt the last one. It is not in the batch yet: only
        # sequences before `index` are.
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_tokens = min(len(seq.token_ids) - seq.num_computed, budget)
            if self.block_manager.grow(seq, seq.num_computed + num_tokens):
                batch.append((seq, num_tokens))
                budget -= num_tokens
                index += 1
            else:
                self.preempt(self.running.pop())
                preempted = True

        # Then waiting sequences start, in order. Blocks for all their tokens must be free, or a long prompt would start
        # only to be preempted. A step still computes no more tokens than the budget allows.
        while self.waiting and budget > 0 and not preempted and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            reserved = sum(self.blocks_reserved(other) for other in self.running)
            if self.blocks_reserved(seq) + reserved > len(self.block_manager.free_blocks):
                break
            self.running.append(self.waiting.popleft())
            num_tokens = min(len(seq.token_ids), budget)
            self.block_manager.grow(seq, num_tokens)
            batch.append((seq, num_tokens))
            budget -= num_tokens
        return batch

    def blocks_reserved(self, seq: Sequence) -> int:
        """Blocks that the present tokens of a sequence need and that it has not taken yet."""
        return max(0, self.block_manager.blocks_for(len(seq.token_ids)) - len(seq.block_table))

    def preempt(self, seq: Sequence) -> None:
        """Take a sequence's blocks. It keeps its tokens, waits first in line, and computes their K and V again later.
        Nobody can see the difference in its answer."""
        self.block_manager.free(seq)
        seq.num_computed = 0
        self.waiting.appendleft(seq)
        self.num_preemptions += 1

    def finish(self, seq: Sequence) -> None:
        self.block_manager.free(seq)
        self.running.remove(seq)


# --- The model ---------------------------------------------------- nanopage/models/, layers/, kernels/reference.py ---
# nanopage fuses the projections, compiles the layers, and replaces this attention by kernels for CPUs and GPUs.


@dataclass
class Chunk:
    """The tokens that one sequence computes in a step.

    rows   their range in the step's list of tokens
    slots  int64 [length]: slots of all the sequence's tokens up to the end of this chunk
    """

    rows: slice
    slots: Tensor


class Model:
    """A Llama (Touvron et al., 2023): attention and a feed-forward layer, `num_layers` times.

    T: all tokens of the step, the sequences' tokens concatenated. Everything but attention treats each token by itself,
    so it does not matter whose they are.
    """

    def __init__(self, path, num_slots: int, dtype: torch.dtype):
        config = self.config = loader.read_config(path)
        plain = config.rope.rope_type == "default" and not any(config.sliding_windows) and not config.quantization
        if config.architecture != "LlamaForCausalLM" or not plain:
            raise ValueError(f"{path}: this example runs Llama models with plain attention, RoPE and weights only")
        pieces: dict[str, list[Tensor]] = {}
        checkpoint = loader.open_checkpoint(path)
        for name, _, piece in loader.pieces_of(checkpoint, loader.stored_tensors_of(checkpoint)):
            pieces.setdefault(name, []).append(piece.to(dtype, copy=True))  # the next piece takes its place
        self.weights = {name: torch.cat(parts) for name, parts in pieces.items()}
        if config.tie_word_embeddings:
            self.weights["lm_head.weight"] = self.weights["model.embed_tokens.weight"]
        shape = config.num_layers, num_slots, config.num_kv_heads, config.head_dim
        self.k_cache, self.v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
        self.frequencies = 1 / config.rope.theta**exponents

    @torch.inference_mode()
    def forward(self, input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, chunks: list[Chunk]) -> Tensor:
        """Logits [chunks, vocab_size] of the last token of each chunk.

        input_ids, positions, slot_mapping: int64 [T].
        """
        x = F.embedding(input_ids, self.weights["model.embed_tokens.weight"])  # [T, hidden_size]
        angles = positions[:, None, None].float() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # [T, 1, head_dim / 2]
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}"
            x = x + self.attention(layer, self.norm(f"{prefix}.input_layernorm", x), cos, sin, slot_mapping, chunks)
            h = self.norm(f"{prefix}.post_attention_layernorm", x)
            gate, up = self.linear(f"{prefix}.mlp.gate_proj", h), self.linear(f"{prefix}.mlp.up_proj", h)
            x = x + self.linear(f"{prefix}.mlp.down_proj", F.silu(gate) * up)
        last = torch.tensor([chunk.rows.stop - 1 for chunk in chunks])
        return self.linear("lm_head", self.norm("model.norm", x[last]))

    def attention(
        self, layer: int, x: Tensor, cos: Tensor, sin: Tensor, slot_mapping: Tensor, chunks: list[Chunk]
    ) -> Tensor:
        """Write the new K and V into the cache, then let each token attend to its sequence's tokens up to itself."""
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        q = self.linear(f"{prefix}.q_proj", x).view(len(x), config.num_heads, config.head_dim)
        k = self.linear(f"{prefix}.k_proj", x).view(len(x), config.num_kv_heads, config.head_dim)
        v = self.linear(f"{prefix}.v_proj", x).view(len(x), config.num_kv_heads, config.head_dim)
        self.k_cache[layer, slot_mapping] = rotate(k, cos, sin)
        self.v_cache[layer, slot_mapping] = v
        q = rotate(q, cos, sin)
        out = torch.empty_like(q)
        for chunk in chunks:
            # Gather the slots: [length, kv_heads, head_dim]. Each KV head serves several query heads.
            group = config.num_heads // config.num_kv_heads
            keys = self.k_cache[layer, chunk.slots].repeat_interleave(group, dim=1)
            values = self.v_cache[layer, chunk.slots].repeat_interleave(group, dim=1)
            queries = q[chunk.rows]
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * config.head_dim**-0.5
            # The n queries are the sequence's last n tokens. They must not see the tokens after them.
            length, n = len(keys), len(queries)
            future = torch.arange(length) > torch.arange(length - n, length)[:, None]
            weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1)
            out[chunk.rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return self.linear(f"{prefix}.o_proj", out.flatten(1))

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config.rms_norm_eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., 2021): turn pairs of dimensions by an angle proportional to the position."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


# --- The engine ------------------------------------ nanopage/engine/engine.py, step.py, worker/, sampling/, llm.py ---
# nanopage puts a message between what decides and what computes, can have two steps in flight, and samples.


class Engine:
    """Runs requests to their ends, many at a time.

    Args:
        path: a model directory or a .gguf file.
        num_blocks, block_size: size of the KV cache. It must hold the longest request alone.
        max_num_seqs: most sequences running at once.
        max_num_batched_tokens: most tokens in a step.
    """

    def __init__(
        self,
        path,
        num_blocks: int = 256,
        block_size: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 256,
        dtype: torch.dtype = torch.float32,
    ):
        self.model = Model(path, num_blocks * block_size, dtype)
        self.block_manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.block_manager, max_num_seqs, max_num_batched_tokens)
        self.max_len = min(num_blocks * block_size, self.model.config.max_position_embeddings)
        self.ends = self.model.config.eos_token_ids | Tokenizer(path).end_ids()

    def add(self, name: str, token_ids: list[int], max_tokens: int) -> Sequence:
        if not token_ids or len(token_ids) + max_tokens > self.max_len:
            raise ValueError(f"{name}: a request needs 1 to {self.max_len} tokens, max_tokens={max_tokens} included")
        seq = Sequence(name, list(token_ids), max_tokens)
        self.scheduler.waiting.append(seq)
        return seq

    def step(self) -> list[tuple[Sequence, int]]:
        """Run one batch. Returns what it has computed."""
        batch = self.scheduler.schedule()
        input_ids, positions, slot_mapping, chunks = [], [], [], []
        for seq, num_tokens in batch:
            start, end = seq.num_computed, seq.num_computed + num_tokens
            slots = self.block_manager.slots(seq, 0, end)
            chunks.append(Chunk(slice(len(input_ids), len(input_ids) + num_tokens), torch.tensor(slots)))
            input_ids += seq.token_ids[start:end]
            positions += range(start, end)
            slot_mapping += slots[start:]
        tensors = (torch.tensor(values) for values in (input_ids, positions, slot_mapping))
        next_tokens = self.model.forward(*tensors, chunks).argmax(dim=-1).tolist()  # greedy

        for (seq, num_tokens), token in zip(batch, next_tokens, strict=True):
            seq.num_computed += num_tokens
            if seq.num_computed < len(seq.token_ids):
                continue  # The prompt is not finished: its next token is known, so ignore the prediction.
            seq.token_ids.append(token)
            if token in self.ends or len(seq.output) == seq.max_tokens:
                self.scheduler.finish(seq)
        return batch

    def generate(self, prompts: list[list[int]], max_tokens: int = 32) -> list[list[int]]:
        """The output tokens for each prompt."""
        seqs = [self.add(str(i), prompt, max_tokens) for i, prompt in enumerate(prompts)]
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
        return [seq.output for seq in seqs]


def main(texts: list[str]) -> None:
    path = hub.resolve(None)  # SmolLM2-135M-Instruct
    tokenizer = Tokenizer(path)
    engine = Engine(path, num_blocks=12, block_size=4, max_num_batched_tokens=8)  # of three requests, one is preempted
    seqs = [engine.add(chr(ord("A") + i), tokenizer.encode(text), max_tokens=16) for i, text in enumerate(texts)]
    scheduler, number = engine.scheduler, 0
    while scheduler.waiting or scheduler.running:
        number += 1
        for seq, num_tokens in engine.step():
            text = tokenizer.decode(seq.token_ids[seq.num_computed - num_tokens : seq.num_computed])
            where = f"blocks {seq.block_table}" if seq.block_table else "ends"
            print(f"step {number:2}: {seq.name} computes {text!r}, {where}")
        for seq in scheduler.waiting:
            print(f"step {number:2}: {seq.name} waits with {len(seq.token_ids)} tokens")
    for seq in seqs:
        print(f"\n{seq.name}: {tokenizer.decode(seq.token_ids)}")
    print(f"\n{number} steps, {scheduler.num_preemptions} preemptions")


if __name__ == "__main__":
    main(sys.argv[1:] or ["The capital of France is", "Once upon a time,", "def fibonacci(n):"])
