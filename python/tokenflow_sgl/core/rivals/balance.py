"""Step 2 of the TokenFlow paper's scheduler: who of the working set gets the device until the next schedule.

Pure functions of members; no clock, no costs. Invariant: who is chosen weighs no more than the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..streams import Stream
from ..types import RequestView, Rid


@dataclass(slots=True)
class Member:
    """One of the set that memory is shared among."""

    r: RequestView
    s: Stream
    weight: int  # tokens it will hold at the next schedule
    key: tuple[float, float, float]  # the paper's order, smallest first
    utility: float
    runs: bool


def balance(order: Sequence[Member], *, capacity: int, slots: int) -> set[Rid]:
    """Fill greedily in the order given; then once over adjacent pairs, one in and the next one out: swap them where the
    utility rises and it fits."""
    left, room = capacity, slots
    chosen: set[Rid] = set()
    for m in order:
        if m.weight <= left and room > 0:
            chosen.add(m.r.rid)
            left -= m.weight
            room -= 1
    for a, b in pairwise(order):
        if a.r.rid in chosen and b.r.rid not in chosen and b.utility > a.utility and b.weight - a.weight <= left:
            chosen.remove(a.r.rid)
            chosen.add(b.r.rid)
            left -= b.weight - a.weight
    return chosen
