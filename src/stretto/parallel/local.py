"""A link within one process: the consumer gets the producer's own tensors."""

from __future__ import annotations

from typing import Any

from stretto.parallel.link import Receive, Values
from stretto.parallel.order import Mark


class LocalLink:
    """Hands over at once, on the caller's thread. Devices of one process are ordered by torch's own copies."""

    def __init__(self, peer: str, receive: Receive) -> None:
        self.peer = peer
        self._receive = receive

    def send(self, header: Any, values: Values) -> None:
        self._receive(header, values, Mark())

    def close(self) -> None:
        """Nothing to free."""
