"""Soft prompts, beside PEFT."""

import json

import peft
import pytest
import torch
from helpers import random_tokens, tiny_hf_model
from safetensors.torch import load_file, save_file

from nanopage import LLM, PromptAdapterRequest, SamplingParams
from nanopage.items import soft_prompts

PARAMS = SamplingParams(temperature=0, max_tokens=4, logprobs=5, ignore_eos=True)
CONFIGS = {
    "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "mlp": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=7, encoder_hidden_size=16),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5),
    "projected": peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=6, prefix_projection=True, encoder_hidden_size=16
    ),
    "lstm": peft.PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=6, encoder_hidden_size=16, encoder_reparameterization_type="LSTM"
    ),
}


def train(config, directory):
    """Some steps on random tokens. Returns PEFT's model, and saves what it has learned."""
    torch.manual_seed(0)
    model = peft.get_peft_model(tiny_hf_model(), config)
    optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=0.05)
    batch = torch.tensor(random_tokens([12, 12]))
    before = model.get_prompt_embedding_to_save("default").clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    assert (model.get_prompt_embedding_to_save("default") - before).abs().max() > 0.05
    model.save_pretrained(directory)
    return model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Soft prompts by name: (PEFT's model, the request)."""
    made = {}
    for number, (name, config) in enumerate(CONFIGS.items(), 1):
        directory = tmp_path_factory.mktemp(name)
        peft_model = train(config, directory)
        made[name] = peft_model, PromptAdapterRequest(name, number, directory, config.num_virtual_tokens)
    return made


@pytest.fixture(scope="module")
def llm(model):
    options = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "max_model_len": 128, "block_size": 4}
    return LLM(str(model), **options, enable_prompt_adapter=True, max_num_batched_tokens=16)


def test_soft_prompts_are_those_of_peft(trained, llm, monkeypatch):
    """Several in one batch, beside a prompt without any; from the prefix cache; read from their files again."""
    monkeypatch.setattr(soft_prompts, "MOST_KEPT", 2)
    prompts = random_tokens([9, 14], seed=1)
    cases = [(prompt, name) for name in (*trained, None) for prompt in prompts]
    requests = [None if name is None else trained[name][1] for _, name in cases]
    plain = tiny_hf_model()
    for cached in (False, True):
        outputs = llm.generate([prompt for prompt, _ in cases], PARAMS, prompt_adapter_request=requests, use_tqdm=False)
        for (prompt, name), request, output in zip(cases, requests, outputs, strict=True):
            virtual = 0 if request is None else request.prompt_adapter_num_virtual_tokens
            assert output.prompt_token_ids == [0] * virtual + prompt
            assert output.num_cached_tokens >= (8 if cached else 0)
            tokens = list(prompt)
            for token, table in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True):
                with torch.inference_mode():
                    reference = plain if name is None else trained[name][0]
                    expected = reference(input_ids=torch.tensor([tokens])).logits[0, -1].log_softmax(0)
                assert token == expected.argmax()
                for candidate, logprob in table.items():
                    assert logprob.logprob == pytest.approx(expected[candidate].item(), abs=1e-4)
                tokens.append(token)
    assert len(llm.engine.input_processor.prompts.item_readers["prompt_adapter_request"].__self__._kept) == 2


def test_chats_and_streams_have_soft_prompts(trained, llm):
    request = trained["mlp"][1]
    messages = [{"role": "user", "content": "the cat"}]
    (chat,) = llm.chat(messages, PARAMS, use_tqdm=False, prompt_adapter_request=request)
    *_, streamed = llm.stream(messages, PARAMS, prompt_adapter_request=request)
    (generated,) = llm.generate({"prompt": chat.prompt, "prompt_adapter_request": request}, PARAMS, use_tqdm=False)
    assert chat.prompt_token_ids[:8] == [0] * 7 + [1]  # <|im_start|>
    assert chat.outputs[0].token_ids == streamed.outputs[0].token_ids == generated.outputs[0].token_ids
    assert llm.chat(messages, PARAMS, use_tqdm=False)[0].outputs[0].token_ids != chat.outputs[0].token_ids


def test_what_is_wrong_with_a_soft_prompt_is_named(trained, llm, model, tmp_path):
    good = trained["prompt"][1]
    directory = tmp_path / "adapter"
    directory.mkdir()
    config = json.loads((tmp_path.joinpath(good.prompt_adapter_local_path) / "adapter_config.json").read_text())
    tensors = load_file(f"{good.prompt_adapter_local_path}/adapter_model.safetensors")

    def refuses(error, fields=None, *, stored=tensors, count=5):
        (directory / "adapter_config.json").write_text(json.dumps(config | (fields or {})))
        save_file(stored, directory / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=error):
            llm.generate("a", PARAMS, prompt_adapter_request=PromptAdapterRequest("x", 9, directory, count))

    refuses(r"shape \[5, 128\] in floats was expected", {"peft_type": "PREFIX_TUNING"})
    refuses("peft_type='CARTRIDGE' is not supported; supported: 'PROMPT_TUNING' or", {"peft_type": "CARTRIDGE"})
    refuses("peft_type='LORA' is not supported", {"peft_type": "LORA"})
    refuses("task_type='SEQ_2_SEQ_LM' is not supported", {"task_type": "SEQ_2_SEQ_LM"})
    refuses("num_transformer_submodules=2", {"num_transformer_submodules": 2})
    refuses("modules_to_save", {"modules_to_save": ["lm_head"]})
    refuses("surprise=1 is not supported", {"surprise": 1})
    refuses("num_virtual_tokens must be an integer from 1, not '5'", {"num_virtual_tokens": "5"})
    refuses("num_virtual_tokens=4, but it has 5", count=4)
    refuses(r"shape \[6, 64\] in floats was expected", {"num_virtual_tokens": 6})
    refuses("has no tensors", stored={})
    refuses("'other'", stored={"other": torch.ones(5, 64)})
    refuses("of type I64", stored={"prompt_embeddings": torch.ones(5, 64, dtype=torch.int64)})
    refuses(
        "prompt_embeddings has values that are not finite", stored={"prompt_embeddings": torch.full((5, 64), torch.inf)}
    )
    (directory / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.safetensors"):
        llm.generate("a", PARAMS, prompt_adapter_request=PromptAdapterRequest("x", 9, directory, 5))
    with pytest.raises(ValueError, match=r"prompt adapter 'x': .*no-such-place"):
        llm.generate("a", PARAMS, prompt_adapter_request=PromptAdapterRequest("x", 9, tmp_path / "no-such-place", 5))
    llm.generate("a", PARAMS, prompt_adapter_request=good, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt_adapter_id=1 is already that of .*'prompt'"):
        llm.generate("a", PARAMS, prompt_adapter_request=PromptAdapterRequest("x", 1, directory, 5))
    with pytest.raises(ValueError, match="2 values of prompt_adapter_request for 1 prompts"):
        llm.generate("a", PARAMS, prompt_adapter_request=[good, None])
    with pytest.raises(TypeError, match="must be a PromptAdapterRequest or None, not 'x'"):
        llm.generate("a", PARAMS, prompt_adapter_request="x")
    with pytest.raises(ValueError, match="prompt_logprobs does not work with embeddings"):
        llm.generate("a", SamplingParams(prompt_logprobs=1), prompt_adapter_request=good)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.generate({"prompt_adapter_request": good}, PARAMS)
    for name, value in (("prompt_adapter_id", 0), ("prompt_adapter_name", ""), ("prompt_adapter_local_path", 3)):
        fields = {"prompt_adapter_name": "x", "prompt_adapter_id": 9, "prompt_adapter_local_path": "y"}
        with pytest.raises((ValueError, TypeError), match=name):
            PromptAdapterRequest(**fields | {name: value}, prompt_adapter_num_virtual_tokens=5)
    without = LLM(str(model), dtype="float32", device="cpu", enforce_eager=True, max_model_len=64)
    with pytest.raises(ValueError, match="prompt_adapter_request needs enable_prompt_adapter=True"):
        without.generate("a", PARAMS, prompt_adapter_request=good)
