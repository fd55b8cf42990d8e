"""The simulated engine behind the policy's seam: views and verbs.

Owns who runs, prefills and waits. Decides nothing; forms no batch (batch.py does). Invariant: as in the real engine, a
verb that refuses changed nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.types import Applied, EngineView, Event, Phase, RequestView, Rid
from .memory import Memory
from .requests import SimRequest
from .settings import EngineSettings
from .timing import TimingModel
from .tree import Node


@dataclass(slots=True)
class Outcome:
    """What the plan under way came to, for the policy's next step."""

    admitted: list[tuple[Rid, int, int]] = field(default_factory=list)
    parked: list[Rid] = field(default_factory=list)
    published: list[tuple[Rid, int]] = field(default_factory=list)
    refused: list[Rid] = field(default_factory=list)
    loaded: list[tuple[Rid, int]] = field(default_factory=list)

    def applied(self, *, prefill_tokens: int, decoding: int) -> Applied:
        return Applied(
            admitted=tuple(self.admitted), parked=tuple(self.parked), published=tuple(self.published),
            refused=tuple(self.refused), loaded=tuple(self.loaded),
            prefill_tokens=prefill_tokens, decoding=decoding,
        )  # fmt: skip


@dataclass(slots=True)
class Counters:
    parks: int = 0
    returns: int = 0
    retractions: int = 0
    recomputed_tokens: int = 0
    loads: int = 0  # requests whose KV came back by a copy
    loaded_tokens: int = 0
    parked_tokens: int = 0
    parked_on_host_tokens: int = 0
    prefill_steps: int = 0
    decode_steps: int = 0
    publish_s: float = 0.0


class SimExecutor:
    """Implements core.types.Executor. Streams that decode are counted, not visited, from step to step."""

    def __init__(self, settings: EngineSettings, timing: TimingModel, memory: Memory) -> None:
        self.settings, self.timing, self.memory = settings, timing, memory
        self.page = settings.page_tokens
        self.now_s = 0.0
        self.events: list[Event] = []
        self.outcome = Outcome()
        self.counters = Counters()
        self.running: dict[Rid, SimRequest] = {}
        self.prefilled: list[SimRequest] = []  # of the last step: they join those who run at the next
        self.chunked: SimRequest | None = None
        self.waiting: dict[Rid, SimRequest] = {}
        self.decodes = 0  # decode steps so far
        self.context_tokens = 0  # KV of all that run
        self.opens = [0] * self.page  # by phase: how many open a page at decode steps of that phase
        self.ends: list[tuple[int, int, SimRequest]] = []  # (decode steps at its end, seq, request)
        self.members = 0  # changes when somebody joins or leaves those who run
        self.order: tuple[Rid, ...] | None = None
        self.reserve_tokens: int | None = None
        self.prefill_tokens: int | None = None
        self.rode_along = False  # those who run decoded beside a prompt in the last step
        self.publish_s = 0.0  # of the engine's thread in this step
        self.publishes_s: list[tuple[int, float]] = []
        self._seq = 0
        self._kept: list[SimRequest] = []
        self._watchers: dict[Node, dict[Rid, SimRequest]] = {}

    # ---- those who run

    def join(self, req: SimRequest) -> None:
        self._seq += 1
        req.joined_ct, req.admitted_seq = self.decodes, self._seq
        self.running[req.rid] = req
        kv = req.kv_at(self.decodes)
        self.context_tokens += kv
        self.opens[(kv - self.decodes) % self.page] += 1
        left = req.answer_tokens - req.output_tokens
        heapq.heappush(self.ends, (self.decodes + left, self._seq, req))
        self.members += 1

    def leave(self, req: SimRequest) -> int:
        """Out of those who run; its KV tokens. Its memory is the caller's to give back."""
        assert req.joined_ct is not None
        kv = req.kv_at(self.decodes)
        del self.running[req.rid]
        self.context_tokens -= kv
        self.opens[(kv - self.decodes) % self.page] -= 1
        if self.decodes > req.joined_ct:
            req.spans.append((req.joined_ct, self.decodes))
        req.output_tokens, req.joined_ct = req.output_at(self.decodes), None
        self.members += 1
        return kv

    def opening_pages(self) -> int:
        """Pages that the next decode step takes."""
        return self.opens[-self.decodes % self.page]

    # ---- views

    def view(self) -> EngineView:
        tree, memory, s = self.memory.tree, self.memory, self.settings
        chunked = self.chunked
        return EngineView(
            now_s=self.now_s,
            waiting=len(self.waiting),
            running=len(self.running),
            device_free_tokens=memory.free_tokens,
            device_total_tokens=tree.device_pages * self.page,
            host_free_tokens=tree.host_free_pages * self.page,
            host_total_tokens=tree.host_pages * self.page,
            host_ok=True,
            storing_tokens=memory.storing_pages * self.page,
            load_slots=s.load_slots - len(memory.loads) if s.copies != "none" else 0,
            max_running=s.max_running,
            page_tokens=self.page,
            promised_tokens=0 if chunked is None else chunked.target_tokens - chunked.kv_tokens,
            build=self._requests,
        )

    def _requests(self) -> list[RequestView]:
        self._forget_what_changed()
        views = self._running()
        unmerged = [r for r in self.prefilled if not r.finished]
        if self.chunked is not None and self.chunked not in unmerged:
            unmerged.append(self.chunked)
        views += [self._unmerged(r) for r in unmerged]
        # The view of before, while nothing on its path changed: most of those that wait, wait for long.
        views += [r.view or self._waiting(r) for r in self.waiting.values()]
        return views

    def _running(self) -> list[RequestView]:
        """Spelled out: in each step that is looked at, hundreds are."""
        decodes, page, alone, phase = self.decodes, self.page, not self.rode_along, Phase.RUNNING
        views: list[RequestView] = []
        for r in self.running.values():
            assert r.joined_ct is not None
            output = r.output_tokens + decodes - r.joined_ct
            context, limit, pages = r.prompt_tokens + output, r.max_tokens, r.in_tree_pages
            own, backed, copying = r.derived or self._derive(r)
            frees = (-((1 - context) // page) - pages) * page + own  # KV of the newest token is not written yet
            views.append(RequestView(
                r.rid, phase, context, pages * page, copying, backed, frees,
                0, 0, 0, 0, output, limit, alone and output + 1 < limit, r.priority,
            ))  # fmt: skip
        return views

    def _derive(self, r: SimRequest) -> tuple[int, int, int]:
        tree = self.memory.tree
        backed, copying = tree.backed_pages(r.path)
        r.derived = (
            tree.own_pages(r.path) * self.page, min(backed, r.in_tree_pages) * self.page, copying * self.page
        )  # fmt: skip
        return r.derived

    def watch(self, r: SimRequest) -> None:
        """It is live: what is known of it is forgotten when its path changes."""
        for node in r.path:
            self._watchers.setdefault(node, {})[r.rid] = r

    def forget(self, r: SimRequest) -> None:
        for node in r.path:
            watchers = self._watchers[node]
            del watchers[r.rid]
            if not watchers:
                del self._watchers[node]

    def _forget_what_changed(self) -> None:
        for node in self.memory.tree.touched:
            for r in self._watchers.get(node, {}).values():
                r.view = r.derived = None
        self.memory.tree.touched.clear()

    def _unmerged(self, r: SimRequest) -> RequestView:
        left = r.target_tokens - r.kv_tokens if r is self.chunked else 0
        return RequestView(
            r.rid, Phase.PREFILL, r.prompt_tokens + r.output_tokens, r.in_tree_pages * self.page, 0, 0,
            0, 0, 0, 0, left, r.output_tokens, r.max_tokens, False, r.priority,
        )  # fmt: skip

    def _waiting(self, r: SimRequest) -> RequestView:
        context = r.prompt_tokens + r.output_tokens
        tree, page = self.memory.tree, self.page
        device, host = self.memory.hit_pages(r, context)
        if self.settings.copies == "none":
            host = 0
        phase = Phase.LOADING if r.loading else Phase.PARKED if r.output_tokens else Phase.WAITING
        takes = context - tree.held_pages(r.path) * page
        if r.loading:
            takes = context - (device + r.loading_pages) * page
        r.view = RequestView(
            r.rid, phase, context, (device + host) * page, 0, host * page, 0, device * page,
            0 if r.loading or r.held_pages else host * page, r.held_pages * page, max(0, takes),
            r.output_tokens, r.max_tokens, False, r.priority,
        )  # fmt: skip
        return r.view

    # ---- verbs

    def park(self, rid: Rid) -> bool:
        req = self.running.get(rid)
        if req is None or req.output_at(self.decodes) == 0:
            return False
        kv = self.leave(req)
        memory = self.memory
        self.counters.parks += 1
        self.counters.parked_tokens += kv // self.page * self.page
        if self.settings.copies == "at_park":
            memory.put_in_tree(req, kv)
            memory.store(req)
        self.counters.parked_on_host_tokens += memory.tree.backed_pages(req.path)[0] * self.page
        self.requeue(req, kv)
        return True

    def requeue(self, req: SimRequest, kv_tokens: int) -> None:
        self.memory.leave(req, kv_tokens, parked=True)
        self.waiting[req.rid] = req
        self.outcome.parked.append(req.rid)

    def publish(self, rid: Rid, up_to: int) -> int:
        req, accepted = None if self.rode_along else self.running.get(rid), 0
        if req is not None:
            kv = req.kv_at(self.decodes)
            up_to = min(up_to, kv)
            if up_to // self.page > req.in_tree_pages:
                self.memory.put_in_tree(req, up_to)
                accepted = up_to
                if self.settings.copies == "ahead":
                    self.memory.store(req)
                seconds = self.timing.publish_s(up_to) if self.settings.inserts else 0.0
                self.publish_s += seconds
                self.publishes_s.append((up_to, seconds))
        self.outcome.published.append((rid, accepted))
        return accepted

    def load(self, rids: Sequence[Rid]) -> Sequence[Rid]:
        reqs = [self.waiting[rid] for rid in rids if rid in self.waiting]
        started = self.memory.load(reqs, [r.prompt_tokens + r.output_tokens for r in reqs])
        return [r.rid for r in started]  # the others find no memory, and are asked for again

    def admit(self, order: Sequence[Rid] | None, *, reserve_tokens: int | None, prefill_tokens: int | None) -> None:
        self.order = None if order is None else tuple(order)
        self.reserve_tokens, self.prefill_tokens = reserve_tokens, prefill_tokens
        for rid in order or ():
            req = self.waiting.get(rid)
            # Whoever comes in first would else evict what the plan counts on for those behind.
            if req is not None and req.loading is None and self.memory.hit_pages(req, req.prompt_tokens)[0]:
                self.memory.tree.lock(req.path)
                self._kept.append(req)

    def batch_formed(self, *, empty: bool) -> None:
        """In an empty engine what was loaded for others must not keep out who is let in: adapter/kv.py, make_way."""
        if empty and not self.running and self.outcome.refused:
            for req in self.waiting.values():
                if req.held_pages and req.rid != self.outcome.refused[0]:
                    self.memory.tree.unlock(req.path)
                    req.held_pages, req.view = 0, None
        for req in self._kept:
            self.memory.tree.unlock(req.path)
        self._kept.clear()
