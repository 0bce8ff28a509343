"""What the tests share: makers of tiny models (random weights, a real tokenizer, saved as Hugging Face directories),
and the logits of every position, by transformers and through nanopage's paged cache."""

import contextlib
import functools
import json
import logging
import os
import random
import signal
import tempfile
import warnings
from collections import defaultdict
from multiprocessing import Pipe
from pathlib import Path
from unittest import mock

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from typer.main import get_command
from typer.testing import CliRunner, Result

from benchmarks.host import ThroughBytes
from nanopage.cpu.packed import pack
from nanopage.cpu.tiled import tile
from nanopage.cpu.tiled_experts import join_experts
from nanopage.distributed import messages
from nanopage.distributed.process_executor import ProcessLink
from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint
from nanopage.recurrent.states import fit_block_size
from nanopage.startup import worker_process
from nanopage.state.kv_cache import KVCache
from nanopage.state.layer_kinds import divide_layers, first_block
from nanopage.state.sequence_table import SequenceTable
from nanopage.step import NO_BLOCK, Batch, BlockUpdate, NewSequence, SamplingSettings
from nanopage.weights import loader
from nanopage.worker.eager import Eager

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1 (bos), 2 (eos)
EOS = 2
VOCAB_SIZE = 300  # the special tokens, 256 bytes and some merges
CPU = torch.device("cpu")
BLOCK_SIZE = 8
LONG = os.environ.get("NANOPAGE_LONG_TESTS", "0") != "0"
TEMPERATURE = {  # a rope of Ministral 3 that multiplies q from the ninth token on
    "rope_theta": 1e4,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "llama_4_scaling_beta": 0.3,
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = "the cat and the other dog went to the house in the morning, then they were in there with the man and the men"


def examples(count: int) -> int:
    """How many random cases a test tries: `count` with NANOPAGE_LONG_TESTS=1, a third of them without."""
    return count if LONG else count // 3


def by_field(tables) -> dict[str, list]:
    """The values of each field. Args: pairs (fields, values that each of them has)."""
    made = defaultdict(list)
    for fields, values in tables:
        for field in fields:
            made[field] += values
    return made


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: every text has ids and every id is in the tiny models' vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Write the tiny tokenizer and a ChatML template into a model directory."""
    tiny_tokenizer().save(str(directory / "tokenizer.json"))
    endoftext, bos, eos = SPECIAL_TOKENS
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": endoftext,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def tiny_hf_model(
    family: str = "llama", dtype: torch.dtype | str = torch.float32, seed: int = 0, **config_overrides
) -> PreTrainedModel:
    """A transformers model of `family` (such as llama) with random weights, biases and norms.

    `config_overrides` are fields of its config.json, in place of the small ones chosen here.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.3,  # large: the default leaves the logits flat
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": EOS,
    }
    if family in ("qwen3", "gemma2", "gemma3_text", "glm", "glm4", "ministral", "ministral3"):
        fields["head_dim"] = 32  # its default is 128 or 256, or missing
    if family == "gemma4_text":
        fields |= {"head_dim": 16, "global_head_dim": 32, "sliding_window": 7, "hidden_size_per_layer_input": 0}
        fields |= {"vocab_size_per_layer_input": VOCAB_SIZE + 2, "num_hidden_layers": 3}
        fields["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
    elif family == "gemma3n_text":
        fields |= {"head_dim": 32, "sliding_window": 7, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        fields |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 12}
        fields |= {"laurel_rank": 8, "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0]}
        fields["vocab_size_per_layer_input"] = VOCAB_SIZE - 20
    elif family.startswith("gemma"):  # as in real models: head_dim, and a window in some layers
        fields |= {"query_pre_attn_scalar": 32, "sliding_window": 7}
    if family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        fields |= {"layer_types": ["linear_attention", "full_attention"], "head_dim": 32}
        fields |= {"linear_num_key_heads": 2, "linear_key_head_dim": 6}
        fields |= {"linear_num_value_heads": 4, "linear_value_head_dim": 10}
    if family in ("qwen3_next", "qwen3_5_moe_text"):
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
        fields["shared_expert_intermediate_size"] = 48
    if family in ("phi3", "smollm3", "lfm2", "glm", "glm4"):
        fields["pad_token_id"] = None  # its default is not in the vocabulary
    if family == "lfm2":
        fields["layer_types"] = ["conv", "full_attention"]
    if family == "mamba2":
        fields |= {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "pad_token_id": None}
        for name in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings"):
            del fields[name]
    if family == "granitemoehybrid":
        fields |= {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "shared_intermediate_size": 40}
        fields |= {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 0}
    if family in ("olmo3", "ministral"):
        fields["sliding_window"] = 7  # its default is 4096
    if family == "mistral":
        fields["sliding_window"] = None
    if family == "mixtral":
        fields["num_local_experts"] = 4
    if family == "gpt_oss":
        fields |= {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
    if family in ("qwen2_moe", "qwen3_moe"):
        fields |= {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    if family.startswith("deepseek") or family == "glm4_moe_lite":
        fields |= {"num_key_value_heads": 4, "q_lora_rank": 40, "kv_lora_rank": 24, "qk_rope_head_dim": 8}
        fields |= {"qk_nope_head_dim": 16, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 3}
        fields |= {"moe_intermediate_size": 40, "first_k_dense_replace": 1}
        fields |= {"n_group": 4, "topk_group": 2} if family.startswith("deepseek") else {}
    if family == "qwen2_moe":
        fields["shared_expert_intermediate_size"] = 48
    if family == "glm4_moe":
        fields |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "pad_token_id": None}
        fields |= {"n_group": 4, "topk_group": 2, "head_dim": 24}
    config = AutoConfig.for_model(family, **fields | config_overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide a mistake in them
            stored = ("correction_bias", "layer_scalar")
            buffers = [named for named in model.named_buffers() if named[0].endswith(stored)]
            for name, parameter in [*model.named_parameters(), *buffers]:
                if parameter.dim() == 1 or name.endswith("_bias"):
                    of_one = "norm.weight", "norm_1.weight", "norm_2.weight", "scalar", "scale"
                    around_one = name.endswith(of_one) and family not in ("gemma2", "gemma3_text")
                    parameter.normal_(1.0 if around_one else 0.0, 0.3)
    return model.eval()


def tiny_whisper(seed: int = 0, **config_overrides) -> PreTrainedModel:
    """A WhisperForConditionalGeneration with random weights, biases and norms. Args: as of `tiny_hf_model`."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 96,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 80,
        "max_target_positions": 60,
        "init_std": 0.3,  # large: the default leaves the logits flat
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "decoder_start_token_id": 1,
        "begin_suppress_tokens": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = WhisperForConditionalGeneration(WhisperConfig(**fields | config_overrides))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    return model.eval()


def tiny_bart(family: str = "bart", seed: int = 0, **config_overrides) -> PreTrainedModel:
    """A transformers model of `family`, as BART is, with random weights, biases and norms. Args: as of
    `tiny_hf_model`."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 96,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 60,
        "init_std": 0.3,  # large: the default leaves the logits flat
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "decoder_start_token_id": EOS,
        "forced_eos_token_id": None,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(family, **fields | config_overrides))
        with torch.no_grad():
            for name, tensor in [*model.named_parameters(), ("final_logits_bias", model.final_logits_bias)]:
                if tensor.dim() == 1 or name == "final_logits_bias":
                    tensor.normal_(1.0 if name.endswith(("norm.weight", "norm_embedding.weight")) else 0.0, 0.3)
    return model.eval()


def tiny_t5(family: str = "t5", seed: int = 0, **config_overrides) -> PreTrainedModel:
    """A transformers model of `family`, as T5 is, with random weights and norms. With tie_word_embeddings=False, it has
    a head of its own. Args: as of `tiny_hf_model`."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "d_kv": 12,
        "d_ff": 96,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "n_positions": 60,
        "feed_forward_proj": "relu",
        "pad_token_id": 0,
        "eos_token_id": EOS,
        "decoder_start_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(family, **fields | config_overrides)
        model = AutoModelForSeq2SeqLM.from_config(config)
        if not config_overrides.get("tie_word_embeddings", True):
            model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB_SIZE, 64))
        with torch.no_grad():
            for name, tensor in model.named_parameters():
                if tensor.dim() == 1:
                    tensor.normal_(1.0, 0.3)
                elif not name.startswith(("shared", "lm_head")):  # large: the defaults leave the logits flat
                    tensor.normal_(0.0, 0.2)
    return model.eval()


@functools.lru_cache(maxsize=100)
def saved_model(family: str, dtype: torch.dtype | str, seed: int, overrides: str) -> dict[str, bytes]:
    """The files of a `tiny_hf_model`, by their names. To make one takes longer than most tests use it.

    Args: overrides: `config_overrides` as JSON.
    """
    with tempfile.TemporaryDirectory() as directory:
        tiny_hf_model(family, dtype, seed, **json.loads(overrides)).save_pretrained(directory)
        return {file.name: file.read_bytes() for file in Path(directory).iterdir()}


def tiny_model(
    directory: Path,
    family: str = "llama",
    dtype: torch.dtype | str = torch.float32,
    seed: int = 0,
    **config_overrides,
) -> Path:
    """Save a `tiny_hf_model` and its tokenizer as a Hugging Face directory. Returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in saved_model(family, dtype, seed, json.dumps(config_overrides)).items():
        (directory / name).write_bytes(content)
    save_tokenizer(directory)
    return directory


@functools.cache
def bench_command():
    """bench.py's command line. To make it from the functions of its commands takes longer than most uses of it."""
    import bench

    return get_command(bench.app)


def run_bench(*arguments):
    """Run bench.py's command line in this process. Returns typer's Result; what bench.py does not catch comes out."""
    import bench

    with mock.patch("typer.testing._get_command", lambda app: bench_command(), create=True):
        return CliRunner().invoke(bench.app, [*map(str, arguments)], catch_exceptions=False)


def run_chat(*arguments, stdin: str | bytes = "") -> Result:
    """Run chat.py's command line in this process, where no stream is a terminal."""
    import chat

    logger = logging.getLogger("nanopage")
    handlers = logger.handlers
    try:
        return CliRunner().invoke(chat.app, [*map(str, arguments)], input=stdin, catch_exceptions=False)
    finally:
        logger.handlers = handlers


def finish(engine) -> dict:
    """Run an engine until all requests have ended. Returns: the last RequestOutput of each, by its id."""
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def run_together(engine, *prompts, params):
    """Run prompts to their ends, all at once. Returns their RequestOutputs."""
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs = finish(engine)
    return [outputs[str(i)] for i in range(len(prompts))]


def gguf_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .gguf file, dequantized, by their names in transformers."""
    pieces = defaultdict(list)
    for name, start, piece in GGUFCheckpoint(file).pieces():
        assert start == sum(map(len, pieces[name]))
        pieces[name].append(torch.from_numpy(piece))
    return {name: torch.cat(parts) for name, parts in pieces.items()}


def random_tokens(lengths, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def reference_logits(hf_model, sequences):
    """transformers' logits of every position, each sequence by itself and without a cache."""
    hf_model.set_attn_implementation("eager")
    with torch.inference_mode():
        return [hf_model(torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences]


class BytesExecutor(ThroughBytes):
    """Also asserts that each Batch is the same after its journey as bytes."""

    def submit(self, batch):
        assert messages.decode_to_worker(messages.encode(messages.Run(0, batch))).batch == batch
        super().submit(batch)


class ForkedLink(ProcessLink):
    """A worker that is a fork of the test's process: it need not import torch again, which takes seconds."""

    def __init__(self, rank: int, num_ranks: int):
        self.local_rank = rank
        self.connection, theirs = Pipe()
        self.code: int | None = None
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # fork beside threads
            self.pid = os.fork()
        if self.pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.environ["GLOO_SOCKET_IFNAME"] = "lo"
                torch.set_num_threads(1)  # a fork has none of the other threads, and OpenMP would wait for them
                for descriptor in open_descriptors():  # those of other workers and tests
                    if descriptor > 2 and descriptor != theirs.fileno():
                        with contextlib.suppress(OSError):  # that of the list itself
                            os.close(descriptor)
                worker_process.serve(theirs)
                code = 0
            os._exit(code)
        theirs.close()

    def ended(self) -> str | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        if self.code is None:
            return None
        return f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"exit code {self.code}"

    def kill(self) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def open_descriptors() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]


class Paged:
    """Sequences that go step by step through a model and its KV cache, by a way to run steps.

    Blocks are handed out at random, and everything in the cache that was never handed out is NaN. So are the blocks
    that no window reaches any more.

    Args:
        make_way: makes a way to run steps from (model, kv_cache, table, config).
        tiles: the kind of weights in tiles (cpu/tiled.py), or "blocks" or "packed" if they are to be those
            of a quantized checkpoint, as on a CPU or on a GPU.
        kv_dtype: of K and V. None: dtype.
        group: whether the weights of experts are fused, as on a GPU.
        join: whether experts are joined, as compiled layers on a CPU need them.
    """

    def __init__(
        self,
        directory,
        sequences,
        dtype=torch.float32,
        make_way=None,
        tiles=None,
        kv_dtype=None,
        seed=0,
        group=False,
        join=False,
    ):
        config = loader.read_config(directory)
        keep_integers = {"blocks": "tiles", "packed": "packed"}.get(tiles)
        how = loader.Loading(keep_integers=keep_integers, group=group)
        model = loader.load_model(directory, config, dtype, CPU, how)
        if keep_integers is None and tiles is not None:
            tile(model, tiles)
        if join:
            join_experts(model, dtype)
        if tiles is None and make_way is not None:
            pack(model)
        longest = max(map(len, sequences))
        kinds = divide_layers(config.sliding_windows, longest, config.kv_sources)
        self.windows = kinds.windows
        self.block_size = fit_block_size(config, BLOCK_SIZE, dtype, kv_dtype or dtype)
        num_blocks = 2 + len(kinds.windows) * sum(-(-len(tokens) // self.block_size) for tokens in sequences)
        self.model = model
        self.cache = KVCache(config, num_blocks, self.block_size, kv_dtype or dtype, CPU, kinds=kinds)
        num_rows = len(sequences) + 1
        self.table = SequenceTable(num_rows, longest, self.block_size, config.vocab_size, CPU, windows=kinds.windows)
        self.way = (make_way or (lambda *made: Eager(*made[:3])))(model, self.cache, self.table, config)
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.restart(sequences)

    def restart(self, sequences):
        """Forget all sequences, and begin these."""
        self.cache.tensor.fill_(torch.nan)
        self.free += [block for table in getattr(self, "tables", []) for block in table if block != NO_BLOCK]
        self.sequences = sequences
        self.tables = [[] for _ in sequences]
        self.logits = [torch.empty(0) for _ in sequences]

    def done(self, index):
        return len(self.logits[index])

    def batch(self, num_tokens):
        """The next `num_tokens[i]` tokens of each sequence i."""
        batch = Batch()
        for index, count in sorted(num_tokens.items(), key=lambda item: item[1] > 1):
            table, start = self.tables[index], self.done(index)
            if start == 0:
                # With prompt_logprobs, a way returns the hidden states of every token.
                settings = SamplingSettings(prompt_logprobs=0)
                tokens = self.sequences[index]
                batch.new.append(NewSequence(index, tokens, len(tokens), 0, settings))
            first = len(table)
            while len(table) // len(self.windows) * self.block_size < start + count:
                batch.cleared += (new := [self.free.pop() for _ in self.windows])
                table += new
            batch.blocks.append(BlockUpdate(index, first, table[first:]))
            batch.rows.append(index)
            batch.starts.append(start)
            batch.counts.append(count)
        return batch

    @torch.inference_mode()
    def step(self, num_tokens):
        """Run the next `num_tokens[i]` tokens of each sequence i in one batch."""
        batch = self.batch(num_tokens)
        self.cache.move(batch)
        self.table.update(batch)
        assert self.way.fits(batch)
        logits = self.model.logits(self.way.run(batch).hidden)
        for index, rows in zip(batch.rows, logits.split(batch.counts), strict=True):
            self.logits[index] = torch.cat([self.logits[index], rows])
            self._slide(self.tables[index], self.done(index))

    def _slide(self, table, position):
        """Give back the blocks that queries from `position` on do not see."""
        for kind, window in enumerate(self.windows):
            for i in range(kind, first_block(window, position, self.block_size) * len(self.windows), len(self.windows)):
                if table[i] != NO_BLOCK:
                    self.cache.tensor[:, :, table[i]] = torch.nan
                    self.free.insert(0, table[i])
                    table[i] = NO_BLOCK

    def run(self, plan):
        plan(self, [len(tokens) for tokens in self.sequences])
        return self.logits


def assert_close_but_for_rounding(ours, theirs):
    """Where an activation is rounded to another integer, all tokens after it in the sequence differ.

    Args: logits [T, vocab_size], of the same model with int8 activations.
    """
    differences = (ours - theirs).abs().amax(1) / theirs.std()
    assert differences.max() < 0.4
    assert differences.sort().values[len(differences) // 4] < 2e-4


def assert_all_close(got, expected, tolerance=2e-4):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * theirs.std().item())
