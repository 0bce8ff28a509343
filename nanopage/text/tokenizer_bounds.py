"""What a tokenizer can make of a text, bounded before it runs.

The steps of a tokenizer.json can lengthen a text: twelve that each replace a letter by ten make 10^12 letters, and the
tokenizers library ends the process when memory is refused. So the factor by which each step can lengthen a text at most
is computed, and the product of these factors has a limit.

Time has no such bound: the library's regular expressions backtrack, and a bad one takes minutes for a text of 2,000
characters. So if a file has expressions that are not well known, a process that can be ended tries out each text first.
"""

import base64
import json
import re
import unicodedata
from collections.abc import Iterator
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanopage.files.limited_process import LimitedProcess, Limits
from nanopage.files.model_files import parse_json, rust_errors, shown

MAX_STEPS = 256  # of a part of a tokenizer
MAX_GROWTH = 1024.0  # of a text, by a tokenizer that is loaded at all
USUAL_GROWTH = 8.0  # with which a text may have any length; known models have at most 4
MAX_GROWN = 2**24  # characters that other tokenizers may make of a text
MAX_DECODED = 8.0  # growth of a token's text by the decoder
MAX_SPECIAL = 4096  # ids, and characters of tokens, that a template adds to a text
MAX_TOKEN = 1024  # characters; most tokenizers have some of 128
MAX_AFFIX = 64  # characters of what is added to each token
MAX_WORD = 1024  # characters that WordPiece looks at together: its work is the square
MAX_ADDED = 2**22  # characters of all added tokens
MAX_PATTERNS = 2**14  # characters of all regular expressions
NORMALIZED = 36  # bytes that Unicode's normal forms make of one character, at most

# Steps that lengthen no text, beyond what Unicode's normal forms do to it.
NEUTRAL = {
    *("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "Strip"),
    *("Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "BertPreTokenizer", "UnicodeScripts", "Split"),
    *("CharDelimiterSplit", "FixedLength", "Fuse", "ByteFallback", "BertProcessing", "RobertaProcessing"),
}
# ByteLevel writes a byte as a character of two, Metaspace and WordPiece add a character to each word, BPEDecoder and
# CTC may insert a space between all characters, BertNormalizer puts Chinese ones between spaces.
FACTORS = {"ByteLevel": 2.0, "Metaspace": 2.0, "WordPiece": 2.0, "BPEDecoder": 2.0, "CTC": 2.0, "BertNormalizer": 3.0}

# How byte-level BPE vocabularies split text before merging, by the names that llama.cpp has for them.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT_4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_SPLIT = _GPT_4O_SPLIT.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35_SPLIT = _QWEN2_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")
_DEEPSEEK3_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPLITS: dict[str, tuple[str, ...]] = {  # one after the other
    **dict.fromkeys(("llama-bpe", "dbrx", "glm4", "lfm2"), (_LLAMA3_SPLIT,)),
    "qwen2": (_QWEN2_SPLIT,),
    "qwen35": (_QWEN35_SPLIT,),
    "gpt-4o": (_GPT_4O_SPLIT,),
    "tekken": (_TEKKEN_SPLIT,),
    "deepseek-v3": _DEEPSEEK3_SPLITS,
}

# Regular expressions whose time is proportional to the length of any text: these, then those of CLIP and converted
# SentencePiece models.
LINEAR = {
    *chain(*SPLITS.values()),
    r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"\s+",
    " {2,}",
}
AS_JSON = {json.dumps(pattern, ensure_ascii=False) for pattern in LINEAR}
PATTERN = re.compile(r'"Regex"\s*:\s*("(?:[^"\\]|\\.)*")')
# An added token that is normalized, and an escape that could hide such a token or a regular expression. Python finds an
# expression that begins with plain text several times faster than one expression for both.
SUSPICIOUS = (re.compile(r'"normalized"\s*:\s*true'), re.compile(r"\\u00[567]"))
PROGRAM = Path(__file__).with_name("pattern_process.py").absolute()
TRIAL_LIMITS = Limits(memory=2 << 30, cpu_seconds=10.0, seconds=60.0, answer=10_000)


class Trial:
    """Tries out the regular expressions of a tokenizer.json in a process with limits. Threads may share it.

    Args: pipeline: a tokenizer.json with an empty model; patterns: its regular expressions that are not in LINEAR.
    """

    def __init__(self, pipeline: str, patterns: list[str], file: Path):
        self.pipeline, self.patterns, self.file = pipeline, patterns, file
        self._process = LimitedProcess(PROGRAM, ["tokenizers"], TRIAL_LIMITS)

    def check(self, text: str) -> None:
        """Raises: ValueError naming the file and the expressions if they fail on the text or exceed a limit."""
        if error := self._process.ask({"text": text}, self.pipeline).get("error"):
            patterns = ", ".join(map(shown, self.patterns[:4]))
            raise ValueError(
                f"{self.file}: the tokenizer, which has the regular expressions {patterns}, failed on a text of "
                f"{len(text):,} characters: {error}"
            )


def growth(tokenizer: Tokenizer, source: str) -> float:
    """How many times longer the normalizer and the pre-tokenizer can make a text, at most.

    Raises: ValueError naming the file and the part that has no acceptable bound.
    """
    return prod(_checked(tokenizer, part, source, MAX_GROWTH) for part in ("normalizer", "pre_tokenizer"))


def check_file(text: str, file: Path) -> Trial | None:
    """Check what loading a tokenizer.json does: it compiles the regular expressions, and normalizes added tokens.

    Args: text: of the file.
    Returns: what has to try out each text before the tokenizer encodes it; None: nothing has to.
    Raises: ValueError as `growth`.
    """
    if not any(each.search(text) for each in SUSPICIOUS) and AS_JSON.issuperset(PATTERN.findall(text)):
        return None  # without parsing the file, which would take longer than loading it
    try:
        parts = parse_json(text)
        added = parts.get("added_tokens") or []
        num_chars = sum(len(token["content"]) for token in added if token["normalized"])
        steps = {name: [*_patterns(parts.get(name))] for name in ("normalizer", "pre_tokenizer", "decoder")}
        pipeline = parts | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "post_processor": None}
        without_tokens = json.dumps(pipeline | {"added_tokens": []})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable tokenizer: {str(error)[:300]}") from None
    unknown = [pattern for name in steps for pattern in steps[name] if pattern not in LINEAR]
    if steps["decoder"] and not LINEAR.issuperset(steps["decoder"]):
        raise ValueError(f"{file}: decoder: regular expressions are not supported, got {shown(steps['decoder'])}")
    if (length := sum(map(len, unknown))) > MAX_PATTERNS:
        raise ValueError(
            f"{file} has regular expressions of {length:,} characters; supported: at most {MAX_PATTERNS:,}"
        )
    with rust_errors(f"{file} is not a readable tokenizer"):
        factor = growth(Tokenizer.from_str(without_tokens), str(file))
    if num_chars * factor > MAX_ADDED:
        raise ValueError(
            f"{file}: added_tokens can become {num_chars * factor:,.0f} characters; supported: at most {MAX_ADDED:,}"
        )
    if not unknown:
        return None
    trial = Trial(json.dumps(pipeline), unknown, file)
    trial.check("")  # loads it
    return trial


def _patterns(value: Any) -> Iterator[str]:
    """The regular expressions in a part of a tokenizer.json."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    if isinstance(value, dict) and isinstance(value.get("Regex"), str):
        yield value["Regex"]
    for child in children:
        yield from _patterns(child)


def check(tokenizer: Tokenizer, source: str) -> int:
    """Check what `growth` leaves out: the post-processor, the decoder and the tokens.

    Returns: characters of the longest token. Raises: ValueError as `growth`.
    """
    _checked(tokenizer, "post_processor", source, 1.0)
    _checked(tokenizer, "decoder", source, MAX_DECODED)
    for name in ("unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        value = getattr(tokenizer.model, name, None)
        if isinstance(value, str) and len(value) > MAX_AFFIX:
            raise ValueError(f"{source}: model.{name} has {len(value):,} characters; supported: at most {MAX_AFFIX}")
    word = getattr(tokenizer.model, "max_input_chars_per_word", 0)
    if word > MAX_WORD:
        raise ValueError(f"{source}: model.max_input_chars_per_word must be at most {MAX_WORD:,}, got {word:,}")
    longest = max(tokenizer.get_vocab(with_added_tokens=True), key=len, default="")
    if len(longest) > MAX_TOKEN:
        raise ValueError(
            f"{source}: the token {shown(longest)} has {len(longest):,} characters; supported: at most {MAX_TOKEN:,}"
        )
    return len(longest)


def check_text(text: str, growth: float, source: str) -> None:
    """Raises: ValueError for a text that a tokenizer of this growth could make too long."""
    if growth > USUAL_GROWTH and len(text) * growth > MAX_GROWN:
        raise ValueError(
            f"{source} can make {len(text) * growth:,.0f} characters of a text of {len(text):,}; supported: at most "
            f"{MAX_GROWN:,}"
        )


def _checked(tokenizer: Tokenizer, part: str, source: str, most: float) -> float:
    component: Any = getattr(tokenizer, part)
    if component is None:
        return 1.0
    steps = list(_steps(json.loads(component.__getstate__())))
    if len(steps) > MAX_STEPS:
        raise ValueError(f"{source}: {part} has {len(steps):,} steps; supported: at most {MAX_STEPS}")
    factor = 1.0
    for step in steps:
        try:
            factor *= _factor(step)
        except ValueError as error:
            raise ValueError(f"{source}: {part}: {error}") from None
        if factor > most:
            raise ValueError(
                f"{source}: {part} can make a text more than {most:,.0f} times longer, at {shown(step.get('type'))}"
            )
    return factor


def _steps(value: dict[str, Any]) -> list[dict[str, Any]]:
    """A part's steps, in order, without sequences."""
    if value["type"] != "Sequence":
        return [value]
    (children,) = (inner for inner in value.values() if isinstance(inner, list))
    return [step for child in children for step in _steps(child)]


def _factor(step: dict[str, Any]) -> float:
    """How many times longer a step can make a text. Texts are measured in what NFKD makes of them, so that normal forms
    lengthen nothing."""
    kind = step["type"]
    if kind in NEUTRAL:
        return 1.0
    if kind in FACTORS:
        return FACTORS[kind]
    if kind == "Prepend":  # to each part of a text, between special tokens
        return 1.0 + _length(step["prepend"])
    if kind == "Replace":
        ((how, pattern),) = step["pattern"].items()
        content = _length(step["content"])
        # An expression may match between any two characters.
        return max(1.0, content / len(pattern)) if how == "String" and pattern else 1.0 + content
    if kind == "Precompiled":
        data = base64.b64decode(step["precompiled_charsmap"])
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(1.0, max(map(len, texts)) / NORMALIZED)
    if kind == "TemplateProcessing":
        return _template(step)
    raise ValueError(f"{shown(kind)} is not supported")


def _template(step: dict[str, Any]) -> float:
    for name in ("single", "pair"):
        added, texts = 0, []
        for piece in step[name]:
            if "Sequence" in piece:
                texts.append(piece["Sequence"]["id"])
            elif (token := step["special_tokens"].get(piece["SpecialToken"]["id"])) is not None:
                added += len(token["ids"]) + sum(map(len, token["tokens"]))
        if len(texts) > len(set(texts)):
            raise ValueError(f"{name} has the same text twice")
        if added > MAX_SPECIAL:
            raise ValueError(f"{name} adds {added:,} ids and characters; supported: at most {MAX_SPECIAL:,}")
    return 1.0


def _length(text: str) -> int:
    return len(unicodedata.normalize("NFKD", text))
