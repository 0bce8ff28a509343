"""What a tokenizer can make of a text, bounded before it runs.

The steps of a tokenizer.json can lengthen a text: twelve that replace a letter by ten of it make 10^12 letters, and
the tokenizers library ends the process when memory is refused. So each step gets the factor by which it can lengthen
any text at most, and the product for all steps has a limit.
"""

import base64
import json
import unicodedata
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from nanopage.model_files import parse_json, rust_errors, shown

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


def growth(tokenizer: Tokenizer, source: str) -> float:
    """How many times longer the normalizer and the pre-tokenizer can make a text, at most.

    Raises: ValueError naming the file and the part that has no acceptable bound.
    """
    return prod(_checked(tokenizer, part, source, MAX_GROWTH) for part in ("normalizer", "pre_tokenizer"))


def check_added(text: str, file: Path) -> None:
    """Check what loading a tokenizer.json makes of its added tokens, which may have to be normalized.

    Args: text: of the file. Raises: ValueError as `growth`.
    """
    try:
        parts = parse_json(text)
        contents = [token["content"] for token in parts["added_tokens"] if token["normalized"]]
        empty = {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}
        with rust_errors(""):
            without_tokens = Tokenizer.from_str(json.dumps(parts | empty))
        num_chars = sum(map(len, contents))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{file} is not a readable tokenizer: {str(error)[:300]}") from None
    grown = num_chars * growth(without_tokens, str(file))
    if grown > MAX_ADDED:
        raise ValueError(f"{file}: added_tokens can become {grown:,.0f} characters; supported: at most {MAX_ADDED:,}")


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
