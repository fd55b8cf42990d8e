"""A token-level engine for the policy's tests: pool, host, running set, waiting queue; no model, no sglang, a made-up
clock.

Owns facts only, and speaks to the policy through the adapter's own Ledger, so that events come in the engine's order:
Applied, Tick, then Arrived, Emitted, Finished. Invariant: free + held + kept + loading pages equal the pool after every
verb, and what live requests have on the host fits it.

One pass is SGLang's normal loop: the clock, arrivals, drive_step, a batch, its results. A batch is either a prefill
(while somebody was admitted) or one token for each running stream. What was prefilled joins the running set in the
NEXT pass, after the policy has looked. The token of an answer's end is hidden from the policy, as in the engine.

A request's KV, from its first token on:

    |-- backed --|-- storing --|-- refused by the host --|-- tail --|
    |-- in_tree (published) -----------------------------|          |
    |-- kv, while it holds pages -----------------------------------|
    |-- kept, while it waits ---------|                                 on the device; evicted from its end

Each direction has one link, on which copies follow each other. A stream with an open store keeps its published pages
when parked; pages kept by one that waits can be evicted, unless a store of them is open or they were loaded for it.
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
    tokenflow: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(parent=None, gone=False, arrived=False))
    admitted: bool = False
    pages: int = 0  # held while prefilling or running
    kv_tokens: int = 0  # of these, written
    in_tree_tokens: int = 0  # published: kept when parked, on the device while there is room, else on the host
    kept_pages: int = 0  # parked or waiting: published pages still on the device
    backed_tokens: int = 0  # on the host, with no copy open
    storing_tokens: int = 0  # the copy to the host that is open
    load: Load | None = None  # the copy back under way
    held_tokens: int = 0  # loaded back for it; then its kept pages stay
    target_tokens: int = 0  # context that the prefill under way has to reach

    @property
    def context_tokens(self) -> int:
        return self.job.prompt_tokens + len(self.output_ids)

    @property
    def evictable_pages(self) -> int:
        return 0 if self.storing_tokens or self.load is not None or self.held_tokens else self.kept_pages


@dataclass(slots=True, eq=False)
class Load:
    """One shared copy back. `pages` of each request are taken on the device already."""

    pages: dict[Rid, int]
    seconds: float
    done_s: float


@dataclass(slots=True, eq=False)
class Store:
    """One copy to the host."""

    req: Req
    tokens: int
    seconds: float
    done_s: float


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
    publish_s: float = 0.0  # time of the engine's thread that publishing took
    park_tokens: list[tuple[int, int]] = field(default_factory=list)  # at each park: whole pages written, and backed
    loads: list[tuple[int, float, tuple[Rid, ...]]] = field(default_factory=list)  # shared copies back, as they start
    loaded_tokens: int = 0
    unloaded: list[tuple[int, Rid]] = field(default_factory=list)
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
        store_tok_s: float = 100_000.0,
        publish_s: Callable[[int], float] = lambda context_tokens: 0.0,
        host_tokens: int = 1 << 30,
        host_ok: Callable[[float], bool] = lambda now_s: True,
        load_slots: int = 3,
        load_fails: Callable[[Rid, float], bool] = lambda rid, now_s: False,
        copies: str = "ahead",
        loads: str = "ahead",
        journal: Callable[[Sequence[Event], EngineView, Plan], None] | None = None,
    ) -> None:
        self.policy = policy
        self.page_tokens = page_tokens
        self.total_pages = pool_tokens // page_tokens
        self.free_pages = self.total_pages
        self.max_running = max_running
        self.chunk_tokens = chunk_tokens
        self.step_s, self.prefill_s, self.load_s = step_s, 1.0 / prefill_tok_s, 1.0 / load_tok_s
        self.store_s, self.publish_cost_s = 1.0 / store_tok_s, publish_s
        self.host_tokens, self.host_ok = host_tokens, host_ok
        self.load_slots, self.load_fails = load_slots, load_fails
        self.copies, self.loads_mode = copies, loads
        self.stores: list[Store] = []
        self.loads: list[Load] = []
        self._store_link_s = self._load_link_s = 0.0  # when each link is free again
        self._timings: dict[str, list[tuple[int, float]]] = {"stores_s": [], "loads_s": [], "publishes_s": []}
        self._publish_s = 0.0  # in this pass
        self.journal = journal
        self.ledger = Ledger()
        self.now_s = 0.0
        self.steps = 0
        self.running: list[Req] = []
        self.last_prefill: list[Req] = []
        self.chunked: Req | None = None
        self.waiting: list[Req] = []
        self.live: list[Req] = []
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
        return sum(r.evictable_pages for r in self.waiting)

    @property
    def host_used_tokens(self) -> int:
        return sum(r.backed_tokens + r.storing_tokens for r in self.live if r.finished_reason is None)

    def check_memory(self) -> None:
        held = sum(r.pages for r in self.holders)
        kept = sum(r.kept_pages for r in self.waiting)
        loading = sum(sum(load.pages.values()) for load in self.loads)
        total = self.free_pages + held + kept + loading
        assert total == self.total_pages, f"{self.free_pages} free + {held} held + {kept} kept + {loading} loading"
        assert self.host_used_tokens <= self.host_tokens, f"{self.host_used_tokens} of {self.host_tokens} on the host"
        for r in self.holders:
            assert r.finished_reason is not None or r.in_tree_tokens <= r.kv_tokens <= r.pages * self.page_tokens, r
            assert r.load is None and not r.held_tokens, r
        for r in self.waiting:
            assert r.kept_pages * self.page_tokens <= r.in_tree_tokens, r
            assert r.load is None or (r.load in self.loads and r.rid in r.load.pages), r
        assert self.free_pages >= 0

    def _take(self, req: Req, pages: int) -> None:
        """Allocate, evicting what the longest parked keep on the device first."""
        self._evict(pages, but=req)
        self.free_pages -= pages
        req.pages += pages

    def _evict(self, pages: int, *, but: Req | None = None) -> None:
        for other in self.waiting:
            if self.free_pages >= pages:
                break
            if other is not but:
                evicted = min(other.evictable_pages, pages - self.free_pages)
                other.kept_pages -= evicted
                self.free_pages += evicted
                # What is on neither tier is lost.
                kept = other.kept_pages * self.page_tokens
                other.in_tree_tokens = min(other.in_tree_tokens, max(kept, other.backed_tokens))
        assert self.free_pages >= pages, f"{pages} pages wanted, {self.free_pages} free"

    def _give_back(self, req: Req, *, keep_published: bool) -> None:
        kept = req.in_tree_tokens // self.page_tokens if keep_published else 0
        self.free_pages += req.pages - kept
        req.kept_pages, req.pages, req.kv_tokens = kept, 0, 0

    # ---- copies

    def _store(self, req: Req) -> None:
        """Publishing starts the copy of what the host does not have; the host takes what fits, in whole pages."""
        room = (self.host_tokens - self.host_used_tokens) // self.page_tokens * self.page_tokens
        tokens = min(req.in_tree_tokens - req.backed_tokens - req.storing_tokens, room)
        if tokens <= 0 or not self.host_ok(self.now_s):
            return
        req.storing_tokens += tokens
        seconds = tokens * self.store_s
        self._store_link_s = max(self._store_link_s, self.now_s) + seconds
        self.stores.append(Store(req, tokens, seconds, self._store_link_s))

    def _finish_stores(self) -> None:
        for store in [x for x in self.stores if x.done_s <= self.now_s]:
            self.stores.remove(store)
            store.req.storing_tokens -= store.tokens
            if store.req.finished_reason is None:
                store.req.backed_tokens += store.tokens
            self._timings["stores_s"].append((store.tokens, store.seconds))

    def load(self, rids: Sequence[Rid]) -> Sequence[Rid]:
        """All in one transfer, behind those under way. Who finds no memory does not start."""
        assert len(self.loads) < self.load_slots, "no slot is free"
        by_rid = {r.rid: r for r in self.waiting}
        shared = Load({}, 0.0, 0.0)
        for req in (by_rid[rid] for rid in rids):
            pages = self.pages(self._host_hit(req))
            others = self.free_pages + self.evictable_pages - req.evictable_pages
            if not pages or pages > others:
                self._unload(req)
                continue
            self._evict(pages, but=req)
            self.free_pages -= pages
            shared.pages[req.rid] = pages
            req.load = shared
        if shared.pages:
            tokens = sum(shared.pages.values()) * self.page_tokens
            shared.seconds = tokens * self.load_s
            shared.done_s = self._load_link_s = max(self._load_link_s, self.now_s) + shared.seconds
            self.loads.append(shared)
            self.record.loads.append((self.steps, self.now_s, tuple(shared.pages)))
        self.check_memory()
        return tuple(shared.pages)

    def _host_hit(self, req: Req) -> int:
        if not self.host_ok(self.now_s):
            return 0
        return max(0, min(req.backed_tokens, req.in_tree_tokens) - req.kept_pages * self.page_tokens)

    def _unload(self, req: Req) -> None:
        self.ledger.unloaded.append(req.rid)
        self.record.unloaded.append((self.steps, req.rid))

    def _finish_loads(self) -> None:
        by_rid = {r.rid: r for r in self.waiting}
        for load in [x for x in self.loads if x.done_s <= self.now_s]:
            self.loads.remove(load)
            for rid, pages in load.pages.items():
                req = by_rid[rid]
                req.load = None
                if self.load_fails(rid, self.now_s):
                    self.free_pages += pages
                    self._unload(req)
                    continue
                req.kept_pages += pages
                req.held_tokens = pages * self.page_tokens
                self.record.loaded_tokens += req.held_tokens
                self.ledger.loaded.append((rid, req.held_tokens))
            self._timings["loads_s"].append((sum(load.pages.values()) * self.page_tokens, load.seconds))

    # ---- the Executor: views

    def view(self) -> EngineView:
        return EngineView(
            now_s=self.ledger.now_s,
            waiting=len(self.waiting),
            running=len(self.running),
            device_free_tokens=(self.free_pages + self.evictable_pages) * self.page_tokens,
            device_total_tokens=self.total_pages * self.page_tokens,
            host_free_tokens=self.host_tokens - self.host_used_tokens,
            host_total_tokens=self.host_tokens,
            host_ok=self.host_ok(self.now_s),
            storing_tokens=sum(store.tokens for store in self.stores),
            load_slots=self.load_slots - len(self.loads),
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
        views += [self._view(r, self._away(r)) for r in self.waiting]
        return views

    def _away(self, r: Req) -> Phase:
        if r.load is not None:
            return Phase.LOADING
        return Phase.PARKED if r.output_ids else Phase.WAITING

    def _view(self, r: Req, phase: Phase) -> RequestView:
        page = self.page_tokens
        away = phase in (Phase.WAITING, Phase.PARKED, Phase.LOADING)
        cached = r.kept_pages * page if away else 0
        takes = r.context_tokens if away else r.target_tokens - r.kv_tokens if r is self.chunked else 0
        if r.load is not None:
            takes -= cached + r.load.pages[r.rid] * page
        elif r.held_tokens:
            takes -= cached
        frees = r.pages - (r.in_tree_tokens // page if r.storing_tokens else 0) if phase is Phase.RUNNING else 0
        limit = r.job.max_output_tokens or r.job.answer_tokens
        return RequestView(
            rid=r.rid,
            phase=phase,
            context_tokens=r.context_tokens,
            published_tokens=r.in_tree_tokens,
            copying_tokens=r.storing_tokens,
            backed_tokens=min(r.backed_tokens, r.in_tree_tokens),
            frees_tokens=frees * page,
            cached_tokens=cached,
            host_hit_tokens=self._host_hit(r) if away and r.load is None and not r.held_tokens else 0,
            held_tokens=r.held_tokens,
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
        page = self.page_tokens
        self.record.park_tokens.append((req.kv_tokens // page * page, req.backed_tokens))
        if self.copies == "at_park":
            req.in_tree_tokens = req.kv_tokens // page * page
            self._store(req)
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
                if self.copies == "ahead":
                    self._store(req)
            seconds = self.publish_cost_s(req.context_tokens)
            self._publish_s += seconds
            self._timings["publishes_s"].append((req.context_tokens, seconds))
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
        self._finish_loads()
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
        self._finish_stores()
        if self._busy or self.waiting or self.running:
            step_s = self.now_s - self._last_tick_s if self._busy and self._last_tick_s is not None else None
            self._last_tick_s = self.now_s
            self.ledger.tick(Tick(self.now_s, step_s, **{k: tuple(v) for k, v in self._timings.items()}))
            for samples in self._timings.values():
                samples.clear()
        else:
            self._last_tick_s = None
        for job in [j for j in self.jobs if j.at_s <= self.now_s]:
            self.jobs.remove(job)
            req = Req(job, job.rid)
            req.tokenflow.arrived = True
            self.waiting.append(req)
            self.live = [*(r for r in self.live if r.finished_reason is None), req]
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
            if req.load is not None:
                continue
            cached = req.kept_pages * self.page_tokens
            need = req.context_tokens - cached + self.page_tokens
            if self._order is None:  # the engine's own admission looks at the whole remaining answer
                need += (req.job.max_output_tokens or req.job.answer_tokens) - len(req.output_ids)
            locks = req.evictable_pages * self.page_tokens
            if need >= budget - locks:
                self._refused.append(req.rid)
                break
            # To copy back inside admission is upstream's way; where loads are ahead, what is missing is computed.
            loaded = self._host_hit(req) if self.loads_mode == "at_admission" and not req.held_tokens else 0
            extend = req.context_tokens - cached - loaded
            cut = extend > left
            if left < self.page_tokens or (cut and self.chunked is not None):
                break
            if len(self.running) + len(batch) >= self.max_running:
                break
            budget -= need + locks
            self.waiting.remove(req)
            req.pages, req.kept_pages, req.held_tokens = req.kept_pages, 0, 0
            req.target_tokens = req.context_tokens
            self._take(req, self.pages(loaded))
            req.kv_tokens = req.in_tree_tokens = cached + loaded
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
        if self.copies == "ahead":
            self._store(req)
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
        self.now_s += self._publish_s
        self.record.publish_s += self._publish_s
        self._publish_s = 0.0
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
                req.backed_tokens = 0
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
