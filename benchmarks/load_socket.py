"""The same fleet through the whole server: WebSocket, decoding, processors, engine, and back.

    python benchmarks/load_socket.py --checkpoint pi05-metaworld --chunks-hz 1 --deadline-ms 1000 --executed-steps 8

Ours is served with batches and deadlines. The other runs in the same server with everything that openpi's does not have
turned off: one request at a time, in order of arrival. Every robot has a connection and a thread of its own, in this
process, so the robots' own cost is in the numbers of both. Options and rules are those of `load.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from fleet import SETTINGS, Demand
from load import SETS
from load_search import RULE, Report, Search, compare, write_traces

from stretto.core.chunk import Chunk
from stretto.core.errors import RefusedError
from stretto.deploy.device import resolve_device
from stretto.deploy.policy import PolicyOptions, load_policy
from stretto.deploy.provenance import provenance
from stretto.serve import ServerThread
from stretto_client import Options, PolicyClient, ServerError

Observation = Mapping[str, Any]


class Served:
    """A checkpoint behind a port, and one client a robot."""

    def __init__(self, name: str, checkpoint: str | Path, options: PolicyOptions, *, tell_deadline: bool) -> None:
        self.name, self._tell = name, tell_deadline
        self._server = ServerThread(load_policy(checkpoint, options)).__enter__()
        self._clients: dict[int, PolicyClient] = {}
        self._threads = ThreadPoolExecutor(256, thread_name_prefix="robot")
        with PolicyClient("127.0.0.1", self._server.port) as client:
            self.schema: Mapping[str, Any] = client.metadata["stretto"]["observation"]
            self.horizon: int = client.metadata["stretto"]["action_horizon"]

    def join(self, robot: int) -> None:
        self._clients[robot] = PolicyClient("127.0.0.1", self._server.port, wait_s=5.0)

    def leave_all(self) -> None:
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def submit(self, robot: int, inputs: Observation, deadline_s: float) -> Future[Chunk]:
        return self._threads.submit(self._ask, self._clients[robot], inputs, deadline_s)

    def close(self) -> None:
        self._threads.shutdown()
        self._server.__exit__(None, None, None)

    def _ask(self, client: PolicyClient, observation: Observation, deadline_s: float) -> Chunk:
        left_ms = max(0.01, (deadline_s - time.monotonic()) * 1e3)
        options = Options(deadline_ms=left_ms) if self._tell else None
        try:
            reply = client.infer(observation, options)
        except ServerError as error:
            raise RefusedError(error.reason or "error", str(error)) from error
        rt = reply["rt"]
        batches = {"served": int(rt["batch_size"])}
        timing = reply["policy_timing"]["infer_ms"]
        return Chunk(0, 0, {}, rt["mode"], rt["queue_ms"], timing, rt["stage_ms"], batches)


def observations(schema: Mapping[str, Any]) -> list[Observation]:
    """Make observations from nothing but the handshake."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(SETS):
        one: dict[str, Any] = {}
        for key, entry in schema.items():
            shape = [n or 1 for n in entry["shape"]]
            if entry["kind"] == "image":
                one[key] = rng.integers(0, 256, shape, dtype=np.uint8)
            elif entry["kind"] == "state":
                one[key] = rng.uniform(-0.3, 0.3, shape).astype(np.float32)
            else:
                one[key] = f"do task {i}"
        made.append(one)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="pi05-metaworld")
    parser.add_argument("--preset")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cap", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--overload", default="1.5,2")
    parser.add_argument("--most", type=int, default=128)
    for name in SETTINGS:
        value = getattr(Demand(), name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--traces", type=Path)
    options = parser.parse_args()
    demand = Demand(**{name: getattr(options, name) for name in SETTINGS})
    common: dict[str, Any] = {"device": options.device, "preset": options.preset, "degenerate": "hold"}
    single = PolicyOptions(**common, max_batch=1, plan="whole", dispatch="first_come_first_served", rtc=())
    ours = Served("deadline_limited", options.checkpoint, PolicyOptions(**common, max_batch=options.cap), tell_deadline=True)
    theirs = Served("single_flight", options.checkpoint, single, tell_deadline=False)
    search = Search(demand, observations(ours.schema), options.seconds, 2 * options.seconds, options.most)
    fixed = {
        **provenance(resolve_device(options.device)),
        **{name: getattr(options, name) for name in ("checkpoint", "cap", "seconds")},
        "rule": RULE,
    }
    report = Report(fixed, options.out)
    asked = compare(search, (ours, theirs), (1, 1), [float(f) for f in options.overload.split(",")], report)
    write_traces(asked, demand, ours.horizon, options.traces)
    ours.close()
    theirs.close()
    print(report.save())


if __name__ == "__main__":
    main()
