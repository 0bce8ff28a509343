"""llama.cpp, compiled for this machine by llama-cpp-python, through its C API.

    python3 -m venv ~/.cache/nanopage/peers/llamacpp
    CMAKE_ARGS=-DGGML_NATIVE=ON ~/.cache/nanopage/peers/llamacpp/bin/pip install llama-cpp-python gguf

compare --isa avx2 takes another one, on a processor with AVX-512:

    python3 -m venv ~/.cache/nanopage/peers/llamacpp-avx2
    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" \\
        ~/.cache/nanopage/peers/llamacpp-avx2/bin/pip install llama-cpp-python gguf

The loop is that of llama.cpp's server: each batch holds one token of every running sequence, then prompts. A
prefix common to all prompts is computed once and shared by llama_memory_seq_cp. The KV cache is float16 with bfloat16
weights, as shipped. A .gguf file is read as it is. A directory must have a model of the architecture LlamaForCausalLM,
MixtralForCausalLM or Lfm2ForCausalLM, without rope scaling. No vocabulary is written for it, since prompts are token
ids.

Drafts are those of llama-cpp-python's LlamaPromptLookupDecoding, checked for all sequences in one batch, as here.
"""

import ctypes
import json
import re
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.protocol import Engine, Options, Output, Work, common_prefix, converted, serve, written_whole

MAX_SEQUENCES = 256  # llama.cpp's own limit
BATCH = 2048  # tokens
# Which of the matrices of Mixtral's experts is which.
EXPERT_PARTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
EXPERT = re.compile(r"model\.layers\.(\d+)\.block_sparse_moe\.experts\.(\d+)\.(w[123])\.weight")


def load(options: Options) -> tuple[dict[str, str], Engine]:
    import llama_cpp
    import numpy as np

    model = llama_cpp.llama_model_load_from_file(
        str(gguf_file(options)).encode(), llama_cpp.llama_model_default_params()
    )
    if not model:
        raise RuntimeError(f"llama.cpp cannot load {gguf_file(options)}")
    exact = options.dtype == "float32"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = options.kv_tokens
    params.n_batch = BATCH
    params.n_seq_max = MAX_SEQUENCES
    params.kv_unified = True  # otherwise each sequence gets an equal part of n_ctx
    params.n_threads = params.n_threads_batch = options.threads
    params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError("llama.cpp cannot make a context")
    memory = llama_cpp.llama_get_memory(context)
    vocab_size = llama_cpp.llama_n_vocab(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
    find_draft = None
    if options.draft_tokens:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        find_draft = LlamaPromptLookupDecoding(num_pred_tokens=options.draft_tokens)

    def run(work: list[Work]) -> list[Output]:
        if len(work) > MAX_SEQUENCES:
            raise RuntimeError(f"{len(work)} requests are more than llama.cpp's {MAX_SEQUENCES} sequences")
        llama_cpp.llama_memory_clear(memory, False)
        outputs = [Output([]) for _ in work]
        texts = [list(w.prompt) for w in work]  # prompt and output
        shared = common_prefix(texts) if len(texts) > 1 else 0
        for start in range(0, shared, BATCH):
            decode([(0, i, texts[0][i], False) for i in range(start, min(start + BATCH, shared))])
        for seq in range(1, len(work) if shared else 0):
            llama_cpp.llama_memory_seq_cp(memory, 0, seq, 0, shared)
        computed = [shared] * len(work)
        running = list(range(len(work)))
        while running:
            entries: list[tuple[int, int, int, bool]] = []
            # Sequences that decode, with one token left to compute, go first.
            for seq in sorted(running, key=lambda seq: len(texts[seq]) - computed[seq] > 1):
                end = min(len(texts[seq]), computed[seq] + BATCH - len(entries))
                entries += [(seq, i, texts[seq][i], i == len(texts[seq]) - 1) for i in range(computed[seq], end)]
                computed[seq] = end
                room = min(work[seq].output_len - len(outputs[seq].token_ids) - 1, BATCH - len(entries))
                if find_draft is not None and outputs[seq].token_ids and room > 0:
                    draft = find_draft(np.array(texts[seq])).tolist()[:room]
                    entries += [(seq, end + i, token, True) for i, token in enumerate(draft)]
            decode(entries)
            for row, (seq, position, before, wanted) in enumerate(entries):
                # A token of a draft counts if it is the one that was sampled.
                if wanted and position == len(texts[seq]) - 1 and before == texts[seq][-1]:
                    logits = llama_cpp.llama_get_logits_ith(context, row)
                    token = int(np.ctypeslib.as_array(logits, (vocab_size,)).argmax())
                    now = time.perf_counter()
                    output = outputs[seq]
                    output.token_ids.append(token)
                    output.first, output.last = output.first or now, now
                    texts[seq].append(token)
                    computed[seq] = position + 1
            if find_draft is not None:
                for seq in running:
                    llama_cpp.llama_memory_seq_rm(memory, seq, computed[seq], -1)
            running = [seq for seq in running if len(outputs[seq].token_ids) < work[seq].output_len]
        return outputs

    def decode(entries: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens, each as (sequence, position, token id, whether its logits are wanted)."""
        batch.n_tokens = len(entries)
        for row, (seq, position, token, wanted) in enumerate(entries):
            batch.token[row], batch.pos[row], batch.logits[row] = token, position, wanted
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, seq
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {code}: 1 means that the KV cache is full")

    return {"llama-cpp-python": llama_cpp.__version__}, run


def gguf_file(options: Options) -> Path:
    """The model, or where it is kept as a .gguf file."""
    if options.model.suffix == ".gguf":
        return options.model
    return converted(options, f"{options.quantization or options.dtype}.gguf")


def prepare(options: Options) -> None:
    """Write the weights of a directory as a .gguf file; vectors in float32, as llama.cpp wants them."""
    if gguf_file(options).exists():
        return
    if options.quantization:
        unquantized = replace(options, quantization=None)
        prepare(unquantized)
        quantize(gguf_file(unquantized), gguf_file(options), options.quantization)
        return
    import gguf
    import numpy as np

    config = json.loads((options.model / "config.json").read_text())
    (architecture,) = config["architectures"]
    kinds = {"LlamaForCausalLM": "llama", "MixtralForCausalLM": "llama", "Lfm2ForCausalLM": "lfm2"}
    num_experts = config.get("num_local_experts", 8) if architecture == "MixtralForCausalLM" else 0
    if architecture not in kinds or config.get("rope_scaling"):
        raise RuntimeError("only Llama, Mixtral and LFM2 without rope scaling are written as .gguf here")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    with written_whole(gguf_file(options)) as file:
        writer = gguf.GGUFWriter(file, kinds[architecture])
        writer.add_block_count(layers)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(heads)
        if architecture == "Lfm2ForCausalLM":  # layers without heads have a convolution
            writer.add_head_count_kv([kv_heads * (kind == "full_attention") for kind in config["layer_types"]])
            writer.add_shortconv_l_cache(config["conv_L_cache"])
        else:
            writer.add_head_count_kv(kv_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps") or config["norm_eps"])
        if num_experts:
            writer.add_expert_count(num_experts)
            writer.add_expert_used_count(config.get("num_experts_per_tok", 2))
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("no_vocab")
        arch = gguf.MODEL_ARCH.LFM2 if architecture == "Lfm2ForCausalLM" else gguf.MODEL_ARCH.LLAMA
        names = gguf.get_tensor_name_map(arch, layers)
        experts: dict[str, dict[int, np.ndarray]] = {}  # name in .gguf -> the matrices read so far, by expert

        def add(name: str, tensor: np.ndarray) -> None:
            exact = "ffn_gate_inp" in name or "shortconv.conv" in name  # llama.cpp wants them in float32
            if tensor.ndim > 1 and options.dtype == "bfloat16" and not exact:
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, tensor)

        for path in sorted(options.model.glob("*.safetensors")):
            for name, tensor in float32_tensors(path):
                if name == "lm_head.weight" and config.get("tie_word_embeddings"):
                    continue
                if name.endswith("conv.conv.weight"):
                    tensor = tensor[:, 0]  # [channels, 1, width]
                rotated = (("q_proj", heads), ("k_proj", kv_heads)) if kinds[architecture] == "llama" else ()
                for part, count in rotated:
                    if part in name:  # llama.cpp rotates neighbouring rows, transformers the two halves of a head
                        halves = tensor.reshape(count, 2, head_dim // 2, *tensor.shape[1:])
                        tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
                if match := EXPERT.fullmatch(name):
                    stacked = f"blk.{match[1]}.{EXPERT_PARTS[match[3]]}.weight"
                    matrices = experts.setdefault(stacked, {})
                    matrices[int(match[2])] = tensor
                    if len(matrices) == num_experts:
                        add(stacked, np.stack([matrices[i] for i in range(num_experts)]))
                        del experts[stacked]
                    continue
                new = names.get_name(name, try_suffixes=(".weight", ".bias"))
                if new is None:
                    raise RuntimeError(f"no name in .gguf for {name}")
                add(new, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def quantize(source: Path, target: Path, quantization: str) -> None:
    """By llama.cpp's own tool. int8: all matrices to Q8_0. int4: those of the layers to Q4_0, a tied head to Q6_K."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    types = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
    params.ftype = types[quantization]
    with written_whole(target) as file:
        if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama.cpp cannot quantize {source}")


def float32_tensors(path: Path):
    """(name, float32 array) of each tensor of 16 or 32 bits in a .safetensors file, without torch, which this
    environment does not have. Integers are left out."""
    import numpy as np

    data = np.memmap(path, dtype=np.uint8, mode="r")
    start = 8 + int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(data[8:start].tobytes()).items():
        if name == "__metadata__" or entry["dtype"] not in ("F32", "F16", "BF16"):
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        raw = np.array(data[begin:end])
        if entry["dtype"] == "BF16":
            tensor = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            tensor = raw.view({"F32": np.float32, "F16": np.float16}[entry["dtype"]]).astype(np.float32)
        yield name, tensor.reshape(entry["shape"])


if __name__ == "__main__":
    serve(load, prepare)
