"""The radix tree as page counts, against a plain model of its rules and under random use."""

from __future__ import annotations

import random

import pytest

from tokenflow_sgl.sim.tree import PrefixTree


def tree_of(device=64, host=64, page=16):
    return PrefixTree(page_tokens=page, device_pages=device, host_pages=host)


def put(tree, path, tokens):
    """As a request that computes `tokens` and holds the path: pages are taken, then the tree's."""
    pages = tokens // tree.page_tokens
    device, _ = tree.hit_pages(path, limit_pages=1 << 30)
    tree.take(pages - device)
    tree.lock(path)
    added = tree.insert(path, pages)
    tree.give(pages - device - added)


def test_a_page_belongs_to_the_segment_in_which_it_ends():
    # 20 + 30 + 20 tokens in pages of 16: pages end at 16, 32, 48, 64, so 1, 2 and 1 of them.
    tree = tree_of()
    path = tree.path([("a", 20), ("b", 30), ("c", 20)])
    put(tree, path, 70)
    assert [n.device for n in path] == [1, 2, 1]
    assert tree.free_pages == 64 - 4
    assert tree.hit_pages(path, limit_pages=99) == (4, 0)
    assert tree.hit_pages(path, limit_pages=3) == (3, 0)


def test_a_shared_prefix_is_held_once_and_found_by_the_next():
    tree = tree_of()
    one = tree.path([("system", 64), ("u1", 32)])
    put(tree, one, 96)
    two = tree.path([("system", 64), ("u2", 32)])
    assert tree.hit_pages(two, limit_pages=99) == (4, 0)
    put(tree, two, 96)
    assert tree.free_pages == 64 - 4 - 2 - 2
    # What only its own lock holds: the two pages of its question.
    assert tree.own_pages(two) == 2
    tree.unlock(one)
    assert tree.own_pages(two) == 6
    assert tree.evictable_pages == 2


def test_the_coldest_leaf_goes_first_and_never_what_is_locked():
    tree = tree_of(device=8, host=0)
    paths = [tree.path([("s", 32), (f"u{i}", 32)]) for i in range(3)]
    for path in paths:
        put(tree, path, 64)
    # 2 shared + 3 x 2 of their own: all taken.
    assert tree.free_pages == 0 and tree.evictable_pages == 0
    tree.unlock(paths[1])
    tree.unlock(paths[0])
    assert tree.evictable_pages == 4  # the shared pages are held by the third
    tree.take(1)
    assert [p[1].device for p in paths] == [2, 1, 2]
    tree.take(2)
    assert [p[1].device for p in paths] == [1, 0, 2]
    with pytest.raises(AssertionError, match="nothing to evict"):
        tree.take(2)


def test_what_was_stored_is_found_on_the_host_after_eviction():
    tree = tree_of(device=8, host=8)
    path = tree.path([("a", 64)])
    put(tree, path, 64)
    begun = tree.store_missing(path)
    assert [(n.key, count) for n, count in begun] == [("a", 4)]
    assert tree.backed_pages(path) == (0, 4)
    tree.unlock(path)
    assert tree.evictable_pages == 0, "an open copy holds its pages"
    tree.stored(begun)
    assert tree.backed_pages(path) == (4, 0) and tree.evictable_pages == 4
    tree.take(8)
    assert tree.hit_pages(path, limit_pages=99) == (0, 4)


def test_without_a_host_copy_what_is_evicted_is_lost():
    tree = tree_of(device=4, host=0)
    path = tree.path([("a", 64)])
    put(tree, path, 64)
    assert tree.store_missing(path) == []
    tree.unlock(path)
    tree.take(3)
    assert tree.hit_pages(path, limit_pages=99) == (1, 0)


def test_a_full_host_gives_away_the_coldest_copy_and_never_one_that_is_pinned():
    tree = tree_of(device=64, host=4)
    one, two, three = (tree.path([(key, 32)]) for key in "abc")
    for path in (one, two):
        put(tree, path, 32)
        tree.stored(tree.store_missing(path))
        tree.unlock(path)
    tree.pin_host(one)
    put(tree, three, 32)
    assert tree.store_missing(three) == [], "one is pinned, the device has two as well: upstream frees no such copy"
    tree.take(62)  # of 58 free: both leave the device
    tree.stored(tree.store_missing(three))
    assert [p[0].host for p in (one, two, three)] == [2, 0, 2]
    tree.give(62)
    tree.unlock(three)
    tree.pin_host(three)
    four = tree.path([("d", 32)])
    put(tree, four, 32)
    assert tree.store_missing(four) == [], "both copies are pinned"


@pytest.mark.parametrize("seed", range(20))
def test_every_count_balances_under_random_use(seed):
    rng = random.Random(seed)
    tree = tree_of(device=60, host=rng.choice((0, 20, 100)), page=rng.choice((1, 4, 16)))
    live: list[tuple[list, int]] = []  # (path, pages outside of the tree)
    copies: list = []
    for step in range(600):
        deed = rng.random()
        if deed < 0.35:
            system, user = rng.randrange(2), rng.randrange(6)
            keys = [(f"sys{system}", 3 * tree.page_tokens + 1), (f"u{user}", (1 + user) * tree.page_tokens + user % 3)]
            path = tree.path(keys)
            tree.extend_path(path, f"out{step}")
            tokens = sum(t for _, t in keys)
            pages = -(-tokens // tree.page_tokens)
            device, _ = tree.hit_pages(path, limit_pages=1 << 30)
            tree.lock(path)
            if pages - device > tree.free_pages + tree.evictable_pages:
                tree.unlock(path)
                tree.let_go(path)
                continue
            tree.take(pages - device)
            whole = tokens // tree.page_tokens
            added = tree.insert(path, whole)
            tree.give(whole - device - added)
            live.append((path, pages - whole))
        elif deed < 0.6 and live:
            path, extra = live.pop(rng.randrange(len(live)))
            tree.give(extra)
            tree.unlock(path)
            tree.let_go(path)
        elif deed < 0.8 and live:
            begun = tree.store_missing(rng.choice(live)[0])
            if begun:
                copies.append(begun)
        elif copies:
            tree.stored(copies.pop(rng.randrange(len(copies))))
        tree.check(sum(extra for _, extra in live))
    for path, extra in live:
        tree.give(extra)
        tree.unlock(path)
        tree.let_go(path)
    for begun in copies:
        tree.stored(begun)
    tree.check(0)
    assert tree.free_pages + tree.evictable_pages == 60
