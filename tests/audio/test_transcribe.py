"""`nanopage transcribe`, with an engine that says what a test wants, and the formats of transcripts."""

import json

import numpy as np
import pytest
from speech import END, IDS, FakeAligner, ScriptedLLM, encoded, sound, write_whisper
from typer.testing import CliRunner

from nanopage.__main__ import app
from nanopage.aio.async_llm import AsyncLLM
from nanopage.audio import transcription, words
from nanopage.audio.formats import FORMATS

BEGIN, EN, TASK = IDS["<|0.00|>"], IDS["<|en|>"], IDS["<|transcribe|>"]
AA, BB = 256, 257  # " aa", " bb"
ANSWER = [EN, TASK, BEGIN, AA, BEGIN + 100, BEGIN + 100, BB, BEGIN + 170, END], -0.5, 0.01


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def run(directory, tmp_path, monkeypatch):
    """Runs the command in a directory with the files a.wav, b.flac and broken.wav. The engine gives ANSWER."""
    (tmp_path / "a.wav").write_bytes(encoded(sound(4)))
    (tmp_path / "b.flac").write_bytes(encoded(sound(4, 44_100), 44_100, format="FLAC"))
    (tmp_path / "broken.wav").write_bytes(b"RIFF, and nothing else")
    monkeypatch.chdir(tmp_path)
    llm = ScriptedLLM(directory, [ANSWER] * 3)
    llm.given = []
    llm.shutdown = lambda: llm.given.append("shut down")
    monkeypatch.setattr(AsyncLLM, "from_engine_args", lambda args: llm.given.append(args) or llm)

    def invoke(*arguments):
        return CliRunner().invoke(app, ["transcribe", *arguments]), llm

    return invoke


def test_texts_come_in_the_order_of_the_files_and_bad_files_are_named(run):
    result, llm = run("a.wav", "missing.wav", "broken.wav", "b.flac", "--language", "English", "--max-num-seqs", "2")
    assert result.stdout == "a.wav:\naa bb\nb.flac:\naa bb\n" and result.exit_code == 1
    assert "missing.wav: there is no such file" in result.stderr and "broken.wav: the file is broken" in result.stderr
    args, end = llm.given
    assert (args.model, args.max_num_seqs, end) == ("whisper-tiny.en", 2, "shut down")
    result, _ = run("a.wav")
    assert (result.stdout, result.exit_code) == ("aa bb\n", 0)


def test_each_format_is_written_to_a_directory(run, tmp_path):
    srt = "1\n00:00:00,000 --> 00:00:02,000\naa\n\n2\n00:00:02,000 --> 00:00:03,400\nbb\n"
    vtt = "WEBVTT\n\n00:00:00.000 --> 00:00:02.000\naa\n\n00:00:02.000 --> 00:00:03.400\nbb\n"
    for name, want in {"text": "aa bb\n", "srt": srt, "vtt": vtt}.items():
        result, llm = run("a.wav", "--output-format", name, "-o", "made")
        llm.answers += [ANSWER]
        assert result.exit_code == 0 and result.stdout == ""
        assert (tmp_path / "made" / f"a.{FORMATS[name][0]}").read_text() == want
    result, _ = run("a.wav", "-f", "verbose_json", "--task", "translate", "--language", "de")
    made = json.loads(result.stdout)
    assert (made["task"], made["language"], made["duration"], made["text"]) == ("translate", "english", 4, "aa bb")
    assert made["usage"] == {"type": "duration", "seconds": 4}
    assert [segment["id"] for segment in made["segments"]] == [0, 1]
    second = {"seek": 0, "start": 2, "end": 3.4, "text": " bb", "tokens": [BEGIN + 100, BB, BEGIN + 170]}
    assert made["segments"][1].items() >= (second | {"temperature": 0, "avg_logprob": -0.5}).items()


def test_words_are_cues_and_a_list_in_json(run, monkeypatch):
    """A time is moved into that of the segment, which says more about silence."""
    monkeypatch.setattr(words, "Aligner", FakeAligner)
    monkeypatch.setattr(transcription, "Aligner", FakeAligner)
    found = [{"word": "aa", "start": 0, "end": 0.5}, {"word": "bb", "start": 2, "end": 2}]
    for name in ("json", "verbose_json"):
        assert json.loads(run("a.wav", "--word-timestamps", "-f", name)[0].stdout)["words"] == found
    srt = run("a.wav", "--word-timestamps", "-f", "srt")[0].stdout
    assert srt.startswith("1\n00:00:00,000 --> 00:00:00,500\naa\n")


def test_subtitles_cannot_be_broken_by_what_is_said(run, directory):
    _, llm = run("a.wav")
    ids = llm.engine.tokenizer.encode("<b>-->&", False)
    llm.answers = [([EN, TASK, BEGIN, *ids, BEGIN + 50, END], -0.5, 0.01)] * 2
    assert "00:00:00,000 --> 00:00:01,000\n<b>->&\n" in run("a.wav", "-f", "srt")[0].stdout
    assert "00:00:00.000 --> 00:00:01.000\n&lt;b&gt;-&gt;&amp;\n" in run("a.wav", "-f", "vtt")[0].stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.wav", "b.flac", "-f", "srt"], "needs --output-dir"),
        (["a.wav", "--word-timestamps"], "--word-timestamps needs --output-format"),
        (["a.wav", "--language", "klingon"], "'klingon' is not one of Whisper's"),
        (["a.wav", "--temperature", "2"], "temperature=2.0"),
        (["a.wav", "sub/a.wav", "-o", "made"], "2 files would be written to made/a.txt"),
        (["a.wav", "-f", "docx"], "docx"),
        ([], "FILE"),
    ],
)
def test_wrong_usage_is_refused_before_the_model_loads(run, arguments, message):
    result, llm = run(*arguments)
    assert result.exit_code == 2 and message in " ".join(result.stderr.split()) and llm.given == []


def test_no_model_is_loaded_for_files_that_cannot_be_opened(run, tmp_path):
    (tmp_path / "empty.wav").write_bytes(encoded(np.zeros(0)))
    result, llm = run("broken.wav", "empty.wav")
    assert result.exit_code == 1 and llm.given == [] and "no sound in it" in result.stderr


def test_a_failure_of_one_file_leaves_the_others(run):
    _, llm = run("a.wav")
    llm.answers = [ANSWER]  # the second request fails
    result, _ = run("a.wav", "b.flac")
    done, failed = ("a.wav", "b.flac") if "a.wav:" in result.stdout else ("b.flac", "a.wav")  # the first one read
    assert result.exit_code == 1 and result.stdout == f"{done}:\naa bb\n" and failed in result.stderr
