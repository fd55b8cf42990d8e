"""The engine behind the policy's seam: the only reader and writer of the scheduler's state.

Owns verbs and views; decides nothing. Invariant: a verb that refuses leaves everything as it was.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.common import release_kv_cache

from ..core.types import EngineView, Phase, RequestView, Rid
from . import state_report
from .admission import Admission
from .kv import HostTier
from .ledger import Ledger
from .request_state import parkable_now

logger = logging.getLogger(__name__)
_PROBE_EVERY = 32  # forward steps after which a waiting request's prefix is looked up again: a look costs O(prompt)


class SglangExecutor:
    """Views and verbs over one Scheduler. `running_batch` is lent for the duration of a step."""

    def __init__(self, scheduler: Any, ledger: Ledger, tier: HostTier | None) -> None:
        """Without a `tier` nobody is parked, and the host cache, if any, is upstream's alone."""
        self.scheduler = scheduler
        self.ledger = ledger
        self.tier = tier
        self.admission = Admission()
        self.running_batch: Any = None
        self.last_batch: Any = None
        self.members = 0  # changes whenever somebody takes or leaves memory: who shares pages may have changed
        self.publishes_s: list[tuple[int, float]] = []  # (context tokens, seconds) of each call, for the next tick
        self.last_view: EngineView | None = None  # for those who only look
        self._kept: list[Any] = []
        self._open_copies: frozenset[Any] = frozenset()

    # ---- views

    def view(self) -> EngineView:
        s, tier = self.scheduler, self.tier
        running = len(self.running_batch.reqs)
        self.last_view = EngineView(
            now_s=self.ledger.now_s,
            waiting=len(s.waiting_queue),
            running=running,
            device_free_tokens=s.token_to_kv_pool_allocator.available_size() + s.tree_cache.evictable_size(),
            device_total_tokens=s.max_total_num_tokens,
            host_free_tokens=0 if tier is None else tier.free_tokens,
            host_total_tokens=0 if tier is None else tier.total_tokens,
            host_ok=tier is None or tier.ok,
            storing_tokens=0 if tier is None else tier.storing_tokens,
            load_slots=0 if tier is None else tier.load_slots,
            max_running=running + max(0, s.get_num_allocatable_reqs(running, running_batch=self.running_batch)),
            page_tokens=s.page_size,
            promised_tokens=0 if s.chunked_req is None else self._left(s.chunked_req),
            build=self._requests,
        )
        return self.last_view

    def _requests(self) -> list[RequestView]:
        s = self.scheduler
        running = self.running_batch.reqs
        # The copies themselves, not their number: one may end while another begins.
        self._open_copies = frozenset(s.tree_cache.ongoing_write_through)
        views = [self._running(r) for r in running if r.finished_reason is None]
        seen = set(map(id, running))
        if self.last_batch is not None:
            # A prefill not merged yet, or the running streams that rode along with one (mixed chunk).
            views += [self._unmerged(r) for r in self.last_batch.reqs if id(r) not in seen and self._holds(r)]
            seen.update(map(id, self.last_batch.reqs))
        if s.chunked_req is not None and id(s.chunked_req) not in seen:
            views.append(self._unmerged(s.chunked_req))
        views += [self._waiting(r) for r in s.waiting_queue]
        return views

    def _holds(self, req: Any) -> bool:
        return req.finished_reason is None and not req.is_retracted and req.kv.holds_kv

    def _running(self, req: Any) -> RequestView:
        context = len(req.origin_input_ids) + len(req.output_ids)
        backed, copying = (0, 0) if self.tier is None else self.tier.backed_tokens(req)
        return RequestView(
            rid=req.rid,
            phase=Phase.RUNNING,
            context_tokens=context,
            published_tokens=req.kv.cache_protected_len,
            copying_tokens=copying,
            backed_tokens=backed,
            frees_tokens=self._frees(req),
            cached_tokens=0,
            host_hit_tokens=0,
            held_tokens=0,
            takes_tokens=0,
            output_tokens=len(req.output_ids),
            max_output_tokens=req.sampling_params.max_new_tokens,
            preemptible=req.tokenflow.parkable and parkable_now(req),
            priority=self._priority(req),
        )

    def _unmerged(self, req: Any) -> RequestView:
        context = len(req.origin_input_ids) + len(req.output_ids)
        left = self._left(req) if req is self.scheduler.chunked_req else 0
        return RequestView(
            rid=req.rid,
            phase=Phase.PREFILL,
            context_tokens=context,
            published_tokens=req.kv.cache_protected_len,
            copying_tokens=0,
            backed_tokens=0,
            frees_tokens=0,
            cached_tokens=0,
            host_hit_tokens=0,
            held_tokens=0,
            takes_tokens=left,
            output_tokens=len(req.output_ids),
            max_output_tokens=req.sampling_params.max_new_tokens,
            preemptible=False,
            priority=self._priority(req),
        )

    def _waiting(self, req: Any) -> RequestView:
        state, tier = req.tokenflow, self.tier
        if self._is_stale(req):
            self._probe(req)
        loading = 0 if tier is None else tier.loading_tokens(req)
        context = len(req.origin_input_ids) + len(req.output_ids)
        usable = tier is not None and tier.ok and not state.recompute and not loading
        return RequestView(
            rid=req.rid,
            phase=Phase.LOADING if loading else Phase.PARKED if req.output_ids else Phase.WAITING,
            context_tokens=context,
            published_tokens=state.cached_tokens + state.host_hit_tokens,
            copying_tokens=0,
            backed_tokens=state.host_hit_tokens,
            frees_tokens=0,
            cached_tokens=state.cached_tokens,
            host_hit_tokens=state.host_hit_tokens if usable else 0,
            held_tokens=0 if tier is None else tier.held_tokens(req),
            takes_tokens=max(0, context - state.cached_tokens - loading) if loading else state.takes_tokens,
            output_tokens=len(req.output_ids),
            max_output_tokens=req.sampling_params.max_new_tokens,
            preemptible=False,
            priority=self._priority(req),
        )

    def _left(self, req: Any) -> int:
        """Tokens of a chunked prompt that are still to be computed."""
        return max(0, len(req.origin_input_ids) + len(req.output_ids) - (req.extend_end or 0))

    def _priority(self, req: Any) -> int:
        if not self.scheduler.enable_priority_scheduling or req.priority is None:
            return 0
        return -req.priority if self.scheduler.schedule_low_priority_values_first else req.priority

    def _is_stale(self, req: Any) -> bool:
        """Whether the tree changed under what was found of `req`. Eviction begins at the leaves: the last node that
        was on the device is the first to go."""
        state = req.tokenflow
        if state.probe_ct < 0 or self.scheduler.forward_ct - state.probe_ct >= _PROBE_EVERY:
            return True
        try:
            return bool(
                state.cached_tokens and self.scheduler.tree_cache.tree_core.is_full_device_evicted(req.last_node)
            )
        except KeyError:  # gone altogether
            return True

    def _probe(self, req: Any) -> None:
        """Look up what of a waiting request is in the tree, and how much of that is not held by others already."""
        tree, state = self.scheduler.tree_cache, req.tokenflow
        req.init_next_round_input(tree)
        before = tree.evictable_size()
        lock = tree.lock(req.last_node)
        newly_held = before - tree.evictable_size()
        tree.unlock(lock)
        state.probe_ct = self.scheduler.forward_ct
        state.cached_tokens = req.prefix_len
        state.host_hit_tokens = req.host_hit_length
        state.takes_tokens = len(req.full_untruncated_fill_ids) - req.prefix_len + newly_held

    def _frees(self, req: Any) -> int:
        """Tokens usable at once if `req` were parked: its unpublished tail, and what only its own lock holds.

        Letting the lock go and taking it again is the one exact answer: it sees shared prefixes and open copies alike.
        """
        state = req.tokenflow
        tree = self.scheduler.tree_cache
        page = self.scheduler.page_size
        changes = 0 if self.tier is None else self.tier.changes
        key = (req.kv.cache_protected_len, self.members, changes, self._open_copies)
        if state.frees_key != key:
            before = tree.evictable_size()
            if req.lock is None:
                state.frees_tokens = 0
            else:
                node = req.lock.node
                tree.unlock(req.lock)
                state.frees_tokens = tree.evictable_size() - before
                req.lock = tree.lock(node)
            state.frees_key = key
        tail = -(-req.kv.kv_allocated_len // page) * page - req.kv.cache_protected_len
        return state.frees_tokens + max(0, tail)

    # ---- verbs

    def _running_req(self, rid: Rid) -> Any | None:
        return next((r for r in self.running_batch.reqs if r.rid == rid), None)

    def park(self, rid: Rid) -> bool:
        """Give the stream's memory back and keep its published KV; the tail is dropped."""
        req = self._running_req(rid)
        if req is None or not req.output_ids or not (req.tokenflow.parkable and parkable_now(req)):
            return False
        s, batch = self.scheduler, self.running_batch
        kept_tokens = req.kv.cache_protected_len
        slack_s = state_report.slack_s(s, rid)
        keep = [i for i, r in enumerate(batch.reqs) if r is not req]
        self._leave(req)
        req.reset_for_retract()  # marks it retracted, which makes the result processors drop its token in flight
        if req.return_logprob and req.logprob_start_len >= len(req.origin_input_ids):
            # Else the prefix match ends at the prompt and the whole output is computed again.
            req.logprob_start_len = len(req.origin_input_ids) + len(req.output_ids)
        batch.filter_batch(keep_indices=keep)
        s.requeue_parked(req)
        self.left(req)
        if self.tier is not None and self.tier.config.copies == "at_park":
            self._probe(req)
            self.tier.pin(req, req.best_match_node)  # its copy was begun only now
        req.tokenflow.parks += 1
        self.ledger.counters["parks"] += 1
        self.ledger.transition(rid, "park", kept_tokens)
        if slack_s is not None:
            self.ledger.slack_at_park_s.append(slack_s)
        logger.debug("park %s: %d of %d tokens kept", rid, kept_tokens, len(req.origin_input_ids) + len(req.output_ids))
        return True

    def _leave(self, req: Any) -> None:
        """Publishing the tail here would pin every page of the stream until that one small copy is done; only where
        nothing was copied before (`copies` is `at_park`) is there no other way."""
        s, tier = self.scheduler, self.tier
        if tier is None:
            release_kv_cache(req, s.tree_cache, checkpoint=False)
            return
        counters = self.ledger.counters
        counters["parked_pages"] += req.kv.kv_committed_len // s.page_size
        counters["parked_pages_on_host"] += tier.backed_tokens(req)[0] // s.page_size
        tier.pin(req, req.tokenflow.backed_node)
        at_park = tier.config.copies == "at_park" and tier.ok
        if at_park:
            tier.store_on_insert(True)
        release_kv_cache(req, s.tree_cache, checkpoint=at_park)
        if at_park:
            tier.store_on_insert(False)

    def left(self, req: Any) -> None:
        """`req` went back to the waiting queue, by our park or by upstream's own retraction."""
        self.members += 1
        req.tokenflow.probe_ct = -1
        req.tokenflow.admitted = False
        req.tokenflow.backed_tokens, req.tokenflow.backed_node = 0, None
        self.ledger.parked.append(req.rid)

    def publish(self, rid: Rid, up_to: int) -> int:
        """Insert KV up to `up_to` (rounded down to a page) in the tree; write-through starts the host copy."""
        accepted = self._publish(rid, up_to)
        self.ledger.published.append((rid, accepted))
        return accepted

    def _publish(self, rid: Rid, up_to: int) -> int:
        req = self._running_req(rid)
        if req is None or not req.kv.holds_kv or req.skip_radix_cache_insert or req.finished_reason is not None:
            return 0
        if req.session is not None or req.beam_group is not None or req.is_retracted:
            return 0
        req.refresh_fill_ids()
        up_to = min(up_to, req.kv.kv_committed_len, len(req.full_untruncated_fill_ids))
        if up_to // self.scheduler.page_size * self.scheduler.page_size <= req.kv.cache_protected_len:
            return 0
        before = req.kv.cache_protected_len
        began_s = time.perf_counter()
        self.scheduler.tree_cache.checkpoint(req, up_to=up_to)
        self.publishes_s.append((up_to, time.perf_counter() - began_s))
        self.ledger.counters["published_tokens"] += req.kv.cache_protected_len - before
        return up_to

    def load(self, rids: Sequence[Rid]) -> Sequence[Rid]:
        """Start copying back what these have on the host, in one transfer; nobody waits for it."""
        waiting = {r.rid: r for r in self.scheduler.waiting_queue}
        reqs = [waiting[rid] for rid in rids if rid in waiting and not waiting[rid].tokenflow.recompute]
        if self.tier is None or self.tier.load_slots == 0:
            return ()
        return [r.rid for r in self.tier.load(reqs, self._probe)]

    def admit(self, order: Sequence[Rid] | None, *, reserve_tokens: int | None, prefill_tokens: int | None) -> None:
        self.admission.set(order, reserve_tokens, prefill_tokens)
        if order and self.tier is not None:
            self._keep(order)
        if order is not None and self.scheduler.waiting_queue:
            # Upstream sets it when memory ran out and clears it only when somebody leaves; other ways free memory too.
            self.running_batch.batch_is_full = False

    def _keep(self, order: Sequence[Rid]) -> None:
        """What the plan counts on stays on the device until the batch is formed: whoever comes in first would else
        evict the pages of those behind it, which would then be computed again."""
        tree, named = self.scheduler.tree_cache, set(order)
        for req in self.scheduler.waiting_queue:
            if req.rid in named and req.tokenflow.cached_tokens and not self._is_stale(req):
                self._kept.append(tree.lock(req.last_node))

    def batch_formed(self, batch: Any) -> None:
        refused = self.admission.refused
        if batch is None and refused and self.tier is not None and not self.running_batch.reqs:
            self.tier.make_way(refused[0])
        for lock in self._kept:
            self.scheduler.tree_cache.unlock(lock)
        self._kept.clear()
