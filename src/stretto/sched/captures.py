"""Which batches have a graph of their own, where graphs are for the rows they serve; the executor captures by the same rule.

Rows of a world model bring their rings with them, so a batch of other rows is another graph. Of each size all batches are
captured, or none: the number of sets of rows grows too fast for more. A batch without one replays those of its rows in turn.
"""

from __future__ import annotations

from math import comb

KEYED_GRAPHS = 64
"""Graphs of one segment that are kept by what their rows are."""


def captured_rows(members: int, cap: int, bound: int = KEYED_GRAPHS) -> int:
    """Return the largest batch, up to `cap`, that has a graph whichever of these rows it is of."""
    count = members
    for rows in range(2, min(cap, members) + 1):
        count += comb(members, rows)
        if count > bound:
            return rows - 1
    return max(1, min(cap, members))
