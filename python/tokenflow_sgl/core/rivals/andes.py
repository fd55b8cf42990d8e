"""Andes v2 (arXiv 2404.16283): of all requests those are served whose expected QoE gains most per token of memory.

Taken from the paper: it acts only above 90% of KV in use, or where a step is slower than the tightest reader; for each
candidate batch size B a greedy knapsack by (Q_serve(B) - Q_wait) / l over a window; B from the largest batch still
faster than the tightest reader up to packing the shortest; step latency as a line over the batch size, learned; a
refiner that keeps a swap only where its gain is above the loss of who gives way and of all who run meanwhile; at most
one preemption per request on average (v1's P = 1); swap or recompute by the learned cost to the engine.

Taken from the first author's public solver (github.com/AmberLJC/vllm-0.6.1, vllm/core/andes_utils): the window of 10 s,
a solution every 10 steps, 10% in favour of who runs, and those that wait in order of value per block below 90%.

Assumed: at most 4 batch sizes; the loss of those who run while somebody comes in is taken as linear in that time; a
request without a reader is read at the default rate (Andes knows no other); a stream runs min_run_tokens before it
goes, as under every policy here; where memory runs out whoever loses least per token goes.

Not on the seam: the paper's swap blocks the engine until it is done; here it passes beside the next forwards.

Owns timelines and costs. Invariant: no stream is swapped for one that gains less than all others lose by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import PolicyConfig
from ..cost import CostBelief, Line
from ..driver import HOLD_NOTHING
from ..types import Applied, Arrived, Emitted, EngineView, Event, Finished, Phase, Plan, RequestView, Rid, Tick
from .knapsack import Item, densest_first, most_that_fit, pack, sparsest_first, victims_for
from .room import Room, is_parkable, is_steady
from .timeline import Timeline

USED_SHARE = 0.9
WINDOW_S = 10.0
SOLVE_EVERY = 10  # steps
BATCH_SIZES = 4
PREEMPTIONS_PER_REQUEST = 1.0


@dataclass(slots=True)
class Known:
    """One request. Times in seconds of rank 0's clock."""

    arrived_s: float
    timeline: Timeline
    output_at_admission: int = 0
    running: bool = False


class Andes:
    copies = "at_park"

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.cost = CostBelief.prior(config)
        self.latency = Line(config.step_prior_s, 0.0)  # of a decode step, over its batch size
        self.known: dict[Rid, Known] = {}
        self.recompute: set[Rid] = set()  # a load of theirs failed: they come in once without
        self.now_s = 0.0
        self.steps = 0
        self.requests = 0
        self.preemptions = 0
        self._last_batch = (0, 0)
        self._unstamped: list[Known] = []

    # ---- observe

    def observe(self, event: Event) -> None:
        if isinstance(event, Emitted):
            for rid, output_tokens in zip(event.rids, event.output_tokens, strict=True):
                k = self.known.get(rid)
                if k is not None:
                    k.timeline.deliver(self.now_s - k.arrived_s, output_tokens)
        elif isinstance(event, Tick):
            self._tick(event)
        elif isinstance(event, Applied):
            self._applied(event)
        elif isinstance(event, Arrived):
            rate = event.read_rate_tok_s or self.config.default_read_rate_tok_s
            known = Known(self.now_s, Timeline.of(event.prompt_tokens, rate))
            self.known[event.rid] = known
            self._unstamped.append(known)
            self.requests += 1
        elif isinstance(event, Finished):
            self.known.pop(event.rid, None)
            self.recompute.discard(event.rid)

    def _tick(self, tick: Tick) -> None:
        if tick.last_step_s is None:  # the clock stood still: who came meanwhile came now
            for known in self._unstamped:
                if not known.timeline.tokens:
                    known.arrived_s = tick.now_s
        self._unstamped.clear()
        self.now_s = tick.now_s
        prefill_tokens, decoding = self._last_batch
        if tick.last_step_s is not None:
            self.cost.learn_step(tick.last_step_s, prefill_tokens=prefill_tokens, decoding=decoding)
            if not prefill_tokens:
                self.latency.learn(decoding, tick.last_step_s)
        for line, samples in ((self.cost.store, tick.stores_s), (self.cost.load, tick.loads_s)):
            for tokens, seconds in samples:
                line.learn(tokens, seconds)

    def _applied(self, event: Applied) -> None:
        self.steps += 1
        self._last_batch = event.timed_batch
        for rid in event.parked:
            k = self.known.get(rid)
            if k is not None and k.running:
                k.running = False
                self.preemptions += 1
        for rid, _, _ in event.admitted:
            k = self.known.get(rid)
            if k is not None:
                k.running, k.output_at_admission = True, k.timeline.tokens
            self.recompute.discard(rid)
        self.recompute.update(rid for rid in event.unloaded if rid in self.known)

    # ---- plan

    def plan(self, view: EngineView) -> Plan:
        if is_steady(view):
            return HOLD_NOTHING
        room = Room(view)
        waiting = [self._item(r, room, self.latency.seconds(room.active + 1)) for r in room.waiting]
        waiting.sort(key=densest_first)
        if room.shortage_tokens > 0:
            step_s = self.latency.seconds(room.active)
            running = [self._item(r, room, step_s) for r in room.running if is_parkable(r)]
            room.relieve(i.r for i in sorted(running, key=sparsest_first))
        for r in room.held:
            if room.fits(r):
                room.let_in(r)
        if not room.park:
            if waiting and self._acts(room):
                self._solve(room, waiting)
            else:
                for item in waiting:
                    if not self._comes(room, item):
                        break
        return room.plan()

    def _acts(self, room: Room) -> bool:
        if self.steps % SOLVE_EVERY or self.preemptions >= PREEMPTIONS_PER_REQUEST * self.requests:
            return False
        view = room.view
        used = view.device_total_tokens - max(0, view.device_free_tokens - room.growth_tokens)
        return used > USED_SHARE * view.device_total_tokens or self.latency.seconds(room.active) > self._tightest_s(
            room
        )

    def _tightest_s(self, room: Room) -> float:
        known = (self.known.get(r.rid) for r in (*room.running, *room.waiting))
        return min((k.timeline.pace_s for k in known if k is not None), default=float("inf"))

    def _comes(self, room: Room, item: Item) -> bool:
        """Let it in if it fits, by the cheaper way; True also for one that waits for a transfer to be free."""
        by_load = self._loads(room, item.r)
        if by_load and not room.can_load:
            return True
        if not room.fits(item.r):
            return False
        room.let_in(item.r, load=by_load)
        return True

    def _loads(self, room: Room, r: RequestView) -> bool:
        if r.host_hit_tokens == 0 or r.rid in self.recompute or not room.view.host_ok:
            return False
        return self.cost.load_spares_engine(host_tokens=r.host_hit_tokens)

    # ---- what serving is worth

    def _item(self, r: RequestView, room: Room, step_s: float) -> Item:
        runs = r.phase is Phase.RUNNING
        weight = max(1, r.frees_tokens) if runs else room.need_tokens(r)
        item = Item(r, weight, 0.0 if runs else self._way_s(r), runs)
        return item.worth(self._gain(item, step_s))

    def _way_s(self, r: RequestView) -> float:
        host, prefill = r.host_hit_tokens, self.cost.prefill  # spelled out: it is asked for all that wait, each step
        tail = r.context_tokens - r.cached_tokens - host
        tail = tail if tail > 1 else 1
        computed_s = prefill.fixed_s + (tail + host) * prefill.per_token_s
        if host == 0:
            return computed_s
        return min(computed_s, self.cost.load_s(host) + prefill.fixed_s + tail * prefill.per_token_s)

    def _return_s(self, r: RequestView) -> float:
        """What it will take one that runs to come back, its KV being on the host by then."""
        return self.cost.return_s(tail_tokens=1, host_tokens=max(0, r.context_tokens - 1))

    def _gain(self, item: Item, step_s: float) -> float:
        """Q_serve - Q_wait at the end of the window, over the tokens that are due by then."""
        k = self.known.get(item.r.rid)
        if k is None:
            return 0.0
        line, since_s = k.timeline, self.now_s - k.arrived_s
        end_s = since_s + WINDOW_S
        tokens = min(line.due_tokens(end_s), item.r.max_output_tokens)
        if tokens <= line.tokens:
            return 0.0
        back_s = self._return_s(item.r) if item.runs else item.way_s
        serve = line.qoe(tokens, start_s=since_s + item.way_s, step_s=step_s)
        return serve - line.qoe(tokens, start_s=end_s + back_s, step_s=step_s)

    # ---- the knapsack

    def _solve(self, room: Room, waiting: Sequence[Item]) -> None:
        step_s = self.latency.seconds(room.active)
        running = [self._item(r, room, step_s) for r in room.running if self._may_go(r)]
        fixed = room.active - len(running)
        capacity = room.free_tokens + sum(i.r.frees_tokens for i in running)
        items = [*running, *waiting]
        best: tuple[float, set[Rid]] = (float("-inf"), set())
        for size in self._sizes(items, capacity, fixed, room):
            self._weigh(items, self.latency.seconds(size + fixed))
            value, chosen = pack(items, capacity=capacity, size=size)
            if value > best[0]:
                best = (value, chosen)
        self._weigh(items, step_s)
        self._refine(room, waiting, running, best[1], step_s)

    def _weigh(self, items: Sequence[Item], step_s: float) -> None:
        for i in items:
            k = self.known.get(i.r.rid)
            # A reader slower than the step does not feel the batch size.
            if k is not None and k.timeline.pace_s < step_s:
                i.worth(self._gain(i, step_s))

    def _may_go(self, r: RequestView) -> bool:
        k = self.known.get(r.rid)
        if k is None or not k.running or not is_parkable(r) or r.copying_tokens:
            return False
        return r.output_tokens - k.output_at_admission >= self.config.min_run_tokens

    def _sizes(self, items: Sequence[Item], capacity: int, fixed: int, room: Room) -> list[int]:
        """Batch sizes to try, besides those that stay: the largest first, which wins where all are equal."""
        most = most_that_fit(items, capacity=capacity)
        most = max(1, min(most, room.view.max_running - fixed - len(room.loading)))
        tightest_s = self._tightest_s(room)
        least = most
        while least > 1 and self.latency.seconds(least + fixed) > tightest_s:
            least -= 1
        count = min(BATCH_SIZES, most - least + 1)
        return sorted({most - round(n * (most - least) / max(1, count - 1)) for n in range(count)}, reverse=True)

    def _refine(
        self, room: Room, waiting: Sequence[Item], running: Sequence[Item], chosen: set[Rid], step_s: float
    ) -> None:
        """Walk those to be admitted, and swap only where it pays for everybody together."""
        leave = sorted((i for i in running if i.r.rid not in chosen), key=sparsest_first)
        stall_per_s: float | None = None
        for item in waiting:
            if room.fits(item.r) or item.r.rid not in chosen:
                self._comes(room, item)
                continue
            by_load = self._loads(room, item.r)
            if by_load and not room.can_load:
                continue
            victims = victims_for(item, leave, room)
            if not victims:
                continue
            loaded = item.r.cached_tokens + (item.r.host_hit_tokens if by_load else 0)
            stall_s = self.cost.prefill_s(max(1, item.r.context_tokens - loaded))
            if stall_per_s is None:
                stall_per_s = self._stall_per_s(running, stall_s, step_s)
            if item.gain - sum(v.gain for v in victims) <= stall_per_s * stall_s:
                continue
            for v in victims:
                leave.remove(v)
                room.put_away(v.r)
            room.let_in(item.r, load=by_load)

    def _stall_per_s(self, running: Sequence[Item], stall_s: float, step_s: float) -> float:
        """QoE that all who run lose for each second that the engine computes for somebody else."""
        lost = 0.0
        for i in running:
            k = self.known[i.r.rid]
            since_s = self.now_s - k.arrived_s
            tokens = min(k.timeline.due_tokens(since_s + WINDOW_S), i.r.max_output_tokens)
            if tokens > k.timeline.tokens:
                on = k.timeline.qoe(tokens, start_s=since_s, step_s=step_s)
                lost += on - k.timeline.qoe(tokens, start_s=since_s + stall_s, step_s=step_s)
        return lost / stall_s
