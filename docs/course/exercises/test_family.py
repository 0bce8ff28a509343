import json

import pytest
import torch
from helpers import Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model

from nanopage import models
from nanopage.weights import loader


@pytest.fixture
def family(exercise, monkeypatch):
    """nanopage knows the family, as one of an installed package."""
    monkeypatch.setattr(models, "other_families", lambda: [exercise])
    return exercise


def saved(directory, without=(), **fields):
    """A small random model, saved without some fields of config.json."""
    hf_model = tiny_hf_model("seed_oss", torch.float32, head_dim=fields.pop("head_dim", 16), **fields)
    hf_model.save_pretrained(directory)
    file = directory / "config.json"
    config = {name: value for name, value in json.loads(file.read_text()).items() if name not in without}
    file.write_text(json.dumps(config))
    return hf_model


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": False},
        {"mlp_bias": True},
        {"head_dim": 32},
        {"num_attention_heads": 8, "num_key_value_heads": 8, "without": ["num_key_value_heads"]},
        {"head_dim": 128, "without": ["head_dim", "attention_bias", "attention_out_bias"]},
    ],
    ids=str,
)
def test_logits_are_those_of_transformers(family, tmp_path, fields):
    hf_model = saved(tmp_path, **fields)
    sequences = random_tokens([13, 1, 9])
    paged = Paged(tmp_path, sequences)
    for _ in range(3):  # in chunks of at most 5 tokens
        left = {index: min(5, len(tokens) - paged.done(index)) for index, tokens in enumerate(sequences)}
        if step := {index: count for index, count in left.items() if count}:
            paged.step(step)
    assert_all_close(paged.logits, reference_logits(hf_model, sequences))


def test_what_is_not_supported_is_refused_by_name(family, tmp_path):
    saved(tmp_path, attention_out_bias=True)
    with pytest.raises(ValueError, match="attention_out_bias"):
        loader.read_config(tmp_path)
