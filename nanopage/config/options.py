"""EngineConfig: what the user sets."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from nanopage.checks.fields import Dtype
from nanopage.checks.options import Count, Flag, Gib, Share, SwapGib, check_fields, integer
from nanopage.checks.overrides import check_overrides, reranker_fields
from nanopage.checks.pooling import Conversion, Runner, check_pooler_config
from nanopage.checks.speculation import HEADS, SpeculativeConfig
from nanopage.checks.stored_quantization import STORED_QUANTIZATIONS

DEFAULT_TOKEN_BUDGET = {"cpu": 2048, "cuda": 8192}  # by device type
MAX_RANKS = 1024
SIZES = ("tensor_parallel_size", "pipeline_parallel_size")


@dataclass(kw_only=True)
class EngineConfig:
    """Everything a user can set on an engine. Names and defaults are vLLM's where the meaning is the same.

    Args:
        model: a Hugging Face directory, a .gguf file, a hub id, or None for SmolLM2-135M-Instruct (see weights/hub.py).
        dtype: of weights, activations and KV; "auto" is the checkpoint's if the device computes in it natively. A .gguf
            file counts as bfloat16. Where a CPU does not compute in the checkpoint's 16 bits, "auto" is float32, but K
            and V keep the 16 bits. On a CPU, compiled layers in float32 keep the checkpoint's bfloat16 or float16
            weights, and widen them as they read them. Weights that a .gguf file has as Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
            Q4_K, Q5_K or Q6_K stay integers, and the activations that they multiply are rounded to int8 (see
            quantization/gguf_tiles.py).
        device: "auto" is CUDA if present, else the CPU.
        max_model_len: most tokens (prompt + output) of a sequence; None is the model's own limit, or what the
            KV cache holds if that is less.
        max_num_seqs: most sequences that run at once; each completion of `n` and each beam counts.
        max_num_batched_tokens: most tokens in one step; longer prompts are prefilled in chunks. None: 8,192 on a GPU;
            on a CPU 2,048, and 512 for `LLM`. For AsyncLLM and the server it follows the time that steps take, up to
            these numbers (see engine/token_budget.py).
        block_size: tokens per KV cache block; on a GPU a power of two.
        kv_cache_dtype: "auto" keeps K and V as `dtype` says, "fp8" (or "fp8_e4m3") in 8 bits (e4m3), so that twice as
            many tokens fit as in 16 bits. In fp8, K and V are divided by the checkpoint's k_scale and v_scale of each
            layer, or by 1 if it has none. fp8 needs a GPU of compute capability 8.9 or later, or a CPU with
            `enforce_eager`.
        kv_cache_gib: most GiB for the KV cache. None: see `gpu_memory_utilization`.
        gpu_memory_utilization: the share of the device's memory (on a CPU: of the RAM) that weights and KV cache may
            take together; on a GPU the memory of a step counts, too. None: 0.9 on a GPU; on a CPU the KV cache gets a
            quarter of the available RAM, at most 4 GiB. That is a limit for large batches and long contexts: the system
            gives memory to a part of the cache when it is first written. The cache is never larger than `max_num_seqs`
            sequences of `max_model_len` tokens, so `nanopage chat`, which has one at a time, has a small one.
        num_gpu_blocks_override: size of the KV cache in blocks, on any device; for tests. If a model's layers differ in
            their windows, a block belongs to the layers of one kind (layer_kinds.py).
        enable_prefix_caching: share the KV of equal prefixes between requests.
        preemption_mode: what happens to a request's KV when another needs its blocks: "recompute" or "swap". None: see
            the rule in engine/preemption.py.
        swap_space: GiB of host memory for swapped KV, taken when first needed. None: as much as the KV cache, but at
            most a quarter of the available RAM and 4 GiB. When it is full, requests are recomputed. With 0, no request
            is swapped, and preemption_mode="swap" is refused.
        scheduling_policy: "fcfs", or "priority": requests with a lower `priority` go first, and may take the blocks of
            requests with a higher one.
        enforce_eager: compile and capture nothing. False: on a CPU, decoder layers in float32, or in bfloat16 if oneDNN
            computes in it, are compiled in the background once the first requests have ended, and used from then on
            (see cpu/aot.py). On a GPU, they are compiled at start, and decode steps, and the compiled
            parts of other small steps, are captured as CUDA graphs (see worker/jit.py, worker/cuda_graphs.py and
            worker/piecewise_graphs.py).
        quantization: how weights are stored, if not as in the checkpoint. "int8" stores each weight of linear layers,
            and of an embedding tied to the head, in one byte. "int4" stores the weights of the decoder layers in half a
            byte, with a scale and an offset for each 32 inputs, and those of the head in one byte. On a CPU
            (cpu/tiled.py), the activations that they multiply are rounded to one byte; on a GPU
            (quantization/quantized.py) they are not. "fp8", only on a GPU, stores the weights of the decoder layers as
            float8_e4m3fn; where the GPU multiplies fp8, steps of 64 tokens or more round activations to fp8, too, if
            `dtype` is bfloat16. Everything else, such as KV, is as `dtype` says. "awq", "gptq", "mxfp4",
            "compressed-tensors" and "modelopt" say how the checkpoint is quantized, which config.json says as well.
        async_scheduling: submit a step before the results of the previous one have been read, so that a GPU need not
            wait for Python. Outputs are the same, but come one call of `step` later. It needs one worker. None: only
            with one worker on a GPU.
        tensor_parallel_size: workers that share each layer: each computes some heads of attention, some inputs of the
            feed-forward layer and a part of the vocabulary. Must divide these numbers. On a GPU, each worker has a GPU
            of its own.
        enable_expert_parallel: divide whole experts among the `tensor_parallel_size` workers of a stage, instead of the
            columns of every expert. `tensor_parallel_size` must divide the number of experts. Attention and a shared
            expert are divided as without this option.
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
            layers are then not compiled; decode steps are still captured as CUDA graphs. Models with experts: only on
            a CPU, and not compiled.
        max_loras: adapters in memory, and so the most that running requests may have.
        max_lora_rank: the highest rank of an adapter, at most 512. Every adapter takes the memory of this rank.
        enable_prompt_embeds: prompts may be {"prompt_embeds": tensor} (see docs/prompt-embeddings.md).
        limit_mm_per_prompt: the most images of a prompt, as {"image": 4}. None: 16.
        allowed_local_media_path: a directory whose files may be images of prompts, as file URLs.
        allowed_media_domains: hosts whose images may be fetched. None: images come as data URLs (see docs/images.md).
        enable_prompt_adapter: requests may have soft prompts of PEFT (see docs/prompt-embeddings.md).
        load_format: "auto" reads the model's weights, "dummy" draws random ones, to measure speed: a directory with
            config.json is enough then (see benchmarks/configs). Without tokenizer.json, prompts are token ids.
        generation_config: where `LLM` and `AsyncLLM` get the parameters of requests that have none: "auto" is
            generation_config.json of the model, "vllm" is SamplingParams(). LLMEngine.add_request always takes
            SamplingParams(). The end-of-sequence ids in generation_config.json count with both.
        model_impl: what computes a decoder: "nanopage" has families of its own, "transformers" runs transformers'
            module with paged attention (see docs/transformers.md). "auto" is nanopage where a family fits, and
            otherwise transformers.
        seed: for requests without a seed of their own.
        batch_invariant: the tokens and log-probabilities of a request do not depend on what runs beside it, to the bit,
            also in float32 and bfloat16. On a CPU only. Layers are compiled before the first step (see
            docs/performance.md).
        runner: "generate" makes text, "pooling" embeddings, classes and scores (see docs/embeddings.md). "auto" is what
            the model is for: pooling for an encoder, and where config.json names a model without a language-model head
            or modules.json is there; otherwise generate.
        convert: what pooling makes: "embed" or "classify". "auto" is what the model is for. "none" is "auto".
        pooler_config: how an embedding model pools, instead of what its files say: {"pooling_type": "CLS", "LAST" or
            "MEAN", "normalize": True or False}, one of them or both.
        hf_overrides: fields of config.json. rope_scaling (or rope_parameters), rope_theta and max_position_embeddings
            extend a context. Others turn a decoder that answers yes or no, such as Qwen3-Reranker, into a reranker:
            {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True}.

    Raises:
        ValueError, TypeError: an option out of range, by name.
    """

    model: str | None = None
    dtype: Literal["auto", Dtype] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: Count | None = None
    max_num_seqs: Count = 256
    max_num_batched_tokens: Count | None = None
    block_size: Count = 16
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    kv_cache_gib: Gib | None = None
    gpu_memory_utilization: Share | None = None
    num_gpu_blocks_override: Count | None = None
    enable_prefix_caching: Flag = True
    preemption_mode: Literal["recompute", "swap"] | None = None
    swap_space: SwapGib | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    enforce_eager: Flag = False
    quantization: Literal["int8", "int4", "fp8", "awq", "gptq", "mxfp4", "compressed-tensors", "modelopt"] | None = None
    async_scheduling: Flag | None = None
    tensor_parallel_size: Count = 1
    enable_expert_parallel: Flag = False
    pipeline_parallel_size: Count = 1
    distributed_executor_backend: Literal["mp", "ray"] | None = None
    speculative_config: dict | None = None
    enable_lora: Flag = False
    max_loras: Count = 1
    max_lora_rank: Annotated[int, integer(1, 512)] = 16
    enable_prompt_embeds: Flag = False
    limit_mm_per_prompt: dict | None = None
    allowed_local_media_path: str = ""
    allowed_media_domains: list[str] | None = None
    enable_prompt_adapter: Flag = False
    load_format: Literal["auto", "dummy"] = "auto"
    generation_config: Literal["auto", "vllm"] = "auto"
    model_impl: Literal["auto", "nanopage", "transformers"] = "auto"
    seed: int = 0
    batch_invariant: Flag = False
    runner: Runner = "auto"
    convert: Conversion = "auto"
    pooler_config: dict | None = None
    hf_overrides: dict | None = None

    def __post_init__(self):
        if self.model is not None and not isinstance(self.model, str | Path):
            raise TypeError(f"model must be a path or a name, not {self.model!r}")
        check_fields(self, but=("model",))
        check_overrides(self.hf_overrides)
        check_pooler_config(self.pooler_config)
        for message in self._conflicts():
            raise ValueError(message)

    def _conflicts(self) -> Iterator[str]:
        """Why options exclude each other. startup/options.py says what does not fit the model or the device."""
        reranker = reranker_fields(self.hf_overrides)
        if self.runner == "generate":
            makes = {"convert": self.convert, "pooler_config": self.pooler_config, "hf_overrides": reranker}
            for name, value in makes.items():
                if value and value not in ("auto", "none"):
                    yield f"{name}={value!r} and runner='generate' exclude each other"
        if self.convert == "classify" and self.pooler_config:
            yield "pooler_config is for embeddings, and convert='classify' makes none"
        if reranker and (self.convert == "embed" or self.pooler_config):
            yield "hf_overrides makes a reranker: give neither convert='embed' nor pooler_config"
        tp_size, pp_size = (f"{name}={getattr(self, name)}" for name in SIZES)
        if self.num_ranks > MAX_RANKS:
            yield f"{tp_size} times {pp_size} is more than {MAX_RANKS} workers"
        if self.async_scheduling and self.num_ranks > 1:
            yield "async_scheduling=True needs one worker: tensor_parallel_size and pipeline_parallel_size must be 1"
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            yield "enable_expert_parallel=True divides experts among workers: it needs tensor_parallel_size above 1"
        method = self.speculation and self.speculation.method
        if method and self.async_scheduling:
            yield (
                "speculative_config and async_scheduling=True exclude each other: drafts need the results of the "
                "previous step"
            )
        if method and self.pipeline_parallel_size > 1:
            yield f"speculative_config and {pp_size} exclude each other"
        local = ("tensor_parallel_size", *(("distributed_executor_backend",) if method in HEADS else ()))
        for option in self.given(*local) if method not in (None, "ngram") else ():
            yield f"speculative_config with method={method!r} and {option} exclude each other"
        if self.preemption_mode == "recompute" and self.swap_space:
            yield "swap_space is of no use with preemption_mode='recompute'"
        if self.preemption_mode == "swap" and self.swap_space == 0:
            yield (
                "preemption_mode='swap' needs host memory, but swap_space=0 gives it none: raise swap_space, or use "
                "preemption_mode='recompute'"
            )
        sizes = ("kv_cache_gib", "gpu_memory_utilization", "num_gpu_blocks_override")
        if len(sized_by := [name for name in sizes if getattr(self, name) is not None]) > 1:
            yield f"{' and '.join(sized_by)} both set the size of the KV cache: give one"
        if self.batch_invariant:
            for option in self.given("enforce_eager", "enable_lora", *SIZES, "distributed_executor_backend"):
                yield f"batch_invariant=True and {option} exclude each other"
        if self.enable_lora:
            for option in self.given(*SIZES):
                yield f"enable_lora and {option} exclude each other: give one worker"
        else:
            for option in self.given("max_loras", "max_lora_rank"):
                yield f"{option} needs enable_lora=True"

    def given(self, *names: str) -> Iterator[str]:
        """The named options that differ from their defaults, as "name=value"."""
        for name in names:
            if (value := getattr(self, name)) != EngineConfig.__dataclass_fields__[name].default:
                yield f"{name}={value!r}"

    @property
    def quantize_to(self) -> str | None:
        """What the weights are rounded to when they are loaded; None if they stay as the checkpoint has them."""
        return None if self.quantization in STORED_QUANTIZATIONS else self.quantization

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
