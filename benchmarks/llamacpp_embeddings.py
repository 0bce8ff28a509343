"""Embeddings of a BERT by llama.cpp, for bench.py embed. llama-cpp-python must be installed together with nanopage, and
built as the first lines of peers/llamacpp.py say.

The model is written as a .gguf file of the same dtype. No vocabulary is written, because llama.cpp gets token ids.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.llamacpp import float32_tensors

BATCH = 512  # tokens, the longest text of most models; 256 and 1,024 are about as fast
MOST_TEXTS = 64  # in a batch


def write_gguf(directory: Path, file: Path, dtype: str) -> None:
    """Write a BertModel's weights. Args: dtype: its matrices' dtype, float32 or bfloat16. llama.cpp wants vectors and
    embeddings of positions and token types in float32. Raises: ValueError, if it is another model or dtype."""
    import gguf

    config = json.loads((directory / "config.json").read_text())
    architectures = config.get("architectures")
    if architectures != ["BertModel"] or dtype not in ("float32", "bfloat16"):
        raise ValueError(f"llamacpp runs a BertModel in float32 or bfloat16, not {architectures} in {dtype}")
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, "bert")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_token_type_count(config["type_vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, layers)
    for path in sorted(directory.glob("*.safetensors")):
        for name, tensor in float32_tensors(path):
            name = name.removeprefix("bert.")
            if name.startswith("pooler."):
                continue
            new = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if new is None:
                raise ValueError(f"no name in .gguf for {name}")
            if dtype == "bfloat16" and tensor.ndim > 1 and not new.startswith(("position_embd", "token_types")):
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(new, gguf.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(new, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_embedder(
    directory: Path, dtype: str, threads: int, encode: Callable[[str], list[int]], size: int
) -> Callable[[list[str]], np.ndarray]:
    """A function that embeds texts: float32 [texts, size], means of the tokens' hidden states, normalized.

    Args: encode: a text to its token ids, with special tokens.
    Raises: ImportError; ValueError as `write_gguf`; RuntimeError, if llama.cpp cannot load the model.
    """
    import llama_cpp

    llama_cpp.llama_log_set(quiet := llama_cpp.llama_log_callback(lambda *_: None), None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        write_gguf(directory, file, dtype)
        options = llama_cpp.llama_model_default_params()
        options.use_mmap = False  # the file is deleted
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), options)
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = BATCH
    params.n_seq_max = MOST_TEXTS
    params.kv_unified = True
    params.embeddings = True
    params.pooling_type = llama_cpp.LLAMA_POOLING_TYPE_MEAN
    params.n_threads = params.n_threads_batch = threads
    context: Any = llama_cpp.llama_init_from_model(model, params) if model else None
    if not context:
        raise RuntimeError("llama.cpp cannot load the model")
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def run(texts: list[list[int]]) -> list[np.ndarray]:
        batch.n_tokens = row = 0
        for number, ids in enumerate(texts):
            for position, token in enumerate(ids):
                batch.token[row], batch.pos[row], batch.logits[row] = token, position, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
                row += 1
        batch.n_tokens = row
        if code := llama_cpp.llama_encode(context, batch):
            raise RuntimeError(f"llama_encode gave {code}")
        pointers = (llama_cpp.llama_get_embeddings_seq(context, number) for number in range(len(texts)))
        return [np.ctypeslib.as_array(pointer, (size,)).copy() for pointer in pointers]

    def embed(texts: list[str], quiet=quiet) -> np.ndarray:  # llama.cpp calls quiet as long as it lives
        vectors: list[np.ndarray] = []
        chosen: list[list[int]] = []
        for text in texts:
            ids = encode(text)
            if chosen and (len(chosen) == MOST_TEXTS or sum(map(len, chosen)) + len(ids) > BATCH):
                vectors, chosen = vectors + run(chosen), []
            chosen.append(ids)
        vectors += run(chosen)
        found = np.stack(vectors)
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    return embed
