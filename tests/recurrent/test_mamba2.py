"""What Mamba-2 and Granite 4 read of config.json and of checkpoints, beyond tests/models/test_models.py."""

import json

import pytest
import torch
from helpers import Paged, assert_all_close, random_tokens, reference_logits, tiny_hf_model
from safetensors.torch import load_file, save_file

from nanopage.checks.fields import MAX_SIZES
from nanopage.config.model import num_numbers
from nanopage.config.rope import UNROTATED
from nanopage.families import granite_hybrid, mamba2
from nanopage.reading.config import config_from_dict
from nanopage.recurrent.mamba2 import Mamba2Config
from nanopage.state.layer_kinds import STATE

MAMBA2 = {  # as transformers 4 wrote it
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 128,
    "n_groups": 1,
    "norm_before_gate": True,  # in Codestral Mamba, and without effect
    "rms_norm": True,
    "time_step_limit": [0.0, float("inf")],
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_local_experts": 0,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "max_position_embeddings": 1024,
    "layer_types": ["mamba", "attention"],
}


def test_the_fields_of_mamba2():
    config = config_from_dict(MAMBA2)
    assert config.state == ((128 + 2 * 128, 3), (8, 16, 128))
    assert config.sliding_windows == (STATE, STATE)
    assert config.rope == UNROTATED
    assert config.max_position_embeddings == 2**18
    assert Mamba2Config(**json.loads(json.dumps(config.mixer))).time_step_limit == [0, None]
    in_block = 2 * config.num_kv_heads * config.head_dim * mamba2.BLOCK
    assert (size := num_numbers(config.state)) <= in_block < size * 1.1
    assert config_from_dict(MAMBA2 | {"max_position_embeddings": 512}).max_position_embeddings == 512
    for limit in (None, [0, {"__float__": "Infinity"}]):
        assert config_from_dict(MAMBA2 | {"time_step_limit": limit}) == config


def test_the_fields_of_granite_4():
    config = config_from_dict(GRANITE)
    assert config.sliding_windows == (STATE, None)
    assert config_from_dict(GRANITE | {"mamba_d_head": "auto"}) == config
    assert config_from_dict(GRANITE | {"layer_types": ["linear_attention", "full_attention"]}) == config
    other = {"layer_types": None, "layers_block_type": ["mamba", "attention"]}
    assert config_from_dict(GRANITE | other) == config
    assert config_from_dict(GRANITE | {"layer_types": None}).sliding_windows == (STATE, STATE)
    assert config.rope == UNROTATED
    assert config_from_dict(GRANITE | {"position_embedding_type": "rope"}).rope.theta == 10000
    assert config_from_dict(GRANITE | {"num_local_experts": None}).experts.num_experts == 8


WRONG = [
    (MAMBA2, {"num_heads": 4}, "num_heads 4 of 16 dimensions are not expand [*] hidden_size = 128"),
    (MAMBA2, {"expand": 3}, "num_heads 8 of 16 dimensions"),
    (MAMBA2, {"n_groups": 3}, "n_groups 3 does not divide num_heads=8"),
    (MAMBA2, {"hidden_act": "tanh"}, "hidden_act 'tanh' is not supported"),
    (MAMBA2, {"use_bias": 1}, "use_bias must be true or false"),
    (MAMBA2, {"residual_in_fp32": "yes"}, "residual_in_fp32 must be true or false"),
    *(
        (MAMBA2, {"time_step_limit": value}, "time_step_limit must be two numbers")
        for value in (
            0.1,
            [0.1],
            [1, 0],
            [-1, 1],
            [True, 2],
            [float("inf")] * 2,
            ["0", 1],
            [0, None],
            [0, float("nan")],
            {},
        )
    ),
    (GRANITE, {"mamba_n_heads": 7}, "mamba_n_heads 7 of 18 dimensions are not mamba_expand [*] hidden_size = 128"),
    (GRANITE, {"mamba_n_groups": 5}, "mamba_n_groups 5 does not divide"),
    (GRANITE, {"layer_types": ["mamba"]}, "layer_types .* of 2 layers is not supported; transformers' own generate"),
    (GRANITE, {"layer_types": ["mamba", ["x"]]}, "layer_types .* is not supported"),
    (GRANITE, {"layers_block_type": "mamba", "layer_types": None}, "layers_block_type 'mamba' of 2 layers is not"),
    (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
    (GRANITE, {"num_local_experts": -1}, "num_local_experts must be a positive integer"),
    (GRANITE, {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok must be at most"),
    (GRANITE, {"num_local_experts": 2, "hidden_act": "gelu"}, "hidden_act 'gelu' with experts is not supported"),
    *(
        (config, {name: MAX_SIZES[name] + 1}, f"{name} must be at most {MAX_SIZES[name]:,}")
        for config, family in ((MAMBA2, mamba2), (GRANITE, granite_hybrid))
        for name, _ in family.SIZES.values()
    ),
    (GRANITE, {"shared_intermediate_size": 2**20 + 1}, "shared_intermediate_size must be at most"),
]


@pytest.mark.parametrize(("config", "wrong", "problem"), WRONG, ids=lambda value: str(value)[:60])
def test_a_field_that_is_wrong_is_refused_by_name(config, wrong, problem):
    with pytest.raises(ValueError, match=rf"^config\.json: {problem}"):
        config_from_dict(config | wrong)


# family, overrides; the names of tensors in files: a part and what others write in its place
OTHER_NAMES = [
    ("mamba2", {}, {"backbone.embeddings.": "backbone.embedding.", "backbone.": "model.backbone."}),
    (
        "granitemoehybrid",
        {"num_local_experts": 4},
        {
            "input_linear.weight": "experts.gate_up_proj",
            "output_linear.weight": "experts.down_proj",
            "router.layer.": "router.",
        },
    ),
]


@pytest.mark.parametrize(("family", "overrides", "others"), OTHER_NAMES, ids=["Mistral", "transformers 5"])
def test_tensors_may_have_other_names(tmp_path, family, overrides, others):
    hf_model, sequences = tiny_hf_model(family, **overrides), random_tokens([9, 70])
    hf_model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    names = {name: name for name in tensors}
    for usual, other in others.items():
        renamed = {name: new.replace(usual, other) if "shared" not in name else new for name, new in names.items()}
        assert renamed != names
        names = renamed
    save_file({names[name]: tensor for name, tensor in tensors.items()}, file)
    paged = Paged(tmp_path, sequences)
    paged.step({0: 9, 1: 70})
    assert_all_close(paged.logits, reference_logits(hf_model, sequences))


@pytest.mark.parametrize("in_float32", [True, False])
def test_hidden_states_between_layers_are_in_float32_if_the_config_says_so(tmp_path, in_float32):
    tiny_hf_model("mamba2", torch.bfloat16, residual_in_fp32=in_float32, num_hidden_layers=3).save_pretrained(tmp_path)
    paged, dtypes = Paged(tmp_path, random_tokens([9]), torch.bfloat16), []
    for layer in paged.model.layers:
        layer.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    paged.step({0: 9})
    between = torch.float32 if in_float32 else torch.bfloat16
    assert dtypes == [between, between, torch.bfloat16]
