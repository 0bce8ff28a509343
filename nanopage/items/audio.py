"""Sound in a prompt: {"prompt": ..., "multi_modal_data": {"audio": (samples, sampling rate)}}, as in vLLM."""

import numpy as np
from torch import Tensor

from nanopage.audio.mel import SAMPLING_RATE, log_mel
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import shown
from nanopage.items.items import make_item
from nanopage.text.prompts import TokenizedPrompt


def read_audio(config: ModelConfig, prompt: TokenizedPrompt, data: object) -> None:
    """Add the sound of a prompt, which the decoder attends to (see `PromptReader.item_readers`).

    Args:
        data: {"audio": (samples, sampling rate)}, or a list of one such pair. Samples are floats from -1 to 1, an array
            or a tensor [N] of at most 30 seconds at 16 kHz.

    Raises: TypeError, ValueError naming what is wrong.
    """
    if not isinstance(data, dict) or data.keys() != {"audio"}:
        raise ValueError(f"multi_modal_data must be {{'audio': (samples, sampling rate)}} here, not {shown(data)}")
    pair = data["audio"]
    if isinstance(pair, list):
        if len(pair) != 1:
            raise ValueError(f"multi_modal_data: the model reads one audio of a prompt, not {len(pair)}")
        (pair,) = pair
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError("multi_modal_data: audio must be a pair of samples and a sampling rate in Hz")
    samples, rate = pair
    if rate != SAMPLING_RATE:
        raise ValueError(f"multi_modal_data: audio has {shown(rate)} samples a second: resample it to {SAMPLING_RATE}")
    samples = samples.detach().cpu().numpy() if isinstance(samples, Tensor) else samples
    if not isinstance(samples, np.ndarray) or samples.dtype.kind != "f":
        raise TypeError(f"multi_modal_data: audio must be an array of floats, not {shown(samples)}")
    try:
        spectrogram = log_mel(samples.astype(np.float32), config.mixer["num_mel_bins"])
    except ValueError as error:
        raise ValueError(f"multi_modal_data: audio: {error}") from None
    cost = config.encoded_positions
    prompt.items.append(make_item("audio", 0, 0, {"spectrogram": spectrogram}, cost))
