"""Bad host pages made good: when a stream has been computed again, what is on the device is copied over them.

Owns which pages wait for that, and a pin on each; uses upstream's own queue and acknowledgement. The tree cannot forget
a host copy while it keeps the node, so pages that are only marked bad would cost every later return a recompute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.cache_controller import CacheOperation
from sglang.srt.mem_cache.unified_radix_cache import _OngoingWriteThrough

_FIRST_NUMBER = 2**62  # above every node's: those count up from 0


@dataclass(slots=True)
class Repair:
    """Host slots of a stream that is computed again: tokens [start, start + len) of its context."""

    req: Any
    start: int
    host_tokens: torch.Tensor
    node: Any
    pin: Any


class Repairs:
    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.open: list[Repair] = []
        self.made = 0

    def later(self, req: Any, start: int, host_tokens: torch.Tensor, node: Any) -> None:
        pin = self.tree.inc_host_lock_ref(node).to_dec_params()
        self.open.append(Repair(req, start, host_tokens.clone(), node, pin))

    def make(self) -> None:
        """Queue the copies of all streams that are far enough; forget those that ended."""
        left: list[Repair] = []
        for repair in self.open:
            req, end = repair.req, repair.start + len(repair.host_tokens)
            running = req.tokenflow.admitted and req.kv.holds_kv and req.lock is not None
            if running and req.kv.cache_protected_len >= end:
                row = self.tree.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                self._store_again(req.lock.node, repair.host_tokens, row[repair.start : end].to(torch.int64).clone())
            elif not req.tokenflow.gone:
                left.append(repair)
                continue
            self.tree.dec_host_lock_ref(repair.node, repair.pin)
        self.open = left

    def _store_again(self, node: Any, host_tokens: torch.Tensor, device_tokens: torch.Tensor) -> None:
        """Under a number that no node has: the tree knows the copy already, only its content is new."""
        self.made += 1
        number = _FIRST_NUMBER + self.made
        lock = self.tree.inc_lock_ref(node).to_dec_params()
        self.tree.ongoing_write_through[number] = _OngoingWriteThrough(node, lock, [])
        self.tree.cache_controller.write_queue.append(CacheOperation(host_tokens, device_tokens, number))
