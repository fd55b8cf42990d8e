"""Andes' greedy knapsack over requests: who is served, and who must go for one that is to come in.

Pure functions of items; no clock, no costs. Invariant: what is packed weighs no more than the capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..types import RequestView, Rid
from .room import Room

RUNNING_BONUS = 1.1  # the authors' solver: 10% in favour of who runs already


@dataclass(slots=True)
class Item:
    """One that may be served or not. `gain` is Q_serve - Q_wait; `way_s` is what coming in takes, 0 while it runs."""

    r: RequestView
    weight: int
    way_s: float
    runs: bool
    gain: float = 0.0
    density: float = 0.0  # kept beside the gain: it is sorted by for each batch size

    def worth(self, gain: float) -> Item:
        self.gain = gain
        self.density = gain * (RUNNING_BONUS if self.runs else 1.0) / self.weight
        return self


def densest_first(item: Item) -> tuple[float, Rid]:
    return (-item.density, item.r.rid)


def sparsest_first(item: Item) -> tuple[float, Rid]:
    return (item.density, item.r.rid)


def pack(items: Sequence[Item], *, capacity: int, size: int) -> tuple[float, set[Rid]]:
    """At most `size` of them, densest first, as far as they fit: their summed gain, and who they are."""
    value, left = 0.0, capacity
    chosen: set[Rid] = set()
    for i in sorted(items, key=densest_first):
        if i.weight <= left and len(chosen) < size:
            left -= i.weight
            value += i.gain
            chosen.add(i.r.rid)
    return value, chosen


def most_that_fit(items: Sequence[Item], *, capacity: int) -> int:
    """How many can be packed: the shortest first."""
    count, left = 0, capacity
    for weight in sorted(i.weight for i in items):
        left -= weight
        if left < 0:
            break
        count += 1
    return count


def victims_for(item: Item, leave: Sequence[Item], room: Room) -> list[Item]:
    """The fewest in the order given that let it in; none if not even all of them do."""
    short_tokens, short_slots = room.need_tokens(item.r) - room.free_tokens, 1 - room.slots
    victims: list[Item] = []
    for v in leave:
        if short_tokens <= 0 and short_slots <= 0:
            break
        victims.append(v)
        short_tokens -= v.r.frees_tokens
        short_slots -= 1
    return victims if short_tokens <= 0 and short_slots <= 0 else []
