"""Text to ids and back, and the incremental detokenizer against an oracle that decodes everything after every token."""

import base64
import itertools
import json
import os

import pytest
import tokenizers
from helpers import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from nanopage.text import tokenizer_bounds
from nanopage.text.detokenizer import IncrementalDetokenizer
from nanopage.text.stop_strings import StopStrings
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights.hub import default_model

REPLACEMENT = "\ufffd"
fuzz = settings(max_examples=examples(200), deadline=None, derandomize=True)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(default_model())


@pytest.fixture(scope="module")
def byte_ids(byte_level) -> list[int]:
    """The tokens of single bytes; the vocabulary lacks a few that are rare or that UTF-8 never uses."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    ids = [byte_level.backend.token_to_id(char[byte]) for byte in range(256)]
    return [token_id for token_id in ids if token_id is not None]


SP_PIECES = ["▁", *"helowrdatin.,", "he", "ll", "▁he", "▁w", "▁a", "or", "▁▁"]


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory) -> Tokenizer:
    """In the manner of Llama 2: a space is part of the word after it, and what has no token is spelt in bytes."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SP_PIECES]
    merges = [("h", "e"), ("l", "l"), ("▁", "he"), ("▁", "w"), ("▁", "a"), ("o", "r"), ("▁", "▁")]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocab)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in vocab[:3]])
    directory = tmp_path_factory.mktemp("sentence_piece")
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def bytes_as_tokens(tokenizer, byte_ids, text: str) -> list[int]:
    if tokenizer.backend.token_to_id("<0x00>") is not None:
        return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    one_byte = {tokenizer.backend.id_to_token(token_id): token_id for token_id in byte_ids}
    return [one_byte[char] for token in tokenizer.encode(text) for char in tokenizer.backend.id_to_token(token)]


PIECES = [
    "a", "b", " ", "\n", "é", "你", "好", "🙂", "👩‍👩‍👧‍👦", "🏳️‍🌈", "🇸🇪", "👍🏽", "e\u0301", "क्षि", "ﷺ",
    "\u200d", "\u0301", "𝔘", "\U0010ffff", "\x00", " hello", " wor", "ld.", "<|im_end|>",
]  # fmt: skip
# Unassigned characters are spelt with bytes that the default model's vocabulary lacks.
CHARACTERS = st.characters(exclude_categories=("Cs", "Cn", "Co", "Cc"), exclude_characters=REPLACEMENT)
TEXT = st.lists(st.sampled_from(PIECES) | st.text(CHARACTERS, max_size=4), max_size=12).map("".join)


class Stream:
    """A detokenizer driven as the engine drives it, one token at a time."""

    def __init__(self, tokenizer, prompt=(), stop=(), **options):
        trie = StopStrings(list(stop)) if stop else None
        self.detokenizer = IncrementalDetokenizer(tokenizer, list(prompt), trie, **options)
        self.shown = []  # all that has been shown, after each token

    def run(self, token_ids, search_from=0) -> str | None:
        """Returns the stop string that ended it, if one did; the stops are searched from that token on."""
        for i, token_id in enumerate(token_ids):
            stop = self.detokenizer.add(token_id, search_stop=i >= search_from)
            if stop is not None:
                break
            self.shown.append(self.detokenizer.certain_text())
        else:
            stop = None
        self.detokenizer.finish()
        self.shown.append(self.detokenizer.text)
        assert self.detokenizer.certain_text() == self.detokenizer.text
        assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(self.shown))
        assert all(self.text.startswith(text) for text in self.shown)
        return stop

    @property
    def text(self) -> str:
        return self.shown[-1]

    @property
    def unfinished(self) -> list[str]:
        return self.shown[:-1]


def first_stop(text: str, stops: list[str], searched: int = 0) -> tuple[int, str] | None:
    """(where, which) of the stop string that ends first beyond the first `searched` characters; of those that end
    together the longest."""
    for end in range(searched + 1, len(text) + 1):
        ending = [stop for stop in stops if text.endswith(stop, 0, end)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


def text_by_oracle(tokenizer, token_ids, stops, include=False, search_from=0, skip=True) -> tuple[str, str | None]:
    """(final text, stop string), by decoding all the tokens after each one."""
    searched = 0
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count], skip)
        if count <= search_from:
            searched = len(text.rstrip(REPLACEMENT))
        elif found := first_stop(text, stops, searched):
            at, stop = found
            return text[: at + len(stop) if include else at], stop
    return tokenizer.decode(token_ids, skip), None


# Tokenizer


def test_encoding_round_trips(byte_level):
    @fuzz
    @given(TEXT)
    def check(text):
        assert byte_level.decode(byte_level.encode(text), skip_special_tokens=False) == text

    check()


def test_the_tokens_that_contain_a_text(byte_level, sentence_piece):
    for tokenizer in (byte_level, sentence_piece):
        ids = range(tokenizer.vocab_size)
        for text in ("\n", " ", "e", "th", "é"):
            expected = [i for i in ids if text.encode() in tokenizer.token_bytes(i)]
            assert tokenizer.containing((text,)) == (expected or tokenizer.encode(text, add_special_tokens=False)[-1:])
        both = {*tokenizer.containing(("e",)), *tokenizer.containing(("th",))}
        assert tokenizer.containing(("e", "th")) == sorted(both)
        spread = "xyzzy" * 9  # in no token: its last token stands for it
        assert tokenizer.containing((spread,)) == tokenizer.encode(spread, add_special_tokens=False)[-1:]


def test_tokens_are_those_of_transformers(byte_level):
    reference = AutoTokenizer.from_pretrained(default_model())

    @settings(fuzz, max_examples=examples(60))
    @given(TEXT)
    def check(text):
        ids = byte_level.encode(text)
        assert ids == reference(text)["input_ids"]
        for skip in (True, False):
            assert byte_level.decode(ids, skip) == reference.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )

    check()


def test_special_tokens_in_text_are_one_token(byte_level):
    assert byte_level.encode("<|im_start|>") == [1]
    assert byte_level.decode([1, *byte_level.encode("hi"), 2]) == "hi"
    assert byte_level.decode([1, *byte_level.encode("hi"), 2], skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"


def test_special_tokens_are_added_only_if_asked(sentence_piece):
    assert sentence_piece.encode("he") == [1, *sentence_piece.encode("he", add_special_tokens=False)]
    assert sentence_piece.decode(sentence_piece.encode("he")) == "he"


def test_vocab_size_counts_added_tokens(byte_level, sentence_piece):
    assert byte_level.vocab_size == 49152
    assert sentence_piece.vocab_size == 3 + 256 + len(SP_PIECES)


def test_truncation_and_padding_of_the_file_are_ignored(byte_level, tmp_path):
    data = json.loads(byte_level.backend.to_str())
    backend = tokenizers.Tokenizer.from_str(json.dumps(data))
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    for text in ("a", "one two three four five six"):
        assert Tokenizer(tmp_path).encode(text) == byte_level.encode(text)
        assert backend.encode(text).ids != byte_level.encode(text)


def test_a_directory_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": 5}', "\x00"])
def test_a_broken_tokenizer_is_named(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer(tmp_path)


def test_special_tokens_are_read_in_both_notations(sentence_piece, tmp_path):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "other": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("more", [{}, {"added_tokens_decoder": {}}], ids=["older", "newer"])
def test_the_older_file_of_special_tokens_is_read_where_transformers_reads_it(sentence_piece, tmp_path, more):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<unk>"} | more
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    older = {"eos_token": {"content": "</s>"}, "unk_token": "<unk>", "additional_special_tokens": ["<s>"]}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for name in ("bos_token", "eos_token"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.end_ids() >= {theirs.eos_token_id} and (ours.eos_token == "</s>") is (more == {})
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": 5}')
    if not more:
        with pytest.raises(ValueError, match=r"special_tokens_map.json: eos_token must be a string or an object"):
            Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("special", "plain", "eos", "ends"),
    [
        (["<|endoftext|>", "<|end|>", "<|user|>"], [], "<|endoftext|>", ["<|endoftext|>", "<|end|>"]),
        (["<s>", "</s>", "<|im_start|>", "<|im_end|>"], [], "</s>", ["</s>", "<|im_end|>"]),
        (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"], [], None, ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]),
        (["<eos>", "<end_of_turn>"], ["</s>", "<|im_end|>"], "<eos>", ["<eos>", "<end_of_turn>"]),  # text, in Gemma's
        (["<eos>", "<turn|>", "<|tool_response>"], [], "<eos>", ["<eos>", "<turn|>", "<|tool_response>"]),
        (["<|return|>", "<|call|>", "<|end|>"], [], "<|return|>", ["<|return|>", "<|call|>"]),  # parts end with <|end|>
        (["<|calls|>", "<|flush|>", "<|end|>"], [], "<|end|>", ["<|calls|>", "<|flush|>", "<|end|>"]),
        (["[EOS]", "<stop>"], ["end"], "<stop>", ["[EOS]", "<stop>"]),
        (["<stop>", "<fim_pad>", "<reponame>", "<fim_prefix>"], [], "<stop>", ["<stop>", "<fim_pad>", "<reponame>"]),
        (["<stop>"], [], "missing", []),
    ],
)
def test_replies_end_with_end_of_sequence_and_with_what_is_an_end_by_name(tmp_path, special, plain, eos, ends):
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert Tokenizer(tmp_path).end_ids() == {backend.token_to_id(token) for token in ends}
    assert Tokenizer(tmp_path, num_embeddings=1).end_ids() == frozenset()  # the model has no embedding for them


@pytest.mark.parametrize("name", ["bos_token", "eos_token", "unk_token", "pad_token"])
@pytest.mark.parametrize(
    "value", [{}, {"content": None}, {"content": ["x"]}, 5, ["<s>"], True, {"token": "<s>"}], ids=str
)
def test_a_special_token_that_is_no_string_is_named(sentence_piece, tmp_path, name, value):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ValueError, match=f"{name} must be a string or an object") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer_config.json") in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [5, {"default": "x"}, ["x"], [["default", "x"]], [{"name": "default"}], [{"template": "x"}], True,
     [{"name": "default", "template": 5}], [{"name": 1, "template": "x"}]],
    ids=str,
)  # fmt: skip
def test_a_chat_template_that_is_none_is_named(sentence_piece, tmp_path, value):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ValueError, match=r"the chat_template in .* must be a string or a list of ") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer_config.json") in str(caught.value)
    (tmp_path / "chat_template.jinja").write_text("used instead")
    assert Tokenizer(tmp_path).chat_template == "used instead"


def test_the_default_of_several_chat_templates_is_used(sentence_piece, tmp_path):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    for names, used in ([("tool_use", "default"), "of default"], [("tool_use",), None], [(), None]):
        templates = [{"name": name, "template": f"of {name}"} for name in names]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
        assert Tokenizer(tmp_path).chat_template == used


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_refused_by_name(sentence_piece, tmp_path, name, make):
    if name != "tokenizer.json":
        sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    make(tmp_path / name)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file whose reading fails")
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_cannot_be_read_is_named(sentence_piece, tmp_path, name):
    if name != "tokenizer.json":
        sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).symlink_to("/proc/self/mem")
    with pytest.raises(ValueError) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_text_that_is_not_utf_8_is_named(sentence_piece, tmp_path, name):
    sentence_piece.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(b'{"bos_token": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8") as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def with_parts(directory, **parts):
    """A directory with a tokenizer of two letters, some of its parts replaced."""
    data = json.loads(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str())
    (directory / "tokenizer.json").write_text(json.dumps(data | parts))
    return directory


ADDED = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
BACKTRACKING = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
SPLIT = {"type": "Split", "pattern": BACKTRACKING["pattern"], "behavior": "Isolated", "invert": False}
UNDEFINED = [{"SpecialToken": {"id": "X", "type_id": 0}}]


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},  # the Rust code panics
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # so it does here
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": "x"}},
        {"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 9}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
    ],
    ids=lambda parts: str(parts)[:60],
)
def test_a_tokenizer_that_cannot_be_built_is_named(tmp_path, parts):
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a readable tokenizer"):
        Tokenizer(with_parts(tmp_path, **parts))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({"normalizer": BACKTRACKING}, "a" * 40 + "b"),  # Oniguruma gives up, and the Rust code panics
        ({"pre_tokenizer": SPLIT}, "a" * 40 + "b"),
        ({"model": {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": None}}, "abc"),
        (
            {"post_processor": {"type": "TemplateProcessing", "single": UNDEFINED, "pair": [], "special_tokens": {}}},
            "a",
        ),
        ({}, "\ud800"),
    ],
    ids=["normalizer", "pre-tokenizer", "unigram", "template", "surrogate"],
)
def test_a_text_that_the_tokenizer_fails_on_is_a_value_error(tmp_path, parts, text):
    tokenizer = Tokenizer(with_parts(tmp_path, **parts))
    with pytest.raises(ValueError, match=rf"tokenizer\.json.* failed on a text of {len(text)} characters"):
        tokenizer.encode(text)


def test_an_expression_that_takes_too_long_is_named_and_the_next_text_works(tmp_path, monkeypatch):
    """A cubic one, which Oniguruma's own limit does not end. Its key is written with an escape."""
    monkeypatch.setattr(tokenizer_bounds.TRIAL_LIMITS, "cpu_seconds", 0.3)
    with_parts(tmp_path, pre_tokenizer=SPLIT | {"pattern": {"Regex": "a*a*(?:b|c)(?!.)|d"}})
    file = tmp_path / "tokenizer.json"
    file.write_text(file.read_text().replace('"Regex"', '"\\u0052egex"'))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    for encode in (tokenizer.encode, tokenizer.encode_truncated):
        with pytest.raises(ValueError, match=r"tokenizer\.json: .* 'a\*a\*\(.* took more than 0\.3 s of CPU time"):
            encode("a" * 3000 + "xb")
    assert tokenizer.encode("ba") == [1, 0]


def test_well_known_expressions_are_not_tried_out(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_bounds.LimitedProcess, "ask", lambda *args: pytest.fail("a process was asked"))
    split = [SPLIT | {"pattern": {"Regex": pattern}} for pattern in tokenizer_bounds.LINEAR]
    tokenizer = Tokenizer(with_parts(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": split}))
    assert tokenizer.encode("a b") == [0, 1]


def test_tokens_that_the_tokenizer_fails_on_are_a_value_error(tmp_path):
    tokenizer = Tokenizer(with_parts(tmp_path))
    assert tokenizer.decode([1]) == "b"
    for token_id in (-1, 2**40):
        with pytest.raises(ValueError, match=r"tokenizer\.json failed to decode 1 tokens"):
            tokenizer.decode([token_id])


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    with_parts(tmp_path)
    for num_embeddings in (2, 3, 1000):
        assert Tokenizer(tmp_path, num_embeddings).encode("ab") == [0, 1]
    with pytest.raises(
        ValueError, match="has 2 tokens and the model has embeddings for 1: it belongs to another model"
    ):
        Tokenizer(tmp_path, 1)


def test_an_added_token_that_the_model_does_not_have_is_refused_when_a_text_has_it(tmp_path):
    with_parts(tmp_path, added_tokens=[{"id": 2, "content": "<c>"} | ADDED, {"id": 3, "content": "<d>"} | ADDED])
    tokenizer = Tokenizer(tmp_path, 3)
    assert tokenizer.encode("a<c>b") == [0, 2, 1]
    assert tokenizer.encode("") == []
    with pytest.raises(ValueError, match=r"the token '<d>', which is 3 in .*: the model has embeddings for 3 tokens"):
        tokenizer.encode("a<d>b")
    assert Tokenizer(tmp_path).encode("a<d>b") == [0, 3, 1]


def test_a_tokenizer_json_that_is_too_large_is_not_read(tmp_path):
    with_parts(tmp_path)
    os.truncate(tmp_path / "tokenizer.json", 2**27 + 1)  # a hole: takes no room on the disk
    with pytest.raises(ValueError, match=r"tokenizer\.json is larger than 128 MiB"):
        Tokenizer(tmp_path)


def replace(pattern, content, times=1):
    step = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [step] * times, "decoders": [step] * times}


def template(ids, tokens, *texts):
    special = {"id": "X", "ids": ids, "tokens": tokens}
    pieces = [
        {"SpecialToken": {"id": "X", "type_id": 0}},
        *({"Sequence": {"id": text, "type_id": 0}} for text in texts),
    ]
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"X": special}}


A, NORMALIZES = {"String": "a"}, ADDED | {"id": 2, "content": "aa", "normalized": True}
CHARSMAP = base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * 10**5 + b"\0").decode()
BOMBS = {
    "twelve replacements": ({"normalizer": replace(A, "a" * 10, 12)}, "normalizer can make a text more than"),
    "a long replacement": ({"normalizer": replace(A, "b" * 10**6)}, "normalizer can make"),
    "an expression": ({"normalizer": replace({"Regex": "(?=a)"}, "b" * 10**6)}, "normalizer can make"),
    "nothing replaced": ({"normalizer": replace({"String": ""}, "bb", 12)}, "normalizer can make"),
    "a ligature": ({"normalizer": replace(A, "\ufdfa" * 100)}, "normalizer can make"),
    "Prepend": ({"normalizer": {"type": "Prepend", "prepend": "b" * 10**8}}, "normalizer can make"),
    "Precompiled": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "normalizer can make"),
    "bytes of bytes": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}}, "can make"),
    "a thousand steps": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000}}, "1,000 steps"),
    "added tokens": ({"normalizer": replace(A, "a" * 10, 12), "added_tokens": [NORMALIZES]}, "normalizer can make"),
    "long added tokens": (
        {"normalizer": replace(A, "a" * 1000), "added_tokens": [NORMALIZES | {"content": "a" * 10**5}]},
        "added_tokens can become",
    ),
    "pre-tokenizers": (
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}] * 20}},
        "pre_tokenizer can make",
    ),
    "a decoder": ({"decoder": replace(A, "a" * 10, 12)}, "decoder can make"),
    "a decoder's expression": ({"decoder": BACKTRACKING}, "decoder: regular expressions are not supported"),
    "a long expression": ({"pre_tokenizer": SPLIT | {"pattern": {"Regex": "(?i)" + "ffi" * 10**5}}}, "300,004 char"),
    "ids of a template": ({"post_processor": template([0] * 10**5, ["a"] * 10**5, "A")}, "single adds 200,000"),
    "texts of a template": ({"post_processor": template([0], ["a"], *["A"] * 1000)}, "the same text twice"),
    "tokens of a template": ({"post_processor": template([0], ["a" * 10**6], "A")}, "single adds 1,000,001"),
    "a long token": ({"model": {"type": "BPE", "vocab": {"a" * 5000: 0}, "merges": []}}, "has 5,000 characters"),
    "a long added token": ({"added_tokens": [ADDED | {"id": 2, "content": "c" * 5000}]}, "has 5,000 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_what_a_tokenizer_can_make_of_a_text_is_bounded(tmp_path, name):
    """The tokenizers library ends the process when memory is refused."""
    parts, problem = BOMBS[name]
    with_parts(tmp_path, **parts)
    with pytest.raises(ValueError, match=problem) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_tokenizer_that_lengthens_texts_takes_short_ones(tmp_path):
    with_parts(tmp_path, normalizer=replace(A, "a" * 10, 3))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("a") == [0] * 1000
    for encode in (tokenizer.encode, tokenizer.encode_truncated):
        with pytest.raises(ValueError, match=r"tokenizer\.json can make 20,000,000 characters of a text of 20,000"):
            encode("a" * 20_000)


# The incremental detokenizer, byte-level


def random_ids(byte_ids):
    # Bytes by themselves make broken and unfinished characters; 459, 10003 and 15107 are a whole character and the
    # beginning of another; 0 to 16 are special.
    kinds = [st.sampled_from(byte_ids), st.sampled_from([459, 10003, 15107]), st.integers(0, 49151), st.integers(0, 16)]
    return st.lists(st.one_of(kinds), max_size=25)


@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_stream_to_their_decoding(byte_level, byte_ids, skip):
    @settings(fuzz, max_examples=examples(400))
    @given(random_ids(byte_ids), TEXT)
    def check(ids, prompt):
        stream = Stream(byte_level, byte_level.encode(prompt), skip_special_tokens=skip)
        assert stream.run(ids) is None
        assert stream.text == byte_level.decode(ids, skip)
        assert not any(text.endswith(REPLACEMENT) for text in stream.unfinished)

    check()


@pytest.mark.parametrize("skip", [True, False])
def test_random_texts_stream_to_themselves(byte_level, skip):
    @fuzz
    @given(TEXT, TEXT)
    def check(prompt, text):
        ids = byte_level.encode(text)
        stream = Stream(byte_level, byte_level.encode(prompt), skip_special_tokens=skip)
        stream.run(ids)
        assert stream.text == (text.replace("<|im_end|>", "") if skip else text)
        assert not any(REPLACEMENT in shown for shown in stream.unfinished)

    check()


@pytest.mark.parametrize(
    "pattern", [b"\x80", b"\xe2", b"\xf0\x9f", b"\x80a", b"\x80\x80a", b"\xe2\x80a\xa6", b"\xf0\xc3\xa9"]
)
@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
def test_bytes_that_are_no_characters_cost_no_more_at_the_end_of_a_text(request, byte_ids, monkeypatch, name, pattern):
    tokenizer = request.getfixturevalue(name)
    one = {tokenizer.token_bytes(token_id): token_id for token_id in range(300)}
    token_ids = [one[bytes([byte])] for byte in pattern] * (1500 // len(pattern))
    expected, decoded = tokenizer.decode(token_ids), 0
    decode = tokenizer.decode

    def counted(ids, *args):
        nonlocal decoded
        decoded += len(ids)
        return decode(ids, *args)

    monkeypatch.setattr(tokenizer, "decode", counted)
    stream = Stream(tokenizer)
    stream.run(token_ids)
    assert decoded < 120 * len(token_ids)
    if name == "byte_level":
        assert stream.text == expected


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 and 🇸🇪", "你好，世界", "e\u0301a\u0300", "👍🏽👍🏿", "x\ufffdy"])
def test_text_comes_out_as_soon_as_its_characters_are_whole(byte_level, byte_ids, text):
    stream = Stream(byte_level)
    ids = bytes_as_tokens(byte_level, byte_ids, text)
    assert len(ids) == len(text.encode())
    stream.run(ids)
    for count, shown in enumerate(stream.unfinished, start=1):
        assert shown == text.encode()[:count].decode(errors="ignore").rstrip(REPLACEMENT)
    assert stream.text == text


# A prompt that ends within a character


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("char", ["é", "你", "🙂"])
def test_a_character_the_prompt_began_is_shown_once_it_is_whole(request, byte_ids, name, char):
    tokenizer = request.getfixturevalue(name)
    ids = bytes_as_tokens(tokenizer, byte_ids, char)
    for split in range(1, len(ids)):
        stream = Stream(tokenizer, tokenizer.encode("he") + ids[:split])
        after = bytes_as_tokens(tokenizer, byte_ids, "🙂") + tokenizer.encode("a", add_special_tokens=False)
        stream.run(ids[split:] + after)
        assert stream.unfinished[: len(ids) - split - 1] == [""] * (len(ids) - split - 1)
        assert stream.unfinished[len(ids) - split - 1] == char
        assert stream.text.replace(" ", "") == char + "🙂a"


@pytest.mark.parametrize("name", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_no_output_is_no_text_even_after_an_unfinished_prompt(request, byte_ids, name, kept):
    tokenizer = request.getfixturevalue(name)
    stream = Stream(tokenizer, tokenizer.encode("he") + bytes_as_tokens(tokenizer, byte_ids, "🙂")[:kept])
    stream.run([])
    assert stream.text == ""


def test_a_replacement_character_at_the_end_of_the_prompt_is_not_repeated(byte_level):
    stream = Stream(byte_level, byte_level.encode("broken: \ufffd"))
    stream.run(byte_level.encode(" yes"))
    assert stream.text == " yes"


# The incremental detokenizer, SentencePiece


SP_TEXT = st.lists(
    st.sampled_from(["hello", " world", " ", "  ", "a", " a", "你", "🙂", "é", "x", ".", "\n", "e\u0301", "👩‍👧"]),
    max_size=10,
).map("".join)


def test_sentence_piece_text_streams_to_its_decoding(sentence_piece):
    @settings(fuzz, max_examples=examples(400))
    @given(SP_TEXT, st.data())
    def check(text, data):
        ids = sentence_piece.encode(text)
        split = data.draw(st.integers(0, len(ids)))
        prompt = sentence_piece.decode(ids[:split])
        if prompt.endswith(REPLACEMENT):
            return
        stream = Stream(sentence_piece, ids[:split])
        stream.run(ids[split:])
        assert stream.text == text[len(prompt) :]
        assert not any(REPLACEMENT in shown for shown in stream.unfinished)

    check()


def test_sentence_piece_ids_stream_to_their_decoding(sentence_piece):
    words = [range(259, 259 + len(SP_PIECES)), [0, 1, 2]]
    chars = [[3 + byte for byte in char.encode()] for char in ("你", "é", "🙂", "\n")]

    @settings(fuzz, max_examples=examples(400))
    @given(st.lists(st.sampled_from([[i] for ids in words for i in ids] + chars)), st.booleans(), st.booleans())
    def check(groups, after_prompt, skip):
        prompt = sentence_piece.encode("hello w") if after_prompt else []
        ids = [token_id for group in groups for token_id in group]
        stream = Stream(sentence_piece, prompt, skip_special_tokens=skip)
        stream.run(ids)
        before = sentence_piece.decode(prompt, skip)
        assert before + stream.text == sentence_piece.decode(prompt + ids, skip)
        assert not any(REPLACEMENT in shown for shown in stream.unfinished)

    check()


def test_the_space_before_the_first_word_depends_on_the_prompt(sentence_piece):
    ids = sentence_piece.encode("hello", add_special_tokens=False)
    for prompt, text in [([], "hello"), ([1], "hello"), (sentence_piece.encode("a"), " hello")]:
        stream = Stream(sentence_piece, prompt)
        stream.run(ids)
        assert stream.text == text


@pytest.mark.parametrize("prompt", ["🙂", "🙂🙂", "你好吗", "x 🙂🙂🙂"])
@pytest.mark.parametrize("output", ["a", " hello", "🙂", "🙂a"])
def test_a_prompt_that_ends_in_spelt_out_bytes_leaves_no_trace(sentence_piece, prompt, output):
    ids, both = sentence_piece.encode(prompt), sentence_piece.encode(prompt + output)
    assert both[: len(ids)] == ids
    stream = Stream(sentence_piece, ids)
    stream.run(both[len(ids) :])
    assert stream.text == output


def test_a_character_cut_off_does_not_take_back_what_was_shown(sentence_piece):
    ids = sentence_piece.encode("a你你", add_special_tokens=False)[:-1]
    stream = Stream(sentence_piece, [1])
    stream.run(ids)
    assert stream.unfinished[-1] == "a你"
    assert stream.text.rstrip(REPLACEMENT) == "a你"
    assert stream.text.endswith(REPLACEMENT)


# Special tokens


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_skipped_or_shown(byte_level, skip):
    stream = Stream(byte_level, [1], skip_special_tokens=skip)
    stream.run(byte_level.encode("<|im_start|>a<|im_end|> 🙂<file_sep>"))
    assert stream.text == ("a 🙂" if skip else "<|im_start|>a<|im_end|> 🙂<file_sep>")


def test_a_special_token_can_be_a_stop_string_only_if_it_is_shown(byte_level):
    ids = byte_level.encode("one<|im_end|>two")
    for skip, text in [(True, "onetwo"), (False, "one")]:
        stream = Stream(byte_level, [1], ["<|im_end|>"], skip_special_tokens=skip)
        stream.run(ids)
        assert stream.text == text


def test_a_skipped_special_token_within_a_character_does_not_break_it(byte_level, byte_ids):
    ids = bytes_as_tokens(byte_level, byte_ids, "你")
    stream = Stream(byte_level, [])
    stream.run([ids[0], 2, ids[1], 2, 2, ids[2]])
    assert stream.unfinished == [""] * 5 + ["你"]


# Stop strings

LETTERS = st.sampled_from(["a", "b", "ab", " ", "é", "你", "🙂", "e\u0301", "\n"])
STOPS = st.lists(st.lists(LETTERS, min_size=1, max_size=4).map("".join), min_size=1, max_size=4)


@st.composite
def text_and_stops(draw):
    """A text of few letters, and stop strings that are likely to be in it, overlap and begin with each other."""
    text = "".join(draw(st.lists(LETTERS, min_size=1, max_size=16)))
    stops = draw(STOPS)
    if draw(st.booleans()):
        start = draw(st.integers(0, len(text) - 1))
        stops[0] = text[start : start + draw(st.integers(1, 5))]
    if draw(st.booleans()):
        stops = [*stops[:3], stops[0][: draw(st.integers(1, len(stops[0])))]]
    return text, stops


@st.composite
def tokens_of(draw, tokenizer, text, byte_ids):
    """The text cut anywhere and encoded piece by piece, some pieces byte by byte."""
    ids = []
    while text:
        size = draw(st.integers(1, 6))
        piece, text = text[:size], text[size:]
        ids += bytes_as_tokens(tokenizer, byte_ids, piece) if draw(st.booleans()) else tokenizer.encode(piece)
    return ids


@pytest.mark.parametrize("include", [False, True])
def test_the_text_ends_at_the_earliest_stop_string(byte_level, byte_ids, include):
    @settings(fuzz, max_examples=examples(500))
    @given(text_and_stops(), st.data())
    def check(text_stops, data):
        text, stops = text_stops
        ids = data.draw(tokens_of(byte_level, text, byte_ids))
        stream = Stream(byte_level, byte_level.encode("Once"), stops, include_stop_str=include)
        stop = stream.run(ids)
        assert (stream.text, stop) == text_by_oracle(byte_level, ids, stops, include)
        if stop is None:
            assert stream.text == text
        elif not include:
            assert not any(s in stream.text for s in stops)

    check()


@pytest.mark.parametrize("include", [False, True])
def test_the_stream_holds_back_just_what_may_become_a_stop_string(byte_level, byte_ids, include):
    @settings(fuzz, max_examples=examples(300))
    @given(text_and_stops())
    def check(text_stops):
        text, stops = text_stops
        ids = bytes_as_tokens(byte_level, byte_ids, text)
        stream = Stream(byte_level, [], stops, include_stop_str=include)
        stream.run(ids)
        for count, shown in enumerate(stream.unfinished, start=1):
            whole = text.encode()[:count].decode(errors="ignore")
            held = max(len(s[:n]) for s in stops for n in range(len(s)) if whole.endswith(s[:n]))
            assert shown == whole[: len(whole) - held]

    check()


def test_stop_strings_count_only_from_when_they_are_searched(byte_level, byte_ids):
    @settings(fuzz, max_examples=examples(500))
    @given(text_and_stops(), st.data())
    def check(text_stops, data):
        text, stops = text_stops
        ids = [token_id for char in text for token_id in data.draw(tokens_of(byte_level, char, byte_ids))]
        search_from = data.draw(st.integers(0, len(ids)))
        stream = Stream(byte_level, [], stops)
        stop = stream.run(ids, search_from)
        assert (stream.text, stop) == text_by_oracle(byte_level, ids, stops, search_from=search_from)

    check()


def test_a_stop_string_passed_over_stays_in_the_text(byte_level):
    stream = Stream(byte_level, [], ["END"])
    ids = [token_id for part in ("one END", " two", " END three") for token_id in byte_level.encode(part)]
    assert stream.run(ids, search_from=len(byte_level.encode("one END"))) == "END"
    assert stream.text == "one END two "


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_random_tokens_as_they_end_their_decoding(byte_level, byte_ids, include):
    @settings(fuzz, max_examples=examples(300))
    @given(random_ids(byte_ids), st.data())
    def check(ids, data):
        text = byte_level.decode(ids)
        start = data.draw(st.integers(0, len(text)))
        stops = [text[start : start + 3], data.draw(st.text(min_size=1, max_size=2))]
        stops = [stop for stop in stops if stop and REPLACEMENT not in stop]
        stream = Stream(byte_level, [], stops, include_stop_str=include)
        stop = stream.run(ids)
        assert (stream.text, stop) == text_by_oracle(byte_level, ids, stops, include)

    check()


def test_a_stop_string_in_front_of_an_unfinished_character_is_found(byte_level):
    # One token is a space and the first bytes of an emoji, and the output ends there.
    space_and_more = byte_level.encode(" 🦄")[0]
    assert byte_level.decode([space_and_more]) == " " + REPLACEMENT
    stream = Stream(byte_level, [], [" "])
    assert stream.run([*byte_level.encode("one"), space_and_more]) == " "
    assert stream.text == "one"


def test_sentence_piece_stop_strings(sentence_piece):
    @settings(fuzz, max_examples=examples(300))
    @given(SP_TEXT, st.lists(SP_TEXT.filter(bool), min_size=1, max_size=3), st.booleans())
    def check(text, stops, include):
        stops = [stop[:4] for stop in stops]
        ids = sentence_piece.encode(text)
        stream = Stream(sentence_piece, ids[:1], stops, include_stop_str=include)
        stop = stream.run(ids[1:])
        assert (stream.text, stop) == text_by_oracle(sentence_piece, ids[1:], stops, include)

    check()


@pytest.mark.parametrize(
    "stops, include, text, stop",
    [
        (["two"], False, "one ", "two"),
        (["two"], True, "one two", "two"),
        (["three", "two"], False, "one ", "two"),
        (["two t", "two"], False, "one ", "two"),
        (["e t", "o th"], False, "on", "e t"),
        (["four"], False, "one two three", None),
        (["threee"], False, "one two three", None),
        (["one two three"], False, "", "one two three"),
        (["one two three"], True, "one two three", "one two three"),
    ],
)
def test_stop_strings_by_example(byte_level, stops, include, text, stop):
    stream = Stream(byte_level, byte_level.encode("zero "), stops, include_stop_str=include)
    assert stream.run(byte_level.encode("one") + byte_level.encode(" two") + byte_level.encode(" three")) == stop
    assert stream.text == text


def test_a_stop_string_in_the_prompt_does_not_count(byte_level):
    stream = Stream(byte_level, byte_level.encode("the END"), ["END", "D a"])
    assert stream.run(byte_level.encode(" and on")) is None
    assert stream.text == " and on"


# transformers' names


def test_a_tokenizer_is_called_as_in_transformers(byte_level):
    reference = AutoTokenizer.from_pretrained(default_model())
    for text in ("Hello, world", "", ["Hello", "Hello, world"]):
        ours, theirs = byte_level(text), reference(text)
        assert ours["input_ids"] == ours.input_ids == theirs["input_ids"]
        assert ours["attention_mask"] == ours.attention_mask == theirs["attention_mask"]
    for name in ("bos_token", "eos_token", "pad_token", "bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(byte_level, name) == getattr(reference, name)
    for wrong in (None, 5, b"x", ["x", 5], {"x": 1}):
        with pytest.raises(TypeError, match="text must be a string or a list of strings"):
            byte_level(wrong)
    with pytest.raises(TypeError, match="return_tensors"):
        byte_level("Hello", return_tensors="pt")


def test_special_tokens_are_added_unless_told_otherwise(sentence_piece):
    assert sentence_piece("he").input_ids == sentence_piece.encode("he")
    assert sentence_piece("he", add_special_tokens=False).input_ids == sentence_piece.encode("he", False)
    assert sentence_piece("he").input_ids != sentence_piece("he", add_special_tokens=False).input_ids


def test_a_special_token_that_is_not_there_has_no_id(sentence_piece):
    assert (sentence_piece.pad_token, sentence_piece.pad_token_id) == (None, None)


def test_a_conversation_can_be_encoded_at_once(byte_level):
    messages = [{"role": "user", "content": "Hello"}]
    text = byte_level.apply_chat_template(messages)
    assert byte_level.apply_chat_template(messages, tokenize=False) == text == byte_level.render_chat(messages)
    assert byte_level.apply_chat_template(messages, tokenize=True) == byte_level.encode(text, add_special_tokens=False)
