"""Embeddings: texts of mixed lengths through nanopage and, in turn, through sentence-transformers, transformers or
llama.cpp."""

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.machine import machine_state, versions
from nanopage import LLM

PEERS = {"sentence-transformers": "sentence_transformers", "transformers": "transformers", "llamacpp": "llama_cpp"}
BATCH_SIZE = 32  # sentence-transformers' default


def make_texts(tokenizer: Any, count: int, lengths: tuple[int, int], seed: int) -> list[str]:
    """Random words of the tokenizer's vocabulary. Args: lengths: fewest and most words of a text."""
    draw = random.Random(seed)
    vocab = sorted(tokenizer.backend.get_vocab())
    words = [word for word in vocab if word.isascii() and word.isalpha() and word.islower() and len(word) > 2]
    if not words:
        raise ValueError("the tokenizer has no tokens that are plain words")
    return [" ".join(draw.choices(words, k=draw.randint(*lengths))) for _ in range(count)]


def embed_all(llm: LLM, texts: list[str]) -> np.ndarray:
    """The embeddings of texts that are shortened to what the model takes: float32 [texts, size]."""
    outputs = llm.embed(texts, truncate_prompt_tokens=-1, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)


def count_tokens(llm: LLM, texts: list[str]) -> int:
    """The tokens of texts, with special tokens, without the tokens that are cut off."""
    tokenizer, most = llm.get_tokenizer(), llm.engine.max_model_len
    return sum(len(tokenizer.encode_truncated(text, None, most)[0]) for text in texts)


def describe_run(engine: Any, compare: str | None, num_texts: int, num_tokens: int) -> dict[str, str]:
    """What a reader must know to judge or repeat the figures."""
    import torch

    hardware, gpu = machine_state(engine.capacity.device)
    return {
        "bench": f"embed: {num_texts:,} texts, {num_tokens:,} tokens",
        "model": f"{engine.model_path.name}, {engine.capacity.dtype}",
        "device": f"{engine.capacity.device}: {hardware}, {torch.get_num_threads()} threads",
        **gpu,
        "versions": versions(*dict.fromkeys([*([PEERS[compare]] if compare else []), "transformers"])),
    }


def make_peer(name: str, llm: LLM) -> Callable[[list[str]], np.ndarray]:
    """A function that embeds texts with a peer, on the engine's model, dtype and device.

    Raises: ImportError, RuntimeError or ValueError if the peer is not installed or cannot run the model.
    """
    import torch

    engine = llm.engine
    path, dtype, device = engine.model_path, engine.capacity.dtype, engine.capacity.device
    max_tokens = engine.max_model_len
    if name == "llamacpp":
        if device != "cpu":
            raise ValueError(f"--compare llamacpp runs on a CPU, not on {device}")
        from benchmarks.llamacpp_embeddings import make_embedder

        ours = llm.get_tokenizer()
        size = engine.model_config.hidden_size
        return make_embedder(
            path, dtype, torch.get_num_threads(), lambda text: ours.encode_truncated(text, None, max_tokens)[0], size
        )
    kind = getattr(torch, dtype)
    if name == "sentence-transformers":
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(path), device=device, model_kwargs={"dtype": kind})
        model.max_seq_length = max_tokens
        return lambda texts: model.encode(texts, batch_size=BATCH_SIZE, convert_to_numpy=True)
    from transformers import AutoModel, AutoTokenizer

    tokenizer, plain = (
        AutoTokenizer.from_pretrained(path),
        AutoModel.from_pretrained(path, dtype=kind).to(device).eval(),
    )

    @torch.inference_mode()
    def embed(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        vectors: list[Any] = [None] * len(texts)
        for begin in range(0, len(order), BATCH_SIZE):
            chosen = order[begin : begin + BATCH_SIZE]
            batch = tokenizer(
                [texts[i] for i in chosen], padding=True, truncation=True, max_length=max_tokens, return_tensors="pt"
            ).to(device)
            hidden, mask = plain(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]
            means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))
            for index, vector in zip(chosen, means.cpu().numpy(), strict=True):
                vectors[index] = vector
        return np.stack(vectors)

    return embed


def measure(engines: dict[str, Callable[[list[str]], np.ndarray]], texts: list[str], iters: int, warmup: int) -> dict:
    """Run all engines on the same texts, in turn.

    Returns: for each engine, the seconds of its iterations, texts per second by their median, and the largest
        difference of its vectors from the first engine's vectors.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    vectors: dict[str, np.ndarray] = {}
    for iteration in range(warmup + iters):
        for name, embed in engines.items():
            started = time.perf_counter()
            vectors[name] = embed(texts)
            if iteration >= warmup:
                seconds[name].append(time.perf_counter() - started)
    first = next(iter(vectors.values()))
    return {
        name: {
            "seconds": times,
            "texts_per_second": len(texts) / statistics.median(times),
            "largest_difference": float(np.abs(vectors[name] - first).max()),
        }
        for name, times in seconds.items()
    }
