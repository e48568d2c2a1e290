"""The fleet through a real port."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fleet import Demand, Trial, summary
from load_socket import Served, observations

from stretto.deploy.policy import PolicyOptions


@pytest.fixture(scope="module")
def ours(tiny_checkpoint: Path) -> Iterator[Served]:
    options = PolicyOptions(device="cpu", degenerate="hold", max_batch=4, denoise_steps=2, threads=1)
    server = Served("ours", tiny_checkpoint, options, tell_deadline=True)
    yield server
    server.close()


def test_robots_are_answered_through_the_port_and_counted(ours: Served) -> None:
    demand = Demand(chunks_hz=5.0, deadline_ms=5000.0)
    asked = Trial(ours, demand, 3, observations(ours.schema), seed=0).run(1.0)  # type: ignore[arg-type]
    found = summary(asked, 3, demand, 0.0, 1.0)
    assert found["missed"] == 0.0
    assert found["requests"] >= 9
    assert all(a.chunk is not None and a.chunk.stage_ms["denoise"] > 0 for a in asked)


def test_deadlines_travel_and_refusals_come_back_with_their_reason(ours: Served) -> None:
    demand = Demand(chunks_hz=5.0, deadline_ms=4.2, network_ms=2.0, network_jitter_ms=0.0)
    asked = Trial(ours, demand, 2, observations(ours.schema), seed=0).run(0.6)  # type: ignore[arg-type]
    found = summary(asked, 2, demand, 0.0, 0.6)
    assert found["refused"] == {"deadline": len(asked)}
