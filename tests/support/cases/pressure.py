"""Memory is short (field reports B03, B07, B09 and B32), on a fake clock: a step takes 20 ms, a running stream makes
50 tokens a second, prefill runs at 2000 tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from support.engine import Engine
from support.play import Ask, ask, has, play, solo_tokens, tokenflow
from tokenflow_sgl.core.policy import TokenFlowPolicy

STEP_S = 0.02
PREFILL_TOK_S = 2000.0


def _journal(name: str) -> Path:
    return Path(mkdtemp()) / f"{name}.jsonl"


def _clock(engine: Engine, prefill_tok_s: float = PREFILL_TOK_S) -> None:
    engine.fake_clock(STEP_S, prefill_tok_s)


# ---- B03: pool 1024


def newcomer_against_memory(engine: Engine) -> dict[str, Any]:
    """Two low streams of 180+260, then one of 400+20 when memory is still free, and when it is not."""
    _clock(engine)
    report: dict[str, Any] = {}
    for at_token, rate in ((60, 5.0), (200, 5.0), (200, 1000.0)):
        low = [ask(f"low{i}", 180, 260, rate=rate) for i in range(2)]
        new = ask("new", 400, 20)
        key = f"{at_token} tokens in, {rate:g} tok/s"
        report[key] = play(engine, low, tokenflow(), later=[(has("low0", at_token), [new])], journal=_journal("b03"))
        report[key]["at_token"] = at_token
    report["solo"] = solo_tokens(engine, [*low, new])
    return report


def stock_newcomer(engine: Engine) -> dict[str, Any]:
    """What the same newcomer waits for under stock's admission."""
    _clock(engine)
    low = [ask(f"low{i}", 180, 260, rate=5.0) for i in range(2)]
    return play(engine, low, later=[(has("low0", 200), [ask("new", 400, 20)])])


# ---- B07 and B09: pool 512, page 16


def ping_pong(engine: Engine) -> dict[str, Any]:
    """Four streams of 300 tokens each and a burst of six prompts of 100, and the same without the burst."""
    _clock(engine)
    four = [ask(f"long{i}", 60, 240, rate=8.0) for i in range(4)]
    burst = [ask(f"burst{i}", 100, 20, rate=8.0) for i in range(6)]
    rooms: list[dict[str, Any]] = []
    record_admissions(engine, rooms)
    with_burst = play(engine, four, tokenflow(), later=[(has("long0", 40), burst)], journal=_journal("b07"))
    del engine.scheduler.executor.admit
    return {
        "burst": with_burst,
        "rooms": rooms,
        "no burst": play(engine, four, tokenflow()),
        "stock": play(engine, four, later=[(has("long0", 40), burst)]),
        "solo": solo_tokens(engine, [*four, *burst]),
    }


def record_admissions(engine: Engine, rooms: list[dict[str, Any]]) -> None:
    """What each started stream that the plan lets back in needs, and what is free at that moment, parks done."""
    executor = engine.scheduler.executor
    admit = type(executor).admit

    def recorded(order: Any, **limits: Any) -> None:
        view = executor.view()
        for r in view.requests() if order else ():
            if r.rid in order and r.output_tokens:
                rooms.append({"rid": r.rid, "needs": r.takes_tokens, "free": view.device_free_tokens})
        admit(executor, order, **limits)

    executor.admit = recorded


def too_long(engine: Engine) -> dict[str, Any]:
    """B09 a and d: prompts around the size of the pool, each followed by a small request."""
    _clock(engine)
    report: dict[str, Any] = {}
    for prompt_tokens in (600, 512, 511, 498, 497, 496, 495, 494, 480):
        asks = [ask("big", prompt_tokens, 8), ask("next", 20, 8)]
        report[str(prompt_tokens)] = play(engine, asks, tokenflow(), max_iterations=500)
    return report


def outgrows_the_pool(engine: Engine) -> dict[str, Any]:
    """B09 b and c: 450+200 in 512, alone and among five small streams."""
    _clock(engine)
    big = ask("big", 450, 200)
    small = [ask(f"small{i}", 20, 40) for i in range(5)]
    return {
        "alone": play(engine, [big], tokenflow(), max_iterations=3000),
        "stock alone": play(engine, [big], max_iterations=3000),
        "after small": play(engine, [*small, big], tokenflow(), max_iterations=6000),
        "before small": play(engine, [big], tokenflow(), later=[(has("big", 4), small)], max_iterations=6000),
        "solo": solo_tokens(engine, small),
    }


def identity_in_a_small_pool(engine: Engine) -> dict[str, Any]:
    """Nothing is pretended here: the policy parks because memory really ends."""
    _clock(engine)
    asks = [ask(f"s{i}", 20 + i, 120, rate=6.0 + i) for i in range(8)]
    return {
        "parked": play(engine, asks, tokenflow(min_run_tokens=8, min_slack_s=0.5), journal=_journal("small")),
        "solo": solo_tokens(engine, asks),
    }


# ---- B32, chunk 256: (a) pool 2048; (b) a prompt of 4000 needs a larger pool


def big_one_at_the_head(engine: Engine) -> dict[str, Any]:
    _clock(engine)
    running = [ask(f"run{i}", 200, 600, rate=5.0) for i in range(2)]
    queue = [ask("large", 1800, 20), *(ask(f"small{i}", 30, 20) for i in range(20))]
    return play(engine, running, tokenflow(), later=[(has("run0", 150), queue)], journal=_journal("b32a"))


def long_prefill_beside_readers(engine: Engine) -> dict[str, Any]:
    """Six readers with three seconds in hand; the 4000-token prompt takes 2 s of prefill, and 4 s at half the speed."""
    report: dict[str, Any] = {}
    for prefill_tok_s in (2000.0, 1000.0):
        _clock(engine, prefill_tok_s)
        policy = tokenflow()
        readers = [ask(f"reader{i}", 40, 400, rate=10.0) for i in range(6)]
        report[f"{prefill_tok_s:g} tok/s"] = play(
            engine, readers, policy, later=[(_slack_of_all(policy, readers, 3.0), [ask("long", 4000, 20)])],
            journal=_journal("b32b"),
        )  # fmt: skip
    return report


def _slack_of_all(policy: TokenFlowPolicy, asks: list[Ask], slack_s: float) -> Callable[[Engine], bool]:
    def reached(e: Engine) -> bool:
        slacks = [policy.slack_of(a["rid"], e.now_s) for a in asks]
        return all(s is not None and s >= slack_s for s in slacks)

    return reached


# ---- the same script for the simulator


def sim_parity(engine: Engine) -> dict[str, Any]:
    """Six long answers fill a pool of 2048, then eight short ones come: the journal, and what was asked."""
    _clock(engine)
    long = [ask(f"long{i}", 60 + 10 * i, 240, rate=8.0) for i in range(6)]
    short = [ask(f"short{i}", 80 + 5 * i, 30, rate=8.0) for i in range(8)]
    path = _journal("parity")
    report = play(engine, long, tokenflow(), later=[(has("long0", 100), short)], journal=path)
    scheduler = engine.scheduler
    return {
        "journal": path.read_text(),
        "report": report,
        "asks": [
            {
                "rid": a["rid"],
                "prompt_tokens": len(a["prompt"]),
                "max_new_tokens": a["max_new_tokens"],
                "rate_tok_s": a["tokenflow"]["rate"],
            }
            for a in (*long, *short)
        ],
        "step_s": STEP_S,
        "prefill_tok_s": PREFILL_TOK_S,
        "page_tokens": scheduler.page_size,
        "pool_tokens": scheduler.max_total_num_tokens,
        "chunk_tokens": scheduler.chunked_prefill_size,
        "host_tokens": scheduler.host_tier.total_tokens,
    }
