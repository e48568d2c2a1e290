"""What other threads want of a device's threads, and how these learn that there is something to look at."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class Mailbox:
    """Actions in order, a bell, and the ways to stop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._mail: deque[Callable[[], None]] = deque()
        self.news = 0
        """Grows with everything after which a thread that found nothing to do should look again."""
        self.holds = 0
        """How many ask that nothing is started now."""
        self.stopping = False
        self._shut = False

    def __len__(self) -> int:
        return len(self._mail)

    def put(self, action: Callable[[], None]) -> bool:
        """Leave an action without ringing; False if nobody will ever do it."""
        with self._lock:
            if self._shut:
                return False
            self._mail.append(action)
            return True

    def hold(self, change: int) -> None:
        with self._wake:
            self.holds += change

    def ring(self) -> None:
        with self._wake:
            self.news += 1
            self._wake.notify_all()

    def sleep(self, seen: int) -> None:
        """Wait for news after those that the caller had seen before it looked."""
        with self._wake:
            while not self.stopping and self.news == seen:
                self._wake.wait()

    def drain(self) -> None:
        """Do what was asked for, in order; one thread at a time."""
        while self._mail:
            self._mail.popleft()()

    def stop(self, *, shut: bool = False) -> None:
        """Wake everybody to stop; with `shut`, take no further mail."""
        with self._wake:
            self.stopping = True
            self._shut |= shut
            self._wake.notify_all()
