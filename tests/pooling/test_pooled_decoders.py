"""Embeddings, classes and scores of decoders, against transformers: chunks, cached prefixes, preemptions."""

import json
import shutil

import numpy as np
import pytest
import torch
from encoders import write_modules
from helpers import finish, save_tokenizer, tiny_hf_model, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from nanopage import LLM, PoolingParams, SamplingParams
from nanopage.pooling.files import QWEN3_RERANKER

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "num_gpu_blocks_override": 40,
    "block_size": 8,
    "max_num_batched_tokens": 16,
}
PROMPTS = [
    "the cat",
    "the other dog went to the house in the morning, then they were in there " * 2,
    "a",
    "the men " * 5,
]


def vectors(outputs):
    return np.array([output.outputs.embedding for output in outputs])


def save_headless(directory, family, prefix, **fields):
    """A model as embedding models are saved: ...Model, whose weights may have no prefix."""
    tiny_model(directory, family, **fields)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "Model")]
    file.write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    weights.pop("lm_head.weight", None)
    named = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(
    ("family", "pooling", "prefix"),
    [("qwen3", "LAST", ""), ("mistral", "LAST", "model."), ("llama", "MEAN", "")],
)
def test_embeddings_are_those_of_transformers(tmp_path, family, pooling, prefix):
    directory = save_headless(tmp_path, family, prefix, tie_word_embeddings=family == "qwen3")
    model = tiny_hf_model(family, tie_word_embeddings=family == "qwen3").model
    llm = LLM(str(directory), **OPTIONS, pooler_config={"pooling_type": pooling})
    for _ in range(2):  # the second time, prefixes are cached
        outputs = llm.embed(PROMPTS)
        for output in outputs:
            with torch.no_grad():
                states = model(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
            expected = states[-1] if pooling == "LAST" else states.mean(0)
            expected = torch.nn.functional.normalize(expected, dim=0).numpy()
            assert np.abs(expected - output.outputs.embedding).max() < 1e-5
    assert (outputs[1].num_cached_tokens > 0) == (pooling == "LAST")
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("pooling", ["LAST", "MEAN"])
def test_a_preemption_changes_no_embedding(model, preemption_mode, pooling):
    options = OPTIONS | {"num_gpu_blocks_override": 8, "max_model_len": 64, "scheduling_policy": "priority"}
    config = {"pooling_type": pooling, "normalize": False}
    llm = LLM(str(model), runner="pooling", pooler_config=config, preemption_mode=preemption_mode, **options)
    prompts = [[3 + i] * 50 for i in range(2)]
    expected = [llm.embed([prompt])[0].outputs.embedding for prompt in prompts]
    engine, outputs = llm.engine, {}
    engine.reset_prefix_cache()
    engine.add_request("0", prompts[0], PoolingParams(), priority=1)
    engine.step()
    engine.step()
    engine.add_request("1", prompts[1], PoolingParams(), priority=0)
    outputs |= finish(engine)
    assert engine.scheduler.queues.num_preemptions == 1
    for i in range(2):
        assert np.abs(outputs[str(i)].pooled - expected[i]).max() < 1e-5


def test_the_files_of_sentence_transformers_make_an_embedding_model(model, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    write_modules(directory, "pooling_mode_lasttoken", sentence_bert_config={"max_seq_length": 20})
    config = json.loads((directory / "1_Pooling" / "config.json").read_text()) | {"word_embedding_dimension": 64}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    llm = LLM(str(directory), device="cpu", num_gpu_blocks_override=20)
    assert (llm.engine.max_model_len, llm.engine.model_config.pooling.pooling_type) == (20, "LAST")
    (output,) = llm.embed("the cat " * 40, truncate_prompt_tokens=-1)
    assert len(output.prompt_token_ids) == 20 and len(output.outputs.embedding) == 64
    with pytest.raises(ValueError, match="makes embeddings, not text"):
        llm.generate("a", SamplingParams())
    text = LLM(str(directory), device="cpu", num_gpu_blocks_override=20, max_model_len=100, runner="generate")
    assert text.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="makes text"):
        text.embed("a")


@pytest.mark.parametrize("num_labels", [1, 3])
def test_classes_are_those_of_transformers(tmp_path, num_labels):
    config = tiny_hf_model("qwen3", num_labels=num_labels, pad_token_id=0).config
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS)
    for output in llm.classify(PROMPTS):
        with torch.no_grad():
            logits = model(torch.tensor([output.prompt_token_ids])).logits[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(0)
        assert np.abs(expected.numpy() - output.outputs.probs).max() < 1e-5
    if num_labels == 1:  # a pair is one text
        (pair,), (text,) = llm.score("the cat", " and the dog"), llm.classify("the cat and the dog")
        assert [pair.outputs.score] == text.outputs.probs


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_scores_by_the_logits_of_two_tokens(tmp_path, tied):
    tiny_model(tmp_path, "qwen3", tie_word_embeddings=tied)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["n", "y"]}
    overrides["is_original_qwen3_reranker"] = True
    options = OPTIONS | {"max_model_len": 512, "num_gpu_blocks_override": 100}
    llm, model = LLM(str(tmp_path), **options, hf_overrides=overrides), tiny_hf_model("qwen3", tie_word_embeddings=tied)
    outputs = llm.score("the cat", PROMPTS)
    before, pair, behind = QWEN3_RERANKER
    tokenizer = llm.get_tokenizer()
    no, yes = (tokenizer.backend.token_to_id(token) for token in "ny")
    for document, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer.encode(before + pair.format("the cat", document) + behind)
        assert output.prompt_token_ids == ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        assert output.outputs.score == pytest.approx(logits[[no, yes]].softmax(0)[1].item(), abs=1e-5)
    scheduler = llm.engine.scheduler
    again = llm.score("the cat", "another one")[0]
    assert scheduler.block_manager.num_cached_blocks and again.outputs.score != outputs[0].outputs.score
    (short,) = llm.score("the cat", "the men " * 300, truncate_prompt_tokens=-1)
    assert len(short.prompt_token_ids) == 512
    assert short.prompt_token_ids[-4:] == tokenizer.encode(behind)[-4:]


@pytest.mark.parametrize(
    "options",
    [
        {"hf_overrides": {"architectures": ["A"], "classifier_from_token": ["n", "y"]}},
        {"hf_overrides": {"architectures": ["AForSequenceClassification"], "classifier_from_token": ["n", "yesyes"]}},
        {"hf_overrides": {"rope_theta": 1}},
        {"convert": "classify"},
        {"convert": "embed", "tensor_parallel_size": 2},
        {"runner": "pooling", "enable_lora": True},
        {"runner": "pooling", "pooler_config": {"pooling_type": "CLS"}},
        {"runner": "generate", "pooler_config": {"pooling_type": "LAST"}},
        {"runner": "draft"},
    ],
)
def test_options_that_do_not_fit_are_refused(model, options):
    name = next(reversed(options))
    with pytest.raises(ValueError, match="pooling type CLS" if "CLS" in str(options) else name):
        LLM(str(model), **OPTIONS | options)


def test_a_decoder_that_looks_ahead_is_refused(model, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    for field, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        config = json.loads((model / "config.json").read_text()) | {field: value}
        (directory / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=field):
            LLM(str(directory), **OPTIONS)


def test_a_model_that_overflows_ends_with_an_error(model, tmp_path):
    directory = shutil.copytree(model, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 1e38
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    llm = LLM(str(directory), **OPTIONS, runner="pooling")
    with pytest.raises(RuntimeError, match="not finite"):
        llm.embed("the cat and the dog")
