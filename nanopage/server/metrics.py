"""/metrics: the metrics of engines and the server, in Prometheus' format, under vLLM's names where there are any."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from nanopage.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Page(Collector):
    """Everything that /metrics reports.

    Args: engines: returns what the engines' `Metrics` collect (vllm/metrics.py); nothing while they load.
    """

    state: ServerState
    engines: Iterable[Metric]

    def text(self) -> bytes:
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's interface of a collector."""
        yield from self.engines
        replies = CounterMetricFamily("http_requests", "HTTP replies.", labels=["method", "handler", "status"])
        for labels, count in list(self.state.replies.items()):
            replies.add_metric(labels, count)
        yield replies
        yield CounterMetricFamily(
            "nanopage:client_disconnects",
            "Clients that have gone before their reply had ended.",
            value=self.state.num_disconnects,
        )
        yield CounterMetricFamily(
            "nanopage:transcribed_seconds", "Seconds of sound that became text.", value=self.state.transcribed_seconds
        )


def merge(pages: Iterable[Iterable[Metric]]) -> dict[str, Metric]:
    """One family for each name, with the samples of all pages."""
    found: dict[str, Metric] = {}
    for family in itertools.chain.from_iterable(pages):
        if found.setdefault(family.name, family) is not family:
            found[family.name].samples += family.samples
    return found


def relabel(families: list[Metric], labels: dict[str, str]) -> list[Metric]:
    """Give these labels to all samples."""
    for family in families:
        family.samples = [sample._replace(labels=sample.labels | labels) for sample in family.samples]
    return families
