"""Plans for two requests of pi0.5 on one GPU at once: what overlap.py compares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from stretto.core.plan import Device, Mode, Placement, Plan, overlapped, per_visit, whole
from stretto.core.route import Route
from stretto.layers.tuning import choices

TWO = ", a launch each"
CHAIN = TWO + ", the loop by the chain"
TOGETHER = "one lane, robots that ask together"
LOOP = "expert_layers", (1, 50, 18, 1024, 4096, 8, 1, 256, 968), "bfloat16"


def parted(plan: Plan, device: str, *sms: int) -> Plan:
    """Give each lane a part of the device for when the other is at work."""
    return replace(plan, lane_sms={device: sms}) if device.startswith("cuda") else plan


def two_whole(route: Route, device: str, mode: Mode) -> Plan:
    """Plan the whole route in two lanes, each for streams of its own class."""
    classes = {str(lane): (Placement(route.whole, device, lane),) for lane in (0, 1)}
    return Plan("two_whole", (Device(device),), classes, {device: 1}, mode=mode)


def catching_up(route: Route, device: str, mode: Mode) -> Plan:
    """Plan one lane where whoever comes first waits for the other before the loop, which both then run together."""
    stages = [v.stage for v in route.visits]
    first = [i for i, stage in enumerate(stages) if i and stage != stages[i - 1]]
    placements = tuple(Placement(s, device) for s in route.cut(first))
    plan = Plan("catching_up", (Device(device),), {"default": placements}, {device: 2}, mode=mode)
    return plan.with_dispatch("fill_first")


def plans(route: Route, device: str, mode: Mode, cap: int) -> dict[str, Plan]:
    """Return the plans to compare, by what they do."""
    together, apart = (overlapped(route, device, mode=mode, between_visits=visits) for visits in (False, True))
    return {
        "one lane, whole route": whole(route, device, mode=mode),
        "one lane, a batch of two": catching_up(route, device, mode),
        TOGETHER: whole(route, device, batch_cap=cap, mode=mode),
        "one lane, batches between visits": per_visit(route, device, batch_cap=cap, mode=mode),
        "two lanes": overlapped(route, device, mode=mode),
        "two lanes, batches between visits": overlapped(route, device, batch_cap=cap, mode=mode, between_visits=True),
        **{
            f"two lanes, on {a} and {b} multiprocessors{words}": parted(lanes, device, a, b)
            for a, b in ((80, 52), (88, 44), (96, 36))
            for words, lanes in ((CHAIN, together), (TWO, together), ("", apart))
        },
        "two lanes, whole route in each": two_whole(route, device, mode),
    }


@contextmanager
def loop_by_chain(plan: Plan) -> Iterator[None]:
    """Capture inside with the loop by the chain of launches on the second lane's part, whatever its table says."""
    ((device, sms),) = plan.lane_sms.items() or (("cpu", (0, 0)),)
    table = choices(torch.device(device), sms[1])
    known = table.known
    table.known = {**known, LOOP: {"impl": "chain"}}
    table.asked.clear()
    try:
        yield
    finally:
        table.known = known
        table.asked.clear()
