"""Metrics of an engine under vLLM's names. `Metrics` counts them, and is a collector of prometheus_client: the server's
/metrics and `LLM.get_metrics` read what it collects.

Everything is counted from the start of the engine. What a request asks for is counted when it is added, and what
becomes of it when it ends.
"""

import bisect
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanopage.engine.engine import LLMEngine
from nanopage.engine.output_processor import Request
from nanopage.outputs import RequestOutput, StepStats
from nanopage.params import PoolingParams, SamplingParams
from nanopage.step import EncoderCache

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

logger = logging.getLogger("nanopage")

SECONDS = (0.001, 0.005, *(digit * 10.0**power for power in range(-2, 3) for digit in (1, 2.5, 5)), 1000.0)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
COUNTERS = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
DRAFT_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
HISTOGRAMS = dict.fromkeys(
    (
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
    ),
    SECONDS,
) | dict.fromkeys(
    (
        "iteration_tokens_total",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ),
    TOKENS,
)


@dataclass
class Metric:
    """A metric's name and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number as it is now, which can rise and fall."""

    value: float


@dataclass
class Vector(Metric):
    """Several counters in order."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observed values: their number, their sum, and how many are at most each bucket's bound ("+Inf": all)."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Observations:
    """The values that a histogram is made of, sorted into buckets as they come."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)  # above the previous bound, up to this one; the last has no bound
    sum: float = 0.0

    def __post_init__(self):
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """The bound of each bucket, and how many values are at most that."""
        return list(zip([*map(str, self.bounds), "+Inf"], itertools.accumulate(self.counts), strict=True))


class Metrics:
    """Counts what an engine does, from now on. Metrics of drafts are missing without speculative decoding, and
    those of encoders without an encoder."""

    def __init__(self, engine: LLMEngine):
        config, speculation = engine.config, engine.config.speculation
        self.labels = {"model_name": engine.model_path.name, "engine": "0"}
        self.cache = {"block_size": str(config.block_size), "num_gpu_blocks": str(engine.capacity.num_blocks)}
        self.counters = dict.fromkeys(COUNTERS if speculation is None else COUNTERS + DRAFT_COUNTERS, 0)
        self.accepted = [0] * (0 if speculation is None else speculation.num_speculative_tokens)  # by position
        self.ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)  # completions, by finish_reason
        self.histograms = {name: Observations(bounds) for name, bounds in HISTOGRAMS.items()}
        shape = engine.model_config
        encodes = bool(shape.encoders or shape.encoded_positions) and config.pipeline_parallel_size == 1
        self.encoder_cache = EncoderCache() if encodes else None
        self.busy_seconds = 0.0  # of all steps
        self.last_step = StepStats()
        self.queues = engine.scheduler
        engine.listeners.append(self.count)

    @property
    def seconds_per_request(self) -> float:
        """The time of all steps per completion that has ended. Before any has ended, the time of all steps."""
        return self.busy_seconds / max(1, sum(self.ended.values()))

    def count(self, what: StepStats | Request | RequestOutput) -> None:
        """Count a step, a request that has been queued, or the last output of a request. A failure is only logged: it
        must not end a request or the engine."""
        try:
            if isinstance(what, StepStats):
                self._add_step(what)
            elif isinstance(what, RequestOutput):
                self._add_finished(what)
            else:
                self._add_request(what)
        except Exception:
            logger.exception("the metrics have failed")

    def _add_step(self, stats: StepStats) -> None:
        self.counters["prompt_tokens"] += stats.prefill_tokens + stats.cached_tokens
        self.counters["generation_tokens"] += stats.output_tokens
        self.counters["num_preemptions"] += stats.preempted
        if self.accepted:
            drafts = stats.num_drafts, stats.draft_tokens, sum(stats.accepted_tokens)
            for name, count in zip(DRAFT_COUNTERS, drafts, strict=True):
                self.counters[name] += count
            for position, count in enumerate(stats.accepted_tokens):
                self.accepted[position] += count
        if self.encoder_cache is not None:
            self.encoder_cache = stats.encoder_cache or self.encoder_cache
        if num_tokens := stats.prefill_tokens + stats.output_tokens:
            self.histograms["iteration_tokens_total"].add(num_tokens)
        self.busy_seconds += stats.seconds
        self.last_step = stats

    def _add_request(self, request: Request) -> None:
        params = request.params
        if isinstance(params, PoolingParams):
            return
        self.histograms["request_params_n"].add(params.n if isinstance(params, SamplingParams) else params.width)
        if params.max_tokens is not None:
            self.histograms["request_params_max_tokens"].add(params.max_tokens)

    def _add_finished(self, output: RequestOutput) -> None:
        times, histograms = output.metrics, self.histograms
        num_prompt_tokens = len(output.prompt_token_ids)
        if times.first_scheduled_time is not None:
            self.counters["prefix_cache_queries"] += num_prompt_tokens
            self.counters["prefix_cache_hits"] += output.num_cached_tokens
            histograms["request_queue_time_seconds"].add(times.first_scheduled_time - times.arrival_time)
        longest = max((len(completion.token_ids) for completion in output.outputs), default=0)
        if times.token_times:
            first, last = times.token_times[0], times.token_times[-1]
            histograms["time_to_first_token_seconds"].add(first - times.arrival_time)
            histograms["request_decode_time_seconds"].add(last - first)
            # A step with drafts yields several tokens. Of a request with several completions, or a beam search, the
            # tokens of one completion may be fewer than the steps.
            num_tokens = max(longest, len(times.token_times))
            if num_tokens > 1:
                histograms["request_time_per_output_token_seconds"].add((last - first) / (num_tokens - 1))
            if times.first_scheduled_time is not None:
                histograms["request_prefill_time_seconds"].add(first - times.first_scheduled_time)
                histograms["request_inference_time_seconds"].add(last - times.first_scheduled_time)
        for before, after in itertools.pairwise(times.token_times):
            histograms["inter_token_latency_seconds"].add(after - before)
        if times.finished_time is not None:
            histograms["e2e_request_latency_seconds"].add(times.finished_time - times.arrival_time)
        histograms["request_prompt_tokens"].add(num_prompt_tokens)
        histograms["request_max_num_generation_tokens"].add(longest)
        for completion in output.outputs:
            histograms["request_generation_tokens"].add(len(completion.token_ids))
            if completion.finish_reason is not None:
                self.ended[completion.finish_reason] += 1
        if not output.outputs:  # a vector, which vLLM counts as a stop
            self.ended["stop" if output.pooled is not None else "abort" if output.error is None else "error"] += 1

    def collect(self) -> Iterator["Family"]:
        """All metrics: the interface of prometheus_client's collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily  # takes 0.1 s

        def family(kind: Any, name: str, *samples: tuple) -> "Family":
            """Args: samples: further labels, and arguments of `add_metric`."""
            name = name if ":" in name else f"vllm:{name}"
            found = kind(name, name.partition(":")[2].replace("_", " "), labels=[*self.labels, *samples[0][0]])
            for labels, *values in samples:
                found.add_metric([*self.labels.values(), *labels.values()], *values)
            return found

        step, queues = self.last_step, self.queues
        num_blocks = step.used_blocks + step.free_blocks + step.cached_blocks
        yield family(GaugeMetricFamily, "num_requests_running", ({}, float(len(queues.running))))
        num_waiting = len(queues.waiting) + len(queues.swapped)
        yield family(GaugeMetricFamily, "num_requests_waiting", ({}, float(num_waiting)))
        yield family(GaugeMetricFamily, "kv_cache_usage_perc", ({}, step.used_blocks / max(1, num_blocks)))
        yield family(GaugeMetricFamily, "cache_config_info", (self.cache, 1.0))
        for name, count in self.counters.items():
            yield family(CounterMetricFamily, name, ({}, count))
        if self.accepted:
            by_position = [({"position": str(position)}, count) for position, count in enumerate(self.accepted)]
            yield family(CounterMetricFamily, ACCEPTED, *by_position)
        if (cache := self.encoder_cache) is not None:
            yield family(CounterMetricFamily, "mm_cache_queries", ({}, cache.queries))
            yield family(CounterMetricFamily, "mm_cache_hits", ({}, cache.hits))
            yield family(GaugeMetricFamily, "nanopage:encoder_cache_bytes", ({}, float(cache.num_bytes)))
        ended = [({"finished_reason": reason}, count) for reason, count in self.ended.items()]
        yield family(CounterMetricFamily, "request_success", *ended)
        for name, values in self.histograms.items():
            yield family(HistogramMetricFamily, name, ({}, values.buckets, values.sum))

    def snapshot(self) -> list[Metric]:
        """All metrics in the shape of vLLM's `LLM.get_metrics`."""
        found: list[Metric] = []
        for family in self.collect():
            if family.type == "histogram":
                *buckets, count, total = family.samples
                at_most = {bucket.labels["le"]: int(bucket.value) for bucket in buckets}
                found.append(Histogram(family.name, count.labels, int(count.value), total.value, at_most))
            elif family.name == f"vllm:{ACCEPTED}":
                found.append(Vector(family.name, self.labels, [int(sample.value) for sample in family.samples]))
            elif family.type == "counter":
                found += [Counter(family.name, sample.labels, int(sample.value)) for sample in family.samples]
            else:
                found += [Gauge(family.name, sample.labels, sample.value) for sample in family.samples]
        return found
