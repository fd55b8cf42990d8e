"""The host tier: KV on its way to host memory and back, what the copies pin, and what becomes of those that fail.

Owns the books of loads, of pins and of pages that must not be used (those of stores: stores.py); decides nothing. Does
not own the copies themselves: upstream's controller starts them and acknowledges them. Invariant: nobody reads a page
before its copy was acknowledged on every rank, and all ranks act on the same acknowledgements, failures and deadlines.

A store (device to host) starts when KV is inserted in the radix tree. A load (host to device) is ours from start to
end: the pages it fills belong to nobody until they are there, so a load that fails costs its own stream a recompute.

    host      [ a b c d ]     pinned by the host lock while its stream is parked or loading
                | | | |
    device    [ . . . . ]     allocated at the start, private, put into the tree when the copy is acknowledged
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, TreeLock
from sglang.srt.mem_cache.unified_radix_cache import _OngoingLoadBack

from ..core.config import PolicyConfig
from .copies import LOAD, Load, Trust, failed_slots, seconds
from .ledger import Ledger
from .repairs import Repairs
from .stores import Stores

logger = logging.getLogger(__name__)
_NEVER = 2**31 - 1  # a threshold that is not reached
_RESERVE = 16  # part of the host pool that is kept free
_FULL_S = 1.0  # until a pool from which nothing could go is looked at again


class HostTier:
    """Copies, pins and failures of one scheduler. All token counts; times in seconds of rank 0's clock."""

    def __init__(self, scheduler: Any, ledger: Ledger, config: PolicyConfig) -> None:
        self.tree = scheduler.tree_cache
        self.controller = self.tree.cache_controller
        self.ledger = ledger
        self.config = config
        self._ranks = scheduler.tp_size
        self._agree_on_size()
        self.loads: list[Load] = []
        self._held: dict[int, tuple[Any, TreeLock, int]] = {}  # by id(req): loaded pages, kept until it comes in
        self._pins: dict[int, tuple[Any, Any]] = {}  # by id(req): the only copy of a parked stream
        self.bad = torch.zeros(self.total_tokens, dtype=torch.bool)  # host slots that must not be loaded
        self.repairs = Repairs(self.tree)
        self.trust = Trust()
        self.changes = 0  # of locks that are not requests' own: what a park frees may be another number now
        self._full_until_s = 0.0
        self.stores = Stores(self)
        self._loads_s: list[tuple[int, float]] = []
        if config.loads == "ahead":
            self.tree.load_back_threshold = _NEVER  # admission loads nothing: its forward would wait for the copy
        else:
            self._upstream_init_load_back = self.tree.init_load_back
            self.tree.init_load_back = self._init_load_back
        self.store_on_insert(config.copies == "ahead")

    def _agree_on_size(self) -> None:
        """Host memory may differ between ranks. One page more on one of them and the ranks evict differently, until
        one enters a collective that the others do not."""
        size = int(self.controller.mem_pool_host.anchor_entry.host_pool.size)
        smallest = -int(self.agreed(torch.tensor([-size])).item())
        if smallest < size:
            logger.warning("host KV pool cut from %d to %d tokens, as on the smallest rank", size, smallest)
        self.cut(smallest)

    def cut(self, tokens: int) -> None:
        """Use that many tokens of the host pool's memory. The pool must be empty."""
        group = self.controller.mem_pool_host
        pool = group.anchor_entry.host_pool
        if tokens != pool.size:
            pool.size, pool.page_num = tokens, tokens // pool.page_size
            pool.clear()
            group.size, group.logical_size = pool.size, pool.logical_size
        self.total_tokens = tokens

    def agreed(self, values: torch.Tensor) -> torch.Tensor:
        """The greatest of each value over all ranks."""
        if self._ranks > 1:
            self.tree._all_reduce(values, torch.distributed.ReduceOp.MAX)
        return values

    def store_on_insert(self, on: bool) -> None:
        """Whether KV inserted in the tree is copied to the host."""
        self.tree.write_through_threshold = 1 if on else _NEVER

    # ---- what the policy sees

    @property
    def ok(self) -> bool:
        return self.trust.ok

    @property
    def load_slots(self) -> int:
        """Transfers that may start now. Upstream has three counters for them, and a fourth would run into the first."""
        counters = self.controller.layer_done_counter.num_counters
        return max(0, counters - len(self.controller.ack_load_queue)) if self.ok else 0

    @property
    def free_tokens(self) -> int:
        return int(self.controller.mem_pool_host.available_size())

    @property
    def storing_tokens(self) -> int:
        return self.stores.tokens

    @property
    def has_deadlines(self) -> bool:
        """Whether time must go on for a copy's sake, though nobody is served."""
        return bool(self.stores.open) or any(load.req is not None for load in self.loads)

    def loading_tokens(self, req: Any) -> int:
        return sum(len(load.device_tokens) for load in self.loads if load.req is req)

    def held_tokens(self, req: Any) -> int:
        held = self._held.get(id(req))
        return 0 if held is None else held[2]

    def backed_tokens(self, req: Any) -> tuple[int, int]:
        """(tokens on the host with no copy open, tokens whose copy is open) of what a running stream published.

        Stores end in the order in which they started, parents first: if the last node's is done, all are.
        """
        state, published = req.tokenflow, req.kv.cache_protected_len
        if state.backed_tokens < published and req.lock is not None:
            node = req.lock.node
            if node in self.tree.ongoing_write_through:
                return state.backed_tokens, published - state.backed_tokens
            if self.tree.is_backuped(node) and node not in self.stores.bad_nodes:
                state.backed_tokens, state.backed_node = published, node
        return state.backed_tokens, 0

    def take_timings(self) -> dict[str, tuple[tuple[int, float], ...]]:
        """What copies took since the last call: (tokens, seconds), measured where they ran."""
        stores, loads = tuple(self.stores.took_s), tuple(self._loads_s)
        self.stores.took_s.clear()
        self._loads_s.clear()
        return {"stores_s": stores, "loads_s": loads}

    # ---- pins

    def pin(self, req: Any, node: Any) -> None:
        """`req` is parked: its host copy down to `node` stays until it is back. Eviction takes finished prefixes."""
        if node is not None and self.tree.is_backuped(node):
            self._pins[id(req)] = (node, self.tree.inc_host_lock_ref(node).to_dec_params())

    def let_go(self, req: Any) -> None:
        """`req` came in, or ended while it waited: what was kept for it is cache like any other."""
        pin = self._pins.pop(id(req), None)
        if pin is not None:
            self.tree.dec_host_lock_ref(*pin)
        self._let_go_held(req)
        for load in self.loads:
            if load.req is req:
                load.req = None

    def _let_go_held(self, req: Any) -> None:
        held = self._held.pop(id(req), None)
        if held is not None:
            self.tree.unlock(held[1])
            self.changes += 1

    def make_way(self, rid: str) -> None:
        """An empty engine refused `rid`: what was loaded for others keeps it out, and them as well. Their pages stay
        in the tree while there is room, and on the host."""
        for req, _, _ in list(self._held.values()):
            if req.rid != rid:
                self._let_go_held(req)

    def forget(self) -> None:
        """The tree was emptied, and both pools: no receipt is worth anything, and whoever waits is computed again. A
        load may have ended and not been settled yet."""
        self.loads.clear()
        self._pins.clear()
        self._held.clear()
        self.stores.forget()
        self.repairs.open.clear()
        self.bad[:] = False

    # ---- what ended

    def failed(self, copies: Sequence[tuple[Any, torch.Tensor]]) -> list[bool]:
        """Which of the copies failed. Their bad slots are never loaded."""
        masks = failed_slots(copies, self.agreed)
        for (_, slots), mask in zip(copies, masks, strict=True):
            if mask.any():
                self.bad[slots[mask.bool()]] = True
        return [bool(mask.any()) for mask in masks]

    # ---- loads

    def load(self, reqs: Sequence[Any], probe: Callable[[Any], None]) -> list[Any]:
        """Start copying back what each of `reqs` has on the host, in one transfer. Those that started."""
        started = []
        for req in reqs:
            probe(req)
            if self._start(req):
                started.append(req)
        if started:
            self.tree.ready_to_load_host_cache()
            for load in self.loads:
                load.ack = load.ack or self.controller.ack_load_queue[-1]
        return started

    def _start(self, req: Any) -> bool:
        tree, node = self.tree, req.best_match_node
        spec, others = tree.tree_core.build_load_back_spec(node)
        slots = spec.host_indices
        if others or not len(slots):
            return False
        if node in tree.ongoing_load_back:
            if not any(load.node == node and load.req is not None for load in self.loads):
                self._unloaded(req)  # that copy was given up: nobody may wait for it a second time
            return False
        if self.bad[slots].any():
            self.repairs.later(req, req.prefix_len, slots, node)
            self._unloaded(req)
            return False
        # Two of each: upstream lets go of the first at the acknowledgement, we of the second when the tree has it all.
        locks = [tree.inc_lock_ref(node).to_dec_params() for _ in range(2)]
        pins = [tree.inc_host_lock_ref(node).to_dec_params() for _ in range(2)]
        device = None
        short = len(slots) - tree.token_to_kv_pool_allocator.available_size()
        if short > 0:
            tree.evict_for_alloc(EvictParams(num_tokens=short))
        if tree.token_to_kv_pool_allocator.available_size() >= len(slots):
            device = self.controller.load(host_indices=slots, node_id=node)
        if device is None:
            for lock, pin in zip(locks, pins, strict=True):
                tree.dec_lock_ref(node, lock)
                tree.dec_host_lock_ref(node, pin)
            return False
        tree.ongoing_load_back[node] = _OngoingLoadBack(node, locks[0], pins[0])  # taken out at the acknowledgement
        slots, now_s = slots.clone(), self.ledger.now_s
        self.loads.append(Load(req, req.prefix_len, node, slots, device, now_s, TreeLock(node, locks[1]), pins[1]))
        self.changes += 1
        self.ledger.counters["loads"] += 1
        self.ledger.transition(req.rid, "load", len(slots))
        return True

    def _init_load_back(self, params: Any) -> Any:
        """In the place of the tree's own, where admission loads: it knows nothing of bad pages."""
        spec, _ = self.tree.tree_core.build_load_back_spec(params.best_match_node)
        if not self.ok or self.bad[spec.host_indices].any():
            return 0, params.req.last_node
        return self._upstream_init_load_back(params)

    def _loads_done(self) -> None:
        queued = set(map(id, self.controller.ack_load_queue))
        done = [load for load in self.loads if id(load.ack) not in queued]
        if not done:
            return
        self.loads = [load for load in self.loads if id(load.ack) in queued]
        failed = self.failed([(load.ack, load.host_tokens) for load in done])
        for ack in {id(load.ack): load.ack for load in done}.values():
            took_s = seconds(ack)
            if took_s is not None:
                self._loads_s.append((sum(len(load.host_tokens) for load in done if load.ack is ack), took_s))
            self.judge(LOAD, any(bad for load, bad in zip(done, failed, strict=True) if load.ack is ack))
        for load, bad in zip(done, failed, strict=True):
            self.ledger.counters["loads_failed"] += bad
            self._settle(load, good=not bad)

    def _settle(self, load: Load, *, good: bool) -> None:
        """Put what was loaded into the tree, as far as nobody else computed or loaded it meanwhile; free the rest."""
        self.changes += 1
        tree, n = self.tree, len(load.device_tokens)
        spec, _ = tree.tree_core.build_load_back_spec(load.node)
        kept = len(spec.host_indices)
        if not good or kept > n or not torch.equal(spec.host_indices, load.host_tokens[n - kept :]):
            kept = 0
        if n - kept:
            tree.token_to_kv_pool_allocator.free(load.device_tokens[: n - kept])
        if kept:
            device = load.device_tokens[n - kept :]
            tree._apply_cache_actions(tree.tree_core.commit_load_back(load.node, device, spec, {}))
            tree.tree_core.finish_load_back(load.node)
        if load.req is not None and not good:
            self.repairs.later(load.req, load.start, load.host_tokens, load.node)
        tree.dec_host_lock_ref(load.node, load.pin)
        if load.req is None or not good:
            tree.unlock(load.lock)
            if load.req is not None:
                self._unloaded(load.req)
            return
        load.req.tokenflow.probe_ct = -1
        self._held[id(load.req)] = (load.req, load.lock, n)
        self.ledger.loaded.append((load.req.rid, n))
        self.ledger.counters["loaded_tokens"] += n

    def _unloaded(self, req: Any) -> None:
        """It will be computed again."""
        req.tokenflow.probe_ct = -1
        req.tokenflow.recompute = True
        self.ledger.unloaded.append(req.rid)
        self.ledger.counters["loads_given_up"] += 1
        self.ledger.transition(req.rid, "recompute", 0)

    # ---- every iteration, before anything is decided

    def poll(self) -> None:
        """Collect what ended, give up what is overdue. In every iteration, idle or not: nodes stay locked till then."""
        if self.loads or self.stores.open:
            self.tree.check_hicache_events()  # what has ended by now counts in this step, not in the next
        self.collect()
        self._give_up_overdue()
        self.stores.collect_lost()
        if self.repairs.open and self.ok:
            self.repairs.make()
        if self.trust.try_again(self.ledger.now_s):
            self.store_on_insert(self.config.copies == "ahead")
        self._keep_some_free()

    def collect(self) -> None:
        """What upstream took acknowledgements of. After each time it did so: in between, the pages of a load are
        nobody's, and upstream's check of an idle pool would call them lost."""
        self.stores.collect()
        self._loads_done()

    def _keep_some_free(self) -> None:
        """Under write-through upstream makes room for exactly what it stores, so a pool that was full once stays full,
        and nobody could tell whether there is room to publish. The coldest finished prefixes go."""
        reserve = self.total_tokens // _RESERVE
        missing = reserve - self.free_tokens
        if missing <= reserve // 2 or self.ledger.now_s < self._full_until_s or not self.ok:
            return
        if self.tree.evict_host(missing) < missing:
            self._full_until_s = self.ledger.now_s + _FULL_S  # all that is left is pinned, or on the device as well

    def _give_up_overdue(self) -> None:
        oldest_s = self.ledger.now_s - self.config.copy_deadline_s
        late = [load for load in self.loads if load.req is not None and load.since_s < oldest_s]
        for load in late:
            # Its pages stay allocated until the copy ends, whenever that is.
            self._unloaded(load.req)
            load.req = None
            self.ledger.counters["copies_overdue"] += 1
            self.ledger.counters["loads_failed"] += 1
        if late:
            self.judge(LOAD, True)
        self.stores.give_up_overdue(oldest_s)

    def judge(self, direction: str, failed: bool) -> None:
        self.trust.judge(direction, failed, self.ledger.now_s)
        if not self.ok:
            self.store_on_insert(False)
