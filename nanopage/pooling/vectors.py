"""The vectors of requests, from what the workers have pooled."""

import numpy as np

from nanopage.checks.pooling import PoolingConfig
from nanopage.engine.sequence import SequenceGroup
from nanopage.outputs import RequestOutput
from nanopage.params import PoolingParams


def add_vector(group: SequenceGroup, params: PoolingParams, config: PoolingConfig, output: RequestOutput) -> None:
    """Add the vector of a request that has ended to its output."""
    if group.seqs[0].finish_reason == "length" and group.pooled is not None:
        mean = config.pooling_type == "MEAN"
        vector = group.pooled / len(output.prompt_token_ids) if mean else group.pooled
        output.pooled = finish_vector(vector.astype(np.float32), params, config)


def finish_vector(pooled: np.ndarray, params: PoolingParams, config: PoolingConfig) -> np.ndarray:
    """The result of a request: float32 [size].

    Args: pooled: float32, the pooled hidden state [hidden_size] or the scores of the classes [num_labels].
    """
    if config.task == "embed":
        vector = pooled[: params.dimensions]
        if config.normalize if params.normalize is None else params.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), 1e-12)  # as F.normalize
        return vector
    if params.use_activation is False or config.activation == "identity":
        return pooled
    if config.activation == "sigmoid":
        return (1 + np.tanh(pooled / 2)) / 2  # the sigmoid, which cannot overflow in this form
    exponents = np.exp(pooled - pooled.max())
    return exponents / exponents.sum()
