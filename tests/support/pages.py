"""Sums of KV pages, taken when a stream is parked and when it is back: what was kept is what was there.

Owns the comparison; changes nothing of the engine's state. What was on the host when a stream was parked must be there
when it is back: nobody may take a parked stream's only copy. Only tokens that came back from the caches are compared:
those that were computed again may differ in their last bits.
"""

from __future__ import annotations

from typing import Any

import torch

from support.engine import Engine


class PageSums:
    """Context manager around an engine's park and return."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.compared_pages = 0
        self.different: list[tuple[str, int]] = []
        self.returns = 0
        self.open_at_return = 0
        self.lost: list[tuple[str, int, int]] = []  # (rid, tokens on the host at the park, tokens found at the return)
        self._kept: dict[str, torch.Tensor] = {}
        self._backed: dict[str, int] = {}
        self._twofold: set[str] = set()

    def __enter__(self) -> PageSums:
        scheduler, executor = self.engine.scheduler, self.engine.scheduler.executor
        leave, came_in = executor._leave, scheduler._came_in

        def left(req: Any) -> None:
            self._kept[req.rid] = self._sums(req, req.kv.cache_protected_len)
            self._backed[req.rid] = scheduler.host_tier.backed_tokens(req)[0]
            leave(req)

        def came(req: Any) -> None:
            came_in(req)
            if req.output_ids:
                self._compare(req)

        executor._leave, scheduler._came_in = left, came
        return self

    def __exit__(self, *exc: object) -> None:
        del self.engine.scheduler.executor._leave, self.engine.scheduler._came_in

    def _compare(self, req: Any) -> None:
        self.returns += 1
        self.open_at_return += bool(self.engine.scheduler.tree_cache.ongoing_write_through)
        kept = self._kept.pop(req.rid, None)
        if kept is None:
            return
        backed = self._backed.pop(req.rid)
        found = max(req.prefix_len, req.prefix_len - req.host_loaded_length + req.host_hit_length)
        if found < backed:
            self.lost.append((req.rid, backed, found))
        if req.prefix_len < found:
            # Computed again though the host has it (no transfer was free): from now on the two copies differ in their
            # last bits, and which of them comes back is no matter.
            self._twofold.add(req.rid)
        if req.rid in self._twofold:
            return
        page = self.engine.scheduler.page_size
        now = self._sums(req, min(req.prefix_len, len(kept) * page))
        same = kept[: len(now)] == now
        self.compared_pages += len(now)
        self.different += [(req.rid, int(i)) for i in (~same).nonzero().flatten()]

    def _sums(self, req: Any, tokens: int) -> torch.Tensor:
        """One number for each whole page of the first `tokens`: the bits of K and V in all layers, summed."""
        scheduler = self.engine.scheduler
        page = scheduler.page_size
        whole = tokens // page * page
        if not whole:
            return torch.zeros(0, dtype=torch.int64)
        row = scheduler.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :whole].to(torch.int64)
        cache = scheduler.token_to_kv_pool_allocator.get_kvcache()
        total = torch.zeros(whole // page, dtype=torch.int64)
        for buffer in (*cache.k_buffer, *cache.v_buffer):
            bits = buffer[row].contiguous().view(torch.int32).to(torch.int64)
            total += bits.reshape(whole // page, -1).sum(dim=1)
        return total

    def report(self) -> dict[str, Any]:
        return {"returns": self.returns, "pages": self.compared_pages, "different": self.different, "lost": self.lost}
