import json

import pytest
import torch
from built.attention import attend, attend_one
from built.model import Model


@pytest.mark.parametrize("n", [1, 3, 7])
def test_each_of_the_last_tokens_sees_itself_and_those_before_it(n):
    q, keys, values = torch.randn(n, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    ends = range(7 - n + 1, 8)
    expected = torch.stack([attend_one(each, keys[:end], values[:end]) for each, end in zip(q, ends, strict=True)])
    torch.testing.assert_close(attend(q, keys, values), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(tied, tmp_path, prompts):
    from helpers import assert_all_close, reference_logits, tiny_hf_model

    fields = {"tie_word_embeddings": tied, "num_hidden_layers": 3, "rope_theta": 500.0}
    hf_model = tiny_hf_model(dtype=torch.float64, **fields)
    hf_model.save_pretrained(tmp_path)
    model, sequences = Model(tmp_path), prompts([1, 20])
    logits = []
    for tokens in sequences:
        positions = torch.arange(len(tokens))
        hidden = model.forward(torch.tensor(tokens), positions, lambda layer, q, k, v: attend(q, k, v))
        logits.append(model.logits(hidden))
    assert_all_close(logits, reference_logits(hf_model, sequences))


@pytest.mark.parametrize(
    "field", [{"architectures": ["Qwen3ForCausalLM"]}, {"rope_parameters": {"rope_type": "llama3"}}], ids=str
)
def test_another_model_is_refused(field, model_dir, tmp_path):
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(ValueError, match=tmp_path.name):
        Model(tmp_path)
