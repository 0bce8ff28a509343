"""Whole engines on a GPU, compiled and captured, feature by feature: the same tokens as on a CPU, eagerly.

In float32, so that products of the two differ by rounding alone, which these models' tokens do not depend on.
"""

import numpy as np
import pytest
from encoders import texts, tiny_encoder, write_modules
from helpers import Paged, random_tokens, tiny_model
from test_gguf import SMOLLM, STORED, model_for, write_gguf
from test_layouts import EXPERTS, write
from test_lora import save_adapter
from test_quantized_checkpoint import KINDS, write_quantized

from benchmarks.formats import FORMS
from nanopage import LLM, BeamSearchParams, LoRARequest, SamplingParams, StructuredOutputsParams
from nanopage.quantization.quantized import QuantizedWeight
from nanopage.quantization.quantized_weights import dequantize

GPU = "cuda"  # "cpu" tries out the tests themselves
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=16, ignore_eos=True, n=2)
PENALIZED = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, prompt_logprobs=1)
HELD = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="[a-d]{3,9}x"))
PARAMS = [GREEDY, SEEDED, PENALIZED, HELD, GREEDY, GREEDY]
PROMPTS = random_tokens([3, 40, 17, 1, 90, 33])
OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 96}


def load(model, device, **options):
    eager = {} if device == "cuda" else {"enforce_eager": True}
    return LLM(str(model), device=device, **OPTIONS | eager | options)


def generate(llm, params=PARAMS, prompts=PROMPTS, **arguments):
    prompts = [{"prompt_token_ids": tokens} for tokens in prompts]
    return llm.generate(prompts, params, use_tqdm=False, **arguments)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.error is None
        assert [c.token_ids for c in one.outputs] == [c.token_ids for c in other.outputs]
        for mine, its in zip(one.outputs, other.outputs, strict=True):
            for got, expected in zip(mine.logprobs or [], its.logprobs or [], strict=True):
                assert got.keys() == expected.keys()
                assert all(abs(got[token].logprob - expected[token].logprob) < 2e-3 for token in got)
    assert all(difference < 2e-3 for difference in differences(ours, theirs))


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 20},
    "gemma2": {"sliding_window": 20},
    "gemma3_text": {"sliding_window": 20},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 20, "num_hidden_layers": 4},
    "granite": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "mixtral": {},
    "qwen2_moe": {"decoder_sparse_step": 2},
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 20},
}


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    model = tiny_model(tmp_path, family, **FAMILIES[family])
    ours, theirs = (generate(load(model, device)) for device in (GPU, "cpu"))
    assert_same(ours, theirs)


FEATURES = {
    "chunks and prefix hits": {"max_num_batched_tokens": 16, "block_size": 4},
    "swaps": {"num_gpu_blocks_override": 34, "block_size": 4, "preemption_mode": "swap", "max_model_len": 132},
    "recomputation": {"num_gpu_blocks_override": 34, "block_size": 4, "max_model_len": 132},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "not async": {"async_scheduling": False},
    "a worker of its own": {"distributed_executor_backend": "mp"},
}


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature, model):
    prompts = [tokens + PROMPTS[4][:20] for tokens in PROMPTS]  # drafts find something
    llm = load(model, GPU, **FEATURES[feature])
    for _ in range(2):  # the second time with prefix hits
        ours = generate(llm, prompts=prompts)
        assert_same(ours, generate(load(model, "cpu", max_model_len=llm.engine.max_model_len), prompts=prompts))
    if feature in ("swaps", "recomputation"):
        assert llm.engine.scheduler.queues.num_preemptions > 0
    if feature == "swaps" and GPU == "cuda":
        assert llm.engine.executor.worker.kv_cache.host.is_pinned()


@pytest.mark.gpu
def test_a_draft_model(model, tmp_path):
    draft = tiny_model(tmp_path, seed=1, num_hidden_layers=1)
    options = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    assert_same(generate(load(model, GPU, speculative_config=options)), generate(load(model, "cpu")))


@pytest.mark.gpu
def test_beams(model):
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS]
    search = BeamSearchParams(width=3, max_tokens=8)
    ours, theirs = (load(model, device).beam_search(prompts, search) for device in (GPU, "cpu"))
    assert [[c.token_ids for c in output.outputs] for output in ours] == [
        [c.token_ids for c in output.outputs] for output in theirs
    ]


@pytest.mark.gpu
def test_adapters(model, tmp_path):
    made = [LoRARequest(str(i), i + 1, str(save_adapter(tmp_path / str(i), model, rank=4, seed=i))) for i in range(3)]
    adapters = [None, *made, *made[:2]]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    ours, theirs = (generate(load(model, device, **lora), lora_request=adapters) for device in (GPU, "cpu"))
    assert_same(ours, theirs)
    assert ours[0].outputs[0].token_ids != ours[4].outputs[0].token_ids


def assert_greedy(llm, directory):
    """Each token has the largest logit of the model on a CPU, whose weights are those of `llm` as floats."""
    outputs = generate(llm, GREEDY)
    sequences = [output.prompt_token_ids + output.outputs[0].token_ids[:-1] for output in outputs]
    plain = Paged(directory, sequences)
    for exact, rounded in zip(plain.model.modules(), llm.engine.executor.worker.model.modules(), strict=True):
        if isinstance(rounded, QuantizedWeight) and llm.engine.config.quantize_to is not None:
            exact.matrix.copy_(dequantize(rounded))
    plain.step({i: len(tokens) for i, tokens in enumerate(sequences)})
    for output, logits in zip(outputs, plain.logits, strict=True):
        assert logits[len(output.prompt_token_ids) - 1 :].argmax(1).tolist() == output.outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_rounded_weights(kind, tmp_path):
    model = tiny_model(tmp_path, "qwen2", hidden_size=96, num_attention_heads=6, tie_word_embeddings=True)
    assert_greedy(load(model, GPU, quantization=kind), model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_checkpoints(kind, tmp_path):
    write_quantized(tmp_path, KINDS[kind])
    assert_greedy(load(tmp_path, GPU), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "family"), [*((form, "llama") for form in FORMS), ("nvfp4", "qwen3_moe")])
def test_other_quantized_checkpoints(form, family, tmp_path):
    write(tmp_path, form, family, **EXPERTS if family == "qwen3_moe" else {})
    assert_greedy(load(tmp_path, GPU), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", STORED)
def test_gguf_files(stored, tmp_path):
    hf_model = model_for(SMOLLM, hidden_size=256, intermediate_size=256)
    file = tmp_path / "model.gguf"
    write_gguf(file, hf_model, "llama", SMOLLM, types=STORED[stored])
    assert_greedy(load(file, GPU), file)


def differences(ours, theirs):
    """Of the log-probabilities of the prompts' tokens."""
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip((one.prompt_logprobs or [])[1:], (other.prompt_logprobs or [])[1:], strict=True)
        for token, (got, expected) in zip(one.prompt_token_ids[1:], pairs, strict=False):
            yield abs(got[token].logprob - expected[token].logprob)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss"])
def test_bfloat16(family, tmp_path):
    """Experts may be others where rounding decides, and then a token's log-probability is another."""
    model = tiny_model(tmp_path, family)
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=0)
    ours, theirs = generate(load(model, GPU, dtype="bfloat16"), params), generate(load(model, "cpu"), params)
    assert np.median([*differences(ours, theirs)]) < 0.1


@pytest.mark.gpu
def test_a_cache_in_fp8(model):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    ours, theirs = (generate(load(model, device, kv_cache_dtype="fp8"), params) for device in (GPU, "cpu"))
    assert np.median([*differences(ours, theirs)]) < 1e-3


@pytest.mark.gpu
def test_embeddings(tmp_path):
    encoder = write_modules(tiny_encoder(tmp_path / "encoder"))
    decoder = tiny_model(tmp_path / "decoder", "qwen3")
    for model, options in ((encoder, {}), (decoder, {"runner": "pooling", "max_model_len": 256})):
        made = [LLM(str(model), device=device, dtype="float32", **options).embed(texts(20)) for device in (GPU, "cpu")]
        ours, theirs = (np.array([output.outputs.embedding for output in outputs]) for outputs in made)
        assert np.abs(ours - theirs).max() < 1e-4


@pytest.mark.gpu
def test_two_engines_in_one_process(model, tmp_path):
    other = tiny_model(tmp_path, "qwen3", seed=3)
    first, second = load(model, GPU), load(other, GPU)
    alone = [generate(load(path, "cpu")) for path in (model, other)]
    for _ in range(2):
        assert_same(generate(first), alone[0])
        assert_same(generate(second), alone[1])
