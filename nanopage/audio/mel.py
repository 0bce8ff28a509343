"""Samples to the log-mel spectrogram that Whisper's encoder reads (Radford et al., 2022, section 2.2).

A window of 30 seconds has 3,000 frames. Each is the spectrum of 25 ms, 10 ms after the frame before. Triangular filters
add its power up in bands that are equally wide on the mel scale (Slaney, 1998).
"""

from functools import cache

import numpy as np

SAMPLING_RATE = 16_000  # samples a second
WINDOW_SAMPLES = 30 * SAMPLING_RATE  # of one input of the encoder
NUM_FRAMES = 3_000  # in a window
HOP = 160  # samples from one frame to the next
FFT = 400  # samples of a frame
NUM_TIMESTAMPS = 1501  # tokens for the times from 0 to 30 seconds, the last of a vocabulary
SECONDS_PER_TIMESTAMP = 0.02
SAMPLES_PER_TIMESTAMP = 320


def log_mel(samples: np.ndarray, num_mel_bins: int = 80) -> np.ndarray:
    """The log-mel spectrogram of one window: float32 [num_mel_bins, 3000].

    Args: samples: float32 [N] at 16 kHz, at most 30 seconds. Silence follows them up to 30 seconds.
    Raises: ValueError for samples of another type or shape, for more than 30 seconds, and for NaN or infinity.
    """
    if samples.ndim != 1 or samples.dtype != np.float32:
        raise ValueError(f"samples must be float32 [N], not {samples.dtype} {list(samples.shape)}")
    if len(samples) > WINDOW_SAMPLES:
        raise ValueError(f"samples has {len(samples):,} values: a window has at most {WINDOW_SAMPLES:,}")
    if not np.isfinite(samples).all():
        raise ValueError("samples must be finite")
    window, filters = _window(), mel_filters(num_mel_bins)
    padded = np.pad(np.pad(samples, (0, WINDOW_SAMPLES - len(samples))), FFT // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FFT)[::HOP][:NUM_FRAMES]
    spectrum = np.fft.rfft(frames * window)
    power = spectrum.real**2 + spectrum.imag**2  # [NUM_FRAMES, FFT // 2 + 1]
    decades = np.log10(np.maximum(filters @ power.T, 1e-10, dtype=np.float32))
    return (np.maximum(decades, decades.max() - 8) + 4) / 4  # 80 dB below the loudest is silence


@cache
def _window() -> np.ndarray:
    """Periodic Hann window: float32 [FFT]."""
    return np.hanning(FFT + 1)[:-1].astype(np.float32)


@cache
def mel_filters(num_mel_bins: int) -> np.ndarray:
    """Triangular filters of equal area: float32 [num_mel_bins, FFT // 2 + 1]."""
    frequencies = np.fft.rfftfreq(FFT, 1 / SAMPLING_RATE)
    edges = _to_hertz(np.linspace(0, _to_mel(SAMPLING_RATE / 2), num_mel_bins + 2))
    low, centre, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising, falling = (frequencies - low) / (centre - low), (high - frequencies) / (high - centre)
    return (np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)).astype(np.float32)


# Slaney's mel scale: linear below 1 kHz (15 mel), logarithmic above, where 27 mel are a factor of 6.4.
def _to_mel(hertz: float) -> float:
    return hertz * 3 / 200 if hertz < 1000 else 15 + np.log(hertz / 1000) * 27 / np.log(6.4)


def _to_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * 6.4 ** ((mel - 15) / 27))
