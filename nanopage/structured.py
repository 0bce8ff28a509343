"""Structured output: masks that hold a text to a JSON schema, a regular expression, a list of choices or a grammar.

    StructuredOutputsParams ─▶ Grammars.compile ─▶ CompiledGrammar ─▶ GrammarMask of each completion ─▶ Batch.masks

llguidance (the extra "structured") compiles a grammar, and finds after each token which tokens may come next. The rest
of nanopage knows only masks, and finds them while the workers run the model (`Schedule.find_masks`). Grammars come from
clients, so everything about them is limited: the length of their text, the work and memory of llguidance (its own
limits), the time to compile, and the time for the masks of a completion. A compiled grammar is kept for later requests
with the same text.

An output never leaves its grammar: wherever llguidance fails, the request ends with an error.
"""

import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from tokenizers import Tokenizer as BackendTokenizer

from nanopage.model_files import rust_errors
from nanopage.params import StructuredOutputsParams
from nanopage.text.tokenizer import Tokenizer

MAX_CHARACTERS = 131_072  # of a schema, an expression, all choices or a grammar
WHITESPACE = r"[ \n\r\t]{1,40}"  # between tokens of JSON; without a limit, small models go on with it for ever
MAX_RULES = 256  # of a grammar in GBNF, whose conversion takes time in proportion to their square
COMPILE_SECONDS = 10.0
MASK_SECONDS = 10.0  # of computing, for all masks of a completion. One takes some 0.00005 s
# llguidance compiles recursively, and a chain of references as long as MAX_CHARACTERS allows would overflow the 8 MiB
# that a thread usually has. That would end the process.
STACK_BYTES = 512 << 20
MAX_LEXER_STATES = 50_000  # of llguidance, for each completion; a state takes 1 to 2 kB
NUM_TAIL = 5  # tokens at the end of a prompt among which <think> is looked for
CACHED = 16  # compiled grammars that are kept

T = TypeVar("T")


class Grammars:
    """Compiles the grammars of an engine's requests. Safe for threads.

    Args:
        vocab_size: of the model. It may be larger or smaller than the tokenizer's.
        eos_token_ids: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None  # made for the first request
        self._compile_text = lru_cache(CACHED)(self._compile_afresh)

    def compile(self, params: StructuredOutputsParams) -> "CompiledGrammar":
        """Raises: ValueError if the grammar is not valid, is too large or takes too long to compile, if the model has
        no end-of-sequence token, or if llguidance is not installed."""
        if not self.eos_token_ids:
            raise ValueError("structured_outputs needs a model with an end-of-sequence token, and this model has none")
        kind, text = grammar_text(params)
        check_length(kind, text)
        name = f"structured_outputs.{kind}"
        with rust_errors(name):  # those of llguidance, and the panics of its Rust code
            vocabulary = self._read_vocabulary()
            matcher = self._compile_text(kind, text, not params.disable_any_whitespace)
        return CompiledGrammar(name, matcher, vocabulary)

    def _compile_afresh(self, kind: str, text: str, whitespace: bool) -> Any:
        """llguidance's matcher of a grammar, in its first state. Only copies of it are used."""
        tokenizer = self._read_vocabulary().tokenizer
        return run_with_large_stack(lambda: make_matcher(tokenizer, kind, text, whitespace))

    def _read_vocabulary(self) -> "Vocabulary":
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids)
            return self._vocabulary


class Vocabulary:
    """The tokens of a model. Sets of tokens are integers whose bit i stands for token i: Python's fastest bit sets.

    text       tokens that stand for text, and special tokens that have a name
    endings    end-of-sequence tokens
    think      the tokens <think> and </think>; None if the model does not think
    num_bytes  length of a mask
    tokenizer  llguidance's

    Args: as Grammars. Raises: ValueError if llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]):
        llguidance = import_llguidance()
        ids = tokenizer.backend.get_vocab(with_added_tokens=True).values()
        size = max(vocab_size, 1 + max(ids))
        self.backend = BackendTokenizer.from_str(tokenizer.backend.to_str())
        # llguidance encodes a text if a grammar leaves no other choice. What looks like a special token is text there.
        self.backend.encode_special_tokens = True
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], None
        self.num_bytes = -(-vocab_size // 32) * 4
        self.text = token_set(token_id for token_id in range(vocab_size) if self.tokens[token_id])
        self.endings = token_set(eos_token_ids)
        begin, end = (tokenizer.backend.token_to_id(mark) for mark in ("<think>", "</think>"))
        self.think: tuple[int, int] | None = None
        if "</think>" in (tokenizer.chat_template or "") and begin is not None and end is not None:
            self.think = begin, end
        self.tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self), size, eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids


class CompiledGrammar:
    """A grammar for any number of completions.

    Args:
        name: of the parameter that it comes from, for messages.
        matcher: llguidance's, in its first state.
    """

    def __init__(self, name: str, matcher: Any, vocabulary: Vocabulary):
        self.name, self.matcher, self.vocabulary = name, matcher, vocabulary

    def make_mask(
        self, stop_token_ids: Iterable[int], prompt_token_ids: Sequence[int] = ()
    ) -> "GrammarMask | MaskAfterReasoning":
        """The mask of one completion, for its first token.

        Args:
            stop_token_ids: allowed where the text is complete, like end-of-sequence.
            prompt_token_ids: their end shows whether the model is to think first.

        Raises: ValueError if there is no first token.
        """
        mask = GrammarMask(self, token_set(stop_token_ids))
        mask.allowed([])
        marks = self.vocabulary.think
        end = [token_id for token_id in prompt_token_ids[-NUM_TAIL:] if marks is not None and token_id in marks]
        if marks is None or (end and end[-1] == marks[1]):  # it cannot think, or is not to
            return mask
        return MaskAfterReasoning(mask, marks, begun=bool(end))


class GrammarMask:
    """The `TokenMask` of a completion: it follows the output through the grammar.

    Args: stop_tokens: the set of tokens that may end the output beside end-of-sequence.
    """

    def __init__(self, grammar: CompiledGrammar, stop_tokens: int):
        self.grammar, self.stop_tokens = grammar, stop_tokens
        self._matcher = grammar.matcher.deep_copy()
        self._num_read = -1  # tokens of the output that the mask follows; -1: there is no mask yet
        self._mask = b""
        self._seconds = 0.0
        self._draft_seconds = 0.0  # for the masks of drafts, so that they cannot use up the time of the others
        self._in_call = False  # still true between calls if an exception ended the last call

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """See `TokenMask`."""
        if self._num_read == len(output_token_ids) and not self._in_call:
            return self._mask
        started = time.thread_time()
        if self._in_call or len(output_token_ids) < self._num_read:
            self._matcher.reset()
            self._num_read = -1
        self._in_call = True
        with rust_errors(self.grammar.name):
            self._mask = self._find(output_token_ids[max(0, self._num_read) :])
            self._seconds += time.thread_time() - started
            if self._seconds > MASK_SECONDS:
                raise ValueError(f"finding the tokens that may come next has taken more than {MASK_SECONDS:g} s")
        self._num_read, self._in_call = len(output_token_ids), False
        return self._mask

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        masks = [self.allowed(output_token_ids)]
        endings, started = self.grammar.vocabulary.endings | self.stop_tokens, time.thread_time()
        if self._draft_seconds > MASK_SECONDS:
            return masks
        self._in_call = True
        try:
            with rust_errors(self.grammar.name):
                for token_id in draft:
                    if endings >> token_id & 1 or not masks[-1][token_id // 8] >> token_id % 8 & 1:
                        break
                    masks.append(self._find([token_id]))
                if len(masks) > 1 and not self._matcher.rollback(len(masks) - 1):
                    raise ValueError(shorten(self._matcher.get_error()))
        except ValueError:
            # Perhaps only because of the draft: go on with a fresh matcher, and without drafts.
            self._matcher, self._draft_seconds = self.grammar.matcher.deep_copy(), math.inf
            return masks
        self._draft_seconds += time.thread_time() - started
        self._in_call = False
        return masks

    def _find(self, token_ids: list[int]) -> bytes:
        """The tokens that may follow the next tokens of the output."""
        matcher, vocabulary = self._matcher, self.grammar.vocabulary
        if token_ids and not matcher.consume_tokens(token_ids):
            raise ValueError(f"the output has left the grammar: {shorten(matcher.get_error())}")
        found = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise ValueError(shorten(matcher.get_error()))
        # llguidance also allows end-of-sequence where it has stopped for another reason, or where a grammar names it.
        tokens = found & vocabulary.text & ~vocabulary.endings
        if matcher.is_accepting():
            tokens |= vocabulary.endings | self.stop_tokens
        if not tokens:
            raise ValueError(f"the text is not complete, and no token can come next ({matcher.stop_reason()})")
        return tokens.to_bytes(vocabulary.num_bytes, "little")


class MaskAfterReasoning:
    """The `TokenMask` of a completion that may think first: the grammar begins after `</think>`. An output that does
    not begin with `<think>` is in the grammar from its first token on. The end-of-sequence token is not allowed while
    the model thinks.

    Args:
        mask: that of the grammar.
        marks: the tokens `<think>` and `</think>`.
        begun: whether the prompt ends with `<think>`.
    """

    def __init__(self, mask: GrammarMask, marks: tuple[int, int], begun: bool):
        vocabulary = mask.grammar.vocabulary
        self.mask, self.begun, (self.start, self.end) = mask, begun, marks
        free = vocabulary.text & ~(vocabulary.endings | mask.stop_tokens)
        self._free = free.to_bytes(vocabulary.num_bytes, "little")

    def allowed(self, output_token_ids: list[int]) -> bytes:
        """See `TokenMask`."""
        return self.follow(output_token_ids, [])[0]

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        if self.begun or output_token_ids[:1] == [self.start]:
            if self.end not in output_token_ids:
                num_free = draft.index(self.end) if self.end in draft else len(draft)
                masks = [self._free]
                for token_id in draft[:num_free]:
                    if not self._free[token_id // 8] >> token_id % 8 & 1:
                        return masks
                    masks.append(self._free)
                return masks
            return self.mask.follow(output_token_ids[output_token_ids.index(self.end) + 1 :], draft)
        masks = self.mask.follow(output_token_ids, draft)
        if not output_token_ids:
            first = int.from_bytes(masks[0], "little") | 1 << self.start
            masks[0] = first.to_bytes(len(masks[0]), "little")
        return masks


def grammar_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """What is given, and as text: a JSON schema, a regular expression (also of choices), or a grammar.

    Raises: ValueError if a schema is not JSON, or is too long.
    """
    kind = params.kind
    if kind == "json_object":
        return kind, '{"type": "object"}'
    value = getattr(params, kind)
    if kind == "choice":
        return kind, "|".join(map(escape, value))
    if kind != "json":
        return kind, value
    check_length(kind, value if isinstance(value, str) else "")
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"structured_outputs.json is not JSON: {str(error)[:200]}") from None
    if not isinstance(schema, dict):
        raise ValueError("structured_outputs.json must be a JSON object")
    return kind, text


def check_length(kind: str, text: str) -> None:
    """Raises: ValueError if a text has more than MAX_CHARACTERS."""
    if len(text) > MAX_CHARACTERS:
        message = f"structured_outputs.{kind} has {len(text):,} characters: at most {MAX_CHARACTERS:,} are allowed"
        raise ValueError(message)


def make_matcher(tokenizer: Any, kind: str, text: str, whitespace: bool) -> Any:
    """llguidance's matcher of a grammar. Raises: ValueError if it is not valid or too large.

    Args:
        tokenizer: llguidance's.
        kind, text: what the text is, as `grammar_text` returns it.
        whitespace: whether JSON may have white space.
    """
    llguidance = import_llguidance()
    make = llguidance.LLMatcher
    if kind in ("regex", "choice"):
        grammar = make.grammar_from_regex(text)
    elif kind in ("json", "json_object"):
        options = {"whitespace_pattern": WHITESPACE} if whitespace else {"whitespace_flexible": False}
        grammar = make.grammar_from_json_schema(text, options)
    else:
        grammar = make.grammar_from_lark(to_lark(text))
    limits = llguidance.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    matcher = make(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # the first mask takes longer than others
    if matcher.is_error():
        raise ValueError(shorten(matcher.get_error()))
    return matcher


def escape(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def to_lark(grammar: str) -> str:
    """A grammar in Lark's syntax, of one in Lark's or in llama.cpp's syntax, GBNF.

    Raises: ValueError if GBNF cannot be read, or has too many rules.
    """
    num_rules = sum(re.match(r"[\w-]+[ \t]*::=", line.lstrip()) is not None for line in grammar.splitlines())
    if not num_rules:
        return grammar
    if num_rules > MAX_RULES:
        raise ValueError(f"{num_rules} rules in GBNF: at most {MAX_RULES} are allowed, or any number in Lark's syntax")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # its parser raises Exception, IndexError, RecursionError and others
        raise ValueError(f"not a grammar in GBNF: {type(error).__name__}: {str(error)[:200]}") from None


def run_with_large_stack(function: Callable[[], T]) -> T:
    """The result of a function that runs in a thread with a stack of STACK_BYTES.

    Raises: what the function raises; ValueError after COMPILE_SECONDS. llguidance cannot be interrupted, but its limits
        end it.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nanopage-grammar", daemon=True)
    with _stack_size_lock:  # the size is that of every thread that starts now
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join(COMPILE_SECONDS)
    if errors:
        raise errors[0]
    if not results:
        raise ValueError(f"compiling takes more than {COMPILE_SECONDS:g} s")
    return results[0]


_stack_size_lock = threading.Lock()


def import_llguidance() -> Any:
    """Raises: ValueError naming the extra, if llguidance is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ValueError("llguidance is not installed: pip install 'nanopage[structured]'") from None
    return llguidance


def token_set(token_ids: Iterable[int]) -> int:
    """The set of these tokens (see Vocabulary)."""
    numbers = set(token_ids)
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for token_id in numbers:
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")


def shorten(error: str) -> str:
    """What an error of llguidance says, in one line."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]
