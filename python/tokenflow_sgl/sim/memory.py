"""KV of requests: who takes which pages, what is copied to the host and back, over the two directions of the link.

Owns the tree, the links and the loads. Decides nothing and makes no batch. Invariant: pages taken by requests and loads
are counted here, so that `check` can balance the pool after every step.
"""

from __future__ import annotations

from collections.abc import Sequence

from .link import Link
from .requests import Load, SimRequest
from .settings import EngineSettings
from .tree import Node, PrefixTree

_Store = list[tuple[Node, int]]
_RESERVE = 16  # part of the host pool that is kept free, and how long a full one is left alone: adapter/kv.py
_FULL_S = 1.0


class Memory:
    def __init__(
        self, settings: EngineSettings, *, kv_bytes_per_token: int, store_bytes_s: float, load_bytes_s: float
    ) -> None:
        self.settings = settings
        self.page = settings.page_tokens
        host = 0 if settings.copies == "none" else settings.host_tokens // self.page
        self.tree = PrefixTree(page_tokens=self.page, device_pages=settings.pool_tokens // self.page, host_pages=host)
        self._page_bytes = kv_bytes_per_token * self.page
        self.to_host, self.to_device = Link(store_bytes_s), Link(load_bytes_s)
        self._load_page_s = self._page_bytes / load_bytes_s
        self.storing_pages = 0
        self.loads: list[Load] = []
        self.stores_s: list[tuple[int, float]] = []
        self.loads_s: list[tuple[int, float]] = []
        self._now_s = 0.0
        self._full_until_s = 0.0

    # ---- sizes

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page)

    @property
    def free_tokens(self) -> int:
        return (self.tree.free_pages + self.tree.evictable_pages) * self.page

    def hit_pages(self, req: SimRequest, context_tokens: int) -> tuple[int, int]:
        """At least the newest token is computed, whatever is cached."""
        return self.tree.hit_pages(req.path, limit_pages=(context_tokens - 1) // self.page)

    def private_pages(self, req: SimRequest, kv_tokens: int) -> int:
        return self.pages(kv_tokens) - req.in_tree_pages

    # ---- into memory and out of it

    def enter(self, req: SimRequest, cached_pages: int) -> None:
        """It comes in on what the device has of it."""
        self.tree.lock(req.path)
        if req.held_pages:
            self.tree.unlock(req.path)
            req.held_pages = 0
        if req.pinned:
            self.tree.unpin_host(req.path)
            req.pinned = False
        req.in_tree_pages = cached_pages
        req.kv_tokens = cached_pages * self.page

    def compute(self, req: SimRequest, tokens: int) -> None:
        """Pages for `tokens` more of its KV, which the step under way writes."""
        self.tree.take(self.pages(req.kv_tokens + tokens) - self.pages(req.kv_tokens))
        req.kv_tokens += tokens

    def computed(self, req: SimRequest, kv_tokens: int) -> None:
        """They are written: whole pages go into the tree, which starts their copy."""
        self.put_in_tree(req, kv_tokens)
        if self.settings.copies == "ahead":
            self.store(req)

    def put_in_tree(self, req: SimRequest, kv_tokens: int) -> None:
        """Whole pages of the first `kv_tokens`; its own copies of what others put there meanwhile are given back."""
        pages = kv_tokens // self.page
        if pages <= req.in_tree_pages:
            return
        out = req.path[-1]
        out.end_tokens = max(out.end_tokens, kv_tokens)
        added = self.tree.insert(req.path, pages)
        self.tree.give(pages - req.in_tree_pages - added)
        req.in_tree_pages = pages

    def leave(self, req: SimRequest, kv_tokens: int, *, parked: bool) -> None:
        """Gives back what is not in the tree; the rest can be evicted from now on."""
        self.tree.give(self.private_pages(req, kv_tokens))
        req.view = None
        if parked and not req.pinned:
            self.tree.pin_host(req.path)
            req.pinned = True
        self.tree.unlock(req.path)
        req.in_tree_pages = req.kv_tokens = 0

    # ---- copies

    def store(self, req: SimRequest) -> None:
        begun = self.tree.store_missing(req.path)
        if begun:
            pages = sum(count for _, count in begun)
            self.storing_pages += pages
            self.to_host.start(self._now_s, pages * self._page_bytes, (begun, pages))

    def load(self, reqs: Sequence[SimRequest], contexts: Sequence[int]) -> list[SimRequest]:
        """All in one transfer; those that started. Who finds no memory does not."""
        started = Load([], 0)
        for req, context_tokens in zip(reqs, contexts, strict=True):
            _, pages = self.hit_pages(req, context_tokens)
            self.tree.lock(req.path)  # what it has on the device must not go for what it wants there
            if pages == 0 or pages > self.tree.free_pages + self.tree.evictable_pages:
                self.tree.unlock(req.path)
                continue
            self.tree.pin_host(req.path)
            self.tree.take(pages)
            device, _ = self.hit_pages(req, context_tokens)
            req.loading, req.loading_pages, req.load_until_pages = started, pages, device + pages
            req.view = None
            started.reqs.append(req)
            started.tokens += pages * self.page
        if started.reqs:
            self.loads.append(started)
            self.to_device.start(self._now_s, started.tokens // self.page * self._page_bytes, started)
        return started.reqs

    def load_now(self, req: SimRequest, context_tokens: int) -> int:
        """Into the step that admits it; tokens. It holds its path already."""
        _, pages = self.hit_pages(req, context_tokens)
        pages = min(pages, self.tree.free_pages + self.tree.evictable_pages)
        if pages:
            self.tree.take(pages)
            req.kv_tokens += pages * self.page
            self.put_in_tree(req, req.kv_tokens)
            self.loads_s.append((pages * self.page, pages * self._load_page_s))
        return pages * self.page

    def load_seconds(self, tokens: int) -> float:
        return tokens // self.page * self._load_page_s

    def at(self, now_s: float) -> None:
        self._now_s = now_s

    def next_done_s(self) -> float:
        return min(self.to_host.next_done_s(), self.to_device.next_done_s())

    def advance(self, now_s: float) -> list[SimRequest]:
        """Copies that ended by now; the requests that are loaded."""
        self._now_s = now_s
        for what, seconds in self.to_host.done(now_s):
            assert isinstance(what, tuple)
            begun, pages = what
            self.tree.stored(begun)
            self.storing_pages -= pages
            self.stores_s.append((pages * self.page, seconds))
        loaded: list[SimRequest] = []
        for what, seconds in self.to_device.done(now_s):
            assert isinstance(what, Load)
            self.loads.remove(what)
            self.loads_s.append((what.tokens, seconds))
            for req in what.reqs:
                self._loaded(req)
            loaded += what.reqs
        self._keep_some_free()
        return loaded

    def _keep_some_free(self) -> None:
        """A policy that saw a pool that is full for good would publish nothing more."""
        reserve = self.tree.host_pages // _RESERVE if self.settings.host_reserve else 0
        missing = reserve - self.tree.host_free_pages
        if missing > reserve // 2 and self._now_s >= self._full_until_s and not self.tree.free_host(reserve):
            self._full_until_s = self._now_s + _FULL_S

    def _loaded(self, req: SimRequest) -> None:
        """Its lock stays: what was loaded is kept for it."""
        added = self.tree.insert(req.path, req.load_until_pages)
        self.tree.give(req.loading_pages - added)
        req.held_pages, req.loading, req.loading_pages = req.loading_pages, None, 0
        req.view = None
        self.tree.unpin_host(req.path)
