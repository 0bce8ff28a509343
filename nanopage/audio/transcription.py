"""A sound to text, window by window, as Whisper does (Radford et al., 2022, section 4.5).

    Sound ─▶ window of 30 s ─▶ request, retried if the text is poor ─▶ segments ─▶ next window

A window begins where the last complete segment of the window before ends; its prompt may have the text before. So the
windows of one sound follow each other. The windows of several sounds run together, each in a task of its own, in the
batches of one engine.
"""

import math
import uuid
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from nanopage.audio.files import MIN_SECONDS, Sound
from nanopage.audio.mel import SAMPLES_PER_TIMESTAMP, SAMPLING_RATE, SECONDS_PER_TIMESTAMP
from nanopage.audio.rules import TASKS, SpeechTokens, TranscriptRules, rules_for
from nanopage.audio.words import Aligner, Word
from nanopage.outputs import CompletionOutput, RequestOutput
from nanopage.params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanopage.aio.async_llm import AsyncLLM

# A text that compresses better repeats itself; one that is less likely on average is not understood.
MAX_COMPRESSION, MIN_LOGPROB = 2.4, -1.0
MAX_NO_SPEECH = 0.6  # with a larger probability that nobody speaks, a text below MIN_LOGPROB is dropped
TEMPERATURE_STEP = 0.2  # from attempt to attempt, up to 1
MAX_TEMPERATURE_OF_CONTEXT = 0.5  # the text of a hotter attempt is no context for the next window
SILENCE = 1e-4  # the largest amplitude of a window without any sound: less than 16 bits can tell from noise
NUM_LISTED = 20  # top log-probabilities at the first position, in which <|nospeech|> is looked for


@dataclass(frozen=True)
class Options:
    """How to transcribe.

    language: a code such as "en". None: found in the first window with sound.
    task: "transcribe", or "translate" into English.
    prompt: text that might precede the sound: names, spelling, style.
    temperature: of the first attempt at a window, in [0, 1].
    uses_context: whether the prompt of a window has the text of the windows before.
    words: whether to find when each word is said.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    uses_context: bool = False
    words: bool = False

    def __post_init__(self):
        if not 0 <= self.temperature <= 1:
            raise ValueError(f"temperature={self.temperature} is not in [0, 1]")
        if self.task not in TASKS:
            raise ValueError(f"task {self.task[:50]!r} is none of {', '.join(TASKS)}")


@dataclass(frozen=True)
class Segment:
    """A piece of text, and when it is said.

    window: where the window begins that it was found in, in seconds.
    start, end: seconds from the beginning of the sound.
    tokens: with the timestamps around the text.
    temperature, avg_logprob, compression_ratio, no_speech_prob: of the window's text. no_speech_prob is 0 if
        <|nospeech|> is not among the 20 likeliest tokens.
    words: all words of the text, within its time, if the options ask for them.
    """

    index: int
    window: float
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()


@dataclass
class Attempt:
    """What the model says of a window at one temperature."""

    temperature: float
    tokens: list[int]  # timestamps and text
    text: str
    language: str | None  # that it found, if it had to
    avg_logprob: float
    no_speech_prob: float

    @property
    def compression_ratio(self) -> float:
        data = self.text.encode()
        return len(data) / len(zlib.compress(data))

    @property
    def is_silence(self) -> bool:
        return self.no_speech_prob > MAX_NO_SPEECH and self.avg_logprob < MIN_LOGPROB

    @property
    def is_good(self) -> bool:
        return self.is_silence or (self.compression_ratio <= MAX_COMPRESSION and self.avg_logprob >= MIN_LOGPROB)


@dataclass
class Transcription:
    """One sound on its way to text.

    language: its code, once it is known. position: how many seconds are done.

    Args:
        tokens: of the model.
        salt: keeps cached prefixes apart (see `Prompt` in inputs.py).

    Raises: ValueError for options that the model does not have; with `words`, as `Aligner`.
    """

    llm: "AsyncLLM"
    tokens: SpeechTokens
    sound: Sound
    options: Options = field(default_factory=Options)
    salt: str = ""
    segments: list[Segment] = field(default_factory=list)

    def __post_init__(self):
        options = self.options
        rules_for(self.tokens, options.language, options.task)
        self.language = options.language or (None if self.tokens.languages else "en")
        self.position, self.aligner = 0.0, Aligner(self.llm, self.tokens) if options.words else None
        assert self.llm.engine.tokenizer is not None
        before = self.llm.engine.tokenizer.encode(f" {text}", False) if (text := options.prompt.strip()) else []
        self._context = [token_id for token_id in before if token_id < self.tokens.end]  # special tokens are none of it

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments).strip()

    async def run(self) -> AsyncIterator[list[Segment]]:
        """Yields the new segments of each window. Raises: AudioError if the file is broken; as `AsyncLLM.generate`;
        RuntimeError if the engine could not complete a request."""
        start = 0
        while True:
            samples = await self.llm.in_thread(self.sound.window, start)
            if len(samples) < MIN_SECONDS * SAMPLING_RATE:
                break
            attempt = None if np.abs(samples).max() < SILENCE else await self._decode(samples)
            found, done = ([], len(samples)) if attempt is None else self._read(attempt, start, len(samples))
            found = await self._with_words(found, samples)
            self.segments += found
            start += done
            self.position = start / SAMPLING_RATE
            yield found

    async def _decode(self, samples: np.ndarray) -> Attempt | None:
        """The first good attempt at a window, or else the last one. None if nobody speaks.

        A poor text is often one that repeats its context, at any temperature. So the second attempt has none.
        """
        temperature, number = self.options.temperature, 0
        while True:
            attempt = await self.attempt(samples, temperature, number)
            self.language = self.language or attempt.language
            if attempt.is_good or (temperature >= 1 and not self._context):
                return None if attempt.is_silence else attempt
            if not self._context:
                temperature = min(1.0, temperature + TEMPERATURE_STEP)
            self._context, number = [], number + 1

    async def attempt(self, samples: np.ndarray, temperature: float, seed: int) -> Attempt:
        """Decode a window. Args: samples: float32, at most 30 seconds. Raises: RuntimeError."""
        tokens, half = self.tokens, self.llm.engine.max_model_len // 2
        rules = rules_for(tokens, self.language, self.options.task)
        context = [tokens.previous, *self._context[1 - half :]] if self._context else []
        prompt = {
            "prompt_token_ids": [*context, tokens.start],
            "multi_modal_data": {"audio": (samples, SAMPLING_RATE)},
            "cache_salt": self.salt,
        }
        params = SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=half + len(rules.forced),
            logprobs=NUM_LISTED,
            detokenize=False,
            structured_outputs=rules,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        last: RequestOutput | None = None
        async for output in self.llm.generate(prompt, params, f"audio-{uuid.uuid4().hex}"):
            last = output
        assert last is not None
        if last.error is not None:
            raise RuntimeError(f"a window could not be transcribed: {last.error}")
        return self._judge(last.outputs[0], rules, temperature)

    def _judge(self, output: CompletionOutput, rules: TranscriptRules, temperature: float) -> Attempt:
        tokens, num_forced = self.tokens, len(rules.forced)
        assert output.logprobs is not None
        said = [token_id for token_id in output.token_ids[num_forced:] if token_id != tokens.end]
        # The first token's log-probability is not comparable (see TranscriptSampler).
        logprobs = [table[token_id].logprob for token_id, table in zip(output.token_ids, output.logprobs, strict=True)][
            max(1, num_forced) :
        ]
        no_speech = output.logprobs[0].get(tokens.no_speech) if output.logprobs else None
        languages = {token_id: code for code, token_id in tokens.languages.items()}
        return Attempt(
            temperature,
            said,
            self._decode_text(said),
            languages.get(output.token_ids[0]) if num_forced else None,
            sum(logprobs) / max(1, len(logprobs)),
            0.0 if no_speech is None else math.exp(no_speech.logprob),
        )

    def _read(self, attempt: Attempt, start: int, num_samples: int) -> tuple[list[Segment], int]:
        """The segments of a window, and how many samples are done. Keeps the context of the next window.

        Args: start: the sample that the window begins with. num_samples: of the window.
        """
        pieces, done = divide(attempt.tokens, self.tokens.begin, num_samples)
        window, segments = start / SAMPLING_RATE, list[Segment]()
        for first, last, token_ids in pieces:
            text = self._decode_text(token_ids)
            if not text.strip() or first == last:
                continue
            times = [round(window + time * SECONDS_PER_TIMESTAMP, 2) for time in (first, last)]
            figures = attempt.temperature, attempt.avg_logprob, attempt.compression_ratio, attempt.no_speech_prob
            index = len(self.segments) + len(segments)
            segments.append(Segment(index, window, times[0], times[1], text, token_ids, *figures))
        if not self.options.uses_context or attempt.temperature > MAX_TEMPERATURE_OF_CONTEXT:
            self._context = []
        else:
            self._context += [token_id for segment in segments for token_id in segment.tokens]
        return segments, done

    async def _with_words(self, segments: list[Segment], samples: np.ndarray) -> list[Segment]:
        """The segments of a window with their words. A word is not said before its segment begins, nor after it ends:
        the path through a window begins with its first word, also where the window begins with silence."""
        if self.aligner is None or not segments:
            return segments
        said = [[token_id for token_id in segment.tokens if token_id < self.tokens.end] for segment in segments]
        found = await self.aligner.find(samples, said, self.language or "en", self.options.task)

        def within(segment: Segment, word: Word) -> Word:
            times = (min(max(segment.window + time, segment.start), segment.end) for time in (word.start, word.end))
            return Word(word.text, *(round(time, 2) for time in times))

        pairs = zip(segments, found, strict=True)
        return [replace(segment, words=tuple(within(segment, word) for word in words)) for segment, words in pairs]

    def _decode_text(self, token_ids: list[int]) -> str:
        text = [token_id for token_id in token_ids if token_id < self.tokens.end]
        assert self.llm.engine.tokenizer is not None
        return self.llm.engine.tokenizer.decode(text)


def divide(tokens: list[int], begin: int, num_samples: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Divide what is said in a window into segments, at pairs of timestamps.

    Args:
        tokens: timestamps and text.
        begin: the first timestamp.
        num_samples: of the window.

    Returns: (start, end, tokens) of each segment, in steps of 20 ms, and how many samples are done. A segment that has
        no end is left to the next window, unless it is the only one.
    """
    is_time = [token_id >= begin for token_id in tokens]
    cuts = [i + 1 for i in range(len(tokens) - 1) if is_time[i] and is_time[i + 1]]
    ends_alone = is_time[-2:] == [False, True]  # nothing is said after the last timestamp
    if not cuts:
        times = [token_id - begin for token_id in tokens if token_id > begin]
        end = times[-1] if times else num_samples // SAMPLES_PER_TIMESTAMP
        return [(0, end, tokens)], num_samples
    if ends_alone:
        cuts.append(len(tokens))
    pieces = [tokens[first:last] for first, last in zip([0, *cuts], cuts, strict=False)]
    segments = [(piece[0] - begin, piece[-1] - begin, piece) for piece in pieces]
    done = num_samples if ends_alone else segments[-1][1] * SAMPLES_PER_TIMESTAMP
    return segments, min(done, num_samples)
