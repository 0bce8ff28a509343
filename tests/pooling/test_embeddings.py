"""Embeddings, classes and scores of encoders, against transformers."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from encoders import encoder_tokenizer, texts, tiny_encoder, write_modules
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from nanopage import LLM, PoolingParams, SamplingParams
from nanopage.engine.token_budget import TokenBudget
from nanopage.pooling.requests import ByLength

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {"device": "cpu", "dtype": "float32"}


def hidden_states(directory, prompts):
    """Of each text alone, by transformers."""
    model, tokenizer = AutoModel.from_pretrained(directory).eval(), encoder_tokenizer("bert")
    tokenizer.no_truncation()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0] for text in prompts]


def vectors(outputs):
    return np.array([output.outputs.embedding for output in outputs])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    files = {
        "sentence_bert_config": {"max_seq_length": 30, "do_lower_case": False},
        "config_sentence_transformers": {"prompts": {"query": "who is ", "none": ""}, "similarity_fn_name": "cosine"},
    }
    return write_modules(tiny_encoder(tmp_path_factory.mktemp("bert")), **files)


@pytest.fixture(scope="module")
def llm(bert):
    return LLM(str(bert), **OPTIONS, max_num_batched_tokens=64)


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("pooling", ["CLS", "LAST", "MEAN"])
def test_embeddings_are_those_of_transformers(tmp_path, family, pooling):
    activation = {"CLS": "relu", "LAST": "gelu_new", "MEAN": "gelu"}[pooling]
    directory = tiny_encoder(tmp_path, family, hidden_act=activation)
    llm = LLM(str(directory), **OPTIONS, pooler_config={"pooling_type": pooling, "normalize": pooling != "LAST"})
    prompts = texts(20)
    for states, embedding in zip(hidden_states(directory, prompts), vectors(llm.embed(prompts)), strict=True):
        expected = {"CLS": states[0], "LAST": states[-1], "MEAN": states.mean(0)}[pooling]
        expected = expected if pooling == "LAST" else torch.nn.functional.normalize(expected, dim=0)
        assert np.abs(expected.numpy() - embedding).max() < 1e-5


@pytest.mark.parametrize(
    ("mode", "normalize", "pooling"),
    [
        ("pooling_mode_cls_token", True, "CLS"),
        ("pooling_mode_lasttoken", False, "LAST"),
        ("pooling_mode_mean_tokens", False, "MEAN"),
    ],
)
def test_the_files_of_sentence_transformers_say_how_to_pool(bert, tmp_path, mode, normalize, pooling):
    directory = shutil.copytree(bert, tmp_path / "model")
    write_modules(directory, mode, normalize)
    read = LLM(str(directory), **OPTIONS).engine.model_config.pooling
    assert (read.pooling_type, read.normalize, read.max_seq_length) == (pooling, normalize, 30)
    assert read.prompts == {"query": "who is ", "none": ""}


@pytest.mark.parametrize(
    ("file", "contents", "named"),
    [
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Dense", "path": "2_Dense"}], "Dense"),
        ("modules.json", [{"type": "a.Transformer", "path": "../x"}], "path"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": ".."}], "path"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "weightedmean"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "word_embedding_dimension": 5}, "dimension"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": 8, "do_lower_case": True}, "do_lower_case"),
        ("config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}, "similarity_fn_name"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": "q"}, "default_prompt_name"),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": []}, "default_prompt_name"),
    ],
)
def test_a_file_that_asks_for_more_is_refused_by_name(bert, tmp_path, file, contents, named):
    directory = shutil.copytree(bert, tmp_path / "model")
    (directory / file).write_text(json.dumps(contents))
    with pytest.raises(ValueError, match=file) as error:
        LLM(str(directory), **OPTIONS)
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "tanh"),
        ("is_decoder", True),
        ("hidden_size", 30),
        ("type_vocab_size", 1025),
    ],
)
def test_a_field_of_config_json_is_refused_by_name(bert, tmp_path, field, value):
    directory = shutil.copytree(bert, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text()) | {field: value}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=field):
        LLM(str(directory), **OPTIONS)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("problem_type", [], "problem_type"),
        ("problem_type", {"a": 1}, "problem_type"),
        ("sbert_ce_default_activation_function", ["x"], "activation"),
        ("sentence_transformers", {"activation_fn": {}}, "activation"),
    ],
)
def test_a_field_of_a_classifier_is_refused_by_name(tmp_path, field, value, named):
    file = tiny_encoder(tmp_path, num_labels=2) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"config.json.*{named}"):
        LLM(str(tmp_path), **OPTIONS)


def test_weights_that_do_not_fit_are_refused_by_name(bert, tmp_path):
    directory = shutil.copytree(bert, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["encoder.layer.7.output.dense.bias"] = weights.pop("encoder.layer.1.output.dense.bias")
    weights["embeddings.position_ids"] = torch.arange(64)[None]  # older files have it
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)unexpected: encoder\.layer\.7.*missing: encoder\.layer\.1"):
        LLM(str(directory), **OPTIONS)


def test_weights_that_are_there_twice_are_refused(bert, tmp_path):
    directory = shutil.copytree(bert, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"bert.embeddings.LayerNorm.bias": torch.ones(32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="tensors with the same name, with and without a prefix"):
        LLM(str(directory), **OPTIONS)


def test_config_json_is_enough_for_random_weights(bert, tmp_path):
    shutil.copy(bert / "config.json", tmp_path)
    llm = LLM(str(tmp_path), **OPTIONS, load_format="dummy")
    assert np.isfinite(vectors(llm.embed([[4, 5, 6], [7]]))).all()
    with pytest.raises(ValueError, match="tokenizer"):
        llm.embed("a")


@pytest.mark.parametrize(
    "options",
    [
        {"runner": "generate"},
        {"convert": "classify"},
        {"quantization": "int8"},
        {"enable_lora": True},
        {"tensor_parallel_size": 2},
        {"kv_cache_gib": 1},
        {"block_size": 32},
        {"enable_prefix_caching": False},
        {"generation_config": "vllm"},
        {"seed": 5},
        {"max_model_len": 65},
        {"pooler_config": {"pooling_type": "MAX"}},
        {"pooler_config": {"dimensions": 3}},
        {"hf_overrides": {"num_labels": 3}},
    ],
)
def test_options_that_an_encoder_has_no_use_for_are_refused(bert, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        LLM(str(bert), **OPTIONS | options)


def test_parameters_of_a_request(llm, bert):
    prompts = texts(3)
    plain = vectors(llm.embed(prompts))
    params = PoolingParams(dimensions=8, normalize=False)
    different = [params, PoolingParams(dimensions=8), PoolingParams()]
    raw = [output.outputs.embedding for output in llm.embed(prompts, pooling_params=different)]
    lengths = np.linalg.norm(np.stack([states.mean(0) for states in hidden_states(bert, prompts)]), axis=1)
    assert np.abs(raw[0] - plain[0][:8] * lengths[0]).max() < 1e-5
    assert np.linalg.norm(raw[1]) == pytest.approx(1) and len(raw[1]) == 8
    assert np.array_equal(raw[2], plain[2])
    (data,) = llm.encode(prompts[0], pooling_task="embed")
    assert data.outputs.data.dtype == torch.float32 and data.outputs.data.tolist() == plain[0].tolist()
    queries = llm.embed(prompts, pooling_params=PoolingParams(prompt_name="query"))
    assert np.array_equal(vectors(queries), vectors(llm.embed([f"who is {text}" for text in prompts])))
    ids = [output.prompt_token_ids for output in queries]
    assert np.array_equal(vectors(llm.embed(ids)), vectors(queries))
    for bad, name in [({"dimensions": 33}, "dimensions"), ({"prompt_name": "x"}, "prompt_name")]:
        with pytest.raises(ValueError, match=name):
            llm.embed(prompts, pooling_params=PoolingParams(**bad))
    with pytest.raises(ValueError, match="use_activation"):
        llm.embed(prompts, pooling_params=PoolingParams(use_activation=True))


def test_a_text_that_is_too_long_is_an_error_or_shortened(llm):
    text = "the cat ran " * 20
    with pytest.raises(ValueError, match=r"prompts\[1\].*62 tokens.*max_model_len=30.*truncate_prompt_tokens"):
        llm.embed(["a", text])
    (short,) = llm.embed(text, truncate_prompt_tokens=7)
    assert short.prompt_token_ids == [1, *[4, 5, 9, 4, 5], 2]  # special tokens at both ends
    (most,) = llm.embed(text, truncate_prompt_tokens=-1)
    assert len(most.prompt_token_ids) == 30
    for tokens in (0, 2, 31, -2):
        with pytest.raises(ValueError, match="truncate_prompt_tokens"):
            llm.embed(text, truncate_prompt_tokens=tokens)


def test_options_of_vllm_that_change_nothing_are_accepted_and_others_refused(llm):
    PoolingParams(task=None, skip_reading_prefix_cache=False, extra_kwargs={})
    llm.embed("a", lora_request=None, tokenization_kwargs={})
    for options in ({"task": "embed"}, {"skip_reading_prefix_cache": True}, {"extra_kwargs": {"a": 1}}):
        with pytest.raises(ValueError, match=next(iter(options))):
            PoolingParams(**options)
    for options in ({"lora_request": 1}, {"tokenization_kwargs": {"truncation": True}}):
        for call in (llm.embed, llm.encode, llm.classify):
            with pytest.raises(ValueError, match=next(iter(options))):
                call("a", **options)
    for options in ({"dimensions": "8"}, {"normalize": 1}, {"prompt_name": 3}, {"truncate_prompt_tokens": 1.5}):
        with pytest.raises(TypeError, match=next(iter(options))):
            PoolingParams(**options)


def test_other_requests_are_refused(llm):
    with pytest.raises(ValueError, match="makes embeddings, not text"):
        llm.generate("the cat", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="pooling_task"):
        llm.classify("the cat")
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.embed([[]])
    with pytest.raises(ValueError, match="not in the vocabulary"):
        llm.embed([[40]])


@pytest.mark.parametrize(
    ("family", "num_labels", "fields", "activation"),
    [
        ("bert", 1, {}, torch.sigmoid),
        ("bert", 3, {}, lambda x: x.softmax(-1)),
        ("roberta", 1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, lambda x: x),
        ("xlm-roberta", 2, {"problem_type": "multi_label_classification"}, torch.sigmoid),
    ],
)
def test_classes_and_scores_are_those_of_transformers(tmp_path, family, num_labels, fields, activation):
    directory = tiny_encoder(tmp_path, family, num_labels, **fields)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    llm, tokenizer = LLM(str(directory), **OPTIONS), encoder_tokenizer(family)
    tokenizer.no_truncation()

    def expected(*text):
        encoding = tokenizer.encode(*text)
        types = torch.tensor([encoding.type_ids]) if family == "bert" else None
        with torch.no_grad():
            return model(torch.tensor([encoding.ids]), token_type_ids=types).logits[0]

    prompts = texts(6)
    for text, output in zip(prompts, llm.classify(prompts), strict=True):
        assert np.abs(activation(expected(text)).numpy() - output.outputs.probs).max() < 1e-5
    (raw,) = llm.encode(prompts[0], PoolingParams(use_activation=False), pooling_task="classify")
    assert (raw.outputs.data - expected(prompts[0])).abs().max() < 1e-5
    if num_labels > 1:
        with pytest.raises(ValueError, match="only a model with one class"):
            llm.score("the cat", prompts)
        return
    for text, output in zip(prompts, llm.score("the cat", prompts), strict=True):
        assert output.outputs.score == pytest.approx(activation(expected("the cat", text)).item(), abs=1e-5)
    tokenizer.enable_truncation(12, strategy="longest_first")
    (short,) = llm.score("the cat ran", "the river " * 20, truncate_prompt_tokens=12)
    assert short.prompt_token_ids == tokenizer.encode("the cat ran", "the river " * 20).ids
    (short,) = llm.score("the river " * 15, "the cat " * 20, truncate_prompt_tokens=12)
    assert short.prompt_token_ids == tokenizer.encode("the river " * 15, "the cat " * 20).ids


def test_scores_of_an_embedding_model_are_similarities(llm):
    prompts = texts(4)
    plain = vectors(llm.embed(prompts))
    scores = [output.outputs.score for output in llm.score(prompts[0], prompts[1:])]
    assert scores == pytest.approx((plain[1:] @ plain[0]).tolist(), abs=1e-6)
    scores = [output.outputs.score for output in llm.score(prompts[:2], prompts[2:])]
    assert scores == pytest.approx((plain[:2] * plain[2:]).sum(1).tolist(), abs=1e-6)
    with pytest.raises(ValueError, match="data_1 has 2 texts and data_2 3"):
        llm.score(prompts[:2], prompts[1:])


def batches_of(llm, prompts, budget=64, max_num_seqs=256, priorities=None):
    """The ids of the requests that each step computes."""
    engine, batches = llm.engine, []
    scheduler, priorities = engine.scheduler, priorities or [0] * len(prompts)
    before = scheduler.token_budget, scheduler.admission.max_num_seqs, scheduler.arrange, engine.config
    scheduler.token_budget, scheduler.admission.max_num_seqs = TokenBudget(budget), max_num_seqs
    scheduler.arrange = ByLength(scheduler.token_budget).arrange
    if any(priorities):
        engine.input_processor.config = replace(engine.config, scheduling_policy="priority")
    for i, (prompt, priority) in enumerate(zip(prompts, priorities, strict=True)):
        engine.add_request(str(i), prompt, PoolingParams(), priority)
    while engine.has_unfinished_requests():
        batches.append({output.request_id for output in engine.step()})
    scheduler.token_budget, scheduler.admission.max_num_seqs, scheduler.arrange, engine.input_processor.config = before
    return batches


def test_batches_hold_the_first_request_and_those_of_similar_length(llm):
    prompts = [[4] * n for n in (9, 2, 8, 30, 9, 3, 9)]
    assert batches_of(llm, prompts, 40, 4) == [{"0", "4", "6", "2"}, {"1", "5", "3"}]
    assert batches_of(llm, prompts, 30)[0] == {"0", "4", "6"}
    assert batches_of(llm, prompts, 30, priorities=[0, 0, 0, -1, 0, 0, 1])[:2] == [{"3"}, {"0", "4", "2", "5"}]


def test_a_text_longer_than_the_budget_is_not_divided(bert):
    llm = LLM(str(bert), **OPTIONS, max_num_batched_tokens=8)
    steps = []
    llm.engine.listeners.append(lambda stats: steps.append(stats.prefill_tokens))
    llm.embed([[4] * 30, [5] * 3, [6] * 28, [7] * 4, [8] * 4])
    assert steps == [30, 11, 28]


def test_a_batch_that_fails_runs_again_one_request_at_a_time(llm, monkeypatch):
    worker, sizes = llm.engine.executor.worker, []
    launch = worker.launch

    def failing(batch):
        sizes.append(len(batch.new))
        if any(new.token_ids == [1, 2] for new in batch.new):
            raise RuntimeError("out of order")
        return launch(batch)

    monkeypatch.setattr(worker, "launch", failing)
    with pytest.raises(RuntimeError, match=r"prompts\[1\]: RuntimeError: out of order"):
        llm.embed([[1, 4, 2], [1, 2], [1, 5, 2]])
    assert sizes == [3, 1, 1, 1]
    monkeypatch.setattr(worker, "launch", launch)
    assert not llm.engine.has_unfinished_requests() and len(llm.embed(["a", "the"])) == 2
