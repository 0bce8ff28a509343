"""GGUF files, written as llama.cpp's converter writes them, against the models and tokenizers they were made of."""

import gc
import json
import math
import os
import random
import re
import struct
import weakref
from dataclasses import dataclass, field, replace
from itertools import pairwise

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from helpers import (
    CHAT_TEMPLATE,
    Paged,
    assert_all_close,
    gguf_tensors,
    random_tokens,
    reference_logits,
    tiny_hf_model,
)
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.cpu.tiled import TiledWeight
from nanopage.models import find_family
from nanopage.quantization import gguf_checkpoint
from nanopage.quantization.gguf_checkpoint import GGUFCheckpoint
from nanopage.quantization.gguf_fields import INSTEAD
from nanopage.quantization.gguf_reader import read_header
from nanopage.quantization.gguf_rope import YARN_FIELDS
from nanopage.quantization.gguf_tokenizer import LLAMA3
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.text.tokenizer import Tokenizer as NanopageTokenizer
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# transformers' name -> llama.cpp's
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    # LFM2's
    "model.embedding_norm": "token_embd_norm",
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
# In models with norms after attention.
NAMES_OF_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
}


# Tokenizers


@dataclass
class Vocabulary:
    """A tokenizer as GGUF stores it, beside the original."""

    original: Tokenizer
    model: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    merges: list[str] | None = None
    scores: list[float] | None = None
    fields: dict = field(default_factory=dict)


CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog didn't mind; it'd seen worse, and WE'LL see more.",
    "In 2024, 1234567 people paid 99.95 for 3 of the 12 boxes; that's 0.1% of 1,000,000.",
    "def main(args):\n    for i in range(10):\n        print(i, args[i])\n\treturn None\n\n\nclass Foo:\n    pass\n",
    "Füchse überqueren die Straße; naïve café résumé. Всё хорошо, спасибо. 你好,世界。こんにちは世界 안녕하세요",
    "a  b   c    d        e\n\n  \n   f\t\tg   ",
]
TEXTS = [
    "",
    " ",
    "hello",
    " hello",
    "Hello, world! It's a test, isn't it? WE'LL SEE, they'Re sure.",
    "The quick brown fox jumps over the lazy dog.",
    "1 12 123 1234 12345 3.14159 1,000,000 2024-01-31 ٣٤٥ ² ½ Ⅷ",
    "  leading and trailing  ",
    "a  b   c    d     e\n\nf\n\n\n  g\t\th \n i\r\n\r\n j",
    "def f(x):\n    if x > 0:\n        return x ** 2  # comment\n\treturn {'a': [1, 2], \"b\": None}\n",
    "https://example.com/path?query=1&b=2#frag user@example.org <div class='x'>&amp;</div>",
    "Füchse überqueren die Straße. cafe\u0301 e\u0301 naïve \u1e9b\u0323",
    "Всё хорошо 你好世界 こんにちは 안녕하세요 مرحبا שלום ไทย हिन्दी",
    "🦊🐶 👩‍👩‍👧‍👦 🇩🇪 😀x",
    "\u00a0non\u2003breaking\u200bzero\ufeffwidth\u3000wide \x00 \x7f",
    "--- *** ==== !!!??? ... $$$ ^^^ ~~~ ``` ((([[[{{{",
    "aaaaaaaaaaaaaaaa          aaaa  aaaaa",
    "a xylophone, xylophones",
]


def random_texts(count, seed=0):
    """Strings of random pieces: words, spaces, digits, punctuation, and characters from everywhere."""
    rng = random.Random(seed)
    pieces = ["the", " dog", "'s", "'LL", " ", "  ", "\n", "\n\n", "\t", "\r\n", "12", "3456", ".", "...", "é"]
    pieces += ["e\u0301", "世", "界", "Я", " Й", "🦊", "½", "_", "__init__", "-", "a", "A", "▁", "Ġ", "\u00a0"]
    everywhere = [chr(c) for c in range(0x20, 0x3000) if chr(c).isprintable()]

    def piece():
        return rng.choice(pieces) if rng.random() < 0.8 else rng.choice(everywhere)

    return ["".join(piece() for _ in range(rng.randrange(1, 25))) for _ in range(count)]


# The pre-tokenizers of the models' own tokenizer.json.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3_SPLITS = [
    r"\p{N}{1,3}",
    r"[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
GPT_4O_SPLIT = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
TEKKEN_SPLIT = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*""",
        r"""\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    ]
)
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTE_LEVEL]),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"), BYTE_LEVEL]),
    "refact": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "dbrx": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTE_LEVEL]),
    "lfm2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTE_LEVEL]),
    "gpt-4o": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GPT_4O_SPLIT), "isolated"), BYTE_LEVEL]),
    "glm4": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"), BYTE_LEVEL]),
    "qwen35": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN35_SPLIT), "isolated"), BYTE_LEVEL]),
    "olmo": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "deepseek-v3": pre_tokenizers.Sequence(
        [*(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in DEEPSEEK3_SPLITS), BYTE_LEVEL]
    ),
    "tekken": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(TEKKEN_SPLIT), "isolated"), BYTE_LEVEL]),
}
NORMALIZED = ("qwen2", "qwen35", "olmo")
ADDED = [("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL), ("<think>", USER_DEFINED)]


def with_pipeline(tokenizer, pre):
    """Give a BPE its normalizer, pre-tokenizer and decoder."""
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]
    tokenizer.decoder = decoders.ByteLevel()
    if pre in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def byte_level_vocabulary(pre):
    """Byte-level BPE trained with the pre-tokenizer `pre`; the added tokens come last, as in Llama 3 and Qwen."""
    trained = with_pipeline(Tokenizer(models.BPE()), pre)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    bpe = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in bpe["merges"]]
    vocabulary = bpe["vocab"]
    vocabulary["Ġxylophone"] = len(vocabulary)  # no merges lead here: only Llama 3 and Tekken find it
    ignore_merges = pre in (*LLAMA3, "tekken")
    tokenizer = with_pipeline(Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges)), pre)
    for token, kind in ADDED:
        tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
        if kind == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    ids = {token: i for i, token in enumerate(tokens)}
    fields = {"bos_token_id": ids["<|im_start|>"], "eos_token_id": ids["<|im_end|>"], "padding_token_id": 0}
    if pre in LLAMA3:
        special = [("<|im_start|>", ids["<|im_start|>"])]
        tokenizer.post_processor = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=special)
    types = [dict(ADDED).get(token, NORMAL) for token in tokens]
    return Vocabulary(tokenizer, "gpt2", pre, tokens, types, [" ".join(m) for m in merges], None, fields)


def sentencepiece_vocabulary():
    """A SentencePiece BPE in Llama 2's order: special tokens, bytes, merged pieces by falling score, characters."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.pre_tokenizer = pre_tokenizers.Split(Regex(r"▁*[^▁\n]+|▁+|\n+"), "isolated")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    bpe = json.loads(trained.to_str())["model"]
    merged = ["".join(merge) for merge in bpe["merges"]]
    merged += ["▁▁▁▁", "▁▁▁▁▁▁▁▁", "aa", "aaa", "aaaa"]
    merged = list(dict.fromkeys(merged))
    characters = [token for token in bpe["vocab"] if len(token) == 1]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *merged, *characters]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(merged) + len(characters))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(merged) + len(characters))]
    fields = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": True}
    return Vocabulary(SentencePiece(tokens, scores), "llama", None, tokens, types, None, scores, fields)


class SentencePiece:
    """SentencePiece's BPE: again and again the adjacent pair whose union scores best, the leftmost of equals."""

    def __init__(self, tokens, scores, add_space_prefix=True):
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {token: scores[i] for i, token in enumerate(tokens) if i >= 259}
        self.prefix = "▁" if add_space_prefix else ""

    def encode(self, text, add_special_tokens=True):
        ids = [1] if add_special_tokens else []
        for segment in re.split("(<s>|</s>|<unk>)", text):
            if segment in ("<s>", "</s>", "<unk>"):
                ids.append(self.ids[segment])
            elif segment:
                ids += self.pieces(self.prefix + segment.replace(" ", "▁"))
        return ids

    def pieces(self, text):
        symbols = list(text)
        while True:
            unions = [(self.scores.get(a + b, -math.inf), -i) for i, (a, b) in enumerate(pairwise(symbols))]
            score, at = max(unions, default=(-math.inf, 0))
            if score == -math.inf:
                break
            symbols[-at : -at + 2] = [symbols[-at] + symbols[-at + 1]]
        ids = []
        for symbol in symbols:
            in_vocabulary = symbol in self.scores
            ids += [self.ids[symbol]] if in_vocabulary else [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        return ids


# Files


def permute(weight, num_heads):
    """llama.cpp's order of the rows of q and k, as in its LlamaModel.permute."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name, arch):
    stem, _, kind = name.rpartition(".")
    names = NAMES | NAMES_OF_POST_NORMS if arch in ("gemma2", "gemma3", "olmo2") else NAMES
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def metadata_of(config, arch):
    """What llama.cpp's converter writes for some architectures only, by the last parts of the keys."""
    if arch in ("gemma2", "gemma3"):
        rope = config.rope_parameters.get("sliding_attention", {})
        return {
            "attention.sliding_window": config.sliding_window,
            "attn_logit_softcapping": config.attn_logit_softcapping if arch == "gemma2" else None,
            "final_logit_softcapping": config.final_logit_softcapping,
            "rope.freq_base_swa": rope.get("rope_theta"),
        }
    if arch == "granite":
        return {
            "attention.scale": config.attention_multiplier,
            "embedding_scale": config.embedding_multiplier,
            "residual_scale": config.residual_multiplier,
            "logit_scale": config.logits_scaling,
        }
    if arch == "olmo2" and getattr(config, "sliding_window", None):  # OLMo 3
        full, local = config.rope_parameters["full_attention"], config.rope_parameters["sliding_attention"]
        return {
            "attention.sliding_window": config.sliding_window,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
            "rope.freq_base_swa": local["rope_theta"],
            "rope.scaling.type": None if full["rope_type"] == "default" else full["rope_type"],
            "rope.scaling.factor": full.get("factor"),
            "rope.scaling.original_context_length": full.get("original_max_position_embeddings"),
            "rope.scaling.attn_factor": full.get("attention_factor"),
        }
    if arch == "mistral3":
        rope = config.rope_parameters
        return (
            {}
            if rope["rope_type"] == "default"
            else {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
                "attention.temperature_scale": rope["llama_4_scaling_beta"],
            }
        )
    if arch == "glm4":
        return {"rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"])}
    if arch == "lfm2":
        size = 2 * config.intermediate_size // 3
        return {
            "feed_forward_length": -(-size // config.block_multiple_of) * config.block_multiple_of,
            "attention.head_count_kv": [config.num_key_value_heads * (kind != "conv") for kind in config.layer_types],
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "shortconv.l_cache": config.conv_L_cache,
        }
    if arch != "phi3":
        return {}
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    original = config.original_max_position_embeddings
    scale = config.max_position_embeddings / original
    is_long = rope["rope_type"] == "longrope"
    return {
        "attention.sliding_window": config.sliding_window or 0,
        "rope.dimension_count": int(head_dim * rope["partial_rotary_factor"]),
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(scale) / math.log(original)) if is_long else None,
    }


def matrices_of(hf_model):
    """Its parameters by name; those of gate and up of experts, which it has fused, by names of their own."""
    for name, parameter in hf_model.named_parameters():  # a tied head is not among them
        if name.endswith("experts.gate_up_proj"):
            for kind, half in zip(("gate_proj", "up_proj"), parameter.detach().chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{kind}.weight"), half
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, parameter.detach()


def fields_of_experts(arch, config):
    fields = {
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }
    return {f"{arch}.{key}": value for key, value in fields.items()}


def write_gguf(path, hf_model, arch, vocabulary, types=None, rope_freqs=None, extra_tensors=None, drop=(), **fields):
    """Write `hf_model` as llama.cpp's convert_hf_to_gguf.py would.

    `types` maps a part of a tensor's name to how its matrix is stored; hf_model then gets the values that it has in
    the file. `fields` replace metadata, by key; those that are None are left out.
    """
    config = hf_model.config
    writer = gguf.GGUFWriter(path, arch)
    metadata = {
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        f"{arch}.rope.freq_base": config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"],
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": vocabulary.pre,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges,
        "tokenizer.ggml.scores": vocabulary.scores,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if hasattr(config, "num_experts_per_tok"):
        metadata |= fields_of_experts(arch, config)
    head_dim = next(layer.self_attn.head_dim for layer in hf_model.model.layers if hasattr(layer, "self_attn"))
    if head_dim != config.hidden_size // config.num_attention_heads:
        metadata[f"{arch}.attention.key_length"] = metadata[f"{arch}.attention.value_length"] = head_dim
    if arch == "llama":
        metadata["llama.rope.dimension_count"] = head_dim
    metadata |= {f"{arch}.{key}": value for key, value in metadata_of(config, arch).items()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.fields.items()}
    metadata |= {key.replace("__", "."): value for key, value in fields.items()}
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.numpy())
    for kind in ("short", "long"):
        if (factors := config.rope_parameters.get(f"{kind}_factor")) is not None:
            writer.add_tensor(f"rope_factors_{kind}.weight", torch.tensor(factors).numpy())
    for name, parameter in matrices_of(hf_model):
        if name in drop:
            continue
        rows = torch.arange(len(parameter))
        if arch in ("llama", "granite", "smollm3", "mistral3") and (projection := name.split(".")[-2]) in heads:
            rows = permute(rows, heads[projection])
        values = parameter[rows].numpy()
        # The converter drops dimensions of 1.
        values = values[0] if "shared_expert_gate" in name else values[:, 0] if "conv.conv" in name else values
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = parameter.add_(1).numpy().copy()
            parameter.sub_(1)  # rounds
        stored_as = next((kind for part, kind in (types or {}).items() if part in name), None)
        if stored_as is None or values.ndim == 1 or "mlp.gate.weight" in name or "conv.conv" in name:
            writer.add_tensor(gguf_name(name, arch), values)
        else:
            data = gguf.quants.quantize(values, stored_as)
            writer.add_tensor(gguf_name(name, arch), data, raw_dtype=stored_as)
            with torch.no_grad():
                parameter[rows] = torch.from_numpy(gguf.quants.dequantize(data, stored_as))
    for name, data in (extra_tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


VOCABULARIES = {pre: byte_level_vocabulary(pre) for pre in PRE_TOKENIZERS} | {"llama": sentencepiece_vocabulary()}
SMOLLM = VOCABULARIES["smollm"]


def model_for(vocabulary, family="llama", **overrides):
    ids = {key: vocabulary.fields[key] for key in ("bos_token_id", "eos_token_id")}
    return tiny_hf_model(family, vocab_size=len(vocabulary.tokens), **ids | overrides)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tiny.gguf"


@pytest.fixture(scope="module")
def plain_file(tmp_path_factory):
    """A tiny llama that is as it should be."""
    return write_gguf(tmp_path_factory.mktemp("gguf") / "plain.gguf", model_for(SMOLLM), "llama", SMOLLM)


MODELS = {
    "llama": ("llama", "llama", {}),
    "llama, MHA": ("llama", "llama", {"num_key_value_heads": 4}),
    "llama, GQA of 3, tied": (
        "llama",
        "llama",
        {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "llama, attention bias": ("llama", "llama", {"attention_bias": True}),
    "llama, wide heads": ("llama", "llama", {"head_dim": 40}),
    "llama, theta and eps": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}, "rms_norm_eps": 0.3},
    ),
    "mistral": ("mistral", "llama", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen2, tied": ("qwen2", "qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3, narrow heads, tied": ("qwen3", "qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "gemma2": ("gemma2", "gemma2", {"num_hidden_layers": 3, "tie_word_embeddings": True}),
    "gemma2, other caps": ("gemma2", "gemma2", {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 9}),
    "phi3, longrope": (
        "phi3",
        "phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 4,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.5, 4.0, 8.0, 20.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "olmo2": ("olmo2", "olmo2", {}),
    "olmo3": ("olmo3", "olmo2", {"num_hidden_layers": 5}),
    "olmo3, yarn": (
        "olmo3",
        "olmo2",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                    "attention_factor": 1.3,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
    ),
    "granite": (
        "granite",
        "granite",
        {
            "attention_multiplier": 0.1,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "attention_bias": True,
        },
    ),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5, "attention_bias": True}),
    "glm4": ("glm4", "glm4", {}),
    "glm4, no bias, another part of a head": (
        "glm4",
        "glm4",
        {
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "ministral3, a rope that is not stretched": (
        "ministral3",
        "mistral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5000.0,
                "original_max_position_embeddings": 16,
                "llama_4_scaling_beta": 0.0,
            }
        },
    ),
    "ministral3": (
        "ministral3",
        "mistral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "llama_4_scaling_beta": 0.25,
            }
        },
    ),
    "mixtral": ("mixtral", "llama", {}),
    "qwen2_moe": ("qwen2_moe", "qwen2moe", {}),
    "qwen3_moe": ("qwen3_moe", "qwen3moe", {"norm_topk_prob": True}),
    "lfm2": ("lfm2", "lfm2", {"conv_L_cache": 4, "norm_eps": 0.1, "block_multiple_of": 32, "intermediate_size": 130}),
}
STORED = {
    "float32": {},
    "float16": {"": Quantization.F16},
    "bfloat16": {"": Quantization.BF16},
    "Q8_0 and Q4_1": {"self_attn": Quantization.Q8_0, "down_proj": Quantization.Q4_1, "embed": Quantization.Q4_1},
    "Q4_0, Q5_0, Q5_1": {"self_attn": Quantization.Q4_0, "mlp": Quantization.Q5_1, "lm_head": Quantization.Q5_0},
}


def decode_the_last(paged, lengths):
    paged.step(dict(enumerate(length - 2 for length in lengths)))
    for _ in range(2):
        paged.step(dict.fromkeys(range(len(lengths)), 1))


def assert_equals_transformers(file, hf_model):
    config = loader.read_config(file)
    model = loader.load_model(file, config, torch.float32, torch.device("cpu"))
    slots, rename = loader._wanted(model), getattr(find_family(config.architecture), "rename", lambda name, _: name)
    for name, parameter in matrices_of(hf_model):
        name = rename(name, config)
        if ".experts." in name:
            matrices = [slots[name.replace(".experts.", f".experts.{i}.")] for i in range(len(parameter))]
            assert torch.equal(torch.stack(matrices), parameter), name
        else:
            assert torch.equal(slots[name], parameter), name
    sequences = random_tokens([5, 21, 60])
    logits = Paged(file, sequences).run(decode_the_last)
    assert_all_close(logits, reference_logits(hf_model, sequences))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_the_original(file, name):
    family, arch, overrides = MODELS[name]
    vocabulary = SMOLLM if arch == "llama" else VOCABULARIES["qwen2"]
    hf_model = model_for(vocabulary, family, **overrides)
    write_gguf(file, hf_model, arch, vocabulary)
    assert_equals_transformers(file, hf_model)


def test_dummy_weights_leave_the_files_own_alone_and_keep_its_tokenizer(file):
    write_gguf(file, model_for(SMOLLM), "llama", SMOLLM)
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 8, "enforce_eager": True}
    engine = LLM(str(file), load_format="dummy", **options).engine
    assert engine.tokenizer.encode("the cat") == NanopageTokenizer(GGUFCheckpoint(file)).encode("the cat")
    norm = engine.executor.worker.model.norm.weight
    assert torch.equal(norm, torch.ones_like(norm))
    assert not torch.equal(gguf_tensors(file)["model.norm.weight"], torch.ones(len(norm)))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("family", "arch"), [("llama", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")])
def test_stored_types_are_dequantized(file, family, arch, stored):
    hf_model = model_for(SMOLLM, family)
    before = hf_model.model.layers[0].self_attn.q_proj.weight.clone()
    write_gguf(file, hf_model, arch, SMOLLM, types=STORED[stored])
    changed = not torch.equal(hf_model.model.layers[0].self_attn.q_proj.weight, before)
    assert changed == (stored != "float32")
    assert_equals_transformers(file, hf_model)


@pytest.mark.parametrize(("family", "arch"), [("mixtral", "llama"), ("qwen2_moe", "qwen2moe")])
def test_the_integers_of_experts_become_tiles_or_floats(file, family, arch, tmp_path, monkeypatch):
    """On a CPU they stay; on a GPU, where those of other layers stay, they become floats."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sizes = {} if family == "mixtral" else {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    hf_model = model_for(SMOLLM, family, **sizes)
    write_gguf(file, hf_model, arch, SMOLLM, types={"": Quantization.Q8_0})
    config, cpu = loader.read_config(file), torch.device("cpu")
    tiled = loader.load_model(file, config, torch.float32, cpu, loader.Loading(keep_integers="tiles"))
    floats = loader.load_model(file, config, torch.float32, cpu)
    mixture, plain = (getattr(m.layers[1], "mlp" if sizes else "block_sparse_moe") for m in (tiled, floats))
    for expert, same in zip(mixture.experts, plain.experts, strict=True):
        rows = torch.eye(same.down_proj.in_features)
        assert isinstance(expert.down_proj.weight, TiledWeight)
        torch.testing.assert_close(expert.down_proj(rows).T, same.down_proj.weight.matrix, rtol=1e-2, atol=1e-2)
    sequences = random_tokens([5, 21])
    grouped = Paged(file, sequences, tiles="packed", group=True)
    assert isinstance(grouped.model.layers[1].self_attn.o_proj.weight, QuantizedWeight)
    assert {parameter.dtype for parameter in grouped.model.parameters()} == {torch.float32}
    assert_all_close(grouped.run(decode_the_last), reference_logits(hf_model, sequences), 2e-3)


class TestConfig:
    @pytest.mark.parametrize(("arch", "normalize"), [("qwen2moe", False), ("qwen3moe", True)])
    def test_experts_are_read(self, file, arch, normalize):
        family, key = arch.replace("moe", "_moe"), f"{arch}.expert_feed_forward_length"
        experts = self.read(file, family, arch, num_experts_per_tok=3, norm_topk_prob=normalize).experts
        assert (experts.num_experts, experts.num_chosen, experts.intermediate_size) == (6, 3, 40)
        assert experts.normalize is normalize and experts.shared_size == (48 if family == "qwen2_moe" else 0)
        experts = self.read(file, family, arch, fields={key: None}, intermediate_size=80).experts
        assert experts.intermediate_size == 40  # as llama.cpp, without the field

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"qwen2moe.expert_gating_func": 2}, "qwen2moe.expert_gating_func = 2 is not supported"),
            ({"qwen2moe.expert_weights_scale": 2.5}, "qwen2moe.expert_weights_scale = 2.5 is not supported"),
            ({"qwen2moe.expert_used_count": 0}, "qwen2moe.expert_used_count must be from 1 to 4,096, got 0"),
            ({"qwen2moe.expert_weights_scale": [1.0, 2.0]}, "qwen2moe.expert_weights_scale must be a number"),
            ({"qwen2moe.expert_count": "six"}, "qwen2moe.expert_count must be an integer, got 'six'"),
        ],
    )
    def test_other_mixtures_are_refused_by_name(self, file, fields, message):
        with pytest.raises(ValueError, match=re.escape(message)):
            self.read(file, "qwen2_moe", "qwen2moe", fields=fields)

    def read(self, file, family="llama", arch="llama", vocabulary=SMOLLM, fields=None, **overrides):
        hf_model = model_for(vocabulary, family, **overrides)
        return loader.read_config(write_gguf(file, hf_model, arch, vocabulary, **fields or {}))

    @pytest.mark.parametrize("eps", [1e-5, 1e-6, 5e-6, 1e-8])
    def test_eps_is_the_decimal_that_was_meant(self, file, eps):
        assert self.read(file, rms_norm_eps=eps).rms_norm_eps == eps

    @pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1000000.0, 1234567.0])
    def test_the_base_of_the_rotation_is_read(self, file, theta):
        config = self.read(file, rope_parameters={"rope_type": "default", "rope_theta": theta})
        assert (config.rope.theta, config.rope.rope_type) == (theta, "default")

    def test_the_base_of_the_rotation_is_10000_if_the_file_says_nothing(self, file):
        fields = {"llama__rope__freq_base": None}
        rope = {"rope_type": "default", "rope_theta": 55.0}
        assert self.read(file, fields=fields, rope_parameters=rope).rope.theta == 10000.0

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_head_is_tied_if_the_file_has_none(self, file, tied):
        assert self.read(file, tie_word_embeddings=tied).tie_word_embeddings is tied

    def test_the_end_of_sequence_is_read(self, file):
        assert self.read(file).eos_token_ids == {SMOLLM.tokens.index("<|im_end|>")}

    def test_the_shapes_are_read(self, file):
        config = self.read(
            file, "qwen3", "qwen3", num_hidden_layers=3, head_dim=24, num_key_value_heads=1, max_position_embeddings=99
        )
        assert config.architecture == "Qwen3ForCausalLM"
        assert (config.num_layers, config.head_dim, config.num_heads, config.num_kv_heads) == (3, 24, 4, 1)
        assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (64, 96, 99)
        assert config.vocab_size == len(SMOLLM.tokens)

    @pytest.mark.parametrize(("family", "arch", "layers"), [("gemma2", "gemma2", 46), ("gemma3_text", "gemma3", 62)])
    def test_gemmas_with_27b_parameters_have_another_scale(self, file, family, arch, layers):
        assert self.read(file, family, arch).attention_scale == 32**-0.5  # of a head
        fields = {f"{arch}__block_count": layers}
        assert self.read(file, family, arch, fields=fields).attention_scale == (64 / 4) ** -0.5

    def test_without_kv_heads_every_head_has_its_own(self, file):
        fields = {"llama__attention__head_count_kv": None}
        assert self.read(file, fields=fields, num_key_value_heads=4).num_kv_heads == 4

    @pytest.mark.parametrize(
        ("scaling", "fields"),
        [
            ("linear", {"factor": 2.5}),
            ("yarn", {"factor": 4.0, "original_context_length": 32}),
            (
                "yarn",
                {
                    "factor": 4.0,
                    "original_context_length": 32,
                    "yarn_attn_factor": 0.75,
                    "yarn_beta_fast": 4.0,
                    "yarn_beta_slow": 0.5,
                },
            ),
        ],
    )
    def test_rope_scaling_fields_give_the_same_logits(self, file, scaling, fields):
        rope = {"rope_type": scaling, "rope_theta": 10000.0, "factor": fields["factor"]}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = 32
            rope |= {known_as: fields[name] for name, known_as in YARN_FIELDS.items() if name in fields}
        hf_model = model_for(SMOLLM, "qwen2", rope_parameters=rope)
        keys = {f"qwen2.rope.scaling.{key}": value for key, value in fields.items()}
        write_gguf(file, hf_model, "qwen2", SMOLLM, **{"qwen2.rope.scaling.type": scaling}, **keys)
        assert loader.read_config(file).rope.rope_type == scaling
        assert_equals_transformers(file, hf_model)


def llama3_divisors(head_dim, theta, factor):
    """rope_freqs.weight as llama.cpp's converter computes it."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(divisors)


class TestLlama3RopeScaling:
    @pytest.mark.parametrize(
        ("theta", "factor", "head_dim"), [(500000.0, 8.0, 64), (500000.0, 32.0, 64), (1e5, 4.0, 32)]
    )
    def test_is_found_in_the_stored_divisors(self, file, theta, factor, head_dim):
        rope = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        hf_model = model_for(SMOLLM, head_dim=head_dim, rope_parameters=rope, max_position_embeddings=131072)
        write_gguf(file, hf_model, "llama", SMOLLM, rope_freqs=llama3_divisors(head_dim, theta, factor))
        config = loader.read_config(file)
        assert (config.rope.rope_type, config.rope.theta) == ("llama3", theta)
        assert config.rope.params == {key: rope[key] for key in rope if key not in ("rope_type", "rope_theta")}
        assert_equals_transformers(file, hf_model)

    @pytest.mark.parametrize("which", [0, 10, -1])
    def test_other_divisors_are_refused(self, file, which):
        divisors = llama3_divisors(64, 500000.0, 8.0)
        divisors[which] *= 1.1
        hf_model = model_for(SMOLLM, head_dim=64)
        hf_model.config.rope_parameters["rope_theta"] = 500000.0
        write_gguf(file, hf_model, "llama", SMOLLM, rope_freqs=divisors)
        with pytest.raises(ValueError, match=r"rope_freqs\.weight") as caught:
            loader.read_config(file)
        assert str(file) in str(caught.value)


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizers(request, tmp_path_factory):
    """(vocabulary, nanopage's tokenizer of a file that holds it)."""
    vocabulary = VOCABULARIES[request.param]
    fields = {} if request.param != "llama-bpe" else {"tokenizer__ggml__add_bos_token": True}
    path = tmp_path_factory.mktemp("tokenizer") / "t.gguf"
    write_gguf(path, model_for(vocabulary), "llama", vocabulary, **fields)
    return vocabulary, NanopageTokenizer(GGUFCheckpoint(path))


def original_ids(vocabulary, text, add_special_tokens=True):
    ids = vocabulary.original.encode(text, add_special_tokens=add_special_tokens)
    return ids if isinstance(ids, list) else ids.ids


class TestTokenizer:
    def test_ids_equal_the_originals(self, tokenizers):
        vocabulary, ours = tokenizers
        for text in TEXTS + random_texts(300):
            assert ours.encode(text) == original_ids(vocabulary, text), repr(text)
            assert ours.encode(text, False) == original_ids(vocabulary, text, False), repr(text)

    def test_runs_of_one_character_are_merged_as_in_the_original(self, tokenizers):
        vocabulary, ours = tokenizers
        rng = random.Random(0)
        for _ in range(200):
            text = "".join(rng.choices("a -", [5, 5, 1], k=rng.randrange(1, 20)))
            assert ours.encode(text, False) == original_ids(vocabulary, text, False), repr(text)

    def test_special_tokens_in_the_text_are_recognized(self, tokenizers):
        vocabulary, ours = tokenizers
        kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
        added = [token for token, kind in kinds if kind in (CONTROL, UNKNOWN)]
        for token in added:
            assert ours.encode(token, False) == [vocabulary.tokens.index(token)]
            for text in (f"a{token}b", f" {token} ", f"{token}{token}x", f"the{token} dog"):
                assert ours.encode(text, False) == original_ids(vocabulary, text, False), repr(text)

    def test_decoding_gives_the_text_back(self, tokenizers):
        vocabulary, ours = tokenizers
        for text in TEXTS + random_texts(100, seed=1):
            if vocabulary.pre in NORMALIZED:
                text = vocabulary.original.normalizer.normalize_str(text)
            if vocabulary.model == "llama":
                text = text.replace("▁", "_")  # SentencePiece can not tell it from a space
            assert ours.decode(ours.encode(text)) == text

    def test_special_tokens_are_skipped_or_shown(self, tokenizers):
        vocabulary, ours = tokenizers
        ids = [vocabulary.fields["bos_token_id"], *ours.encode("dog", False), vocabulary.fields["eos_token_id"]]
        bos, eos = (vocabulary.tokens[vocabulary.fields[f"{name}_token_id"]] for name in ("bos", "eos"))
        assert ours.decode(ids).strip() == "dog"
        shown = ours.decode(ids, skip_special_tokens=False)
        assert shown.startswith(bos)
        assert shown.endswith(eos)

    def test_the_names_of_the_special_tokens_and_the_template_are_read(self, tokenizers):
        vocabulary, ours = tokenizers
        for name in ("bos", "eos"):
            expected = vocabulary.tokens[vocabulary.fields[f"{name}_token_id"]]
            assert ours.special_tokens[f"{name}_token"] == expected
        assert ours.vocab_size == len(vocabulary.tokens)
        assert ours.chat_template == CHAT_TEMPLATE

    def test_a_user_defined_token_is_one_token_and_no_special_one(self, tokenizers):
        vocabulary, ours = tokenizers
        if USER_DEFINED not in vocabulary.types:
            assert vocabulary.model == "llama"
            return
        ids = ours.encode("so<think>so", False)
        assert ids.count(vocabulary.tokens.index("<think>")) == 1
        assert ours.decode(ids) == "so<think>so"
        assert ids == original_ids(vocabulary, "so<think>so", False)

    def test_a_saved_tokenizer_is_the_same(self, tokenizers, tmp_path):
        vocabulary, ours = tokenizers
        write_gguf(tmp_path / "t.gguf", model_for(vocabulary), "llama", vocabulary)
        GGUFCheckpoint(tmp_path / "t.gguf").vocabulary.save(tmp_path)
        saved = NanopageTokenizer(tmp_path)
        for text in TEXTS:
            assert saved.encode(text, False) == ours.encode(text, False)
        assert saved.special_tokens == ours.special_tokens
        assert saved.chat_template == ours.chat_template


def tokenizer_of(file, vocabulary, **fields):
    write_gguf(file, model_for(vocabulary), "llama", vocabulary, **fields)
    return NanopageTokenizer(GGUFCheckpoint(file))


class TestBeginningOfSequence:
    @pytest.mark.parametrize("kind", ["smollm", "gpt-2", "qwen2", "llama"])
    @pytest.mark.parametrize("add", [True, False])
    def test_is_added_if_the_file_says_so(self, file, kind, add):
        vocabulary = VOCABULARIES[kind]
        ours = tokenizer_of(file, vocabulary, tokenizer__ggml__add_bos_token=add)
        bos = [vocabulary.fields["bos_token_id"]] if add else []
        assert ours.encode("the dog") == bos + original_ids(vocabulary, "the dog", False)

    # llama.cpp's defaults (llama-vocab.cpp); Llama 3's own converter writes no add_bos_token.
    @pytest.mark.parametrize(
        ("kind", "adds"),
        [("smollm", False), ("gpt-2", False), ("qwen2", False), ("llama", True), ("llama-bpe", True), ("lfm2", True)],
    )
    def test_is_llama_cpps_default_if_the_file_says_nothing(self, file, kind, adds):
        vocabulary = VOCABULARIES[kind]
        ours = tokenizer_of(file, vocabulary, tokenizer__ggml__add_bos_token=None)
        assert (ours.encode("the dog")[0] == vocabulary.fields["bos_token_id"]) is adds


def test_the_unknown_token_is_a_special_one(file):
    ours = tokenizer_of(file, VOCABULARIES["llama"])
    assert ours.encode("<unk>", False) == [0]
    assert ours.decode([0, *ours.encode("dog", False)]).strip() == "dog"
    assert "<unk>" in ours.decode([0], skip_special_tokens=False)


def test_a_special_token_of_any_spelling_begins_the_text(file):
    vocabulary = replace(SMOLLM, tokens=list(SMOLLM.tokens))
    for name in ("<a:b>", "$A:0", "a b", "bos", "$B"):
        vocabulary.tokens[vocabulary.fields["bos_token_id"]] = name
        ours = tokenizer_of(file, vocabulary, tokenizer__ggml__add_bos_token=True)
        assert ours.encode("12") == [vocabulary.fields["bos_token_id"], *ours.encode("12", False)]


@pytest.mark.parametrize("kind", ["smollm", "llama"])
@pytest.mark.parametrize("value", ["size", 2**31, 2**32 - 1, -1])
def test_a_token_id_outside_the_vocabulary_means_none(file, kind, value):
    vocabulary = VOCABULARIES[kind]
    value = len(vocabulary.tokens) if value == "size" else value
    names = ("bos", "eos", "eot", "eom", "padding", "unknown")
    ours = tokenizer_of(file, vocabulary, **{f"tokenizer.ggml.{name}_token_id": value for name in names})
    assert ours.special_tokens == {} and ours.encode("the dog") == ours.encode("the dog", add_special_tokens=False)
    assert loader.read_config(file).eos_token_ids == frozenset()


@pytest.mark.parametrize("value", [2**32 - 1, -1])
@pytest.mark.parametrize(
    ("fields", "kind", "ends"),
    [
        ({}, CONTROL, {"<|end|>"}),  # as in a file that calls <|end|> user-defined: an end by its name
        ({}, USER_DEFINED, {"<|end|>"}),
        ({"eot": 300, "eom": 301}, NORMAL, {300, 301}),
        ({"fim_pad": 300, "fim_rep": 301, "fim_sep": 302, "fim_pre": 303}, NORMAL, {300, 301, 302}),
        ({}, NORMAL, None),
    ],
)
def test_another_token_ends_a_reply_if_the_end_of_sequence_is_none(file, value, fields, kind, ends):
    tokens = ["<|end|>" if token == "<think>" else token.replace("<|", "<:") for token in SMOLLM.tokens]
    types = [kind if token == "<|end|>" else each for token, each in zip(tokens, SMOLLM.types, strict=True)]
    ids = {f"tokenizer.ggml.{name}_token_id": token_id for name, token_id in ({"eos": value} | fields).items()}
    write_gguf(file, model_for(SMOLLM), "llama", replace(SMOLLM, tokens=tokens, types=types), **ids)
    if ends is None:
        with pytest.raises(ValueError, match=f"eos_token_id = {value} is no token, and no other token ends a reply"):
            loader.read_config(file)
        return
    found = loader.read_config(file).eos_token_ids | NanopageTokenizer(GGUFCheckpoint(file)).end_ids()
    assert found == {tokens.index(end) if isinstance(end, str) else end for end in ends}


def test_the_ends_of_a_file_are_listed_once(plain_file, caplog):
    with caplog.at_level("INFO", "nanopage"):
        llm = LLM(str(plain_file), device="cpu", max_model_len=64, num_gpu_blocks_override=8, enforce_eager=True)
    (shown,) = (message for message in caplog.messages if "a reply ends" in message)
    ends = {SMOLLM.tokens.index(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert llm.engine.model_config.eos_token_ids == ends and all(f" ({end})" in shown for end in ends)


def test_the_template_for_tools_is_read_and_saved(file, tmp_path):
    named = {"tokenizer.chat_templates": ["tool_use"], "tokenizer.chat_template.tool_use": "{{ tools }}"}
    ours = tokenizer_of(file, SMOLLM, **named)
    GGUFCheckpoint(file).vocabulary.save(tmp_path)
    for each in (ours, NanopageTokenizer(tmp_path)):
        assert (each.chat_template, each.tool_template) == (CHAT_TEMPLATE, "{{ tools }}")
        assert each.render_chat([{"role": "user", "content": "a"}], tools=[{}]) == "[{}]"
        assert each.render_chat([{"role": "user", "content": "a"}], "tool_use") == "None"


def test_empty_tokens_get_names_that_differ(file):
    vocabulary = replace(SMOLLM, tokens=list(SMOLLM.tokens))
    vocabulary.tokens[400] = vocabulary.tokens[401] = ""
    used = [
        merge
        for merge in SMOLLM.merges
        if not {SMOLLM.tokens[400], SMOLLM.tokens[401]} & {*merge.split(), merge.replace(" ", "")}
    ]
    vocabulary.merges = used
    ours = tokenizer_of(file, vocabulary)
    assert ours.decode([400, 401]) == "[EMPTY_400][EMPTY_401]"
    assert ours.vocab_size == len(vocabulary.tokens)


def test_the_space_before_a_sentencepiece_text_can_be_off(file):
    vocabulary = VOCABULARIES["llama"]
    ours = tokenizer_of(file, vocabulary, tokenizer__ggml__add_space_prefix=False)
    original = SentencePiece(vocabulary.tokens, vocabulary.scores, add_space_prefix=False)
    for text in TEXTS + random_texts(100):
        assert ours.encode(text, False) == original.encode(text, False), repr(text)
        if "▁" not in text:
            assert ours.decode(ours.encode(text, False)) == text


class TestFilesThatDoNotFit:
    def refuse(self, file, match):
        """Everything that opens the file names it."""
        with pytest.raises(ValueError, match=match) as caught:
            self.read_all(file)
        first, *_ = str(caught.value).split("\n")  # tensors that do not fit follow
        assert str(file) in first and len(first) <= len(str(file)) + 250

    def read_all(self, file):
        config = loader.read_config(file)
        NanopageTokenizer(GGUFCheckpoint(file))
        loader.load_model(file, config, torch.float32, torch.device("cpu"))

    def test_a_good_file_is_read(self, plain_file):
        self.read_all(plain_file)

    @pytest.mark.parametrize("arch", ["gemma", "clip"])
    def test_an_unknown_architecture(self, file, arch):
        write_gguf(file, model_for(SMOLLM), arch, SMOLLM)
        problem = rf"architecture '{arch}' is not supported; supported: llama, deepseek2, .* and \d+ others; {INSTEAD}$"
        self.refuse(file, problem)

    def test_heads_of_k_that_differ_between_layers(self, file):
        for heads in ([1, 2], [0.5, 0.0]):
            write_gguf(file, model_for(SMOLLM, "lfm2"), "lfm2", SMOLLM, lfm2__attention__head_count_kv=heads)
            self.refuse(file, "head_count_kv must be one number for all layers with attention")
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, llama__attention__head_count_kv=[2, 0])
        self.refuse(file, "head_count_kv must be an integer")

    @pytest.mark.parametrize("kind", ["bert", "t5", "rwkv"])
    def test_an_unknown_tokenizer(self, file, kind):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, tokenizer__ggml__model=kind)
        self.refuse(file, rf"tokenizer '{kind}' is not supported; supported: gpt2, llama; {INSTEAD}$")

    @pytest.mark.parametrize("pre", ["deepseek-llm", "falcon"])
    def test_an_unknown_pre_tokenizer(self, file, pre):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, tokenizer__ggml__pre=pre)
        self.refuse(file, rf"pre-tokenizer '{pre}' is not supported; .*; {INSTEAD}$")

    @pytest.mark.parametrize(
        "key",
        [
            "llama.embedding_length",
            "llama.block_count",
            "llama.feed_forward_length",
            "llama.context_length",
            "llama.attention.head_count",
            "llama.attention.layer_norm_rms_epsilon",
            "tokenizer.ggml.model",
            "tokenizer.ggml.tokens",
            "tokenizer.ggml.merges",
        ],
    )
    def test_a_missing_field(self, file, key):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{key: None})
        self.refuse(file, rf"{re.escape(key)} is missing")

    def test_a_tensor_that_is_not_the_models(self, file):
        extra = {"blk.0.ffn_gate_exps.weight": torch.zeros(2, 96, 64).numpy()}
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, extra_tensors=extra)
        self.refuse(file, r"blk\.0\.ffn_gate_exps\.weight")

    def test_a_missing_tensor(self, file):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, drop=["model.layers.1.mlp.up_proj.weight"])
        self.refuse(file, r"missing: model\.layers\.1\.mlp\.up_proj\.weight")

    def test_a_mis_shaped_tensor(self, file):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, llama__feed_forward_length=128)
        self.refuse(file, r"mis-shaped: model\.layers\.0\.mlp\.up_proj\.weight is \[96, 64\]")

    def test_heads_that_do_not_divide_the_rows(self, file):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, llama__attention__head_count=6)
        self.refuse(file, "attn_q|q_proj")

    def test_a_quantization_that_can_not_be_read(self, file):
        hf_model = model_for(SMOLLM)
        write_gguf(file, hf_model, "llama", SMOLLM, types={"down_proj": Quantization.Q8_0})
        # I8 has no reader in the gguf package; its number in the tensor's header replaces Q8_0's.
        data = bytearray(file.read_bytes())
        at = data.index(b"blk.0.ffn_down.weight") + len(b"blk.0.ffn_down.weight") + 4 + 2 * 8
        assert data[at : at + 4] == Quantization.Q8_0.to_bytes(4, "little")
        data[at : at + 4] = Quantization.I8.to_bytes(4, "little")
        file.write_bytes(data)
        self.refuse(file, r"I8 is not supported.*blk\.0\.ffn_down\.weight.*; a file of another .*, such as Q4_K_M")

    @pytest.mark.parametrize(
        ("key", "value", "others"),
        [
            ("llama.rope.dimension_count", 8, {}),
            ("llama.rope.dimension_sections", [2, 1, 1, 0], {}),
            ("llama.rope.scaling.attn_factor", 0.5, {"llama.rope.scaling.type": "linear"}),
            ("llama.rope.scaling.yarn_beta_fast", 4.0, {"llama.rope.scaling.type": "linear"}),
            ("llama.rope.scaling.yarn_ext_factor", 0.5, {"llama.rope.scaling.type": "yarn"}),
            ("tokenizer.ggml.add_eos_token", True, {}),
        ],
    )
    def test_a_field_that_would_change_the_output_and_is_not_supported(self, file, key, value, others):
        fields = {"llama.rope.scaling.factor": 4.0, **others} if others else {}
        write_gguf(file, model_for(SMOLLM, head_dim=24), "llama", SMOLLM, **fields, **{key: value})
        self.refuse(file, re.escape(key))

    @pytest.mark.parametrize("pattern", [4, [1, 0], [True]])
    def test_windows_that_are_not_those_of_the_layers(self, file, pattern):
        fields = {"olmo2.attention.sliding_window_pattern": pattern}
        write_gguf(file, model_for(SMOLLM, "olmo3"), "olmo2", SMOLLM, **fields)
        self.refuse(file, "sliding_window_pattern must be an array|layer_types .* of 2 layers is not supported")

    @pytest.mark.parametrize(
        "key",
        [
            "llama.embedding_length",
            "llama.block_count",
            "llama.feed_forward_length",
            "llama.context_length",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.rope.dimension_count",
        ],
    )
    @pytest.mark.parametrize("value", [0, -1, 2**31, 1.5, "4", True, [4, 4]], ids=str)
    def test_a_size_that_is_none(self, file, key, value):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{key: value})
        self.refuse(file, rf"{re.escape(key)} must be")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("llama.attention.layer_norm_rms_epsilon", -1.0),
            ("llama.attention.layer_norm_rms_epsilon", math.nan),
            ("llama.attention.layer_norm_rms_epsilon", [1e-5]),
            ("llama.rope.freq_base", 0.0),
            ("llama.rope.freq_base", math.inf),
            ("llama.rope.freq_base", "1e4"),
            ("tokenizer.ggml.model", 1),
            ("tokenizer.ggml.pre", ["smollm"]),
            ("tokenizer.ggml.tokens", "abc"),
            ("tokenizer.ggml.tokens", [1, 2, 3]),
            ("tokenizer.ggml.merges", [1, 2]),
            ("tokenizer.ggml.merges", "a b"),
            ("tokenizer.ggml.token_type", "normal"),
            ("tokenizer.ggml.token_type", [1.0] * len(SMOLLM.tokens)),
            ("tokenizer.ggml.add_bos_token", 1),
            ("tokenizer.ggml.add_eos_token", "false"),
            ("tokenizer.ggml.bos_token_id", "<s>"),
            ("tokenizer.ggml.eos_token_id", [1]),
            ("tokenizer.chat_template", ["{{ messages }}"]),
            ("tokenizer.chat_template", 5),
            ("tokenizer.chat_template.tool_use", 5),
            ("split.count", [1, 1]),
            ("split.count", "1"),
        ],
        ids=str,
    )
    def test_a_field_of_another_type_or_out_of_range(self, file, key, value):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{key: value})
        self.refuse(file, rf"{re.escape(key)} must be")

    @pytest.mark.parametrize("count", [0, 2, 9])
    def test_one_of_several_files(self, file, count):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"split.count": count})
        self.refuse(file, f"split.count is {count}: merge them")

    def test_one_file_of_one_is_read(self, file):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"split.count": 1})
        self.read_all(file)

    def test_a_token_that_occurs_twice(self, file):
        tokens = [*SMOLLM.tokens[:-1], "!"]
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"tokenizer.ggml.tokens": tokens})
        self.refuse(file, rf"tokenizer\.ggml\.tokens has '!' twice, as {tokens.index('!')} and as {len(tokens) - 1}")

    @pytest.mark.parametrize("types", [[NORMAL] * 7, [*SMOLLM.types, NORMAL]], ids=len)
    def test_types_that_are_not_one_for_each_token(self, file, types):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"tokenizer.ggml.token_type": types})
        self.refuse(file, rf"token_type has {len(types)} values for {len(SMOLLM.tokens)} tokens")

    @pytest.mark.parametrize("kind", [-1, 7, 2**31 - 1])
    def test_an_unknown_type_of_token(self, file, kind):
        types = [*SMOLLM.types[:-1], kind]
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"tokenizer.ggml.token_type": types})
        self.refuse(file, rf"token_type has values that are not supported: \[{kind}\]")

    @pytest.mark.parametrize("merge", ["the", "", "a ", " a", "the qqqq", "a  b"])
    def test_a_merge_that_is_none(self, file, merge):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, **{"tokenizer.ggml.merges": [*SMOLLM.merges, merge]})
        self.refuse(file, r"tokenizer\.ggml\.merges")

    @pytest.mark.parametrize(
        ("scores", "problem"),
        [
            ([0.0], "has 1 values"),
            ([1] * 9, "must be an array of numbers"),
            ([math.nan], "not finite"),
            ("x", "must be"),
        ],
    )
    def test_scores_that_are_none(self, file, scores, problem):
        vocabulary = VOCABULARIES["llama"]
        if problem == "not finite":
            scores = [*vocabulary.scores[:-1], math.nan]
        write_gguf(file, model_for(vocabulary), "llama", vocabulary, **{"tokenizer.ggml.scores": scores})
        self.refuse(file, rf"tokenizer\.ggml\.scores .*{problem}")

    def test_a_piece_that_would_take_long_to_cut(self, file):
        vocabulary = VOCABULARIES["llama"]
        tokens = [*vocabulary.tokens[:-1], "x" * 1000]
        write_gguf(file, model_for(vocabulary), "llama", vocabulary, **{"tokenizer.ggml.tokens": tokens})
        self.refuse(file, r"tokenizer\.ggml\.tokens has a token of 1,000 characters")

    @pytest.mark.parametrize(
        "name", ["blk.x.attn_q.weight", "blk.0", "blk..attn_q.weight", "blk.00.attn_q.weight", "weight", "", "."]
    )
    def test_a_tensor_with_a_name_that_is_none(self, file, name):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, extra_tensors={name: torch.zeros(2).numpy()})
        self.refuse(file, rf"tensor '{re.escape(name)}' is not one of a llama model")

    @pytest.mark.parametrize("divisors", [torch.ones(9), torch.ones(8, 1), torch.full((8,), math.nan), torch.zeros(8)])
    def test_divisors_of_the_rotation_that_are_none(self, file, divisors):
        extra = {"rope_freqs.weight": divisors.numpy()}
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, extra_tensors=extra)
        self.refuse(file, r"rope_freqs\.weight is not Llama 3's")

    def test_rope_scaling_of_two_kinds(self, file):
        fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
        divisors = llama3_divisors(16, 10000.0, 8.0)
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, rope_freqs=divisors, **fields)
        self.refuse(file, r"llama\.rope\.scaling\.type is 'linear', and there is rope_freqs\.weight")

    @pytest.mark.parametrize("name", ["blk.1.attn_norm.weight", "blk.0.ffn_up.weight", "token_embd.weight"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_weight_that_is_not_finite(self, file, name, value):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM)
        tensor = read_header(file).tensors[name]
        data = bytearray(file.read_bytes())
        struct.pack_into("<f", data, tensor.offset + tensor.num_bytes - 4, value)
        file.write_bytes(data)
        (ours,) = {key for key, info in GGUFCheckpoint(file).weights.items() if info.name == name}
        self.refuse(file, rf"{re.escape(ours)} has values that are NaN or infinite in float32")

    def test_a_scale_that_is_not_finite(self, file):
        write_gguf(file, model_for(SMOLLM), "llama", SMOLLM, types={"down_proj": Quantization.Q8_0})
        tensor = read_header(file).tensors["blk.1.ffn_down.weight"]
        data = bytearray(file.read_bytes())
        struct.pack_into("<e", data, tensor.offset + 34 * 5, math.nan)
        file.write_bytes(data)
        self.refuse(file, r"layers\.1\.mlp\.down_proj\.weight has values that are NaN or infinite")

    @pytest.mark.parametrize("percent", [0, 1, 5, 10, 20, 30, 50, 75, 90, 99])
    def test_a_truncated_file(self, file, plain_file, percent):
        data = plain_file.read_bytes()
        file.write_bytes(data[: len(data) * percent // 100])
        self.refuse(file, "truncated")

    def test_a_file_cut_anywhere_in_its_metadata(self, file, plain_file):
        data = plain_file.read_bytes()
        for size in random.Random(0).sample(range(len(data) // 20), 25):
            file.write_bytes(data[:size])
            self.refuse(file, "truncated")

    def test_a_file_without_its_last_byte(self, file, plain_file):
        file.write_bytes(plain_file.read_bytes())
        os.truncate(file, file.stat().st_size - 1)
        self.refuse(file, "truncated")

    @pytest.mark.parametrize(
        "data",
        [
            b"this is not a GGUF file, but a text of more than a few bytes " * 10,
            b"version https://git-lfs.github.com/spec/v1\n",
            b"ggml" + bytes(100),
            bytes(1000),
            b"GGUF" + (99).to_bytes(4, "little") + bytes(100),
        ],
        ids=["text", "git-lfs pointer", "ggml", "zeros", "version 99"],
    )
    def test_a_file_that_is_no_gguf(self, file, data):
        file.write_bytes(data)
        self.refuse(file, "not a readable GGUF file")

    def test_no_file(self, file):
        with pytest.raises(FileNotFoundError, match=re.escape(str(file))):
            loader.read_config(file)


def test_an_engine_reads_the_metadata_once_and_reports_progress(file, monkeypatch):
    write_gguf(file, model_for(SMOLLM), "llama", SMOLLM)
    calls, progress = [], []

    def count(path):
        calls.append(path)
        return read_header(path)

    def open_checkpoint(path):
        nonlocal opened
        checkpoint = GGUFCheckpoint(path)
        opened = weakref.ref(checkpoint)
        return checkpoint

    opened = None
    monkeypatch.setattr(loader, "open_checkpoint", open_checkpoint)
    monkeypatch.setattr(gguf_checkpoint, "read_header", count)
    config = EngineConfig(model=str(file), device="cpu", num_gpu_blocks_override=20, enforce_eager=True)
    engine = build_engine(config, lambda *numbers: progress.append(numbers))
    assert calls == [file]
    gc.collect()
    assert opened() is None, "the engine keeps the file's vocabulary, which takes tens of megabytes"
    assert engine.executor.worker.setup.path == file
    total = sum(parameter.numel() for parameter in model_for(SMOLLM).parameters())
    assert progress[-1] == (total, total)
    assert all(before < after for (before, _), (after, _) in pairwise(progress))


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("elements", [1, 64, 1000, 2**17])
def test_pieces_are_small_and_make_up_the_tensors(file, arch, elements, monkeypatch):
    hf_model = model_for(SMOLLM, arch)
    write_gguf(file, hf_model, arch, SMOLLM, types={"mlp": Quantization.Q8_0})
    monkeypatch.setattr(gguf_checkpoint, "PIECE_ELEMENTS", elements)
    tensors = gguf_tensors(file)
    for name, parameter in hf_model.named_parameters():
        assert torch.equal(tensors[name], parameter), name
    least = 96 * 64  # a row, or a head of 16 rows, is not divided
    assert max(piece.size for _, _, piece in GGUFCheckpoint(file).pieces()) <= max(elements, least)


def test_generating_from_the_file_equals_generating_from_the_directory(tmp_path):
    hf_model = model_for(SMOLLM)
    file = write_gguf(tmp_path / "m.gguf", hf_model, "llama", SMOLLM, types={"": Quantization.Q8_0})
    directory = tmp_path / "m"
    hf_model.save_pretrained(directory)
    SMOLLM.original.save(str(directory / "tokenizer.json"))
    prompts = ["the dog", "12 boxes", "def main("]
    params = SamplingParams(temperature=0, max_tokens=20)
    options = {"dtype": "float32", "num_gpu_blocks_override": 20, "enforce_eager": True}
    ours, theirs = (
        [output.outputs[0].token_ids for output in LLM(str(path), **options).generate(prompts, params, use_tqdm=False)]
        for path in (file, directory)
    )
    assert ours == theirs
    assert len({tuple(ids) for ids in ours}) == 3
