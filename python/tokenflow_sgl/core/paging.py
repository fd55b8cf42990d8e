"""What to publish next: a running stream's new KV goes into the radix tree, which starts its copy to the host, so that
the copy is done before the stream is parked.

Owns who is likely to be parked and the time that publishing may still take; copies nothing. Invariant: on average
publishing takes no more than its share of step time, because it runs on the engine's own thread.

    headroom = free memory - forecast demand

    below 0               HARD    who must go to make it 0 is published page by page
    below publish_below   STEADY  who grew by the publish interval; those with most slack by less, the less is left
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
_TOGETHER = 4  # steps whose publishes are made in one: they share a store, and its start costs as much as a publish
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
        self.grown: tuple[Rid, ...] = ()  # of the others, those that grew by the interval, or nearly; likewise
        self.refused: set[Rid] = set()  # not tried again before the next look: they must not hold up the rest
        self.credit_s = config.publish_share * _CREDIT_S
        self.hard_credit_s = _HARD * self.credit_s
        self._steps = 0

    # ---- observe

    def tick(self, streams: Streams, last_step_s: float | None) -> None:
        """A step ended: its share of time is earned, and now and then the order is made anew."""
        if last_step_s is not None:
            earned_s = self.config.publish_share * max(0.0, last_step_s)
            most_s = self.config.publish_share * _CREDIT_S
            self.credit_s = min(most_s, self.credit_s + earned_s)
            self.hard_credit_s = min(_HARD * most_s, self.hard_credit_s + _HARD * earned_s)
        self._steps -= 1
        if self._steps <= 0 and self.config.copies == "ahead":
            self._steps = _REFRESH_STEPS
            self._refresh(streams)

    def _refresh(self, streams: Streams) -> None:
        streams.settle()
        least = self.config.publish_interval_tokens - _REFRESH_STEPS
        slacks: list[tuple[float, Rid]] = []  # by the moment the buffer runs dry, which orders as slack does
        grown: list[tuple[float, Rid]] = []
        for s in streams:
            if not s.running or s.output_tokens == 0 or s.parks >= self.config.max_parks:
                continue
            if s.max_output_tokens - s.output_tokens <= NEARLY_DONE_TOKENS:
                continue
            entry = (-math.inf if s.buffer is None else -s.buffer.runs_dry_at_s(), s.rid)
            slacks.append(entry)
            if s.prompt_tokens + s.output_tokens - s.published_tokens > least:
                grown.append(entry)
        likely = heapq.nsmallest(_LIKELY, slacks)
        self.likely = tuple(rid for _, rid in likely)
        self.grown = tuple(rid for _, rid in sorted(set(grown).difference(likely)))
        self.refused.clear()

    def admitted(self, rid: Rid) -> None:
        """It came in since the last look: last in the order until the next one, and not out of it."""
        if rid not in self.likely and len(self.likely) < _LIKELY:
            self.likely += (rid,)

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

    def is_led(self, view: EngineView, demand_tokens: float) -> bool:
        """Whether the forecast, and not free memory alone, made the mode what it is."""
        return self.mode(view, demand_tokens) is not self.mode(view, 0.0)

    def due(
        self, streams: Streams, view: EngineView, *, demand_tokens: float, cost: CostBelief
    ) -> tuple[tuple[Rid, int], ...]:
        """(rid, up to token) of those to publish now, in whole pages, as much as the link takes in about a step."""
        if self.config.copies != "ahead" or not view.host_ok:
            return ()
        per_step = self.config.publish_per_step
        if per_step == 0 or self.hard_credit_s <= 0.0 or not self.likely:
            return ()
        if self.mode(view, demand_tokens) is Mode.REST:
            return ()
        page = view.page_tokens
        room = self._room_tokens(view, cost)
        # Those that must go for the headroom to be 0 are worth every page, and the larger share of time.
        missing = demand_tokens - view.device_free_tokens
        if missing <= 0 and self._steps % _TOGETHER:
            return ()
        interval = self.config.publish_interval_tokens
        nearly = max(page, self._interval(view, -missing, cost))
        find, refused = streams.by_rid.get, self.refused
        times, credit_s = (_HARD, self.hard_credit_s) if missing > 0 else (_TOGETHER, self.credit_s)
        near = max(4, len(self.likely) // 4)
        found: list[tuple[Rid, int]] = []
        spent_s = 0.0
        for least, rids in (
            (nearly, self.likely[:near]), (interval, self.likely[near:]), (interval, self.grown),
        ):  # fmt: skip
            for rid in rids:
                if room < page or spent_s >= credit_s or len(found) >= per_step * times:
                    return tuple(found)
                s = find(rid)
                if s is None or not s.running:
                    continue
                written = s.prompt_tokens + s.output_tokens - 1
                start = s.published_tokens - s.published_tokens % page  # whole pages are in the tree, no part of one
                due = written - start >= (self._worth(written, page, cost) if missing > 0 else least)
                if missing > 0:
                    missing -= written
                    if missing <= 0:
                        times, credit_s = 1, self.credit_s
                if not due or rid in refused:
                    continue
                end = min(written - written % page, start + room - room % page)
                if end > s.published_tokens:
                    found.append((rid, end))
                    room -= end - start
                    spent_s += cost.publish.seconds(written)
        return tuple(found)

    def _worth(self, written: int, page: int, cost: CostBelief) -> float:
        """New tokens of a stream about to be parked that cost twice as much to compute again as its publish costs."""
        each_s = cost.prefill.per_token_s
        return max(page, 2.0 * cost.publish.seconds(written) / each_s) if each_s > 0.0 else page

    def _interval(self, view: EngineView, headroom: float, cost: CostBelief) -> float:
        """Tokens that the next to be parked grow between publishes. The less is left, the nearer they are to being
        chosen, and a burst that nobody foresaw finds them as they are; but all of them must get their turn."""
        interval = self.config.publish_interval_tokens
        left = headroom / max(1.0, self.config.publish_below * view.device_total_tokens)
        held_tokens = max(0, view.device_total_tokens - view.device_free_tokens)
        each_s = cost.publish.seconds(held_tokens // max(1, view.running))
        a_step = self.config.publish_share * cost.step_s / each_s if each_s > 0.0 else math.inf
        turn = max(4, len(self.likely) // 4) / min(self.config.publish_per_step, a_step) if a_step > 0.0 else math.inf
        return min(interval, max(turn, interval * left))

    def _room_tokens(self, view: EngineView, cost: CostBelief) -> int:
        """What the link stores in about half a step, and the host has room for."""
        seconds = _STEP_SHARE * cost.step_s
        if view.storing_tokens == 0:
            # Where steps are quicker than the start of a store, small stores would be all start and no copy.
            seconds = max(seconds, 2.0 * cost.store.fixed_s)
        room = cost.stores_within(seconds) - view.storing_tokens
        if view.storing_tokens == 0:
            room = max(room, view.page_tokens)  # a link slower than a page a step is still better than none
        return min(room, view.host_free_tokens)


def _written(s: Stream) -> int:
    """The KV of the newest token is written by the step that reads it."""
    return s.prompt_tokens + s.output_tokens - 1
