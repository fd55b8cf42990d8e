"""A token-level engine for the policy's tests: pool, running set, waiting queue; no model, no sglang, a made-up clock.

Owns facts only, and speaks to the policy through the adapter's own Ledger, so that events come in the engine's order:
Applied, Tick, then Arrived, Emitted, Finished. Invariant: free + held + kept pages equal the pool after every verb.

One pass is SGLang's normal loop: the clock, arrivals, drive_step, a batch, its results. A batch is either a prefill
(while somebody was admitted) or one token for each running stream. What was prefilled joins the running set in the
NEXT pass, after the policy has looked. The token of an answer's end is hidden from the policy, as in the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace

from tokenflow_sgl.adapter.ledger import Ledger
from tokenflow_sgl.core.driver import check_plan, drive_step
from tokenflow_sgl.core.types import (
    Arrived,
    EngineView,
    Event,
    Phase,
    Plan,
    Policy,
    ReaderClass,
    RequestView,
    Rid,
    Tick,
)

Until = Callable[[], bool]
_IDLE_S = 0.01  # a pass in which nothing can run


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asks for. `rate_tok_s` is None for the default rate; `answer_tokens` is what it will really be."""

    rid: Rid
    prompt_tokens: int
    answer_tokens: int
    at_s: float = 0.0
    rate_tok_s: float | None = None
    reader: ReaderClass = ReaderClass.READER
    max_output_tokens: int | None = None
    priority: int = 0
    preemptible: bool = True


@dataclass(slots=True, eq=False)
class Req:
    """One request as the engine holds it, with the fields that the adapter's ledger reads."""

    job: Job
    rid: Rid
    output_ids: list[int] = field(default_factory=list)
    finished_reason: str | None = None
    tokenflow: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(gone=False, arrived=False))
    admitted: bool = False
    pages: int = 0  # held while prefilling or running
    kv_tokens: int = 0  # of these, written
    in_tree_tokens: int = 0  # published: kept when parked, on the device while there is room, else on the host
    kept_pages: int = 0  # parked or waiting: published pages still on the device, evictable
    target_tokens: int = 0  # context that the prefill under way has to reach

    @property
    def context_tokens(self) -> int:
        return self.job.prompt_tokens + len(self.output_ids)


@dataclass(slots=True)
class Record:
    """What happened, for assertions. Steps count passes; times are the stand-in's clock."""

    parks: list[tuple[int, float, Rid]] = field(default_factory=list)
    admissions: list[tuple[int, float, Rid]] = field(default_factory=list)  # first admissions and returns
    token_times: dict[Rid, list[float]] = field(default_factory=dict)
    token_steps: dict[Rid, list[int]] = field(default_factory=dict)
    token_decodes: dict[Rid, list[int]] = field(default_factory=dict)  # decode steps run before each token
    finished: dict[Rid, str] = field(default_factory=dict)
    retractions: list[tuple[int, Rid]] = field(default_factory=list)
    published_tokens: int = 0
    recomputed_tokens: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    plans: list[Plan] = field(default_factory=list)

    def parks_of(self, rid: Rid) -> list[int]:
        return [step for step, _, parked in self.parks if parked == rid]

    def returns_of(self, rid: Rid) -> list[int]:
        return [step for step, _, admitted in self.admissions if admitted == rid][1:]


class StandIn:
    """Executor and engine. `look(view, plan)` sees every step before it is carried out."""

    def __init__(
        self,
        policy: Policy,
        *,
        pool_tokens: int,
        page_tokens: int = 16,
        max_running: int = 64,
        chunk_tokens: int = 8192,
        step_s: float = 0.03,
        prefill_tok_s: float = 2000.0,
        load_tok_s: float = 100_000.0,
        journal: Callable[[Sequence[Event], EngineView, Plan], None] | None = None,
    ) -> None:
        self.policy = policy
        self.page_tokens = page_tokens
        self.total_pages = pool_tokens // page_tokens
        self.free_pages = self.total_pages
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.step_s, self.prefill_s, self.load_s = step_s, 1.0 / prefill_tok_s, 1.0 / load_tok_s
        self.journal = journal
        self.ledger = Ledger()
        self.now_s = 0.0
        self.steps = 0
        self.running: list[Req] = []
        self.last_prefill: list[Req] = []
        self.chunked: Req | None = None
        self.waiting: list[Req] = []
        self.jobs: list[Job] = []
        self.record = Record()
        self._order: tuple[Rid, ...] | None = None
        self._reserve_tokens: int | None = None
        self._prefill_tokens: int | None = None
        self._refused: list[Rid] = []
        self._busy = False
        self._last_tick_s: float | None = None

    # ---- memory

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    @property
    def holders(self) -> list[Req]:
        chunked = [self.chunked] if self.chunked is not None and self.chunked not in self.last_prefill else []
        return [*self.running, *self.last_prefill, *chunked]

    @property
    def evictable_pages(self) -> int:
        return sum(r.kept_pages for r in self.waiting)

    def check_memory(self) -> None:
        held = sum(r.pages for r in self.holders)
        total = self.free_pages + held + self.evictable_pages
        assert total == self.total_pages, f"{self.free_pages} free + {held} held + {self.evictable_pages} kept"
        for r in self.holders:
            assert r.finished_reason is not None or r.in_tree_tokens <= r.kv_tokens <= r.pages * self.page_tokens, r
        assert self.free_pages >= 0

    def _take(self, req: Req, pages: int) -> None:
        """Allocate, evicting what the longest parked keep on the device first; their KV stays on the host."""
        for other in self.waiting:
            if self.free_pages >= pages:
                break
            if other is not req:
                evicted = min(other.kept_pages, pages - self.free_pages)
                other.kept_pages -= evicted
                self.free_pages += evicted
        assert self.free_pages >= pages, f"{pages} pages wanted, {self.free_pages} free"
        self.free_pages -= pages
        req.pages += pages

    def _give_back(self, req: Req, *, keep_published: bool) -> None:
        kept = req.in_tree_tokens // self.page_tokens if keep_published else 0
        self.free_pages += req.pages - kept
        req.kept_pages, req.pages, req.kv_tokens = kept, 0, 0

    # ---- the Executor: views

    def view(self) -> EngineView:
        return EngineView(
            now_s=self.ledger.now_s,
            waiting=len(self.waiting),
            running=len(self.running),
            device_free_tokens=(self.free_pages + self.evictable_pages) * self.page_tokens,
            device_total_tokens=self.total_pages * self.page_tokens,
            host_free_tokens=1 << 30,
            max_running=self.max_running,
            page_tokens=self.page_tokens,
            promised_tokens=0 if self.chunked is None else self.chunked.target_tokens - self.chunked.kv_tokens,
            build=self._requests,
        )

    def _requests(self) -> list[RequestView]:
        views = [self._view(r, Phase.RUNNING) for r in self.running if r.finished_reason is None]
        unmerged = [r for r in self.last_prefill if r.finished_reason is None]
        if self.chunked is not None and self.chunked not in unmerged:
            unmerged.append(self.chunked)
        views += [self._view(r, Phase.PREFILL) for r in unmerged]
        views += [self._view(r, Phase.PARKED if r.output_ids else Phase.WAITING) for r in self.waiting]
        return views

    def _view(self, r: Req, phase: Phase) -> RequestView:
        away = phase in (Phase.WAITING, Phase.PARKED)
        cached = r.kept_pages * self.page_tokens if away else 0
        takes = r.context_tokens if away else r.target_tokens - r.kv_tokens if r is self.chunked else 0
        limit = r.job.max_output_tokens or r.job.answer_tokens
        return RequestView(
            rid=r.rid,
            phase=phase,
            context_tokens=r.context_tokens,
            published_tokens=r.in_tree_tokens,
            copying_tokens=0,
            frees_tokens=r.pages * self.page_tokens if phase is Phase.RUNNING else 0,
            cached_tokens=cached,
            host_hit_tokens=r.in_tree_tokens - cached if away else 0,
            takes_tokens=takes,
            output_tokens=len(r.output_ids),
            max_output_tokens=limit,
            preemptible=phase is Phase.RUNNING and r.job.preemptible and len(r.output_ids) + 1 < limit,
            priority=r.job.priority,
        )

    # ---- the Executor: verbs

    def park(self, rid: Rid) -> bool:
        req = next((r for r in self.running if r.rid == rid and r.finished_reason is None), None)
        if req is None or not req.output_ids:
            return False
        self.running.remove(req)
        self._give_back(req, keep_published=True)
        self._requeue(req)
        self.record.parks.append((self.steps, self.now_s, rid))
        self.check_memory()
        return True

    def _requeue(self, req: Req) -> None:
        req.admitted = False
        self.waiting.append(req)
        self.ledger.parked.append(req.rid)

    def publish(self, rid: Rid, up_to: int) -> int:
        req = next((r for r in self.running if r.rid == rid and r.finished_reason is None), None)
        accepted = 0
        if req is not None:
            whole = min(up_to, req.kv_tokens) // self.page_tokens * self.page_tokens
            if whole > req.in_tree_tokens:
                self.record.published_tokens += whole - req.in_tree_tokens
                req.in_tree_tokens, accepted = whole, min(up_to, req.kv_tokens)
        self.ledger.published.append((rid, accepted))
        self.check_memory()
        return accepted

    def admit(self, order: Sequence[Rid] | None, *, reserve_tokens: int | None, prefill_tokens: int | None) -> None:
        self._order = None if order is None else tuple(order)
        self._reserve_tokens, self._prefill_tokens = reserve_tokens, prefill_tokens
        self._refused = []

    # ---- the engine's pass

    def step(self) -> None:
        self._ingest()
        plan = drive_step(self.policy, self, self.ledger.drain(), self._see)
        self.record.plans.append(plan)
        self.running = [r for r in self.running if r.finished_reason is None]
        self.running += [r for r in self.last_prefill if r.finished_reason is None and r is not self.chunked]
        self.last_prefill = []
        batch, admitted, prefill_tokens, loaded_tokens = self._prefill_batch()
        if batch:
            self.last_prefill = batch
        else:
            batch = self._decode_batch()
        self.ledger.applied(admitted, self._refused, prefill_tokens, 0 if prefill_tokens else len(batch))
        self._run(batch, prefill_tokens, loaded_tokens)
        self.steps += 1
        self.check_memory()

    def _see(self, events: Sequence[Event], view: EngineView, plan: Plan) -> None:
        if self.journal is not None:
            self.journal(events, view, plan)
        # Legality looks at all requests; the policy that did not ask must be seen not to have asked.
        looked = replace(view) if view.built is None else view
        problems = check_plan(looked, plan)
        assert not problems, f"step {self.steps}: {problems} in {plan}\n" + "\n".join(map(str, looked.requests()))

    def _ingest(self) -> None:
        if self._busy or self.waiting or self.running:
            step_s = self.now_s - self._last_tick_s if self._busy and self._last_tick_s is not None else None
            self._last_tick_s = self.now_s
            self.ledger.tick(Tick(self.now_s, step_s))
        else:
            self._last_tick_s = None
        for job in [j for j in self.jobs if j.at_s <= self.now_s]:
            self.jobs.remove(job)
            req = Req(job, job.rid)
            req.tokenflow.arrived = True
            self.waiting.append(req)
            limit = job.max_output_tokens or job.answer_tokens
            self.ledger.arrived(Arrived(job.rid, job.prompt_tokens, limit, job.reader, job.rate_tok_s), req)

    def _prefill_batch(self) -> tuple[list[Req], list[tuple[Rid, int, int]], int, int]:
        """Upstream's prefill in the plan's order: ends at the first that does not fit; the chunk cuts at most one."""
        if self._prefill_tokens == 0 and self.running:
            return [], [], 0, 0
        budget = (self.free_pages + self.evictable_pages) * self.page_tokens - (self._reserve_tokens or 0)
        cap = self.chunk_tokens if self._prefill_tokens is None else min(self.chunk_tokens, self._prefill_tokens)
        left = cap
        batch: list[Req] = []
        admitted: list[tuple[Rid, int, int]] = []
        loaded_tokens = 0
        if self.chunked is not None:
            req = self.chunked
            # Upstream: no more than is free, but a whole chunk where the reservation leaves nothing: it must go on.
            limit = min(left, budget) if budget > 0 else left
            left -= self._compute(req, min(limit, req.target_tokens - req.kv_tokens))
            batch.append(req)
            budget = (self.free_pages + self.evictable_pages) * self.page_tokens - (self._reserve_tokens or 0)
            self.chunked = req if req.kv_tokens < req.target_tokens else None
        by_rid = {r.rid: r for r in self.waiting}
        order = [r.rid for r in self.waiting] if self._order is None else self._order
        for req in (by_rid[rid] for rid in order if rid in by_rid):
            cached = req.kept_pages * self.page_tokens
            need = req.context_tokens - cached + self.page_tokens
            if self._order is None:  # the engine's own admission looks at the whole remaining answer
                need += (req.job.max_output_tokens or req.job.answer_tokens) - len(req.output_ids)
            if need >= budget - cached:
                self._refused.append(req.rid)
                break
            extend = req.context_tokens - req.in_tree_tokens
            cut = extend > left
            if left < self.page_tokens or (cut and self.chunked is not None):
                break
            if len(self.running) + len(batch) >= self.max_running:
                break
            budget -= need + cached
            self.waiting.remove(req)
            loaded = req.in_tree_tokens - cached
            req.pages, req.kept_pages = req.kept_pages, 0
            req.target_tokens = req.context_tokens
            req.kv_tokens = cached
            self._take(req, self.pages(req.in_tree_tokens) - req.pages)
            req.kv_tokens = req.in_tree_tokens
            computed = self._compute(req, left // self.page_tokens * self.page_tokens if cut else extend)
            left -= computed
            loaded_tokens += loaded
            if req.output_ids:
                self.record.recomputed_tokens += computed
            if cut:
                self.chunked = req
            batch.append(req)
            req.admitted = True
            admitted.append((req.rid, computed, loaded))
            self.record.admissions.append((self.steps, self.now_s, req.rid))
        return batch, admitted, cap - left, loaded_tokens

    def _compute(self, req: Req, tokens: int) -> int:
        """Prefill `tokens` more of `req`; what is computed is published, in whole pages."""
        self._take(req, self.pages(req.kv_tokens + tokens) - req.pages)
        req.kv_tokens += tokens
        req.in_tree_tokens = req.kv_tokens // self.page_tokens * self.page_tokens
        return tokens

    def _decode_batch(self) -> list[Req]:
        """One more token each. The engine retracts when memory runs out, and forgets the unpublished KV."""
        while self.running:
            wanted = sum(r.kv_tokens == r.pages * self.page_tokens for r in self.running)
            if wanted <= self.free_pages + self.evictable_pages:
                break
            victim = min(self.running, key=lambda r: len(r.output_ids))
            if len(self.running) == 1:
                victim.finished_reason = "abort"  # nothing is left to retract: the pool is its own
                self._give_back(victim, keep_published=False)
                self.running = []
                self.record.finished[victim.rid] = "abort"
                self.ledger.finished(victim)
                return []
            self.running.remove(victim)
            self._give_back(victim, keep_published=True)
            self._requeue(victim)
            self.record.retractions.append((self.steps, victim.rid))
        for r in self.running:
            if r.kv_tokens == r.pages * self.page_tokens:
                self._take(r, 1)
            r.kv_tokens += 1
        return list(self.running)

    def _run(self, batch: list[Req], prefill_tokens: int, loaded_tokens: int) -> None:
        if not batch:
            self._busy = False
            self.now_s += _IDLE_S
            return
        self._busy = True
        if prefill_tokens:
            self.record.prefill_steps += 1
            self.now_s += max(self.step_s, prefill_tokens * self.prefill_s) + loaded_tokens * self.load_s
        else:
            self.record.decode_steps += 1
            self.now_s += self.step_s
        for req in batch:
            if req is self.chunked:
                continue
            req.output_ids.append(len(req.output_ids))
            self.record.token_times.setdefault(req.rid, []).append(self.now_s)
            self.record.token_steps.setdefault(req.rid, []).append(self.steps)
            self.record.token_decodes.setdefault(req.rid, []).append(self.record.decode_steps)
            if len(req.output_ids) >= req.job.answer_tokens:
                req.finished_reason = "stop"
                self.record.finished[req.rid] = "stop"
                self._give_back(req, keep_published=False)
        self.ledger.emitted(batch)

    # ---- driving

    def run(
        self, jobs: Iterable[Job] = (), *, max_steps: int = 20_000, until: Callable[[], bool] | None = None
    ) -> Record:
        """Until everything ended (or `until`); AssertionError after `max_steps` passes, which is a hang."""
        self.jobs = sorted([*self.jobs, *jobs], key=lambda j: j.at_s)
        for _ in range(max_steps):
            if until() if until is not None else not (self.jobs or self.waiting or self.holders):
                return self.record
            self.step()
        raise AssertionError(
            f"not done after {max_steps} steps: waiting {[r.rid for r in self.waiting]}, {self.holders}"
        )


def dry_s(times: Sequence[float], rate_tok_s: float) -> float:
    """Seconds that a paced reader had nothing to read: token j is due 1/R after the one before was shown."""
    shown, total = times[0], 0.0
    for at_s in times[1:]:
        total += max(0.0, at_s - (shown + 1.0 / rate_tok_s))
        shown = max(at_s, shown + 1.0 / rate_tok_s)
    return total


class Pure:
    """A policy that is asked twice, and compared with its own copy: `plan` must change nothing and say the same."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def observe(self, event: Event) -> None:
        self.policy.observe(event)

    def plan(self, view: EngineView) -> Plan:
        before = copy.deepcopy(self.policy)
        plan = self.policy.plan(view)
        assert self.policy.plan(view) == plan
        assert state_of(before) == state_of(self.policy)
        assert before.plan(view) == plan
        return plan


def state_of(value: object) -> object:
    """Everything that an object is made of, comparable: dataclasses, slots, dicts and deques by content."""
    if isinstance(value, dict):
        return {k: state_of(v) for k, v in value.items()}
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *sorted(map(repr, value))]
    if isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        return [type(value).__name__, *(state_of(v) for v in value)]
    if not type(value).__module__.startswith("tokenflow_sgl") or isinstance(value, Enum) or callable(value):
        return value
    names = [n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ())]
    names += list(getattr(value, "__dict__", {}))
    return [type(value).__name__, *((n, state_of(getattr(value, n))) for n in names if hasattr(value, n))]
