"""One direction of the link between device and host: its open transfers share the bandwidth equally.

Owns the transfers that are open and the moments at which they end. Owns no clock: it is told the time, which never
goes back. Invariant: between two events each open transfer moves bytes_s / (transfers open), so no byte of the link is
wasted while one is open, and the same calls give the same times to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections import deque


class Link:
    """Processor sharing. bytes_s: bytes a second of this direction; setup_s: a transfer moves nothing before it."""

    __slots__ = ("_at_s", "_bytes_s", "_ended", "_moved", "_open", "_setting_up", "_setup_s", "_started", "_told_s")

    def __init__(self, bytes_s: float, *, setup_s: float = 0.0) -> None:
        if not (math.isfinite(bytes_s) and bytes_s > 0):
            raise ValueError(f"bytes_s of the link: {bytes_s}, valid: a number > 0")
        if not (math.isfinite(setup_s) and setup_s >= 0):
            raise ValueError(f"setup_s of the link: {setup_s}, valid: a number >= 0")
        self._bytes_s, self._setup_s = bytes_s, setup_s
        # Bytes that each transfer open since `_moved` was 0 has moved; who opens at m and has n to move ends at m + n.
        # Whoever is open has moved the same since then, so one number stands for all and an event costs O(log n).
        self._moved = 0.0
        self._at_s = -math.inf  # when `_moved` was true: the last event
        self._told_s = -math.inf
        self._open: list[tuple[float, int, float, object]] = []  # heap of (ends at this `_moved`, number, since, what)
        # (opens at, number, bytes, since, what); one setup for all, so who starts first opens first
        self._setting_up: deque[tuple[float, int, int, float, object]] = deque()
        self._ended: list[tuple[object, float]] = []  # not told of yet
        self._started = 0

    def __len__(self) -> int:
        """Transfers that have not ended by the last call's time."""
        return len(self._open) + len(self._setting_up)

    def start(self, now_s: float, n_bytes: int, what: object) -> None:
        """`n_bytes` for `what` begin at `now_s`."""
        if n_bytes < 0:
            raise ValueError(f"n_bytes of a transfer: {n_bytes}, valid: a whole number >= 0")
        self._tell(now_s)
        self._setting_up.append((now_s + self._setup_s, self._started, n_bytes, now_s, what))
        self._started += 1
        self._pass_events(now_s)

    def next_done_s(self) -> float:
        """When `done` has something to tell if no other transfer starts: never in the past; inf when none is open."""
        if self._ended:
            return self._told_s
        count, moved, at_s = len(self._open), self._moved, self._at_s
        first = self._open[0][0] if self._open else math.inf
        for opens_s, _, n_bytes, _, _ in self._setting_up:
            if count and self._end_s(first, moved, at_s, count) <= opens_s:
                break
            moved = moved + (opens_s - at_s) * self._bytes_s / count if count else 0.0
            at_s, count, first = opens_s, count + 1, min(first, moved + n_bytes)
        return self._end_s(first, moved, at_s, count) if count else math.inf

    def done(self, now_s: float) -> list[tuple[object, float]]:
        """(what, seconds it took) of each transfer that ended by `now_s` and was not told of, in order of end; those
        that end together in order of start."""
        self._tell(now_s)
        self._pass_events(now_s)
        ended, self._ended = self._ended, []
        return ended

    def _tell(self, now_s: float) -> None:
        if not now_s >= self._told_s:
            raise ValueError(f"now_s of the link: {now_s}, valid: {self._told_s} or later, time does not go back")
        self._told_s = now_s

    def _end_s(self, ends_at: float, moved: float, at_s: float, count: int) -> float:
        return at_s + max(ends_at - moved, 0.0) * count / self._bytes_s

    def _pass_events(self, now_s: float) -> None:
        """All ends and openings up to `now_s`, in order. State stands at the last event and not at `now_s`: to move it
        at each look would round each time, and the end would not be where `next_done_s` said."""
        while True:
            end_s = math.inf
            if self._open:
                end_s = self._end_s(self._open[0][0], self._moved, self._at_s, len(self._open))
            opens_s = self._setting_up[0][0] if self._setting_up else math.inf
            if min(end_s, opens_s) > now_s or min(end_s, opens_s) == math.inf:
                return
            if end_s <= opens_s:
                ends_at, _, since_s, what = heapq.heappop(self._open)
                self._moved, self._at_s = ends_at, end_s
                self._ended.append((what, end_s - since_s))
            else:
                self._open_next()

    def _open_next(self) -> None:
        opens_s, number, n_bytes, since_s, what = self._setting_up.popleft()
        if self._open:
            self._moved += (opens_s - self._at_s) * self._bytes_s / len(self._open)
        else:
            self._moved = 0.0  # small numbers round less
        self._at_s = opens_s
        heapq.heappush(self._open, (self._moved + n_bytes, number, since_s, what))
