"""LoRA adapters of models with experts, in every form in which PEFT writes them: the answers of PEFT."""

import json
import shutil

import pytest
import torch
from helpers import random_tokens, tiny_model
from safetensors.torch import load_file, save_file
from test_lora import GREEDY, LORA, OPTIONS, change, check_against, retensor, save_adapter, with_peft
from transformers import AutoModelForCausalLM

from nanopage import LLM, LoRARequest

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FIRST = "base_model.model.model.layers.0."


def of_experts(family):
    """The projections of experts, as transformers 4 calls them."""
    return ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")


def save_fused(directory, model, targets, parameters, rank=4, alpha=8, seed=0, **options):
    """A random adapter that PEFT makes and saves. Returns the directory."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, target_parameters=parameters, **options)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
    adapted.save_pretrained(directory)
    return directory


def merged(model, adapter, directory):
    """transformers' model whose weights have those of an adapter with numbered experts."""
    weights, added = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    fields = json.loads((adapter / "adapter_config.json").read_text())
    for name, a in added.items():
        if "lora_A" in name:
            place = name.removeprefix("base_model.model.").replace("lora_A.", "")
            weights[place] += fields["lora_alpha"] / fields["r"] * added[name.replace("lora_A", "lora_B")] @ a
    shutil.copytree(model, directory)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_and_none_in_one_batch_as_in_peft(family, tmp_path):
    model = tiny_model(tmp_path / "model", family)
    experts = of_experts(family)
    kinds = {
        "attention": save_adapter(tmp_path / "attention", model, ATTENTION, rank=4),
        "fused": save_fused(tmp_path / "fused", model, [], list(BOTH), rank=2, seed=1),
        "gate-up": save_fused(tmp_path / "gate-up", model, ["q_proj"], ["experts.gate_up_proj"], rank=3, seed=2),
        "down": save_fused(tmp_path / "down", model, None, ["down_proj"], rank=8, alpha=4, seed=3, use_rslora=True),
    }
    if family == "qwen2_moe":  # its targets are those of the shared expert
        kinds["shared"] = save_fused(tmp_path / "shared", model, list(experts), None, rank=4, seed=4)
    else:  # PEFT makes target_parameters, a rank_pattern and an alpha_pattern of these
        kinds["separate-targets"] = save_fused(tmp_path / "separate", model, ["v_proj", *experts], None, rank=4, seed=4)
        kinds["numbered"] = save_adapter(tmp_path / "numbered", model, ("q_proj", *experts), rank=4, seed=5)
        change(kinds["numbered"], lora_dropout=0.0)  # which PEFT wants where it fuses
    requests = [LoRARequest(name, i + 1, str(path)) for i, (name, path) in enumerate(kinds.items())]
    requests += [None, requests[0]]
    llm = LLM(str(model), **OPTIONS, enable_lora=True, max_loras=6, max_lora_rank=8)
    outputs = llm.generate([random_tokens([9])[0]] * len(requests), GREEDY, lora_request=requests, use_tqdm=False)
    for request, output in zip(requests, outputs, strict=True):
        check_against(with_peft(model, request), output)
    assert len({str(output.outputs[0].logprobs[0]) for output in outputs}) > len(kinds)


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    """A Qwen2-MoE whose first layer has a plain feed-forward layer."""
    return tiny_model(tmp_path_factory.mktemp("qwen2"), "qwen2_moe", mlp_only_layers=[0])


@pytest.fixture(scope="module")
def llm(qwen2):
    return LLM(str(qwen2), **OPTIONS, **LORA)


def run(llm, name, path):
    request = LoRARequest(name, abs(hash(str(path))), str(path))
    return llm.generate([random_tokens([9])[0]], GREEDY, lora_request=request, use_tqdm=False)[0]


def test_numbered_experts_shared_ones_and_plain_layers(llm, qwen2, tmp_path):
    """PEFT with transformers 5 cannot load these of Qwen2-MoE."""
    adapter = save_adapter(tmp_path / "adapter", qwen2, (*ATTENTION, *of_experts("qwen2_moe")), rank=4)
    names = load_file(adapter / "adapter_model.safetensors")
    for part in ("0.mlp.gate_proj", "1.mlp.shared_expert.up_proj", "1.mlp.experts.5.down_proj"):
        assert f"base_model.model.model.layers.{part}.lora_A.weight" in names
    check_against(merged(qwen2, adapter, tmp_path / "merged"), run(llm, "numbered", adapter))


def test_transposed_tensors_of_peft_before_0_19(llm, qwen2, tmp_path):
    adapter = save_fused(tmp_path / "adapter", qwen2, ["q_proj"], list(BOTH), rank=4)
    expected = run(llm, "now", shutil.copytree(adapter, tmp_path / "now"))

    def transpose(tensors):
        for name in [name for name in tensors if "experts" in name and "lora_A" in name]:
            a, b = tensors[name].unflatten(0, (6, 4)), tensors[name.replace("lora_A", "lora_B")].unflatten(1, (4, 6))
            tensors[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
            tensors[name.replace("lora_A", "lora_B")] = a.permute(2, 1, 0).flatten(1).contiguous()

    retensor(adapter, transpose)
    output = run(llm, "before", adapter)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert str(output.outputs[0].logprobs) == str(expected.outputs[0].logprobs)


def test_beside_quantized_experts(qwen2, tmp_path):
    """Products of adapters are added to those of integers: with an adapter of zeros, nothing changes."""
    llm = LLM(str(qwen2), **OPTIONS, **LORA, quantization="int8")
    experts = llm.engine.executor.worker.model.layers[1].mlp.experts
    assert type(experts[0].down_proj.weight.weight).__name__ == "TiledWeight"
    adapter = save_fused(tmp_path / "adapter", qwen2, [], list(BOTH))
    zeros = shutil.copytree(adapter, tmp_path / "zeros")
    retensor(zeros, lambda tensors: [tensor.zero_() for tensor in tensors.values()])
    base = llm.generate([random_tokens([9])[0]], GREEDY, use_tqdm=False)[0]
    some, none = run(llm, "some", adapter), run(llm, "none", zeros)
    assert str(none.outputs[0].logprobs) == str(base.outputs[0].logprobs) != str(some.outputs[0].logprobs)


def test_steps_say_that_they_run_eagerly(qwen2, monkeypatch, caplog):
    monkeypatch.setattr("nanopage.weights.storage.can_pack", lambda dtype: True)
    with caplog.at_level("INFO", logger="nanopage"):
        LLM(str(qwen2), **OPTIONS | {"enforce_eager": False}, **LORA)
    assert "steps run eagerly: the experts of this model with adapters are not compiled" in caplog.messages


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": ["gate"]}, "target_modules: 'gate' is not supported; supported: q_proj, k_proj"),
        ({"target_modules": ["shared_expert_gate"]}, "'shared_expert_gate' is not supported"),
        ({"target_modules": ["experts.0.down_proj"]}, "'experts.0.down_proj' is not supported"),
        (
            {"target_parameters": ["gate.weight"]},
            "target_parameters: 'gate.weight' is not supported; supported: gate_up_proj, down_proj",
        ),
        ({"target_parameters": "experts.down_proj"}, "target_parameters must be a list of names"),
        ({"target_parameters": [*BOTH, 3]}, "target_parameters must be a list of names"),
        ({"target_parameters": [BOTH[0]]}, r"unexpected: .*experts.base_layer.*\n.*mis-shaped: .*experts.lora_A"),
        ({"target_parameters": [BOTH[1]]}, "not one of target_parameters: .*experts.base_layer"),
        ({"target_parameters": None}, "unexpected: .*experts.lora_A"),
        ({"rank_pattern": {r".*\.gate_up_proj": 16}}, "gate_up_proj: r=16 is more than max_lora_rank=8"),
        ({"rank_pattern": {r".*\.gate_up_proj": 2}}, r"mis-shaped: .*base_layer.lora_A.* the model wants \[12, 64\]"),
        ({"rank_pattern": {"down_proj": 2}}, "rank_pattern=.*down_proj.* is not supported"),
        ({"alpha_pattern": {r".*\.gate_up_proj": "x"}}, "gate_up_proj: lora_alpha must be a number"),
    ],
)
def test_a_configuration_that_is_not_supported(llm, qwen2, tmp_path, fields, message):
    adapter = save_fused(tmp_path / "adapter", qwen2, ["q_proj"], list(BOTH))
    change(adapter, **fields)
    with pytest.raises(ValueError, match=f"(?s){message}"):
        run(llm, "bad", adapter)


def test_tensors_that_do_not_fit(llm, qwen2, tmp_path):
    a, b = (FIRST.replace("0", "1") + f"mlp.experts.lora_{kind}.weight" for kind in "AB")

    def refused(index, function, message, targets=("q_proj",), parameters=BOTH):
        adapter = tmp_path / str(index)
        if parameters:
            save_fused(adapter, qwen2, list(targets), list(parameters))
        else:
            save_adapter(adapter, qwen2, targets)
        retensor(adapter, function)
        with pytest.raises(ValueError, match=f"(?s)does not fit.*{message}"):
            run(llm, "bad", adapter)

    refused(0, lambda tensors: tensors.pop(b), "missing: lora_B of layers.1.mlp.experts.down_proj")
    refused(1, lambda tensors: tensors.update({a: torch.zeros(24, 41)}), r"mis-shaped: .*wants \[24, 40\]")
    refused(2, lambda tensors: tensors.update({a: torch.zeros(24, 64)}), r"mis-shaped: .*lora_B.*wants \[40, 24\]")
    one = a.replace("experts.", "experts.3.down_proj.")
    refused(3, lambda tensors: tensors.update({one: torch.zeros(4, 40)}), "unexpected: .*experts.3.down_proj")
    named = a.replace("experts.", "experts.down_proj.")
    refused(4, lambda tensors: tensors.update({named: torch.zeros(24, 40)}), "unexpected: .*experts.down_proj")
    refused(
        5, lambda tensors: tensors.pop(one), "missing: lora_A of layers.1.mlp.experts.3.down_proj", ("down_proj",), None
    )


def test_shapes_that_do_not_tell_whether_they_are_transposed(tmp_path):
    model = tiny_model(tmp_path / "model", "qwen3_moe", moe_intermediate_size=32)
    adapter = save_fused(tmp_path / "adapter", model, ["q_proj"], list(BOTH))
    change(adapter, peft_version="0.18.1")
    llm = LLM(str(model), **OPTIONS, **LORA)
    with pytest.raises(ValueError, match=r"peft_version='0.18.1': before 0.19, PEFT transposed experts"):
        run(llm, "before", adapter)


def test_experts_that_a_configuration_names_must_be_there(tmp_path):
    """Only a shared expert or a plain layer can be what the names mean."""
    model = tiny_model(tmp_path / "model", "mixtral")
    adapter = save_adapter(tmp_path / "adapter", model, ("q_proj",))
    change(adapter, target_modules=["q_proj", "w1"])
    with pytest.raises(ValueError, match=r"missing: lora_A of layers.0.block_sparse_moe.experts.0.w1"):
        run(LLM(str(model), **OPTIONS, **LORA), "bad", adapter)
