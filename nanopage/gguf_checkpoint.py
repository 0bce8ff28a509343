"""A .gguf file read as if it were a Hugging Face directory: config, tokenizer and tensors under their usual names.

The `gguf` package reads and dequantizes. What is done here is to undo llama.cpp's conversion: its names, its reordering
of q and k rows in the llama architecture, its flat list of vocabulary and merges.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from einops import rearrange
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor

from nanopage.config import RopeConfig
from nanopage.layers.rotary import inverse_frequencies

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How byte-level BPE vocabularies split text before merging; llama.cpp records only the name (`tokenizer.ggml.pre`).
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


class GGUFCheckpoint:
    """An open .gguf file.

    Raises:
        FileNotFoundError; ValueError naming the file if it is no GGUF, is truncated, or holds an architecture, a
        tokenizer or a quantization that is not supported.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise FileNotFoundError(f"no such file: {path}")
        self.path = path
        try:
            self.reader = gguf.GGUFReader(path)
        except Exception as error:  # the reader raises whatever numpy does on a file that ends too early
            raise ValueError(f"{path} is not a readable GGUF file (truncated?): {error}") from error
        self.architecture = self.field("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported: {', '.join(ARCHITECTURES)}"
            )

    def field(self, key: str, default=None):
        """A metadata value as Python data; `{arch}` in the key is the file's architecture."""
        field = self.reader.get_field(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def config(self) -> dict:
        """The file's hyperparameters as the contents of a config.json."""
        names = {tensor.name for tensor in self.reader.tensors}
        num_heads = self._required("{arch}.attention.head_count")
        config = {
            "architectures": [ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "vocab_size": len(self._required("tokenizer.ggml.tokens")),
            "hidden_size": self._required("{arch}.embedding_length"),
            "intermediate_size": self._required("{arch}.feed_forward_length"),
            "num_hidden_layers": self._required("{arch}.block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.field("{arch}.attention.head_count_kv", num_heads),
            "max_position_embeddings": self._required("{arch}.context_length"),
            "rms_norm_eps": _float32(self._required("{arch}.attention.layer_norm_rms_epsilon")),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in names,
            "attention_bias": self.architecture == "llama" and "blk.0.attn_q.bias" in names,
            "dtype": "bfloat16",
            "rope_theta": _float32(self.field("{arch}.rope.freq_base", 10000.0)),
        }
        head_dim = self.field("{arch}.attention.key_length") or self.field("{arch}.rope.dimension_count")
        if head_dim:
            config["head_dim"] = head_dim
        if "rope_freqs.weight" in names:
            config["rope_scaling"] = self._llama3_scaling(config)
        default_dim = config.get("head_dim", config["hidden_size"] // num_heads)
        if self.field("{arch}.rope.dimension_count", default_dim) != default_dim:
            self._unsupported("{arch}.rope.dimension_count")
        for name in ("attn_factor", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
            if self.field(f"{{arch}}.rope.scaling.{name}") is not None:
                self._unsupported(f"{{arch}}.rope.scaling.{name}")
        scaling = self.field("{arch}.rope.scaling.type")
        if scaling not in (None, "none"):
            config["rope_scaling"] = {"rope_type": scaling, "factor": self._required("{arch}.rope.scaling.factor")}
            if original := self.field("{arch}.rope.scaling.original_context_length"):
                config["rope_scaling"]["original_max_position_embeddings"] = original
        if (bos := self.field("tokenizer.ggml.bos_token_id")) is not None:
            config["bos_token_id"] = bos
        # End of text, of turn and of message all end a reply.
        ends = [self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        if ends := sorted({token_id for token_id in ends if token_id is not None}):
            config["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return config

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, float32 tensor) one at a time."""
        num_heads = self._required("{arch}.attention.head_count")
        kv_heads = self.field("{arch}.attention.head_count_kv", num_heads)
        for tensor in self.reader.tensors:
            if tensor.name == "rope_freqs.weight":
                continue  # in config()
            name = self._name(tensor.name)
            weight = self._dequantize(tensor)
            if self.architecture == "llama" and "attn_q." in tensor.name:
                weight = _unpermute(weight, num_heads)
            elif self.architecture == "llama" and "attn_k." in tensor.name:
                weight = _unpermute(weight, kv_heads)
            yield name, weight

    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer.

        Raises: ValueError for a kind or pre-tokenizer that is not one of those listed in it.
        """
        kind = self._required("tokenizer.ggml.model")
        if kind == "gpt2":
            tokenizer = self._byte_level_bpe()
        elif kind == "llama":
            tokenizer = self._sentencepiece_bpe()
        else:
            raise ValueError(f"{self.path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
        tokens, types = self._vocabulary()
        added = []
        for token, token_type in zip(tokens, types, strict=True):
            if token_type in (CONTROL, USER_DEFINED):
                added.append(AddedToken(token, special=token_type == CONTROL, normalized=False))
        tokenizer.add_tokens(added)
        # Set the special flag again: add_tokens leaves tokens that the vocabulary already has as they are.
        tokenizer.add_special_tokens([token for token in added if token.special])
        bos = self.field("tokenizer.ggml.bos_token_id")
        # Where the file says nothing, llama.cpp's defaults.
        adds_bos = kind == "llama" or self.field("tokenizer.ggml.pre") == "llama-bpe"
        if self.field("tokenizer.ggml.add_eos_token", False):
            self._unsupported("tokenizer.ggml.add_eos_token")
        if bos is not None and self.field("tokenizer.ggml.add_bos_token", adds_bos):
            template = f"{tokens[bos]}:0 $A:0"
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, pair=f"{template} $B:1", special_tokens=[(tokens[bos], bos)]
            )
        return tokenizer

    def tokenizer_config(self) -> dict:
        """The special tokens and the chat template as the contents of a tokenizer_config.json."""
        tokens, _ = self._vocabulary()
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            if (token_id := self.field(f"tokenizer.ggml.{key}_token_id")) is not None:
                config[f"{name}_token"] = tokens[token_id]
        if template := self.field("tokenizer.chat_template"):
            config["chat_template"] = template
        config["model_max_length"] = self._required("{arch}.context_length")
        return config

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json."""
        self.tokenizer().save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps(self.tokenizer_config(), indent=2))

    def _required(self, key: str):
        value = self.field(key)
        if value is None:
            raise ValueError(f"{self.path}: the GGUF field {key.replace('{arch}', self.architecture)} is missing")
        return value

    def _unsupported(self, key: str) -> None:
        """Refuse a field that would change the output."""
        raise ValueError(
            f"{self.path}: {key.replace('{arch}', self.architecture)} = {self.field(key)} is not supported"
        )

    def _vocabulary(self) -> tuple[list[str], list[int]]:
        tokens = self._required("tokenizer.ggml.tokens")
        return tokens, self.field("tokenizer.ggml.token_type", [NORMAL] * len(tokens))

    def _name(self, name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if stem in TENSORS:
            return f"{TENSORS[stem]}.{kind}"
        if stem.startswith("blk."):
            _, layer, part = stem.split(".", 2)
            if part in LAYER_TENSORS:
                return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"
        raise ValueError(f"{self.path}: tensor {name!r} is not one of a {self.architecture} model")

    def _dequantize(self, tensor) -> Tensor:
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ValueError(f"{self.path}: {tensor.name}: {error}") from None
        # Always a copy: the reader's arrays are views of the memory-mapped file.
        return torch.from_numpy(np.array(values, dtype=np.float32))

    def _llama3_scaling(self, config: dict) -> dict:
        """The rope scaling that llama.cpp stored as one divisor per frequency; checked, not believed."""
        (stored,) = (self._dequantize(t) for t in self.reader.tensors if t.name == "rope_freqs.weight")
        scaling = {
            "rope_type": "llama3",
            "factor": stored.max().item(),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,  # of every Llama 3.x
        }
        head_dim, theta = 2 * len(stored), config["rope_theta"]
        plain, _ = inverse_frequencies(head_dim, RopeConfig(theta))
        scaled, _ = inverse_frequencies(head_dim, RopeConfig(theta, "llama3", scaling))
        if not torch.allclose(plain / scaled, stored, rtol=1e-3):
            raise ValueError(f"{self.path}: rope_freqs.weight is not Llama 3's rope scaling, which is all we have")
        return scaling

    def _byte_level_bpe(self) -> Tokenizer:
        pre = self._required("tokenizer.ggml.pre")
        if pre not in PRE_TOKENIZERS:
            raise ValueError(
                f"{self.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(PRE_TOKENIZERS)}"
            )
        tokens, _ = self._vocabulary()
        merges = [tuple(merge.split(" ")) for merge in self._required("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
        if pre in ("llama-bpe", "qwen2"):
            pattern = _LLAMA3_SPLIT if pre == "llama-bpe" else _QWEN2_SPLIT
            split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        else:
            parts = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
            if pre == "smollm":
                parts.insert(0, pre_tokenizers.Digits(individual_digits=True))
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _sentencepiece_bpe(self) -> Tokenizer:
        """SentencePiece BPE keeps scores, not merges: any pair whose result is in the vocabulary merges, best first."""
        tokens, types = self._vocabulary()
        scores = self._required("tokenizer.ggml.scores")
        vocabulary = {token: i for i, token in enumerate(tokens)}
        merges = []
        for i, token in enumerate(tokens):
            if types[i] != NORMAL:
                continue
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in vocabulary and right in vocabulary:
                    merges.append((-scores[i], vocabulary[left], vocabulary[right], left, right))
        merges.sort()
        unknown = self.field("tokenizer.ggml.unknown_token_id", 0)
        tokenizer = Tokenizer(
            models.BPE(
                vocabulary,
                [(left, right) for *_, left, right in merges],
                unk_token=tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        spaces = normalizers.Replace(" ", "▁")
        decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        if self.field("tokenizer.ggml.add_space_prefix", True):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
            decoding.append(decoders.Strip(" ", 1, 0))
        else:
            tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(decoding)
        return tokenizer


def _float32(value: float) -> float:
    """A number stored as float32 as the decimal it was meant to be: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """llama.cpp rotates neighbouring rows of q and k, transformers the two halves of a head: put the rows back."""
    if len(weight) % (2 * num_heads):
        return weight  # mis-shaped: the loader says so by name
    return rearrange(weight, "(h half two) ... -> (h two half) ...", h=num_heads, two=2).contiguous()
