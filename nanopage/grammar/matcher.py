"""Compiles grammars to llguidance's matchers, within limits.

Grammars come from clients. llguidance counts most of its work against limits ("fuel"), but not all of it: an expression
such as "a?" * 65000 takes minutes and 10 GB, and nothing can stop its thread. So `limited_process.py` runs this file as
a program that tries whether a grammar compiles within limits of memory and time. The caller then compiles the grammar
again: llguidance does the same work there, with the same result.
"""

import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

PROGRAM = Path(__file__).absolute()
WHITESPACE = r"[ \n\r\t]{1,40}"  # between tokens of JSON; without a limit, small models write white space for ever
MAX_RULES = 256  # of a grammar in GBNF, whose conversion takes time in proportion to their square
# llguidance compiles recursively. The longest chain of references that a grammar may have would overflow a thread's
# usual stack of 8 MiB, and end the process.
STACK_BYTES = 512 << 20
MAX_LEXER_STATES = 50_000  # in all completions with one grammar; a state takes 0.5 kB
# Items of Earley's algorithm for one mask. llguidance's default of 50,000 can take more than a second. Of 600 schemas
# of JSONSchemaBench, none needs 5,000.
MAX_STEP_ITEMS = 5000
KEPT_BYTES = 32 << 20  # memory that the program may keep between two grammars

T = TypeVar("T")


def make_tokenizer(wrapped: Any, size: int, eos_token_ids: list[int]) -> Any:
    """llguidance's tokenizer. Args: wrapped: has `tokens`, `special_token_ids`, `eos_token_id` and `bos_token_id`."""
    llguidance = import_llguidance()
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(wrapped), size, eos_token_ids)


def make_matcher(tokenizer: Any, kind: str, text: str, whitespace: bool) -> Any:
    """llguidance's matcher of a grammar. Raises: ValueError if it is not valid or too large.

    Args:
        tokenizer: llguidance's.
        kind, text: the kind of grammar and its text, as `grammar_text` returns them.
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
    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        step_max_items=MAX_STEP_ITEMS,
        verbose_errors=False,
    )
    matcher = make(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # the first mask takes longer than others
    if matcher.is_error():
        raise ValueError(shorten(matcher.get_error()))
    return matcher


def to_lark(grammar: str) -> str:
    """Convert a grammar in Lark's syntax or in GBNF, llama.cpp's syntax, to Lark's.

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
    except MemoryError:
        raise
    except Exception as error:  # the parser raises Exception, IndexError, RecursionError and others
        raise ValueError(f"not a grammar in GBNF: {type(error).__name__}: {str(error)[:200]}") from None


def run_with_large_stack(function: Callable[[], T]) -> T:
    """The result of a function that runs in a thread with a stack of STACK_BYTES. Raises: what the function raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="nanopage-grammar", daemon=True)
    with _stack_size_lock:  # every thread that starts now gets this stack size
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


_stack_size_lock = threading.Lock()


def import_llguidance() -> Any:
    """Raises: ValueError naming the extra, if llguidance is not installed."""
    try:
        import llguidance
    except ImportError:
        raise ValueError("llguidance is not installed: pip install 'nanopage[structured]'") from None
    return llguidance


def shorten(error: str) -> str:
    """The text of an llguidance error, in one line."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    return " ".join(error.replace("<non-verbose/>", "").split())[:300]


# The program


class Tokens:
    """A vocabulary as `make_tokenizer` takes it. It encodes texts greedily, with nearly the model's result."""

    def __init__(self, tokens: Sequence[str], special_token_ids: list[int], eos_token_ids: list[int]):
        self.tokens = [token.encode("latin-1") for token in tokens]
        self.special_token_ids = special_token_ids
        self.eos_token_id, self.bos_token_id = eos_token_ids[0], None
        self.tokenizer = make_tokenizer(self, len(tokens), eos_token_ids)

    def __call__(self, text: str) -> list[int]:
        return self.tokenizer.greedy_tokenize(text)


def make_answer(setup: dict) -> Callable[[dict], dict]:
    """A request has the arguments of `make_matcher`. An answer has "invalid", which says what is wrong, or "num_bytes",
    the most memory that the matcher may take. Args: setup: the arguments of `Tokens`."""
    if hasattr(os, "nice"):
        os.nice(10)  # the model goes first
    tokenizer = Tokens(**setup).tokenizer
    idle = _resident_bytes()

    def answer(request: dict) -> dict:
        try:
            matcher = run_with_large_stack(lambda: make_matcher(tokenizer, **request))
            found: dict = {"num_bytes": max(0, _resident_bytes() - idle)}
            del matcher
        except MemoryError:
            raise
        except BaseException as error:  # including the panics of Rust code
            found = {"invalid": str(error)[:300].encode(errors="replace").decode()}
        return found | {"grown": _resident_bytes() - idle > KEPT_BYTES}

    return answer


def _resident_bytes() -> int:
    """Memory of this process, or 0 on systems other than Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
