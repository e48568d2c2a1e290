"""Which ways of sharing memory work between two processes is found out by trying."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from stretto.parallel import probe
from stretto.runtime.fleet import carriage_of


def test_host_memory_crosses_between_two_processes() -> None:
    (tried,) = probe.try_ways("cpu", "cpu", ("memory",))
    assert tried.works
    assert tried.said == ""


def test_a_device_that_is_not_there_is_reported_with_the_error() -> None:
    (tried,) = probe.try_ways("cpu", "cuda:99", ("memory",), timeout_s=30.0)
    assert not tried.works
    assert "consumer: exit 1" in tried.said


def test_the_words_name_the_signal_and_the_last_step() -> None:
    said: Any = probe._words({"producer": "memory opened"}, {"producer": -signal.SIGSEGV}, {"producer": "Fatal Python error"})
    assert said == "producer: SIGSEGV after 'memory opened'\nFatal Python error"


def test_chunks_cross_by_torch_distributed_where_memory_cannot_be_shared(caplog: pytest.LogCaptureFixture) -> None:
    assert carriage_of("peer", [("cpu:0", "cpu:1")]) == "peer"
    assert carriage_of("dist", [("cuda:98", "cuda:99")]) == "dist"
    assert caplog.text == ""
    assert carriage_of("peer", [("cuda:98", "cuda:99")]) == "dist"
    assert "processes cannot share memory of cuda:99 with cuda:98" in caplog.text
