"""Options of vLLM that nanopage accepts because they change nothing here.

vLLM's scripts often spell out defaults. Each table below names such options, the values that ask for nothing, and why
any other value is refused. `accept` takes them out of a call's options; what is left are nanopage's own.
"""

import dataclasses
import functools
import reprlib
from collections.abc import Callable, Collection

ANY = object()  # True and False mean the same here
Neutral = dict[str, tuple[object, str]]  # option -> (the values that change nothing, or ANY; why others are refused)

ENGINE: Neutral = {
    "data_parallel_size": ((1,), "an engine has one replica of the model"),
    "disable_custom_all_reduce": (ANY, "reductions are those of torch.distributed"),
    "trust_remote_code": ((False,), "no code from a model's directory is ever run"),
    "tokenizer_mode": (("auto",), "the tokenizer is always that of tokenizer.json"),
    "tokenizer_revision": ((None,), "the tokenizer is always the model's"),
    "skip_tokenizer_init": ((False,), "a model that has a tokenizer loads it"),
    "revision": ((None,), "a hub id means its main revision: give the directory of another one"),
    "code_revision": ((None,), "no code from a model's directory is ever run"),
    "config_format": (("auto", "hf"), "configurations are config.json, or a .gguf file's metadata"),
    "hf_token": ((None,), "huggingface_hub reads HF_TOKEN"),
    "download_dir": ((None,), "huggingface_hub reads HF_HOME"),
    "task": (("auto",), "its names are runner and convert"),
    "enable_chunked_prefill": (
        (True, None),
        "prompts longer than max_num_batched_tokens are always prefilled in chunks",
    ),
    "calculate_kv_scales": ((False,), "the scales of K and V are the checkpoint's, or 1"),
    "cpu_offload_gb": ((0, 0.0), "all weights are on the device"),
    "disable_log_stats": (ANY, "metrics are always counted, and never logged"),
    "max_cpu_loras": ((None,), "adapters that have no slot are read from their files again"),
    "fully_sharded_loras": ((False,), "adapters need one worker"),
    "lora_dtype": (("auto",), "adapters have the dtype of the activations"),
    "default_mm_loras": ((None,), "prompts are text"),
    "enable_sleep_mode": (ANY, "an engine can always sleep"),
    "mm_processor_kwargs": ((None, {}), "images are prepared as the model's files say"),
    "compilation_config": ((None, {}), "what is compiled is chosen by enforce_eager"),
    "override_generation_config": ((None, {}), "give SamplingParams instead"),
    "max_logprobs": ((20,), "a token has at most the 20 highest log-probabilities and its own"),
}
# Options for which vLLM takes None as "the default": None leaves EngineConfig's default.
DEFAULT_IF_NONE = ("seed", "max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching")
DTYPES = {"half": "float16", "float": "float32"}  # vLLM's other names

SAMPLING: Neutral = {
    "guided_decoding": ((None,), "its name is structured_outputs"),
    "spaces_between_special_tokens": ((True,), "the text has the spaces that the tokenizer decodes"),
    "truncate_prompt_tokens": ((None,), "prompts are never shortened"),
    "flat_logprobs": ((False,), "logprobs are a list of dicts"),
    "logprob_token_ids": ((None,), "logprobs are those of the likeliest tokens"),
    "extra_args": ((None, {}), "nothing reads them"),
}
STRUCTURED_OUTPUTS: Neutral = {
    "disable_fallback": (ANY, "there is one backend"),
    "disable_additional_properties": ((False,), "say additionalProperties in the schema"),
    "whitespace_pattern": ((None,), "JSON has any white space, or none with disable_any_whitespace"),
    "structural_tag": ((None,), "there are no structural tags"),
}
BEAM_SEARCH: Neutral = {
    "structured_outputs": ((None,), "a beam search (BeamSearchParams) has no structured outputs"),
    "temperature": ((0, 0.0), "beams are ranked by the model's own probabilities"),
    "ignore_eos": ((False,), "an end-of-sequence token completes a beam"),
    "include_stop_str_in_output": ((False,), "beams have no stop strings"),
}
POOLING: Neutral = {
    "task": ((None,), "the method of LLM says what is made"),
    "skip_reading_prefix_cache": ((None, False), "cached prefixes change no result"),
    "extra_kwargs": ((None, {}), "nothing reads them"),
}
POOLING_CALL: Neutral = {
    "lora_request": ((None,), "adapters change only text"),
    "tokenization_kwargs": ((None, {}), "texts are shortened by truncate_prompt_tokens alone"),
}
CALL: Neutral = {
    "tokenization_kwargs": ((None, {}), "prompts are encoded whole"),
    "mm_processor_kwargs": ((None, {}), "images are prepared as the model's files say"),
    "chat_template_content_format": (("auto", "string"), "templates see the content of a message as they need it"),
    "concurrency_limit": ((None,), "max_num_seqs of the engine bounds what runs at once"),
}


def accept(owner: str, options: dict, known: Collection[str], neutral: Neutral) -> dict:
    """`options` without the neutral ones.

    Args:
        owner: what has the options, for messages.
        known: the names of its own options, which are not checked here.

    Raises:
        TypeError: an option that does not exist.
        ValueError: a neutral option with a value that would change something.
    """
    if unknown := options.keys() - known - neutral.keys():
        raise TypeError(f"{owner} has no option {', '.join(sorted(unknown))}; its options: {', '.join(sorted(known))}")
    for name in sorted(options.keys() & neutral.keys()):
        values, why = neutral[name]
        given = options[name]
        if values is ANY and isinstance(given, bool):
            continue
        allowed = (True, False) if values is ANY else values
        assert isinstance(allowed, tuple)
        if not any(type(given) is type(value) and given == value for value in allowed):
            choices = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}={reprlib.repr(given)} is not supported, only {choices}: {why}")
    return {name: value for name, value in options.items() if name not in neutral}


def accept_engine(owner: str, options: dict, known: Collection[str]) -> dict:
    """The options of EngineConfig in `options` of vLLM's LLM or EngineArgs. Raises as `accept`."""
    options = {name: value for name, value in options.items() if value is not None or name not in DEFAULT_IF_NONE}
    tokenizer, model = options.pop("tokenizer", None), options.get("model")
    if tokenizer is not None and str(tokenizer) != str(model):
        raise ValueError(f"tokenizer={tokenizer!r} is not supported, only None or the model: a model has its own")
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        options["dtype"] = DTYPES.get(dtype, dtype)
    if options.get("model_impl") == "vllm":  # the engine's own
        options["model_impl"] = "nanopage"
    return accept(owner, options, known, ENGINE)


def accepts_options(neutral: Neutral, other_names: dict[str, str] | None = None) -> Callable[[type], type]:
    """Decorate a dataclass: its constructor also takes the neutral options, and `other_names` (vLLM's -> ours)."""

    def decorate(cls):
        init, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]

        @functools.wraps(init)
        def __init__(self, *args, **options):
            for theirs, ours in (other_names or {}).items():
                if theirs in options and (ours in options or args):
                    raise TypeError(f"{cls.__name__}() has both {ours} and {theirs}, which are the same: give one")
                if theirs in options:
                    options[ours] = options.pop(theirs)
            init(self, *args, **accept(f"{cls.__name__}()", options, known, neutral))

        cls.__init__ = __init__
        return cls

    return decorate
