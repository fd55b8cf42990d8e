"""Copies to the host: which are open, which failed, and those given up that may still write.

Owns their books; upstream's controller starts and acknowledges them. Invariant: a host slot whose store failed, or was
given up, is never loaded before it was written anew, and is handed to nobody before the old copy has ended.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from .copies import STORE, Store, seconds

if TYPE_CHECKING:
    from .kv import HostTier


class Stores:
    """Of one host tier. All token counts."""

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.open: deque[Store] = deque()
        self.lost: list[tuple[Any, list[tuple[Any, Any]]]] = []  # finish event and host pins of those given up
        self.bad_nodes: set[Any] = set()  # whose last store failed
        self.took_s: list[tuple[int, float]] = []
        controller = tier.controller
        self._upstream_start_writing = controller.start_writing
        controller.start_writing = self._start_writing

    @property
    def tokens(self) -> int:
        queued = sum(len(op.host_indices) for op in self.tier.controller.write_queue)
        return queued + sum(len(store.host_tokens) for store in self.open)

    def _start_writing(self) -> None:
        """In the place of the controller's own: an acknowledgement does not say which host slots it stands for."""
        tier = self.tier
        slots = [op.host_indices for op in tier.controller.write_queue]
        self._upstream_start_writing()
        if slots:
            host_tokens = torch.cat(slots)
            self.open.append(Store(tier.controller.ack_write_queue[-1], host_tokens, tier.ledger.now_s))
            tier.bad[host_tokens] = False  # written anew
            tier.ledger.counters["stored_tokens"] += len(host_tokens)

    def collect(self) -> None:
        """Those that upstream took the acknowledgements of."""
        queued = set(map(id, self.tier.controller.ack_write_queue))
        done: list[Store] = []
        while self.open and id(self.open[0].ack) not in queued:
            done.append(self.open.popleft())
        if not done:
            return
        failures = self.tier.failed([(store.ack, store.host_tokens) for store in done])
        for store, failed in zip(done, failures, strict=True):
            took_s = seconds(store.ack)
            if took_s is not None:
                self.took_s.append((len(store.host_tokens), took_s))
            if failed:
                self.bad_nodes.update(store.ack.node_ids)
                self.tier.ledger.counters["stores_failed"] += 1
            self.tier.judge(STORE, failed)

    def give_up_overdue(self, oldest_s: float) -> None:
        """Those begun before `oldest_s`. One copy that stands still holds up all behind it: one failure, not many."""
        given_up = False
        while self.open and self.open[0].since_s < oldest_s:
            self._give_up(self.open.popleft())
            given_up = True
        if given_up:
            self.tier.judge(STORE, True)

    def _give_up(self, store: Store) -> None:
        """Else every later store waits behind it, and its nodes stay locked: in the end nothing can be evicted. The
        host slots may yet be written, so they are neither loaded nor handed to anybody until that has happened."""
        tier, tree = self.tier, self.tier.tree
        tier.controller.ack_write_queue.remove(store.ack)
        tier.bad[store.host_tokens] = True
        pins = []
        for node in store.ack.node_ids:
            pending = tree.ongoing_write_through[node]
            held = pending.publish_node_ids or [pending[0]]  # a repair publishes nothing
            pins += [(n, tree.inc_host_lock_ref(n).to_dec_params()) for n in held]
            tree._finish_write_through_ack(node)
        self.lost.append((store.ack.finish_event, pins))
        self.bad_nodes.update(store.ack.node_ids)
        tier.ledger.counters["copies_overdue"] += 1
        tier.ledger.counters["stores_failed"] += 1

    def collect_lost(self) -> None:
        if not self.lost:
            return
        mine = torch.tensor([not event.query() for event, _ in self.lost], dtype=torch.uint8)
        open_ = self.tier.agreed(mine).tolist()
        for still, (_, pins) in zip(open_, self.lost, strict=True):
            for pin in () if still else pins:
                self.tier.tree.dec_host_lock_ref(*pin)
        self.lost = [entry for still, entry in zip(open_, self.lost, strict=True) if still]

    def forget(self) -> None:
        self.open.clear()
        self.lost.clear()
        self.bad_nodes.clear()
