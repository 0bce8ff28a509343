"""Sound files: WAV, FLAC, MP3 and OGG to mono samples at 16 kHz (the extra "audio": soundfile and soxr).

A file is decoded a second at a time, as far as it is needed, so an hour takes no more memory than a minute. What a
header claims is checked, but nothing is allocated for it.
"""

import io
import threading
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nanopage.audio.mel import SAMPLING_RATE, WINDOW_SAMPLES

FORMATS = {"WAV": b"RIFF", "WAVEX": b"RIFF", "RF64": b"RF64", "FLAC": b"fLaC", "OGG": b"OggS", "MP3": b"ID3"}
MAX_BYTES = 4 << 30  # of a file
MAX_SECONDS = 24 * 3600  # of a file
MIN_SECONDS = 0.1  # less is no speech
RATES = range(4_000, 384_001)  # samples a second
MAX_CHANNELS = 64
UNKNOWN = 2**62  # frames: libsndfile says so much, or more, if a header says nothing


class AudioError(ValueError):
    """A sound file that cannot be used. The message says why, and does not name the file."""


def import_libraries() -> tuple[Any, Any]:
    """The modules soundfile and soxr. Raises: ImportError that names the extra."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: libsndfile itself
        raise ImportError(f"sound files need soundfile and soxr: {error}; pip install 'nanopage[audio]'") from None
    return soundfile, soxr


class Sound:
    """A sound file, read from front to back.

    seconds: its length as the header says, and as decoded once the end has been read.

    Args:
        source: a path, or the content of a file.
        max_seconds: the longest sound that is accepted.

    Raises: AudioError; OSError for a path that cannot be read; ImportError without the extra.
    """

    def __init__(self, source: Path | bytes, max_seconds: float = MAX_SECONDS):
        soundfile, soxr = import_libraries()
        self.max_seconds, self.ended, self.num_samples = max_seconds, False, 0
        self._samples, self._begin, self._lock = np.zeros(0, np.float32), 0, threading.Lock()
        file = _open(source)
        try:
            self._decoder = soundfile.SoundFile(file)
            self._check_header()
        except (soundfile.LibsndfileError, AudioError) as error:
            file.close()
            raise error if isinstance(error, AudioError) else _broken(error) from None
        self._file, self._errors, rate = file, soundfile.LibsndfileError, self._decoder.samplerate
        self._resampler = None if rate == SAMPLING_RATE else soxr.ResampleStream(rate, SAMPLING_RATE, 1)
        self.seconds = self._decoder.frames / rate if self._decoder.frames < UNKNOWN else 0.0

    def _check_header(self) -> None:
        decoder = self._decoder
        if decoder.format not in FORMATS:
            raise AudioError(f"{decoder.format} is not supported: convert it to WAV, FLAC, MP3 or OGG")
        if decoder.samplerate not in RATES:
            raise AudioError(f"{decoder.samplerate:,} samples a second: {RATES[0]:,} to {RATES[-1]:,} are supported")
        if decoder.channels > MAX_CHANNELS:
            raise AudioError(f"{decoder.channels} channels: at most {MAX_CHANNELS} are supported")
        if not decoder.frames:
            raise AudioError("the file has no sound in it")
        if decoder.frames < UNKNOWN:
            self._check_length(decoder.frames / decoder.samplerate)

    def _check_length(self, seconds: float) -> None:
        if seconds > self.max_seconds:
            raise AudioError(f"the sound is longer than {self.max_seconds / 3600:g} hours")

    def window(self, start: int) -> np.ndarray:
        """Up to 30 seconds from sample `start` on: float32 [N] in [-1, 1], fewer than 480,000 only where the file ends.
        `start` must not be less than in the call before. Raises: AudioError if the file turns out to be broken."""
        with self._lock:
            while self.num_samples < start + WINDOW_SAMPLES and not self.ended:
                self._read_second()
        dropped = min(start - self._begin, len(self._samples))
        self._samples, self._begin = self._samples[dropped:], self._begin + dropped
        return self._samples[:WINDOW_SAMPLES]

    def _read_second(self) -> None:
        rate = self._decoder.samplerate
        try:
            frames = self._decoder.read(rate, dtype="float32", always_2d=True)
        except self._errors as error:
            raise _broken(error) from None
        with np.errstate(all="ignore"):
            mono, self.ended = frames.mean(axis=1), len(frames) < rate
        if not np.isfinite(mono).all():
            raise AudioError("the file is broken: a sample is not a finite number")
        if self._resampler is not None:
            mono = self._resampler.resample_chunk(mono, last=self.ended)
        self._samples = np.concatenate([self._samples, mono.clip(-1, 1)])  # files of floats and resampling may exceed 1
        self.num_samples += len(mono)
        self._check_length(self.num_samples / SAMPLING_RATE)
        if self.ended:
            self.seconds = self.num_samples / SAMPLING_RATE
            if not self.num_samples:
                raise AudioError("the file has no sound in it")

    def close(self) -> None:
        """Wait for a thread that reads, and close the file."""
        with self._lock:
            self.ended = True
            self._decoder.close()
            self._file.close()


def _broken(error: Any) -> AudioError:
    """Args: error: a LibsndfileError, whose own text also has the address of the file object."""
    return AudioError(f"the file is broken: {error.error_string}")


def _open(source: Path | bytes) -> BinaryIO:
    """Raises: AudioError for what is no file of a known format, before libsndfile sees it."""
    if isinstance(source, Path) and not source.is_file():
        raise AudioError("it is not a file" if source.exists() else "there is no such file")
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if not size:
        raise AudioError("the file is empty")
    if size > MAX_BYTES:
        raise AudioError(f"the file is larger than {MAX_BYTES >> 30} GiB")
    file = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    head = file.read(12)
    file.seek(0)
    frame_of_mp3 = len(head) > 1 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0
    if not frame_of_mp3 and head[:4] not in FORMATS.values() and head[:3] != FORMATS["MP3"]:
        file.close()
        raise AudioError("the file is not WAV, FLAC, MP3 or OGG: convert it first, such as with ffmpeg -i FILE x.wav")
    return file
