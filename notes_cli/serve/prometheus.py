"""Renders the server's metrics in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from notes_cli.serve.metrics import BOUNDS, Histogram, Metrics

KIND = "text/plain; version=0.0.4; charset=utf-8"


class _Snapshot(Collector):
    """Collects given metrics and gauges."""

    def __init__(self, metrics: Metrics, gauges: dict[str, float]) -> None:
        self._metrics, self._gauges = metrics, gauges

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        requests = CounterMetricFamily("notes_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome, count in metrics.outcomes.items():
            requests.add_metric([outcome], count)
        yield requests
        prompts = CounterMetricFamily(
            "notes_prompt_tokens", "Tokens of prompts by how they came about.", labels=["how"]
        )
        for how in ("decoded", "spliced", "live", *(["unreported"] if metrics.unreported else [])):
            prompts.add_metric([how], getattr(metrics, how))
        yield prompts
        yield CounterMetricFamily("notes_answer_tokens", "Tokens that were written.", value=metrics.generated)
        yield CounterMetricFamily("notes_steps", "Calls of llama.cpp.", value=metrics.steps)
        yield CounterMetricFamily("notes_set_aside", "Answers that made room for others.", value=metrics.preempted)
        for name, (help_text, histogram) in {
            "notes_first_token_seconds": ("From a request to its first token.", metrics.first_token),
            "notes_queue_seconds": ("From a request to its beginning.", metrics.queued),
        }.items():
            yield _histogram_metric(name, help_text, histogram)
        for name, value in self._gauges.items():
            yield GaugeMetricFamily(f"notes_{name}", name.replace("_", " "), value=value)


def _histogram_metric(name: str, help_text: str, histogram: Histogram) -> Metric:
    buckets, total = [], 0
    for bound, count in zip((*map(str, BOUNDS), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=histogram.sum)


def render_metrics(metrics: Metrics, gauges: dict[str, float]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Snapshot(metrics, gauges))
    return generate_latest(registry)
