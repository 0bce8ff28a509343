"""Checks of SamplingParams: of lists, and of parameters that do not go together."""

from typing import Annotated, Any

from nanopage.checks.options import check, number
from nanopage.files.model_files import shown

MAX_STOP_CHARS = 16_384  # of all stop strings of a request: their automaton takes some 250 bytes a character
MAX_BREAKERS, MAX_BREAKER_CHARS = 16, 64  # of DRY: each is searched for in all tokens
Bias = Annotated[float, number(-100, 100)]
# The lists of SamplingParams: what they contain, and what None means.
LISTS: dict[str, tuple[type, list | None]] = {
    "stop": (str, []),
    "stop_token_ids": (int, []),
    "bad_words": (str, []),
    "dry_sequence_breakers": (str, ["\n", ":", '"', "*"]),
    "allowed_token_ids": (int, None),
}


def check_lists(params: Any) -> None:
    """Replace each list by a checked copy of it, or by its default."""
    if isinstance(params.stop, str):
        params.stop = [params.stop]
    for name, (kind, default) in LISTS.items():
        values = default if getattr(params, name) is None else getattr(params, name)
        setattr(params, name, None if values is None else list_of(name, values, kind))
        if "" in (getattr(params, name) or ()):
            raise ValueError(f"{name} must not contain an empty string")
    if params.allowed_token_ids == []:
        raise ValueError("allowed_token_ids must not be empty")
    breakers = params.dry_sequence_breakers or []
    if len(breakers) > MAX_BREAKERS:
        raise ValueError(f"dry_sequence_breakers must have at most {MAX_BREAKERS} strings")
    if max(map(len, breakers), default=0) > MAX_BREAKER_CHARS:
        raise ValueError(f"dry_sequence_breakers must have at most {MAX_BREAKER_CHARS} characters each")
    if (num_chars := sum(map(len, params.stop or ()))) > MAX_STOP_CHARS:
        raise ValueError(
            f"stop has {len(params.stop or ()):,} strings with {num_chars:,} characters in all: at most "
            f"{MAX_STOP_CHARS:,} characters are allowed"
        )


def check_logit_bias(params: Any) -> None:
    """Replace `logit_bias` by a checked copy of it."""
    if params.logit_bias is not None:
        if not isinstance(params.logit_bias, dict):
            raise TypeError(f"logit_bias must be a dict of token id -> bias, not {shown(params.logit_bias)}")
        list_of("logit_bias ids", list(params.logit_bias), int)
        for token_id, bias in params.logit_bias.items():
            check(f"logit_bias[{shown(token_id)}]", bias, Bias)
        params.logit_bias = dict(params.logit_bias)


def check_processors(params: Any) -> None:
    given = params.logits_processors
    if not isinstance(given, list | None) or not all(map(callable, given or ())):
        raise TypeError(f"logits_processors must be a list of functions, not {shown(given)}")


def check_pairs(params: Any) -> None:
    """Refuse parameters that are valid alone, but not together."""
    if params.best_of is not None and params.best_of < params.n:
        raise ValueError(f"best_of={params.best_of} is less than n={params.n}")
    if params.greedy and params.num_sequences > 1:
        name = "n" if params.best_of is None else "best_of"
        raise ValueError(f"{name}={params.num_sequences} with temperature=0: greedy completions are all the same")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(f"min_tokens={params.min_tokens} is more than max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise ValueError("stop strings need detokenize=True")
    if params.structured_outputs is not None and params.ignore_eos:
        raise ValueError("ignore_eos=True and structured_outputs exclude each other: a complete text must end")


def list_of(name: str, values, kind: type) -> list:
    if not isinstance(values, list | tuple | set | frozenset):
        raise TypeError(f"{name} must be a list of {kind.__name__}, not {shown(values)}")
    for value in values:
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{name} must contain only {kind.__name__}, not {shown(value)}")
    return list(values)
