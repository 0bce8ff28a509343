"""Words that an output may not contain, as sequences of tokens."""

from nanopage.text.tokenizer import Tokenizer

MAX_TOKENS = 64  # of one word
MAX_COMPARED = 262_144  # tokens for each token of a request: words * tokens of the longest word * completions


def bad_word_ids(tokenizer: Tokenizer, words: list[str], num_completions: int) -> list[list[int]]:
    """The sequences of tokens that complete one of these words, at the beginning of a text, after a space and after a
    line break. A word that begins with white space stands only for itself.

    Raises: ValueError if a word has no tokens, or too many; or if there are too many words.
    """
    found = []
    for word in words:
        forms = {tuple(ids) for form in forms_of(word) for ids in ways_to_encode(tokenizer, form)} - {()}
        if not forms:
            raise ValueError(f"bad_words: {word[:100]!r} has no tokens")
        if (longest := max(map(len, forms))) > MAX_TOKENS:
            raise ValueError(f"bad_words: {word[:100]!r} has {longest:,} tokens: at most {MAX_TOKENS} are allowed")
        # If the space is a token of its own, the sequence without it is enough.
        found += [list(ids) for ids in sorted(forms) if not any(ids[start:] in forms for start in range(1, len(ids)))]
    compared = len(found) * max(map(len, found), default=0) * num_completions
    if compared > MAX_COMPARED:
        raise ValueError(
            f"bad_words: {len(found):,} sequences of at most {max(map(len, found))} tokens for {num_completions} "
            f"completions are {compared:,} tokens to compare: at most {MAX_COMPARED:,} are allowed"
        )
    return found


def forms_of(word: str) -> tuple[str, ...]:
    return (word,) if word[0].isspace() else (word, " " + word)


def ways_to_encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """A text's tokens at the beginning, where some tokenizers put a space in front of it, and after a line break."""
    line_break, both = (tokenizer.encode(each, add_special_tokens=False) for each in ("\n", "\n" + text))
    within = both[len(line_break) :] if both[: len(line_break)] == line_break else []
    return tokenizer.encode(text, add_special_tokens=False), within
