"""The parameters of requests, where vLLM's scripts import them from."""

from nanopage.params import BeamSearchParams, RequestOutputKind, SamplingParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams"]
