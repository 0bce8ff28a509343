"""/metrics: the counters of AsyncLLM and of the server in Prometheus' format, under vLLM's names where it has them."""

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nanopage.vllm import metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServerMetrics:
    """Everything that /metrics reports.

    Args:
        snapshot: the engine's metrics; none while it loads.
        replies: counts of (method, path, status) of HTTP replies.
        disconnects: how many clients have gone before their reply had ended.
    """

    def __init__(
        self,
        snapshot: Callable[[], list[metrics.Metric]],
        replies: Counter[tuple[str, str, str]],
        disconnects: Callable[[], int],
    ):
        self.snapshot, self.replies, self.disconnects = snapshot, replies, disconnects
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface of a collector."""
        families: dict[str, Metric] = {}
        for metric in self.snapshot():
            family = families.get(metric.name) or _family(metric)
            families[metric.name] = family
            _add(family, metric)
        yield from families.values()
        http = CounterMetricFamily("http_requests", "HTTP replies.", labels=["method", "handler", "status"])
        for labels, count in list(self.replies.items()):
            http.add_metric(labels, count)
        yield http
        yield CounterMetricFamily(
            "nanopage:client_disconnects",
            "Clients that have gone before their reply had ended.",
            value=self.disconnects(),
        )

    def describe(self) -> list[Metric]:
        return []


def _family(metric: metrics.Metric) -> Metric:
    kinds = {
        metrics.Counter: CounterMetricFamily,
        metrics.Vector: CounterMetricFamily,
        metrics.Gauge: GaugeMetricFamily,
        metrics.Histogram: HistogramMetricFamily,
    }
    name = metric.name.removeprefix("vllm:").replace("_", " ")
    labels = [*metric.labels, "position"] if isinstance(metric, metrics.Vector) else list(metric.labels)
    return kinds[type(metric)](metric.name, name, labels=labels)


def _add(family: Metric, metric: metrics.Metric) -> None:
    labels = list(metric.labels.values())
    if isinstance(metric, metrics.Histogram):
        family.add_metric(labels, list(metric.buckets.items()), metric.sum)  # type: ignore[attr-defined]
    elif isinstance(metric, metrics.Vector):
        for position, value in enumerate(metric.values):
            family.add_metric([*labels, str(position)], value)  # type: ignore[attr-defined]
    elif isinstance(metric, metrics.Counter | metrics.Gauge):
        family.add_metric(labels, metric.value)  # type: ignore[attr-defined]
