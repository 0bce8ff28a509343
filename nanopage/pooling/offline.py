"""`encode`, `embed`, `classify` and `score`: the methods of LLM for models that make vectors of texts."""

import dataclasses
import itertools
from functools import partial
from typing import Protocol, TypedDict, TypeVar, Unpack, cast

import numpy as np
import torch

from nanopage.checks.pooling import PoolingConfig
from nanopage.checks.vllm_options import POOLING_CALL, accept
from nanopage.engine.engine import LLMEngine
from nanopage.engine.output_processor import Request
from nanopage.inputs import Prompt, list_prompts
from nanopage.outputs import RequestOutput
from nanopage.params import PoolingParams
from nanopage.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from nanopage.pooling.scoring import pair_texts, read_scores, scoring_prompts

T = TypeVar("T", bound=PoolingRequestOutput)
AnyPoolingParams = PoolingParams | list[PoolingParams] | None


class Runner(Protocol):
    """What these methods need of an LLM."""

    ids: itertools.count

    @property
    def engine(self) -> LLMEngine: ...

    def make_requests(
        self, prompts: list[Prompt], params: PoolingParams | list[PoolingParams], *, kind: type[PoolingParams]
    ) -> list[Request]: ...

    def run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]: ...


class Options(TypedDict, total=False):
    """Further arguments of all four methods; `encode` documents them."""

    truncate_prompt_tokens: int | None
    use_tqdm: bool
    lora_request: None
    tokenization_kwargs: dict | None


def encode(
    llm: Runner,
    prompts: Prompt | list[Prompt],
    pooling_params: AnyPoolingParams = None,
    *,
    pooling_task: str | None = None,
    **options: Unpack[Options],
) -> list[PoolingRequestOutput]:
    """The vectors of texts: embeddings, or scores of classes, whichever the model makes.

    Args:
        prompts: one prompt or a list: text, token ids, or a dict, as for `generate`.
        pooling_params: one for all prompts, or one for each prompt. None: PoolingParams().
        truncate_prompt_tokens: as in PoolingParams, for all prompts; it has priority.
        pooling_task: "embed" or "classify"; it must be what the model makes. None: whatever the model makes.
        lora_request, tokenization_kwargs: accepted for vLLM's scripts; must be None.

    Returns: an output for each prompt, in order. `outputs.data` is the vector, a float32 tensor.

    Raises:
        ValueError, TypeError: an invalid prompt or parameter, or a model that makes text; nothing has run then.
        RuntimeError: a text could not be computed.
        GenerationInterrupted, GenerationError: as `generate`.
    """
    outputs = _run(llm, "encode", prompts, pooling_params, options, pooling_task)
    return [_result(PoolingRequestOutput, output, PoolingOutput(torch.from_numpy(output.pooled))) for output in outputs]


def embed(
    llm: Runner,
    prompts: Prompt | list[Prompt],
    *,
    pooling_params: AnyPoolingParams = None,
    **options: Unpack[Options],
) -> list[EmbeddingRequestOutput]:
    """The embeddings of texts, as `outputs.embedding`. Arguments and errors: as `encode`."""
    outputs = _run(llm, "embed", prompts, pooling_params, options, "embed")
    return [_result(EmbeddingRequestOutput, output, EmbeddingOutput(_numbers(output))) for output in outputs]


def classify(
    llm: Runner,
    prompts: Prompt | list[Prompt],
    *,
    pooling_params: AnyPoolingParams = None,
    **options: Unpack[Options],
) -> list[ClassificationRequestOutput]:
    """The probabilities of classes, as `outputs.probs`. Arguments and errors: as `encode`."""
    outputs = _run(llm, "classify", prompts, pooling_params, options, "classify")
    return [_result(ClassificationRequestOutput, output, ClassificationOutput(_numbers(output))) for output in outputs]


def score(
    llm: Runner,
    data_1: str | list[str],
    data_2: str | list[str],
    /,
    *,
    pooling_params: PoolingParams | None = None,
    **options: Unpack[Options],
) -> list[ScoringRequestOutput]:
    """How well the texts of a pair match, as `outputs.score`. A model with one class scores pairs itself. With an
    embedding model, the score is the similarity of the two embeddings.

    Args:
        data_1: a text, such as a query, for all of `data_2`, or one text for each.
        data_2: texts, such as documents.
        Others: as `encode`.

    Raises: as `encode`.
    """
    pooling, pairs = llm.engine.model_config.pooling, pair_texts(data_1, data_2)
    prompts = cast(list[Prompt], scoring_prompts(pooling, pairs))
    scores = read_scores(cast(PoolingConfig, pooling), pairs, _run(llm, "score", prompts, pooling_params, options))
    return [ScoringRequestOutput(str(next(llm.ids)), ScoringOutput(score), ids) for ids, score in scores]


def _run(
    llm: Runner,
    method: str,
    prompts: Prompt | list[Prompt],
    params: AnyPoolingParams,
    options: Options,
    task: str | None = None,
) -> list[RequestOutput]:
    """Run requests for vectors. Raises: as `encode`."""
    given = accept(f"{method}()", {**options}, Options.__annotations__, POOLING_CALL)
    params = PoolingParams() if params is None else params
    if (most := given.get("truncate_prompt_tokens")) is not None:
        shortened = partial(dataclasses.replace, truncate_prompt_tokens=most)
        params = [shortened(each) for each in params] if isinstance(params, list | tuple) else shortened(params)
    pooling = llm.engine.model_config.pooling
    if pooling is not None and task not in (None, pooling.task):
        raise ValueError(f"the model makes what pooling_task={pooling.task!r} means, not {task!r}")
    outputs = llm.run(llm.make_requests(list_prompts(prompts), params, kind=PoolingParams), given.get("use_tqdm", True))
    for i, output in enumerate(outputs):
        if output.error is not None:
            raise RuntimeError(f"prompts[{i}]: {output.error}")
    return outputs


def _result(kind: type[T], output: RequestOutput, made: object) -> T:
    return kind(output.request_id, made, output.prompt_token_ids, output.num_cached_tokens)


def _numbers(output: RequestOutput) -> list[float]:
    return cast(np.ndarray, output.pooled).tolist()
