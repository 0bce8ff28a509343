"""/metrics: the metrics of engines and the server, in Prometheus' format, under vLLM's names where there are any."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import Response

from nanopage.server.state import ServerState


@dataclass
class _Page(Collector):
    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def metrics_reply(state: ServerState, engines: Iterable[Metric]) -> Response:
    """Everything that /metrics reports.

    Args: engines: what the engines' `Metrics` collect (vllm/metrics.py); nothing while they load.
    """
    replies = CounterMetricFamily("http_requests", "HTTP replies.", labels=["method", "handler", "status"])
    for labels, count in list(state.replies.items()):
        replies.add_metric(labels, count)
    text = "Clients that have gone before their reply had ended."
    gone = CounterMetricFamily("nanopage:client_disconnects", text, state.num_disconnects)
    text = "Seconds of sound that became text."
    heard = CounterMetricFamily("nanopage:transcribed_seconds", text, state.transcribed_seconds)
    content = generate_latest(_Page([*engines, replies, gone, heard]))
    return Response(content, media_type="text/plain; version=0.0.4; charset=utf-8")


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
