"""Small pools, profiles and plans."""

from __future__ import annotations

from hypothesis import strategies as st

from stretto.core.plan import Device
from stretto.sched.costs import BatchCost
from stretto.sched.hardware import Link
from stretto.sched.profile import Profile, Provenance, StageProfile

LINKS = {"peer": Link(0.0, 1e18), "node": Link(0.0, 1e18)}


def toy(
    blocks: int = 8,
    steps: int = 2,
    *,
    fixed_s: float = 0.0,
    per_row_s: float = 0.01,
    weight_bytes: int = 10,
    state_bytes: int = 5,
    carry: str = "same_step",
    **changes: object,
) -> Profile:
    """Blocks of equal cost, visited for each step."""
    stage = StageProfile(BatchCost.line(fixed_s, per_row_s), weight_bytes, state_bytes if carry != "none" else 0, "visit", 1)
    names = tuple(f"block.{i}" for i in range(blocks))
    values: dict[str, object] = {"links": LINKS, "max_batch": 4, "memory_bytes": 0, **changes}
    return Profile(
        "toy",
        "toy device",
        ((names, tuple(range(steps))),),
        {"block.*": stage},
        Provenance("computed"),
        carry=carry,  # type: ignore[arg-type]
        **values,  # type: ignore[arg-type]
    )


def pool(count: int, *, memory_bytes: int = 0, per_node: int = 8) -> tuple[Device, ...]:
    return tuple(Device(f"gpu:{i}", f"node{i // per_node}", memory_bytes) for i in range(count))


@st.composite
def instances(draw: st.DrawFn) -> tuple[tuple[Device, ...], dict[str, Profile], float, int]:
    """A pool, one or two models, an interval, and how many streams ask."""
    blocks = draw(st.integers(2, 12))
    steps = draw(st.integers(1, 3))
    share = draw(st.floats(0.1, 2.5))
    interval = 1.0
    per_row = share * interval / (blocks * steps)
    memory = draw(st.sampled_from([0, 400, 900]))
    profiles = {"a": toy(blocks, steps, per_row_s=per_row, memory_bytes=memory)}
    if draw(st.booleans()):
        other = draw(st.floats(0.1, 1.5)) / (4 * steps)
        profiles["b"] = toy(4, steps, per_row_s=other, memory_bytes=memory, state_bytes=draw(st.integers(1, 20)))
    devices = pool(draw(st.integers(1, 6)), memory_bytes=memory, per_node=draw(st.sampled_from([2, 8])))
    return devices, profiles, interval, draw(st.integers(1, 14))
