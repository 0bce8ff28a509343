"""What LoRA adapters cost: the throughput of a batch with no, one and many adapters, their memory, and the time to load
one."""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nanopage import LoRARequest, SamplingParams
from nanopage.adapters.files import CONFIG, WEIGHTS, module_shapes
from nanopage.adapters.layers import lora_buffers
from nanopage.config.model import ModelConfig
from nanopage.engine.engine import LLMEngine
from nanopage.step import AdapterLoad
from nanopage.weights import loader


def save_random(directory: Path, config: ModelConfig, rank: int, seed: int) -> Path:
    """Write a random adapter for every linear layer, in PEFT's format. Returns the directory."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(config.num_layers):
        for module, (outputs, inputs) in module_shapes(config, layer).items():
            name = f"base_model.model.model.layers.{layer}.{module}.lora_"
            tensors[f"{name}A.weight"] = 0.01 * torch.randn(rank, inputs, generator=generator)
            tensors[f"{name}B.weight"] = 0.01 * torch.randn(outputs, rank, generator=generator)
    directory.mkdir(parents=True)
    save_file(tensors, directory / WEIGHTS)
    targets = [module.partition(".")[2] for module in module_shapes(config, 0)]
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / CONFIG).write_text(json.dumps(fields))
    return directory


def measure(
    make_engine: Callable[..., LLMEngine],
    directory: Path,
    counts: list[int],
    rank: int,
    num_prompts: int,
    lengths: tuple[int, int],
    rng: random.Random,
    results: dict[str, Any],
) -> None:
    """Fill `results`: output tokens per second by number of adapters, 0 for an engine without enable_lora.

    Args:
        directory: an empty directory for the adapters.
        lengths: tokens in each prompt and in each output.
    """
    rows = results["throughput"] = []
    for count in counts:
        options = {"enable_lora": True, "max_loras": count, "max_lora_rank": rank} if count else {}
        engine = make_engine(enable_prefix_caching=False, **options)
        config = loader.read_config(engine.model_path)
        adapters = []
        for index in range(count):
            path = directory / str(index)
            adapters.append(LoRARequest(str(index), index + 1, str(path)))
            if not path.exists():
                save_random(path, config, rank, index)
        row: dict[str, Any] = {"adapters": count, "rank": rank, "slots_mib": 0.0, "load_seconds": 0.0}
        if count:
            worker: Any = engine.executor.worker  # type: ignore[attr-defined]
            row["slots_mib"] = sum(buffer.nbytes for buffer in lora_buffers(worker.model)) / 2**20
            started = time.perf_counter()
            worker.wings.load_adapters([AdapterLoad(0, adapters[0].lora_path)])
            row["load_seconds"] = time.perf_counter() - started
        params = SamplingParams(temperature=0, max_tokens=lengths[1], ignore_eos=True, detokenize=False)
        for _ in range(2):  # the first round loads the adapters
            for index in range(num_prompts):
                prompt = [rng.randrange(config.vocab_size) for _ in range(lengths[0])]
                adapter = adapters[index % count] if count else None
                engine.add_request(str(index), {"prompt_token_ids": prompt}, params, lora_request=adapter)
            started = time.perf_counter()
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.error is not None:
                        raise RuntimeError(output.error)
            seconds = time.perf_counter() - started
        row["output_tokens_per_second"] = num_prompts * lengths[1] / seconds
        rows.append(row)
        engine.shutdown()
