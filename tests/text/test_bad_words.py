"""bad_word_ids: no form of a word escapes, for tokenizers of every kind."""

import random

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from nanopage import SamplingParams
from nanopage.text.bad_words import MAX_COMPARED, bad_word_ids
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights.hub import default_model

WORDS = ["brute", "Brute", "cats", "New York", "ice-cream", "a", "I'm", "été", "猫", "don't panic", "x\ny", "42", "$5"]


def llama2(prepend: bool) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: a space is part of the word after it."""
    letters = sorted(set("▁\n" + "".join(WORDS).replace(" ", "▁")) | set("the "))
    merges = [("▁", "b"), ("b", "r"), ("br", "u"), ("▁b", "r"), ("t", "e"), ("a", "t"), ("▁", "c"), ("▁c", "at")]
    vocab = ["<unk>", *letters, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(vocab)}, merges, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] * prepend + [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return backend


def unigram() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), *((c, -9.0) for c in sorted(set("▁" + "".join(WORDS).replace(" ", "")) | set("the")))]
    pieces += [("▁brute", -3.0), ("rute", -4.0), ("▁cat", -3.0), ("cats", -3.0), ("▁New", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def word_piece() -> tokenizers.Tokenizer:
    letters = [*sorted(set("".join(WORDS).lower()) | set("the")), "brute", "br", "##ute", "cat", "##s", "new"]
    vocab = ["[UNK]", *letters, *(f"##{c}" for c in letters if len(c) == 1)]
    backend = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocab)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def tiktoken() -> tokenizers.Tokenizer:
    """Byte-level, with a pre-tokenizer that joins a sign to the word after it, as in Llama 3 and Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(
        tokenizers.Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated"
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([f"the {word} (brute cats) {word}" for word in WORDS] * 5, trainer)
    return backend


KINDS = {
    "llama 2": lambda: llama2(True),
    "llama 2 without a first space": lambda: llama2(False),
    "unigram": unigram,
    "WordPiece": word_piece,
    "tiktoken": tiktoken,
}


@pytest.fixture(scope="module", params=["default model", *KINDS])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "default model":
        return Tokenizer(default_model())
    backend, directory = KINDS[request.param](), tmp_path_factory.mktemp("tokenizer")
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def is_forbidden(tokenizer: Tokenizer, words: list[str], text: str) -> bool:
    ids = tokenizer.encode(text, add_special_tokens=False)
    sequences = bad_word_ids(tokenizer, words, 1)
    return any(ids[at : at + len(bad)] == bad for bad in sequences for at in range(len(ids)))


@pytest.mark.parametrize("word", WORDS)
def test_a_word_is_forbidden_at_the_beginning_after_a_space_and_after_a_line(tokenizer, word):
    for text in (word, f"the {word}", f" {word}", f"the\n{word}", f"the {word} the"):
        assert is_forbidden(tokenizer, [word], text), text
    assert not is_forbidden(tokenizer, [word], "the the")
    assert is_forbidden(tokenizer, [f" {word}"], f"the {word}")


def test_a_word_with_a_space_means_only_that_form():
    tokenizer = Tokenizer(default_model())
    assert is_forbidden(tokenizer, [" brute"], "the brute") and not is_forbidden(tokenizer, [" brute"], "brute")
    assert bad_word_ids(tokenizer, [" brute"], 1) == [tokenizer.encode(" brute")]
    assert bad_word_ids(tokenizer, [" "], 1) == [tokenizer.encode(" ")]
    assert bad_word_ids(tokenizer, ["\n"], 1) == [tokenizer.encode("\n")]


def test_no_word_of_the_vocabulary_escapes():
    """Both forms have another number of tokens for 22,146 words of this vocabulary."""
    tokenizer, rng = Tokenizer(default_model()), random.Random(0)
    vocab = [tokenizer.decode([token_id]) for token_id in rng.sample(range(300, tokenizer.vocab_size), 1500)]
    words = [word for text in vocab if (word := text.strip()).isalpha()]
    assert len(words) > 800
    for word in words:
        assert is_forbidden(tokenizer, [word], f"the {word}") and is_forbidden(tokenizer, [word], word), word


@pytest.mark.parametrize(
    ("words", "count", "message"),
    [
        (["long word " * 40], 1, r"bad_words: 'long .* has \d+ tokens: at most 64 are allowed"),
        ([f"w{i} and more of it" for i in range(4000)], 20, r"bad_words: .* for 20 completions are .* at most 262,144"),
        ([f"w{i}" for i in range(3000)] + ["many tokens " * 20], 4, r"bad_words: .* tokens to compare"),
    ],
)
def test_the_product_of_words_tokens_and_completions_is_bounded(words, count, message):
    tokenizer = Tokenizer(default_model())
    with pytest.raises(ValueError, match=message):
        bad_word_ids(tokenizer, words, count)


def test_a_thousand_words_are_far_from_the_bound():
    words = [f"word{i}" for i in range(1000)]
    sequences = bad_word_ids(Tokenizer(default_model()), words, SamplingParams().n)
    assert len(sequences) == 2 * 1000 and len(sequences) * max(map(len, sequences)) < MAX_COMPARED / 10
