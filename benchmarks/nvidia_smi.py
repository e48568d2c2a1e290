"""Clock, power and temperature of one GPU beside a measurement, as `nvidia-smi` says them; nothing where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from statistics import median
from typing import Any

EVERY_MS = 100


class Chip:
    """Watches a GPU from the side, in a process of its own."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        if (path := shutil.which("nvidia-smi")) is None:
            return
        which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-i", which, "-lms", str(EVERY_MS)]
        self._process = subprocess.Popen([path, *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        lines = self._process.stdout if self._process is not None else None
        for line in lines or ():
            try:
                clock, power = (float(field) for field in line.split(","))
            except ValueError:  # "[N/A]" where a chip does not tell
                continue
            self._seen.append((time.monotonic(), clock, power))

    def between(self, begin: float, end: float) -> dict[str, Any]:
        """Return median and range of what was seen between two moments of `time.monotonic`."""
        kept = [s for s in self._seen if begin <= s[0] <= end]
        if not kept:
            return {}
        clocks, powers = [s[1] for s in kept], [s[2] for s in kept]
        return {"sm_mhz": [min(clocks), median(clocks), max(clocks)], "power_w": [min(powers), median(powers), max(powers)]}

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
