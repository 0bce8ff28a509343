"""What Whisper may say next: its special tokens, and the rules of timestamps as masks.

A prompt ends with <|startoftranscript|>. The rules force what follows (the language, unless it is to be detected, and
the task), so that the first logits show the language and whether anybody speaks. Text stands between timestamps:

    <|0.00|> Hello.<|1.20|><|1.20|> How are you?<|2.80|><|endoftext|>

Timestamps come in pairs, except at the beginning and at the end, and never go back. `TranscriptSampler` (sampler.py)
adds the one rule that needs logits. They are the rules of Radford et al. (2022), section 4.5, and of the code that came
with it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from nanopage.audio import WHISPER
from nanopage.audio.languages import LANGUAGES
from nanopage.audio.mel import NUM_TIMESTAMPS
from nanopage.files.model_files import exists, read_json
from nanopage.grammar.structured import token_set
from nanopage.params import StructuredOutputsParams

if TYPE_CHECKING:
    from nanopage.engine.engine import LLMEngine
    from nanopage.engine.input_processor import Grammar, Grammars

FIRST_TIMESTAMP = 50  # the latest one that a window may begin with: 1 second
TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class SpeechTokens:
    """The special tokens of a Whisper model.

    vocab_size: the model's. Timestamps are the tokens from `begin` on.
    start, end: <|startoftranscript|>, <|endoftext|>.
    previous: <|startofprev|>, before the text that precedes a window.
    no_speech: its probability at the first position says that nobody speaks.
    tasks: of TASKS.
    languages: code -> token. Empty for a model of English alone, which has no tasks either.
    suppressed: tokens that are never said, such as brackets and notes.
    """

    vocab_size: int
    start: int
    end: int
    previous: int
    no_speech: int
    tasks: dict[str, int]
    languages: dict[str, int]
    suppressed: frozenset[int]

    @property
    def begin(self) -> int:
        return self.vocab_size - NUM_TIMESTAMPS

    @cached_property
    def text(self) -> int:
        """The set of tokens of text, without the end."""
        return token_set({*range(self.end)} - self.suppressed)

    def times(self, first: int, last: int = NUM_TIMESTAMPS - 1) -> int:
        """The set of the timestamps from `first` to `last`."""
        return (1 << self.begin + last + 1) - (1 << self.begin + first) if first <= last else 0


def read_speech_tokens(engine: "LLMEngine") -> SpeechTokens:
    """The special tokens of an engine's model. Raises: ValueError if it is not a Whisper model, or lacks a token."""
    config, path = engine.model_config, engine.input_processor.prompts.path
    if config.architecture != WHISPER or engine.tokenizer is None:
        raise ValueError(f"{path.name} does not transcribe: a Whisper model with its tokenizer does")
    token_to_id = engine.tokenizer.backend.token_to_id

    def find(*names: str) -> int:
        found = [token_id for name in names if (token_id := token_to_id(name)) is not None]
        if not found or found[0] >= config.vocab_size:
            raise ValueError(f"tokenizer.json of {path.name} has no token {names[0]}")
        return found[0]

    if find("<|notimestamps|>") + 1 + NUM_TIMESTAMPS != config.vocab_size:
        raise ValueError(f"vocab_size={config.vocab_size}: {NUM_TIMESTAMPS} timestamps should follow <|notimestamps|>")
    fields = generation_fields(path)
    multilingual = fields.get("is_multilingual", config.vocab_size >= 51_865)
    return SpeechTokens(
        config.vocab_size,
        find("<|startoftranscript|>"),
        find("<|endoftext|>"),
        find("<|startofprev|>"),
        find("<|nospeech|>", "<|nocaptions|>"),
        {task: find(f"<|{task}|>") for task in TASKS},
        {code: find(f"<|{code}|>") for code in LANGUAGES if multilingual and token_to_id(f"<|{code}|>") is not None},
        frozenset(token_id for token_id in fields.get("suppress_tokens") or () if isinstance(token_id, int)),
    )


def generation_fields(path: Path) -> dict:
    """Fields of generation_config.json, and of config.json, which had them before."""
    files = [path / name for name in ("config.json", "generation_config.json")]
    return {name: value for file in files if exists(file) for name, value in read_json(file).items()}


@dataclass(kw_only=True)
class TranscriptRules(StructuredOutputsParams):
    """The rules for one window, given as `SamplingParams.structured_outputs`. They are code instead of a grammar, and
    make their own masks.

    forced: the sets of tokens that the output begins with, one after the other.
    """

    tokens: SpeechTokens
    forced: tuple[int, ...] = ()
    free_until: ClassVar[int] = 0

    def __post_init__(self):
        """There is no grammar to be checked."""

    def make_mask(
        self,
        stop_token_ids: Iterable[int],
        prompt_token_ids: Sequence[int] = (),
        reasoning: bool | None = None,
        budget: int | None = None,
    ) -> "TranscriptRules":
        """It is its own mask: what is allowed depends on nothing but the output."""
        return self

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """See `TokenMask`."""
        return self._find(output_token_ids).to_bytes(-(-self.tokens.vocab_size // 32) * 4, "little")

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        masks = [self.allowed(output_token_ids)]
        for index, token_id in enumerate(draft):
            if token_id == self.tokens.end or not masks[-1][token_id // 8] >> token_id % 8 & 1:
                break
            masks.append(self.allowed([*output_token_ids, *draft[: index + 1]]))
        return masks

    def _find(self, output: list[int]) -> int:
        """The set of tokens that may follow the output."""
        tokens, begin, count = self.tokens, self.tokens.begin, len(self.forced)
        if len(output) < count:
            return self.forced[len(output)]
        if len(output) == count:
            return tokens.times(0, FIRST_TIMESTAMP)
        place = next((i for i in range(len(output) - 1, count - 1, -1) if output[i] >= begin), None)
        assert place is not None  # the first token is a timestamp
        last, end = output[place] - begin, 1 << tokens.end
        if place < len(output) - 1:
            return tokens.text | end | tokens.times(last + 1)
        if place == count or output[place - 1] >= begin:
            return tokens.text | end
        return tokens.times(last) | end


class RulesOrGrammars:
    """The grammars of an engine with a Whisper model, which also knows TranscriptRules."""

    def __init__(self, grammars: "Grammars"):
        self.grammars = grammars

    def compile(self, params: StructuredOutputsParams | None) -> "Grammar":
        return params if isinstance(params, TranscriptRules) else self.grammars.compile(params)

    def has_compiled(self, params: StructuredOutputsParams) -> bool:
        return isinstance(params, TranscriptRules) or self.grammars.has_compiled(params)


def rules_for(tokens: SpeechTokens, language: str | None, task: str) -> TranscriptRules:
    """The rules of a window.

    Args:
        language: a code; None: the likeliest. English for a model of English alone.
        task: one of TASKS.

    Raises: ValueError for a language or a task that the model does not know.
    """
    if not tokens.languages:
        if language not in (None, "en"):
            raise ValueError(f"language {language!r}: the model knows English alone")
        if task != "transcribe":
            raise ValueError(f"task {task!r}: the model knows English alone, and translates nothing")
        return TranscriptRules(tokens=tokens)
    if language is not None and language not in tokens.languages:
        raise ValueError(f"language {language!r}: the model does not know it")
    if task not in TASKS:
        raise ValueError(f"task {task[:50]!r} is none of {', '.join(TASKS)}")
    spoken = tokens.languages.values() if language is None else [tokens.languages[language]]
    return TranscriptRules(tokens=tokens, forced=(token_set(spoken), 1 << tokens.tasks[task]))
