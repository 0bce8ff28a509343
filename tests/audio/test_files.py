"""Sound files: what they become, and what is refused."""

import struct
from collections import Counter

import numpy as np
import pytest
import soundfile
import soxr
from speech import encoded, sound

from nanopage.audio.files import AudioError, Sound

FORMATS = {
    "WAV, 8 bits": {"subtype": "PCM_U8"},
    "WAV, 24 bits": {"subtype": "PCM_24"},
    "WAV, floats": {"subtype": "FLOAT"},
    "RF64": {"format": "RF64"},
    "FLAC": {"format": "FLAC"},
    "OGG": {"format": "OGG", "subtype": "VORBIS"},
    "MP3": {"format": "MP3", "subtype": "MPEG_LAYER_III"},
}
DAMAGED = ("WAV, 24 bits", "WAV, floats", "FLAC", "OGG", "MP3")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_becomes_mono_at_16_khz(name, tmp_path):
    stereo = np.stack([sound(3, 44_100), np.zeros(3 * 44_100, np.float32)], axis=1)
    content = encoded(stereo, 44_100, **FORMATS[name])
    file = tmp_path / "sound"
    file.write_bytes(content)
    decoded, rate = soundfile.read(file, dtype="float32")
    want = soxr.resample(decoded.mean(axis=1), rate, 16_000)
    for source in (content, file):
        opened = Sound(source)
        got = opened.window(0)
        assert opened.seconds == pytest.approx(3, abs=0.05) and opened.ended
        assert got.dtype == np.float32 and abs(len(got) - len(want)) <= 1
        assert np.abs(got[: len(want)] - want[: len(got)]).max() < 1e-4  # a stream of seconds, not one piece
        opened.close()


def test_windows_follow_each_other_and_need_not_overlap():
    samples = sound(75)
    opened = Sound(encoded(samples, subtype="FLOAT"))
    for start in (0, 100, 480_000, 700_000, 1_100_000, 1_200_000):
        np.testing.assert_array_equal(opened.window(start), samples[start : start + 480_000])
    assert opened.seconds == 75


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello, this is no sound", "not WAV, FLAC, MP3 or OGG"),
        (b"\0\0\0\x20ftypM4A \0\0\0\0" * 10, "ffmpeg"),
        (b"RIFF", "broken"),
        (b"RIFF\x10\0\0\0WAVE" + b"\0" * 50, "broken"),
        (b"fLaC" + b"\xff" * 100, "broken"),
        (b"OggS" + b"\0" * 100, "broken"),
        (b"ID3" + b"\xff" * 100, "broken"),
        (encoded(np.zeros(0)), "no sound in it"),
        (encoded(np.zeros(1), 1000), "1,000 samples a second"),
        (encoded(np.zeros((5, 65))), "65 channels"),
        (encoded(np.full(100, np.nan), subtype="FLOAT"), "not a finite number"),
        (encoded(np.zeros(4_000 * 3601), 4000, subtype="PCM_U8"), "longer than 1 hours"),
    ],
)
def test_other_files_are_refused(content, message):
    with pytest.raises(AudioError, match=message) as caught:
        Sound(content, max_seconds=3600).window(0)
    assert "object at" not in str(caught.value)


def test_a_path_must_be_a_file(tmp_path):
    with pytest.raises(AudioError, match="no such file"):
        Sound(tmp_path / "missing.wav")
    with pytest.raises(AudioError, match="not a file"):
        Sound(tmp_path)


def test_a_header_that_claims_more_than_there_is_costs_no_memory():
    """The sizes in a header decide nothing but what is refused."""
    content = bytearray(encoded(sound(1)))
    content[4:8] = content[40:44] = struct.pack("<I", 0xFFFFFFF0)
    opened = Sound(bytes(content))
    assert len(opened.window(0)) == 16_000 and opened.seconds == 1


def damaged(content, how, rng):
    """A file with up to 20 wrong bytes, or a piece of it."""
    if how == "cut":
        return content[: rng.integers(1, len(content))]
    changed = bytearray(content)
    for place in rng.integers(0, 200 if how == "header" else len(content), rng.integers(1, 20)):
        changed[place] = rng.integers(256)
    return bytes(changed)


def test_broken_files_end_in_an_error_or_early():
    """600 files: none raises anything else, or gives samples that are out of bounds. docs/audio.md has the numbers."""
    rng, num_refused = np.random.default_rng(0), Counter()
    for name in DAMAGED:
        content = encoded(sound(2), **FORMATS[name])
        for how in ("cut", "header", "anywhere"):
            for _ in range(40):
                try:
                    samples = Sound(damaged(content, how, rng)).window(0)
                except AudioError:
                    num_refused[name, how] += 1
                else:
                    assert np.abs(samples).max(initial=0) <= 1
    assert 100 < num_refused.total() < 500
