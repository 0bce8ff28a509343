"""Makers of tiny encoders: random weights and a WordPiece tokenizer, saved as Hugging Face directories."""

import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

_WORDS = "the cat dog house river ran quickly under a tree 42 , . who where is it un ##believ ##able ##s"
WORDS = _WORDS.split()
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]  # ids 0 to 3


def texts(count: int, seed: int = 0) -> list[str]:
    """Of 1 to 25 words."""
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 25))) for _ in range(count)]


def encoder_tokenizer(family: str) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1" if family == "bert" else "[CLS] $A [SEP] [SEP] $B [SEP]"
    special = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, special)
    tokenizer.enable_truncation(8)  # as the files of many models: no length of a text is to depend on it
    return tokenizer


def tiny_encoder(directory: Path, family: str = "bert", num_labels: int = 0, **fields) -> Path:
    """An encoder of `family` (bert, roberta, xlm-roberta). num_labels: of a classifier; 0: there is none."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.3}
    more |= {"bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(family, **sizes | more | ({"num_labels": num_labels} if num_labels else {}) | fields)
    kind = AutoModelForSequenceClassification if num_labels else AutoModel
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind.from_config(config)
        with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide a mistake in them
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.normal_(1.0 if name.endswith("LayerNorm.weight") else 0.0, 0.3)
    model.save_pretrained(directory)
    encoder_tokenizer(family).save(str(directory / "tokenizer.json"))
    return directory


def write_modules(directory: Path, mode: str = "pooling_mode_mean_tokens", normalize: bool = True, **files) -> Path:
    """Write sentence-transformers' files. files: name without .json -> contents."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, mode: True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, contents in files.items():
        (directory / f"{name}.json").write_text(json.dumps(contents))
    return directory
