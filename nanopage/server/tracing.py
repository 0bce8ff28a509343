"""Tracer: an OpenTelemetry span for each request, under vLLM's names (extra `otel`, option --otlp-traces-endpoint).

A span begins when the engine gets the request and ends with its last token. Its parent is the span that the client's
`traceparent` header names (W3C Trace Context). It has the request's id and numbers, never the text of a prompt or
a reply.
"""

import time
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nanopage.outputs import RequestOutput
from nanopage.params import PoolingParams, SamplingParams


class Tracer:
    """Sends spans to an exporter, from a thread of its own."""

    def __init__(self, exporter: SpanExporter):
        self._provider = TracerProvider(resource=Resource.create({"service.name": "nanopage"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nanopage")

    @classmethod
    def to_endpoint(cls, url: str) -> "Tracer":
        """A tracer that sends to a collector by OTLP over HTTP, such as http://localhost:4318/v1/traces."""
        return cls(OTLPSpanExporter(endpoint=url))

    def record(self, output: RequestOutput, params: SamplingParams | PoolingParams, headers: Mapping[str, str]) -> None:
        """Add the span of a request that has ended. Args: headers: the headers of the client's call."""
        times, clock = output.metrics, time.time() - time.perf_counter()
        ended = times.finished_time or time.perf_counter()
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": output.request_id,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(completion.token_ids) for completion in output.outputs),
            "gen_ai.latency.e2e": ended - times.arrival_time,
        }
        if isinstance(params, SamplingParams):
            attributes["gen_ai.request.n"] = params.n
            attributes["gen_ai.request.temperature"] = params.temperature
            attributes["gen_ai.request.top_p"] = params.top_p
            if params.max_tokens is not None:
                attributes["gen_ai.request.max_tokens"] = params.max_tokens
        if times.first_scheduled_time is not None:
            attributes["gen_ai.latency.time_in_queue"] = times.first_scheduled_time - times.arrival_time
        if times.token_times:
            first, last = times.token_times[0], times.token_times[-1]
            attributes["gen_ai.latency.time_to_first_token"] = first - times.arrival_time
            attributes["gen_ai.latency.time_in_model_decode"] = last - first
            if times.first_scheduled_time is not None:
                attributes["gen_ai.latency.time_in_model_prefill"] = first - times.first_scheduled_time
        span = self._tracer.start_span(
            "llm_request",
            TraceContextTextMapPropagator().extract(dict(headers)),
            SpanKind.SERVER,
            attributes,
            start_time=int((times.arrival_time + clock) * 1e9),
        )
        span.end(int((ended + clock) * 1e9))

    def shutdown(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()
