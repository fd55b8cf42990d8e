"""TokenFlow's policy: spends the lead that streams have over their readers.

Wires the parts: the book of streams, priorities, costs, forecast, returns, selection, publishing. Owns beliefs; the
executor owns facts.
Invariant: `observe` alone changes it; `plan` is a pure function of what was observed and the view.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .burst import Forecast
from .config import PolicyConfig
from .cost import CostBelief
from .driver import HOLD_NOTHING
from .paging import Publisher
from .parks import Parks
from .preempt import STEPS_AHEAD, Candidate, Selection, opens_tokens, select, whole_pages
from .priority import PRIORITIES
from .returns import Queue, Returns
from .streams import Stream, Streams
from .types import (
    Applied,
    Arrived,
    Emitted,
    EngineView,
    Event,
    Finished,
    Halted,
    Phase,
    Plan,
    Reported,
    RequestView,
    Rid,
    Tick,
    Visible,
)

_SWAP_CREDIT_S = 30.0  # of running whose share may be saved up, or owed
_REFUSAL_PAUSE_S = 0.25  # an admission the engine could not keep is not tried again at once: it would block the rest


class TokenFlowPolicy:
    """Buffer-aware preemptive scheduling (design: the model)."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.now_s = 0.0
        self.streams = Streams(config.default_read_rate_tok_s, config.max_read_rate_tok_s)
        self.cost = CostBelief.prior(config)
        self.forecast = Forecast(config.forecast_s)
        self.publisher = Publisher(config)
        self.decodes_since_prefill = 0
        self.swap_credit_s = config.swap_share * _SWAP_CREDIT_S
        self._priority = PRIORITIES[config.priority]
        self._chunk_tokens = 0  # of the last prefill step: the next will be about as large
        self._mixes = False  # the last prompts were computed beside those who decode (mixed chunks)
        self._rode_along = False  # in the last step: the engine can then neither park nor publish them in the next
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
            self.forecast.arrived(event)
        elif isinstance(event, Finished):
            self.streams.finish(event.rid)
        elif isinstance(event, Visible):
            self.streams.reveal(event.rid, event.output_tokens)
        elif isinstance(event, Reported | Halted):
            buffer = self.streams.hear(event.rid)
            if buffer is None:
                return
            if isinstance(event, Reported):
                buffer.report(self.now_s, event.consumed_tokens)
            else:
                buffer.halt(self.now_s, event.halted)

    def _tick(self, tick: Tick) -> None:
        self.now_s = tick.now_s
        self.streams.stamp(tick.now_s)
        if tick.last_step_s is not None:
            prefill_tokens, decoding = self._last_batch
            self.cost.learn_step(tick.last_step_s, prefill_tokens=prefill_tokens, decoding=decoding)
            share = self.config.swap_share
            self.swap_credit_s = min(share * _SWAP_CREDIT_S, self.swap_credit_s + share * max(0.0, tick.last_step_s))
        for line, samples in (
            (self.cost.store, tick.stores_s),
            (self.cost.load, tick.loads_s),
            (self.cost.publish, tick.publishes_s),
        ):
            for tokens, seconds in samples:
                line.learn(tokens, seconds)
        self.forecast.tick(tick.now_s, grew_tokens=self._last_batch[1], idle=tick.last_step_s is None)
        self.publisher.tick(self.streams, tick.last_step_s)

    def _applied(self, event: Applied) -> None:
        for rid, up_to in event.published:
            self.publisher.published(rid, up_to, self.streams, self.cost)
            self.streams.publish(rid, up_to)
        for rid in event.parked:
            self.streams.park(rid, self.now_s)
        for rid in event.unloaded:
            self.streams.unload(rid)
        again_tokens = 0
        for rid, computed_tokens, _ in event.admitted:
            stream = self.streams.by_rid.get(rid)
            if stream is not None and stream.parks:
                again_tokens += computed_tokens
            self.streams.admit(rid)
            self.publisher.admitted(rid)
        if again_tokens:  # all of them in one step
            least_s = -self.config.swap_share * _SWAP_CREDIT_S
            self.swap_credit_s = max(least_s, self.swap_credit_s - self.cost.prefill_s(again_tokens))
        for rid in event.refused:
            stream = self.streams.by_rid.get(rid)
            if stream is not None:
                stream.refused_until_s = self.now_s + _REFUSAL_PAUSE_S
        self._last_batch = event.timed_batch
        self._rode_along = event.prefill_tokens > 0 and event.decoding > 0
        self._mixes = self._rode_along if event.prefill_tokens else self._mixes
        self._chunk_tokens = event.prefill_tokens or self._chunk_tokens
        self.decodes_since_prefill = 0 if event.prefill_tokens else self.decodes_since_prefill + 1

    # ---- plan

    def plan(self, view: EngineView) -> Plan:
        demand_tokens = self.forecast.demand_tokens(self.config.forecast_s)
        publish: tuple[tuple[Rid, int], ...] = ()
        if not self._rode_along:
            publish = self.publisher.due(self.streams, view, demand_tokens=demand_tokens, cost=self.cost)
        # What running streams can take at most in the next steps: with that much free, nobody need be looked at.
        ample = view.device_free_tokens >= whole_pages(STEPS_AHEAD, view.page_tokens) * view.running
        led = float(bool(publish) and self.publisher.is_led(view, demand_tokens))
        if view.waiting == 0 and view.promised_tokens == 0 and ample:
            return Plan(publish=publish, why={"led_by_forecast": led}) if publish else HOLD_NOTHING
        return self._decide(view, publish, led)

    def _decide(self, view: EngineView, publish: tuple[tuple[Rid, int], ...], led: float) -> Plan:
        running: list[RequestView] = []
        prefilling: list[RequestView] = []
        waiting: list[RequestView] = []
        is_running, is_prefilling = Phase.RUNNING, Phase.PREFILL
        for r in view.requests():  # hundreds: no hash of an enum for each
            phase = r.phase
            (running if phase is is_running else prefilling if phase is is_prefilling else waiting).append(r)
        shortage = opens_tokens([*running, *prefilling], view.page_tokens) + view.promised_tokens
        shortage -= view.device_free_tokens
        growth = self.config.growth_tokens
        active = len(running) + len(prefilling)
        returns = Returns(self.config, self.cost, self.streams, self._rank, view, self.now_s)
        parks = Parks(
            self.config, self.cost, self.streams, self._rank_running, view, self.now_s, self.swap_credit_s
        )  # fmt: skip
        room = view.device_free_tokens - growth * active - sum(r.takes_tokens for r in prefilling)
        if active and room < returns.least_tokens(waiting) and not parks.may_spare(running):
            park = parks.relief(running, shortage) if shortage > 0 and active > 1 else ()
            return self._hold(
                running=running, prefilling=prefilling, waiting=waiting, returns=returns, publish=publish, park=park,
                shortage=shortage, led=led,
            )  # fmt: skip
        queue = returns.queue(waiting)
        room -= queue.booked_tokens
        must = queue.must
        slots = view.max_running - active - queue.loading
        fits = sum(c.need_tokens for c in must) <= room and len(must) <= slots
        victims = [] if fits else parks.victims(running)  # while all fit, nobody needs to be weighed
        chosen = select(queue.memory_order(self._is_owed), victims, room_tokens=room, slots=slots)
        # Memory may be kept for work that is owed it, but it never comes in before a reader with nothing to show.
        served = set(chosen.admit)
        come = [c.rid for c in must if c.rid in served]
        come += self._early_returns(returns.early(queue), chosen, len(running) + queue.loading)
        park = chosen.park
        if shortage > 0 and not come and active > 1:
            park = parks.relief(running, shortage)
        if not come and not active and not queue.loading and must:
            return self._alone(must[0].rid, queue, view)
        gone = set(park)
        load = tuple(rid for rid in come if rid in queue.loads)
        admit = tuple(rid for rid in come if rid not in queue.loads)
        return Plan(
            park=park,
            publish=tuple(p for p in publish if p[0] not in gone),
            load=load,
            admit=admit,
            reserve_tokens=growth * (active - len(park) + len(admit)) + self._booked_tokens(queue, load, waiting),
            # Decoding takes memory: not while a prompt under way still needs it.
            prefill_tokens=0 if (must or prefilling) and shortage <= 0 and self._must_decode_first(running) else None,
            why={
                "must": len(must),
                "unserved": chosen.unserved,
                "room_tokens": chosen.room_tokens,
                "led_by_forecast": led,
            },
        )

    def _hold(
        self,
        *,
        running: Sequence[RequestView],
        prefilling: Sequence[RequestView],
        waiting: Sequence[RequestView],
        returns: Returns,
        publish: tuple[tuple[Rid, int], ...],
        park: tuple[Rid, ...],
        shortage: int,
        led: float,
    ) -> Plan:
        """Whoever waits, nobody fits, and nobody may be parked for them: in overload most steps are like this, and
        weighing all that wait would take longer than all the rest of the step."""
        booked = [returns.need_tokens(r) for r in waiting if r.phase is Phase.LOADING]
        stay = len(running) + len(prefilling) - len(park)
        return Plan(
            park=park,
            publish=tuple(p for p in publish if p[0] not in park),
            admit=(),
            reserve_tokens=self.config.growth_tokens * stay + sum(booked),
            prefill_tokens=0 if prefilling and shortage <= 0 and self._must_decode_first(running) else None,
            why={"led_by_forecast": led},
        )

    def _alone(self, rid: Rid, queue: Queue, view: EngineView) -> Plan:
        """An empty engine has nothing to wait for: whoever is first comes in, however little room is left to grow."""
        if rid in queue.loads:
            host_hit_tokens = next(r.host_hit_tokens for r in view.requests() if r.rid == rid)
            if host_hit_tokens <= view.device_free_tokens:
                return Plan(load=(rid,), admit=())
        return Plan(admit=(rid,), reserve_tokens=0)

    def _booked_tokens(self, queue: Queue, load: tuple[Rid, ...], waiting: Sequence[RequestView]) -> int:
        """Free memory that those on their way back will still take: who is admitted now must leave it."""
        starting = set(load)
        tails = (r.context_tokens - r.cached_tokens - r.host_hit_tokens for r in waiting if r.rid in starting)
        takes = sum(tails) if starting else 0
        return queue.booked_tokens + takes + self.config.growth_tokens * len(load)

    def _is_owed(self, c: Candidate) -> bool:
        """Work without a reader that has waited for a whole turn."""
        s = self.streams.by_rid[c.rid]
        return s.buffer is None and c.holds_back and s.wait_s(self.now_s) >= self.config.batch_turn_s

    def _early_returns(self, early: Iterator[Candidate], chosen: Selection, running: int) -> Iterator[Rid]:
        """Returns ahead of need, only where what comes back can stay: else it would be parked again at once."""
        if chosen.unserved or chosen.park:
            return
        room, slots, running = chosen.room_tokens, chosen.slots, running + len(chosen.admit)
        if slots <= 0 or room < self.config.return_steps * (running + 1):
            return  # before anybody is weighed: most of the time memory is tight
        for c in early:
            running += 1
            if slots <= 0 or room - c.need_tokens < self.config.return_steps * running:
                return
            room -= c.need_tokens
            slots -= 1
            yield c.rid

    def _rank(self, s: Stream, slack_s: float, wait_s: float, prefill_s: float) -> float:
        return self._priority(
            slack_s=slack_s,
            wait_s=wait_s,
            unstarted=s.unstarted and s.buffer is not None,
            prefill_s=prefill_s,
            config=self.config,
        )

    def _rank_running(self, slack_s: float) -> float:
        return self._priority(slack_s=slack_s, wait_s=0.0, unstarted=False, prefill_s=0.0, config=self.config)

    def _must_decode_first(self, running: Sequence[RequestView]) -> bool:
        """A reader is about to run dry, and the engine prefills without decoding. Bounded, so that prefill goes on."""
        if self._mixes or self.decodes_since_prefill >= self.config.defer_steps:
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

    def forecast_snapshot(self, view: EngineView | None) -> dict[str, Any]:
        """The forecast and its errors, for the state route; `mode` is how eagerly is published, None without a view."""
        demand_tokens = self.forecast.demand_tokens(self.config.forecast_s)
        mode = None if view is None else self.publisher.mode(view, demand_tokens).value
        return {**self.forecast.snapshot(), "mode": mode}
