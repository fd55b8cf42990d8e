"""When the requests of a group are sent.

Owns the arrival processes. Knows no request. Invariant: times come in order, the first no earlier than the group's
start, and a process that lasts for a time ends before it is over.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

from tokenflow_sgl.workload.groups import Group


def arrival_times(group: Group, rnd: random.Random) -> list[float]:
    """Seconds after the start of the run, one for each request or conversation of the group."""
    if group.trace is not None:
        return [group.start_s + row.arrival_s * group.trace.scale for row in group.trace.rows]
    if group.arrival == "uniform":
        assert group.over_s is not None and group.count is not None, group
        return sorted(group.start_s + rnd.random() * group.over_s for _ in range(group.count))
    assert group.per_s is not None, group
    if group.count is not None:
        return list(islice(_poisson(group.per_s, group.start_s, rnd), group.count))
    assert group.for_s is not None, group
    end_s = group.start_s + group.for_s
    if group.arrival == "poisson":
        return list(_poisson_until(end_s, per_s=group.per_s, start_s=group.start_s, rnd=rnd))
    return list(_onoff(group, end_s, rnd))


def _poisson(per_s: float, start_s: float, rnd: random.Random) -> Iterator[float]:
    now_s = start_s
    while True:
        now_s += rnd.expovariate(per_s)
        yield now_s


def _poisson_until(end_s: float, *, per_s: float, start_s: float, rnd: random.Random) -> Iterator[float]:
    for at_s in _poisson(per_s, start_s, rnd):
        if at_s >= end_s:
            return
        yield at_s


def _onoff(group: Group, end_s: float, rnd: random.Random) -> Iterator[float]:
    assert group.per_s is not None and group.on_mean_s is not None and group.off_mean_s is not None, group
    now_s = group.start_s
    while now_s < end_s:
        off_s = min(now_s + rnd.expovariate(1 / group.on_mean_s), end_s)
        yield from _poisson_until(off_s, per_s=group.per_s, start_s=now_s, rnd=rnd)
        now_s = off_s + rnd.expovariate(1 / group.off_mean_s)
