"""Prometheus metrics of a server."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SENTENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"registry": self.registry, "namespace": "fasttfm"}
        self.requests = Counter("requests", "Requests answered, by path and status", ["path", "status"], **options)
        self.seconds = Histogram("request_seconds", "From request to answer", buckets=_SECONDS, **options)
        self.sentences = Counter("sentences", "Sentences translated", **options)
        self.tokens = Counter("source_tokens", "Source tokens translated", **options)
        self.queue = Gauge("queue_sentences", "Sentences waiting", **options)
        self.batch_sentences = Histogram(
            "batch_sentences", "Sentences searched together, of every step", buckets=_SENTENCES, **options
        )
        self.batch_seconds = Histogram(
            "batch_seconds", "Time of a step, or of a whole batch", buckets=_SECONDS, **options
        )
        self.connections = Gauge("connections", "Open connections", **options)
        self.connections_refused = Counter(
            "connections_refused", "Connections answered with 503, beyond the limit", **options
        )
        self.workers = Gauge("workers", "Worker processes (1: this process translates)", **options)
        self.workers_ended = Counter("workers_ended", "Worker processes that ended and were replaced", **options)
        self.workers.set(1)

    def step(self, seconds: float, together: int, ended: int, tokens: int) -> None:
        """Record a step of an engine; the arguments of its on_step."""
        self.batch_seconds.observe(seconds)
        self.batch_sentences.observe(together)
        self.sentences.inc(ended)
        self.tokens.inc(tokens)
