"""Transcripts as text, as subtitles (SRT, WebVTT), and as the JSON of OpenAI's API.

If the options ask for words, subtitles have a cue for each word, and JSON has a list of words.
"""

import json
import math
from collections.abc import Callable, Iterator

from nanopage.audio.languages import LANGUAGES
from nanopage.audio.transcription import Segment, Transcription
from nanopage.audio.words import Word


def as_json(job: Transcription) -> dict:
    """The reply of /v1/audio/transcriptions without any details but words."""
    words = [{"word": text.strip(), "start": start, "end": end} for text, start, end in _words(job)]
    usage = {"type": "duration", "seconds": math.ceil(job.sound.seconds)}
    return {"text": job.text, "usage": usage} | ({"words": words} if job.options.words else {})


def as_verbose_json(job: Transcription) -> dict:
    """The same with the segments. The language is that of the text: English for a translation."""
    language = "en" if job.options.task == "translate" else job.language
    return {
        "task": job.options.task,
        "language": LANGUAGES.get(language or "", ""),  # empty where nothing was said
        "duration": round(job.sound.seconds, 2),
        "segments": [_segment(segment) for segment in job.segments],
    } | as_json(job)


def _segment(segment: Segment) -> dict:
    return {
        "id": segment.index,
        "seek": round(segment.window * 100),  # in frames of 10 ms
        "start": segment.start,
        "end": segment.end,
        "text": segment.text,
        "tokens": segment.tokens,
        "temperature": round(segment.temperature, 2),
        "avg_logprob": segment.avg_logprob,
        "compression_ratio": segment.compression_ratio,
        "no_speech_prob": segment.no_speech_prob,
    }


def _words(job: Transcription) -> Iterator[Word]:
    return (word for segment in job.segments for word in segment.words)


def _cues(job: Transcription, point: str) -> Iterator[tuple[str, str]]:
    """The times of each cue, and its text, which cannot be taken for the times of another."""
    for cue in _words(job) if job.options.words else job.segments:
        text = " ".join(cue.text.split()).replace("-->", "->")
        yield f"{_time(cue.start, point)} --> {_time(cue.end, point)}", text


def as_srt(job: Transcription) -> str:
    return "\n".join(f"{number}\n{times}\n{text}\n" for number, (times, text) in enumerate(_cues(job, ","), 1))


def as_vtt(job: Transcription) -> str:
    return "\n".join(["WEBVTT\n", *(f"{times}\n{_escaped(text)}\n" for times, text in _cues(job, "."))])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds and milliseconds."""
    minutes, milliseconds = divmod(round(seconds * 1000), 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"


# Name -> the ending of files, and what makes the content of one.
FORMATS: dict[str, tuple[str, Callable[[Transcription], str]]] = {
    "text": ("txt", lambda job: f"{job.text}\n"),
    "srt": ("srt", as_srt),
    "vtt": ("vtt", as_vtt),
    "json": ("json", lambda job: f"{json.dumps(as_json(job), ensure_ascii=False)}\n"),
    "verbose_json": ("json", lambda job: f"{json.dumps(as_verbose_json(job), ensure_ascii=False)}\n"),
}
