"""What requests return, where vLLM's scripts import it from."""

from nanopage.request import BeamSearchSequence, CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["BeamSearchSequence", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
