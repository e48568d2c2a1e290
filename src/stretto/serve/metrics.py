"""What `/metrics` shows. Each server has its own registry, so several live in one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stretto.core.policy import PolicyReply, RequestOptions
from stretto.serve.service import OffersMetrics

PREFIX = "stretto"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MS = (1, 2, 5, 10, 15, 20, 25, 33, 50, 75, 100, 150, 250, 500, 1000, 2500, 5000)
SECONDS = tuple(ms / 1e3 for ms in _MS)
STEPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
POLICY = "policy"


class ServerMetrics:
    """Counts and times of one server. Labels hold no ids and no prompts, so their number is bounded."""

    def __init__(self, service: object) -> None:
        self.registry = CollectorRegistry()
        self._latency = Histogram(
            "request_latency_seconds",
            "From the arrival of a request to its reply or error",
            ("endpoint", "status"),
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "stage_seconds",
            "Time of one stage of one request; device time where there is a device",
            ("stage",),
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._batch = Histogram(
            "batch_size", "Requests that shared a model call", namespace=PREFIX, buckets=BATCHES, registry=self.registry
        )
        self._queue = Histogram(
            "queue_seconds",
            "From handing a request to the engine to its first launch",
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._path = Histogram(
            "critical_path_seconds",
            "From observation to the command at hand, by the robot's own clock; told with its next request",
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._age = Histogram(
            "chunk_age_seconds",
            "Time since a robot got its last chunk, when the next one is ready",
            namespace=PREFIX,
            buckets=SECONDS,
            registry=self.registry,
        )
        self._delay = Histogram(
            "inference_delay_steps",
            "Control steps that robots expect to pass while their request is computed",
            namespace=PREFIX,
            buckets=STEPS,
            registry=self.registry,
        )
        self._refusals = Counter(
            "refusals", "Requests and sessions that were refused", ("reason",), namespace=PREFIX, registry=self.registry
        )
        self._starved = Counter(
            "action_starvation",
            "Control steps without an action, as robots report them",
            namespace=PREFIX,
            registry=self.registry,
        )
        self.sessions = Gauge("sessions", "Connected clients", namespace=PREFIX, registry=self.registry)
        self.in_flight = Gauge("requests_in_flight", "Requests not yet answered", namespace=PREFIX, registry=self.registry)
        self._errors = Counter("errors", "Errors told to clients", ("code",), namespace=PREFIX, registry=self.registry)
        self._non_finite = Counter(
            "non_finite_actions", "Chunks withheld for NaN or infinity", namespace=PREFIX, registry=self.registry
        )
        self._misses = Counter("deadline_miss", "Requests that were not on time", namespace=PREFIX, registry=self.registry)
        self._dropped = Counter(
            "dropped_requests", "Requests whose client left before the reply", namespace=PREFIX, registry=self.registry
        )
        self._frames = Counter(
            "world_frames", "Frames that viewers of worlds were sent", namespace=PREFIX, registry=self.registry
        )
        if isinstance(service, OffersMetrics):
            self.registry.register(_ServiceNumbers(service))

    def asked(self, options: RequestOptions) -> None:
        """Take what a robot says of itself with a request."""
        if options.delay_steps is not None:
            self._delay.observe(options.delay_steps)
        if options.starved_steps:
            self._starved.inc(options.starved_steps)
        if options.path_ms is not None:
            self._path.observe(options.path_ms / 1e3)

    def replaced(self, age_s: float) -> None:
        """Note how long a robot has had its chunk when the next one is ready."""
        self._age.observe(age_s)

    def answered(self, reply: PolicyReply, seconds: float, own_ms: Mapping[str, float]) -> None:
        """Count one reply; `own_ms` are the stages of the server itself."""
        self._latency.labels(POLICY, "ok").observe(seconds)
        self._batch.observe(reply.batch_size)
        self._queue.observe(reply.queue_ms / 1e3)
        if reply.late:
            self._misses.inc()
        for stage, ms in {"queue": reply.queue_ms, **reply.stage_ms, **own_ms}.items():
            self._stages.labels(stage).observe(ms / 1e3)

    def failed(self, code: str, seconds: float, reason: str = "") -> None:
        """Count one request that was answered with an error; `reason` says why it was refused, if it was."""
        self._latency.labels(POLICY, "error").observe(seconds)
        self.error(code)
        if reason:
            self.refused(reason)

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def error(self, code: str) -> None:
        """Count an error that belongs to no request."""
        self._errors.labels(code).inc()
        if code == "non_finite_actions":
            self._non_finite.inc()
        elif code == "deadline":
            self._misses.inc()

    def showed(self, frames: int) -> None:
        """Count frames that a viewer of a world was sent."""
        self._frames.inc(frames)

    def dropped(self) -> None:
        self._dropped.inc()

    def render(self) -> bytes:
        """Return the exposition text. Asks the service for its numbers, so not for the event loop."""
        return bytes(generate_latest(self.registry))


class _ServiceNumbers:
    """Asks the service when it is scraped, so a number is never older than the scrape."""

    def __init__(self, service: OffersMetrics) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for name, value in self._service.metrics().items():
            full = f"{PREFIX}_{name}"
            if name.endswith("_total"):
                yield CounterMetricFamily(full.removesuffix("_total"), "Counted by the engine", value=float(value))
            else:
                yield GaugeMetricFamily(full, "Measured by the engine", value=float(value))
