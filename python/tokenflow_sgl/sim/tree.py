"""The radix tree as page counts: which pages of which prefix are on the device, on the host, or on their way there.

Owns nodes, locks, least-recently-used eviction on both tiers, and the free pages of the device. Knows no request and
no time. Invariant: free + in the tree + taken by requests and loads = all pages of the device; a page is on the device
only if every page before it on its path is.

A prompt is a path of segments, and an output one segment more. A page belongs to the segment in which it ends:

    tokens    0          20            50         70
    segments  |--- a ----|----- b -----|--- out --|
    pages of 16   0      |  1    2     |  3       |  the rest of page 4 is nobody's: a part of a page is never shared
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence


class Node:
    """One segment under one parent. All counts in pages, from the node's own start."""

    __slots__ = (
        "children", "device", "device_children", "end_tokens", "host", "host_children", "host_pins", "key",
        "locks", "parent", "refs", "start", "storing", "used",
    )  # fmt: skip

    def __init__(self, key: str, parent: Node | None, start: int, end_tokens: int) -> None:
        self.key, self.parent, self.start, self.end_tokens = key, parent, start, end_tokens
        self.children: dict[str, Node] = {}
        self.device = self.host = self.storing = 0
        self.locks = 0  # by running requests, loads and stores: stays on the device
        self.host_pins = 0  # by parked requests: its host copy stays
        self.device_children = self.host_children = 0  # children with any page there
        self.refs = 0  # live requests whose path it is on
        self.used = 0  # when it was last let go


class PrefixTree:
    """Prefixes in `device_pages` and `host_pages`; 0 host pages = no host tier."""

    def __init__(self, *, page_tokens: int, device_pages: int, host_pages: int) -> None:
        self.page_tokens = page_tokens
        self.device_pages, self.host_pages = device_pages, host_pages
        self.free_pages = device_pages
        self.evictable_pages = 0
        self.host_used_pages = 0  # with what is on its way
        self.touched: set[Node] = set()  # changed since whoever looks cleared it
        self.root = Node("", None, 0, 0)
        self._clock = 0
        self._cold: list[tuple[int, int, Node]] = []  # device leaves nobody holds, coldest first; entries may be stale
        self._host_cold: list[tuple[int, int, Node]] = []
        self._entries = 0

    # ---- paths

    def path(self, segments: Iterable[tuple[str, int]]) -> list[Node]:
        """Nodes of (key, tokens) from the root, made where they are missing, and referred to from now on."""
        node, found, end = self.root, [], 0
        for key, tokens in segments:
            start, end = end // self.page_tokens, end + tokens
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, node, start, end)
            child.refs += 1
            found.append(child)
            node = child
        return found

    def extend_path(self, path: list[Node], key: str) -> None:
        """One more node at the end of `path`, for tokens that will come."""
        last = path[-1]
        child = last.children.get(key)
        if child is None:
            child = last.children[key] = Node(key, last, last.end_tokens // self.page_tokens, last.end_tokens)
        child.refs += 1
        path.append(child)

    def let_go(self, path: Sequence[Node]) -> None:
        """A request ended: nodes on no tier and on no path are forgotten."""
        for node in reversed(path):
            node.refs -= 1
            self._forget(node)

    def _forget(self, node: Node) -> None:
        while node.parent is not None and not (
            node.refs or node.children or node.device or node.host or node.storing or node.locks
        ):
            del node.parent.children[node.key]
            node = node.parent

    # ---- what is where

    def hit_pages(self, path: Sequence[Node], *, limit_pages: int) -> tuple[int, int]:
        """(on the device, beyond it on the host) from the start of `path`, contiguous, at most `limit_pages`."""
        device = host = 0
        on_device = True
        for node in path:
            whole = node.end_tokens // self.page_tokens - node.start
            if on_device:
                device += node.device
                on_device = node.device == whole
            if not on_device:
                have = node.device if node.device > node.host else node.host
                host += have - node.device
                if have < whole:
                    break
        device = min(device, limit_pages)
        return device, max(0, min(host, limit_pages - device))

    def held_pages(self, path: Sequence[Node]) -> int:
        """Pages of `path` on the device that somebody holds: they cannot be evicted."""
        return sum([node.device for node in path if node.locks])

    def own_pages(self, path: Sequence[Node]) -> int:
        """Pages of `path` that would be free if its one holder let go: no other lock, nor an open copy's."""
        return sum([node.device for node in path if node.locks == 1])

    def backed_pages(self, path: Sequence[Node]) -> tuple[int, int]:
        """(on the host from the start of `path`, contiguous; of all, copies still open)."""
        backed, storing, whole_so_far = 0, 0, True
        for node in path:
            storing += node.storing
            if whole_so_far:
                backed += node.host
                whole_so_far = node.host >= node.end_tokens // self.page_tokens - node.start
        return backed, storing

    # ---- locks

    def lock(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            if node.locks == 0:
                self.evictable_pages -= node.device
            node.locks += 1
            self.touched.add(node)

    def unlock(self, nodes: Sequence[Node]) -> None:
        self._clock += 1
        for node in nodes:
            node.locks -= 1
            self.touched.add(node)
            assert node.locks >= 0, node.key
            if node.locks == 0:
                node.used = self._clock
                self.evictable_pages += node.device
        for node in reversed(nodes):
            self._offer(node)
            self._offer_host(node)

    def pin_host(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            node.host_pins += 1

    def unpin_host(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            node.host_pins -= 1
            assert node.host_pins >= 0, node.key
            self._offer_host(node)

    # ---- the device

    def take(self, pages: int) -> None:
        """Free pages for a request, evicting what is cold. The caller has looked: free + evictable suffice."""
        if pages > self.free_pages:
            self._evict(pages - self.free_pages)
        self.free_pages -= pages

    def give(self, pages: int) -> None:
        self.free_pages += pages

    def insert(self, path: Sequence[Node], pages: int) -> int:
        """The first `pages` of `path` are in the tree from now on, out of those their holder took; how many of the
        holder's were not needed, since somebody else's are there already, is for the caller to give back.

        Nodes must be locked by the caller first, or what is inserted could be evicted at once.
        """
        added = 0
        for node in path:
            whole = min(pages, node.end_tokens // self.page_tokens) - node.start
            if whole <= 0:
                break
            added += self._grow(node, whole)
        return added

    def _grow(self, node: Node, pages: int) -> int:
        new = pages - node.device
        if new <= 0:
            return 0
        if node.device == 0 and node.parent is not None:
            node.parent.device_children += 1
        node.device = pages
        self.touched.add(node)
        if node.locks == 0:
            self.evictable_pages += new
            self._offer(node)
        return new

    def _offer(self, node: Node) -> None:
        if node.device and not node.locks and not node.device_children:
            self._entries += 1
            heapq.heappush(self._cold, (node.used, self._entries, node))

    def _evict(self, pages: int) -> None:
        while pages > 0:
            assert self._cold, f"{pages} pages wanted, nothing to evict"
            used, _, node = heapq.heappop(self._cold)
            if used != node.used or not node.device or node.locks or node.device_children:
                continue
            gone = min(pages, node.device)
            node.device -= gone
            self.touched.add(node)
            self.free_pages += gone
            self.evictable_pages -= gone
            pages -= gone
            if node.device:
                self._offer(node)
                continue
            self._offer_host(node)
            parent = node.parent
            assert parent is not None
            parent.device_children -= 1
            if parent.parent is not None:
                self._offer(parent)
            self._forget(node)

    # ---- the host

    def store_missing(self, path: Sequence[Node]) -> list[tuple[Node, int]]:
        """Begin a copy of what `path` has on the device and not on the host, as far as the host has room, in order:
        a copy without what comes before it would be of no use. The nodes are locked until `stored`."""
        begun: list[tuple[Node, int]] = []
        for node in path:
            missing = node.device - node.host - node.storing
            if missing <= 0:
                if node.host + node.storing < node.end_tokens // self.page_tokens - node.start:
                    break
                continue
            room = self._host_room(missing, keep=path)
            if room <= 0:
                break
            count = min(missing, room)
            node.storing += count
            self.touched.add(node)
            self.host_used_pages += count
            begun.append((node, count))
            if count < missing:
                break
        if begun:
            self.lock(_up(begun[-1][0]))
        return begun

    def stored(self, begun: Sequence[tuple[Node, int]]) -> None:
        """That copy ended."""
        for node, count in begun:
            if node.host == 0 and node.parent is not None:
                node.parent.host_children += 1
            node.storing -= count
            node.host += count
            self.touched.add(node)
        self.unlock(list(_up(begun[-1][0]))[::-1])
        for node, _ in reversed(begun):
            self._offer_host(node)

    @property
    def host_free_pages(self) -> int:
        return self.host_pages - self.host_used_pages

    def free_host(self, pages: int) -> bool:
        """Whether so many are free now: the coldest copies that nobody needs went for it."""
        return self._host_room(pages, keep=()) >= pages

    def _offer_host(self, node: Node) -> None:
        if self._is_host_cold(node):
            self._entries += 1
            heapq.heappush(self._host_cold, (node.used, self._entries, node))

    def _is_host_cold(self, node: Node) -> bool:
        """Upstream frees no copy of what the device has too."""
        needed = node.host_pins or node.host_children or node.storing or node.locks or node.device
        return bool(node.host) and not needed

    def _host_room(self, pages: int, *, keep: Sequence[Node]) -> int:
        """Free host pages up to `pages`; copies that no parked request needs go for it, coldest first."""
        kept: list[tuple[int, int, Node]] = []
        while self.host_free_pages < pages and self._host_cold:
            entry = heapq.heappop(self._host_cold)
            used, _, node = entry
            if used != node.used or not self._is_host_cold(node):
                continue  # whatever changed either of them offered it again, or will
            if node in keep:
                kept.append(entry)
                continue
            self._drop_host(node, min(node.host, pages - self.host_free_pages))
        for entry in kept:
            heapq.heappush(self._host_cold, entry)
        return min(pages, self.host_free_pages)

    def _drop_host(self, node: Node, pages: int) -> None:
        node.host -= pages
        self.touched.add(node)
        self.host_used_pages -= pages
        if node.host:
            self._offer_host(node)
            return
        parent = node.parent
        assert parent is not None
        parent.host_children -= 1
        if parent.parent is not None:
            self._offer_host(parent)
        self._forget(node)

    # ---- for tests

    def nodes(self) -> Iterator[Node]:
        left = list(self.root.children.values())
        while left:
            node = left.pop()
            left += node.children.values()
            yield node

    def check(self, taken_pages: int) -> None:
        """Raises AssertionError unless every count agrees with the nodes; `taken_pages` are outside of the tree."""
        nodes = list(self.nodes())
        device = sum(n.device for n in nodes)
        assert self.free_pages + device + taken_pages == self.device_pages, (self.free_pages, device, taken_pages)
        assert self.free_pages >= 0
        assert self.evictable_pages == sum(n.device for n in nodes if n.locks == 0)
        assert self.host_used_pages == sum(n.host + n.storing for n in nodes) <= max(0, self.host_pages)
        for n in nodes:
            assert n.parent is not None
            whole = n.end_tokens // self.page_tokens - n.start
            assert 0 <= n.device <= whole and 0 <= n.host + n.storing <= whole, n.key
            assert n.device_children == sum(c.device > 0 for c in n.children.values()), n.key
            assert n.host_children == sum(c.host > 0 for c in n.children.values()), n.key
            parent = n.parent
            if n.device and parent.parent is not None:
                assert parent.device == parent.end_tokens // self.page_tokens - parent.start, n.key
            assert parent.parent is None or parent.locks >= (n.locks > 0), n.key


def _up(node: Node) -> Iterator[Node]:
    at: Node | None = node
    while at is not None and at.parent is not None:
        yield at
        at = at.parent
