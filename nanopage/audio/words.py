"""When each word is said, as OpenAI's whisper finds it: a few heads of cross-attention look at the sound of a token.

Tokens and positions of the encoder have one order, so dynamic time warping (Sakoe and Chiba, 1978) finds the monotonic
path of most attention through both. The decoder runs once more over the tokens of a window, between two steps of the
engine. The encoder does not: its output is kept (items/rows.py).
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nanopage.audio.mel import SAMPLES_PER_TIMESTAMP, SAMPLING_RATE, SECONDS_PER_TIMESTAMP
from nanopage.audio.rules import SpeechTokens, generation_fields
from nanopage.files.model_files import shown
from nanopage.step import Item

if TYPE_CHECKING:
    from nanopage.aio.async_llm import AsyncLLM

UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}  # languages without spaces between words: each character is a word
OPENING = {*"\"'“‘¿¡([{-—«「『《（【"}  # with the next word
CLOSING = {*".,!?:;…)]}%”’»。，！？：；、」』》）】"}  # with the word before


class Word(NamedTuple):
    """A word with the space and punctuation around it, and when it is said, in seconds."""

    text: str
    start: float
    end: float


class Aligner:
    """Finds when words are said.

    Raises: ValueError for `alignment_heads` that the model does not have, and for a worker in another process.
    """

    def __init__(self, llm: "AsyncLLM", tokens: SpeechTokens):
        engine, config = llm.engine, llm.engine.model_config
        if (worker := getattr(engine.executor, "worker", None)) is None:
            raise ValueError("timestamps of words need the model in this process: omit distributed_executor_backend")
        fields = generation_fields(engine.input_processor.prompts.path)
        self.heads = read_heads(fields.get("alignment_heads"), config.num_layers // 2, config.num_heads)
        self.llm, self.tokens, self.worker, self.width = llm, tokens, worker, config.mixer["median_filter_width"]

    async def find(self, samples: np.ndarray, said: list[list[int]], language: str, task: str) -> list[list[Word]]:
        """The words of each text of a window, with times from its beginning.

        Args:
            samples: of the window, float32 [N] at 16 kHz.
            said: the tokens of each text, in their order, without timestamps.
        """
        tokens, spaced = self.tokens, task == "translate" or language not in UNSPACED
        spoken = [tokens.languages[language], tokens.tasks[task]] if tokens.languages else []
        before = [tokens.start, *spoken, tokens.begin - 1]  # <|notimestamps|>
        token_ids = [*before, *chain.from_iterable(said), tokens.end]
        prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"audio": (samples, SAMPLING_RATE)}}
        read = await self.llm.in_thread(self.llm.engine.input_processor.prompts.read, prompt)
        weights = await self.llm.between_steps(partial(self._attend, read.items[0], token_ids))
        num_positions = max(1, len(samples) // SAMPLES_PER_TIMESTAMP)  # the rest of them is silence
        # The token of a row comes next, so the row before a token says when it begins.
        rows = slice(len(before) - 1, -1)
        starts = await self.llm.in_thread(align, weights[..., :num_positions], self.width, rows)
        return self._divide(said, [position * SECONDS_PER_TIMESTAMP for position in starts], spaced)

    def _attend(self, item: Item, token_ids: list[int]) -> np.ndarray:
        encoded = self.worker.wings.items.outputs_of([item])[item.hash]
        return self.worker.model.attention_to_sound(encoded, token_ids, self.heads).cpu().numpy()

    def _divide(self, said: list[list[int]], times: list[float], spaced: bool) -> list[list[Word]]:
        """Args: times: when each token begins, and when the last one ends."""
        tokenizer, found, place = self.llm.engine.tokenizer, list[list[Word]](), 0
        assert tokenizer is not None
        for text in said:
            found.append([])
            for word, first, end in divide_words(text, tokenizer.decode, spaced):
                found[-1].append(Word(word, times[place + first], times[place + end]))
            place += len(text)
        return found


def read_heads(value: object, num_layers: int, num_heads: int) -> list[tuple[int, int]]:
    """The (layer, head) pairs of `alignment_heads` in generation_config.json. None: all heads of the upper half of the
    layers, as OpenAI does. Raises: ValueError for anything that is not a list of heads that the model has."""
    if value is None:
        return [(layer, head) for layer in range(num_layers // 2, num_layers) for head in range(num_heads)]
    if not isinstance(value, list) or not value:
        raise ValueError(f"alignment_heads must be a list of [layer, head], not {shown(value)}")
    for pair in value:
        fits = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)
        if not fits or not (0 <= pair[0] < num_layers and 0 <= pair[1] < num_heads):
            raise ValueError(
                f"alignment_heads has {shown(pair)}: the model has {num_layers} layers of {num_heads} heads"
            )
    return [(layer, head) for layer, head in value]


def align(weights: np.ndarray, width: int, rows: slice) -> list[int]:
    """The position at which each of these rows begins.

    Args:
        weights: of attention, [heads, T, positions].
        width: of the median filter, in positions.
        rows: which of the T tokens are aligned.
    """
    total = np.zeros(weights[0, rows].shape)
    for head in weights:  # one at a time: the filter takes `width` times the memory
        normal = (head - head.mean(0)) / np.maximum(head.std(0), np.finfo(head.dtype).tiny)
        total += median_filter(normal[rows], width)
    return warp(-total / len(weights))


def median_filter(values: np.ndarray, width: int) -> np.ndarray:
    """The median of `width` neighbours along the last dimension, which is reflected at its ends."""
    half = width // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(half, half)], mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1)
    return np.partition(windows, half, axis=-1)[..., half]


def warp(costs: np.ndarray) -> list[int]:
    """Dynamic time warping: where each row begins on the cheapest path that goes from the first row and column to the
    last, and in each step to the next row, the next column, or both.

    A path that enters row i at column k costs, at column j of this row, what it has cost before k, plus the sum of
    the row from k to j. So the best k for each j is a running minimum.

    Args: costs: [rows, columns].
    """
    columns = np.arange(costs.shape[1])
    best, entered, from_left = costs[0].cumsum(), [], []
    for row in costs[1:]:
        left = np.concatenate([[np.inf], best[:-1]])
        sums = row.cumsum()
        reach = np.minimum(left, best) - (sums - row)
        running = np.minimum.accumulate(reach)
        is_new = np.diff(running, prepend=np.inf) < 0
        entered.append(np.maximum.accumulate(np.where(is_new, columns, 0)))
        from_left.append(left < best)
        best = running + sums
    starts, end = list[int](), len(columns) - 1
    for columns_of_entry, is_left in zip(reversed(entered), reversed(from_left), strict=True):
        starts.append(int(columns_of_entry[end]))
        end = starts[-1] - int(is_left[starts[-1]])
    return [0, *reversed(starts)]


def divide_words(token_ids: list[int], decode: Callable[[list[int]], str], spaced: bool) -> list[tuple[str, int, int]]:
    """Divide a text into words with their punctuation.

    Args: spaced: whether its words have spaces between them.
    Returns: each word, its first token, and the end of its tokens without closing punctuation, which nobody speaks.
    """
    words, first = list[tuple[str, int, int]](), 0
    for end in range(1, len(token_ids) + 1):
        piece = decode(token_ids[first:end])
        if piece.endswith("\ufffd") and end < len(token_ids):
            continue  # the rest of the character follows
        word, begin, until = words[-1] if words else ("", 0, 0)
        closes = piece.strip() in CLOSING
        if words and (closes or word.strip() in OPENING or (spaced and not piece.startswith(" "))):
            words[-1] = word + piece, begin, until if closes else end
        else:
            words.append((piece, first, end))
        first = end
    return words
