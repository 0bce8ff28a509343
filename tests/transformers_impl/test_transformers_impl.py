"""Decoders that nanopage has no family for: tiny random models, whose greedy tokens must be those of transformers under
chunked prefill, preemption and prefix hits; and those that are refused, with the reason."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import LONG, VOCAB_SIZE, save_tokenizer, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nanopage import LLM, EngineConfig, SamplingParams
from nanopage.build import build_engine
from nanopage.checks.vllm_options import accept_engine
from nanopage.models import find_family
from nanopage.state.layer_kinds import BlockNeeds, divide_layers
from nanopage.transformers_impl.config import read_config, read_module
from nanopage.transformers_impl.probe import find_window

HEADS = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
# What transformers calls a kind of model -> fields of config.json beside those of `tiny_hf_model`.
MODELS: dict[str, dict] = {
    "gpt2": {"n_positions": 256, "scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": {"n_positions": 256},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8, "n_positions": 256},
    "codegen": {"rotary_dim": 8, "n_positions": 256},
    "opt": {"word_embed_proj_dim": 64, "ffn_dim": 96},
    "biogpt": {},
    "phi": {},
    "persimmon": {},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": 27},
    "nemotron": {},
    "cohere": {"use_qk_norm": True},
    "cohere2": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "exaone4": {"sliding_window": 11, "layer_types": ["sliding_attention", "full_attention"]},
    "helium": HEADS,
    "seed_oss": HEADS,
    "olmo": {"clip_qkv": 2.0},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "gemma": HEADS,
    "apertus": {},
    "ernie4_5": HEADS,
    "arcee": {},
    "hunyuan_v1_dense": HEADS | {"pad_token_id": 0},
    "modernbert-decoder": {"local_attention": 22, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    "vaultgemma": HEADS | {"query_pre_attn_scalar": 32, "sliding_window": 11},
    "nanochat": {},
    "phimoe": {"num_local_experts": 6},
    "granitemoe": {"num_local_experts": 6},
    "flex_olmo": EXPERTS | {"pad_token_id": 0},
}
PROMPTS = [[(7 * i * i + 3 * n + 11) % 290 + 3 for i in range(n)] for n in (3, 5, 6, 35)]
PROMPTS.append([*PROMPTS[3][:24], 77, 5, 81])  # a prefix of it is in the cache by then
NUM_NEW = 12


def greedy(model, prompt):
    model, tokens = model.double(), [*prompt]
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        for _ in range(NUM_NEW):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(path, **options):
    """Chunks of at most 9 tokens, blocks for less than all requests, and a prefix that comes again. Returns: tokens of
    each prompt, and how many requests were preempted and how many tokens were cached."""
    options = {"dtype": "float64", "block_size": 4, "max_num_batched_tokens": 9, "max_model_len": 48} | options
    config = EngineConfig(model=str(path), device="cpu", **options)
    kinds = divide_layers(read_config(config, path).sliding_windows, config.max_model_len)
    num_blocks = BlockNeeds(kinds.windows, config.block_size, 9).of([config.max_model_len])
    engine = build_engine(replace(config, num_gpu_blocks_override=num_blocks + 1))
    assert engine.model_config.model_impl == "transformers"
    seen, tokens = [], {}
    engine.listeners.append(seen.append)
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
    stats = [stats for stats in seen if hasattr(stats, "preempted")]
    counts = sum(each.preempted for each in stats), sum(each.cached_tokens for each in stats)
    return [list(tokens[str(index)]) for index in range(len(PROMPTS))], counts


# Without NANOPAGE_LONG_TESTS=1: each kind of position, window, norm, bias and mixture of experts.
FEW = "gpt2 gpt_neox gptj opt phi persimmon stablelm starcoder2 cohere2 seed_oss olmo olmoe gemma modernbert-decoder "
FEW += "vaultgemma phimoe"


@pytest.mark.parametrize("kind", MODELS if LONG else FEW.split())
def test_tokens_are_those_of_transformers(tmp_path, kind):
    model = tiny_hf_model(kind, **MODELS[kind])
    assert find_family(type(model).__name__) is None
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    tokens, (preempted, cached) = run(tmp_path)
    assert preempted and cached
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert tokens == expected
    if LONG:
        assert run(tmp_path, preemption_mode="swap", max_num_batched_tokens=5)[0] == expected
        drafts = {"method": "ngram", "num_speculative_tokens": 3}
        assert run(tmp_path, speculative_config=drafts, block_size=3)[0] == expected


def test_the_document_counts_what_is_tested():
    text = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text()
    assert f"models of {len(MODELS)} architectures" in text and f" {len(FEW.split())} of them run by default" in text


def config_only(path, kind, architecture, **fields):
    """A directory without weights: what is refused is refused before they are read."""
    config = AutoConfig.for_model(kind, vocab_size=VOCAB_SIZE, pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields)
    values = {"is_decoder": True} | config.to_dict() | {"architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(values, default=str))
    save_tokenizer(path)
    return path


SHORT = {"num_hidden_layers": 2}
REFUSED = {
    "bloom": ("BloomForCausalLM", {"n_layer": 2}, "it takes no position_ids"),
    "mpt": ("MptForCausalLM", {"n_layers": 2}, "it takes no position_ids"),
    "blenderbot": ("BlenderbotForCausalLM", {}, "it takes no position_ids"),
    "falcon": ("FalconForCausalLM", SHORT, "its attention does not use transformers' AttentionInterface"),
    "gpt_neo": ("GPTNeoForCausalLM", {}, "its attention does not use transformers' AttentionInterface"),
    "xglm": ("XGLMForCausalLM", {"num_layers": 2}, "its layers do not use transformers' AttentionInterface"),
    "diffllama": ("DiffLlamaForCausalLM", SHORT, "or not once each in order"),
    "hrm_text": ("HrmTextForCausalLM", SHORT, "or not once each in order"),
    "minicpm3": ("MiniCPM3ForCausalLM", SHORT, "its q, k and v are not one head_dim wide"),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", SHORT, "its q, k and v are not one head_dim wide"),
    "gemma4_text": (
        "Gemma4ForCausalLM",
        {"num_hidden_layers": 6, "hidden_size_per_layer_input": 0},
        "its layers differ in num_heads, num_kv_heads and head_dim",
    ),
    "deepseek_v32": ("DeepseekV32ForCausalLM", SHORT, "its attention takes indices, which ours does not"),
    "doge": ("DogeForCausalLM", SHORT | {"num_experts": 64}, "its attention has a mask or a bias of its own"),
    "jamba": ("JambaForCausalLM", {"num_hidden_layers": 8, "num_experts": 2}, "it keeps a state besides K and V"),
    "mamba": ("MambaForCausalLM", SHORT, "it keeps a state besides K and V"),
    "rwkv": ("RwkvForCausalLM", SHORT, "it keeps a state besides K and V"),
    "prophetnet": ("ProphetNetForCausalLM", {}, "it attends to an encoder"),
    "llama4_text": ("Llama4ForCausalLM", SHORT, "it is not a decoder with a linear head"),
    "gemma3": ("Gemma3ForConditionalGeneration", {}, "it is not a decoder with a linear head"),
    "jetmoe": ("JetMoeForCausalLM", SHORT, "a trial run raised NotImplementedError"),
    "minimax": ("MiniMaxForCausalLM", SHORT, "a trial run raised RuntimeError"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_before_weights_are_read(tmp_path, kind):
    architecture, fields, reason = REFUSED[kind]
    instead = "model_impl='auto'" if find_family(architecture) else r"transformers' own generate\(\)"
    problem = rf"config.json: {architecture} does not run by .*{reason}.*; {instead} runs it$"
    with pytest.raises(ValueError, match=problem) as error:
        LLM(str(config_only(tmp_path, kind, architecture, **fields)), device="cpu", model_impl="transformers")
    assert len(str(error.value)) - len(str(tmp_path)) < 300


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (
            "stablelm",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embeddings",
        ),
        ("bert", {"is_decoder": False}, "its attention is not causal"),
        ("gpt2", {"add_cross_attention": True}, "it attends to an encoder"),
        ("gpt2", {"n_layer": 10**9}, "config.json: n_layer must be at most 1,024"),
        ("gpt2", {"n_head": 5}, "config.json"),
        ("gpt2", {"n_embd": "x"}, "config.json: transformers .* refuses it: "),
        ("gpt2", {"quantization_config": {"quant_method": "awq"}}, "config.json: quantization_config"),
        ("gpt2", {"eos_token_id": 10**6}, "eos_token_id"),
    ],
    ids=str,
)
def test_fields_that_are_refused(tmp_path, kind, fields, reason):
    architecture = {"stablelm": "StableLmForCausalLM", "bert": "BertLMHeadModel", "gpt2": "GPT2LMHeadModel"}[kind]
    path = config_only(tmp_path, kind, architecture, **SHORT)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | fields))
    with pytest.raises(ValueError, match=reason):
        read_config(EngineConfig(), path)


def test_positions_that_do_not_begin_at_0_are_refused(tmp_path):
    tiny_model(tmp_path, "roberta", is_decoder=True)
    with pytest.raises(ValueError, match="RobertaForCausalLM counts positions in a way of its own"):
        run(tmp_path, dtype="bfloat16")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("gpt2"), "gpt2", n_positions=256)


def changed(path, tmp_path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((path / name).read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("transformer.h.1.mlp.c_fc.weight"), "missing: transformer.h.1.mlp.c_fc.weight"),
        (lambda t: t.update({"transformer.h.7.x": torch.ones(2)}), "unexpected: transformer.h.7.x"),
        (lambda t: t.update({"transformer.ln_f.weight": torch.ones(3)}), "mismatched: .*transformer.ln_f.weight"),
        (lambda t: t["transformer.ln_f.weight"].fill_(torch.nan), "NaN or infinite: transformer.ln_f.weight"),
        (lambda t: t.update({"transformer.ln_f.weight": torch.ones(64, dtype=torch.int8)}), "is of the type I8"),
    ],
    ids=["missing", "unexpected", "mis-shaped", "NaN", "integers"],
)
def test_weights_that_do_not_fit_are_named(gpt2, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        run(changed(gpt2, tmp_path, change))


def test_masks_that_old_checkpoints_store_are_skipped(gpt2, tmp_path):
    add = {"transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    assert run(changed(gpt2, tmp_path, lambda tensors: tensors.update(add)))[0] == run(gpt2)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"quantization": "int8"},
        {"enable_lora": True},
        {"load_format": "dummy"},
        {"convert": "embed"},
    ],
    ids=str,
)
def test_options_that_do_not_work_are_refused(gpt2, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.* does not work with GPT2LMHeadModel"):
        LLM(str(gpt2), device="cpu", **options)


def test_embeddings_are_refused(gpt2):
    with pytest.raises(ValueError, match="embeddings and scores do not work with GPT2LMHeadModel"):
        LLM(str(gpt2), device="cpu", runner="pooling")


def test_model_impl_chooses(gpt2, tmp_path):
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.* is not supported; supported: "):
        LLM(str(gpt2), device="cpu", model_impl="nanopage")
    assert accept_engine("LLM()", {"model_impl": "vllm"}, ["model_impl"]) == {"model_impl": "nanopage"}
    llama = tiny_model(tmp_path, "llama")
    options = {"device": "cpu", "dtype": "float64", "num_gpu_blocks_override": 20, "max_model_len": 64}
    ours, theirs = (LLM(str(llama), model_impl=impl, **options) for impl in ("auto", "transformers"))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, prompt_logprobs=1)
    impls = [llm.engine.model_config.model_impl for llm in (ours, theirs)]
    assert impls == ["nanopage", "transformers"]
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    for one, other in zip(ours.generate(prompts, params), theirs.generate(prompts, params), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        first, second = one.prompt_logprobs[1], other.prompt_logprobs[1]
        assert {i: pytest.approx(value.logprob) for i, value in first.items()} == {
            i: value.logprob for i, value in second.items()
        }


@pytest.mark.parametrize(
    ("fields", "instead"),
    [
        ({}, "a checkpoint of GPT2LMHeadModel may run"),
        ({"model_type": "new", "text_config": {}}, "a checkpoint of its text model alone may run"),
        ({"model_type": "new"}, "transformers '9.0.0', which wrote the file, may have it"),
    ],
)
def test_an_unknown_architecture_is_refused_with_what_runs_instead(gpt2, tmp_path, fields, instead):
    values = {"architectures": ["GPT2Nonsense"], "transformers_version": "9.0.0"} | fields
    (tmp_path / "config.json").write_text(json.dumps(json.loads((gpt2 / "config.json").read_text()) | values))
    problem = rf"architectures \['GPT2Nonsense'\] is not a decoder of nanopage or of transformers .*; {instead}$"
    with pytest.raises(ValueError, match=problem):
        LLM(str(tmp_path), device="cpu")


def test_config_json_chooses_no_code(gpt2, tmp_path):
    """Fields that name code, kernels or files do nothing, and files of code are not run."""
    hostile = {
        "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
        "_attn_implementation": "evil/kernel",
        "_attn_implementation_internal": "evil/kernel",
        "attn_implementation": "evil/kernel",
        "_experts_implementation": "evil",
        "experts_implementation": "evil",
        "fusion_config": {"patch_embeddings": True},
        "transformers_weights": "../evil.safetensors",
        "_name_or_path": "evil/model",
        "custom_pipelines": {"x": {"impl": "evil.P"}},
        "return_dict": False,
        "output_attentions": True,
        "output_hidden_states": True,
        "use_cache": True,
    }
    path = changed(gpt2, tmp_path, lambda tensors: None)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | hostile))
    (path / "evil.py").write_text("raise SystemExit('code of a model ran')")
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "evil/model"}))
    config, _ = read_module(path)
    assert not hasattr(config, "auto_map") and not re.search("evil", str(config.__dict__))
    assert run(path)[0] == run(gpt2)[0]


def test_find_window():
    for window in (1, 5, 99):
        assert find_window(lambda b, h, q, k, window=window: (k <= q) & (k > q - window), 100) == window
    assert find_window(lambda b, h, q, k: k <= q, 100) is None
    for other in (
        lambda b, h, q, k: torch.tensor(True),
        lambda b, h, q, k: (k <= q) & (k // 8 == q // 8),
        lambda b, h, q, k: (k <= q) & (k != 3),
        lambda b, h, q, k: (k <= q) & ((k > q - 5) | (k == 0)),
    ):
        with pytest.raises(ValueError, match="not causal"):
            find_window(other, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "stablelm", "cohere2", "olmoe"])
def test_graphs_on_a_gpu_give_the_same_tokens(tmp_path, kind):
    path, options = tiny_model(tmp_path, kind, **MODELS[kind]), {"max_model_len": 64, "kv_cache_gib": 0.1}
    params = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = LLM(str(path), device="cpu", dtype="float32", **options).generate(prompts, params)
    for eager in (True, False):
        got = LLM(str(path), device="cuda", dtype="float32", enforce_eager=eager, **options).generate(prompts, params)
        assert [each.outputs[0].token_ids for each in got] == [each.outputs[0].token_ids for each in expected]
