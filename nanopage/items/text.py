"""Text for the encoder of an encoder-decoder model: {"encoder_prompt": ..., "decoder_prompt": ...}, as in vLLM."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nanopage.audio import WHISPER
from nanopage.checks.fields import Fields
from nanopage.config.model import ModelConfig
from nanopage.files.model_files import exists, read_json, shown
from nanopage.inputs import Prompt
from nanopage.items.items import make_item
from nanopage.models.meta import family_of
from nanopage.text.prompts import PromptReader, PromptTooLongError, TokenizedPrompt

logger = logging.getLogger("nanopage")
# Fields of generation_config.json that change what transformers' generate() makes, and have no effect here, with the
# values that have none there either.
UNUSED: dict[str, tuple] = {
    "num_beams": (None, 1),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "forced_eos_token_id": (None,),
    "bad_words_ids": (None, []),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}, []),
    "exponential_decay_length_penalty": (None,),
}


class EncoderDecoderPrompts(PromptReader):
    """Reads what the encoder gets, as a PromptReader, and what the decoder gets. A prompt without "encoder_prompt" is
    the encoder's.

    The decoder's prompt begins with `decoder_start_token_id`, whether it has been given or not. `forced_bos_token_id`
    comes next if it is not the prompt's second token anyway: transformers' generate() forces it as the first token of
    an output whose prompt is the start alone.

    Args:
        most, limit: the most tokens that the encoder reads, and the field of config.json that says so.
        start, forced: the two tokens. None: the model's files do not name it.
        decoder: reads the decoder's prompt.
    """

    def __init__(self, most: int, limit: str, start: int | None, forced: int | None, decoder: PromptReader):
        super().__init__(decoder.tokenizer, decoder.path, decoder.vocab_size, most)
        self.limit, self.decoder, self.start, self.forced = limit, decoder, start, forced
        decoder.item_readers["encoder_prompt"] = add_encoder_prompt

    def read(self, prompt: Prompt) -> TokenizedPrompt:
        """See `PromptReader.read`."""
        of_encoder, given = prompt, None
        if isinstance(prompt, dict) and prompt.keys() & {"encoder_prompt", "decoder_prompt"}:
            if others := prompt.keys() - {"encoder_prompt", "decoder_prompt"}:
                raise ValueError(f"{', '.join(sorted(map(str, others)))} cannot stand beside encoder_prompt")
            if prompt.get("encoder_prompt") is None:
                raise ValueError("decoder_prompt needs encoder_prompt")
            of_encoder, given = prompt["encoder_prompt"], prompt.get("decoder_prompt")
        encoder = super().read(of_encoder)
        if len(encoder.token_ids) > self.max_model_len:
            raise PromptTooLongError(
                f"the encoder's prompt has {len(encoder.token_ids):,} tokens, more than "
                f"{self.limit}={self.max_model_len:,}"
            )
        read = self.decoder.read(self._decoder_fields(given) | {"encoder_prompt": encoder})
        read.cache_salt += encoder.cache_salt
        return read

    def _decoder_fields(self, given: Any) -> dict:
        """The decoder's prompt as its text, if it has one, and its token ids."""
        fields = given if isinstance(given, dict) else {}
        if isinstance(given, str | list):
            fields = {"prompt" if isinstance(given, str) else "prompt_token_ids": given}
        text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
        known = isinstance(text if token_ids is None else token_ids, str | list) and "encoder_prompt" not in fields
        if given is not None and not known:
            raise TypeError(f"decoder_prompt must be a string, token ids or a dict of them, not {shown(given)}")
        if text is not None and token_ids is None:
            token_ids = [*self._begin([]), *self.decoder.encode(text, add_special_tokens=False)]
        return fields | {"prompt_token_ids": self._begin(token_ids or [])}

    def _begin(self, token_ids: list[int]) -> list[int]:
        """The token ids of the decoder's prompt with those that it has to begin with."""
        if self.start is not None and token_ids[:1] != [self.start]:
            token_ids = [self.start, *token_ids]
        if not token_ids:
            raise ValueError(f"{self.path.name} has no decoder_start_token_id: give token ids as decoder_prompt")
        return [*token_ids, self.forced] if len(token_ids) == 1 and self.forced is not None else token_ids


def add_encoder_prompt(prompt: TokenizedPrompt, encoder: TokenizedPrompt) -> None:
    """Add what the encoder reads to the decoder's prompt (see `PromptReader.item_readers`)."""
    input_ids = np.array(encoder.token_ids)
    prompt.items.append(make_item("text", 0, 0, {"input_ids": input_ids}, len(input_ids)))
    prompt.encoder = encoder.text, encoder.token_ids


def make_text_reader(config: ModelConfig, path: Path) -> Callable[[PromptReader], EncoderDecoderPrompts] | None:
    """What makes EncoderDecoderPrompts of the reader of a decoder's prompts. None: no encoder of the model reads text.

    generation_config.json says how the decoder's prompts begin, or config.json if there is no such file. Other fields
    that change results in transformers are logged.

    Raises: ValueError naming the file and the field.
    """
    if not config.encoded_positions or config.architecture == WHISPER:
        return None
    of_model = Fields(read_json(path / "config.json"), str(path / "config.json"))
    file = path / "generation_config.json"
    fields = Fields(read_json(file), str(file)) if exists(file) else of_model
    found = {name: fields.values.get(name) for name in UNUSED}
    if unused := [f"{name}={shown(value)}" for name, value in found.items() if value not in UNUSED[name]]:
        logger.warning(f"{fields.source}: of no effect here: {', '.join(unused)}")
    starts = [each.token_id("decoder_start_token_id", config.vocab_size) for each in (fields, of_model)]
    start = starts[1] if starts[0] is None else starts[0]
    forced = fields.token_id("forced_bos_token_id", config.vocab_size)
    limit = getattr(family_of(config), "LIMIT", "max_position_embeddings")
    return partial(EncoderDecoderPrompts, config.encoded_positions, limit, start, forced)
