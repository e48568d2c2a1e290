"""Streams that come and go under one plan: the same script on the real engine and in the simulator."""

from __future__ import annotations

import heapq
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from stretto.core.chunk import Chunk
from stretto.core.errors import CapacityError, StrettoError
from stretto.core.plan import Plan
from stretto.deploy.drive import Feed
from stretto.runtime.engine import Engine, Stream
from stretto.sched.outcome import quantile
from stretto.sched.profile import Profile
from stretto.sched.sim_state import Load, StreamRun, Weather
from stretto.sched.simulator import Simulation

REHEARSAL_S = 1.0
START_S = 1.0
"""Of an engine whose weights are made: rings and graphs."""
Span = tuple[float, float]
_LAG = 0.75  # of the chunks in a span
NOISE = 0.01
"""Of a batch's time in the simulator; without it equal streams would stay in step for ever."""


@dataclass(frozen=True)
class Entry:
    """One stream of a script."""

    stream_class: str = "default"
    start_s: float = 0.0
    stop_s: float = math.inf
    """When it is cancelled, with chunks under way."""
    interval_s: float = 0.0
    """One chunk is asked for each so often; 0: as many chunks are under way as the plan gives."""


@dataclass(frozen=True)
class Script:
    """Streams, and the spans over which their output is looked at, in seconds from the start."""

    entries: Sequence[Entry]
    seconds: float
    spans: Sequence[Span]


Out = tuple[float, float]
"""When a chunk was asked for, and when it came, in seconds from the start of the script."""


@dataclass
class Track:
    """What one stream gave."""

    out: list[Out] = field(default_factory=list)
    eager: int = 0
    """Chunks of which something ran eagerly where graphs were asked for."""
    failed: str = ""
    burst: int = 1
    """Chunks that may come out together: those that are under way."""
    busy_ms: list[Mapping[str, float]] = field(default_factory=list)
    """Of each chunk, the time that it took of each device."""

    def interval_s(self, span: Span) -> float:
        """Return the mean time between chunks within a span; NaN if there are fewer than four.

        Chunks can come in bursts, so chunks are compared that are whole bursts apart, and not so far that only the first and
        the last count. A stream that stood still for half of the span, and made what it made in the other half, had the
        interval that the whole span gives.
        """
        inside = [done for _, done in self.out if span[0] <= done <= span[1]]
        if len(inside) < 4:
            return math.nan
        if inside[-1] - inside[0] < 0.5 * (span[1] - span[0]):
            return (span[1] - span[0]) / len(inside)
        most = len(inside) - 1
        lag = int(_LAG * most) // self.burst * self.burst or most // self.burst * self.burst or most
        return statistics.mean(b - a for a, b in zip(inside, inside[lag:], strict=False)) / lag

    def response_s(self, span: Span) -> float:
        """Return the median time from asking for a chunk to having it; NaN if there is none."""
        inside = [done - due for due, done in self.out if span[0] <= done <= span[1]]
        return statistics.median(inside) if inside else math.nan


class Player:
    """One stream on the engine."""

    def __init__(self, stream: Stream, number: int, entry: Entry, credit: int, feed: Feed, first_chunk: int) -> None:
        self.stream, self.number, self.entry, self.credit = stream, number, entry, credit
        self.feed, self.next = feed, first_chunk
        self.track = Track(burst=1 if entry.interval_s else credit)
        self.stopped = False
        self.begin_s = 0.0

    def fill(self) -> None:
        """Put as many chunks under way as the plan gives."""
        for _ in range(self.credit):
            self.ask()

    def ask(self) -> None:
        if self.stopped:
            return
        asked_s = time.monotonic() - self.begin_s
        try:
            future = self.stream.submit(self.feed(self.number, self.next), chunk=self.next)
        except StrettoError as e:
            if not self.stopped:
                self.stopped, self.track.failed = True, f"{type(e).__name__}: {e}"
            return
        self.next += 1
        future.add_done_callback(lambda done: self._came(asked_s, done))

    def _came(self, asked_s: float, future: Future[Chunk]) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or self.stopped:
            return
        if error is not None:
            self.stopped, self.track.failed = True, f"{type(error).__name__}: {error}"
            return
        chunk = future.result()
        self.track.out.append((asked_s, time.monotonic() - self.begin_s))
        self.track.eager += chunk.mode == "eager"
        self.track.busy_ms.append(chunk.device_ms)
        if not self.entry.interval_s:
            self.ask()

    def stop(self) -> None:
        self.stopped = True
        self.stream.close()


def needed_s(script: Script, start_s: float = START_S) -> float:
    """Return about how long a run of a script takes, with the engine's start and its rehearsals."""
    return start_s + script.seconds + share_of(script) * script.seconds


def share_of(script: Script) -> float:
    """Return to what share a script is shortened to rehearse it."""
    return min(1.0, max(0.1, REHEARSAL_S / script.seconds))


def play(
    engine: Engine, script: Script, feed: Feed, first_chunk: int, prepare: Callable[[Stream], None], *, share: float = 1.0
) -> list[Track]:
    """Run a script on a warm engine; its streams are closed at the end. `share` shortens it, to rehearse."""
    credits = engine.plan.credit
    streams = [_open(engine, entry.stream_class, i) for i, entry in enumerate(script.entries)]
    for stream in streams:
        prepare(stream)
    pairs = list(zip(streams, script.entries, strict=True))
    players = [Player(s, i, e, credits(e.stream_class), feed, first_chunk) for i, (s, e) in enumerate(pairs)]
    calendar: list[tuple[float, int, Callable[[], None]]] = []
    order = itertools.count()
    for player in players:
        entry = player.entry
        heapq.heappush(calendar, (entry.start_s * share, next(order), player.ask if entry.interval_s else player.fill))
        if entry.stop_s < script.seconds:
            heapq.heappush(calendar, (entry.stop_s * share, next(order), player.stop))
        for turn in range(1, int((script.seconds - entry.start_s) / entry.interval_s) + 1 if entry.interval_s else 0):
            heapq.heappush(calendar, (entry.start_s * share + turn * entry.interval_s, next(order), player.ask))
    begin_s = time.monotonic()
    for player in players:
        player.begin_s = begin_s
    heapq.heappush(calendar, (script.seconds * share, next(order), lambda: None))
    idle = threading.Event()
    while calendar:
        at, _, action = heapq.heappop(calendar)
        if at > script.seconds * share:
            break
        idle.wait(max(0.0, begin_s + at - time.monotonic()))
        action()
    for player in players:
        player.stop()
    return [player.track for player in players]


def _open(engine: Engine, stream_class: str, seed: int) -> Stream:
    """Open a stream; those of the run before may still be freeing their state."""
    until_s = time.monotonic() + 20.0
    while True:
        try:
            return engine.open(stream_class=stream_class, seed=seed)
        except CapacityError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.01)


def simulated(profile: Profile, plan: Plan, script: Script, weather: Weather, *, slots: int = 0) -> list[Track]:
    """Run a script in the simulator."""
    runs = [
        StreamRun(f"s{i}", "m", e.stream_class, e.interval_s, start_s=e.start_s, stop_s=e.stop_s)
        for i, e in enumerate(script.entries)
    ]
    outcome = Simulation({"m": Load(plan, profile)}, runs, weather=weather, slots=slots).run(script.seconds)
    bursts = [1 if e.interval_s else plan.credit(e.stream_class) for e in script.entries]
    return [
        Track([(due, done) for _, due, done in s.done], burst=burst) for s, burst in zip(outcome.streams, bursts, strict=True)
    ]


def comparison(measured: Sequence[Track], expected: Sequence[Track], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return a row for each stream and span in which both have enough chunks."""
    rows = []
    for span, (i, (real, other)) in itertools.product(spans, enumerate(zip(measured, expected, strict=True))):
        a, b = real.interval_s(span), other.interval_s(span)
        if math.isnan(a) or math.isnan(b):
            continue
        row = {
            "stream": i,
            "span_s": [round(t, 3) for t in span],
            "measured_ms": round(a * 1e3, 3),
            "simulated_ms": round(b * 1e3, 3),
            "error": round(b / a - 1.0, 4),
            "response_ms": round(real.response_s(span) * 1e3, 2),
            "simulated_response_ms": round(other.response_s(span) * 1e3, 2),
        }
        rows.append(row)
    return rows


def pooled(measured: Sequence[Track], expected: Sequence[Track], spans: Sequence[Span]) -> list[dict[str, Any]]:
    """Return the chunks a second, for each span, of all streams together that have enough chunks in both."""
    rows = []
    for span in spans:
        pairs = [(a.interval_s(span), b.interval_s(span)) for a, b in zip(measured, expected, strict=True)]
        known = [(a, b) for a, b in pairs if not (math.isnan(a) or math.isnan(b))]
        real, other = sum(1.0 / a for a, _ in known), sum(1.0 / b for _, b in known)
        if real and other:
            error = round(real / other - 1.0, 4)
            rows.append({"span_s": list(span), "measured": round(real, 4), "simulated": round(other, 4), "error": error})
    return rows


def figures(tracks: Sequence[Track], span: Span, interval_s: float = 0.0) -> dict[str, Any]:
    """Return rate, intervals and latencies within a span, and how many streams fell behind a promised interval."""
    late = [done - due for t in tracks for due, done in t.out if span[0] <= done <= span[1]]
    rate = sum(1.0 / s for t in tracks if not math.isnan(s := t.interval_s(span))) or math.nan
    out: dict[str, Any] = {
        "chunks_per_s": _rounded(rate, 4),
        "interval_ms": [_rounded(t.interval_s(span) * 1e3) for t in tracks],
        "response_ms_p50": _rounded(quantile(late, 0.5) * 1e3),
        "response_ms_p99": _rounded(quantile(late, 0.99) * 1e3),
    }
    return out | ({"late_streams": sum(_behind(t, span, interval_s) for t in tracks)} if interval_s else {})


def _behind(track: Track, span: Span, interval_s: float) -> bool:
    """Tell whether a player with one chunk in hand, from the first one of the span on, would have run dry."""
    out = [done for _, done in track.out if span[0] <= done <= span[1]]
    late = max((done - out[0] - i * interval_s for i, done in enumerate(out)), default=math.inf)
    return late > interval_s or span[1] - out[-1] > 2.0 * interval_s


def _rounded(value: float, digits: int = 2) -> float | None:
    return round(value, digits) if math.isfinite(value) else None
