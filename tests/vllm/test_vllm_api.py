"""What docs/vllm.md says of vLLM's offline API: options, parameters, calls, outputs, metrics, profiles."""

import dataclasses
import gzip
import importlib
import json
import re
from functools import partial
from pathlib import Path

import pytest
import typer
from helpers import CHAT_TEMPLATE, finish, tiny_model
from typer.testing import CliRunner

import nanopage
from nanopage import (
    LLM,
    BeamSearchParams,
    EngineArgs,
    EngineConfig,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanopage.checks import vllm_options
from nanopage.outputs import StepStats
from nanopage.utils import FlexibleArgumentParser
from nanopage.vllm.engine_args import takes_engine_options
from nanopage.vllm.metrics import Counter, Gauge, Histogram, Vector

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
OPTIONS = {"device": "cpu", "max_model_len": 128, "num_gpu_blocks_override": 64, "enforce_eager": True}
USER = {"role": "user", "content": "where is the cat?"}
OTHER = {  # of each neutral option, a value that would change something
    "tokenizer_mode": "mistral",
    "tokenizer_revision": "main",
    "revision": "main",
    "code_revision": "main",
    "config_format": "mistral",
    "hf_token": "secret",
    "download_dir": "models",
    "task": "embed",
    "mm_processor_kwargs": {"x": 1},
    "compilation_config": 3,
    "override_generation_config": {"top_k": 1},
    "disable_custom_all_reduce": None,
    "disable_log_stats": "yes",
    "enable_sleep_mode": "yes",
    "structured_outputs": {"json": {}},
    "guided_decoding": {"json": {}},
    "truncate_prompt_tokens": 5,
    "logprob_token_ids": [5],
    "extra_args": {"x": 1},
    "max_cpu_loras": 4,
    "default_mm_loras": {"image": "x"},
    "lora_dtype": "float16",
    "tokenization_kwargs": {"x": 1},
    "chat_template_content_format": "openai",
    "concurrency_limit": 5,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "eos_token_id": [2, 5]}))
    return path


@pytest.fixture(scope="module")
def llm(path):
    return LLM(str(path), **OPTIONS)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def neutral(table):
    return [
        (name, value)
        for name, (values, _) in table.items()
        for value in ((True, False) if values is vllm_options.ANY else values)
    ]


def other(table):
    """A value of each option that is not neutral."""
    for name, (values, _) in table.items():
        if name in OTHER:
            yield name, OTHER[name]
        else:
            (value, *_) = values
            yield name, not value if isinstance(value, bool) else value + 1


# Options of an engine


@pytest.mark.parametrize(("name", "value"), neutral(vllm_options.ENGINE), ids=str)
def test_an_option_that_changes_nothing_is_accepted(name, value):
    assert EngineArgs(**{name: value}) == EngineArgs()


@pytest.mark.parametrize(("name", "value"), other(vllm_options.ENGINE), ids=str)
def test_another_value_is_refused_by_name_and_says_why(name, value):
    for make in (LLM, EngineArgs):
        reason = re.escape(vllm_options.ENGINE[name][1])
        with pytest.raises(ValueError, match=rf"^{name}=.* is not supported, only .*: {reason}"):
            make(**{name: value})


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_an_equal_value_of_another_type_is_not_neutral(value):
    with pytest.raises(ValueError, match="data_parallel_size"):
        EngineArgs(data_parallel_size=value)


def test_none_is_the_default_where_vllm_has_it():
    assert EngineArgs(**dict.fromkeys(vllm_options.DEFAULT_IF_NONE)) == EngineArgs()
    with pytest.raises(ValueError, match="dtype=None"):
        EngineArgs(dtype=None)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto")]
)
def test_dtypes_have_vllms_names(theirs, ours):
    assert EngineArgs(dtype=theirs).dtype == ours


def test_a_tokenizer_can_only_be_the_models(path):
    for tokenizer in (None, path, str(path)):
        assert EngineArgs(model=str(path), tokenizer=tokenizer).model == str(path)
    for model in (None, "org/name", str(path)):
        with pytest.raises(ValueError, match="tokenizer='org/other' is not supported"):
            EngineArgs(model=model, tokenizer="org/other")


def test_options_that_do_not_exist_list_those_that_do():
    with pytest.raises(
        TypeError, match=r"LLM\(\) has no option gpu_memory; its options: allowed_local_media_path, .*, seed"
    ):
        LLM(gpu_memory=0.5)
    with pytest.raises(
        TypeError, match=r"EngineArgs\(\) has no option gpu_memory; its options: allowed_local_media_path"
    ):
        EngineArgs(gpu_memory=0.5)


def test_an_llm_takes_vllms_options(llm, path):
    options = {"tokenizer": str(path), "dtype": "float", "trust_remote_code": False, "seed": None}
    same = LLM(str(path), tensor_parallel_size=1, enable_lora=False, disable_log_stats=False, **options, **OPTIONS)
    assert same.engine.config == dataclasses.replace(llm.engine.config, dtype="float32")
    assert tokens(same.generate("the cat", GREEDY)) == tokens(llm.generate("the cat", GREEDY))


def test_generation_config_chooses_the_default_parameters(llm, path):
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3)
    plain = LLM(str(path), generation_config="vllm", **OPTIONS)
    assert plain.get_default_sampling_params() == SamplingParams()
    assert plain.engine.model_config.eos_token_ids == {0, 2, 5}  # as EngineConfig says


# Parameters


def test_sampling_parameters_have_vllms_order():
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.7, 0.9, 40, 0.05, 7, ["x"], [3], True, 20, 2, 4, 0)
    assert params == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=7,
        stop=["x"],
        stop_token_ids=[3],
        ignore_eos=True,
        max_tokens=20,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=0,
    )


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")
    clone.logit_bias.clear()
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=3)


@pytest.mark.parametrize(
    ("make", "table"),
    [(SamplingParams, vllm_options.SAMPLING), (lambda **o: BeamSearchParams(2, **o), vllm_options.BEAM_SEARCH)],
    ids=["SamplingParams", "BeamSearchParams"],
)
def test_parameters_that_change_nothing_are_accepted_and_others_refused(make, table):
    for name, value in neutral(table):
        assert make(**{name: value}) == make()
    for name, value in other(table):
        with pytest.raises(ValueError, match=rf"^{name}=.* is not supported"):
            make(**{name: value})


def test_parameters_that_do_not_exist_list_those_that_do():
    with pytest.raises(
        TypeError, match=r"SamplingParams\(\) has no option top_q; its options: allowed_token_ids, .*top_p"
    ):
        SamplingParams(top_q=1)
    with pytest.raises(TypeError, match=r"BeamSearchParams\(\) has no option beams; its options: early_stopping"):
        BeamSearchParams(beams=1)


def test_the_width_of_a_search_has_vllms_name_too():
    params = BeamSearchParams(beam_width=3, max_tokens=5)
    assert params == BeamSearchParams(3, 5) == BeamSearchParams(width=3, max_tokens=5)
    assert params.beam_width == 3
    for both in ({"width": 3}, {"width": 4}):
        with pytest.raises(TypeError, match="both width and beam_width"):
            BeamSearchParams(beam_width=3, **both)
    with pytest.raises(TypeError, match="both width and beam_width"):
        BeamSearchParams(3, beam_width=3)
    with pytest.raises(TypeError, match="width"):
        BeamSearchParams(max_tokens=5)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("sampling_params", ["BeamSearchParams", "RequestOutputKind", "SamplingParams"]),
        ("outputs", ["BeamSearchSequence", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]),
        ("inputs", ["TextPrompt", "TokensPrompt"]),
        ("utils", ["FlexibleArgumentParser"]),
        ("vllm.metrics", ["Counter", "Gauge", "Histogram", "Vector"]),
    ],
)
def test_names_are_where_scripts_import_them_from(module, names):
    for name in names:
        found = getattr(importlib.import_module(f"nanopage.{module}"), name)
        assert name not in nanopage.__all__ or found is getattr(nanopage, name)


# Prompts and outputs


def test_prompts_have_vllms_forms(llm):
    ids = llm.get_tokenizer().encode("the cat")
    (expected,) = llm.generate(prompts="the cat", sampling_params=GREEDY, lora_request=None)
    forms = [TextPrompt(prompt="the cat"), TokensPrompt(prompt_token_ids=ids)]
    assert tokens(llm.generate(forms, GREEDY)) == 2 * [expected.outputs[0].token_ids]
    (output,) = llm.generate({"prompt": "shown", "prompt_token_ids": ids}, GREEDY)
    assert (output.prompt, tokens([output])) == ("shown", tokens([expected]))


def test_token_ids_can_be_an_argument_of_their_own(llm):
    ids = [[5, 6, 7], [8, 9]]
    expected = llm.generate(ids, GREEDY)
    for texts in (None, ["a", "b"]):
        outputs = llm.generate(texts, GREEDY, prompt_token_ids=ids)
        assert tokens(outputs) == tokens(expected)
        assert [output.prompt for output in outputs] == (texts or [None, None])
    assert tokens(llm.generate(prompt_token_ids=ids[0], sampling_params=GREEDY)) == tokens(expected[:1])
    for wrong, error, message in (
        ({"prompts": ["a"], "prompt_token_ids": ids}, ValueError, "1 prompts beside 2 prompt_token_ids"),
        ({"prompts": [[1]], "prompt_token_ids": [[1]]}, TypeError, "must be their texts"),
        ({"prompt_token_ids": "ids"}, TypeError, "prompt_token_ids must be token ids"),
        ({}, TypeError, "needs prompts"),
    ):
        with pytest.raises(error, match=message):
            llm.generate(sampling_params=GREEDY, **wrong)


def test_one_priority_is_that_of_every_prompt(path):
    llm, seen = LLM(str(path), scheduling_policy="priority", **OPTIONS), []
    submit = llm.engine.submit
    llm.engine.submit = lambda request: (seen.append(request.group.priority), submit(request))
    for priority in (3, [3, 3]):
        llm.generate(["a", "b"], GREEDY, priority=priority)
        llm.chat([[USER], [USER]], GREEDY, priority=priority)
    assert seen == [3] * 8
    for wrong in (True, "3", 1.0):
        with pytest.raises(TypeError, match=r"^(prompts.0.: )?priority must be an integer"):
            llm.chat([[USER], [USER]], GREEDY, priority=wrong)


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("generate", ["tokenization_kwargs"]),
        ("beam_search", ["concurrency_limit"]),
        ("chat", ["tokenization_kwargs", "mm_processor_kwargs", "chat_template_content_format"]),
    ],
)
def test_arguments_of_a_call_that_change_nothing_are_accepted_and_others_refused(llm, method, names):
    prompt = [USER] if method == "chat" else "the cat"
    params = BeamSearchParams(2, 3) if method == "beam_search" else GREEDY
    ask = getattr(llm, method)
    expected = tokens(ask(prompt, params))
    for name in names:
        assert tokens(ask(prompt, params, **{name: vllm_options.CALL[name][0][0]})) == expected
        with pytest.raises(ValueError, match=rf"^{name}=.* is not supported"):
            ask(prompt, params, **{name: OTHER[name]})
    with pytest.raises(TypeError, match="use_tqdm must be True or False, not 5"):
        ask(prompt, params, use_tqdm=5)


def test_a_search_returns_vllms_sequences(llm):
    (output,) = llm.beam_search(["the cat"], BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(output.sequences) == len(output.outputs) == 3
    for sequence, completion in zip(output.sequences, output.outputs, strict=True):
        assert sequence.tokens == output.prompt_token_ids + completion.token_ids
        assert sequence.cum_logprob == completion.cumulative_logprob < 0
        assert sequence.text == llm.get_tokenizer().decode(sequence.tokens, skip_special_tokens=False)
        assert sequence.text.startswith("the cat") and sequence.finish_reason == completion.finish_reason
    assert llm.generate("the cat", GREEDY)[0].sequences is None


def test_a_sequence_that_ends_says_by_which_token(tmp_path):
    path, ends = tiny_model(tmp_path), list(range(0, 300, 3))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (output,) = LLM(str(path), **OPTIONS).beam_search(["the cat"], BeamSearchParams(beam_width=4, max_tokens=4))
    ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
    assert ended and all(sequence.stop_reason == sequence.tokens[-1] for sequence in ended)
    assert all(sequence.stop_reason in ends for sequence in ended)


# Conversations


def test_the_prompt_of_a_conversation_is_its_text(llm):
    (output,) = llm.chat([USER], GREEDY)
    assert output.prompt == "<|im_start|>user\nwhere is the cat?<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)


def test_chat_has_vllms_arguments_in_vllms_order(llm):
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = "{{ tools | tojson }}{% if not enable_thinking %}quick{% endif %}" + CHAT_TEMPLATE
    messages = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "cat"}]}]
    messages.append({"role": "assistant", "content": "The c"})
    options = ("auto", False, True, tools, {"enable_thinking": False})
    (output,) = llm.chat(messages, GREEDY, False, None, None, template, *options)
    start = json.dumps(tools) + "quick"
    assert output.prompt == start + "<|im_start|>user\nthe\ncat<|im_end|>\n<|im_start|>assistant\nThe c"
    by_name = llm.chat(
        messages,
        sampling_params=GREEDY,
        chat_template=template,
        chat_template_content_format="string",
        add_generation_prompt=False,
        continue_final_message=True,
        tools=tools,
        chat_template_kwargs={"enable_thinking": False},
    )
    assert tokens(by_name) == tokens([output])


@pytest.mark.parametrize("part", ["image_url", "image", "input_audio", "video_url", "refusal", None])
def test_other_parts_than_text_are_refused(llm, part):
    content = [{"type": "text", "text": "x"}, {"type": part, part or "text": "y"}]
    error = " has an image" if part in ("image_url", "image") else rf"\[1\] is of type {part!r}"
    with pytest.raises(ValueError, match=rf"messages\[0\]\['content'\]{error}"):
        llm.chat([{"role": "user", "content": content}], GREEDY)


# The engine


def test_the_engine_has_vllms_name(llm):
    assert llm.llm_engine is llm.engine


def test_resetting_the_prefix_cache_forgets_prefixes(llm):
    prompt = list(range(10, 60))
    llm.generate(prompt, GREEDY)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 48
    assert llm.reset_prefix_cache() is True
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == 0


def test_metrics_count_what_happened(path):
    llm = LLM(str(path), **OPTIONS)
    prompt = list(range(10, 43))  # two full blocks and a token
    llm.generate(prompt, GREEDY)
    llm.generate([prompt, [5, 6]], [dataclasses.replace(GREEDY, max_tokens=3), SamplingParams(n=2, max_tokens=1)])
    stream = llm.stream([7], GREEDY)
    next(stream)
    running = {metric.name: metric for metric in llm.get_metrics()}
    assert running["vllm:num_requests_running"].value == 1
    stream.close()

    metrics = llm.get_metrics()
    by_name = {metric.name: metric for metric in metrics if metric.name != "vllm:request_success"}
    values = {name: metric.value for name, metric in by_name.items() if isinstance(metric, Counter | Gauge)}
    assert values | {"vllm:kv_cache_usage_perc": 0} == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:cache_config_info": 1,
        "vllm:prompt_tokens": 33 + 33 + 2 + 1,
        "vllm:generation_tokens": 6 + 3 + 2 + 1,
        "vllm:num_preemptions": 0,
        "vllm:prefix_cache_queries": 33 + 33 + 2 + 1,
        "vllm:prefix_cache_hits": 32,
    }
    cache_labels = by_name.pop("vllm:cache_config_info").labels
    assert (cache_labels["block_size"], cache_labels["num_gpu_blocks"]) == ("16", "64")
    assert all(metric.labels == {"model_name": path.name, "engine": "0"} for metric in by_name.values())
    ended = {m.labels["finished_reason"]: m.value for m in metrics if m.name == "vllm:request_success"}
    assert (sum(ended.values()), ended["abort"], ended["error"]) == (5, 1, 0)
    prompts, lengths = by_name["vllm:request_prompt_tokens"], by_name["vllm:request_generation_tokens"]
    assert isinstance(prompts, Histogram) and not any(isinstance(metric, Vector) for metric in metrics)
    assert (prompts.count, prompts.sum) == (4, 69)
    assert (prompts.buckets["1.0"], prompts.buckets["2.0"], prompts.buckets["20.0"], prompts.buckets["50.0"]) == (
        1,
        2,
        2,
        4,
    )
    assert (lengths.count, lengths.sum, lengths.buckets["+Inf"]) == (5, 12, 5)
    assert by_name["vllm:time_to_first_token_seconds"].count == 4
    assert by_name["vllm:e2e_request_latency_seconds"].count == 4
    assert by_name["vllm:inter_token_latency_seconds"].count == 5 + 2
    computed, sampled = 33 + 1 + 2 + 1, 6 + 3 + 2 + 1
    assert by_name["vllm:iteration_tokens_total"].sum == computed + sampled


def test_metrics_count_drafts_if_there_are_any(path):
    llm = LLM(str(path), speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **OPTIONS)
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    assert by_name[name] == Vector(name, {"model_name": path.name, "engine": "0"}, [0, 0, 0])
    for accepted in (0, 2, 3, 1):
        stats = StepStats()
        stats.count_draft(3, accepted)
        llm._metrics.count(stats)
    by_name = {metric.name: metric for metric in llm.get_metrics()}
    assert by_name[name].values == [3, 2, 1]
    counts = [by_name[f"vllm:spec_decode_num_{what}"].value for what in ("drafts", "draft_tokens", "accepted_tokens")]
    assert counts == [4, 12, 6]


def test_the_cache_is_in_use_while_a_request_runs(path):
    llm = LLM(str(path), **OPTIONS)
    stream = llm.stream([7] * 40, GREEDY)
    next(stream)
    (usage,) = (metric for metric in llm.get_metrics() if metric.name == "vllm:kv_cache_usage_perc")
    assert usage.value == 3 / 64
    stream.close()


def test_a_profile_is_written_where_the_log_says(path, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    for config, folder in ((None, "nanopage_profile"), ({"profiler": "torch", "torch_profiler_dir": "a/b"}, "a/b")):
        llm = LLM(str(path), profiler_config=config, **OPTIONS)
        with pytest.raises(RuntimeError, match="has not been started"):
            llm.stop_profile()
        llm.start_profile("mine")
        with pytest.raises(RuntimeError, match="started already"):
            llm.start_profile()
        llm.generate("the cat", GREEDY)
        llm.stop_profile()
        (file,) = Path(folder).iterdir()
        assert file.name.startswith("mine-") and f"profile written to {file}" in caplog.text
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert any("linear" in event.get("name", "") for event in events)
    with pytest.raises(ValueError, match="profile_prefix must be the beginning of a file's name"):
        llm.start_profile("../x")


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"profiler": "cuda"}, ValueError, "profiler 'cuda' is not supported, only 'torch'"),
        ({"max_iterations": 2}, ValueError, "fields that are not supported: max_iterations"),
        ({"torch_profiler_dir": 5}, TypeError, "torch_profiler_dir must be a path, not 5"),
        ("torch", TypeError, "profiler_config must be a dict, not 'torch'"),
    ],
)
def test_a_profiler_that_is_not_there_is_refused_before_weights_are_read(config, error, named):
    with pytest.raises(error, match=named):
        LLM("/no/such/model", profiler_config=config)


# Engine arguments


def test_engine_arguments_make_an_engine(path):
    args = EngineArgs(model=str(path), tensor_parallel_size=1, **OPTIONS)
    assert isinstance(args, EngineConfig)
    engine = LLMEngine.from_engine_args(args)
    engine.add_request("a", "the cat", GREEDY)
    output = finish(engine)["a"]
    assert len(output.outputs[0].token_ids) == 6
    again = LLM(**dataclasses.asdict(args))
    assert tokens(again.generate("the cat", GREEDY)) == tokens([output])


def test_engine_arguments_come_from_a_command_line():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    assert EngineArgs.from_cli_args(parser.parse_args([])) == EngineArgs()
    line = (
        "--model org/name --max_model_len 64 --max-num-seqs=8 --gpu_memory_utilization=0.5 --no-enable-prefix-caching"
    )
    args = parser.parse_args([*line.split(), "--enforce-eager", "--dtype", "half", "--max_tokens", "5"])
    assert args.max_tokens == 5
    assert EngineArgs.from_cli_args(args) == EngineArgs(
        model="org/name",
        max_model_len=64,
        max_num_seqs=8,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        enforce_eager=True,
        dtype="float16",
    )


def test_the_help_of_every_option_is_what_engine_configs_docstring_says():
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert all(action.help for action in parser._actions)
    words = " ".join(parser.format_help().split())
    assert "--block-size BLOCK_SIZE Tokens per KV cache block; on a GPU a power of two. (default: 16)" in words
    assert "--preemption-mode recompute|swap What happens to a request's KV" in words
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes_engine_options("device", "block_size", "enforce_eager", "async_scheduling", "enable_prefix_caching")
    def command(*, switches: dict, other: int = 1) -> None:
        print(switches, other)

    run = partial(CliRunner().invoke, app)
    words = " ".join(run(["--help"], env={"COLUMNS": "80"}).output.split())
    assert '--device auto|cpu|cuda "auto" is CUDA if present, else the CPU. [default: auto]' in words
    assert "--eager Compile and capture nothing. --async-scheduling / --no-async-scheduling Submit" in words
    line = "--device cpu --block-size 8 --eager --no-async-scheduling --no-enable-prefix-caching --other 2"
    given = {"device": "cpu", "block_size": 8, "enforce_eager": True, "async_scheduling": False}
    assert run(line.split()).output == f"{given | {'enable_prefix_caching': False}} 2\n"
    assert "'async_scheduling': None, 'enable_prefix_caching': True} 1" in run([]).output


def test_a_dict_on_a_command_line_is_json(capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--speculative_config", '{"method": "ngram", "num_speculative_tokens": 3}'])
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    assert EngineArgs.from_cli_args(args).speculative_config == drafts
    for text, message in (("{'method'}", "is not JSON"), ("[1]", "is not a JSON object")):
        with pytest.raises(SystemExit):
            parser.parse_args([f"--speculative-config={text}"])
        assert message in capsys.readouterr().err


def test_a_group_of_a_parser_takes_engine_arguments_and_defaults():
    parser = FlexibleArgumentParser()
    group = parser.add_argument_group("Engine arguments")
    EngineArgs.add_cli_args(group)
    group.set_defaults(model="org/name")
    args = vars(parser.parse_args([]))
    assert EngineConfig(**args) == EngineConfig(model="org/name")


@pytest.mark.parametrize("line", ["--data_parallel_size 1", "--max-model-len many", "--no-such-option"])
def test_a_command_line_with_something_else_is_refused(line, capsys):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert line.split()[0].replace("_", "-") in capsys.readouterr().err
