"""TokenFlow's policy: spends the lead that streams have over their readers.

Wires the parts: the book of streams, priorities, costs, selection, publishing. Owns beliefs; the executor owns facts.
Invariant: `observe` alone changes it; `plan` is a pure function of what was observed and the view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .config import PolicyConfig
from .cost import CostBelief
from .paging import Publisher
from .preempt import STEPS_AHEAD, Candidate, Selection, Victim, opens_tokens, relieve, select, whole_pages
from .priority import PRIORITIES
from .streams import Stream, Streams
from .types import (
    Applied,
    Arrived,
    Emitted,
    EngineView,
    Event,
    Finished,
    Phase,
    Plan,
    Reported,
    RequestView,
    Rid,
    Tick,
    Visible,
)

_NEARLY_DONE_TOKENS = 8
_REFUSAL_PAUSE_S = 0.25  # an admission the engine could not keep is not tried again at once: it would block the rest


class TokenFlowPolicy:
    """Buffer-aware preemptive scheduling (design: the model)."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.now_s = 0.0
        self.streams = Streams(config.default_read_rate_tok_s)
        self.cost = CostBelief.prior(config)
        self.publisher = Publisher(config)
        self.decodes_since_prefill = 0
        self._priority = PRIORITIES[config.priority]
        self._chunk_tokens = 0  # of the last prefill step: the next will be about as large
        self._last_batch = (0, 0)  # prefill tokens and decoding streams of the batch whose time the next tick carries

    # ---- observe

    def observe(self, event: Event) -> None:
        if isinstance(event, Emitted):
            self.streams.emit(event, self.now_s)
        elif isinstance(event, Tick):
            self._tick(event)
        elif isinstance(event, Applied):
            self._applied(event)
        elif isinstance(event, Arrived):
            self.streams.arrive(event, self.now_s)
        elif isinstance(event, Finished):
            self.streams.finish(event.rid)
            self.publisher.discard(event.rid)
        elif isinstance(event, Visible):
            self.streams.reveal(event.rid, event.output_tokens)
        elif isinstance(event, Reported):
            stream = self.streams.by_rid.get(event.rid)
            if stream is not None and stream.buffer is not None:
                self.streams.settle()
                stream.buffer.report(self.now_s, event.consumed_tokens)

    def _tick(self, tick: Tick) -> None:
        self.now_s = tick.now_s
        self.streams.stamp(tick.now_s)
        if tick.last_step_s is not None:
            prefill_tokens, decoding = self._last_batch
            self.cost.learn_step(tick.last_step_s, prefill_tokens=prefill_tokens, decoding=decoding)
        for tokens, seconds in tick.loads_s:
            self.cost.learn_copy(tokens, seconds)

    def _applied(self, event: Applied) -> None:
        for rid, up_to in event.published:
            self.publisher.published(rid)
            self.streams.publish(rid, up_to)
        for rid in event.parked:
            self.streams.park(rid, self.now_s)
            self.publisher.discard(rid)
        for rid, _, _ in event.admitted:
            self.streams.admit(rid)
            self.publisher.add(rid)
        for rid in event.refused:
            stream = self.streams.by_rid.get(rid)
            if stream is not None:
                stream.refused_until_s = self.now_s + _REFUSAL_PAUSE_S
        self._last_batch = (event.prefill_tokens, event.decoding)
        self._chunk_tokens = event.prefill_tokens or self._chunk_tokens
        self.decodes_since_prefill = 0 if event.prefill_tokens else self.decodes_since_prefill + 1

    # ---- plan

    def plan(self, view: EngineView) -> Plan:
        publish = self.publisher.due(self.streams, view)
        # What running streams can take at most in the next steps: with that much free, nobody need be looked at.
        ample = view.device_free_tokens >= whole_pages(STEPS_AHEAD, view.page_tokens) * view.running
        if view.waiting == 0 and view.promised_tokens == 0 and ample:
            return Plan(publish=publish)
        return self._decide(view, publish)

    def _decide(self, view: EngineView, publish: tuple[tuple[Rid, int], ...]) -> Plan:
        running: list[RequestView] = []
        prefilling: list[RequestView] = []
        waiting: list[RequestView] = []
        by_phase = {Phase.RUNNING: running, Phase.PREFILL: prefilling}
        for r in view.requests():
            by_phase.get(r.phase, waiting).append(r)
        shortage = opens_tokens([*running, *prefilling], view.page_tokens) + view.promised_tokens
        shortage -= view.device_free_tokens
        growth = self.config.growth_tokens
        active = len(running) + len(prefilling)
        room = view.device_free_tokens - growth * active - sum(r.takes_tokens for r in prefilling)
        must, early = self._candidates(waiting, view)
        slots = view.max_running - active
        if sum(c.need_tokens for c in must) <= room and len(must) <= slots:
            victims = []  # everybody fits: nobody needs to be weighed
        else:
            victims = [self._victim(r) for r in running if self._may_park(r)]
        chosen = select(self._owed_first(must), victims, room_tokens=room, slots=slots)
        # Memory may be kept for work that is owed it, but it never comes in before an unstarted reader.
        served = set(chosen.admit)
        admit = [c.rid for c in must if c.rid in served]
        admit += self._early_returns(early, chosen, len(running))
        park = chosen.park
        if shortage > 0 and not admit and active > 1:
            park = self._relief(running, shortage, promised=view.promised_tokens > 0)
        if not admit and not active and must:
            # An empty engine has nothing to wait for: whoever is first comes in, however little room is left to grow.
            return Plan(admit=(must[0].rid,), reserve_tokens=0)
        gone = set(park)
        return Plan(
            park=park,
            publish=tuple(p for p in publish if p[0] not in gone),
            admit=tuple(admit),
            reserve_tokens=growth * (active - len(park) + len(admit)),
            # Decoding takes memory: not while a prompt under way still needs it.
            prefill_tokens=0 if (must or prefilling) and shortage <= 0 and self._must_decode_first(running) else None,
            why={"must": len(must), "unserved": chosen.unserved, "room_tokens": chosen.room_tokens},
        )

    def _candidates(self, waiting: Sequence[RequestView], view: EngineView) -> tuple[list[Candidate], list[Candidate]]:
        """Who must come in, in order: due readers, unstarted readers, work without a reader; and who may return early.

        Inside a class the client's own priority decides first, then those that waited so long that they hold back the
        rest, then rank, then cost. A started stream is due when its slack, less the time its return takes after the
        returns before it, nears eps.
        """
        due: list[Candidate] = []
        new: list[Candidate] = []
        other: list[Candidate] = []
        early: list[Candidate] = []
        known = [(self._slack_s(s), r, s) for r in waiting if (s := self.streams.by_rid.get(r.rid)) is not None]
        known.sort(key=lambda found: (found[0], found[1].rid))
        ahead_s = 0.0
        for slack_s, r, s in known:
            if s.refused_until_s > self.now_s:
                continue
            uncached = max(1, r.context_tokens - r.cached_tokens - r.host_hit_tokens)
            c = self._candidate(r, s, slack_s, self.cost.prefill_s(uncached) + self.config.overhead_s, view)
            if s.unstarted:
                (new if s.buffer is not None else other).append(c)
                continue
            return_s = self.cost.return_s(tail_tokens=uncached, host_tokens=r.host_hit_tokens)
            if slack_s - ahead_s - return_s > self.config.eps_s + self.config.overhead_s:
                early.append(c)
                continue
            ahead_s += return_s
            (due if s.buffer is not None else other).append(c)
        own = {r.rid: -r.priority for r in waiting}
        for group in (new, other):
            group.sort(key=lambda c: (own[c.rid], not c.holds_back, -c.priority, c.need_tokens, c.rid))
        # No reader needs these yet. Who has most left to make goes first: else the last to return run on alone, in
        # steps that cost nearly as much as full ones.
        left = {r.rid: r.output_tokens - r.max_output_tokens for r in waiting}
        early.sort(key=lambda c: (own[c.rid], not c.holds_back, left[c.rid], c.rid))
        return due + new + other, early

    def _owed_first(self, must: Sequence[Candidate]) -> list[Candidate]:
        """The order in which memory is given out: that of `must`, but one piece of work without a reader that has
        waited for a whole turn is given its own before unstarted readers. Else readers that keep coming, each taking
        what the last one freed, would starve it."""
        for i, c in enumerate(must):
            s = self.streams.by_rid[c.rid]
            if s.buffer is None and c.holds_back and s.wait_s(self.now_s) >= self.config.batch_turn_s:
                first_new = sum(1 for d in must[:i] if not self.streams.by_rid[d.rid].unstarted)
                return [*must[:first_new], c, *must[first_new:i], *must[i + 1 :]]
        return list(must)

    def _candidate(self, r: RequestView, s: Stream, slack_s: float, prefill_s: float, view: EngineView) -> Candidate:
        # One page for rounding, and one token more: the engine admits only what leaves something free.
        need_tokens = r.takes_tokens + self.config.growth_tokens + view.page_tokens + 1
        wait_s = s.wait_s(self.now_s)
        return Candidate(
            rid=r.rid,
            need_tokens=need_tokens,
            priority=self._rank(s, slack_s, wait_s, prefill_s),
            window_s=max(prefill_s + self.config.eps_s, self.config.min_slack_s),
            # Without a lead, work that has no reader would swap places with its like for ever.
            margin=self.config.switch_margin if s.buffer is None else 0.0,
            # Memory kept for one that can never fit would be lost to all.
            # It comes in alone at the latest, and then it needs no room for the growth of others.
            holds_back=wait_s >= self.config.hold_back_s and r.takes_tokens <= view.device_total_tokens,
        )

    def _early_returns(self, early: Sequence[Candidate], chosen: Selection, running: int) -> Iterator[Rid]:
        """Returns ahead of need, only where what comes back can stay: else it would be parked again at once."""
        if chosen.unserved or chosen.park:
            return
        room, slots, running = chosen.room_tokens, chosen.slots, running + len(chosen.admit)
        for c in early:
            running += 1
            if slots <= 0 or room - c.need_tokens < self.config.return_steps * running:
                return
            room -= c.need_tokens
            slots -= 1
            yield c.rid

    def _relief(self, running: Sequence[RequestView], shortage: int, *, promised: bool) -> tuple[Rid, ...]:
        """Nothing waits, or nothing fits, and the streams in memory are about to outgrow it.

        If no stream has slack to spare, the engine would retract somebody in the next steps and forget its KV: then
        the one with the most slack is parked whatever it has; those that may not be parked now only after the others.
        `promised`: a prompt under way will take the memory all the same, and the engine dies where it cannot; then as
        many go as it needs.
        """
        able = [self._victim(r) for r in running if self._may_park(r)]
        anyone = [self._victim(r) for r in running if self._can_park(r)]
        park = relieve([v for v in able if v.slack_s > self.config.min_slack_s], shortage_tokens=shortage)
        frees = {v.rid: v.frees_tokens for v in anyone}
        for victims in (able, anyone):
            left = shortage - sum(frees[rid] for rid in park)
            if left <= 0 or (park and not promised):
                break
            rest = [v for v in victims if v.rid not in park]
            park += relieve(rest, shortage_tokens=left if promised else 1)
        return park

    def _can_park(self, r: RequestView) -> bool:
        known = r.rid in self.streams.by_rid
        return known and r.preemptible and r.output_tokens > 0 and r.copying_tokens == 0

    def _may_park(self, r: RequestView) -> bool:
        if not self._can_park(r):
            return False
        s = self.streams.by_rid[r.rid]
        ran, left = r.output_tokens - s.output_at_admission, r.max_output_tokens - r.output_tokens
        # One about to reach its limit gives all its memory back sooner than a park and a return would pay off.
        return s.parks < self.config.max_parks and ran >= self.config.min_run_tokens and left > _NEARLY_DONE_TOKENS

    def _victim(self, r: RequestView) -> Victim:
        s = self.streams.by_rid[r.rid]
        if s.buffer is None:
            return Victim(r.rid, r.frees_tokens, self._rank(s, self.config.batch_turn_s, 0.0, 0.0), math.inf)
        slack_s = s.buffer.slack_s(self.now_s)
        return Victim(r.rid, r.frees_tokens, self._rank(s, slack_s, 0.0, 0.0), slack_s)

    def _slack_s(self, s: Stream) -> float:
        """Slack of a reader; of work without one a virtual slack that falls while it waits, so that none starves."""
        if s.buffer is not None:
            return s.buffer.slack_s(self.now_s)
        return max(0.0, self.config.batch_turn_s - s.wait_s(self.now_s))

    def _rank(self, s: Stream, slack_s: float, wait_s: float, prefill_s: float) -> float:
        return self._priority(
            slack_s=slack_s,
            wait_s=wait_s,
            unstarted=s.unstarted and s.buffer is not None,
            prefill_s=prefill_s,
            config=self.config,
        )

    def _must_decode_first(self, running: Sequence[RequestView]) -> bool:
        """A reader is about to run dry, and the engine prefills without decoding. Bounded, so that prefill goes on."""
        if self.decodes_since_prefill >= self.config.defer_steps:
            return False
        chunk_s = self.cost.prefill_s(self._chunk_tokens)
        for r in running:
            s = self.streams.by_rid.get(r.rid)
            if s is None or s.buffer is None or s.buffer.generated_tokens == 0:
                continue
            if s.buffer.slack_s(self.now_s) < chunk_s + self.config.eps_s / 2:
                return True
        return False

    # ---- what others may see

    def slack_of(self, rid: Rid, now_s: float) -> float | None:
        """Seconds the client can go on; None without a reader, or before its first token."""
        s = self.streams.by_rid.get(rid)
        if s is None or s.buffer is None or s.buffer.generated_tokens == 0:
            return None
        return s.buffer.slack_s(now_s)

    def snapshot(self, now_s: float) -> list[Mapping[str, Any]]:
        """Each stream's buffer, for the state route and metrics. Tokens of the last few steps may be missing."""
        return [stream.row(now_s) for stream in self.streams]
