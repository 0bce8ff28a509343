"""Timestamps of words: beside transformers' timestamps of tokens, and what becomes of them."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import random_tokens, save_tokenizer, tiny_whisper
from speech import encoded, sound, write_whisper
from transformers.generation.utils import GenerateEncoderDecoderOutput
from transformers.models.whisper.generation_whisper import _dynamic_time_warping

from nanopage import AsyncLLM, EngineArgs
from nanopage.audio import transcription
from nanopage.audio.files import Sound
from nanopage.audio.mel import log_mel
from nanopage.audio.rules import read_speech_tokens
from nanopage.audio.transcription import Options, Transcription
from nanopage.audio.words import Aligner, align, divide_words, read_heads, warp
from nanopage.weights import loader

HEADS, NUM_PROMPT, NUM_FRAMES = [[0, 1], [2, 3], [2, 0]], 4, 1100


@pytest.mark.parametrize("width", [7, 3])
def test_times_of_tokens_are_those_of_transformers(tmp_path, width):
    hf_model = tiny_whisper(seed=1, init_std=0.02, median_filter_width=width)
    hf_model.set_attn_implementation("eager")
    hf_model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    (tokens,), features = random_tokens([40]), torch.from_numpy(log_mel(sound(11)))
    with torch.inference_mode():
        outputs = hf_model(features[None], decoder_input_ids=torch.tensor([tokens]), output_attentions=True)
        made = GenerateEncoderDecoderOutput(torch.tensor([tokens]), cross_attentions=(outputs.cross_attentions,))
        wanted = hf_model._extract_token_timestamps(made, HEADS, 0.02, NUM_FRAMES, NUM_PROMPT)[0, NUM_PROMPT:-1]
    config = loader.read_config(tmp_path)
    model = loader.load_model(tmp_path, config, torch.float32, torch.device("cpu"))
    encoded = model.encoders["audio"]({"spectrogram": features[None]})[0]
    weights = model.attention_to_sound(encoded, tokens, read_heads(HEADS, 3, 4)).numpy()
    for ours, (layer, head) in zip(weights, HEADS, strict=True):
        np.testing.assert_allclose(ours, outputs.cross_attentions[layer][0, head], atol=1e-5)
    rows = weights[:, NUM_PROMPT:, : NUM_FRAMES // 2]
    times = np.array(align(rows, config.mixer["median_filter_width"], slice(None))) * 0.02
    np.testing.assert_allclose(times, wanted, atol=1e-5)
    assert len({*times.tolist()}) > 7


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (9, 1), (3, 2), (5, 40), (30, 30)], ids=str)
def test_the_cheapest_path_is_that_of_transformers(shape):
    costs = np.random.default_rng(0).normal(size=shape)
    rows, columns = _dynamic_time_warping(costs)
    assert warp(costs) == columns[np.diff(rows, prepend=-1) > 0].tolist()


@pytest.mark.parametrize(
    ("pieces", "spaced", "words", "spoken"),
    [
        (["Hel", "lo", ",", " (", "a", ")", " d", "on", "'t", "."], True, "Hello,| (a)| don't.", "Hello| (a| don't"),
        ([" 3", ".", "5", " -", " well", "-", "known", " !"], True, " 3.5| - well-known !", " 3.5| - well-known"),
        ([" “", "A", "”", " «", " b", " »", "?"], True, " “A”| « b »?", " “A| « b"),
        (["你", "好", "，", "「", "天", "」", "。"], False, "你|好，|「天」。", "你|好|「天"),
        ([b" \xc3", b"\xa9", b"\xe4\xbd", b"\xa0\xe5", b"\xa5\xbd", b"\xff"], True, " é你好\ufffd", " é你好\ufffd"),
    ],
)
def test_words_keep_their_punctuation_which_takes_no_time(pieces, spaced, words, spoken):
    pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def decode(ids):
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    found = divide_words([*range(len(pieces))], decode, spaced)
    assert [word for word, _, _ in found] == words.split("|")
    assert [decode(range(first, end)) for _, first, end in found] == spoken.split("|")


def test_every_word_has_a_time_within_its_segment(tmp_path, monkeypatch):
    """Two sounds together, of which one has two windows, by a model with random weights."""
    monkeypatch.setattr(transcription, "MIN_LOGPROB", -math.inf)
    monkeypatch.setattr(transcription, "MAX_COMPRESSION", math.inf)
    directory = write_whisper(tmp_path)
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(directory), device="cpu", dtype="float32", kv_cache_gib=0.1))

    async def run(seconds, **options):
        content = encoded(sound(seconds, seed=seconds))
        job = Transcription(llm, read_speech_tokens(llm.engine), Sound(content), Options(**options))
        async for _ in job.run():
            pass
        return job

    async def all_at_once():
        return await asyncio.gather(run(33, words=True), run(7, words=True, language="ja"), run(33))

    try:
        *jobs, plain = asyncio.run(all_at_once())
    finally:
        llm.shutdown()
    assert [segment.text for segment in plain.segments] == [segment.text for segment in jobs[0].segments]
    assert not any(segment.words for segment in plain.segments)
    for job in jobs:
        for segment in job.segments:
            times = [time for word in segment.words for time in (word.start, word.end)]
            assert "".join(word.text for word in segment.words) == segment.text
            assert times == sorted(times) and segment.start <= times[0] and times[-1] <= segment.end
    assert len({segment.window for segment in jobs[0].segments}) > 1


def test_which_heads_are_read():
    assert read_heads([[1, 0], [3, 2]], 4, 4) == [(1, 0), (3, 2)]
    assert read_heads(None, 3, 2) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for value in ("all", [], [[4, 0]], [[0, -1]], [[0]], [0], [[0, True]], [[0, 1.0]]):
        with pytest.raises(ValueError, match="alignment_heads"):
            read_heads(value, 4, 4)


def test_a_worker_in_another_process_is_refused():
    engine = SimpleNamespace(executor=object(), model_config=None)
    with pytest.raises(ValueError, match="distributed_executor_backend"):
        Aligner(SimpleNamespace(engine=engine), None)
