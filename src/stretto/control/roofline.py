"""The Control-Time Roofline: what limits the rate of a robot's control loop, and what a faster model would buy.

With L the time of a request and L_env the time the world takes for the actions executed per request, X = L_env / L.
Rates are given as a share of what a policy without latency would reach (Y = L_env / period):
running one after the other Y_seq = X / (1 + X); overlapped, as an upper bound, Y_overlap = min(X, 1).
Left of the ridge X = 1 the request limits the rate; right of it the world does, and more speed buys margin, not rate.

L is taken in four forms: the model alone or the whole critical path (observe + transfer + queue + inference + actuate),
each at its median and at its 99th percentile. X of a point is that of the whole path at its median.

For a fleet of N robots on one server that runs batches of B in T: period = max(L_env, T + transfer + queue, N T / B).
With real-time chunking the request must end before the rest of the chunk does: slack = ((H - executed) / rate) / L.

Source: definitions of X, Y and the deadline margin from the PhyAI paper, sections 3.1 and 3.2; the normalisation of Y, the
fleet and chunking forms are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stretto.control.trace import PARTS, Request, TraceError, read_trace

LIMITS = {
    "observe_s": "robot",
    "transfer_s": "network",
    "queue_s": "queue",
    "inference_s": "model",
    "actuate_s": "robot",
}
"""Part of the critical path -> who is to blame."""


def sequential_rate(x: float) -> float:
    """Return Y when observing, inferring and acting take turns."""
    return x / (1.0 + x)


def overlapped_rate(x: float) -> float:
    """Return the bound on Y when inference runs behind the actions."""
    return min(x, 1.0)


@dataclass(frozen=True, slots=True)
class Form:
    """One way to take the latency, and where that puts the robot."""

    latency_ms: float
    x: float
    y_sequential: float
    y_overlap: float

    @staticmethod
    def of(latency_s: float, env_s: float) -> Form:
        # A part that was measured as zero takes no time at all; a nanosecond keeps X finite.
        x = env_s / max(latency_s, 1e-9)
        return Form(latency_s * 1e3, x, sequential_rate(x), overlapped_rate(x))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Several robots on one server."""

    robots: int
    batch: float
    chunks_per_s: float
    """What the server can do at this batch size."""
    period_ms: float
    y: float
    limited_by: str
    most_robots: int
    """How many the server could feed at this batch size before its throughput limits them."""


@dataclass(frozen=True, slots=True)
class Chunking:
    """Real-time chunking: whether the rest of a chunk lasts until the next one comes."""

    horizon: int
    window_ms: float
    slack_p50: float
    slack_p99: float
    feasible: bool


@dataclass(frozen=True, slots=True)
class Point:
    """Where one trace stands."""

    name: str
    mode: str
    requests: int
    x: float
    y_sequential: float
    y_overlap: float
    limited_by: str
    """`world`, `model`, `network`, `queue` or `robot`."""
    margin_ms_p50: float
    margin_ms_p99: float
    deadline_ms: float
    miss_rate: float
    """Share of requests refused, failed, late or over their deadline."""
    starved_steps: int
    env_ms: float
    executed_steps: int
    control_hz: float
    forms: dict[str, Form]
    """`inference_p50`, `inference_p99`, `critical_p50`, `critical_p99`."""
    parts_ms_p50: dict[str, float]
    parts_ms_p99: dict[str, float]
    stages_ms_p50: dict[str, float]
    gain_of_2x_sequential: float
    """Relative gain in rate from a model twice as fast, one after the other."""
    gain_of_2x_overlap: float
    margin_of_2x_ms: float
    """Margin at p99 that a model twice as fast would add."""
    fleet: Fleet | None
    rtc: Chunking | None
    sentence: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def locate(name: str, requests: Sequence[Request]) -> Point:
    """Place one trace on the roofline.

    Raises:
        TraceError: if no request was answered, or requests differ in control rate or mode.
    """
    answered = [r for r in requests if r.answered]
    if not answered:
        raise TraceError(name, got=f"{len(requests)} requests, none answered", expected="at least one answered request")
    for field in ("control_hz", "mode"):
        values = sorted({str(getattr(r, field)) for r in requests})
        if len(values) > 1:
            raise TraceError(f"{name}: {field}", got=values, expected="one value in a trace", hint="Split the trace.")
    mode = answered[0].mode
    env_s = float(np.median([r.env_s for r in answered]))
    parts = {p: np.array([r.parts_s[p] for r in answered]) for p in PARTS}
    critical, inference = np.array([r.critical_s for r in answered]), parts["inference_s"]
    forms = {
        f"{kind}_p{q}": Form.of(_quantile(values, q), env_s)
        for kind, values in (("inference", inference), ("critical", critical))
        for q in (50, 99)
    }
    rtc = _chunking(answered, critical) if mode == "rtc" else None
    deadline_s = _deadline(answered, env_s, rtc)
    margins = {q: deadline_s - _quantile(critical, q) for q in (50, 99)}
    x = forms["critical_p50"].x
    percent = 99 if x >= 1.0 and margins[99] < 0.0 else 50
    takers = _takers(parts, percent)
    limited_by = "world" if x >= 1.0 and margins[99] >= 0.0 else takers[0][0]
    faster = critical - inference / 2
    point: dict[str, Any] = {
        "name": name,
        "mode": mode,
        "requests": len(requests),
        "x": x,
        "y_sequential": sequential_rate(x),
        "y_overlap": overlapped_rate(x),
        "limited_by": limited_by,
        "margin_ms_p50": margins[50] * 1e3,
        "margin_ms_p99": margins[99] * 1e3,
        "deadline_ms": deadline_s * 1e3,
        "miss_rate": sum(r.missed for r in requests) / len(requests),
        "starved_steps": sum(r.starved_steps for r in requests),
        "env_ms": env_s * 1e3,
        "executed_steps": int(np.median([r.executed_steps for r in answered])),
        "control_hz": answered[0].control_hz,
        "forms": forms,
        "parts_ms_p50": {p.removesuffix("_s"): _quantile(v, 50) * 1e3 for p, v in parts.items()},
        "parts_ms_p99": {p.removesuffix("_s"): _quantile(v, 99) * 1e3 for p, v in parts.items()},
        "stages_ms_p50": _stages(answered),
        "gain_of_2x_sequential": _gain(sequential_rate, env_s, critical, faster),
        "gain_of_2x_overlap": _gain(overlapped_rate, env_s, critical, faster),
        "margin_of_2x_ms": (_quantile(critical, 99) - _quantile(faster, 99)) * 1e3,
        "fleet": _fleet(answered, env_s),
        "rtc": rtc,
    }
    whole = forms[f"critical_p{percent}"].latency_ms
    blame = f"{_blame(takers)} of the {whole:.0f} ms from observation to command (p{percent})"
    return Point(**point, sentence=_sentence(point, blame))


def locate_files(paths: Sequence[Path]) -> tuple[Point, ...]:
    """Place traces on the roofline, named after their files; one that holds several modes is a point for each.

    Raises:
        TraceError: naming file, line and field of what cannot be used.
    """
    return tuple(point for path in paths for point in _by_mode(path.name.removesuffix(".jsonl"), read_trace(path)))


def _by_mode(name: str, requests: Sequence[Request]) -> list[Point]:
    """A server's trace holds robots of all kinds, and the first request of one that chunks is like any other."""
    modes = list(dict.fromkeys(r.mode for r in requests if r.answered))
    if len(modes) < 2:
        return [locate(name, requests)]
    return [locate(f"{name} ({mode})", [r for r in requests if r.mode == mode]) for mode in modes]


def _quantile(values: np.ndarray[Any, Any], percent: int) -> float:
    return float(np.percentile(values, percent))


def _takers(parts: dict[str, np.ndarray[Any, Any]], percent: int) -> list[tuple[str, float]]:
    """Return who takes how many seconds of the critical path, the longest first."""
    total = dict.fromkeys(LIMITS.values(), 0.0)
    for part, values in parts.items():
        total[LIMITS[part]] += _quantile(values, percent)
    return sorted(total.items(), key=lambda taker: -taker[1])


def _blame(takers: Sequence[tuple[str, float]]) -> str:
    """Name the largest part, and the next one where it is more than half as large: removing one alone buys little then."""
    (who, seconds), (other, next_s) = takers[:2]
    also = f" and the {other} {next_s * 1e3:.0f}" if next_s > seconds / 2 else ""
    return f"the {who} takes {seconds * 1e3:.0f}{also}"


def _deadline(answered: Sequence[Request], env_s: float, rtc: Chunking | None) -> float:
    """Return the tightest deadline said; else the time until the robot runs out of actions."""
    said = [r.deadline_s for r in answered if r.deadline_s is not None]
    if said:
        return min(said)
    return env_s if rtc is None else rtc.window_ms / 1e3


def _chunking(answered: Sequence[Request], critical: np.ndarray[Any, Any]) -> Chunking | None:
    horizon = answered[0].horizon
    if horizon is None:
        return None
    window_s = float(np.median([(horizon - r.executed_steps) / r.control_hz for r in answered]))
    slack = {q: window_s / max(_quantile(critical, q), 1e-9) for q in (50, 99)}
    return Chunking(horizon, window_s * 1e3, slack[50], slack[99], slack[99] >= 1.0)


def _fleet(answered: Sequence[Request], env_s: float) -> Fleet | None:
    robots = len({r.robot for r in answered})
    if robots < 2:
        return None
    # Each batch of n was written down n times, once for each of its requests.
    shares = np.array([1.0 / r.batch for r in answered])
    batches = float(shares.sum())
    batch = len(answered) / batches
    batch_s = float((shares * [r.parts_s["inference_s"] for r in answered]).sum()) / batches
    chunks_per_s = batch / max(batch_s, 1e-9)
    around = [r.parts_s["transfer_s"] + r.parts_s["queue_s"] for r in answered]
    latency_s = batch_s + float(np.median(around))
    periods = {"world": env_s, "latency": latency_s, "throughput": robots / chunks_per_s}
    limited_by = max(periods, key=lambda who: periods[who])
    period_s = periods[limited_by]
    return Fleet(robots, batch, chunks_per_s, period_s * 1e3, env_s / period_s, limited_by, int(chunks_per_s * env_s))


def _stages(answered: Sequence[Request]) -> dict[str, float]:
    names = {name: None for r in answered for name in r.stage_s}
    return {name: float(np.median([r.stage_s[name] for r in answered if name in r.stage_s])) * 1e3 for name in names}


def _gain(rate: Any, env_s: float, now: np.ndarray[Any, Any], then: np.ndarray[Any, Any]) -> float:
    before, after = (rate(env_s / max(_quantile(v, 50), 1e-9)) for v in (now, then))
    return float(after / before - 1.0)


def _sentence(p: dict[str, Any], blame: str) -> str:
    overlapped = p["mode"] != "sync"
    rate = p["y_overlap"] if overlapped else p["y_sequential"]
    gain = p["gain_of_2x_overlap"] if overlapped else p["gain_of_2x_sequential"]
    margin_ms, deadline_ms = p["margin_ms_p99"], p["deadline_ms"]
    if margin_ms < 0:
        margin = f"misses its deadline of {deadline_ms:.0f} ms by {-margin_ms:.0f} ms at p99"
    else:
        margin = f"meets its deadline of {deadline_ms:.0f} ms with {margin_ms:.0f} ms to spare at p99"
    bought = f"{p['margin_of_2x_ms']:.0f} ms of margin"
    buys = f"{bought} but no rate" if gain < 0.005 else f"{100 * gain:.0f} % more rate and {bought}"
    actions = "1 action" if p["executed_steps"] == 1 else f"{p['executed_steps']} actions"
    runs = f"it runs at {100 * rate:.0f} % of the rate without latency"
    return (
        f"{p['name']} is limited by the {p['limited_by']}: {runs} and {margin}; "
        f"{blame}, the world {p['env_ms']:.0f} ms for {actions} at {p['control_hz']:g} Hz, "
        f"and a model twice as fast would buy {buys}."
    )
