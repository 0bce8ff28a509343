"""Compares a mixture of experts with a dense model of the same active size, on nanopage and peers, by batch size.

The mixture has the sizes of the dense model, which is a Llama, except for the feed-forward layers. Each of these has
`num_experts` experts, as in Mixtral, and a token uses `num_chosen` of them. The chosen experts have as many weights as
the dense layer, so both models multiply a token by equally many weights. All weights of the mixture are random.

A batch of B requests is computed at once. Its speed is the sum of the requests' decode speeds: prompts do not count.
"""

import json
import math
import os
import random
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.checks import refuse
from benchmarks.compare import Setup, drop, listed, peer_arguments, run_one
from benchmarks.peer import Peer, PeerError, prepare
from benchmarks.peers.protocol import Run, Work
from benchmarks.report import console, figure, show_header, show_table, spread, table_of
from nanopage.config.model import ModelConfig
from nanopage.files.private_files import private_cache
from nanopage.weights import loader

DENSE, MIXTURE = "dense", "mixture"


@dataclass
class Results:
    """Everything measured, in the form of the JSON file."""

    header: dict[str, str]
    models: dict[str, str] = field(default_factory=dict)  # what the two models are
    # Batch size -> "engine, model" -> one Run for each iteration.
    runs: dict[str, dict[str, list[Run]]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def write_mixture(dense: Path, config: ModelConfig, num_experts: int, num_chosen: int) -> Path:
    """Write the mixture in bfloat16 into a directory of nanopage's cache, unless it exists.

    Each output of a random matrix has the variance of its inputs, so that tokens differ from layer to layer.

    Args: dense: the directory of a LlamaForCausalLM.
    """
    if config.architecture != "LlamaForCausalLM" or config.intermediate_size % num_chosen:
        refuse(f"{dense} must be a LlamaForCausalLM whose intermediate_size {num_chosen} divides", "--model")
    directory = private_cache("models") / f"{dense.name}-random-{num_experts}-experts-{num_chosen}-chosen"
    if directory.is_dir():
        return directory
    fields = json.loads((dense / "config.json").read_text()) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": num_experts,
        "num_experts_per_tok": num_chosen,
        "intermediate_size": config.intermediate_size // num_chosen,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }
    scratch = directory.with_name(f"{directory.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        (scratch / "config.json").write_text(json.dumps(fields, indent=2))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(dense / name, scratch)
        save_file(dict(random_tensors(loader.read_config(scratch))), scratch / "model.safetensors", {"format": "pt"})
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def random_tensors(config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of each tensor of a checkpoint of `config`, in bfloat16. Every call yields the same tensors."""
    generator = torch.Generator().manual_seed(0)
    for name, slot in loader.slots(loader.meta_model(config)).items():
        if name.endswith("norm.weight"):
            yield name, torch.ones(slot.shape, dtype=torch.bfloat16)
        else:
            tensor = torch.randn(slot.shape, generator=generator) / math.sqrt(slot.shape[-1])
            yield name, tensor.to(torch.bfloat16)


def measure(
    setup: Setup,
    mixture: Path,
    dtype: str,
    batch_sizes: list[int],
    lengths: tuple[int, int],
    num_iters: int,
    seed: int,
    results: Results,
) -> None:
    """Fill `results`. Engines and models take turns, iteration by iteration. Whatever fails is left out from then on.

    Args:
        setup: the setup of the dense model.
        lengths: tokens of each prompt and of each output.
    """
    rng = random.Random(seed)
    num_runs = setup.warmup + num_iters

    def batch(size: int) -> list[Work]:
        prompts = [[rng.randrange(setup.config.vocab_size) for _ in range(lengths[0])] for _ in range(size)]
        return [Work(prompt, lengths[1]) for prompt in prompts]

    work = {str(size): [batch(size) for _ in range(num_runs)] for size in batch_sizes}
    setups = {DENSE: setup, MIXTURE: replace(setup, path=mixture, config=loader.read_config(mixture))}
    results.models = {name: describe(each.config) for name, each in setups.items()}
    show_header(results.models)
    peers: dict[str, Peer] = {}
    try:
        for engine, python in setup.pythons.items():
            for model, each in setups.items():
                name = f"{engine}, {model}"
                arguments = peer_arguments(dtype, work, each)
                command = [python, "-m", f"benchmarks.peers.{engine}", *arguments, "--compiled"]
                with console.status(f"{name} starts"):
                    try:
                        prepare([*command, "--prepare"], setup.threads)
                        peers[name] = Peer(command, setup.threads)
                        results.header[engine] = listed(peers[name].answer()["versions"])
                    except PeerError as error:
                        drop(name, error, peers, results.failures)
            if engine in results.header:
                show_header({engine: results.header[engine]})
        for size, batches in work.items():
            runs = results.runs[size] = {name: [] for name in peers}
            for i, requests in enumerate(batches):
                for name in list(peers):
                    try:
                        run = run_one(peers, name, requests, 0)
                    except PeerError as error:
                        drop(name, error, peers, results.failures)
                        del runs[name]
                        continue
                    if i >= setup.warmup:
                        runs[name].append(run)
        for peer in peers.values():
            peer.close()
    finally:
        for peer in peers.values():  # at once if something failed
            peer.kill()
        show(results)


def show(results: Results) -> None:
    """A row for each engine and model, a column for each batch size."""
    sizes = list(results.runs)
    table = table_of("decode tok/s of all requests together: median [lowest-highest]", ["", *sizes])
    for name in dict.fromkeys(name for runs in results.runs.values() for name in runs):
        table.add_row(name, *(spread(speeds(size, results.runs[size].get(name, []))) for size in sizes))
    show_table(table)
    for size, runs in results.runs.items():
        ours = {name: statistics.median(speeds(size, each)) for name, each in runs.items() if each}
        if not (mine := ours.get(f"nanopage, {MIXTURE}")):
            continue
        ratios = [f"{figure(mine / speed)} of {name}" for name, speed in ours.items() if speed != mine]
        console.print(f"batch {size}: nanopage, {MIXTURE} has {', '.join(ratios)}", style="dim", highlight=False)


def speeds(size: str, runs: list[Run]) -> list[float]:
    return [int(size) * run.decode_tok_s for run in runs if run.decode_tok_s is not None]


def describe(config: ModelConfig) -> str:
    """The sizes of a model, and how many of its weights a token is multiplied by."""
    experts = config.experts
    chosen = config.intermediate_size if experts is None else experts.num_chosen * experts.intermediate_size
    heads = config.num_heads + config.num_kv_heads
    layer = 3 * config.hidden_size * chosen + 2 * config.hidden_size * config.head_dim * heads
    weights = config.num_layers * layer + config.hidden_size * config.vocab_size
    what = "one feed-forward layer" if experts is None else f"{experts.num_chosen} of {experts.num_experts} experts"
    return f"{config.architecture}, {what}: {weights / 1e6:.1f} million weights for each token"
