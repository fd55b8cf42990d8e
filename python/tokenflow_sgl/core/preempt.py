"""Who parks and who comes in: pure functions of candidates, victims and room.

Owns no state and no clock. Invariant: a stream is parked only for a candidate that outranks it, that does not fit
otherwise, and whose coming in leaves the victim slack to spare for its own return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .types import RequestView, Rid

STEPS_AHEAD = 3  # the step under way, whose memory may be taken already, the next one, and one to spare


@dataclass(frozen=True, slots=True)
class Candidate:
    """Waits for memory. `window_s`: slack a victim must have, beyond its own return, to be parked for it (dt_prefill +
    eps)."""

    rid: Rid
    need_tokens: int
    priority: float
    window_s: float
    margin: float  # priority lead over a victim
    holds_back: bool  # waited so long that those behind must not take the memory it needs


@dataclass(slots=True)
class Victim:
    """Runs, and could be parked. `slack_s` is infinite for work without a reader; `return_s` is what its way back will
    take of it. Hundreds are made in a step, and a frozen one takes four times as long to make."""

    rid: Rid
    frees_tokens: int
    priority: float
    slack_s: float
    return_s: float = 0.0

    @property
    def spare_s(self) -> float:
        return self.slack_s - self.return_s


@dataclass(frozen=True, slots=True)
class Selection:
    """What comes in, in order, and what is parked for it. `room_tokens` and `slots` are what is left."""

    admit: tuple[Rid, ...]
    park: tuple[Rid, ...]
    unserved: int
    room_tokens: int
    slots: int


@dataclass(slots=True)
class _Ledger:
    room_tokens: int
    slots: int
    park: list[Victim] = field(default_factory=list)


def select(candidates: Sequence[Candidate], victims: Sequence[Victim], *, room_tokens: int, slots: int) -> Selection:
    """Serve candidates in the order given; park, lowest priority first, only for those that do not fit.

    Work-conserving: while all fit, nobody is parked. A candidate that cannot be served is passed over, so that a big
    one does not block small ones, unless it `holds_back`.
    """
    ledger = _Ledger(room_tokens, slots)
    left = sorted(victims, key=lambda v: (v.priority, v.rid))
    admit: list[Rid] = []
    unserved = 0
    for c in candidates:
        chosen = _make_room(c, left, ledger)
        if chosen is None:
            unserved += 1
            if c.holds_back:
                ledger.room_tokens -= c.need_tokens
                ledger.slots -= 1
            continue
        for v in chosen:
            left.remove(v)
            ledger.park.append(v)
            ledger.room_tokens += v.frees_tokens
            ledger.slots += 1
        admit.append(c.rid)
        ledger.room_tokens -= c.need_tokens
        ledger.slots -= 1
    park = tuple(v.rid for v in ledger.park)
    return Selection(tuple(admit), park, unserved, ledger.room_tokens, ledger.slots)


def _make_room(c: Candidate, left: Sequence[Victim], ledger: _Ledger) -> list[Victim] | None:
    """The fewest victims, least wanted first, that let `c` in; empty if it fits as it is, None if nothing helps."""
    short_tokens, short_slots = c.need_tokens - ledger.room_tokens, 1 - ledger.slots
    chosen: list[Victim] = []
    for v in left:
        if short_tokens <= 0 and short_slots <= 0:
            break
        if v.priority + c.margin >= c.priority or v.spare_s < c.window_s:
            continue
        if v.frees_tokens <= 0 and short_slots <= 0:
            continue
        chosen.append(v)
        short_tokens -= v.frees_tokens
        short_slots -= 1
    if short_tokens > 0 or short_slots > 0:
        return None
    # The last one taken may have made an earlier, smaller one needless.
    for v in list(chosen[:-1]):
        if short_tokens + v.frees_tokens <= 0 and short_slots + 1 <= 0:
            chosen.remove(v)
            short_tokens += v.frees_tokens
            short_slots += 1
    return chosen


def relieve(victims: Sequence[Victim], *, shortage_tokens: int) -> tuple[Rid, ...]:
    """Park, least wanted first, until the running streams have room to grow. Fewer if nothing more helps."""
    park: list[Rid] = []
    for v in sorted(victims, key=lambda v: (v.priority, v.rid)):
        if shortage_tokens <= 0:
            break
        if v.frees_tokens > 0:
            park.append(v.rid)
            shortage_tokens -= v.frees_tokens
    return tuple(park)


def opens_tokens(active: Sequence[RequestView], page_tokens: int) -> int:
    """Memory that pages opened in the next steps take: with less free, the engine retracts somebody and forgets its KV.

    Taking a page for every stream, each step, would keep a pool of long streams from ever being full.
    """
    tokens = 0
    for r in active:
        left = (1 - r.context_tokens) % page_tokens  # in its last page: the newest token's KV is not written yet
        if left < STEPS_AHEAD:
            tokens += whole_pages(STEPS_AHEAD - left, page_tokens)
    return tokens


def whole_pages(tokens: int, page_tokens: int) -> int:
    """Tokens of the pages that hold so many."""
    return -(-tokens // page_tokens) * page_tokens
