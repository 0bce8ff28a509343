"""Exercise of chapter 6: a model family, Seed-OSS (ByteDance, 2025).

    pytest -x docs/course/exercises/test_family.py

Seed-OSS is Llama's layer with these differences:

    num_key_value_heads   8 if config.json does not have it
    head_dim              128 if config.json does not have it, whatever hidden_size is
    attention_bias        whether q, k and v have biases: true if config.json does not have it. The output projection
                          has none
    attention_out_bias    whether the output projection has a bias: false if config.json does not have it. ModelConfig
                          has no field for it, so refuse true: `raise fields.error("attention_out_bias", "...")`

`mlp_bias` is as in Llama, there is no sliding window, and fields about dropout matter in training only.

nanopage/models/llama.py is Llama, qwen2.py beside it has biases on q, k and v, and docs/adding-a-model.md explains the
parts of such a file. The test makes small random models with transformers and compares the logits of every token.
"""

from typing import Any

from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.models.decoder import DecoderLayer

ARCHITECTURES = ("SeedOssForCausalLM",)
GGUF_ARCHITECTURE = "seed_oss"  # GGUF files are not part of the exercise


def read_config(fields: Fields, architecture: str) -> dict[str, Any]:
    """Fields of ModelConfig that are particular to the family."""
    raise NotImplementedError("exercise 6")


def make_layer(config: ModelConfig, index: int) -> DecoderLayer:
    """The decoder layer number `index`."""
    raise NotImplementedError("exercise 6")
