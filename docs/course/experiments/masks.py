"""A text that follows a grammar: how many tokens may come next, before each of its tokens and after the last.

python docs/course/experiments/masks.py
"""

from dataclasses import dataclass

from drafts import visible

from nanopage.grammar.matcher import make_matcher
from nanopage.grammar.structured import CompiledGrammar, Vocabulary
from nanopage.grammar.thinking import ReasoningTokens
from nanopage.text.tokenizer import Tokenizer
from nanopage.weights import hub, loader

PATTERN = r'\{"name": "[A-Z][a-z]+", "age": [1-9][0-9]?\}'
TEXT = '{"name": "Ada", "age": 36}'


@dataclass
class Choice:
    """The tokens that may follow a text, of which `token` came next."""

    before: str
    allowed: list[str]
    token: str


def make_vocabulary() -> Vocabulary:
    """The vocabulary of the default model, as the grammars of nanopage need it."""
    path = hub.resolve(None)
    config, tokenizer = loader.read_config(path), Tokenizer(path)
    return Vocabulary(tokenizer, config.vocab_size, sorted(config.eos_token_ids), ReasoningTokens(tokenizer))


def run(vocabulary: Vocabulary) -> list[Choice]:
    """What nanopage's masks allow before each token of TEXT, and after it."""
    matcher = make_matcher(vocabulary.tokenizer, "regex", PATTERN, whitespace=True)
    mask = CompiledGrammar("regex", matcher, vocabulary, num_bytes=0).make_mask(())
    texts = [visible(token.decode(errors="replace")) for token in vocabulary.tokens]
    token_ids, choices = [*vocabulary(TEXT), vocabulary.eos_token_id], []
    for length, token_id in enumerate(token_ids):
        bits = int.from_bytes(mask.allowed(token_ids[:length]) or b"", "little")
        allowed = [texts[i] for i in range(bits.bit_length()) if bits >> i & 1]
        choices.append(Choice("".join(texts[i] for i in token_ids[:length]), allowed, texts[token_id]))
    return choices


def main() -> None:
    vocabulary = make_vocabulary()
    print(f"a mask has {vocabulary.num_bytes:,} bytes, a bit for each token of the vocabulary\n")
    print(f"{'the text so far':26} {'next':>8}   allowed")
    for choice in run(vocabulary):
        few = ": " + "  ".join(sorted(choice.allowed)) if len(choice.allowed) <= 8 else ""
        print(f"{choice.before:26} {choice.token:>8} {len(choice.allowed):9,}{few}")


if __name__ == "__main__":
    main()
