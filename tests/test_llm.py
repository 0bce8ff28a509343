"""LLM, the offline API: its forms of input, its errors before work starts, streams that do not disturb each other."""

import dataclasses
import json
import shutil
import threading

import pytest
from helpers import tiny_model
from rich.progress import Progress

from nanopage import LLM, SamplingParams
from nanopage.grammar.tool_pieces import Reply
from nanopage.llm import GenerationError, GenerationInterrupted
from nanopage.params import RequestOutputKind
from nanopage.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
SAMPLED = SamplingParams(seed=7, max_tokens=10, ignore_eos=True)


def conversation(text):
    return [{"role": "user", "content": text}]


CONVERSATION = [{"role": "user", "content": "where is the cat?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tiny_model(tmp_path_factory.mktemp("model"))
    return LLM(str(path), dtype="float64", device="cpu", max_model_len=128, num_gpu_blocks_override=64)


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        manager = llm.engine.scheduler.block_manager
        assert not llm.engine.has_unfinished_requests()
        assert manager.num_free_blocks == manager.num_blocks
        assert not llm._inboxes


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_an_unknown_option_is_named():
    with pytest.raises(
        TypeError, match=r"LLM\(\) has no option pipeline_size; its options: .*async_scheduling, .*block_size"
    ):
        LLM(pipeline_size=2)
    with pytest.raises(ValueError, match="block_size"):
        LLM(block_size=0)


@pytest.mark.parametrize(("options", "steps"), [({}, [512, 188]), ({"max_num_batched_tokens": 600}, [600, 100])])
def test_a_step_on_a_cpu_has_512_tokens_unless_told_otherwise(tmp_path, options, steps):
    llm = LLM(str(tiny_model(tmp_path, max_position_embeddings=1024)), device="cpu", enforce_eager=True, **options)
    computed = []
    llm.engine.listeners.append(lambda stats: computed.append(stats.prefill_tokens))
    llm.generate({"prompt_token_ids": [5] * 700}, SamplingParams(max_tokens=1), use_tqdm=False)
    assert computed == steps


def test_every_form_of_prompt_is_the_same_prompt(llm):
    ids = llm.get_tokenizer().encode("the cat")
    forms = ["the cat", ids, {"prompt": "the cat"}, {"prompt_token_ids": ids}]
    expected = tokens(llm.generate("the cat", GREEDY))
    for form in forms:
        assert tokens(llm.generate(form, GREEDY)) == expected
    assert tokens(llm.generate(forms, GREEDY)) == 4 * expected


def test_outputs_come_in_the_order_of_the_prompts_with_their_own_parameters(llm):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (9, 1, 5)]
    outputs = llm.generate(["the cat", "the dog", "the house"], params)
    assert [len(t) for t in tokens(outputs)] == [9, 1, 5]
    assert [output.prompt for output in outputs] == ["the cat", "the dog", "the house"]
    assert llm.generate([], GREEDY) == []


def test_one_bad_prompt_among_many_is_named_and_nothing_runs(llm, monkeypatch):
    monkeypatch.setattr(llm.engine, "step", lambda: pytest.fail("work was started"))
    with pytest.raises(ValueError, match=r"prompts\[1\].*empty"):
        llm.generate(["the cat", "", "the dog"], GREEDY)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.generate(["the cat"], [GREEDY, GREEDY])
    with pytest.raises(TypeError, match="prompts must be"):
        llm.generate(42, GREEDY)
    with pytest.raises(TypeError, match="sampling_params"):
        llm.generate("the cat", {"temperature": 0})
    with pytest.raises(ValueError, match="empty"):
        llm.stream("", GREEDY)  # before the first next()
    with pytest.raises(TypeError, match=r"messages\[0\]\['content'\]"):
        llm.chat([{"role": "user", "content": None}], GREEDY)


def test_an_interrupted_generate_leaves_nothing_behind(llm, monkeypatch):
    step, calls = llm.engine.step, []

    def interrupted():
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step()

    short = dataclasses.replace(GREEDY, max_tokens=2)
    expected = tokens(llm.generate(["the cat", "the dog"], [short, GREEDY]))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as raised:
        patch.setattr(llm.engine, "step", interrupted)
        llm.generate(["the cat", "the dog"], [short, GREEDY])
    cat, dog = raised.value.outputs
    assert (cat.outputs[0].token_ids, cat.outputs[0].finish_reason) == (expected[0], "length")
    assert (dog.outputs[0].token_ids, dog.outputs[0].finish_reason) == (expected[1][:3], "abort")


def test_an_interrupted_reader_loses_nothing_that_was_made(llm, monkeypatch):
    """The first two end in one step, and the interrupt comes when the first of them has been read."""
    params = [dataclasses.replace(SAMPLED, max_tokens=3), dataclasses.replace(SAMPLED, max_tokens=3, n=2)]
    params += [dataclasses.replace(SAMPLED, n=2, best_of=3), SAMPLED]
    prompts = ["the cat", "the dog", "the house", "the man"]
    expected = llm.generate(prompts, params, use_tqdm=False)
    monkeypatch.setattr(Progress, "update", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(GenerationInterrupted) as raised:
        llm.generate([*prompts, "never reached " * 9], [*params, SAMPLED])
    cat, dog, house, man, _ = raised.value.outputs
    assert [cat.outputs, dog.outputs] == [output.outputs for output in expected[:2]]
    assert [completion.finish_reason for completion in house.outputs] == ["abort", "abort"]
    assert man.outputs[0].token_ids == expected[3].outputs[0].token_ids[:3]
    assert (man.finished, man.outputs[0].finish_reason) == (True, "abort")


def test_what_had_produced_nothing_is_none(llm, monkeypatch):
    step = llm.engine.step

    def interrupted():
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    monkeypatch.setattr(llm.engine.scheduler.admission, "max_num_seqs", 1)
    with pytest.raises(GenerationInterrupted) as raised:
        llm.generate(["the cat", "the dog"], GREEDY, use_tqdm=False)
    cat, dog = raised.value.outputs
    assert (len(cat.outputs[0].token_ids), dog) == (1, None)


def test_generate_has_no_output_made_for_every_token(llm, monkeypatch):
    outputs, step, params = [], llm.engine.step, dataclasses.replace(GREEDY)

    def counted():
        made = step()
        outputs.extend(made)
        return made

    monkeypatch.setattr(llm.engine, "step", counted)
    assert llm.generate(["the cat", "the dog"], params, use_tqdm=False) == outputs
    outputs.clear()
    assert llm.chat(CONVERSATION, params, use_tqdm=False) == outputs
    assert params.output_kind is RequestOutputKind.CUMULATIVE  # the caller's are not changed
    assert len(list(llm.stream("the cat", params))) == 10
    assert len(list(llm.stream("the cat", dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)))) == 1


def test_an_error_between_steps_keeps_what_was_finished(llm):
    def fail(stats):
        if not stats.running:
            raise OSError("disk full")

    expected = tokens(llm.generate(["the cat", "the dog"], GREEDY))
    llm.engine.listeners.append(fail)
    try:
        with pytest.raises(GenerationError, match="disk full") as raised:
            llm.generate(["the cat", "the dog"], [dataclasses.replace(GREEDY, max_tokens=2), GREEDY])
    finally:
        llm.engine.listeners.remove(fail)
    cat, dog = raised.value.outputs
    assert (cat.outputs[0].token_ids, dog.outputs[0].token_ids) == (expected[0][:2], expected[1])
    assert isinstance(raised.value.__cause__, OSError)


def test_threads_that_share_an_llm_get_their_own_outputs(llm):
    prompts = [f"{animal} {number}" for animal in ("cat", "dog", "man", "house") for number in range(6)]
    expected = dict(zip(prompts, tokens(llm.generate(prompts, GREEDY)), strict=True))
    got, errors = {}, []

    def work(mine):
        try:
            for output in llm.generate(mine[:3], GREEDY, use_tqdm=False):
                got[output.prompt] = output.outputs[0].token_ids
            for prompt in mine[3:]:
                for output in llm.stream(prompt, GREEDY):
                    got[prompt] = output.outputs[0].token_ids
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(prompts[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert got == expected


def test_text_that_cannot_be_a_prompt_is_refused_before_it_is_tokenized(llm, monkeypatch):
    with pytest.raises(ValueError, match=r"lone surrogate, U\+D83D, at character 4"):
        llm.generate("the \ud83d cat", GREEDY)
    monkeypatch.setattr(Tokenizer, "encode", lambda *_: pytest.fail("it was tokenized"))
    for ask in (lambda: llm.generate("the cat " * 10**5, GREEDY), lambda: llm.chat(conversation("a" * 10**6))):
        with pytest.raises(ValueError, match=r"the prompt has [0-9,]+ characters, more than max_model_len=128 tokens"):
            ask()


def test_a_stream_gives_every_token_and_its_deltas_are_the_text(llm):
    (expected,) = llm.generate("the cat", GREEDY)
    outputs = list(llm.stream("the cat", GREEDY))
    assert len(outputs) == 10
    assert "".join(o.outputs[0].delta for o in outputs) == expected.outputs[0].text == outputs[-1].outputs[0].text
    assert [o.finished for o in outputs] == 9 * [False] + [True]


def test_streams_and_generate_can_be_interleaved(llm):
    expected = tokens(llm.generate(["the cat", "the dog", "the house"], GREEDY))
    cat, dog = llm.stream("the cat", GREEDY), llm.stream("the dog", GREEDY)
    seen = [[next(cat), next(cat)], [next(dog)]]
    assert tokens(llm.generate("the house", GREEDY)) == expected[2:]
    seen[1] += list(dog)
    seen[0] += list(cat)
    for outputs, whole in zip(seen, expected, strict=False):
        assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 11))
        assert outputs[-1].outputs[0].token_ids == whole


def test_leaving_a_stream_aborts_its_request(llm):
    for output in llm.stream("the cat", GREEDY):
        if len(output.outputs[0].token_ids) == 3:
            break
    stream = llm.stream("the cat", GREEDY)
    next(stream)
    stream.close()
    llm.stream("the cat", GREEDY)  # never started


def test_chat_is_generate_on_the_template(llm):
    text = llm.get_tokenizer().apply_chat_template(CONVERSATION)
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    expected = tokens(llm.generate(ids, GREEDY))
    assert tokens(llm.chat(CONVERSATION, GREEDY)) == expected
    assert tokens(llm.chat([CONVERSATION, CONVERSATION], GREEDY)) == 2 * expected
    assert [list(llm.stream(CONVERSATION, GREEDY))[-1].outputs[0].token_ids] == expected
    assert llm.count_tokens(CONVERSATION) == len(ids)
    (output,) = llm.chat(CONVERSATION, GREEDY, chat_template="{{ messages[0].content }}")
    assert output.prompt_token_ids == llm.get_tokenizer().encode("where is the cat?")


def test_the_models_own_parameters_are_the_default(tmp_path):
    path = tiny_model(tmp_path)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 7, "eos_token_id": [2, 5]}))
    llm = LLM(str(path), device="cpu", max_model_len=64, num_gpu_blocks_override=8, enforce_eager=True)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.3, top_k=7)
    (given,) = llm.generate("the cat", SamplingParams(temperature=0, logit_bias={5: 100.0}))
    assert (given.outputs[0].token_ids, given.outputs[0].finish_reason) == ([5], "stop")


def test_what_ends_a_reply_is_the_union_of_all_that_the_files_say(tmp_path, caplog):
    path = tiny_model(tmp_path, eos_token_id=[3, 4])  # config.json; <|endoftext|>, token 0, is an end by its name
    (path / "generation_config.json").write_text('{"eos_token_id": 5}')
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": "<|im_start|>"}))  # token 1
    with caplog.at_level("INFO", "nanopage"):
        llm = LLM(str(path), device="cpu", max_model_len=64, num_gpu_blocks_override=8, enforce_eager=True)
    (shown,) = (message for message in caplog.messages if "a reply ends" in message)
    ends = {0, 1, 2, 3, 4, 5}  # 2 is <|im_end|>
    assert llm.engine.model_config.eos_token_ids == ends and all(f" ({end})" in shown for end in ends)
    favored = SamplingParams(temperature=0, max_tokens=4, logit_bias=dict.fromkeys(ends, 100.0))
    for end in ends:
        for options in ({}, {"skip_special_tokens": False}):
            params = dataclasses.replace(favored, logit_bias={end: 100.0}, **options)
            (completion,) = llm.generate("the cat", params)[0].outputs
            assert (completion.token_ids, completion.finish_reason, completion.text) == ([end], "stop", "")
    (later,) = llm.generate("the cat", dataclasses.replace(favored, min_tokens=3))[0].outputs
    assert len(later.token_ids) == 4 and not ends & {*later.token_ids[:3]} and later.token_ids[3] in ends
    (on,) = llm.generate("the cat", dataclasses.replace(favored, ignore_eos=True))[0].outputs
    assert len(on.token_ids) == 4 and ends.issuperset(on.token_ids)


def test_stop_strings_of_a_chat_are_searched_in_the_answer(llm, monkeypatch):
    tokenizer, executor = llm.get_tokenizer(), llm.engine.executor
    template = tokenizer.chat_template.replace("assistant\n", "assistant\n<think>\n")
    monkeypatch.setattr(tokenizer, "chat_template", template)
    result, params = executor.result, SamplingParams(temperature=0, max_tokens=40, stop="cats")

    def say(run, params=params):
        todo = iter([*tokenizer.encode("cats, so</think>\ncacats", add_special_tokens=False), 2])

        def scripted():
            found = result()
            found.token_ids = [next(todo) for _ in found.token_ids]
            return found

        monkeypatch.setattr(executor, "result", scripted)
        *_, output = run(params)
        monkeypatch.setattr(executor, "result", result)
        return output

    chat = say(lambda params: llm.chat(CONVERSATION, params))
    assert say(lambda params: llm.stream(CONVERSATION, params)).outputs[0].text == chat.outputs[0].text
    assert chat.outputs[0].text == "cats, so</think>\nca"
    assert llm.read_replies(chat) == [Reply("cats, so", "ca")]
    everywhere = dataclasses.replace(params, stop_in_reasoning=True)
    assert say(lambda params: llm.chat(CONVERSATION, params), everywhere).outputs[0].text == ""
    assert say(lambda params: llm.generate(chat.prompt, params)).outputs[0].text == ""  # completes a text


@pytest.mark.parametrize(
    "wrong", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 0}, {"top_k": 1.5}, {"min_p": [1]}], ids=str
)
def test_a_recommendation_that_is_not_valid_is_refused_before_weights_are_read(tmp_path, wrong):
    path = tiny_model(tmp_path)
    (path / "generation_config.json").write_text(json.dumps(wrong))
    (path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError) as caught:
        LLM(str(path), device="cpu")
    (name,) = wrong
    assert str(caught.value).startswith(f"{path / 'generation_config.json'}: {name} is not valid: ")


def test_loading_reports_its_progress(tmp_path):
    calls = []
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 8, "enforce_eager": True}
    LLM(str(tiny_model(tmp_path)), on_progress=lambda *numbers: calls.append(numbers), **options)
    done, total = calls[-1]
    assert done == total > calls[0][0] > 0


def test_changing_the_default_parameters_changes_only_a_copy(llm):
    llm.get_default_sampling_params().max_tokens = 3
    assert llm.get_default_sampling_params().max_tokens == 16


def test_dummy_weights_without_a_tokenizer_take_token_ids_and_no_conversations(llm, tmp_path):
    shutil.copy(llm.engine.model_path / "config.json", tmp_path)
    options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 8, "enforce_eager": True}
    dummy = LLM(str(tmp_path), load_format="dummy", **options)
    assert dummy.get_tokenizer() is None
    assert [len(t) for t in tokens(dummy.generate([[5, 6], [7]], GREEDY))] == [10, 10]
    for ask in (dummy.chat, dummy.stream, dummy.count_tokens):
        with pytest.raises(ValueError, match=r"a conversation needs a tokenizer, and .* has no tokenizer\.json"):
            ask(CONVERSATION)
    with pytest.raises(ValueError, match=r"prompts\[1\]: .* give prompt_token_ids"):
        dummy.generate([[5], "the cat"], GREEDY)


def test_logprobs_have_vllms_shape(llm):
    (output,) = llm.generate("the cat", dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=0))
    completion = output.outputs[0]
    assert len(completion.logprobs) == 10
    for token, table in zip(completion.token_ids, completion.logprobs, strict=True):
        assert table[token].rank == 1  # greedy
        assert len(table) == 3
        assert table[token].decoded_token == llm.get_tokenizer().decode([token], skip_special_tokens=False)
    total = sum(table[token].logprob for token, table in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert [list(table) for table in output.prompt_logprobs[1:]] == [[t] for t in output.prompt_token_ids[1:]]
    (plain,) = llm.generate("the cat", GREEDY)
    assert plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is plain.prompt_logprobs is None


def test_the_progress_bar_is_on_stderr_and_can_be_off(llm, capfd, monkeypatch):
    listeners = list(llm.engine.listeners)
    llm.generate(["the cat", "the dog"], GREEDY)
    shown = capfd.readouterr()
    assert "2/2" in shown.err
    assert shown.out == ""
    assert llm.engine.listeners == listeners
    monkeypatch.setattr(llm.engine, "listeners", ())  # nothing can be added
    llm.generate("the cat", GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
