"""Metrics of an LLM, in the shape of vLLM's `LLM.get_metrics`.

Everything is counted from the start of the LLM. What a request asks for is counted when it is added, and what becomes
of it when it ends.
"""

import bisect
import itertools
from dataclasses import dataclass, field

from nanopage.outputs import RequestOutput, StepStats
from nanopage.params import BeamSearchParams, PoolingParams, SamplingParams

SECONDS = (
    0.001,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1000.0,
)
TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))


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

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        totals = list(itertools.accumulate(self.counts))
        names = [*map(str, self.bounds), "+Inf"]
        return Histogram(name, labels, totals[-1], self.sum, dict(zip(names, totals, strict=True)))


class Metrics:
    """Counts what `snapshot` reports.

    Args:
        model_name: a label of every metric.
        cache_config: block_size and num_gpu_blocks, the labels of `cache_config_info`.
        num_speculative_tokens: most tokens of a draft; 0 without speculative decoding, whose metrics are then missing.
    """

    def __init__(self, model_name: str, cache_config: dict[str, int], num_speculative_tokens: int = 0):
        self.labels = {"model_name": model_name, "engine": "0"}
        self.cache_labels = self.labels | {name: str(value) for name, value in cache_config.items()}
        self.counters = dict.fromkeys(
            ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits"), 0
        )
        self.drafts = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
        self.accepted_per_position = [0] * num_speculative_tokens
        self.ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)  # completions, by finish_reason
        self.histograms = {
            **{
                name: Observations(SECONDS)
                for name in (
                    "time_to_first_token_seconds",
                    "inter_token_latency_seconds",
                    "request_time_per_output_token_seconds",
                    "e2e_request_latency_seconds",
                    "request_queue_time_seconds",
                    "request_prefill_time_seconds",
                    "request_decode_time_seconds",
                    "request_inference_time_seconds",
                )
            },
            **{
                name: Observations(TOKENS)
                for name in (
                    "iteration_tokens_total",
                    "request_prompt_tokens",
                    "request_generation_tokens",
                    "request_max_num_generation_tokens",
                    "request_params_n",
                    "request_params_max_tokens",
                )
            },
        }
        self.busy_seconds = 0.0  # of all steps
        self.last_step = StepStats()

    def add_step(self, stats: StepStats) -> None:
        self.counters["prompt_tokens"] += stats.prefill_tokens + stats.cached_tokens
        self.counters["generation_tokens"] += stats.output_tokens
        self.counters["num_preemptions"] += stats.preempted
        self.drafts["num_drafts"] += stats.num_drafts
        self.drafts["num_draft_tokens"] += stats.draft_tokens
        self.drafts["num_accepted_tokens"] += sum(stats.accepted_tokens)
        for position, count in enumerate(stats.accepted_tokens):
            self.accepted_per_position[position] += count
        if num_tokens := stats.prefill_tokens + stats.output_tokens:
            self.histograms["iteration_tokens_total"].add(num_tokens)
        self.busy_seconds += stats.seconds
        self.last_step = stats

    def add_params(self, params: SamplingParams | BeamSearchParams | PoolingParams) -> None:
        """Count what a request asks for."""
        if isinstance(params, PoolingParams):
            return
        n = params.n if isinstance(params, SamplingParams) else params.width
        self.histograms["request_params_n"].add(n)
        if params.max_tokens is not None:
            self.histograms["request_params_max_tokens"].add(params.max_tokens)

    def add_finished(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
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

    def snapshot(self, num_running: int, num_waiting: int) -> list[Metric]:
        """All metrics under vLLM's names, given the numbers of requests that run and wait."""
        step = self.last_step
        num_blocks = step.used_blocks + step.free_blocks + step.cached_blocks
        gauges = {
            "num_requests_running": float(num_running),
            "num_requests_waiting": float(num_waiting),
            "kv_cache_usage_perc": step.used_blocks / num_blocks if num_blocks else 0.0,
        }
        metrics: list[Metric] = [Gauge(f"vllm:{name}", self.labels, value) for name, value in gauges.items()]
        metrics.append(Gauge("vllm:cache_config_info", self.cache_labels, 1.0))
        metrics += [Counter(f"vllm:{name}", self.labels, value) for name, value in self.counters.items()]
        if self.accepted_per_position:
            metrics += [Counter(f"vllm:spec_decode_{name}", self.labels, value) for name, value in self.drafts.items()]
            name = "vllm:spec_decode_num_accepted_tokens_per_pos"
            metrics.append(Vector(name, self.labels, list(self.accepted_per_position)))
        metrics += [
            Counter("vllm:request_success", self.labels | {"finished_reason": reason}, count)
            for reason, count in self.ended.items()
        ]
        metrics += [values.histogram(f"vllm:{name}", self.labels) for name, values in self.histograms.items()]
        return metrics
