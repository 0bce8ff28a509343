"""Scores of pairs of texts: the prompts that a model needs for them, and the scores in its outputs.

A model with one class reads both texts of a pair and scores them. With an embedding model, each text is embedded once,
and a score is the similarity of two embeddings.
"""

import numpy as np

from nanopage.checks.pooling import PoolingConfig
from nanopage.outputs import RequestOutput

Pair = tuple[str, str]


def pair_texts(first: str | list[str], second: str | list[str]) -> list[Pair]:
    """Pair one text with each of several, or the texts of two lists of equal length.

    Raises: TypeError, ValueError.
    """
    seconds = [second] if isinstance(second, str) else second
    firsts = [first] if isinstance(first, str) else first
    for name, texts in (("data_1", firsts), ("data_2", seconds)):
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
            raise TypeError(f"{name} must be a text or a list of texts, not {texts!r:.200}")
        if not texts:
            raise ValueError(f"{name} is empty")
    if len(firsts) == 1:
        firsts = [*firsts] * len(seconds)
    if len(firsts) != len(seconds):
        raise ValueError(f"data_1 has {len(firsts)} texts and data_2 {len(seconds)}: give one, or as many")
    return list(zip(firsts, seconds, strict=True))


def scoring_prompts(pooling: PoolingConfig | None, pairs: list[Pair]) -> list[str] | list[dict]:
    """The prompts to run. Raises: ValueError if the model cannot score."""
    if pooling is None:
        raise ValueError("the model makes text: scores need a model made for them, or runner='pooling'")
    if pooling.scores:
        return [{"prompt": first, "text_pair": second} for first, second in pairs]
    if pooling.task == "classify":
        raise ValueError(f"the model has {pooling.num_labels} classes, and only a model with one class scores pairs")
    return list(_distinct(pairs))


def read_scores(
    pooling: PoolingConfig, pairs: list[Pair], outputs: list[RequestOutput]
) -> list[tuple[list[int], float]]:
    """(token ids, score) of each pair. Args: outputs: the outputs of the prompts of `scoring_prompts`, in order."""
    if pooling.scores:
        return [(output.prompt_token_ids, float(_vector(output)[0])) for output in outputs]
    embedded = dict(zip(_distinct(pairs), outputs, strict=True))
    scores = []
    for pair in pairs:
        first, second = (embedded[text] for text in pair)
        score = similarity(_vector(first), _vector(second), pooling)
        scores.append((first.prompt_token_ids + second.prompt_token_ids, score))
    return scores


def similarity(first: np.ndarray, second: np.ndarray, config: PoolingConfig) -> float:
    """How alike two embeddings are."""
    product = float(first @ second)
    if config.similarity == "dot":
        return product
    return product / max(float(np.linalg.norm(first) * np.linalg.norm(second)), 1e-12)


def _distinct(pairs: list[Pair]) -> dict[str, None]:
    return dict.fromkeys(text for pair in pairs for text in pair)


def _vector(output: RequestOutput):
    if output.pooled is None:
        raise RuntimeError(f"request {output.request_id} has no result: {output.error}")
    return output.pooled
