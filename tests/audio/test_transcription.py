"""Whisper's rules, windows and fallbacks, beside transformers and with an engine that says what a test wants."""

import asyncio
import math

import numpy as np
import pytest
from speech import END, IDS, SUPPRESSED, ScriptedLLM, TransformersLLM, encoded, sound, write_whisper
from transformers import WhisperFeatureExtractor

from nanopage import AsyncLLM, EngineArgs
from nanopage.audio import transcription
from nanopage.audio.files import Sound
from nanopage.audio.rules import read_speech_tokens, rules_for
from nanopage.audio.transcription import Options, Transcription, divide

BEGIN = IDS["<|0.00|>"]
EN, DE, TASK = IDS["<|en|>"], IDS["<|de|>"], IDS["<|transcribe|>"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


def transcribe(llm, content, **options):
    job = Transcription(llm, read_speech_tokens(llm.engine), Sound(content), Options(**options))

    async def run():
        return [len(found) async for found in job.run()]

    return job, asyncio.run(run())


def at(seconds):
    return BEGIN + round(seconds * 50)


def said(*tokens, logprob=-0.5, no_speech=0.01, language=EN):
    return [language, TASK, *tokens, END], logprob, no_speech


def allowed(rules, output):
    bits = np.unpackbits(np.frombuffer(rules.allowed(output), np.uint8), bitorder="little")
    return {*np.flatnonzero(bits).tolist()}


def test_segments_are_those_of_transformers(directory, monkeypatch):
    """Three windows, each with the text of those before as its context."""
    monkeypatch.setattr(transcription, "MIN_LOGPROB", -math.inf)  # random weights are sure of nothing
    monkeypatch.setattr(transcription, "MAX_COMPRESSION", math.inf)
    samples, llm = sound(62), TransformersLLM(directory)
    features = WhisperFeatureExtractor()(
        samples,
        sampling_rate=16_000,
        truncation=False,
        padding="longest",
        return_attention_mask=True,
        return_tensors="pt",
    )
    job = Transcription(
        llm,
        read_speech_tokens(llm.engine),
        Sound(encoded(samples, subtype="FLOAT")),
        Options(language="en", uses_context=True),
    )

    def features_of_window(_):  # transformers makes the features of all windows at once
        part = features["input_features"][0][:, round(job.position * 100) :][:, :3000].numpy()
        return np.pad(part, ((0, 0), (0, 3000 - part.shape[1])))

    async def run():
        return [found async for found in job.run()]

    llm.features = features_of_window
    assert len(asyncio.run(run())) == 3
    limits = dict.fromkeys(("no_speech_threshold", "logprob_threshold", "compression_ratio_threshold"))
    options = {"return_timestamps": True, "return_segments": True, "condition_on_prev_tokens": True}
    made = llm.model.generate(**features, language="en", task="transcribe", temperature=(0.0,), **options, **limits)
    wanted = []
    for segment in made["segments"][0]:
        tokens = segment["tokens"].tolist()
        if tokens[-1] == tokens[-2]:  # the beginning of the next segment, which transformers keeps here
            tokens.pop()
        wanted.append((*(pytest.approx(float(segment[name])) for name in ("start", "end")), tokens))
    assert len(wanted) > 4
    assert [(segment.start, segment.end, segment.tokens) for segment in job.segments] == wanted


def test_the_engine_gives_what_transformers_gives(directory):
    """Several sounds in the batches of one engine: tokens, log-probabilities after the rules, and no speech."""
    contents = [encoded(sound(seconds, seed=seconds)) for seconds in (7, 31, 12)]
    slow = TransformersLLM(directory)
    tokens = read_speech_tokens(slow.engine)
    wanted = [asyncio.run(attempt_at(slow, tokens, content)) for content in contents]
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(directory), device="cpu", dtype="float32", kv_cache_gib=0.1))
    try:

        async def all_at_once():
            return await asyncio.gather(*(attempt_at(llm, read_speech_tokens(llm.engine), each) for each in contents))

        made = asyncio.run(all_at_once())
    finally:
        llm.shutdown()
    for ours, theirs in zip(made, wanted, strict=True):
        assert ours.tokens == theirs.tokens and ours.language == theirs.language and len(ours.tokens) > 3
        assert ours.avg_logprob == pytest.approx(theirs.avg_logprob, abs=1e-4)
        assert ours.no_speech_prob == pytest.approx(theirs.no_speech_prob, rel=1e-3)


async def attempt_at(llm, tokens, content):
    """The first attempt at the first window."""
    opened = Sound(content)
    return await Transcription(llm, tokens, opened).attempt(opened.window(0), 0.0, 0)


def test_rules_say_what_may_follow(directory):
    llm = ScriptedLLM(directory, [])
    tokens = read_speech_tokens(llm.engine)
    text, times = {*range(END)} - {*SUPPRESSED}, {*range(BEGIN, BEGIN + 1501)}
    found, english = rules_for(tokens, None, "translate"), rules_for(tokens, "en", "transcribe")
    assert allowed(found, []) == {*tokens.languages.values()} and len(tokens.languages) == 100
    assert allowed(found, [DE]) == {IDS["<|translate|>"]}
    assert allowed(english, []) == {EN} and allowed(english, [EN]) == {TASK}
    cases = {
        (): {*range(BEGIN, BEGIN + 51)},
        (at(0.5),): {*text, END},
        (at(0.5), 20): {*text, END, *range(at(0.52), at(30) + 1)},
        (at(0.5), 20, at(2)): {END, *range(at(2), at(30) + 1)},
        (at(0.5), 20, at(2), at(2)): {*text, END},
        (at(0.5), 20, at(30), at(30), 21): {*text, END},
    }
    for output, want in cases.items():
        assert allowed(english, [EN, TASK, *output]) == want, output
    draft = [20, at(2), at(1), 5]
    masks = english.follow([EN, TASK, at(0.5)], draft)  # the third token of the draft is not allowed
    assert masks == [english.allowed([EN, TASK, at(0.5), *draft[:count]]) for count in range(3)]
    assert times >= allowed(english, [EN, TASK])


@pytest.mark.parametrize(
    ("tokens", "num_samples", "segments", "done"),
    [
        ([], 480_000, [(0, 1500, [])], 480_000),
        ([at(0), 5, 6], 480_000, [(0, 1500, [at(0), 5, 6])], 480_000),
        ([at(0), 5, at(2)], 480_000, [(0, 100, [at(0), 5, at(2)])], 480_000),
        ([at(0), 5, at(2), at(2), 6], 480_000, [(0, 100, [at(0), 5, at(2)])], 32_000),
        (
            [at(0), 5, at(2), at(3), 6, at(4)],
            80_000,
            [(0, 100, [at(0), 5, at(2)]), (150, 200, [at(3), 6, at(4)])],
            80_000,
        ),
        ([at(0), 5, at(9), at(9)], 80_000, [(0, 450, [at(0), 5, at(9)])], 80_000),
    ],
)
def test_a_window_is_divided_at_pairs_of_timestamps(tokens, num_samples, segments, done):
    assert divide(tokens, BEGIN, num_samples) == (segments, done)


def test_windows_follow_timestamps_and_have_the_text_before_as_context(directory):
    first = said(at(0), 20, at(10), at(10), 21, at(25.5), at(25.5), 22)
    llm = ScriptedLLM(directory, [first, said(at(0), 23, at(14.5))])
    job, counts = transcribe(llm, encoded(sound(40)), prompt=" bb cc<|endoftext|> ", uses_context=True)
    assert counts == [2, 1] and job.position == 40 and job.language == "en"
    assert [(each.index, each.window, each.start, each.end) for each in job.segments] == [
        (0, 0, 0, 10),
        (1, 0, 10, 25.5),
        (2, 25.5, 25.5, 40),
    ]
    assert job.segments[0].tokens == [at(0), 20, at(10)] and job.text == "".join(each.text for each in job.segments)
    (before, params), (later, later_params) = llm.requests
    words = llm.engine.tokenizer.encode(" bb cc", False)
    assert before == [IDS["<|startofprev|>"], *words, END + 1]  # special tokens of a client's text are left out
    assert later == [before[0], *words, at(0), 20, at(10), at(10), 21, at(25.5), END + 1]
    assert params.temperature == 0 and params.max_tokens == 34
    assert len(allowed(params.structured_outputs, [])) == 100
    assert allowed(later_params.structured_outputs, []) == {EN}  # the language has been found
    llm = ScriptedLLM(directory, [first, said(at(0), 23, at(14.5))])
    transcribe(llm, encoded(sound(40)), prompt="bb")  # a prompt alone is that of the first window
    assert [prompt[0] for prompt, _ in llm.requests] == [IDS["<|startofprev|>"], END + 1]


def test_poor_texts_are_tried_again_at_higher_temperatures(directory):
    poor, repeated = said(at(0), 20, logprob=-1.2), said(at(0), *[20, 21] * 100, at(9))
    llm = ScriptedLLM(directory, [poor, repeated, said(at(0), 22, at(9)), said(at(0), 23, at(1))])
    job, _ = transcribe(llm, encoded(sound(31)), uses_context=True)
    assert [params.temperature for _, params in llm.requests] == [0, 0.2, 0.4, 0]
    assert [params.seed for _, params in llm.requests] == [0, 1, 2, 0]
    assert job.segments[0].temperature == 0.4 and job.segments[0].avg_logprob == -0.5
    assert llm.requests[-1][0] == [IDS["<|startofprev|>"], at(0), 22, at(9), END + 1]
    llm = ScriptedLLM(directory, [poor] * 6 + [said(at(0), 23, at(1))])  # the last attempt is kept, but is no context
    job, _ = transcribe(llm, encoded(sound(31)), uses_context=True)
    assert [round(params.temperature, 1) for _, params in llm.requests] == [0, 0.2, 0.4, 0.6, 0.8, 1, 0]
    assert job.segments[0].temperature == 1 and llm.requests[-1][0] == [END + 1]
    llm = ScriptedLLM(directory, [poor] * 2)
    transcribe(llm, encoded(sound(1)), temperature=0.9)
    assert [params.temperature for _, params in llm.requests] == [0.9, 1]


def test_a_poor_text_is_tried_again_without_its_context(directory):
    repeated, words = said(at(0), *[20, 21] * 100, at(29)), [said(at(0), token, at(29)) for token in (22, 23, 24)]
    llm = ScriptedLLM(directory, [words[0], repeated, repeated, words[1], words[2]])
    job, _ = transcribe(llm, encoded(sound(90)), uses_context=True)
    before, start = IDS["<|startofprev|>"], END + 1
    assert [(params.temperature, params.seed, prompt) for prompt, params in llm.requests] == [
        (0, 0, [start]),
        (0, 0, [before, at(0), 22, at(29), start]),
        (0, 1, [start]),
        (0.2, 2, [start]),
        (0, 0, [before, at(0), 23, at(29), start]),
    ]
    assert [segment.tokens[1] for segment in job.segments] == [22, 23, 24]


def test_nothing_is_said_where_nobody_speaks(directory):
    unlikely = {"logprob": -1.5, "no_speech": 0.7}
    llm = ScriptedLLM(directory, [said(at(0), 20, at(1), **unlikely)])
    job, counts = transcribe(llm, encoded(sound(5)))
    assert counts == [0] and job.text == "" and job.position == 5
    llm = ScriptedLLM(directory, [said(at(0), 20, at(1), no_speech=0.7)])  # likely all the same
    job, _ = transcribe(llm, encoded(sound(5)))
    assert len(job.segments) == 1 and job.segments[0].no_speech_prob == pytest.approx(0.7)
    llm = ScriptedLLM(directory, [])  # digital silence, and a rest of less than 0.1 seconds
    assert transcribe(llm, encoded(np.zeros(30 * 16_000 + 1_599)))[1] == [0]


def test_what_a_model_does_not_know_is_refused(directory):
    llm = ScriptedLLM(directory, [])
    tokens, content = read_speech_tokens(llm.engine), encoded(sound(1))
    for options in ({"temperature": 1.1}, {"task": "sing"}, {"temperature": math.nan}):
        with pytest.raises(ValueError, match=next(iter(options))):
            transcribe(llm, content, **options)
    with pytest.raises(ValueError, match="language 'xx'"):
        rules_for(tokens, "xx", "transcribe")
    english = llm.engine.input_processor.prompts.path / "generation_config.json"
    before = english.read_text()
    english.write_text(before.replace('"is_multilingual": true', '"is_multilingual": false'))
    try:
        tokens = read_speech_tokens(llm.engine)
    finally:
        english.write_text(before)
    assert tokens.languages == {} and rules_for(tokens, "en", "transcribe").forced == ()
    for language, task in (("de", "transcribe"), (None, "translate")):
        with pytest.raises(ValueError, match="English alone"):
            rules_for(tokens, language, task)
    llm.engine.model_config.architecture = "LlamaForCausalLM"
    with pytest.raises(ValueError, match="does not transcribe"):
        read_speech_tokens(llm.engine)
