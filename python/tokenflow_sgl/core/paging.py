"""What to publish next: a running stream's new KV goes into the radix tree, which starts its copy to the host, so that
the copy is done before the stream is parked.

Owns who is likely to be parked and the time that publishing may still take; copies nothing. Invariant: on average
publishing takes no more than its share of step time, because it runs on the engine's own thread.

    headroom = free memory - forecast demand

    below 0               HARD    who must go to make it 0 is published page by page
    below publish_below   STEADY  who grew by the publish interval
    else                  REST    nobody will be parked soon: nothing
"""

from __future__ import annotations

import heapq
import math
from enum import Enum

from .config import PolicyConfig
from .cost import CostBelief
from .streams import Stream, Streams
from .types import EngineView, Rid

NEARLY_DONE_TOKENS = 8  # to its limit: it gives all its memory back sooner than a park would pay off
_HARD = 4  # times the share of time and the number per step
_STEP_SHARE = 0.5  # of the next step in which a copy that starts now should be done
_CREDIT_S = 1.0  # of running whose share may be saved up
_REFRESH_STEPS = 32  # between two looks at all streams: sorting them every step would cost more than it publishes
_LIKELY = 64  # streams with most slack among which the next to be parked are sought


class Mode(Enum):
    REST = "rest"
    STEADY = "steady"
    HARD = "hard"


class Publisher:
    """Running streams in the order in which they are likely to be parked, and a credit of time."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.likely: tuple[Rid, ...] = ()  # most slack first
        self.grown: tuple[Rid, ...] = ()  # likewise, but only who is due, or nearly, by its growth
        self.refused: set[Rid] = set()  # not tried again before the next look: they must not hold up the rest
        self.credit_s = config.publish_share * _CREDIT_S
        self.hard_credit_s = _HARD * self.credit_s
        self._steps = 0

    # ---- observe

    def tick(self, streams: Streams, now_s: float, last_step_s: float | None) -> None:
        """A step ended: its share of time is earned, and now and then the order is made anew."""
        if last_step_s is not None:
            earned_s = self.config.publish_share * max(0.0, last_step_s)
            most_s = self.config.publish_share * _CREDIT_S
            self.credit_s = min(most_s, self.credit_s + earned_s)
            self.hard_credit_s = min(_HARD * most_s, self.hard_credit_s + _HARD * earned_s)
        self._steps -= 1
        if self._steps <= 0 and self.config.copies == "ahead":
            self._steps = _REFRESH_STEPS
            self._refresh(streams, now_s)

    def _refresh(self, streams: Streams, now_s: float) -> None:
        streams.settle()
        least = self.config.publish_interval_tokens - _REFRESH_STEPS
        slacks: list[tuple[float, Rid]] = []
        grown: list[tuple[float, Rid]] = []
        for s in streams:
            if not s.running or s.output_tokens == 0 or s.parks >= self.config.max_parks:
                continue
            if s.max_output_tokens - s.output_tokens <= NEARLY_DONE_TOKENS:
                continue
            entry = (-(math.inf if s.buffer is None else s.buffer.slack_s(now_s)), s.rid)
            slacks.append(entry)
            if _written(s) - s.published_tokens >= least:
                grown.append(entry)
        self.likely = tuple(rid for _, rid in heapq.nsmallest(_LIKELY, slacks))
        self.grown = tuple(rid for _, rid in sorted(grown))
        self.refused.clear()

    def published(self, rid: Rid, up_to: int, streams: Streams, cost: CostBelief) -> None:
        """What a planned publish came to; 0 = the engine refused. It took its time either way."""
        if up_to <= 0:
            self.refused.add(rid)
        s = streams.by_rid.get(rid)
        seconds = cost.publish.seconds(up_to if s is None else _written(s))
        # Debt is bounded, or a long rush at the higher share would silence the quiet time after it.
        least_s = -_HARD * self.config.publish_share * _CREDIT_S
        self.credit_s = max(least_s, self.credit_s - seconds)
        self.hard_credit_s = max(least_s, self.hard_credit_s - seconds)

    # ---- plan

    def mode(self, view: EngineView, demand_tokens: float) -> Mode:
        headroom = view.device_free_tokens - demand_tokens
        if headroom >= self.config.publish_below * view.device_total_tokens:
            return Mode.REST
        return Mode.HARD if headroom < 0 else Mode.STEADY

    def due(
        self, streams: Streams, view: EngineView, *, demand_tokens: float, cost: CostBelief
    ) -> tuple[tuple[Rid, int], ...]:
        """(rid, up to token) of those to publish now, in whole pages, as much as the link takes in about a step."""
        if self.config.copies != "ahead" or not view.host_ok:
            return ()
        mode = self.mode(view, demand_tokens)
        if mode is Mode.REST:
            return ()
        hard = mode is Mode.HARD
        order = self.likely if hard else self.grown
        credit_s = self.hard_credit_s if hard else self.credit_s
        most = self.config.publish_per_step * (_HARD if hard else 1)
        if credit_s <= 0.0 or not order or most == 0:
            return ()
        page = view.page_tokens
        room = cost.stores_within(_STEP_SHARE * cost.step_s) - view.storing_tokens
        if view.storing_tokens == 0:
            room = max(room, page)  # a link slower than a page a step is still better than none
        room = min(room, view.host_free_tokens)
        by_rid = streams.by_rid
        # Those that must go for the headroom to be 0 are worth every page; the rest of the order wait for the interval.
        missing = demand_tokens - view.device_free_tokens
        found: list[tuple[Rid, int]] = []
        for rid in order:
            if room < page or credit_s <= 0.0 or len(found) >= most:
                break
            s = by_rid.get(rid)
            if s is None or not s.running or rid in self.refused:
                continue
            written = _written(s)
            least = page if missing > 0 else self.config.publish_interval_tokens
            missing -= written
            start = s.published_tokens - s.published_tokens % page
            end = min(written - written % page, start + room - room % page)
            if written - start < least or end <= s.published_tokens:
                continue
            found.append((rid, end))
            room -= end - start
            credit_s -= cost.publish.seconds(written)
        return tuple(found)


def _written(s: Stream) -> int:
    """The KV of the newest token is written by the step that reads it."""
    return s.prompt_tokens + s.output_tokens - 1
