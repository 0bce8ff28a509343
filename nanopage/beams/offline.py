"""`LLM.beam_search`."""

from typing import Any, Protocol, cast

from nanopage.checks.vllm_options import CALL, accept
from nanopage.engine.engine import LLMEngine
from nanopage.engine.output_processor import Request
from nanopage.inputs import AnyAdapter, Prompt, list_prompts
from nanopage.outputs import BeamSearchSequence, RequestOutput
from nanopage.params import BeamSearchParams
from nanopage.text.tokenizer import Tokenizer


class Runner(Protocol):
    """What `beam_search` needs of an LLM."""

    @property
    def engine(self) -> LLMEngine: ...

    def make_requests(self, *args: Any, **kwargs: Any) -> list[Request]: ...
    def run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]: ...


def beam_search(
    llm: Runner,
    prompts: Prompt | list[Prompt],
    params: BeamSearchParams | list[BeamSearchParams],
    lora_request: AnyAdapter = None,
    use_tqdm: bool = True,
    concurrency_limit: None = None,
) -> list[RequestOutput]:
    """Search for the likeliest completions of prompts, all of them batched together.

    Args: as `generate`. concurrency_limit is accepted for vLLM's scripts and must be None.

    Returns: one RequestOutput for each prompt, in order; its `outputs` are the `width` best completions, best first,
        with `score` and `cumulative_logprob`. An end-of-sequence token is part of `token_ids`. `sequences` are the same
        completions in vLLM's shape.

    Raises: as `generate`.
    """
    accept("beam_search()", {"concurrency_limit": concurrency_limit}, (), CALL)
    if params is None:
        raise TypeError("params must be BeamSearchParams, not None")
    requests = llm.make_requests(list_prompts(prompts), params, None, lora_request, BeamSearchParams)
    outputs = llm.run(requests, use_tqdm)
    for output in outputs:
        output.sequences = read_sequences(output, llm.engine.tokenizer)
    return outputs


def read_sequences(output: RequestOutput, tokenizer: Tokenizer | None) -> list[BeamSearchSequence]:
    """The completions in vLLM's shape. Args: tokenizer: None if the model has none."""
    sequences = []
    for completion in output.outputs:
        tokens = output.prompt_token_ids + completion.token_ids
        text = None if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=False)
        total = cast(float, completion.cumulative_logprob)
        reason, stop = completion.finish_reason, completion.token_ids[-1:]
        sequences.append(BeamSearchSequence(tokens, total, text, reason, stop[0] if reason == "stop" else None))
    return sequences
