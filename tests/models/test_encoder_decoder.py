"""BART, T5 and families like them against transformers: the encoder, the logits of every position, and what the engine
makes of prompts in two parts."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from asgi import call
from helpers import CPU, EOS, LONG, Paged, assert_all_close, finish, random_tokens, save_tokenizer, tiny_bart, tiny_t5
from test_models import all_decoded_together, chunks_and_decodes_mixed, each_alone_then_decoded, packed

from nanopage import LLM, AsyncLLM, BeamSearchParams, EngineArgs, SamplingParams
from nanopage.checks.fields import MAX_SIZES
from nanopage.config.options import EngineConfig
from nanopage.cpu import aot
from nanopage.items.encoded import WriteEncoded
from nanopage.items.items import make_item
from nanopage.items.rows import ItemRows
from nanopage.reading.config import config_from_dict
from nanopage.server.app import create_app
from nanopage.server.state import ServerState
from nanopage.startup.options import refused
from nanopage.text.prompts import PromptReader
from nanopage.weights import loader

pytestmark = pytest.mark.usefixtures("one_thread")

APART = {"scale_embedding": True, "tie_word_embeddings": False}
HEADLESS = "bart without a head"
CASES = {
    "bart": ("bart", {}),
    HEADLESS: ("bart", {}),
    "bart, scaled embeddings, a head of its own": ("bart", APART),
    "bart, ReLU, other layers and heads": (
        "bart",
        {"activation_function": "relu", "encoder_layers": 3, "decoder_layers": 1, "encoder_attention_heads": 8},
    ),
    "mbart": ("mbart", {}),
    "mbart, scaled embeddings, a head of its own": ("mbart", APART),
    "pegasus": ("pegasus", {"activation_function": "relu", "scale_embedding": True}),
    "marian": ("marian", {"activation_function": "swish", "scale_embedding": True}),
    "t5": ("t5", {}),
    "t5 v1.1": ("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5, SiLU, other buckets and layers": (
        "t5",
        {
            "feed_forward_proj": "gated-silu",
            "relative_attention_num_buckets": 6,
            "relative_attention_max_distance": 50,
            "num_decoder_layers": None,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "mt5": ("mt5", {"feed_forward_proj": "gated-gelu"}),
}
SIZES = (
    *("d_model", "encoder_layers", "encoder_attention_heads", "decoder_attention_heads", "encoder_ffn_dim"),
    "decoder_ffn_dim",
)
T5_SIZES = (
    *("d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "n_positions"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
)
LENGTHS, READ = [1, 9, 40], [23, 1, 58]  # of what the decoders have, and of what the encoders read


def tiny(family, seed=0, **overrides):
    return (tiny_t5 if family.endswith("t5") else tiny_bart)(family, seed, **overrides)


def save(directory, hf_model):
    hf_model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


class Reading(Paged):
    """Paged, where each sequence has a text for the encoder."""

    def __init__(self, directory, sequences, texts, make_way=None):
        super().__init__(directory, sequences, make_way=make_way)
        self.texts = texts
        self.table.items = ItemRows(loader.read_config(directory), self.model.encoders, torch.float32, CPU)
        self.way = WriteEncoded(self.table.items, self.way)

    def batch(self, num_tokens):
        batch = super().batch(num_tokens)
        for new in batch.new:
            text = torch.tensor(self.texts[new.row])
            new.items = [make_item("text", 0, 0, {"input_ids": text.numpy()}, len(text))]
        return batch


@pytest.mark.parametrize("case", CASES)
def test_the_encoder_and_the_logits_of_every_position_equal_transformers(tmp_path, case):
    family, overrides = CASES[case]
    hf_model, sequences, texts = tiny(family, **overrides), random_tokens(LENGTHS), random_tokens(READ, seed=1)
    if case == HEADLESS:
        hf_model.final_logits_bias.zero_()
    made = Reading(save(tmp_path, hf_model.model if case == HEADLESS else hf_model), sequences, texts)
    encoded, expected = [], []
    with torch.inference_mode():
        for tokens, text in zip(sequences, texts, strict=True):
            outputs = hf_model(torch.tensor([text]), decoder_input_ids=torch.tensor([tokens]))
            encoded.append(made.model.encoders["text"]({"input_ids": torch.tensor([text])})[0])
            expected.append((outputs.encoder_last_hidden_state[0], outputs.logits[0]))
    assert_all_close(encoded, [states for states, _ in expected])
    for plan in (each_alone_then_decoded, all_decoded_together, chunks_and_decodes_mixed):
        made.restart(sequences)
        assert_all_close(made.run(plan), [logits for _, logits in expected])
    if case == "bart":
        assert_all_close(Reading(tmp_path, sequences, texts, packed).run(plan), made.logits)
        shuffled = Reading(tmp_path, sequences, texts[::-1]).run(plan)
        assert not torch.allclose(shuffled[0], made.logits[0], atol=0.1)  # the text matters


@pytest.mark.skipif(not LONG, reason="compiles for 40 s; runs with NANOPAGE_LONG_TESTS=1")
def test_compiled_layers_equal_the_eager_ones(tmp_path, monkeypatch):
    monkeypatch.delenv("NANOPAGE_COMPILE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    sequences, texts = random_tokens(LENGTHS), random_tokens(READ, seed=1)
    directory = save(tmp_path / "model", tiny_bart())
    eager = Reading(directory, sequences, texts, packed).run(all_decoded_together)
    made = Reading(directory, sequences, texts, lambda *parts: aot.Compiled(*parts, torch.float32))
    made.way.way.compile()
    for plan in (each_alone_then_decoded, all_decoded_together, chunks_and_decodes_mixed):
        made.restart(sequences)
        assert_all_close(made.run(plan), eager)


def test_a_head_with_a_bias_is_not_compiled():
    head = SimpleNamespace(bias=torch.zeros(1, 3), weight=SimpleNamespace(tiles=torch.zeros(1)))
    assert aot.Compiled._make_head(SimpleNamespace(model=SimpleNamespace(lm_head=head)), None, {}) is None


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Of each family: a directory, prompts in two parts, and what transformers' greedy search makes of them, in
    float64."""
    made = {}
    for family in ("bart", "t5"):
        hf_model, directory = tiny(family, seed=1), tmp_path_factory.mktemp(family)
        save(directory, hf_model)
        texts, begins = random_tokens([3, 20, 59, 11], seed=2), random_tokens([0, 1, 9, 15], seed=3)
        prompts = [
            {"encoder_prompt": {"prompt_token_ids": text}, "decoder_prompt": {"prompt_token_ids": begin}}
            for text, begin in zip(texts, begins, strict=True)
        ]
        start, hf_model = hf_model.config.decoder_start_token_id, hf_model.double()
        expected = [greedy(hf_model, text, [start, *begin]) for text, begin in zip(texts, begins, strict=True)]
        made[family] = directory, prompts, expected
    return made


@pytest.fixture(scope="module")
def model(models):
    return models["bart"]


def greedy(hf_model, text, begin, count=24):
    """The tokens that transformers' generate() adds. An end is a token like others."""
    options = {"max_new_tokens": count, "do_sample": False, "num_beams": 1, "eos_token_id": None}
    options["use_cache"] = False  # transformers' cache has as many layers as the encoder
    options |= {"attention_mask": torch.ones(1, len(text), dtype=torch.int64)}
    return hf_model.generate(torch.tensor([text]), decoder_input_ids=torch.tensor([begin]), **options)[0].tolist()


# Two sequences take four blocks. The last two prompts go first, and take the blocks of the others.
PRIORITIES = {"scheduling_policy": "priority", "num_gpu_blocks_override": 5}
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
OPTIONS = {
    "all at once": ("bart", {}),
    "in chunks": ("bart", {"max_num_batched_tokens": 4}),
    "recomputed": ("bart", PRIORITIES | {"preemption_mode": "recompute"}),
    "swapped": ("bart", PRIORITIES | {"preemption_mode": "swap"}),
    "with drafts": ("bart", DRAFTS),
    "t5 in chunks, with drafts": ("t5", {"max_num_batched_tokens": 4} | DRAFTS),
    "t5 swapped": ("t5", PRIORITIES | {"preemption_mode": "swap"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_answers_are_those_of_transformers_alone(models, name):
    family, options = OPTIONS[name]
    directory, prompts, expected = models[family]
    llm = LLM(directory, dtype="float64", enforce_eager=True, max_num_seqs=4, **options)
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = {}
    for index, prompt in enumerate(prompts):
        priority = int(index < 2) if "scheduling_policy" in options else 0
        engine.add_request(str(index), prompt, params, priority)
        for _ in range(4 if index == 1 else 0):
            answers |= {output.request_id: output for output in engine.step()}
    answers |= finish(engine)
    outputs = [answers[str(index)] for index in range(4)]
    assert [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs] == expected
    read = [prompt["encoder_prompt"]["prompt_token_ids"] for prompt in prompts]
    assert [output.encoder_prompt_token_ids for output in outputs] == read
    assert (engine.scheduler.queues.num_preemptions > 0) == ("scheduling_policy" in options)


def test_completions_and_beams_share_what_the_encoder_has_read(model):
    directory, prompts, _ = model
    llm = LLM(directory, dtype="float64", enforce_eager=True, max_num_seqs=4)
    several = [SamplingParams(n=3, temperature=1, seed=seed, max_tokens=8, ignore_eos=True) for seed in (3, 4)]
    together = llm.generate(prompts[:2], several)
    apart = [llm.generate(prompt, params)[0] for prompt, params in zip(prompts[:2], several, strict=True)]
    for one, other in zip(together, apart, strict=True):
        assert [each.token_ids for each in one.outputs] == [each.token_ids for each in other.outputs]
    alone = llm.beam_search(prompts[0], BeamSearchParams(beam_width=3, max_tokens=8))[0]
    beside = llm.beam_search([prompts[1], prompts[0]], BeamSearchParams(beam_width=3, max_tokens=8))[1]
    assert [beam.tokens for beam in alone.sequences] == [beam.tokens for beam in beside.sequences]
    assert alone.encoder_prompt_token_ids == prompts[0]["encoder_prompt"]["prompt_token_ids"]


def with_fields(tmp_path, model, **fields):
    """The model with fields of generation_config.json."""
    for file in model[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "generation_config.json"
    made = json.loads(file.read_text()) | fields
    file.unlink()
    file.write_text(json.dumps(made))
    return tmp_path


def test_a_first_token_is_forced_and_other_settings_are_logged(model, tmp_path, caplog):
    directory = with_fields(tmp_path, model, forced_bos_token_id=7, num_beams=4, no_repeat_ngram_size=3)
    with caplog.at_level(logging.WARNING):
        llm = LLM(directory, dtype="float64", enforce_eager=True)
    assert "of no effect here: num_beams=4, no_repeat_ngram_size=3" in caplog.text
    hf_model, text = tiny_bart(seed=1).double(), model[1][1]["encoder_prompt"]["prompt_token_ids"]
    hf_model.generation_config.forced_bos_token_id = 7
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for begin in ([], [EOS], [EOS, 9]):
        (output,) = llm.generate({"encoder_prompt": text, "decoder_prompt": begin or None}, params)
        count = 8 + (len(begin) < 2)
        assert output.prompt_token_ids + output.outputs[0].token_ids == greedy(hf_model, text, begin or [EOS], count)
    read = llm.engine.input_processor.prompts.read
    assert read("a cat").cache_salt == read("a cat").cache_salt != read("a dog").cache_salt  # of the prefix cache
    (output,) = llm.generate({"encoder_prompt": "the cat", "decoder_prompt": "a dog"}, params)
    tokens = llm.get_tokenizer().encode("a dog", add_special_tokens=False)
    assert output.prompt_token_ids == [EOS, 7, *tokens] and output.prompt == "a dog"
    assert (output.encoder_prompt, output.encoder_prompt_token_ids) == (
        "the cat",
        llm.get_tokenizer().encode("the cat"),
    )


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ({"decoder_start_token_id": 300}, "decoder_start_token_id 300 is not in the vocabulary"),
        ({"decoder_start_token_id": [1, 2]}, "decoder_start_token_id must be one token id"),
        ({"forced_bos_token_id": "a"}, "forced_bos_token_id must be a token id"),
    ],
    ids=str,
)
def test_fields_of_generation_config_that_are_refused(model, tmp_path, field, named):
    with pytest.raises(ValueError, match=rf"generation_config.json: {named}"):
        LLM(with_fields(tmp_path, model, **field))


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model[0], enforce_eager=True, max_model_len=20)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([1] * 61, ValueError, "the encoder's prompt has 61 tokens, more than max_position_embeddings=60"),
        ("a" * 10_000, ValueError, "10,000 characters, more than max_position_embeddings=60 tokens"),
        ({"encoder_prompt": [1], "decoder_prompt": [1] * 20}, ValueError, "leaves no room for output in max_model_len"),
        ({"encoder_prompt": [1], "decoder_prompt": "a" * 9999}, ValueError, "more than max_model_len=20 tokens"),
        ([300], ValueError, "300 is not in the vocabulary"),
        ({"encoder_prompt": [1], "decoder_prompt": [300]}, ValueError, "300 is not in the vocabulary"),
        ({"encoder_prompt": [1], "decoder_prompt": 5}, TypeError, "decoder_prompt must be a string"),
        ({"encoder_prompt": [1], "decoder_prompt": {"prompt_token_ids": 5}}, TypeError, "decoder_prompt must be"),
        ({"encoder_prompt": {"encoder_prompt": [1]}}, ValueError, "encoder_prompt"),
        ({"encoder_prompt": [1], "decoder_prompt": {"prompt": "a", "encoder_prompt": [1]}}, TypeError, "of them"),
        ({"encoder_prompt": []}, ValueError, "the prompt is empty"),
        ({"decoder_prompt": [1]}, ValueError, "decoder_prompt needs encoder_prompt"),
        ({"encoder_prompt": [1], "prompt": "a"}, ValueError, "prompt cannot stand beside encoder_prompt"),
        ({"prompt": "a", "multi_modal_data": {}}, ValueError, "multi_modal_data is not supported by this model"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_prompts_that_are_refused(llm, prompt, error, words):
    with pytest.raises(error, match=words):
        llm.generate(prompt)


def test_models_without_such_an_encoder_refuse_its_prompt():
    with pytest.raises(ValueError, match="encoder_prompt is not supported by this model, which has no encoder"):
        PromptReader(None, Path("m"), 300, 20).read({"encoder_prompt": [1]})


def test_completions_of_the_server_have_the_encoder_s_prompt(model):
    async_llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model[0]), dtype="float64", enforce_eager=True))
    app = create_app(ServerState(["tiny"], llm=async_llm), hosts=["localhost"])
    texts, fields = (
        [prompt["encoder_prompt"]["prompt_token_ids"] for prompt in model[1]],
        {"temperature": 0, "logprobs": 1},
    )

    def ask(path="completions", **body):
        return asyncio.run(call(app, "POST", f"/v1/{path}", fields | body))

    offline = LLM(model[0], dtype="float64", enforce_eager=True)
    expected = offline.generate(
        [{"prompt_token_ids": text} for text in texts], SamplingParams(temperature=0, max_tokens=8)
    )
    reply = ask(prompt=texts, max_tokens=8).json
    assert [choice["text"] for choice in reply["choices"]] == [output.outputs[0].text for output in expected]
    assert reply["usage"]["prompt_tokens"] == sum(len(text) + 1 for text in texts)
    (one,) = ask(prompt="the cat", max_tokens=4).json["choices"]
    (expected,) = offline.generate("the cat", SamplingParams(temperature=0, max_tokens=4))
    assert one["text"] == expected.outputs[0].text
    chat = ask("chat/completions", logprobs=None, messages=[{"role": "user", "content": "the cat"}], max_tokens=4)
    assert chat.status == 200 and chat.json["usage"]["prompt_tokens"] > 4
    for body, param in (
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": [1] * 61}, "prompt"),
        ({"prompt": "a" * 9999}, "prompt"),
    ):
        refused = ask(**body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)
    assert "more than max_position_embeddings=60 tokens" in refused.json["error"]["message"]
    async_llm.shutdown()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 does not work with BartForConditionalGeneration"),
        ({"enable_lora": True}, "enable_lora"),
        ({"runner": "pooling"}, "runner='pooling' does not work"),
        (
            {"enable_prompt_embeds": True},
            "enable_prompt_embeds=True does not work with .*: an encoder reads its prompts",
        ),
        ({"kv_cache_dtype": "fp8", "enforce_eager": True}, "kv_cache_dtype='fp8'"),
        ({"max_model_len": 61}, "max_model_len=61 is more than the model's 60 positions"),
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_refused_by_name(model, options, named):
    with pytest.raises(ValueError, match=named):
        LLM(str(model[0]), **options)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"d_model": 65}, "d_model 65 is not a multiple of decoder_attention_heads=4"),
        ({"encoder_attention_heads": 7}, "d_model 64 is not a multiple of encoder_attention_heads=7"),
        ({"activation_function": "tanh"}, "activation_function 'tanh' is not supported"),
        ({"decoder_vocab_size": 301}, "decoder_vocab_size 301 is not supported; supported: vocab_size=300"),
        ({"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings false is not supported"),
        *(({name: 10**9}, f"{name} must be at most {MAX_SIZES[name]:,}") for name in SIZES),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer"),
        ({"eos_token_id": 300}, "eos_token_id 300 is not in the vocabulary"),
        ({"architectures": ["UMT5ForConditionalGeneration"]}, "UMT5ForConditionalGeneration.* is not supported"),
        ({"architectures": ["MBartModel"]}, "MBartModel.* is not supported"),
    ],
    ids=str,
)
def test_fields_that_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        config_from_dict(tiny_bart().config.to_dict() | {"architectures": ["MarianMTModel"]} | fields)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"feed_forward_proj": "gated-tanh"},
            "feed_forward_proj 'gated-tanh' is not supported; supported: relu, gated-gelu",
        ),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets must be at least 4"),
        ({"relative_attention_max_distance": 4}, "relative_attention_max_distance must be more than half of 8"),
        ({"d_kv": 5}, "head_dim 5 is odd"),
        *(({name: 10**9}, f"{name} must be at most {MAX_SIZES[name]:,}") for name in T5_SIZES),
    ],
    ids=str,
)
def test_fields_of_t5_that_are_refused_by_name(fields, named):
    with pytest.raises(ValueError, match=named):
        config_from_dict(tiny_t5().config.to_dict() | {"architectures": ["T5ForConditionalGeneration"]} | fields)


def test_t5_is_refused_where_it_does_not_run(models):
    with pytest.raises(ValueError, match=r"dtype='float16' does not work with .*: use 'bfloat16'"):
        LLM(models["t5"][0], dtype="float16")
    config = loader.read_config(models["t5"][0])
    told = refused(EngineConfig(), config, torch.device("cuda"), torch.float32, models["t5"][0])
    assert any("a bias for each distance, which does not run on a GPU yet" in message for message in told)
    llm = LLM(models["t5"][0])
    with pytest.raises(ValueError, match="61 tokens, more than n_positions=60"):
        llm.generate([1] * 61)
