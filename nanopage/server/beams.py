"""`use_beam_search`: a body's `n` best completions instead of samples."""

from nanopage.params import BeamSearchParams, SamplingParams
from nanopage.server.errors import ApiError
from nanopage.server.protocol import OF_PARAMS, SamplingBody

WITHOUT_EFFECT = ("seed", "skip_special_tokens", "stop_in_reasoning")  # on which completions are the best
NEUTRAL = {"temperature": (0, 1), "top_k": (0, -1)}  # besides the default


def read_search(body: SamplingBody, params: SamplingParams, max_model_len: int) -> BeamSearchParams | None:
    """The search that a body asks for. None: it asks for samples.

    Args: params: the body's.
    Raises: ApiError for a field that a search does not have, or that is out of range.
    """
    if not body.use_beam_search:
        if body.length_penalty != 1:
            raise ApiError(400, "length_penalty needs use_beam_search=true", param="length_penalty")
        return None
    plain = SamplingParams()
    for name in (*OF_PARAMS, "best_of", "logprobs", "prompt_logprobs", "stream"):
        value = getattr(body, name)
        is_plain = name in WITHOUT_EFFECT or value in (None, [], {}) or value is False
        if not (is_plain or value in NEUTRAL.get(name, ()) or value == getattr(plain, name, None)):
            raise ApiError(400, f"{name} and use_beam_search exclude each other", param=name)
    if params.structured_outputs is not None:
        message = "use_beam_search: completions with a form, or with calls that must follow a schema, are sampled"
        raise ApiError(400, message, param="use_beam_search")
    try:
        return BeamSearchParams(
            body.n,
            max_tokens=params.max_tokens or max_model_len,
            length_penalty=body.length_penalty,
            skip_special_tokens=params.skip_special_tokens,
        )
    except (ValueError, TypeError) as error:
        raise body.invalid(error) from None
