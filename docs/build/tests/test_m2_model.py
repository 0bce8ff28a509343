import json

import pytest
import torch
from built.attention import attend, attend_one
from built.model import Model, rotate


@pytest.mark.parametrize("n", [1, 3, 7])
def test_each_of_the_last_tokens_sees_itself_and_those_before_it(n):
    q, keys, values = torch.randn(n, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    ends = range(7 - n + 1, 8)
    expected = torch.stack([attend_one(each, keys[:end], values[:end]) for each, end in zip(q, ends, strict=True)])
    torch.testing.assert_close(attend(q, keys, values), expected)


def test_norm_divides_by_the_root_of_the_mean_square(model):
    model.weights["n.weight"], model.norm_eps = torch.tensor([1.0, 2.0]), 2.0
    got = model.norm("n", torch.tensor([[3.0, 5.0**0.5]]))  # (9 + 5) / 2 + norm_eps is 9
    torch.testing.assert_close(got, torch.tensor([[1.0, 2 * 5.0**0.5 / 3]]), msg="norm is wrong: norm_eps, weight")


def test_rotate_turns_dimension_i_with_dimension_i_plus_half():
    x, quarter = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]), torch.tensor([[[0.0, 1.0]]])  # turns only the first pair
    assert rotate(x, cos=quarter, sin=1 - quarter).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_hidden_states_depend_on_differences_of_positions(dtype, tmp_path, prompts):
    from helpers import tiny_model

    model, (tokens,) = Model(tiny_model(tmp_path, dtype=dtype)), prompts([20])
    first, later = (
        model.forward(torch.tensor(tokens), start + torch.arange(20), lambda layer, q, k, v: attend(q, k, v)).double()
        for start in (0, 901)
    )
    error = (first - later).abs().mean() / first.std()
    assert error < 0.1, "are the angles at least float32, whatever the type of the weights is?"


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied, tmp_path, prompts):
    """With a large norm_eps, heads that are not hidden_size / num_heads, and weights in several files."""
    from helpers import assert_all_close, reference_logits, tiny_hf_model

    fields = {"tie_word_embeddings": tied, "num_hidden_layers": 3, "rope_theta": 500.0, "rms_norm_eps": 0.1}
    hf_model = tiny_hf_model(dtype=torch.float64, head_dim=32, **fields)
    hf_model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    model, sequences = Model(tmp_path), prompts([1, 20])
    logits = []
    for tokens in sequences:
        positions = torch.arange(len(tokens))
        hidden = model.forward(torch.tensor(tokens), positions, lambda layer, q, k, v: attend(q, k, v))
        logits.append(model.logits(hidden))
    assert_all_close(logits, reference_logits(hf_model, sequences))


def copy_of(model_dir, directory, **fields):
    """A copy of a checkpoint with other fields in config.json; None takes a field out."""
    config = json.loads((model_dir / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").symlink_to(model_dir / "model.safetensors")
    return directory


def test_an_older_file_gives_the_same_model(tmp_path, prompts):
    from helpers import tiny_model

    model_dir = tiny_model(tmp_path / "new", dtype="float64", num_key_value_heads=4, rope_theta=500.0)
    fields = {"rope_parameters": None, "rope_theta": 500.0, "num_key_value_heads": None, "head_dim": None}
    (tmp_path / "old").mkdir()
    new, old = Model(model_dir), Model(copy_of(model_dir, tmp_path / "old", **fields, eos_token_id=[2, 5]))
    assert (old.num_kv_heads, old.head_dim, old.end_ids) == (new.num_kv_heads, new.head_dim, (2, 5))
    ids = torch.tensor(prompts([9])[0])
    first, second = (each.forward(ids, torch.arange(9), lambda layer, q, k, v: attend(q, k, v)) for each in (new, old))
    torch.testing.assert_close(first, second, msg="an older file has rope_theta at the top")


@pytest.mark.parametrize(
    "fields",
    [
        {"architectures": ["Qwen3ForCausalLM"]},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0}},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=lambda fields: " ".join(key for key, value in fields.items() if value) + f" {[*fields.values()][-1]}"[:40],
)
def test_another_model_is_refused(fields, model_dir, tmp_path):
    with pytest.raises(ValueError, match=tmp_path.name):
        Model(copy_of(model_dir, tmp_path, **fields))
