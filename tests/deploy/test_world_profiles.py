"""Profiles of several devices, timed at the same time."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from stretto.deploy.profile import ProfileOptions
from stretto.deploy.world_bench import WorldBench, WorldCase
from stretto.deploy.world_profiles import AtOnce, profile_worlds
from stretto.deploy.world_rig import hand_over
from stretto.deploy.worlds import TINY, config_of
from stretto.runtime.engine import Engine

CPU = torch.device("cpu")
CONFIG = config_of(TINY, frames_per_chunk=1, window_frames=2, decoder="none", dtype="float32")


def test_threads_build_in_turn_and_are_timed_together() -> None:
    at_once, lock = AtOnce(3), threading.Lock()
    building, timing, most = [0], [0], []

    def work() -> None:
        with at_once.turn():
            with lock:
                building[0] += 1
                assert building[0] == 1
                assert timing[0] == 0
            with lock:
                building[0] -= 1
            with at_once.timing():
                with lock:
                    timing[0] += 1
                everybody.wait(timeout=10)
                most.append(timing[0])
                left.wait(timeout=10)
                with lock:
                    timing[0] -= 1

    everybody, left = threading.Barrier(3), threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for _ in range(3)]:
            done.result(timeout=20)
    assert most == [3, 3, 3]


def test_every_device_has_a_profile_of_its_own() -> None:
    options = ProfileOptions(TINY, batches=(1, 2), sustained_s=0.05)
    first, second = profile_worlds(CONFIG, (CPU, CPU), "eager", options)
    assert first.stages.keys() == second.stages.keys()
    assert first.work_s > 0
    assert second.work_s > 0


def test_where_one_device_fails_the_others_do_not_wait_and_its_error_is_told() -> None:
    options = ProfileOptions(TINY, batches=(1,), sustained_s=0.05)
    with pytest.raises(Exception, match=r"(?i)cuda|device"):
        profile_worlds(CONFIG, (CPU, torch.device("cuda:63")), "eager", options)


def test_hand_overs_are_timed_for_one_chunk_and_for_each_further_one_of_a_batch() -> None:
    bench = WorldBench(CONFIG, WorldCase(("cpu:0", "cpu:1"), "eager", profile_n=3, batches=(1, 2)))
    alone, several = hand_over(bench, turns=3), hand_over(bench, rows=2, turns=3)
    assert not any(type(o) is Engine for o in gc.get_objects())  # with it would stay the memory of its streams
    assert alone.row_s == 0.0
    assert 0.0 <= several.row_s < 1.0
    assert 0.0 <= alone.host_s < 1.0
