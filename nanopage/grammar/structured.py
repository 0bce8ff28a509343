"""Structured output: masks that hold a text to a JSON schema, a regular expression, a list of choices or a grammar.

    StructuredOutputsParams ─▶ Grammars.compile ─▶ CompiledGrammar ─▶ GrammarMask of each completion ─▶ Batch.masks

llguidance (the extra "structured") compiles a grammar, and finds after each token which tokens may come next. The rest
of nanopage knows only masks, and finds them while the workers run the model (`Schedule.find_masks`). Grammars come from
clients, so there are limits on the length of their text, the memory and time to compile (which a separate process tries
out: `grammar/matcher.py`), the work of llguidance, the time for masks, and the memory of all grammars in use. A
compiled grammar is kept for later requests with the same text.

An output never leaves its grammar: wherever llguidance fails, the request ends with an error.
"""

import dataclasses
import json
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from nanopage.files.limited_process import LimitedProcess, Limits
from nanopage.files.model_files import rust_errors
from nanopage.grammar.matcher import PROGRAM, STACK_BYTES, make_matcher, make_tokenizer, run_with_large_stack, shorten
from nanopage.grammar.schema import without_annotations
from nanopage.grammar.thinking import END_MARK, FreeText, MaskAfterReasoning, ReasoningTokens, Thinking
from nanopage.params import StructuredOutputsParams
from nanopage.text.tokenizer import Tokenizer

MAX_CHARACTERS = 131_072  # in a schema, a regular expression, all choices or a grammar
# Limits for trying a grammar. Of 600 schemas of JSONSchemaBench, none takes more than 0.05 s of CPU time, or 10 MiB.
COMPILE_LIMITS = Limits(memory=128 << 20, cpu_seconds=2.0, seconds=30.0, answer=10_000, stack=STACK_BYTES)
# The masks of all completions with one grammar may take this, and so much more for each. One takes some 0.00005 s.
MASK_SECONDS, SECONDS_PER_MASK = 1.0, 0.002
FORCED_CHARACTERS = 512  # of a text that the grammar forces: enough to find the text's next token
MIN_BYTES = 4 << 20  # a compiled grammar counts as at least this
CACHED_BYTES = 128 << 20  # compiled grammars that are kept for later requests
MAX_BYTES = 1 << 30  # all compiled grammars, kept or in use


class Grammars:
    """Compiles the grammars of an engine's requests, one at a time. Thread-safe.

    Args:
        vocab_size: the model's. It may be larger or smaller than the tokenizer's.
        eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]):
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self.reasoning = ReasoningTokens(tokenizer)
        self.process = LimitedProcess(PROGRAM, ["llguidance"], dataclasses.replace(COMPILE_LIMITS))
        self._vocabulary: Vocabulary | None = None  # made for the first request
        self._compiling, self._lock = threading.Lock(), threading.Lock()  # the second guards the attributes below
        self._kept: OrderedDict[tuple[str, str, bool], CompiledGrammar] = OrderedDict()  # the latest used last
        self._alive: weakref.WeakSet[CompiledGrammar] = weakref.WeakSet()

    def compile(self, params: StructuredOutputsParams | None) -> "CompiledGrammar | FreeText":
        """What an output may be. Args: params: None allows any text.

        Raises: ValueError if the grammar is not valid, is too large or takes too long to compile, if the model has
            no end-of-sequence token, or if llguidance is not installed.
        """
        if params is None:
            return FreeText(self.reasoning, self.vocab_size)
        if not self.eos_token_ids:
            raise ValueError("structured_outputs needs a model with an end-of-sequence token, and this model has none")
        kind, text = grammar_text(params)
        check_length(kind, text)
        key, name = (kind, text, not params.disable_any_whitespace), f"structured_outputs.{kind}"
        if (kept := self._find(key)) is not None:
            return kept
        with self._compiling, rust_errors(name):  # llguidance's errors, and the panics of its Rust code
            if (kept := self._find(key)) is None:
                if self._vocabulary is None:
                    self._vocabulary = Vocabulary(self.tokenizer, self.vocab_size, self.eos_token_ids, self.reasoning)
                kept = self._compile_afresh(name, key, self._vocabulary)
            return kept

    def has_compiled(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` returns at once, because the grammar is kept or the parameters are refused."""
        try:
            kind, text = grammar_text(params)
        except ValueError:
            return True
        return len(text) > MAX_CHARACTERS or self._find((kind, text, not params.disable_any_whitespace)) is not None

    def _find(self, key: tuple[str, str, bool]) -> "CompiledGrammar | None":
        with self._lock:
            if (kept := self._kept.get(key)) is None or kept.has_failed:
                return None
            self._kept.move_to_end(key)
            return kept

    def _compile_afresh(self, name: str, key: tuple[str, str, bool], vocabulary: "Vocabulary") -> "CompiledGrammar":
        request = dict(zip(("kind", "text", "whitespace"), key, strict=True))
        answer = self.process.ask(request, vocabulary.plain())
        if "num_bytes" not in answer:
            raise ValueError(answer.get("invalid") or f"too complex to compile: {answer['error']}")
        num_bytes = max(MIN_BYTES, answer["num_bytes"])
        with self._lock:
            while self._kept and sum(kept.num_bytes for kept in self._kept.values()) > CACHED_BYTES - num_bytes:
                self._kept.popitem(last=False)
            if sum(grammar.num_bytes for grammar in self._alive) > MAX_BYTES - num_bytes:
                raise ValueError(f"the grammars of unfinished requests take {MAX_BYTES >> 20:,} MiB: try again later")
        matcher = run_with_large_stack(lambda: make_matcher(vocabulary.tokenizer, *key))
        grammar = CompiledGrammar(name, matcher, vocabulary, num_bytes)
        with self._lock:
            self._kept[key] = grammar
            self._alive.add(grammar)
        return grammar


class Vocabulary:
    """The tokens of a model. Sets of tokens are integers whose bit i stands for token i: Python's fastest bit sets.

    text       tokens that stand for text, and special tokens that have a name
    endings    end-of-sequence tokens
    reasoning  how the model thinks
    num_bytes  length of a mask
    tokenizer  llguidance's

    Args: as Grammars. Raises: ValueError if llguidance is not installed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int], reasoning: ReasoningTokens):
        ids = tokenizer.backend.get_vocab(with_added_tokens=True).values()
        size = max(vocab_size, 1 + max(ids))
        self.check_text = tokenizer.check_text
        self.backend = BackendTokenizer.from_str(tokenizer.backend.to_str())
        # llguidance encodes a text if a grammar leaves no other choice. There, what looks like a special token is text.
        self.backend.encode_special_tokens = True
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.eos_token_ids, self.eos_token_id, self.bos_token_id = eos_token_ids, eos_token_ids[0], None
        self.num_bytes = -(-vocab_size // 32) * 4
        self.text = token_set(token_id for token_id in range(vocab_size) if self.tokens[token_id])
        self.endings = token_set(eos_token_ids)
        self.reasoning = reasoning
        self._straddling: dict[int, int] = {}
        self.tokenizer = make_tokenizer(self, size, eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        # llguidance asks for each mask anew, and uses the first token.
        self.check_text(text[:FORCED_CHARACTERS])
        return self.backend.encode(text[:FORCED_CHARACTERS], add_special_tokens=False).ids

    def plain(self) -> dict:
        """The tokens as plain JSON (see `Tokens` in grammar/matcher.py)."""
        return {
            "tokens": [token.decode("latin-1") for token in self.tokens],
            "special_token_ids": self.special_token_ids,
            "eos_token_ids": self.eos_token_ids,
        }

    def straddling(self, matched: int) -> int:
        """The set of tokens that, after `matched` bytes of `</think>`, both end the reasoning and begin the answer."""
        if matched not in self._straddling:
            texts, before = enumerate(self.tokens), END_MARK[:matched]
            ends = (i for i, text in texts if (before + text).partition(END_MARK)[2].strip())
            self._straddling[matched] = token_set(ends)
        return self._straddling[matched]


class CompiledGrammar:
    """A grammar for any number of completions.

    Args:
        name: the parameter that it comes from, for messages.
        matcher: llguidance's, in its first state. Its copies share what it finds out about texts.
        num_bytes: the memory that it may take.
    """

    def __init__(self, name: str, matcher: Any, vocabulary: Vocabulary, num_bytes: int):
        self.name, self.matcher, self.vocabulary, self.num_bytes = name, matcher, vocabulary, num_bytes
        self.has_failed = False  # later requests then get a new one: what copies share may be at its limit
        self.num_masks, self.seconds = 0, 0.0  # of all completions
        self.draft_seconds = 0.0  # spent on masks of drafts, which must not use up the time of other masks

    @property
    def max_seconds(self) -> float:
        """The limit for the masks so far."""
        return MASK_SECONDS + self.num_masks * SECONDS_PER_MASK

    def count(self, seconds: float) -> None:
        """Count the time of a mask. Raises: ValueError if masks take too long."""
        self.num_masks, self.seconds = self.num_masks + 1, self.seconds + seconds
        if self.seconds > self.max_seconds:
            raise ValueError(f"too complex: finding the tokens that may come next has taken {self.seconds:.1f} s")

    def make_mask(
        self,
        stop_token_ids: Iterable[int],
        prompt_token_ids: Sequence[int] = (),
        reasoning: bool | None = None,
        budget: int | None = None,
    ) -> "GrammarMask | MaskAfterReasoning":
        """The mask of one completion, for its first token.

        Args:
            stop_token_ids: allowed where the text is complete, like end-of-sequence.
            prompt_token_ids: the end of the prompt shows whether the model may think first.
            reasoning: whether the prompt ends within the model's reasoning. None: its end shows that, too.
            budget: the most tokens of reasoning; None: any number.

        Raises: ValueError if there is no first token, or for a budget of a model that does not think.
        """
        mask, vocabulary = GrammarMask(self, token_set(stop_token_ids)), self.vocabulary
        mask.allowed([])
        tokens, num_bytes = vocabulary.reasoning, vocabulary.num_bytes
        begun, may_begin = tokens.read(prompt_token_ids, reasoning, budget)
        if not begun and (tokens.think is None or not may_begin):
            return mask
        free = vocabulary.text & ~(vocabulary.endings | mask.stop_tokens)
        return MaskAfterReasoning(
            mask,
            Thinking(begun, tokens.think, tokens.end, budget, vocabulary.tokens.__getitem__, num_bytes),
            # Neither end-of-sequence, nor a token that has both the end of the reasoning and the answer's beginning
            lambda matched: (free & ~vocabulary.straddling(matched)).to_bytes(num_bytes, "little"),
        )


class GrammarMask:
    """The `TokenMask` of a completion: it follows the output through the grammar.

    Args: stop_tokens: the set of tokens, besides end-of-sequence, that may end the output.
    """

    free_until = 0

    def __init__(self, grammar: CompiledGrammar, stop_tokens: int):
        self.grammar, self.stop_tokens = grammar, stop_tokens
        self._matcher = grammar.matcher.deep_copy()
        self._num_read = -1  # tokens of the output that the mask follows; -1: there is no mask yet
        self._mask = b""
        self._follows = True  # drafts
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
        try:
            with rust_errors(self.grammar.name):
                self._mask = self._find(output_token_ids[max(0, self._num_read) :])
                self.grammar.count(time.thread_time() - started)
        except BaseException:
            self.grammar.has_failed = True
            raise
        self._num_read, self._in_call = len(output_token_ids), False
        return self._mask

    def follow(self, output_token_ids: list[int], draft: list[int]) -> list[bytes]:
        """See `TokenMask`."""
        masks = [self.allowed(output_token_ids)]
        endings, started = self.grammar.vocabulary.endings | self.stop_tokens, time.thread_time()
        if not self._follows or self.grammar.draft_seconds > self.grammar.max_seconds:
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
            # Perhaps the draft alone caused this: go on with a fresh matcher, and without drafts.
            self._matcher, self._follows = self.grammar.matcher.deep_copy(), False
            return masks
        self.grammar.draft_seconds += time.thread_time() - started
        self._in_call = False
        return masks

    def _find(self, token_ids: list[int]) -> bytes:
        """The tokens that may follow the next tokens of the output."""
        matcher, vocabulary = self._matcher, self.grammar.vocabulary
        if token_ids and not matcher.consume_tokens(token_ids):
            raise ValueError(f"the grammar cannot follow the output: {shorten(matcher.get_error())}")
        found = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_error():
            raise ValueError(shorten(matcher.get_error()))
        # llguidance also allows end-of-sequence if it has stopped for another reason, or if a grammar names this token.
        tokens = found & vocabulary.text & ~vocabulary.endings
        if matcher.is_accepting():
            tokens |= vocabulary.endings | self.stop_tokens
        if not tokens:
            raise ValueError(f"the text is not complete, and no token can come next ({matcher.stop_reason()})")
        return tokens.to_bytes(vocabulary.num_bytes, "little")


def grammar_text(params: StructuredOutputsParams) -> tuple[str, str]:
    """The kind of constraint and its text: a JSON schema, a regular expression (also for choices), or a grammar.

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
    schema, formats = without_annotations(schema)
    return kind, json.dumps(schema) if formats else text


def check_length(kind: str, text: str) -> None:
    """Raises: ValueError if a text has more than MAX_CHARACTERS."""
    if len(text) > MAX_CHARACTERS:
        message = f"structured_outputs.{kind} has {len(text):,} characters: at most {MAX_CHARACTERS:,} are allowed"
        raise ValueError(message)


def escape(text: str) -> str:
    """A regular expression that matches only this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def token_set(token_ids: Iterable[int]) -> int:
    """The set of these tokens (see Vocabulary)."""
    numbers = set(token_ids)
    bits = bytearray(max(numbers, default=0) // 8 + 1)
    for token_id in numbers:
        bits[token_id // 8] |= 1 << token_id % 8
    return int.from_bytes(bits, "little")
