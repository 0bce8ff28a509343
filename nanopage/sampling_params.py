"""The parameters of requests, where vLLM's scripts import them from."""

from nanopage.params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "RequestOutputKind", "SamplingParams", "StructuredOutputsParams"]
