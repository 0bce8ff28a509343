"""/v1/embeddings, /v1/score and /v1/rerank: a vector or a score for each text."""

import base64
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from nanopage.aio.async_llm import AsyncLLM
from nanopage.audio import WHISPER
from nanopage.checks.pooling import PoolingConfig
from nanopage.outputs import RequestOutput
from nanopage.params import PoolingParams
from nanopage.pooling.scoring import Pair, pair_texts, read_scores, scoring_prompts
from nanopage.server.completions import MAX_PROMPTS, read_prompts
from nanopage.server.errors import ApiError
from nanopage.server.generation import Generation, start
from nanopage.server.protocol import EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from nanopage.server.state import ServerState

ENCODINGS = ("float", "base64")


@dataclass
class PoolingCall:
    """One call."""

    state: ServerState
    body: PoolingBody
    kind: str  # the prefix of the reply's id
    prompts: list[dict]  # as the engine takes them, one for each request
    params: PoolingParams
    make_reply: Callable[[list[RequestOutput]], dict]  # the reply's own fields, of the outputs of all requests in order

    def __post_init__(self):
        self.id, self.llm = f"{self.kind}-{uuid.uuid4().hex}", self.state.require()

    async def start(self, entered: Callable[[], None]) -> Generation:
        """Put the prompts into the engine. Arguments and errors: as `generation.start`."""
        return await start(self.llm, self.prompts, self.params, self.body, entered)

    def reply(self, outputs: list[RequestOutput]) -> dict:
        made = {"id": self.id, "created": int(time.time()), "model": self.state.model_name(self.body.model)}
        count = sum(len(output.prompt_token_ids) for output in outputs)
        return made | self.make_reply(outputs) | {"usage": {"prompt_tokens": count, "total_tokens": count}}


def embeddings(state: ServerState, body: EmbeddingBody) -> PoolingCall:
    """A call of /v1/embeddings. Raises: ApiError for a field that is out of bounds."""
    if body.encoding_format not in ENCODINGS:
        raise ApiError(400, f"encoding_format must be one of {', '.join(ENCODINGS)}", param="encoding_format")
    texts = read_prompts(body.input, "input")
    prompts = [{"prompt" if isinstance(text, str) else "prompt_token_ids": text} for text in texts]

    def reply(outputs: list[RequestOutput]) -> dict:
        vectors = [cast(np.ndarray, output.pooled).astype("<f4") for output in outputs]
        as_text = body.encoding_format == "base64"
        encoded = [base64.b64encode(v.tobytes()).decode() if as_text else v.tolist() for v in vectors]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
        return {"object": "list", "data": data}

    params = _params(body, dimensions=body.dimensions, normalize=body.normalize, prompt_name=body.prompt_name)
    return PoolingCall(state, body, "embd", prompts, params, reply)


def score(state: ServerState, body: ScoreBody) -> PoolingCall:
    """A call of /v1/score. Raises: as `embeddings`."""
    for name in ("text_1", "text_2"):
        _check_count(name, getattr(body, name))
    try:
        pairs = pair_texts(body.text_1, body.text_2)
    except ValueError as error:
        message = str(error).replace("data_1", "text_1").replace("data_2", "text_2")
        raise ApiError(400, message, param="text_2") from None
    pooling = _pooling(state)

    def reply(outputs: list[RequestOutput]) -> dict:
        scores = read_scores(pooling, pairs, outputs)
        data = [{"object": "score", "index": index, "score": value} for index, (_, value) in enumerate(scores)]
        return {"object": "list", "data": data}

    return _scoring_call(state, body, "score", pairs, reply)


def rerank(state: ServerState, body: RerankBody) -> PoolingCall:
    """A call of /v1/rerank. Raises: as `embeddings`."""
    if body.top_n is not None and body.top_n < 1:
        raise ApiError(400, f"top_n={body.top_n} is less than 1", param="top_n")
    _check_count("documents", body.documents)
    documents = []
    for index, document in enumerate(body.documents):
        text = document.get("text") if isinstance(document, dict) else document
        if not isinstance(text, str):
            raise ApiError(400, "a document is a text, or an object with a text", param=f"documents[{index}]")
        documents.append(text)
    if not documents:
        raise ApiError(400, "documents is empty", param="documents")
    pairs, pooling = [(body.query, document) for document in documents], _pooling(state)

    def reply(outputs: list[RequestOutput]) -> dict:
        values = [value for _, value in read_scores(pooling, pairs, outputs)]
        best = sorted(range(len(values)), key=lambda index: -values[index])[: body.top_n]
        results = [
            {"index": index, "relevance_score": values[index]}
            | ({"document": {"text": documents[index]}} if body.return_documents else {})
            for index in best
        ]
        return {"results": results}

    return _scoring_call(state, body, "rerank", pairs, reply)


def check_task(llm: AsyncLLM, model: str, path: str, body: Any) -> None:
    """Raises: ApiError if the model does not make what the endpoint is for."""
    pooling = llm.engine.model_config.pooling
    if llm.engine.model_config.architecture == WHISPER:
        what, made = "such replies, only transcripts", False
    elif isinstance(body, EmbeddingBody):
        what, made = "embeddings", pooling is not None and pooling.task == "embed"
    elif isinstance(body, PoolingBody):
        what, made = "scores", pooling is not None and (pooling.task == "embed" or pooling.scores)
    else:
        what, made = "text", pooling is None
    if not made:
        message = f"The model {model!r} makes no {what}: it does not support {path}."
        raise ApiError(404, message, param="model", code="not_served")


def _scoring_call(
    state: ServerState,
    body: ScoreBody | RerankBody,
    kind: str,
    pairs: list[Pair],
    reply: Callable[[list[RequestOutput]], dict],
) -> PoolingCall:
    prompts = scoring_prompts(_pooling(state), pairs)
    _check_count(body.prompt_field, prompts)
    listed = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    return PoolingCall(state, body, kind, listed, _params(body, use_activation=body.use_activation), reply)


def _check_count(field: str, texts: str | list) -> None:
    """Raises: ApiError for too many texts. Equal texts count as well, because each makes a result."""
    if isinstance(texts, list) and len(texts) > MAX_PROMPTS:
        raise ApiError(400, f"{field} has {len(texts):,} texts: at most {MAX_PROMPTS:,}", param=field)


def _pooling(state: ServerState) -> PoolingConfig:
    """The model's PoolingConfig. `check_task` has checked that there is one."""
    return cast(PoolingConfig, state.require().engine.model_config.pooling)


def _params(body: PoolingBody, **fields: Any) -> PoolingParams:
    if body.stream:
        raise ApiError(400, "stream=true is not supported: there is one reply", param="stream")
    try:
        return PoolingParams(truncate_prompt_tokens=body.truncate_prompt_tokens, **fields)
    except (ValueError, TypeError) as error:
        raise body.invalid(error) from None
