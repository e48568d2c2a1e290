"""What `/metrics` shows after real traffic: every number is fed by what really happened."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import pytest
from linear_policy import example
from tiny_checkpoint import write_checkpoint

from stretto.deploy.policy import PolicyOptions, load_policy
from stretto.serve import ServerThread
from stretto_client import Options, PolicyClient, RealtimeBroker, ServerError


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "arm", cameras=2)
    options = PolicyOptions(device="cpu", preset="libero", max_batch=2, denoise_steps=2, threads=1, control_hz=2.0)
    with ServerThread(load_policy(folder, options)) as server:
        yield server


def scraped(server: ServerThread) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.http_url}/metrics") as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_every_number_is_fed_by_real_traffic(server: ServerThread) -> None:
    with PolicyClient("127.0.0.1", server.port) as client:
        observation = example(client.metadata["stretto"]["observation"], 0)
        chunk = client.infer(observation)["actions"]
        told = Options(executed_steps=2, delay_steps=3, prefix=chunk[2:].astype(np.float32), path_ms=40.0, starved_steps=4)
        client.infer(observation, told)
        client.infer(observation, Options(executed_steps=1, delay_steps=2))
        with pytest.raises(ServerError, match="deadline"):
            client.infer(observation, Options(deadline_ms=0.001))
        client.infer(observation, Options(deadline_ms=0.001, late=True))
        found = scraped(server)
    stages = {"decode", "preprocess", "queue", "vision", "prefix", "denoise", "postprocess", "encode"}
    assert {f'stretto_stage_seconds_count{{stage="{stage}"}}' for stage in stages} <= {k for k, v in found.items() if v == 4}
    assert found['stretto_request_latency_seconds_count{endpoint="policy",status="ok"}'] == 4
    assert found['stretto_request_latency_seconds_count{endpoint="policy",status="error"}'] == 1
    assert found["stretto_queue_seconds_count"] == 4
    assert found["stretto_batch_size_count"] == 4
    assert found["stretto_critical_path_seconds_sum"] == pytest.approx(0.04)
    assert found["stretto_inference_delay_steps_sum"] == 5
    assert found["stretto_chunk_age_seconds_count"] == 3
    assert found["stretto_action_starvation_total"] == 4
    # One refused, one served late because the client wanted that.
    assert found["stretto_deadline_miss_total"] == 2
    assert found['stretto_refusals_total{reason="deadline"}'] == 1
    assert found['stretto_errors_total{code="deadline"}'] == 1
    assert found["stretto_session_state_bytes"] == chunk.nbytes
    assert found["stretto_sessions"] == 1
    for name in ("queue_depth", "graph_captures_total", "gpu_memory_bytes", "weight_version", "requests_in_flight"):
        assert found[f"stretto_{name}"] == 0


def test_a_broker_reports_its_critical_path_and_its_starvation(server: ServerThread) -> None:
    before = scraped(server)
    with PolicyClient("127.0.0.1", server.port) as client:
        observation = example(client.metadata["stretto"]["observation"], 1)
        broker = RealtimeBroker(client, control_hz=50.0, execution_horizon=2)
        for _ in range(30):
            broker.infer(observation)
            time.sleep(0.02)
        # A control loop that outruns every chunk starves, and says so with the next request that has a plan to continue.
        while broker.stats.starved == 0:
            broker.infer(observation)
        for _ in range(40):
            broker.infer(observation)
            time.sleep(0.02)
        broker.close()
        after = scraped(server)
    assert after["stretto_critical_path_seconds_count"] > before.get("stretto_critical_path_seconds_count", 0)
    assert after["stretto_action_starvation_total"] >= before["stretto_action_starvation_total"] + 1
    assert after["stretto_chunk_age_seconds_count"] > before["stretto_chunk_age_seconds_count"]
