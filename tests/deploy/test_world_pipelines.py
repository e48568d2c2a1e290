"""Pipelines of a real world model in processes: the bits of the serial run, flat memory, and what a death does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from stretto.core.errors import CapacityError, PlanError, WorkerDiedError
from stretto.core.plan import Device, Placement, Plan
from stretto.deploy.world import World, WorldOptions
from stretto.deploy.world_models import WanShare, place
from stretto.deploy.world_verify import CHUNKS, STREAMS, Outputs, Script, compare, run_plan, serial_run, small
from stretto.models.wan_actions import ActionTrack
from stretto.runtime.engine import Engine
from stretto.runtime.residents import batons
from stretto.runtime.ways import ways_of

STEERED = WanShare(small(decoder="light", actions=(ActionTrack("camera", 4),)))
PLAIN = WanShare(small(decoder="light"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums over other numbers of threads may round differently; workers take the number of this process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def want() -> dict[WanShare, list[Outputs]]:
    return {share: serial_run(share(device="cpu", only=None)) for share in (STEERED, PLAIN)}


def share_for(cap: int) -> WanShare:
    """Return the model to compare: on a CPU a product with a single row, as actions have, rounds differently in a batch."""
    return STEERED if cap == 1 else PLAIN


@pytest.mark.parametrize(
    ("kind", "workers", "cap"), [("whole", 1, 1), ("by_step", 2, 1), ("by_block", 3, 2), ("by_stage", 4, 1), ("circular", 3, 1)]
)
def test_a_plan_in_processes_equals_the_serial_run_bit_for_bit(
    want: dict[WanShare, list[Outputs]], kind: str, workers: int, cap: int
) -> None:
    share = share_for(cap)
    plan = place(share(device="cpu", only=()), kind, [f"cpu:{i}" for i in range(workers)], batch_cap=cap)
    verdict = compare(plan, run_plan(share, plan), want[share])
    assert verdict.equal, verdict
    assert verdict.chunks > CHUNKS


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate], derandomize=True)
@given(data=st.data())
def test_any_cut_over_any_devices_equals_the_serial_run(want: dict[WanShare, list[Outputs]], data: st.DataObject) -> None:
    cap, in_flight = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    model = share_for(cap)(device="cpu", only=None)
    segments = model.route.cut(data.draw(st.sets(st.integers(1, len(model.route) - 1), max_size=8)))
    names = [f"cpu:{i}" for i in range(data.draw(st.integers(1, 4)))]
    placements = tuple(Placement(s, data.draw(st.sampled_from(names))) for s in segments)
    plan = Plan("any", tuple(map(Device, names)), {"default": placements}, dict.fromkeys(names, cap), in_flight=in_flight)
    engine = Engine(model, plan, streams=STREAMS, slots=2 * cap)
    engine.warm()
    try:
        verdict = compare(plan, Script(engine, model).run(), want[share_for(cap)])
    finally:
        engine.close()
    assert verdict.equal, (verdict, placements)


def test_what_actions_change_in_a_batch_is_rounding(want: dict[WanShare, list[Outputs]]) -> None:
    model = STEERED(device="cpu", only=None)
    plan = place(model, "by_block", ["cpu:0", "cpu:1"], batch_cap=4)
    engine = Engine(model, plan, streams=STREAMS)
    engine.warm()
    try:
        verdict = compare(plan, Script(engine, model).run(), want[STEERED])
    finally:
        engine.close()
    assert verdict.worst < 1e-4


def test_state_of_the_reference_policy_cannot_be_spread_over_its_steps() -> None:
    model = WanShare(small(kv_policy="clean"))(device="cpu", only=())
    segments = model.route.cut([6])
    placements = tuple(Placement(s, f"cpu:{i}") for i, s in enumerate(segments))
    plan = Plan("test", (Device("cpu:0"), Device("cpu:1")), {"default": placements})
    ways = ways_of(model, plan)
    with pytest.raises(PlanError, match="state never moves"):
        batons(model, ways.placed["default"], ways)


def test_shares_of_a_model_hold_the_weights_of_the_whole() -> None:
    whole, share = STEERED(device="cpu", only=None), STEERED(device="cpu", only=("block.2", "head"))
    theirs = dict(whole.net.named_parameters())
    held = {name: p for name, p in share.net.named_parameters() if not p.is_meta}
    assert any(name.startswith("blocks.2.") for name in held)
    assert not any(name.startswith("blocks.1.") for name in held)
    assert all(torch.equal(p, theirs[name]) for name, p in held.items())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    options = WorldOptions(
        text_encoder="hash", plan="by_step", devices=("cpu:0", "cpu:1"), workers="processes", streams=2,
        changes={"window_frames": 3},
    )  # fmt: skip
    world = World(options)
    world.warm()
    yield world
    world.close()


def test_memory_is_flat_over_many_windows(world: World) -> None:
    session = world.open("a road", seed=1)
    for _ in range(60):
        session.read(60)
    before = settled(world)
    for _ in range(150):
        session.read(60)
    after = settled(world)
    assert all(after[name] - before[name] < 6e6 for name in before), (before, after)
    session.close()


def settled(world: World) -> dict[str, int]:
    """Return what the workers hold, as they say it next."""
    time.sleep(1.2)
    return dict(world.engine.resident_bytes())


def test_history_and_renewal_run_on_the_second_route_in_processes(world: World) -> None:
    shape = world.model.config.latent_shape[1:]
    session = open_one(world, history=torch.randn(4, *shape, generator=torch.Generator().manual_seed(0)))
    assert session.read(60).index == 4
    session.switch_prompt(world.embed("at night"), renew=True)
    later = [session.read(60) for _ in range(5)]
    assert [c.index for c in later] == [5, 6, 7, 8, 9]
    assert later[-1].prompt_version == 1
    session.close()


def open_one(world: World, **more: object):  # type: ignore[no-untyped-def]
    for _ in range(300):
        if all(free >= 4 for free in [sum(c.values()) for c in world.engine.room.free.values()]):
            break
        time.sleep(0.01)
    return world.open("a road", **more)  # type: ignore[arg-type]


def test_a_killed_worker_ends_its_sessions_with_the_cause_and_readiness(world: World) -> None:
    session = open_one(world)
    session.read(60)
    assert world.ready
    os.kill(world.engine.workers["cpu:1"], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="cpu:1"):
        [session.read(60) for _ in range(200)]
    assert not world.ready
    with pytest.raises(WorkerDiedError):
        world.open("another")


def test_a_killed_replica_ends_its_own_sessions_and_the_others_go_on() -> None:
    options = WorldOptions(plan="replicas", devices=("cpu:0", "cpu:1"), workers="processes", streams=2, text_encoder="hash")
    world = World(options)
    world.warm()
    try:
        hit, spared = world.open("a road"), world.open("a road")
        assert [hit.read(60).index, spared.read(60).index] == [0, 0]
        os.kill(world.engine.workers["cpu:0"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="cpu:0"):
            [hit.read(60) for _ in range(200)]
        assert [spared.read(60).index for _ in range(8)] == list(range(1, 9))
        another = world.open("a lake")
        assert another.read(60).index == 0
        assert world.ready
        with pytest.raises(CapacityError):
            world.open("there is room for two on each")
        os.kill(world.engine.workers["cpu:1"], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="cpu:1"):
            [spared.read(60) for _ in range(200)]
        assert not world.ready
        with pytest.raises(WorkerDiedError):
            world.open("a sea")
    finally:
        world.close()


PARENT = """
import sys, time
sys.path.insert(0, {tests!r})
from test_pipeline import by_step, start
if __name__ == "__main__":
    engine = start(by_step())
    print(*engine.workers.values(), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(tmp_path, number: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    tests = os.path.join(os.path.dirname(os.path.dirname(__file__)), "runtime")
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(tests=tests))
    command = [sys.executable, str(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to all of them at once
        else:
            process.send_signal(number)
        process.wait(30)
    deadline_s = time.monotonic() + 30
    while any(map(alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except FileNotFoundError:
        return False
