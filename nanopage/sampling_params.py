"""The parameters of requests, where vLLM's scripts import them from."""

from nanopage.request import BeamSearchParams, SamplingParams

__all__ = ["BeamSearchParams", "SamplingParams"]
