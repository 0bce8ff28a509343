"""Prefix tuning: K and V of tokens, given as a prefix, act as these tokens. test_soft_prompts.py compares with PEFT."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from helpers import BytesExecutor, random_tokens, run_together, tiny_hf_model, tiny_model
from safetensors.torch import save_file
from transformers import DynamicCache

from nanopage import BeamSearchParams, EngineConfig, PromptAdapterRequest, SamplingParams
from nanopage.build import build_engine
from nanopage.config.model import LatentConfig
from nanopage.items.prefixes import prefix_width

GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=5, ignore_eos=True)
run = partial(run_together, params=GREEDY)
LENGTH = 18  # of a prefix: longer than the windows of 7 tokens, and no multiple of the 4 tokens of a block


def make_engine(path, **options):
    sizes = {"max_model_len": 100, "block_size": 4, "num_gpu_blocks_override": 100}
    fixed = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "enable_prompt_adapter": True}
    return build_engine(EngineConfig(model=str(path), **fixed | sizes | options))


def save_prefix(directory, hf_model, tokens):
    """Save the K and V of tokens as PEFT saves a prefix. Returns the request for it."""
    cache = DynamicCache()
    with torch.inference_mode():
        hf_model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    layers = [torch.cat([layer.keys, layer.values]) for layer in cache.layers]  # each [2, heads, tokens, head_dim]
    rows = torch.stack(layers).permute(3, 0, 1, 2, 4).flatten(1)
    directory.mkdir(exist_ok=True)
    save_file({"prompt_embeddings": rows.contiguous()}, directory / "adapter_model.safetensors")
    fields = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": len(tokens)}
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    return PromptAdapterRequest("prefix", 1, str(directory), len(tokens))


def tokens_of(output):
    return [completion.token_ids for completion in output.outputs]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3_text", "granite"])
def test_k_and_v_of_tokens_act_as_the_tokens(family, tmp_path):
    """In chunks, beside text, from the prefix cache, in blocks of several kinds of layers."""
    hf_model = tiny_hf_model(family)
    engine = make_engine(tiny_model(tmp_path / "model", family), max_num_batched_tokens=7)
    engine.executor = BytesExecutor(engine.executor)
    before, prompt = random_tokens([LENGTH, 3])
    request = save_prefix(tmp_path / "prefix", hf_model, before)
    tuned = {"prompt_token_ids": prompt, "prompt_adapter_request": request}
    (expected,) = run(engine, before + prompt)
    first, other = run(engine, tuned, prompt)
    (again,) = run(engine, tuned)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)
    assert first.prompt_token_ids == [0] * LENGTH + prompt
    assert tokens_of(other) == tokens_of(run(engine, prompt)[0])
    assert other.outputs[0].logprobs[0] != expected.outputs[0].logprobs[0]
    for made in (first, again):
        assert tokens_of(made) == tokens_of(expected)
        for ours, theirs in zip(made.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True):
            for token, logprob in theirs.items():
                assert ours[token].logprob == pytest.approx(logprob.logprob, abs=1e-4)


def test_blocks_that_no_window_reaches_are_not_taken_for_a_prefix(tmp_path):
    sizes = {"sliding_window": 5, "num_hidden_layers": 2}
    path, before = tiny_model(tmp_path / "model", "mistral", **sizes), random_tokens([40])[0]
    request = save_prefix(tmp_path / "prefix", tiny_hf_model("mistral", **sizes), before)
    tuned = {"prompt_token_ids": before[:4], "prompt_adapter_request": request}
    small = make_engine(path, max_num_batched_tokens=8, max_num_seqs=1, max_model_len=64, num_gpu_blocks_override=6)
    assert tokens_of(run(small, tuned)[0]) == tokens_of(run(make_engine(path), before + before[:4])[0])
    assert small.scheduler.queues.num_preemptions == 0


@pytest.fixture(scope="module")
def exact(model, tmp_path_factory):
    """A prefix in float64, its tokens, and three prompts."""
    before, *prompts = random_tokens([LENGTH, 1, 9, 14], seed=3)
    return save_prefix(tmp_path_factory.mktemp("exact"), tiny_hf_model().double(), before), before, prompts


@pytest.mark.parametrize("budget", [1, 64])
def test_completions_fork_behind_a_prefix(exact, model, budget):
    request, before, prompts = exact
    engine = make_engine(model, dtype="float64", max_num_batched_tokens=budget)
    tuned = [{"prompt_token_ids": prompt, "prompt_adapter_request": request} for prompt in prompts]
    sampled = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=5)
    for params in (GREEDY, sampled, BeamSearchParams(width=3, max_tokens=4)):
        expected = run(engine, *(before + prompt for prompt in prompts), params=params)
        assert [*map(tokens_of, run(engine, *tuned, params=params))] == [*map(tokens_of, expected)]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
def test_a_prefix_survives_preemption(exact, model, mode, caching):
    request, before, prompts = exact
    params = replace(GREEDY, max_tokens=16)
    expected = run(make_engine(model, dtype="float64"), *(before + prompt for prompt in prompts), params=params)
    sizes = {
        "max_model_len": 64,
        "num_gpu_blocks_override": 20,
        "enable_prefix_caching": caching,
        "preemption_mode": mode,
    }
    engine = make_engine(model, dtype="float64", **sizes)
    tuned = [{"prompt_token_ids": prompt, "prompt_adapter_request": request} for prompt in prompts]
    assert [*map(tokens_of, run(engine, *tuned, params=params))] == [*map(tokens_of, expected)]
    assert engine.scheduler.queues.num_preemptions > 0


def test_what_prefixes_do_not_work_with(exact, model):
    request, _, prompts = exact
    engine = make_engine(model)
    tuned = {"prompt_token_ids": prompts[0], "prompt_adapter_request": request}
    with pytest.raises(ValueError, match="prompt_logprobs does not work with embeddings"):
        engine.add_request("a", tuned, SamplingParams(prompt_logprobs=1))
    config = engine.model_config
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"distributed_executor_backend": "mp"}):
        with pytest.raises(ValueError, match=f"does not work with {next(iter(sizes))}="):
            prefix_width(EngineConfig(**sizes), config)
    changes = ({"state": ((1,),)}, {"latent": LatentConfig(8, 4, None, 8, 8, True)}, {"kv_sources": (0, 0)})
    with pytest.raises(ValueError, match="GLM-4"):
        prefix_width(EngineConfig(), replace(config, architecture="Glm4ForCausalLM"))
    for change in (*changes, {"full_heads": (1, 8), "sliding_windows": (None, 7)}):
        with pytest.raises(ValueError, match="layers have K and V of their own, of equal size"):
            prefix_width(EngineConfig(), replace(config, **change))
