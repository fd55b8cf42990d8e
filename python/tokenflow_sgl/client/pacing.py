"""When a reader sees what has come: the one pacing of all clients, sync, async and around the openai package.

Owns due times, stalls and what was consumed; knows no network, no thread and no clock: every call is told the time.
Invariant: of one choice nothing is shown before what came earlier, nor sooner than its read rate allows.

    arrivals a_j, display d_j:   d_1 = a_1,  d_j = max(a_j, d_{j-1} + 1/R)     (core/qoe.py)

A piece of k tokens is shown as a whole when its first is due, and what follows it k/R later. A loop that comes for a
piece more than the grace of a stall after it was due had stopped reading: it goes on from there at its rate, and what
it left lying is no stall.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ..core.qoe import STALL_GRACE_S

T = TypeVar("T")
_ROUNDING_S = 1e-9  # else a gap of exactly the limit is a stall or not by the rounding of two sums


@dataclass(slots=True)
class Stalls:
    """Waits of more than 250 ms for a token that was due; lengths in seconds, counted from when it was due."""

    count: int = 0
    total_s: float = 0.0
    longest_s: float = 0.0

    def add(self, length_s: float) -> None:
        self.count += 1
        self.total_s += length_s
        self.longest_s = max(self.longest_s, length_s)


@dataclass(frozen=True, slots=True)
class Shown(Generic[T]):
    """One item that is due. `consumed_tokens` of its choice with it; `stall_s` before it, 0 for none."""

    item: T
    index: int | None
    consumed_tokens: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class _Arrived(Generic[T]):
    item: T
    tokens: int
    total_tokens: int
    arrived_s: float
    number: int  # in order of arrival over all choices


@dataclass(slots=True)
class _Lane(Generic[T]):
    """One choice: what has come of it and is not shown yet, and when its last piece was shown."""

    waiting: deque[_Arrived[T]] = field(default_factory=deque)
    received_tokens: int = 0
    shown_s: float = -math.inf
    shown_tokens: int = 0  # of the last piece

    def free_s(self, rate_tok_s: float) -> float:
        """When the reader is through with the last piece; minus infinity before the first."""
        return self.shown_s + self.shown_tokens / rate_tok_s

    def due_s(self, rate_tok_s: float) -> float:
        head = self.waiting[0]
        return max(head.arrived_s, self.free_s(rate_tok_s)) if head.tokens else head.arrived_s

    def show(self, rate_tok_s: float, asked_s: float, now_s: float) -> tuple[_Arrived[T], float]:
        """The head, and for how long the reader stalled before it."""
        due_s, free_s = self.due_s(rate_tok_s), self.free_s(rate_tok_s)
        head = self.waiting.popleft()
        if not head.tokens:
            return head, 0.0
        waited_s = head.arrived_s - max(free_s, asked_s)
        stalled = math.isfinite(free_s) and waited_s > STALL_GRACE_S + _ROUNDING_S
        # On schedule and not when it was taken: a timer is always a little late, and 1000 of them a second add up.
        self.shown_s = due_s if now_s - due_s <= STALL_GRACE_S else now_s
        self.shown_tokens = head.tokens
        return head, waited_s if stalled else 0.0


class Schedule(Generic[T]):
    """The readers of one stream, one for each choice, all at one rate that may change on the way."""

    def __init__(self, read_rate: float) -> None:
        self._lanes: dict[int | None, _Lane[T]] = {}
        self._arrived = 0
        self.stalls = Stalls()
        self.read_rate = read_rate

    @property
    def read_rate(self) -> float:
        """Tokens per second; infinite: shown as they come."""
        return self._rate

    @read_rate.setter
    def read_rate(self, read_rate: float) -> None:
        if isinstance(read_rate, bool) or not isinstance(read_rate, int | float) or not read_rate > 0:
            raise ValueError(f"read_rate: {read_rate!r} is not valid; valid is tokens per second above 0, or math.inf")
        self._rate = float(read_rate)

    @property
    def received_tokens(self) -> dict[int, int]:
        """By choice."""
        lanes = list(self._lanes.items())  # a thread that reads may add one meanwhile
        return {index: lane.received_tokens for index, lane in lanes if index is not None}

    @property
    def empty(self) -> bool:
        return not any(lane.waiting for lane in self._lanes.values())

    def put(self, index: int | None, item: T, total_tokens: int, now_s: float) -> None:
        """An item came. `total_tokens`: of its choice up to here. index None: of no choice, shown in its order."""
        lane = self._lanes.setdefault(index, _Lane())
        tokens = max(total_tokens - lane.received_tokens, 0)
        lane.received_tokens += tokens
        lane.waiting.append(_Arrived(item, tokens, lane.received_tokens, now_s, self._arrived))
        self._arrived += 1

    def drop(self) -> None:
        """Nothing of what waits will be shown."""
        for lane in self._lanes.values():
            lane.waiting.clear()

    def due_s(self) -> float:
        """When the next item is due; infinite while none has come."""
        return self._next()[0]

    def show(self, asked_s: float, now_s: float) -> Shown[T] | None:
        """The next item if it is due. `asked_s`: since when the loop has been waiting for it."""
        due_s, index = self._next()
        if due_s > now_s:
            return None
        shown, stall_s = self._lanes[index].show(self._rate, asked_s, now_s)
        if stall_s:
            self.stalls.add(stall_s)
        return Shown(shown.item, index, shown.total_tokens, stall_s)

    def _next(self) -> tuple[float, int | None]:
        heads = [(lane.waiting[0], index, lane) for index, lane in self._lanes.items() if lane.waiting]
        first = min((head.number for head, _, _ in heads), default=0)
        due = [
            (lane.due_s(self._rate), head.number, index)
            for head, index, lane in heads
            if index is not None or head.number == first
        ]
        due_s, _, index = min(due, default=(math.inf, 0, None))
        return due_s, index
