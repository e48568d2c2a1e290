"""What one batch costs: seconds as a function of the number of rows, from a line or from measured points."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stretto.core.errors import ConfigError

_PREPARED = 64  # batch sizes looked up in a table; larger ones are worked out


@dataclass(frozen=True)
class BatchCost:
    """Piecewise linear in the batch size, through (rows, seconds) points; beyond the last, along the last piece.

    Raises:
        ConfigError: on construction, if points are missing, out of order, negative or not finite.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("cost", got="no points", expected="seconds for one batch size or more")
        rows = [n for n, _ in self.points]
        if rows[0] < 1 or any(b <= a for a, b in itertools.pairwise(rows)):
            raise ConfigError("cost", got=f"batch sizes {rows}", expected="rising batch sizes of 1 or more")
        for n, seconds in self.points:
            if not math.isfinite(seconds) or seconds < 0:
                raise ConfigError(f"cost[{n}]", got=seconds, expected="a finite number of seconds, 0 or more")

    @staticmethod
    def line(fixed_s: float, per_row_s: float) -> BatchCost:
        """Return a + b n."""
        for name, value in (("fixed", fixed_s), ("per_row", per_row_s)):
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"cost.{name}", got=value, expected="a finite number, 0 or more")
        return BatchCost(((1, fixed_s + per_row_s), (2, fixed_s + 2 * per_row_s)))

    def __call__(self, rows: int) -> float:
        """Return the seconds of one batch of this many rows."""
        return self._table[rows] if rows <= _PREPARED else self._at(rows)

    @cached_property
    def _table(self) -> tuple[float, ...]:
        return (0.0, *(self._at(n) for n in range(1, _PREPARED + 1)))

    def _at(self, rows: int) -> float:
        points = self.points
        if len(points) == 1:  # nothing is known of larger batches: no gain is assumed
            n, seconds = points[0]
            return seconds * max(1.0, rows / n)
        if rows <= points[0][0]:
            return points[0][1]
        upper = next((i for i, (n, _) in enumerate(points) if n >= rows), len(points) - 1)
        (n0, t0), (n1, t1) = points[max(upper, 1) - 1], points[max(upper, 1)]
        return t0 + (t1 - t0) * (rows - n0) / (n1 - n0)

    def best_row_s(self, most: int) -> float:
        """Return the least seconds per row over batches of up to `most` rows."""
        return min(self(n) / n for n in range(1, most + 1))

    def to_json(self) -> dict[str, Any]:
        return {"table_ms": {str(n): round(t * 1e3, 9) for n, t in self.points}}

    @staticmethod
    def from_json(raw: Mapping[str, Any], where: str) -> BatchCost:
        """Read `{"table_ms": {"1": ms, ...}}` or `{"fixed_ms": a, "per_row_ms": b}`.

        Raises:
            ConfigError: naming the entry that cannot be used.
        """
        try:
            if set(raw) == {"table_ms"}:
                table = sorted((int(n), round(float(ms) / 1e3, 12)) for n, ms in raw["table_ms"].items())
                return BatchCost(tuple(table))
            if set(raw) == {"fixed_ms", "per_row_ms"}:
                return BatchCost.line(float(raw["fixed_ms"]) / 1e3, float(raw["per_row_ms"]) / 1e3)
        except (TypeError, ValueError, AttributeError) as e:
            raise ConfigError(where, got=f"{raw!r} ({e})", expected="batch sizes and milliseconds") from e
        except ConfigError as e:
            raise ConfigError(f"{where}.{e.field}", got=e.got, expected=e.expected) from e
        raise ConfigError(where, got=sorted(raw), expected="`table_ms`, or `fixed_ms` and `per_row_ms`")
