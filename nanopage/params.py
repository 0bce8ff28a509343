"""What a user asks for: SamplingParams, StructuredOutputsParams, BeamSearchParams and PoolingParams. Names, defaults
and meanings are vLLM's, except where docs/vllm.md says otherwise."""

import copy
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import Annotated

from nanopage.checks.options import Count, Flag, Int64, Share, check_fields, integer, number
from nanopage.checks.sampling import LISTS, check_lists, check_logit_bias, check_pairs, check_processors, list_of
from nanopage.checks.vllm_options import BEAM_SEARCH, POOLING, SAMPLING, STRUCTURED_OUTPUTS, accepts_options
from nanopage.files.model_files import shown

LONGEST_MATCH = 32  # tokens, which DRY compares with earlier ones
MAX_LOGPROBS = 20  # vLLM's default `max_logprobs`: bounds the top-k that SamplingParams can ask for
NO_SCALARS = (*LISTS, "logit_bias", "logits_processors", "structured_outputs", "output_kind")

# What a model's generation_config.json may recommend. Only nanopage reads frequency_penalty and DRY there.
RECOMMENDED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_sequence_breakers"),
)


class RequestOutputKind(Enum):
    """When a request has outputs: after every token, with all that it has produced, or once, when it has ended."""

    CUMULATIVE = 0
    FINAL_ONLY = 2


GRAMMARS = ("json", "regex", "choice", "grammar", "json_object")


@accepts_options(STRUCTURED_OUTPUTS)
@dataclass
class StructuredOutputsParams:
    """What the text of an output must be. Needs the extra "structured". Exactly one of the first five is given.

    Args:
        json: a JSON value that matches this schema, which is a dict or JSON in a string.
        regex: a text that matches this regular expression from beginning to end. The syntax is that of Rust's regex
            crate, which has no look-around and no back-references.
        choice: one of these texts.
        grammar: a text of this context-free grammar, in Lark's syntax or llama.cpp's (GBNF).
        json_object: True: a JSON object.
        disable_any_whitespace: JSON without any white space between its tokens. Otherwise, there are at most 40
            characters of it at a time.

    Raises:
        ValueError, TypeError: none or several of the five, a value of the wrong type, or an option that does not exist.
    """

    json: str | dict | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    _: KW_ONLY
    disable_any_whitespace: bool = False

    def __post_init__(self):
        given = self._given()
        if len(given) != 1:
            raise ValueError(
                f"structured_outputs must have one of {', '.join(GRAMMARS)}, and has {' and '.join(given) or 'none'}"
            )
        if self.choice is not None:
            self.choice = list_of("structured_outputs.choice", self.choice, str)
            if not self.choice or not all(self.choice):
                raise ValueError("structured_outputs.choice must not be empty, nor contain an empty string")
        for name, kinds in (("json", str | dict), ("regex", str), ("grammar", str), ("json_object", bool)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise TypeError(f"structured_outputs.{name} is of type {type(value).__name__}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise TypeError("structured_outputs.disable_any_whitespace must be True or False")

    @property
    def kind(self) -> str:
        """Which of the five is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in GRAMMARS if getattr(self, name) is not None and getattr(self, name) is not False]


@accepts_options(SAMPLING)
@dataclass
class SamplingParams:
    """How to sample one request.

    The parameters up to `prompt_logprobs` can be given by position, in vLLM's order. Options of vLLM that change
    nothing, such as extra_args=None, are accepted (see checks/vllm_options.py).

    Args:
        n: completions per prompt, each with a seed of its own; the prompt is computed once and its blocks shared.
        best_of: the number of completions to sample. The `n` with the highest cumulative log-probability are returned,
            best first. None means `n`. If it is more than `n`, outputs come only at the end.
        temperature: divides the logits, in [0, 100]; 0 means greedy.
        top_p: keep the smallest set of most likely tokens whose mass reaches `top_p`, in (0, 1]. The token
            that crosses the line is kept, and so is every token tied with it (Holtzman et al. 2020).
        top_k: keep the `top_k` most likely tokens and those tied with the last; 0 or -1 keeps all.
        min_p: keep tokens at least `min_p` times as likely as the likeliest, in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token of the prompt or the
            output (Keskar et al. 2019), in [0.01, 100]; 1 is off.
        presence_penalty: subtracted from the logits of tokens already in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        dry_multiplier: strength of the DRY penalty on tokens that would lengthen a repetition in the output, in [0,
            100]; 0 is off. If the last L tokens have occurred in the output before, the logit of the token that
            followed them there is reduced by dry_multiplier * dry_base ** (L - dry_allowed_length). The last 2,048
            tokens of the output are searched, not the prompt. A match counts at most 32 tokens. Names are llama.cpp's.
        dry_base: in [1, 10].
        dry_allowed_length: shorter repetitions are not penalized, in [1, 32].
        dry_sequence_breakers: texts that no repetition reaches across, at most 16. Each token that contains such a text
            is a breaker. If no token contains it, its last token is. None: line break, colon, double quote, asterisk.
        logit_bias: token id -> number in [-100, 100] added to its logit.
        logits_processors: functions (output ids, logits) -> logits, or (prompt ids, output ids, logits) -> logits, of
            one row of logits [vocab_size]. They run before everything else, in this process: not with several workers.
        allowed_token_ids: only these ids can be sampled.
        bad_words: strings whose token sequences cannot be completed: the sequences at the beginning of a text, after a
            space and after a line break. A string that begins with white space stands only for itself. Elsewhere, a
            model may spell a word with other tokens. At most 64 tokens each.
        seed: makes the request's noise independent of what runs beside it. In dtypes smaller than float64, logits round
            differently in batches of other sizes, and near-ties can fall either way, unless the engine has
            `batch_invariant`. None draws from the engine's seed.
        max_tokens: most output tokens; None means up to the model's length.
        min_tokens: no end-of-sequence, stop token or stop string before this many output tokens.
        stop: strings that end the output; not part of it unless `include_stop_str_in_output`. The string that ends
            first in the text counts; if several end at the same place, the longest. At most 16,384 characters in all.
        stop_in_reasoning: in chats, search for `stop` also in what a model thinks before it answers. Completions of a
            text are always searched as a whole.
        thinking_token_budget: the most tokens that a model may think; then it has to answer. -1 or None: any number.
        stop_token_ids: tokens that end the output, also within the reasoning.
        ignore_eos: go on after end-of-sequence tokens.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        skip_special_tokens: leave special tokens out of the text.
        detokenize: False leaves `text` empty and saves the work. A model without a tokenizer (see `load_format` in
            EngineConfig) has nothing to detokenize: its `text` is always empty.
        logprobs: also return the log-probabilities of the sampled token and of this many top tokens, up to 20.
            They are the model's own, before penalties, temperature and truncation.
        prompt_logprobs: the same for each prompt token but the first.
        structured_outputs: what the text must be, such as a value of a JSON schema. Once the text is complete, only
            end-of-sequence tokens and `stop_token_ids` are allowed. A text that another limit ends is not complete.
        output_kind: when outputs are made. `LLM.generate` and `LLM.chat` always use FINAL_ONLY.

    Raises:
        ValueError, TypeError: a value out of range or of the wrong type, or an option that does not exist, by name.
    """

    n: Count = 1
    presence_penalty: Annotated[float, number(-2, 2)] = 0.0
    frequency_penalty: Annotated[float, number(-2, 2)] = 0.0
    repetition_penalty: Annotated[float, number(0.01, 100)] = 1.0
    temperature: Annotated[float, number(0, 100)] = 1.0
    top_p: Share = 1.0
    top_k: Annotated[int, integer(-1)] = 0
    min_p: Annotated[float, number(0, 1)] = 0.0
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: Flag = False
    max_tokens: Count | None = 16
    min_tokens: Annotated[int, integer(0)] = 0
    logprobs: Annotated[int, integer(0, MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, integer(0, MAX_LOGPROBS)] | None = None
    _: KW_ONLY  # from here on, vLLM's versions differ in their order
    best_of: Count | None = None
    dry_multiplier: Annotated[float, number(0, 100)] = 0.0
    dry_base: Annotated[float, number(1, 10)] = 1.75
    dry_allowed_length: Annotated[int, integer(1, LONGEST_MATCH)] = 2
    dry_sequence_breakers: list[str] | None = None
    logit_bias: dict[int, float] | None = None
    logits_processors: list[Callable] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: Flag = False
    stop_in_reasoning: Flag = False
    thinking_token_budget: Annotated[int, integer(-1)] | None = None
    skip_special_tokens: Flag = True
    detokenize: Flag = True
    structured_outputs: StructuredOutputsParams | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self):
        check_fields(self, but=NO_SCALARS)
        check_lists(self)
        check_logit_bias(self)
        check_processors(self)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            kind = type(self.structured_outputs).__name__
            raise TypeError(f"structured_outputs must be StructuredOutputsParams, not {kind}")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, not {shown(self.output_kind)}")
        check_pairs(self)

    def clone(self) -> "SamplingParams":
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def num_sequences(self) -> int:
        return self.n if self.best_of is None else self.best_of

    @property
    def ranks(self) -> bool:
        """Whether completions compete for being returned, so that none can be shown before all have ended."""
        return self.num_sequences > self.n

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # vLLM's threshold


@accepts_options(BEAM_SEARCH, {"beam_width": "width"})
@dataclass
class BeamSearchParams:
    """How to search one request's completions with `LLM.beam_search`. The meanings are those of transformers.

    Args:
        width: beams kept at every step, and completions returned (`num_beams`). `beam_width`, as in vLLM, is the same.
        max_tokens: most output tokens.
        length_penalty: a completion's score is its cumulative log-probability / its length ** length_penalty; the
            length counts the end-of-sequence token. In [-10, 10].
        early_stopping: True stops when `width` beams are complete. False stops when no live beam has a better score at
            its present length, "never" when no live beam could have a better score at any length.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        ValueError, TypeError: a value out of range or of the wrong type, by name.
    """

    width: Count
    max_tokens: Count = 16
    _: KW_ONLY
    length_penalty: Annotated[float, number(-10, 10)] = 1.0
    early_stopping: bool | str = False
    skip_special_tokens: Flag = True

    def __post_init__(self):
        check_fields(self, but=("early_stopping",))
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f'early_stopping must be True, False or "never", got {shown(self.early_stopping)}')

    @property
    def beam_width(self) -> int:
        return self.width


@accepts_options(POOLING)
@dataclass(kw_only=True)
class PoolingParams:
    """What to make of one text with `LLM.embed`, `classify`, `score` or `encode`.

    Args:
        truncate_prompt_tokens: keep this many of a longer text's first tokens, special tokens included; -1: as many as
            the model takes. Of a pair, the longer text is shortened first. None: a text that is too long is an error.
        dimensions: return the first numbers of an embedding only, for models trained for that (Matryoshka embeddings).
        normalize: scale embeddings to length 1, after `dimensions`. None: as the model's files say.
        use_activation: pass the scores of classes through the model's activation. None: True.
        prompt_name: a prompt in config_sentence_transformers.json, which is put before the text. None: the file's
            default prompt, if any.

    Raises:
        ValueError, TypeError: a value out of range or of the wrong type, by name.
    """

    truncate_prompt_tokens: Annotated[int, integer(-1)] | None = None
    dimensions: Count | None = None
    normalize: Flag | None = None
    use_activation: Flag | None = None
    prompt_name: str | None = None

    def __post_init__(self):
        check_fields(self)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1, got 0")
