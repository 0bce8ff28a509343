"""Configuration: EngineConfig (what the user sets) and ModelConfig (config.json read as data).

Nothing in config.json is executed. Fields that are not read here, such as `auto_map` and attention back-end names, have
no effect. A field that would change the result and is not supported is an error. Sizes and numbers have bounds, because
they are read before the weights, and a wrong one must not allocate much memory or start a long loop.
"""

import math
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType

from nanopage.config.pooling import PoolingConfig, check_pooling_options, read_classifier
from nanopage.files.model_files import exists, read_json, shown

DEFAULT_TOKEN_BUDGET = {"cpu": 2048, "cuda": 8192}  # by device type
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
DEVICES = ("auto", "cpu", "cuda")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3")
PREEMPTION_MODES = ("recompute", "swap")
POLICIES = ("fcfs", "priority")
QUANTIZATIONS = (None, "int8", "int4", "fp8", "awq", "gptq")
STORED_QUANTIZATIONS = ("awq", "gptq")  # those of a checkpoint, which `quantization` may only repeat
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale in a checkpoint of one of them
LOAD_FORMATS = ("auto", "dummy")
BACKENDS = (None, "mp", "ray")
MAX_RANKS = 1024
MAX_DRAFT = 64  # tokens
MAX_LORA_RANK = 512
GENERATION_CONFIGS = ("auto", "vllm")
RUNNERS = ("auto", "generate", "pooling")
CONVERSIONS = ("auto", "none", "embed", "classify")
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu2")  # layers/mlp.py

# What AWQ and GPTQ checkpoints of models with experts leave as floats: the head, and what chooses experts.
EXPERT_GATES = re.compile(r"lm_head|(model\.layers\.\d+\.)?((mlp|block_sparse_moe)\.)?(shared_expert_)?gate")

# The largest accepted sizes, by their names in config.json: several times the sizes of any known model. The loader can
# still build a model of these sizes without allocating its weights, to compare it with its files.
MAX_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "intermediate_size": 2**20,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31 - 1,
    "sliding_window": 2**31 - 1,
    "sliding_window_pattern": 2**10,
    "num_experts": 2**12,
    "num_local_experts": 2**12,
    "num_experts_per_tok": 2**12,
    "moe_intermediate_size": 2**20,
    "shared_expert_intermediate_size": 2**20,
    "decoder_sparse_step": 2**10,
    "type_vocab_size": 2**10,
    "num_labels": 2**16,
}
MAX_EXPERTS = 2**16  # of all layers together
MAX_MATRICES = 2**20  # of a checkpoint, each expert's counted: a small file must not become many objects
# The accepted range of each number. Outside it float32 overflows, or no trained model has such a value.
RANGES = {
    "rms_norm_eps": (1e-30, 1.0),
    "layer_norm_eps": (1e-30, 1.0),
    "rope_theta": (2.0, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 2**31 - 1),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "attention_factor": (1e-3, 1e3),
    "mscale": (0.0, 1e3),
    "mscale_all_dim": (0.0, 1e3),
    "rope_local_base_freq": (2.0, 1e15),
    "partial_rotary_factor": (1e-3, 1.0),
    "query_pre_attn_scalar": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e6),
    "final_logit_softcapping": (1e-3, 1e6),
    "embedding_multiplier": (1e-6, 1e6),
    "residual_multiplier": (1e-6, 1e6),
    "attention_multiplier": (1e-6, 1e6),
    "logits_scaling": (1e-6, 1e6),
}
# rope type -> (required numbers, optional numbers)
ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    ),
    "dynamic": (("factor",), ()),
    "longrope": (("original_max_position_embeddings",), ("factor", "attention_factor")),
}


@dataclass(kw_only=True)
class EngineConfig:
    """Everything a user can set on an engine. Names and defaults are vLLM's where the meaning is the same.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct (see files/hub.py).
        dtype: of weights, activations and KV; "auto" is the checkpoint's if the device computes in it natively. That of
            a .gguf file is bfloat16. Where a CPU does not compute in the checkpoint's 16 bits, "auto" is float32, but K
            and V keep the 16 bits. On a CPU, compiled layers in float32 keep weights that the checkpoint has in
            bfloat16 or float16 as they are, and widen them as they read them; weights that a .gguf file has as Q4_0,
            Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K stay integers, and the activations that they multiply are rounded
            to int8 (see cpu/gguf_tiles.py).
        device: "auto" is CUDA if present, else the CPU.
        max_model_len: most tokens (prompt + output) of a sequence; None is the model's own limit, or what the
            KV cache holds if that is less.
        max_num_seqs: most sequences that run at once; each completion of `n` and each beam counts.
        max_num_batched_tokens: most tokens in one step; longer prompts are prefilled in chunks. None: 8,192 on a GPU;
            on a CPU 2,048, and 512 for `LLM`. For AsyncLLM and the server it follows the time that steps take, up to
            these numbers (see engine/token_budget.py).
        block_size: tokens per KV cache block; on a GPU a power of two.
        kv_cache_dtype: "auto" keeps K and V as `dtype` says. "fp8", or "fp8_e4m3", keeps them in 8 bits (e4m3), so that
            twice as many tokens fit as in 16 bits. They are divided by the checkpoint's k_scale and v_scale of each
            layer, or by 1 if it has none. On a GPU of compute capability 8.9 or later, and on a CPU with
            `enforce_eager`.
        kv_cache_gib: most GiB for the KV cache. None: see `gpu_memory_utilization`.
        gpu_memory_utilization: the share of the device's memory (on a CPU: of the RAM) that weights and KV cache may
            take together; on a GPU the memory of a step counts, too. None: 0.9 on a GPU; on a CPU the KV cache gets a
            quarter of the available RAM, at most 4 GiB. That is a limit for large batches and long contexts: the system
            gives memory to a part of the cache when it is first written. The cache is never larger than `max_num_seqs`
            sequences of `max_model_len` tokens, so `nanopage chat`, which has one at a time, has a small one.
        num_gpu_blocks_override: size of the KV cache in blocks, on any device; for tests. If a model's layers differ in
            their windows, a block belongs to those of one kind (layer_kinds.py).
        enable_prefix_caching: share the KV of equal prefixes between requests.
        preemption_mode: what happens to a request's KV when another needs its blocks: "recompute" or "swap". None: see
            the rule in scheduler.py.
        swap_space: GiB of host memory for swapped KV, taken when first needed. None: as much as the KV cache, but at
            most a quarter of the available RAM and 4 GiB. When it is full, requests are recomputed. With 0, all are,
            and preemption_mode="swap" is refused.
        scheduling_policy: "fcfs", or "priority": requests with a lower `priority` go first, and may take the blocks of
            requests with a higher one.
        enforce_eager: True compiles and captures nothing. False: on a CPU, in float32, and in bfloat16 where oneDNN
            computes in it, decoder layers are compiled in the background once the first requests have ended, and used
            once the engine is idle (see cpu/aot.py). On a GPU they are compiled at start, and decode steps,
            and the compiled parts of other small steps, are captured as CUDA graphs (see worker/jit.py,
            worker/cuda_graphs.py and worker/piecewise_graphs.py).
        quantization: "int8" stores each weight of linear layers, and of an embedding tied to the head, in one byte.
            "int4" stores the weights of the decoder layers in half a byte, with a scale and an offset for each 32
            inputs, and those of the head in one byte. On a CPU (cpu/tiled.py), the activations that they multiply
            are rounded to one byte; on a GPU (quantization/quantized.py) they are not. "fp8", only on a GPU, stores the
            weights of the decoder layers as float8_e4m3fn; where the GPU multiplies fp8, steps of 64 tokens or more
            round activations to fp8, too, if `dtype` is bfloat16. Everything else, such as KV, is as `dtype` says.
            "awq" and "gptq" say how the checkpoint is quantized, which config.json says as well. None: the weights as
            the checkpoint has them.
        async_scheduling: submit a step before the results of the previous one have been read, so that a GPU need not
            wait for Python. Outputs are the same, but come one call of `step` later. It needs one worker. None: only
            with one worker on a GPU.
        tensor_parallel_size: workers that share each layer: each computes some heads of attention, some inputs of the
            feed-forward layer and a part of the vocabulary. Must divide these numbers. On a GPU, each worker has a GPU
            of its own.
        enable_expert_parallel: divide whole experts among the `tensor_parallel_size` workers of a stage, instead of the
            columns of every expert. Their number must divide the number of experts. Attention and a shared expert are
            divided as before.
        pipeline_parallel_size: stages of `tensor_parallel_size` workers, each with a range of layers. As many batches
            are in flight as there are stages.
        distributed_executor_backend: "mp": workers are processes on this machine. "ray": they are actors of a Ray
            cluster, also on other machines, where the model must have the same path (see docs/deploy.md). None: "mp" if
            there are several workers, and otherwise a worker in this process.
        speculative_config: guess the next tokens of a sequence and check several of them in one step, for example
            {"method": "ngram", "num_speculative_tokens": 5}: see `SpeculativeConfig` and speculation/lookup.py. The
            output is the same. Not with async_scheduling=True or pipeline_parallel_size above 1. None: one token at a
            time.
        enable_lora: requests may have LoRA adapters (see docs/lora.md). With one worker for the whole model. On a GPU,
            layers are then not compiled; decode steps are still captured as CUDA graphs.
        max_loras: adapters in memory, and so the most that running requests may have.
        max_lora_rank: the highest rank of an adapter, at most 512. All adapters take as much memory as that.
        load_format: "auto" reads the model's weights. "dummy" draws random ones, to measure speed: a directory with
            config.json is enough then (see benchmarks/configs), and without tokenizer.json prompts are token ids.
        generation_config: where `LLM` and `AsyncLLM` get the parameters of requests that have none: "auto" is
            generation_config.json of the model, "vllm" is SamplingParams(). LLMEngine.add_request always takes
            SamplingParams(). The end-of-sequence ids in generation_config.json count with both.
        seed: for requests without a seed of their own.
        runner: "generate" makes text, "pooling" embeddings, classes and scores (see docs/embeddings.md). "auto" is what
            the model is for: pooling for an encoder, and where config.json names a model without a language-model head
            or modules.json is there; otherwise generate.
        convert: what pooling makes: "embed" or "classify". "auto" is what the model is for. "none" is "auto".
        pooler_config: how an embedding model pools, instead of what its files say: {"pooling_type": "CLS", "LAST" or
            "MEAN", "normalize": True or False}, one of them or both.
        hf_overrides: fields of config.json that make a reranker of a decoder that answers yes or no, as Qwen3-Reranker:
            {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True}. No other fields.

    Raises:
        ValueError, TypeError: an option out of range, by name.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    preemption_mode: str | None = None
    swap_space: float | None = None
    scheduling_policy: str = "fcfs"
    enforce_eager: bool = False
    quantization: str | None = None
    async_scheduling: bool | None = None
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str | None = None
    speculative_config: dict | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    load_format: str = "auto"
    generation_config: str = "auto"
    seed: int = 0
    runner: str = "auto"
    convert: str = "auto"
    pooler_config: dict | None = None
    hf_overrides: dict | None = None

    def __post_init__(self):
        for name, known in (("runner", RUNNERS), ("convert", CONVERSIONS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(known)}")
        for name in ("pooler_config", "hf_overrides"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} must be a dict or None, not {getattr(self, name)!r}")
        check_pooling_options(self.runner, self.convert, self.pooler_config, self.hf_overrides)
        if self.model is not None and not isinstance(self.model, str | Path):
            raise TypeError(f"model must be a path or a name, not {self.model!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device!r} is not one of {', '.join(DEVICES)}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise ValueError(f"kv_cache_dtype={self.kv_cache_dtype!r} is not one of {', '.join(KV_CACHE_DTYPES)}")
        if self.preemption_mode not in (None, *PREEMPTION_MODES):
            raise ValueError(f"preemption_mode={self.preemption_mode!r} is not one of {', '.join(PREEMPTION_MODES)}")
        if self.scheduling_policy not in POLICIES:
            raise ValueError(f"scheduling_policy={self.scheduling_policy!r} is not one of {', '.join(POLICIES)}")
        if self.quantization not in QUANTIZATIONS:
            names = ", ".join(filter(None, QUANTIZATIONS))
            raise ValueError(f"quantization={self.quantization!r} is not one of {names}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format={self.load_format!r} is not one of {', '.join(LOAD_FORMATS)}")
        if self.generation_config not in GENERATION_CONFIGS:
            choices = ", ".join(GENERATION_CONFIGS)
            raise ValueError(f"generation_config={self.generation_config!r} is not one of {choices}")
        lora = ("max_loras", "max_lora_rank")
        optional = ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override")
        for name in ("max_num_seqs", "block_size", "tensor_parallel_size", "pipeline_parallel_size", *lora, *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.distributed_executor_backend not in BACKENDS:
            names = ", ".join(filter(None, BACKENDS))
            raise ValueError(
                f"distributed_executor_backend={self.distributed_executor_backend!r} is not one of {names}"
            )
        if self.num_ranks > MAX_RANKS:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} times pipeline_parallel_size="
                f"{self.pipeline_parallel_size} is more than {MAX_RANKS} workers"
            )
        if self.async_scheduling and self.num_ranks > 1:
            raise ValueError(
                "async_scheduling=True needs one worker: tensor_parallel_size and pipeline_parallel_size must be 1"
            )
        self._check_lora()
        speculates = self.speculation is not None
        if speculates and self.async_scheduling:
            raise ValueError(
                "speculative_config and async_scheduling=True exclude each other: drafts need the results of the "
                "previous step"
            )
        if speculates and self.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config and pipeline_parallel_size={self.pipeline_parallel_size} exclude each other"
            )
        if self.num_ranks > 1 and self.speculation is not None and self.speculation.method == "draft_model":
            raise ValueError(
                f"speculative_config with method='draft_model' and tensor_parallel_size={self.tensor_parallel_size} "
                "exclude each other"
            )
        for name, limit in (("kv_cache_gib", math.inf), ("gpu_memory_utilization", 1.0)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise TypeError(f"{name} must be a number, not {value!r}")
            if not 0 < value <= min(limit, sys.float_info.max):
                most = "finite" if limit == math.inf else "at most 1"
                raise ValueError(f"{name} must be above 0 and {most}, got {value}")
        if self.swap_space is not None:
            if not isinstance(self.swap_space, int | float) or isinstance(self.swap_space, bool):
                raise TypeError(f"swap_space must be a number, not {self.swap_space!r}")
            if not 0 <= self.swap_space <= sys.float_info.max:
                raise ValueError(f"swap_space must be finite and at least 0, got {self.swap_space}")
            if self.preemption_mode == "recompute" and self.swap_space:
                raise ValueError("swap_space is of no use with preemption_mode='recompute'")
            if self.preemption_mode == "swap" and not self.swap_space:
                raise ValueError(
                    "preemption_mode='swap' needs host memory, but swap_space=0 gives it none: raise swap_space, or "
                    "use preemption_mode='recompute'"
                )
        sized_by = [
            name
            for name in ("kv_cache_gib", "gpu_memory_utilization", "num_gpu_blocks_override")
            if getattr(self, name) is not None
        ]
        if len(sized_by) > 1:
            raise ValueError(f"{' and '.join(sized_by)} both set the size of the KV cache: give one")
        for name in ("enable_prefix_caching", "enforce_eager", "enable_lora", "enable_expert_parallel"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError(
                "enable_expert_parallel=True divides experts among workers: it needs tensor_parallel_size above 1"
            )
        if self.async_scheduling is not None and not isinstance(self.async_scheduling, bool):
            raise TypeError(f"async_scheduling must be True, False or None, not {self.async_scheduling!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"seed must be an integer, not {self.seed!r}")

    def _check_lora(self) -> None:
        if self.max_lora_rank > MAX_LORA_RANK:
            raise ValueError(f"max_lora_rank={self.max_lora_rank} is more than {MAX_LORA_RANK}")
        if not self.enable_lora:
            for name, default in (("max_loras", 1), ("max_lora_rank", 16)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)} needs enable_lora=True")
            return
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) > 1:
                raise ValueError(f"enable_lora and {name}={getattr(self, name)} exclude each other: give one worker")

    @property
    def quantize_to(self) -> str | None:
        """What the weights are rounded to when they are loaded; None if they stay as the checkpoint has them."""
        return None if self.quantization in STORED_QUANTIZATIONS else self.quantization

    def for_draft_model(self, model: str, num_blocks: int, max_model_len: int) -> "EngineConfig":
        """The options of the draft model's worker."""
        return replace(
            self,
            model=model,
            max_model_len=max_model_len,
            num_gpu_blocks_override=num_blocks,
            kv_cache_gib=None,
            gpu_memory_utilization=None,
            preemption_mode=None,
            swap_space=0,
            quantization=None,
            speculative_config=None,
            enable_lora=False,
            max_loras=1,
            max_lora_rank=16,
            distributed_executor_backend=None,
        )

    @property
    def speculation(self) -> "SpeculativeConfig | None":
        """`speculative_config`, checked."""
        return None if self.speculative_config is None else SpeculativeConfig.from_dict(self.speculative_config)

    @property
    def num_ranks(self) -> int:
        """How many workers there are."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def is_distributed(self) -> bool:
        """Whether the workers are processes of their own."""
        return self.num_ranks > 1 or self.distributed_executor_backend is not None

    def token_budget(self, device_type: str) -> int:
        """The most tokens that a step ever has on a device of this type."""
        return self.max_num_batched_tokens or DEFAULT_TOKEN_BUDGET[device_type]


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made. Names are vLLM's.

    method: "ngram": the last tokens of a sequence have occurred in it before, and the draft is what followed them there
        (prompt lookup). "draft_model": a smaller model with the same vocabulary guesses.
    num_speculative_tokens: most tokens of a draft.
    model: the draft model: a directory, a .gguf file or a hub id. Its dtype, device and block size are the engine's. It
        has as many blocks of KV cache as the engine has.
    prompt_lookup_max, prompt_lookup_min: with "ngram", the most and the fewest last tokens that are looked up, the most
        first. By default 4 and 2. If only one is given, the default of the other adapts to it.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | None = None

    @classmethod
    def from_dict(cls, values: dict) -> "SpeculativeConfig":
        """Raises: TypeError, ValueError naming the key."""
        if not isinstance(values, dict):
            raise TypeError(f"speculative_config must be a dict or None, not {shown(values)}")
        values = {key: value for key, value in values.items() if value is not None}
        names = list(cls.__dataclass_fields__)
        if unknown := [key for key in values if key not in names]:
            raise ValueError(
                f"speculative_config has {', '.join(map(shown, unknown))}, which is not supported; supported: "
                f"{', '.join(names)}"
            )
        method = values.get("method")
        if method not in ("ngram", "draft_model"):
            raise ValueError(
                f"speculative_config: method={shown(method)} is not supported; supported: 'ngram', 'draft_model'"
            )
        if "num_speculative_tokens" not in values:
            raise ValueError("speculative_config: num_speculative_tokens is missing")
        for name in ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"):
            value = values.get(name, 1)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"speculative_config: {name} must be an integer, not {shown(value)}")
            if not 1 <= value <= MAX_DRAFT:
                raise ValueError(f"speculative_config: {name} must be from 1 to {MAX_DRAFT}, got {value}")
        others = ("prompt_lookup_max", "prompt_lookup_min") if method == "draft_model" else ("model",)
        for name in others:
            if name in values:
                raise ValueError(f"speculative_config: {name} is not for method={method!r}")
        if method == "draft_model":
            model = values.get("model")
            if model is None:
                raise ValueError("speculative_config: method='draft_model' needs model")
            if not isinstance(model, str | Path) or not str(model):
                raise TypeError(f"speculative_config: model must be a path or a hub id, not {shown(model)}")
            return cls("draft_model", values["num_speculative_tokens"], model=str(model))
        most = values.get("prompt_lookup_max", max(4, values.get("prompt_lookup_min", 1)))
        least = values.get("prompt_lookup_min", min(2, most))
        if least > most:
            raise ValueError(f"speculative_config: prompt_lookup_min={least} is more than prompt_lookup_max={most}")
        return cls("ngram", values["num_speculative_tokens"], most, least)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters; `params` holds what is particular to `rope_type`, under config.json's names.

    partial: the share of each head's dimensions that is rotated, the first ones.
    """

    theta: float
    rope_type: str = "default"
    params: dict = field(default_factory=dict)
    partial: float = 1.0

    def num_rotated(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * self.partial)

    def for_length(self, length: int) -> "RopeConfig":
        """The same for sequences of up to `length` tokens, on which the frequencies of longrope depend."""
        return replace(self, params=self.params | {"length": length}) if "length" in self.params else self


@dataclass(frozen=True)
class StoredQuantization:
    """How the linear layers of a checkpoint, except the head, are stored (see quantization/quantized_checkpoint.py).

    method: "awq", with 4 bits, or "gptq", with 4 or 8.
    group_size: inputs that share a scale and a zero point; None: all inputs.
    desc_act: whether the inputs of a group are not adjacent (GPTQ's act-order).
    zero_offset: what is added to the stored zero points: 1 in GPTQ's first format.
    """

    method: str
    bits: int
    group_size: int | None
    desc_act: bool = False
    zero_offset: int = 0

    @classmethod
    def from_fields(cls, fields: "Fields", has_experts: bool = False) -> "StoredQuantization":
        """`fields` is quantization_config. Raises: ValueError naming what is not supported."""
        method = fields.values.get("quant_method")
        if method not in STORED_QUANTIZATIONS:
            supported = ", ".join(STORED_QUANTIZATIONS)
            raise fields.error("quant_method", f"{shown(method)} is not supported; supported: {supported}")
        layouts, default = (("gemm",), "gemm") if method == "awq" else (("gptq", "gptq_v2"), "gptq")
        layout = default
        for name in ("version", "format") if method == "awq" else ("checkpoint_format", "format"):
            value = fields.values.get(name)
            if value is not None:
                layout = value.lower() if isinstance(value, str) else value
                if layout not in layouts:
                    raise fields.error(name, f"{shown(value)} is not supported; supported: {', '.join(layouts)}")
        bits = fields.choice("bits", (4,) if method == "awq" else (4, 8))
        group_size = fields.choice("group_size", (*GROUP_SIZES, -1))
        if method == "awq" and not fields.flag("zero_point", True):
            raise fields.error("zero_point", "false is not supported; supported: true")
        skipped = fields.values.get("modules_to_not_convert") or []
        known = EXPERT_GATES if has_experts else re.compile("lm_head")
        if not isinstance(skipped, list) or not all(
            isinstance(name, str) and known.fullmatch(name) for name in skipped
        ):
            also = " and the gates of experts" if has_experts else ""
            raise fields.error("modules_to_not_convert", f"{shown(skipped)} is not supported, except for lm_head{also}")
        for name in ("lm_head", "is_marlin_format"):
            if fields.flag(name):
                raise fields.error(name, "true is not supported")
        for name in ("dynamic", "modules_in_block_to_quantize"):  # other settings for some of the layers
            if fields.values.get(name):
                raise fields.error(name, f"{shown(fields.values[name])} is not supported")
        if fields.values.get("pack_dtype", "int32") != "int32":
            raise fields.error("pack_dtype", f"{shown(fields.values['pack_dtype'])} is not supported; supported: int32")
        return cls(
            method=method,
            bits=bits,
            group_size=None if group_size == -1 else group_size,
            desc_act=method == "gptq" and fields.flag("desc_act"),
            zero_offset=int(method == "gptq" and layout == "gptq"),
        )


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts of a model (see layers/moe.py).

    num_experts: of each mixture. num_chosen: how many of them compute a token.
    intermediate_size: of each expert.
    shared_size: the intermediate size of an expert that computes all tokens; 0: there is none.
    normalize: whether the weights of a token's experts are divided by their sum.
    layers: whether each layer of the model has a mixture. Others have a plain feed-forward layer.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    shared_size: int
    normalize: bool
    layers: tuple[bool, ...]

    def divided(self, tp_size: int, expert_parallel: bool) -> "ExpertsConfig":
        """As `ModelConfig.divided`. `num_experts` stays: experts keep their numbers."""
        if expert_parallel and self.num_experts % tp_size:
            raise ValueError(
                f"tensor_parallel_size={tp_size} with enable_expert_parallel does not divide num_experts="
                f"{self.num_experts}"
            )
        if not expert_parallel and self.intermediate_size % tp_size:
            raise ValueError(
                f"tensor_parallel_size={tp_size} does not divide intermediate_size={self.intermediate_size} of each "
                "expert: enable_expert_parallel divides the number of experts instead"
            )
        if self.shared_size % tp_size:
            raise ValueError(
                f"tensor_parallel_size={tp_size} does not divide shared_expert_intermediate_size={self.shared_size}"
            )
        size = self.intermediate_size if expert_parallel else self.intermediate_size // tp_size
        return replace(self, intermediate_size=size, shared_size=self.shared_size // tp_size)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer, whatever config.json called it.

    Fields that only some families have, beside their defaults:

    activation: of the feed-forward layer, one of ACTIVATIONS.
    norm_offset: as in layers/norm.py.
    attention_scale: of the products of q and K. None: head_dim ** -0.5.
    attention_softcap, logit_softcap: x becomes softcap * tanh(x / softcap), for the scores of attention and for logits.
        0: x stays.
    embedding_scale, residual_scale: factors of embeddings, and of what each layer adds to the hidden states.
    logit_divisor: logits are divided by it.
    local_rope: the rope of layers with a window. None: `rope`, as in other layers.
    undivided: why tensor parallelism does not work with the family.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int | None, ...]  # one per layer; None attends to everything
    dtype: str
    eos_token_ids: frozenset[int]
    quantization: StoredQuantization | None = None
    experts: ExpertsConfig | None = None
    activation: str = "silu"
    norm_offset: float | None = None
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    local_rope: RopeConfig | None = None
    undivided: str | None = None
    pooling: PoolingConfig | None = None  # what is made instead of text

    def for_length(self, max_model_len: int | None) -> "ModelConfig":
        """The same for sequences of up to `max_model_len` tokens. None: for the model's own limit."""
        return self if max_model_len is None else replace(self, rope=self.rope.for_length(max_model_len))

    def divided(self, tp_size: int, expert_parallel: bool = False) -> "ModelConfig":
        """The shape of what each of `tp_size` workers has of every layer.

        Heads, inputs of the feed-forward layer and the vocabulary are divided. Where there are fewer KV heads than
        workers, several workers have the same one. With `expert_parallel`, experts stay whole.

        Raises: ValueError naming a size that cannot be divided, or a family.
        """
        if tp_size > 1 and self.undivided is not None:
            raise ValueError(f"tensor_parallel_size={tp_size} does not work with {self.architecture}: {self.undivided}")
        sizes = {
            "num_heads": "num_attention_heads",
            "intermediate_size": "intermediate_size",
            "vocab_size": "vocab_size",
        }
        if self.experts is not None and all(self.experts.layers):
            del sizes["intermediate_size"]  # no layer has it
        for name, known_as in sizes.items():
            if getattr(self, name) % tp_size:
                raise ValueError(f"tensor_parallel_size={tp_size} does not divide {known_as}={getattr(self, name)}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={tp_size} is neither a divisor nor a multiple of num_key_value_heads="
                f"{self.num_kv_heads}"
            )
        return replace(
            self,
            num_heads=self.num_heads // tp_size,
            num_kv_heads=max(1, self.num_kv_heads // tp_size),
            intermediate_size=self.intermediate_size // tp_size,
            vocab_size=self.vocab_size // tp_size,
            experts=None if self.experts is None else self.experts.divided(tp_size, expert_parallel),
        )

    def stage(self, pp_rank: int, pp_size: int) -> range:
        """The layers of one of `pp_size` stages. The first stages have one more if the number is not a multiple.

        Raises: ValueError if there are more stages than layers.
        """
        if pp_size > self.num_layers:
            raise ValueError(f"pipeline_parallel_size={pp_size} is more than the model's {self.num_layers} layers")
        each, more = divmod(self.num_layers, pp_size)
        first = pp_rank * each + min(pp_rank, more)
        return range(first, first + each + (pp_rank < more))

    @classmethod
    def from_directory(cls, path: Path) -> "ModelConfig":
        """Read config.json. The end-of-sequence ids are those of config.json and of generation_config.json.

        Raises: FileNotFoundError; ValueError as in `from_dict`, naming the file.
        """
        config = cls.from_dict(read_json(path / "config.json"), str(path / "config.json"))
        file = path / "generation_config.json"
        if not exists(file):
            return config
        more = Fields(read_json(file), str(file)).special_ids(config.vocab_size)
        return replace(config, eos_token_ids=config.eos_token_ids | more)

    @classmethod
    def from_dict(cls, config: dict, source: str = "config.json") -> "ModelConfig":
        """`config` is config.json as a dict, with the field names of transformers 4 or 5; `source` is the file's name
        in error messages.

        Raises:
            ValueError: an architecture, rope type, activation or quantization that is not supported, or a field that
                is missing, of the wrong type or out of range, by name.
        """
        fields = Fields(config, source)
        architecture, family = _find_family(fields)
        pooling = None
        if architecture.endswith("ForSequenceClassification"):
            pooling = read_classifier(config, source, fields.num_labels())
        elif architecture.endswith("Model"):
            pooling = PoolingConfig()
        architecture = _causal(architecture)
        for name, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
            if fields.values.get(name) is not None and fields.flag(name, causal) != causal:
                raise fields.error(name, f"{str(not causal).lower()} is not supported for decoders")
        vocab_size = fields.size("vocab_size")
        hidden_size, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
        special = family.read_config(fields, architecture)
        quantization = None
        if config.get("quantization_config") is not None:
            stored = Fields(fields.object("quantization_config").values, f"{source}: quantization_config")
            quantization = StoredQuantization.from_fields(stored, "experts" in special)
        if "activation" not in special:
            special["activation"] = fields.activation("hidden_act")
        if "experts" in special and special["activation"] != "silu":
            raise fields.error(
                "hidden_act", f"{special['activation']!r} is not supported with experts; supported: silu"
            )
        if "rope" not in special:
            special["rope"] = read_rope(fields)
        num_kv_heads, head_dim = special["num_kv_heads"], special["head_dim"]
        if num_heads % num_kv_heads:
            problem = f"{num_heads} is not a multiple of num_key_value_heads={num_kv_heads}"
            raise fields.error("num_attention_heads", problem)
        if head_dim % 2:
            raise fields.error("head_dim", f"{head_dim} is odd: rotary embeddings need pairs")
        special.setdefault("rms_norm_eps", fields.number("rms_norm_eps", 1e-6))
        special.setdefault("tie_word_embeddings", fields.flag("tie_word_embeddings"))
        for rope in filter(None, (special["rope"], special.get("local_rope"))):
            check_rope(fields, rope, head_dim)
        return cls(
            architecture=architecture,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            num_layers=fields.size("num_hidden_layers"),
            num_heads=num_heads,
            max_position_embeddings=fields.size("max_position_embeddings"),
            dtype=read_dtype(fields),
            eos_token_ids=fields.special_ids(vocab_size),
            quantization=quantization,
            pooling=pooling,
            **special,
        )


@dataclass(frozen=True)
class Fields:
    """Reads a JSON object field by field; a value of the wrong kind is a ValueError that names the file and field."""

    values: dict
    source: str  # the file

    def error(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self.source}: {name} {problem}")

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer. Null counts as missing here: several fields are written as null to say "the default"."""
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, f"must be a positive integer, got {shown(value)}")
        if value > MAX_SIZES[name]:
            raise self.error(name, f"must be at most {MAX_SIZES[name]:,}, got {shown(value)}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number within its range."""
        value = self.values.get(name, default)
        low, high = RANGES[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}, got {shown(value)}")
        return float(value)

    def choice(self, name: str, supported: tuple[int, ...]) -> int:
        """One of several integers."""
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value not in supported:
            choices = ", ".join(map(str, supported))
            raise self.error(name, f"{shown(value)} is not supported; supported: {choices}")
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number within its range, or None where it is null, or missing without a default."""
        return None if self.values.get(name, default) is None else self.number(name, default)

    def activation(self, name: str, default: str = "silu") -> str:
        """One of ACTIVATIONS, of which silu has another name, swish."""
        value = self.values.get(name, default)
        value = "silu" if value == "swish" else value
        if value not in ACTIVATIONS:
            raise self.error(name, f"{shown(value)} is not supported; supported: {', '.join(ACTIVATIONS)}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {shown(value)}")
        return value

    def object(self, name: str) -> "Fields":
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {shown(value)}")
        return Fields(dict(value or {}), self.source)

    def windows(
        self, num_layers: int, default: int | None, from_layer: int = 0, kinds: list[str] | None = None
    ) -> tuple[int | None, ...]:
        """The sliding window of each layer, or None for a layer that attends to everything.

        `layer_types` or `max_window_layers` says which layers have a window.

        Args:
            default: where config.json has no `sliding_window`. Null there is no window.
            kinds: in place of `layer_types`.
            from_layer: the first layer with a window, if config.json does not say. 0 ignores `max_window_layers`.
        """
        if self.values.get("sliding_window", default) is None:
            return (None,) * num_layers
        window = self.size("sliding_window", default)
        kinds = self.values.get("layer_types") if kinds is None else kinds
        if kinds is not None:
            known = isinstance(kinds, list) and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
            if not known or len(kinds) != num_layers:
                raise self.error("layer_types", f"{shown(kinds)} is not supported for {num_layers} layers")
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        first = self.values.get("max_window_layers", from_layer) if from_layer else 0
        if not isinstance(first, int) or isinstance(first, bool) or first < 0:
            raise self.error("max_window_layers", f"must be an integer of at least 0, got {shown(first)}")
        return tuple(window if layer >= first else None for layer in range(num_layers))

    def experts(
        self, num_experts: int, num_chosen: int, intermediate_size: int, shared_size: int = 0, normalize: bool = True
    ) -> ExpertsConfig:
        """A mixture of these sizes in the layers that `mlp_only_layers` and `decoder_sparse_step` leave."""
        num_layers, step = self.size("num_hidden_layers"), self.size("decoder_sparse_step", 1)
        plain = self.values.get("mlp_only_layers") or []
        if not isinstance(plain, list) or any(not isinstance(i, int) or isinstance(i, bool) for i in plain):
            raise self.error("mlp_only_layers", f"must be a list of integers, got {shown(plain)}")
        if num_experts * num_layers > MAX_EXPERTS:
            problem = f"{num_experts:,} in {num_layers:,} layers is more than {MAX_EXPERTS:,} experts"
            raise self.error("num_experts", problem)
        if num_chosen > num_experts:
            raise self.error("num_experts_per_tok", f"must be at most num_experts={num_experts}, got {num_chosen}")
        layers = tuple(index not in plain and (index + 1) % step == 0 for index in range(num_layers))
        return ExpertsConfig(num_experts, num_chosen, intermediate_size, shared_size, normalize, layers)

    def num_labels(self) -> int:
        """How many classes a model has: transformers writes their names, unless they are two without names."""
        labels = self.object("id2label").values
        return len(labels) if labels else self.size("num_labels", 2)

    def special_ids(self, vocab_size: int) -> frozenset[int]:
        """The end-of-sequence ids. Checks the other special ids, too."""
        self._token_ids("bos_token_id", vocab_size)
        if self.values.get("pad_token_id") != -1:  # how old Llama checkpoints say that there is none
            self._token_ids("pad_token_id", vocab_size)
        return self._token_ids("eos_token_id", vocab_size)

    def _token_ids(self, name: str, vocab_size: int) -> frozenset[int]:
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise self.error(name, f"must be a token id or a list of them, got {shown(value)}")
            if not 0 <= token_id < vocab_size:
                raise self.error(name, f"{shown(token_id)} is not in the vocabulary of {vocab_size:,} tokens")
        return frozenset(ids)


def _find_family(fields: Fields) -> tuple[str, ModuleType]:
    """The architecture, and the module of nanopage.models that has it."""
    from nanopage.models import find_family, load_families  # they import torch, which the engine must not

    names = fields.values.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise fields.error("architectures", f"must be a list of names, got {shown(names)}")
    for name in names or []:
        if (family := find_family(_causal(name))) is not None:
            return name, family
    supported = ", ".join(name for family in load_families() for name in family.ARCHITECTURES)
    raise fields.error("architectures", f"{shown(names)} is not supported; supported: {supported}")


def _causal(architecture: str) -> str:
    """The name of the model with a language-model head, for one without or with a classifier: Qwen3Model ->
    Qwen3ForCausalLM."""
    return re.sub("(Model|ForSequenceClassification)$", "ForCausalLM", architecture)


def read_dtype(fields: Fields) -> str:
    value = fields.values.get("dtype")
    name = "torch_dtype" if value is None else "dtype"  # transformers 4 wrote torch_dtype
    value = fields.values.get(name)
    value = "float32" if value is None else value
    dtype = value.removeprefix("torch.") if isinstance(value, str) else ""
    if dtype not in DTYPES[1:]:
        raise fields.error(name, f"{shown(value)} is not supported; supported: {', '.join(DTYPES[1:])}")
    return dtype


def read_rope(
    config: Fields, layer_type: str | None = None, default_theta: float = 10000.0, partial: bool = False
) -> RopeConfig:
    """The rope of a model. transformers 5 writes rope_parameters, 4 wrote rope_theta beside rope_scaling (whose key was
    once "type").

    Args:
        layer_type: whose rope it is, where rope_parameters has one for each layer type. None: the model has one rope.
        default_theta: where config.json has no rope_theta.
        partial: whether the family knows partial_rotary_factor. Others refuse it.
    """
    name = "rope_parameters" if config.values.get("rope_parameters") else "rope_scaling"
    rope, max_position_embeddings = config.object(name), config.size("max_position_embeddings")
    if any(isinstance(value, dict) for value in rope.values.values()):
        if layer_type is None:
            raise config.error("rope_parameters", "per layer type are not supported")
        name, rope = f"{name}: {layer_type}", rope.object(layer_type)
    owner = rope if rope.values.get("rope_theta") is not None else config
    theta = owner.number("rope_theta") if owner.values.get("rope_theta") is not None else default_theta
    rope_type = rope.values.get("rope_type", rope.values.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type  # its first name
    if rope_type not in ROPE_TYPES:
        raise config.error(name, f"of type {shown(rope_type)} is not supported; supported: {', '.join(ROPE_TYPES)}")
    owner = rope if rope.values.get("partial_rotary_factor") is not None else config
    rotated = 1.0
    if owner.values.get("partial_rotary_factor") is not None:
        rotated = owner.number("partial_rotary_factor")
    if rotated != 1 and not partial:
        raise config.error("partial_rotary_factor", f"{rotated:g} is not supported; supported: 1.0")
    others = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    params = {key: value for key, value in rope.values.items() if key not in others}
    if config.values.get("original_max_position_embeddings") is not None:  # transformers gives it priority
        params["original_max_position_embeddings"] = config.values["original_max_position_embeddings"]
    if rope_type == "yarn" and params.get("original_max_position_embeddings") is None:
        params["original_max_position_embeddings"] = max_position_embeddings
    if params.get("mrope_section") is not None:
        raise config.error(name, "with mrope_section (mrope) is not supported")
    numbers = Fields(params, f"{config.source}: {name} of type {rope_type!r}")
    needed, optional = ROPE_NUMBERS[rope_type]
    for key in needed:
        params[key] = numbers.number(key)
    for key in optional:
        if params.get(key) is not None:
            numbers.number(key)
    if rope_type == "llama3" and params["low_freq_factor"] >= params["high_freq_factor"]:
        raise numbers.error("low_freq_factor", "must be less than high_freq_factor")
    if rope_type == "yarn":
        numbers.flag("truncate", True)
    if rope_type == "longrope":
        params["max_position_embeddings"] = params["length"] = max_position_embeddings
    return RopeConfig(theta, rope_type, params, rotated)


def check_rope(config: Fields, rope: RopeConfig, head_dim: int) -> None:
    """Raises: ValueError for a rope that does not fit heads of this size."""
    rotated = rope.num_rotated(head_dim)
    if rotated < 2 or rotated % 2:
        problem = f"{rope.partial:g} rotates {rotated} of {head_dim} dimensions: rotary embeddings need pairs"
        raise config.error("partial_rotary_factor", problem)
    if rope.rope_type != "longrope":
        return
    if rope.params["original_max_position_embeddings"] < 2:
        raise config.error("original_max_position_embeddings", "of a rope of type 'longrope' must be at least 2")
    low, high = RANGES["factor"]
    for name in ("short_factor", "long_factor"):
        values = rope.params.get(name)
        numbers = isinstance(values, list) and all(
            isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high for value in values
        )
        if not isinstance(values, list) or not numbers or len(values) != rotated // 2:
            problem = f"of a rope of type 'longrope' must be {rotated // 2} numbers from {low:g} to {high:g}"
            raise config.error(name, f"{problem}, got {shown(values)}")
