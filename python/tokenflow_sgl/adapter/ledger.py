"""What happened since the last step, as events for the policy and as a record for people.

Owns the gathering; decides nothing. Invariant: every event is derived from state that is the same on all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..core.types import Applied, Arrived, Emitted, Event, Finished, Halted, Reported, Rid, Tick, Visible

_TRANSITIONS_KEPT = 4096
COUNTERS = (
    *("parks", "returns", "late_returns", "reprefilled_tokens", "published_tokens", "stored_tokens", "loaded_tokens"),
    *("publishes", "publishes_led_by_forecast"),
    *("loads", "loads_given_up", "loads_failed", "stores_failed", "copies_overdue", "copy_waits"),
    *("parked_pages", "parked_pages_on_host", "aborts", "acks", "halts"),
)


class Ledger:
    """Events of the step under way, counters, and the last transitions with running numbers."""

    def __init__(self, *, knows_places: bool = True) -> None:
        """knows_places: all choices of a request arrive here, in order. Not among several data-parallel ranks."""
        self._knows_places = knows_places
        self.now_s = 0.0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.transitions: deque[dict[str, Any]] = deque(maxlen=_TRANSITIONS_KEPT)
        self.seq = 0
        self.slack_at_park_s: deque[float] = deque(maxlen=_TRANSITIONS_KEPT)  # taken by the metrics
        self.parked: list[Rid] = []
        self.published: list[tuple[Rid, int]] = []
        self.loaded: list[tuple[Rid, int]] = []
        self.unloaded: list[Rid] = []
        self._applied: Applied | None = None
        self._tick: Tick | None = None
        self._events: list[Event] = []
        self._before_applied = 0  # of these, how many were there when the step's batch was formed
        self._live: set[Rid] = set()
        self._withheld: dict[Rid, Any] = {}
        self._children: dict[Rid, list[Rid | None]] = {}  # by the id their client knows: choices in order, None = ended
        self._members: list[Any] = []  # the batch of the last emission, and its ids
        self._rids: tuple[Rid, ...] = ()

    # ---- what the scheduler tells

    def tick(self, tick: Tick) -> None:
        self._tick = tick
        self.now_s = tick.now_s

    def arrived(self, event: Arrived, req: Any) -> None:
        self._events.append(event)
        self._live.add(event.rid)
        if req.tokenflow.parent is not None:
            self._children.setdefault(req.tokenflow.parent, []).append(event.rid)
        if event.withheld:
            self._withheld[event.rid] = req

    def emitted(self, reqs: Sequence[Any]) -> None:
        """One step's results were processed: `reqs` are the batch's members, some of them finished or parked."""
        if not reqs:
            return
        # Lists compare members by identity first: cheap, and a steady batch keeps its tuple of ids.
        if reqs != self._members:
            self._members = list(reqs)
            self._rids = tuple(r.rid for r in reqs)
        self._events.append(Emitted(self._rids, tuple([len(r.output_ids) for r in reqs])))
        if self._withheld:
            self._reveal()
        for req in reqs:
            if req.finished_reason is not None and not req.tokenflow.gone:
                self.finished(req)

    def _reveal(self) -> None:
        for rid, req in list(self._withheld.items()):
            if req._is_reasoning_over:
                self._events.append(Visible(rid, len(req.output_ids)))
                del self._withheld[rid]

    def reported(self, rid: Rid, index: int, consumed_tokens: int) -> None:
        """Of choice `index` of the request that its client knows as `rid`; nobody's where it has ended, or where
        another data-parallel rank serves it: all of them hear it."""
        children = self._children.get(rid)
        if children is None:
            child = rid if index == 0 else None
        elif not self._knows_places:
            child = None  # index i of these is another choice than the client means: better modelled than wrong
        else:
            child = children[index] if index < len(children) else None
        if child in self._live:
            self.counters["acks"] += 1
            self._events.append(Reported(child, consumed_tokens))

    def halted(self, rid: Rid, halted: bool) -> None:
        """All choices of a request come over one connection."""
        children = [child for child in self._children.get(rid, [rid]) if child in self._live]
        self.counters["halts"] += halted and bool(children)
        self._events += [Halted(child, halted) for child in children]

    def finished(self, req: Any) -> None:
        state = req.tokenflow
        if state.gone or not state.arrived:
            return
        state.gone = True
        self._live.discard(req.rid)
        self._forget_child(state.parent, req.rid)
        self._withheld.pop(req.rid, None)
        self._events.append(Finished(req.rid))
        self.transition(req.rid, "finish", len(req.output_ids))

    def _forget_child(self, parent: Rid | None, rid: Rid) -> None:
        children = self._children.get(parent) if parent is not None else None
        if children is not None and rid in children:
            children[children.index(rid)] = None
            if not any(children):
                del self._children[parent]

    def transition(self, rid: Rid, what: str, tokens: int) -> None:
        self.seq += 1
        self.transitions.append({"seq": self.seq, "at_s": self.now_s, "id": rid, "what": what, "tokens": tokens})

    def applied(
        self, admitted: Sequence[tuple[Rid, int, int]], refused: Sequence[Rid], prefill_tokens: int, decoding: int,
        *, timed: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        """The step's batch is formed: what the plan came to."""
        self._applied = Applied(
            admitted=tuple(admitted),
            parked=tuple(self.parked),
            published=tuple(self.published),
            refused=tuple(refused),
            loaded=tuple(self.loaded),
            unloaded=tuple(self.unloaded),
            prefill_tokens=prefill_tokens,
            decoding=decoding,
            timed=timed,
        )
        self._before_applied = len(self._events)
        self.parked.clear()
        self.published.clear()
        self.loaded.clear()
        self.unloaded.clear()

    # ---- what the policy hears

    @property
    def has_tick(self) -> bool:
        return self._tick is not None

    @property
    def has_news(self) -> bool:
        """Whether anything happened since the last drain that a policy must hear of."""
        news = self._events or self.parked or self._tick is not None
        return bool(news) or self._applied not in (None, Applied())

    def drain(self) -> list[Event]:
        """Events since the last drain: what the last plan came to, the clock, then what happened.

        While a batch is formed, upstream queues requests whose grammar is ready, and may admit them at once: what came
        before the plan's outcome is told before it, or the policy would hear of an admission before the arrival.
        """
        if self.parked:
            # By the engine between two steps (a pause that retracts): the next plan must not take them for running.
            done = self._applied or Applied()
            self._applied = replace(done, parked=(*done.parked, *self.parked))
            self.parked.clear()
        events, self._events = self._events, []
        head, events = events[: self._before_applied], events[self._before_applied :]
        self._before_applied = 0
        if self._applied is not None:
            head.append(self._applied)
        if self._tick is not None:
            head.append(self._tick)
        self._applied = self._tick = None
        return head + events
