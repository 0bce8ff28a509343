"""What the methods for vectors return, under vLLM's names."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class PoolingOutput:
    """The vector of a text: `data`, a float32 tensor [size] on the CPU."""

    data: Any


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The length of the embedding, under vLLM's name."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """What `LLM.encode` returns for a text."""

    request_id: str
    outputs: Any  # PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput):
    """What `LLM.embed` returns for a text: `outputs` is an EmbeddingOutput."""


class ClassificationRequestOutput(PoolingRequestOutput):
    """What `LLM.classify` returns for a text: `outputs` is a ClassificationOutput."""


class ScoringRequestOutput(PoolingRequestOutput):
    """What `LLM.score` returns for a pair: `outputs` is a ScoringOutput."""
