"""Sound files: what they become, and what is refused."""

import struct

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
    with pytest.raises(AudioError, match=message):
        Sound(content, max_seconds=3600).window(0)


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


def test_broken_files_end_in_an_error_or_early():
    """Of 300 files with wrong bytes, none raises anything else or gives samples that are out of bounds."""
    rng = np.random.default_rng(0)
    contents = [encoded(sound(2), **FORMATS[name]) for name in ("WAV, 24 bits", "FLAC", "OGG", "MP3")]
    num_errors = 0
    for number in range(300):
        content = bytearray(contents[number % 4])
        for place in rng.integers(0, len(content) if number % 3 else 200, rng.integers(1, 20)):
            content[place] = rng.integers(256)
        try:
            samples = Sound(bytes(content[: rng.integers(1, len(content))])).window(0)
        except AudioError:
            num_errors += 1
        else:
            assert np.abs(samples).max(initial=0) <= 1
    assert 50 < num_errors < 280
