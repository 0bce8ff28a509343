"""The spectrogram, beside that of transformers."""

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from nanopage.audio.mel import log_mel

TIME = np.arange(480_000) / 16_000
SOUNDS = {
    "noise": np.random.default_rng(0).normal(0, 0.1, 480_000),
    "a sweep": np.sin(2 * np.pi * 100 * TIME**2) * np.linspace(0, 1, 480_000),
    "full scale, square": np.sign(np.sin(2 * np.pi * 440 * TIME)),
    "7 seconds, quiet": np.random.default_rng(1).normal(0, 1e-4, 112_000),
    "silence": np.zeros(16_000),
    "one sample": np.ones(1),
    "nothing": np.zeros(0),
}


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("sound", SOUNDS)
def test_the_spectrogram_is_that_of_transformers(sound, bins):
    samples = SOUNDS[sound].astype(np.float32)
    extractor = WhisperFeatureExtractor(bins)
    exact = extractor._np_extract_fbank_features([np.pad(samples, (0, 480_000 - len(samples)))], "cpu")[0]  # float64
    usual = extractor(samples if len(samples) else np.zeros(1), sampling_rate=16_000)["input_features"][0]
    got = log_mel(samples, bins)
    assert got.dtype == np.float32 and got.shape == (bins, 3000)
    np.testing.assert_allclose(got, exact, atol=1e-5, rtol=0)
    np.testing.assert_allclose(got, usual, atol=3e-5, rtol=0)  # torch's float32 is 2.3e-5 from float64 for the sweep


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(480_001, np.float32), "480,001"),
        (np.zeros((2, 100), np.float32), r"\[2, 100\]"),
        (np.zeros(100), "float64"),
        (np.full(100, np.nan, np.float32), "finite"),
    ],
)
def test_other_samples_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        log_mel(samples)
