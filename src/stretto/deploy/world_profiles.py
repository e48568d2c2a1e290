"""Profiles of a world model on several devices of a host, timed at the same time, as they will be at work.

A chip alone in its host is cooler than one whose neighbour works too, and a cool chip keeps a higher clock under its power
limit. Everything else, building and capturing, is done for one device at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from stretto.core.plan import Mode
from stretto.deploy.profile import ProfileOptions, profile_world
from stretto.models.wan_config import WanConfig
from stretto.sched.profile import Profile


class AtOnce:
    """Threads that take turns, but for the time that each spends within `timing`: they enter and leave that together."""

    def __init__(self, threads: int) -> None:
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(threads)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Have the turn; an error releases whoever waits for this thread, with `threading.BrokenBarrierError`."""
        with self._turn:
            try:
                yield
            except BaseException:
                self._barrier.abort()
                raise

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Leave the turn to others until all are here, and go on together."""
        self._turn.release()
        try:
            self._barrier.wait()
            yield
            self._barrier.wait()
        finally:
            self._turn.acquire()


def profile_worlds(config: WanConfig, devices: Sequence[torch.device], mode: Mode, options: ProfileOptions) -> list[Profile]:
    """Measure a world model on every one of these devices; under load (`sustained_s`) on all at once.

    Raises:
        ConfigError: as `profile_world`.
    """
    if len(devices) == 1:
        return [profile_world(config, devices[0], mode, options)]
    at_once = AtOnce(len(devices))

    def profile(device: torch.device) -> Profile:
        with at_once.turn(), torch.inference_mode():
            return profile_world(config, device, mode, options, timing=at_once.timing if options.sustained_s else None)

    with ThreadPoolExecutor(len(devices)) as pool:
        running = [pool.submit(profile, device) for device in devices]
    errors = [error for done in running if (error := done.exception()) is not None]
    # Who waited for a thread that failed has nothing to say of its own.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [done.result() for done in running]
