"""The exact answer on small instances: which streams to take and where their ranks go, as one integer programme.

A stream is a path over the columns at which it may be cut; an arc is a rank on a device. The programme takes the most
streams under the planner's own rules: load caps of shared and exclusive devices, memory with weights shared, one rank a
device. Predicted response is not linear and is left out, so this is an upper limit where it binds.
Needs the `exact` extra (SciPy).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from stretto.core.errors import ConfigError
from stretto.core.plan import Device
from stretto.sched.cluster import EXCLUSIVE_CAP, SHARED_CAP, Cluster, ModelView, Placed, StreamSpec
from stretto.sched.columns import Rank
from stretto.sched.profile import Profile

_LARGEST = 60_000
_EPSILON = 1e-9
_KINDS = ("taken", "on", "weights", "model", "alone")


class TooLargeError(ConfigError):
    """An instance is too large for the exact answer."""


class _Programme:
    """Rows and columns of an integer programme, by name."""

    def __init__(self) -> None:
        self.names: dict[Any, int] = {}
        self.weights: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def binary(self, name: Any, gain: float = 0.0) -> int:
        if name not in self.names:
            self.names[name] = len(self.names)
            self.weights.append(gain)
        return self.names[name]

    def add(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self.rows.append((dict(terms), low, high))

    def solve(self, limit_s: float) -> tuple[dict[Any, bool], bool]:
        """Return the values of all variables, and whether they are proven best."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix

        triples = [(r, c, v) for r, (terms, _, _) in enumerate(self.rows) for c, v in terms.items()]
        rows, columns, values = zip(*triples, strict=True)
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self.rows), len(self.names))).tocsr()
        constraint = LinearConstraint(matrix, [low for _, low, _ in self.rows], [high for _, _, high in self.rows])
        n = len(self.names)
        found = milp(
            -np.asarray(self.weights),
            constraints=constraint,
            integrality=np.ones(n),
            bounds=Bounds(0, 1),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )
        if found.x is None:
            return {}, False
        return {name: bool(found.x[i] > 0.5) for name, i in self.names.items()}, found.status == 0


def solve(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    specs: Sequence[StreamSpec],
    *,
    cuts: int = 8,
    limit_s: float = 30.0,
) -> dict[str, Placed]:
    """Return the most streams that fit, with their ranks; see `optimum`.

    Raises:
        TooLargeError: if the instance is too large, or not settled in this time.
        ConfigError: if SciPy is missing.
    """
    best, proven = optimum(devices, profiles, specs, cuts=cuts, limit_s=limit_s)
    if not proven:
        got = f"no proof within {limit_s:.0f} s, {len(best)} streams so far"
        raise TooLargeError("exact", got=got, expected="an instance that is settled in this time: fewer streams or devices")
    return best


def optimum(
    devices: Sequence[Device],
    profiles: Mapping[str, Profile],
    specs: Sequence[StreamSpec],
    *,
    cuts: int = 8,
    limit_s: float = 60.0,
    keep: Collection[str] = (),
) -> tuple[dict[str, Placed], bool]:
    """Return the most streams that fit with ranks cut at `cuts` places of the model, and whether that is proven.

    Streams of `keep` must be among them, such as those that equal partition takes; nothing is placed if they cannot be.

    Raises:
        TooLargeError: if the instance is too large.
        ConfigError: if SciPy is missing.
    """
    try:
        import scipy  # noqa: F401
    except ImportError as e:
        raise ConfigError("exact", got="no SciPy", expected="the `exact` extra: pip install 'stretto[exact]'") from e
    cluster = Cluster(devices, profiles)
    points = {m: _points(v, cuts) for m, v in cluster.views.items()}
    size = sum(len(devices) * len(points[s.model]) * (len(points[s.model]) - 1) // 2 for s in specs)
    if size > _LARGEST:
        raise TooLargeError(
            "exact", got=f"{size} possible ranks", expected=f"at most {_LARGEST}: fewer streams, devices or cuts"
        )
    programme = _Programme()
    for spec in specs:
        _stream(programme, cluster.view(spec.model), spec, devices, points[spec.model])
    for device in devices:
        _device(programme, cluster, specs, device, points)
    for name in keep:
        programme.add({programme.names["taken", name]: 1.0}, 1.0, 1.0)
    if not keep:
        _order_alike(programme, specs)
    values, proven = programme.solve(limit_s)
    placed = {s.name: Placed(s, _ranks(values, s), "exact") for s in specs if values.get(("taken", s.name))}
    for p in placed.values():
        cluster.commit(p)
    return placed, proven


def _points(view: ModelView, cuts: int) -> tuple[int, ...]:
    """Return the columns at which ranks may begin and end: as even as the columns allow."""
    n = len(view)
    return tuple(sorted({round(i * n / min(cuts, n)) for i in range(min(cuts, n) + 1)}))


def _stream(p: _Programme, view: ModelView, spec: StreamSpec, devices: Sequence[Device], points: Sequence[int]) -> None:
    """Add the path of one stream: flow is kept at every point, and a device is visited once."""
    taken = p.binary(("taken", spec.name), 1.0)
    flow: dict[int, dict[int, float]] = {at: {} for at in points}
    for device in devices:
        once: dict[int, float] = {}
        for a, b in itertools.combinations(points, 2):
            if (view.work_sum[b] - view.work_sum[a]) / spec.interval_s > EXCLUSIVE_CAP:
                continue
            arc = p.binary((spec.name, device.name, a, b))
            flow[a][arc] = 1.0
            flow[b][arc] = -1.0
            once[arc] = 1.0
        on = p.binary(("on", spec.name, device.name))
        p.add({**once, on: -1.0}, 0.0, 0.0)
    for at, terms in flow.items():
        source = -1.0 if at == points[0] else 1.0 if at == points[-1] else 0.0
        p.add({**terms, **({taken: source} if source else {})}, 0.0, 0.0)


def _device(
    p: _Programme, cluster: Cluster, specs: Sequence[StreamSpec], device: Device, points: Mapping[str, Sequence[int]]
) -> None:
    """Add the load, sharing and memory of one device."""
    load: dict[int, float] = {}
    memory: dict[int, float] = {}
    sharing: dict[int, float] = {}
    for spec in specs:
        view = cluster.view(spec.model)
        sharing[p.binary(("on", spec.name, device.name))] = 1.0
        for a, b in itertools.combinations(points[spec.model], 2):
            name = (spec.name, device.name, a, b)
            if name not in p.names:
                continue
            arc = p.names[name]
            load[arc] = (view.work_sum[b] - view.work_sum[a]) / spec.interval_s
            memory[arc] = float(view.state_sum[b] - view.state_sum[a])
            for c, d in itertools.pairwise(points[spec.model]):
                if a <= c and d <= b:
                    weight = p.binary(("weights", spec.model, device.name, c))
                    p.add({arc: 1.0, weight: -1.0}, -1.0, 0.0)
                    memory[weight] = float(view.weight_sum[d] - view.weight_sum[c])
        here = p.binary(("model", spec.model, device.name))
        p.add({p.names["on", spec.name, device.name]: 1.0, here: -1.0}, -1.0, 0.0)
        memory[here] = float(view.profile.reserved_bytes)
    alone = p.binary(("alone", device.name))
    p.add({**load, alone: SHARED_CAP - EXCLUSIVE_CAP}, 0.0, SHARED_CAP + _EPSILON)
    p.add({**sharing, alone: float(len(specs))}, 0.0, float(len(specs) + 1))
    if device.memory_bytes:
        p.add({k: v / device.memory_bytes for k, v in memory.items()}, 0.0, 1.0)


def _order_alike(p: _Programme, specs: Sequence[StreamSpec]) -> None:
    """Of streams that are alike take the first ones: fewer equal answers to search."""
    for a, b in itertools.pairwise(sorted(specs, key=lambda s: (s.model, s.interval_s, s.response_s))):
        if (a.model, a.interval_s, a.response_s) == (b.model, b.interval_s, b.response_s):
            p.add({p.names["taken", a.name]: 1.0, p.names["taken", b.name]: -1.0}, 0.0, 1.0)


def _ranks(values: Mapping[Any, bool], spec: StreamSpec) -> tuple[Rank, ...]:
    arcs = [n for n, on in values.items() if on and n[0] == spec.name and len(n) == 4 and n[0] not in _KINDS]
    return tuple(sorted((Rank(a, b, device) for _, device, a, b in arcs), key=lambda r: r.start))
