"""The TokenFlow paper's own two-step scheduler (arXiv 2510.02758, EuroSys'26), as far as it is published.

Taken from the paper: it acts every 0.5 s (the shortest of its own sensitivity test) and only under stress, that is
while somebody waits or some buffer is about to run dry; else prefill first.
  1  Working set. W_static = floor(M / beta); W = W_static - lambda (W_static - running). A newcomer joins while the
     set is below W and whoever must give way has b >= mu r (tau_evict + tau_load + tau_schedule).
  2  Balancing. By phi(b) = exp(-b), so fewest unread tokens first, then v t', then r, memory is filled greedily; then
     a pass over adjacent pairs of that list swaps one in for one out where the summed utility rises and memory
     allows, U = v (t' - t_overhead) + gamma phi(b when it is back).
Where the set's rates exceed the throughput estimated online, first come, first served into free memory and nobody is
parked. A return is computed again where t_IO is above the estimate for computing it. KV is written through, largest
buffer first, in chunks sized to the next step (core/paging.Publisher does just that).

Assumed, for the paper does not say: mu = 2 (its test spans 1 to 20), lambda = 0.5, gamma = 10, v = r / (1 + b / r),
T_critical = 1 s, beta = the mean context of those known, M = device and host memory, because a set no larger than the
device would leave step 2 nothing to choose; the throughput is that of the largest batch the device holds, by a line
over the batch size; each one's footprint includes its growth until the next schedule; "no new request is admitted" in
overload means none by parking others, or memory would lie idle; whoever has no reader is read at the default rate, the
paper's reference rate for agents; a stream runs min_run_tokens before it goes, as under every policy here. Between
schedules newcomers that fit come in at once. Where memory runs out between them, the largest buffer goes.

Owns buffers and costs. Invariant: outside a schedule nobody is parked but where memory runs out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..config import PolicyConfig
from ..cost import CostBelief, Line
from ..driver import HOLD_NOTHING
from ..paging import Publisher
from ..preempt import whole_pages
from ..streams import Stream, Streams
from ..types import (
    Applied,
    Arrived,
    Emitted,
    EngineView,
    Event,
    Finished,
    Phase,
    Plan,
    ReaderClass,
    Reported,
    RequestView,
    Rid,
    Tick,
)
from .balance import Member, balance
from .room import Room, is_parkable, is_steady

INTERVAL_S = 0.5
CRITICAL_S = 1.0
MU, LAMBDA, GAMMA = 2.0, 0.5, 10.0
PUBLISH_TOKENS = 32  # grown since the last write: the paper writes every step's KV, in chunks
_GAIN = 0.1  # of a new sample in the mean queueing delay


class PaperTokenFlow:
    copies = "ahead"

    def __init__(self, config: PolicyConfig) -> None:
        self.config = replace(
            config,
            copies="ahead",
            publish_below=1.0,
            publish_interval_tokens=PUBLISH_TOKENS,
            publish_per_step=4,
            publish_share=max(0.1, config.publish_share),
        )
        self.streams = Streams(config.default_read_rate_tok_s, config.max_read_rate_tok_s)
        self.cost = CostBelief.prior(config)
        self.publisher = Publisher(self.config)
        self.latency = Line(config.step_prior_s, 0.0)  # of a decode step, over its batch size
        self.queued_s = 0.0  # t': mean wait of those that came in
        self.now_s = 0.0
        self.next_s = 0.0
        self.due = False  # this step schedules
        self._last_batch = (0, 0)

    # ---- observe

    def observe(self, event: Event) -> None:
        if isinstance(event, Emitted):
            self.streams.emit(event, self.now_s)
        elif isinstance(event, Tick):
            self._tick(event)
        elif isinstance(event, Applied):
            self._applied(event)
        elif isinstance(event, Arrived):
            rate = event.read_rate_tok_s or self.config.default_read_rate_tok_s
            reads = replace(event, reader=ReaderClass.READER, read_rate_tok_s=rate, withheld=False)
            self.streams.arrive(reads, self.now_s)
        elif isinstance(event, Finished):
            self.streams.finish(event.rid)
        elif isinstance(event, Reported):
            buffer = self.streams.hear(event.rid)
            if buffer is not None:
                buffer.report(self.now_s, event.consumed_tokens)

    def _tick(self, tick: Tick) -> None:
        self.now_s = tick.now_s
        self.streams.stamp(tick.now_s)
        self.due = tick.now_s >= self.next_s
        if self.due:
            self.streams.settle()
            self.next_s = tick.now_s + INTERVAL_S
        prefill_tokens, decoding = self._last_batch
        if tick.last_step_s is not None:
            self.cost.learn_step(tick.last_step_s, prefill_tokens=prefill_tokens, decoding=decoding)
            if not prefill_tokens:
                self.latency.learn(decoding, tick.last_step_s)
        for line, samples in (
            (self.cost.store, tick.stores_s),
            (self.cost.load, tick.loads_s),
            (self.cost.publish, tick.publishes_s),
        ):
            for tokens, seconds in samples:
                line.learn(tokens, seconds)
        self.publisher.tick(self.streams, tick.last_step_s)

    def _applied(self, event: Applied) -> None:
        for rid, up_to in event.published:
            self.publisher.published(rid, up_to, self.streams, self.cost)
            self.streams.publish(rid, up_to)
        for rid in event.parked:
            self.streams.park(rid, self.now_s)
        for rid in event.unloaded:
            self.streams.unload(rid)
        for rid, _, _ in event.admitted:
            s = self.streams.by_rid.get(rid)
            if s is not None and s.unstarted:
                self.queued_s += _GAIN * (s.wait_s(self.now_s) - self.queued_s)
            self.streams.admit(rid)
            self.publisher.admitted(rid)
        self._last_batch = event.timed_batch

    # ---- plan

    def plan(self, view: EngineView) -> Plan:
        publish = self.publisher.due(self.streams, view, demand_tokens=0.0, cost=self.cost)
        if is_steady(view):
            return Plan(publish=publish) if publish else HOLD_NOTHING
        room = Room(view)
        if room.shortage_tokens > 0:
            may = [r for r in room.running if is_parkable(r)]
            room.relieve(sorted(may, key=lambda r: (r.copying_tokens > 0, -self._slack_s(r.rid), r.rid)))
        for group in (room.held, room.waiting):
            self._by_arrival(group)
        for r in room.held:
            if room.fits(r):
                room.let_in(r)
        if not room.park:
            self._let_in(room)
        return room.plan(publish)

    def _let_in(self, room: Room) -> None:
        if self._is_overloaded(room):
            self._first_come(room, room.waiting)
        elif not room.active or (self.due and (room.waiting or self._is_critical(room))):
            self._schedule(room)
        else:
            self._first_come(room, [r for r in room.waiting if r.output_tokens == 0])

    def _first_come(self, room: Room, order: Sequence[RequestView]) -> None:
        for r in order:
            s = self.streams.by_rid.get(r.rid)
            by_load = s is not None and self._loads(r, s, room)
            if by_load and not room.can_load:
                continue
            if not room.fits(r):
                return
            room.let_in(r, load=by_load)

    def _is_critical(self, room: Room) -> bool:
        return any(self._slack_s(r.rid) < CRITICAL_S for r in room.running)

    def _is_overloaded(self, room: Room) -> bool:
        """The rates of the set are above what the device makes with as many streams as it holds."""
        started = [s for s in self.streams if s.running or s.output_tokens]
        if not started:
            return False
        size = max(1, min(room.view.max_running, room.view.device_total_tokens // self._footprint_tokens(room)))
        return sum([s.read_rate_tok_s or 0.0 for s in started]) > size / self.latency.seconds(size)

    def _footprint_tokens(self, room: Room) -> int:
        requests = room.view.requests()
        return max(room.view.page_tokens, sum([r.context_tokens for r in requests]) // max(1, len(requests)))

    # ---- the two steps

    def _schedule(self, room: Room) -> None:
        steps = math.ceil(INTERVAL_S / max(1e-4, self.cost.step_s))
        # In an empty engine one that fills it must come in all the same.
        growth = whole_pages(steps, room.view.page_tokens) if room.active else 0
        stays = [self._member(r, room, growth) for r in room.running if self._may_go(r)]
        joins = [self._member(r, room, growth) for r in (*self._newcomers(room), *self._parked(room))]
        fixed = room.active - len(stays)
        capacity = room.free_tokens - growth * fixed + sum(m.r.frees_tokens for m in stays)
        order = sorted((*stays, *joins), key=lambda m: (*m.key, self._queued_at(m.r.rid)))
        chosen = balance(order, capacity=capacity, slots=room.view.max_running - fixed - len(room.loading))
        leave = [m for m in reversed(order) if m.runs and m.r.rid not in chosen]
        for m in order:
            if m.runs or m.r.rid not in chosen:
                continue
            while leave and not room.fits(m.r):
                room.put_away(leave.pop(0).r)
            if room.fits(m.r):
                room.let_in(m.r, load=self._loads(m.r, m.s, room))

    def _newcomers(self, room: Room) -> list[RequestView]:
        """Step 1: those that join the working set now, by arrival."""
        view = room.view
        static = (view.device_total_tokens + view.host_total_tokens) // self._footprint_tokens(room)
        wanted = static - LAMBDA * (static - room.active) if room.active < view.max_running else static
        members = room.active + len(room.loading) + len(room.held)
        new = [r for r in room.waiting if r.output_tokens == 0]
        members += len(room.waiting) - len(new)
        return [r for r in new[: max(0, math.ceil(wanted - members))] if self._can_come(r, room)]

    def _parked(self, room: Room) -> list[RequestView]:
        return [r for r in room.waiting if r.output_tokens and self._can_come(r, room)]

    def _can_come(self, r: RequestView, room: Room) -> bool:
        """Not while it wants a transfer and none may start."""
        s = self.streams.by_rid.get(r.rid)
        return s is not None and (room.can_load or not self._loads(r, s, room))

    def _may_go(self, r: RequestView) -> bool:
        """Its buffer lasts, mu times over, for going out, coming back, and waiting for the schedule that decides so."""
        s = self.streams.by_rid.get(r.rid)
        if s is None or s.buffer is None or not is_parkable(r) or r.copying_tokens:
            return False
        if r.output_tokens - s.output_at_admission < self.config.min_run_tokens:
            return False
        evict_s = self.cost.store.seconds(max(0, r.context_tokens - 1 - r.backed_tokens))
        return s.buffer.slack_s(self.now_s) >= MU * (evict_s + self._back_s(r, r.backed_tokens) + INTERVAL_S)

    def _back_s(self, r: RequestView, host_tokens: int) -> float:
        return self.cost.return_s(tail_tokens=max(1, r.context_tokens - host_tokens), host_tokens=host_tokens)

    def _loads(self, r: RequestView, s: Stream, room: Room) -> bool:
        """t_IO, behind whatever is on the link already, against computing it."""
        if r.host_hit_tokens == 0 or s.recompute or not room.view.host_ok:
            return False
        ahead = sum(max(0, x.context_tokens - x.cached_tokens - x.takes_tokens) for x in room.loading)
        return self.cost.load_s(r.host_hit_tokens, ahead) <= self.cost.prefill_s(r.host_hit_tokens)

    def _member(self, r: RequestView, room: Room, growth: int) -> Member:
        s = self.streams.by_rid.get(r.rid) or Stream(r.rid, ReaderClass.READER, 0, 0, 1.0, None, self.now_s)
        rate = s.read_rate_tok_s or 1.0
        runs = r.phase is Phase.RUNNING
        unread = 0.0 if s.buffer is None else s.buffer.slack_s(self.now_s) * rate
        back_s = 0.0 if runs else self._back_s(r, r.host_hit_tokens)
        value = rate / (1.0 + unread / rate)
        weight = (r.frees_tokens if runs else room.need_tokens(r)) + growth
        utility = value * (self.queued_s - back_s) + GAMMA * math.exp(-max(0.0, unread - rate * back_s))
        return Member(r, s, weight, (unread, -value * self.queued_s, -rate), utility, runs)

    # ---- what is known of one

    def _slack_s(self, rid: Rid) -> float:
        s = self.streams.by_rid.get(rid)
        return 0.0 if s is None or s.buffer is None else s.buffer.slack_s(self.now_s)

    def _by_arrival(self, group: list[RequestView]) -> None:
        by_rid, now_s = self.streams.by_rid, self.now_s
        since = [(now_s if s is None else s.away_since_s) for s in [by_rid.get(r.rid) for r in group]]
        order = sorted(zip(since, [r.rid for r in group], range(len(group)), strict=True))
        group[:] = [group[i] for _, _, i in order]

    def _queued_at(self, rid: Rid) -> tuple[float, Rid]:
        s = self.streams.by_rid.get(rid)
        return (self.now_s if s is None else s.away_since_s, rid)
