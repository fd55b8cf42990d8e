"""Copies between the tiers in a real engine, with a faulty machine under them: late, out of order, failing, silent."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

from support.copies import LOAD, STORE, FaultyCopies, Transfer, numbers
from support.engine import Engine
from support.pages import PageSums
from support.play import Ask, ask, has, play, prompt, scripted, solo_tokens, tokenflow

Each = Callable[[Engine], None]


def evicting(every: int, *, settled: bool = False) -> Each:
    """Push everything evictable off the device every so many iterations while somebody is away.

    `settled`: only when every store begun so far has ended.
    """

    def each(e: Engine) -> None:
        if e.iterations % every == 0 and any(r.output_ids for r in e.scheduler.waiting_queue):
            if settled:
                e.settle_stores()
            e.evict_device()

    return each


def _all_done(tree: Any) -> bool:
    """Whether every copy that upstream waits for has ended, and none is still to be started."""
    controller = tree.cache_controller
    return not controller.write_queue and all(ack.finish_event.query() for ack in controller.ack_write_queue)


# ---- B15: completions are collected while nothing but decode happens


def collected_while_decoding(engine: Engine) -> dict[str, Any]:
    """Four streams of 300 tokens in a pool that needs what the copies let go of; stores take 20 ms."""
    tree = engine.scheduler.tree_cache
    asks = [ask(f"s{i}", 40, 300) for i in range(4)]
    seen: dict[str, Any] = {"most_open": 0, "longest_after_end": 0, "protected_too_long": 0}
    streak = 0

    with FaultyCopies(engine) as faults:
        faults.delay(0.02)

        def each(e: Engine) -> None:
            nonlocal streak
            open_ = len(tree.ongoing_write_through)
            seen["most_open"] = max(seen["most_open"], open_)
            streak = streak + 1 if open_ and _all_done(tree) else 0
            seen["longest_after_end"] = max(seen["longest_after_end"], streak)

        report = play(engine, asks, scripted(publish=16), each=each)
        seen["transfers"] = len(faults.transfers)
    return {"report": report, "seen": seen, "solo": solo_tokens(engine, asks)}


def collected_while_idle(engine: Engine) -> dict[str, Any]:
    """A stream ends while its stores stand still; they go on when nobody is served any more."""
    tree = engine.scheduler.tree_cache
    with FaultyCopies(engine) as faults:
        faults.freeze(STORE)
        engine.use(scripted(publish=16))
        engine.submit(**ask("last", 40, 60))
        engine.run(lambda e: e.streams["last"].finish is not None)
        first, left = engine.iterations, []

        def idle(e: Engine) -> bool:
            left.append(len(tree.ongoing_write_through))
            return e.iterations - first > 20

        engine.run(idle)
        faults.thaw(STORE)
        while not _all_done(tree):
            os.sched_yield()
        first = engine.iterations
        engine.run(lambda e: not tree.ongoing_write_through or e.iterations - first > 1000)
        took = engine.iterations - first
    engine.run_until_idle()
    report = engine.idle_report()
    engine.reset()
    return {"open_while_frozen": left[-1], "iterations_after": took, "idle": report}


# ---- B19: late and reordered copies, freed pages poisoned, a host tier too small for everybody


def reused_while_copied(engine: Engine) -> dict[str, Any]:
    """Ten streams, each parked 30 times; 300 cycles. Pages are summed when a stream is parked and when it is back."""
    rng = random.Random(19)
    asks = [ask(f"s{i}", rng.randrange(20, 120), 330) for i in range(10)]
    parks = [(f"s{i}", 8 + 10 * n + rng.randrange(8), rng.randrange(1, 9)) for i in range(10) for n in range(30)]
    solo = solo_tokens(engine, asks)
    _host_of(engine.scheduler.host_tier, 2048)  # all ten need about 4000
    with FaultyCopies(engine, seed=19) as faults, PageSums(engine) as sums:
        faults.delay(0.002, lambda t: t.number % 3 == 0)
        faults.reorder()
        faults.poison_freed()
        report = play(engine, asks, scripted(*parks, publish=16), each=evicting(4), max_s=200.0)
    _host_of(engine.scheduler.host_tier, None)
    return {"report": report, "solo": solo, "sums": sums.report(), "open_at_return": sums.open_at_return}


# ---- B23: a load that fails costs one recompute

_FAILS = ("first", "middle", "last", "all", "corrupt")


def failed_load(engine: Engine) -> dict[str, Any]:
    """The stream `a` is parked and pushed off the device; its load fails on some of its pages, or finds them changed.

    It is parked once more later: by then what failed must be good again, or never be loaded.
    """
    found: dict[str, Any] = {}
    asks = [ask("a", 100, 120), ask("b", 50, 200)]
    solo = solo_tokens(engine, asks)
    for how in _FAILS:
        with FaultyCopies(engine) as faults:
            if how == "corrupt":
                faults.corrupt(numbers(STORE, 0), page=0)
            elif how == "all":
                faults.fail(numbers(LOAD, 0))
            else:
                _corrupt_at_load(engine, faults, how)
            report = play(
                engine, asks, scripted(("a", 40, 6), ("a", 90, 6), publish=16), each=evicting(1, settled=True)
            )
        found[how] = {"report": report, "trust": engine.scheduler.host_tier.trust.ok}
    return {"runs": found, "solo": solo}


def _corrupt_at_load(engine: Engine, faults: FaultyCopies, where: str) -> None:
    """When the first load begins, one of its pages changes on the host, whatever the store that put it there."""
    from support.copies import corrupt_page, host_pool_of

    done: list[Transfer] = []

    def once(transfer: Transfer) -> bool:
        if transfer.direction == LOAD and not done:
            done.append(transfer)
            pages = sorted(transfer.host_pages)
            page = {"first": pages[0], "middle": pages[len(pages) // 2], "last": pages[-1]}[where]
            corrupt_page(host_pool_of(engine), page)
        return False

    faults.fail(once)


def degraded(engine: Engine) -> dict[str, Any]:
    """Every load fails: after three in a row no copy is made, and everybody is served all the same."""
    from tokenflow_sgl.adapter import state_report

    asks = [ask(f"s{i}", 60, 160) for i in range(4)]
    parks = [(f"s{i}", at, 3) for i in range(4) for at in (30, 60, 90, 120)]
    states: list[dict[str, int]] = []
    with FaultyCopies(engine) as faults:
        faults.fail(numbers(LOAD))

        def each(e: Engine) -> None:
            evicting(1, settled=True)(e)
            if e.iterations % 5 == 0:
                states.append(state_report.memory(e.scheduler))

        report = play(engine, asks, scripted(*parks, publish=16), each=each)
        loads = sum(t.direction == LOAD for t in faults.transfers)
    tier = engine.scheduler.host_tier
    logged = {"strikes": tier.trust.strikes, "ok": tier.ok}
    _trust_again(engine)
    return {
        "report": report, "solo": solo_tokens(engine, asks), "loads": loads, "tier": logged,
        "degraded_states": sum(s["host_degraded"] for s in states),
    }  # fmt: skip


def _trust_again(engine: Engine) -> None:
    """The next case begins with a tier that works."""
    tier = engine.scheduler.host_tier
    tier.trust.strikes, tier.trust.lost_at_s = dict.fromkeys(tier.trust.strikes, 0), None
    tier.store_on_insert(True)


def lost_store(engine: Engine) -> dict[str, Any]:
    """A store whose end is never told, and whose pages are wanted back: nobody waits longer than its deadline."""
    return _lost(engine, (STORE, 1))


def lost_load(engine: Engine) -> dict[str, Any]:
    """A load whose end is never told: the stream it was for is computed again."""
    return _lost(engine, (LOAD, 0))


def _lost(engine: Engine, which: tuple[str, int]) -> dict[str, Any]:
    """The clock counts 20 ms a step: the deadline of 2 s comes after 100 of them. What is lost is told at the end."""
    asks = [ask(f"s{i}", 60, 280) for i in range(3)]
    solo = solo_tokens(engine, asks)
    engine.fake_clock(0.02, copy_deadline_s=2.0)
    ledger, tree = engine.scheduler.ledger, engine.scheduler.tree_cache
    with FaultyCopies(engine) as faults:
        faults.lose(lambda t: (t.direction, t.number) == which)
        engine.use(scripted(("s0", 150, 3), ("s1", 160, 3), publish=16))
        streams = [engine.submit(**a) for a in asks]
        before, seq = dict(ledger.counters), ledger.seq
        engine.run(lambda e: bool(evicting(2)(e)) or all(s.finish is not None for s in streams), max_s=60.0)
        open_ = (len(tree.ongoing_write_through), len(tree.ongoing_load_back))
        counters = {k: v - before[k] for k, v in ledger.counters.items()}
        was_idle, found = engine.scheduler.is_fully_idle(), faults.find_lost()
        engine.run_until_idle()
    report = engine.idle_report()
    moves = [t for t in ledger.transitions if t["seq"] > seq]
    tokens = {s.rid: s.tokens for s in streams}
    engine.reset()
    _trust_again(engine)
    return {
        "tokens": tokens, "solo": solo, "counters": counters, "idle": report, "open_at_end": open_, "moves": moves,
        "idle_before_it_was_told": was_idle, "told": found,
    }  # fmt: skip


# ---- who goes while its pages are on their way


def aborted_while_loading(engine: Engine) -> dict[str, Any]:
    """The only stream is parked, its load stands still, and its client goes; then the copy ends on an idle engine."""
    with FaultyCopies(engine) as faults:
        engine.use(scripted(("a", 30, 3), publish=16))
        engine.submit(**ask("a", 60, 200))
        faults.freeze(LOAD)
        seen: list[int] = []

        def aborted(e: Engine) -> bool:
            evicting(1, settled=True)(e)
            seen.append(len(e.scheduler.host_tier.loads))
            if seen[-1] and seen.count(1) == 5:
                e.abort("a")
            return e.streams["a"].finish is not None

        engine.run(aborted)
        first = engine.iterations
        engine.run(lambda e: e.iterations - first > 20)  # idle, with pages that are nobody's
        faults.thaw(LOAD)
        engine.run_until_idle()
    report = engine.idle_report()
    engine.reset()
    return {"loading": max(seen), "idle": report}


def host_full_once(engine: Engine) -> dict[str, Any]:
    """Waves of prompts, more than the host tier holds in all: running streams are published all the same."""
    tier, wave_tokens = engine.scheduler.host_tier, 4 * (120 + 60)
    waves = tier.total_tokens // wave_tokens + 6
    engine.fake_clock(0.02, prefill_tok_s=2000.0)  # what a publish is worth must not depend on how busy the machine is
    engine.use(tokenflow(publish_below=1.0, publish_interval_tokens=16, publish_share=1.0))
    counters, published, free = engine.scheduler.ledger.counters, [], []
    for wave in range(waves):
        before = counters["published_tokens"]
        for i in range(4):
            engine.submit(**ask(f"w{wave}s{i}", 120, 60))
        engine.run_until_done(each=Engine.settle_stores)
        published.append(counters["published_tokens"] - before)
        free.append(tier.free_tokens)
        engine.streams.clear()
    report = engine.idle_report()
    engine.reset()
    return {"published": published, "free": free, "idle": report, "total": tier.total_tokens}


# ---- B21: whole pages


def whole_pages(engine: Engine) -> dict[str, Any]:
    """Streams parked at contexts around page ends, in a host tier with no page to spare, one, and one too few."""
    page = engine.scheduler.page_size
    tier = engine.scheduler.host_tier
    found: list[dict[str, Any]] = []
    for context in (15, 16, 17, 63, 64, 65, 127, 128):
        # The context at the park: prompt + output; the newest token's KV is not written.
        a = [ask("a", context - 6, 20)]
        solo = solo_tokens(engine, a)["a"]
        need = context // page
        for spare in (1, 0, -1):
            _host_of(tier, max(1, need + spare) * page)
            with PageSums(engine) as sums:
                report = play(
                    engine, a, scripted(("a", 6, 6), publish=1), each=evicting(1, settled=True), keep_cache=True
                )
            found.append({
                "context": context, "spare": spare, "whole": need, "solo": solo,
                "tokens": report["streams"]["a"]["tokens"], "idle": report["idle"],
                "stored": report["counters"]["stored_tokens"], "sums": sums.report(),
                "parks": report["parks"]["a"],
            })  # fmt: skip
            engine.reset()
    _host_of(tier, None)
    return {"page": page, "runs": found}


def _host_of(tier: Any, tokens: int | None) -> None:
    """A host pool of so many tokens, in the memory of the one there is; None gives all of it back. Both are empty."""
    pool = tier.controller.mem_pool_host.anchor_entry.host_pool
    whole = pool.k_data_refs[0].shape[0]
    tier.cut(whole if tokens is None else tokens)


# ---- B25: KV belongs to its prompt and to everything that made it


def salts_and_flushes(engine: Engine) -> dict[str, Any]:
    """One prompt of 200 tokens under no salt and two salts, all parked at once; then parked and the cache emptied."""
    common = prompt(200, "b25")
    asks: list[Ask] = [
        {**ask(f"k{i}", 200, 60), "prompt": common, "extra_key": key}
        for i, key in enumerate((None, "salt-1", "salt-2"))
    ]
    solo = solo_tokens(engine, asks)
    hits: dict[str, int] = {}

    def each(e: Engine) -> None:
        evicting(1, settled=True)(e)
        for req in e.scheduler.waiting_queue:
            if not req.output_ids:
                hits[req.rid] = req.tokenflow.cached_tokens + req.tokenflow.host_hit_tokens

    later = [(has("k0", 20), asks[1:2]), (has("k1", 4), asks[2:3])]
    script = scripted(("k0", 30, 12), ("k1", 12, 8), ("k2", 6, 4), publish=16)
    parked = play(engine, asks[:1], script, later=later, each=each)
    return {"parked": parked, "solo": solo, "hits": hits, "flush": _flush_while_parked(engine, asks[0])}


def _flush_while_parked(engine: Engine, a: Ask) -> dict[str, Any]:
    """A flush is refused while the stream is parked; with the engine paused it is done, and KV is computed again."""
    scheduler = engine.scheduler
    answers: list[bool] = []
    counters = scheduler.ledger.counters
    before: dict[str, int] = {}

    def each(e: Engine) -> None:
        parked = [r for r in scheduler.waiting_queue if r.output_ids]
        idle = not scheduler.running_batch.reqs and scheduler.last_batch is None
        if not parked or answers or not idle:
            return
        answers.append(scheduler.flush_cache(empty_cache=False))
        scheduler._engine_paused = True
        answers.append(scheduler.flush_cache(empty_cache=False))
        scheduler._engine_paused = False
        before.update(counters)

    report = play(engine, [a], scripted((a["rid"], 20, 30), publish=16), each=each)
    return {
        "answers": answers, "report": report,
        "loaded": counters["loaded_tokens"] - before["loaded_tokens"],
        "computed": counters["reprefilled_tokens"] - before["reprefilled_tokens"],
    }  # fmt: skip
