"""One run: requests arrive, the policy is driven step by step as in SGLang, and every token gets its time.

Owns the clock and the order of a pass. Decides nothing. Invariant: the same requests, settings, timing and policy give
the same run, byte for byte.

The order of a pass is that of SGLang's normal loop: the clock, arrivals, drive_step, a batch, its results. What was
prefilled joins those who decode in the NEXT pass, after the policy has looked. Whether the work of the CPU is hidden
behind the GPU's, as in the overlap loop, is the timing model's to say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..core.driver import Recorder, check_plan, drive_step
from ..core.qoe import StreamRecord
from ..core.types import Arrived, Emitted, EngineView, Event, Finished, Plan, Policy, ReaderClass, Tick
from ..workload.arrivals import Request
from .batch import Batcher
from .executor import Counters, Outcome, SimExecutor
from .memory import Memory
from .requests import SimRequest
from .settings import EngineSettings
from .timing import TimingModel

_IDLE_S = 0.01  # between two looks of an engine that has nothing to run and somebody away
_STUCK_PASSES = 200_000  # idle passes in a row
TOO_LONG = "longer than the whole KV pool"
Progress = Callable[[int, int, float], None]  # requests done, of all known, simulated seconds


class SimulationStuck(RuntimeError):
    """Nobody runs and nobody is let in, for ever: a fault of the policy or of the engine's model."""


@dataclass(slots=True)
class Run:
    """What happened. Times in simulated seconds; `records` in order of finishing."""

    records: list[StreamRecord] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    sent_s: dict[str, float] = field(default_factory=dict)
    most_live: int = 0  # requests sent and not ended
    most_running: int = 0
    most_host_tokens: int = 0


class Simulation:
    """`check` asserts every plan's legality and balances the pool each step: for tests, it looks at everybody."""

    def __init__(
        self,
        policy: Policy,
        requests: Sequence[Request],
        *,
        settings: EngineSettings,
        timing: TimingModel,
        store_bytes_s: float,
        load_bytes_s: float,
        journal: Recorder | None = None,
        progress: Progress | None = None,
        check: bool = False,
        priorities: Mapping[str, int] | None = None,
    ) -> None:
        self.policy, self.timing, self.journal, self.progress, self.check = policy, timing, journal, progress, check
        memory = Memory(
            settings,
            kv_bytes_per_token=timing.kv_bytes_per_token,
            store_bytes_s=store_bytes_s,
            load_bytes_s=load_bytes_s,
        )
        self.ex = SimExecutor(settings, timing, memory)
        self.batcher = Batcher(self.ex)
        self.run_ = Run(counters=self.ex.counters)
        self._arrivals = [(r.sent_s, i, r) for i, r in enumerate(requests) if r.after is None]
        heapq.heapify(self._arrivals)
        self._followers: dict[str, list[tuple[int, Request]]] = {}
        for i, r in enumerate(requests):
            if r.after is not None:
                self._followers.setdefault(r.after, []).append((i, r))
        self._total = len(requests)
        self._decode_times: list[float] = []
        self._busy = False
        self._last_tick_s: float | None = None
        self._before: tuple[int, int] | None = None  # prefill and decode size of the batch that the next tick times
        self._members, self._rids, self._bases = -1, (), []  # type: tuple[int, tuple[str, ...], list[int]]
        self._live = 0
        self._priorities = priorities or {}  # that clients give, by the class of their reader

    # ---- the loop

    def run(self) -> Run:
        ex, idle = self.ex, 0
        while self._arrivals or self._live:
            if not self._live:
                ex.now_s = max(ex.now_s, self._arrivals[0][0])
            idle = 0 if self._pass() else idle + 1
            if idle > _STUCK_PASSES:
                raise SimulationStuck(
                    f"at {ex.now_s:.1f} s: {len(ex.waiting)} wait, {ex.memory.free_tokens} tokens free"
                )
        return self.run_

    def _pass(self) -> bool:
        """False if nothing could run."""
        ex = self.ex
        for req in ex.memory.advance(ex.now_s):
            ex.outcome.loaded.append((req.rid, req.held_pages * ex.page))
            ex.counters.loads += 1
            ex.counters.loaded_tokens += req.held_pages * ex.page
        drive_step(self.policy, ex, self._events(), self._see if self.check or self.journal else None)
        batch = self.batcher.form()
        work = self.batcher.step_work(batch)
        self._before = (batch.prefill_tokens, work.decoding)
        if not batch.prefill and not batch.decodes:
            self._wait()
            return False
        step_s = max(self.timing.step_s(work), ex.memory.load_seconds(batch.loaded_tokens))
        ex.now_s += self.timing.pass_s(step_s, ex.publish_s)
        ex.counters.publish_s += ex.publish_s
        ex.publish_s = 0.0
        self._busy = True
        run, tree = self.run_, ex.memory.tree
        run.most_live = max(run.most_live, self._live)
        run.most_running = max(run.most_running, len(ex.running))
        run.most_host_tokens = max(run.most_host_tokens, tree.host_used_pages * ex.page)
        self._results(batch.prefill, decodes=batch.decodes)
        if self.check:
            self._balance()
        return True

    def _wait(self) -> None:
        ex = self.ex
        self._busy = False
        self.batcher.idle()
        ex.publish_s = 0.0
        arrival_s = self._arrivals[0][0] if self._arrivals else math.inf
        ex.now_s = min(max(ex.now_s, arrival_s), max(ex.now_s, ex.memory.next_done_s()), ex.now_s + _IDLE_S)

    # ---- what the policy hears

    def _events(self) -> list[Event]:
        """What the last plan came to, the clock, then what happened: the order of the adapter's ledger."""
        ex, events = self.ex, []  # type: tuple[SimExecutor, list[Event]]
        if self._before is not None:
            events.append(ex.outcome.applied(prefill_tokens=self._before[0], decoding=self._before[1]))
            ex.outcome = Outcome()
        last_s = ex.now_s - self._last_tick_s if self._busy and self._last_tick_s is not None else None
        self._last_tick_s = ex.now_s
        memory = ex.memory
        events.append(Tick(ex.now_s, last_s, tuple(memory.stores_s), tuple(memory.loads_s), tuple(ex.publishes_s)))
        memory.stores_s, memory.loads_s, ex.publishes_s = [], [], []
        events += ex.events
        ex.events = []
        while self._arrivals and self._arrivals[0][0] <= ex.now_s:
            arrived = self._arrive(heapq.heappop(self._arrivals)[2])
            if arrived is not None:
                events.append(arrived)
        return events

    def _arrive(self, request: Request) -> Arrived | None:
        ex = self.ex
        sent_s = self.run_.sent_s.setdefault(request.rid, request.sent_s)
        prompt = request.prompt_len
        if not ex.settings.can_serve(prompt_tokens=prompt, answer_tokens=request.answer_tokens):
            self._record(request, sent_s, (), error=TOO_LONG)
            self._follow(request, ex.now_s)
            return None
        tree = ex.memory.tree
        path = tree.path((s.key, s.tokens) for s in request.segments)
        tree.extend_path(path, f"out:{request.rid}")
        reader = ReaderClass(request.reader)
        req = SimRequest(
            request, request.rid, prompt, request.answer_tokens, request.max_tokens, sent_s, path, reader,
            priority=self._priorities.get(request.reader, 0),
        )  # fmt: skip
        ex.waiting[req.rid] = req
        ex.watch(req)
        self._live += 1
        return Arrived(req.rid, prompt, req.max_tokens, reader, req.read_rate_tok_s)

    def _see(self, events: Sequence[Event], view: EngineView, plan: Plan) -> None:
        if self.journal is not None:
            self.journal(events, view, plan)
        if self.check:
            built = view.built
            problems = check_plan(view, plan)
            view.built = built
            assert not problems, f"at {self.ex.now_s:.3f} s: {problems}"

    # ---- results

    def _results(self, prefill: Sequence[SimRequest], *, decodes: bool) -> None:
        ex = self.ex
        ex.memory.at(ex.now_s)
        for req in prefill:
            ex.memory.computed(req, req.kv_tokens)
        rids: tuple[str, ...] = ()
        outputs: tuple[int, ...] = ()
        ended: list[SimRequest] = []
        if decodes:
            ex.counters.decode_steps += 1
            ex.decodes += 1
            ex.context_tokens += len(ex.running)
            self._decode_times.append(ex.now_s)
            if self._members != ex.members:
                self._members = ex.members
                self._rids = tuple(ex.running)
                self._bases = [r.output_tokens - (r.joined_ct or 0) for r in ex.running.values()]
            at = ex.decodes
            rids, outputs = self._rids, tuple([base + at for base in self._bases])
            while ex.ends and ex.ends[0][0] <= at:
                _, seq, req = heapq.heappop(ex.ends)
                if req.joined_ct is not None and req.admitted_seq == seq:
                    ended.append(req)
        if prefill:
            ex.counters.prefill_steps += not decodes
            done = [r for r in prefill if r is not ex.chunked]
            for req in done:
                req.output_tokens += 1
                req.spans.append(ex.now_s)
                if req.output_tokens >= req.answer_tokens:
                    ended.append(req)
            ex.prefilled = done
            rids += tuple(r.rid for r in done)
            outputs += tuple(r.output_tokens for r in done)
        if rids:
            ex.events.append(Emitted(rids, outputs))
        for req in ended:
            self._finish(req)

    def _finish(self, req: SimRequest) -> None:
        ex = self.ex
        kv = ex.leave(req) if req.joined_ct is not None else req.kv_tokens
        req.finished = True
        memory = ex.memory
        memory.computed(req, kv)
        req.path[-1].end_tokens = max(req.path[-1].end_tokens, req.prompt_tokens + req.answer_tokens)
        memory.leave(req, kv, parked=False)
        ex.forget(req)
        ex.events.append(Finished(req.rid))
        self._live -= 1
        times = self._times(req)
        self._record(req.request, req.arrived_s, tuple(times.tolist()))
        self._follow(req.request, _read_s(times, req.request.read_rate_tok_s))
        memory.tree.let_go(req.path)

    def _times(self, req: SimRequest) -> NDArray[np.float64]:
        parts = [[s] if isinstance(s, float) else self._decode_times[s[0] : s[1]] for s in req.spans]
        return np.array([t for part in parts for t in part])

    def _record(self, request: Request, sent_s: float, times: tuple[float, ...], error: str | None = None) -> None:
        self.run_.records.append(
            StreamRecord(
                request.rid, request.group, sent_s, times, request.read_rate_tok_s, request.answer_tokens, error
            )
        )
        if self.progress is not None:
            self.progress(len(self.run_.records), self._total, self.ex.now_s)

    def _follow(self, request: Request, read_s: float) -> None:
        for i, follower in self._followers.pop(request.rid, ()):
            at_s = max(read_s, self.ex.now_s) + follower.think_s
            self.run_.sent_s[follower.rid] = at_s
            heapq.heappush(self._arrivals, (at_s, i, follower))

    def _balance(self) -> None:
        ex, memory = self.ex, self.ex.memory
        taken = sum(memory.private_pages(r, r.kv_at(ex.decodes)) for r in ex.running.values())
        holders = {id(r): r for r in [*ex.prefilled, *([ex.chunked] if ex.chunked else [])] if not r.finished}
        taken += sum(memory.private_pages(r, r.kv_tokens) for r in holders.values())
        taken += sum(r.loading_pages for r in ex.waiting.values())
        memory.tree.check(taken)


def _read_s(times: NDArray[np.float64], rate_tok_s: float) -> float:
    """When the last token is shown: every token waits for its arrival and for the one before it."""
    if not len(times) or not math.isfinite(rate_tok_s):
        return float(times[-1]) if len(times) else 0.0
    left = np.arange(len(times) - 1, -1, -1) / rate_tok_s
    return float((times + left).max())
