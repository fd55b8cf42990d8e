"""Plays requests through one engine under one policy and tells what every client saw and what the scheduler did.

Owns the shape of that report, plain enough for JSON. Invariant: the engine is idle and empty before and after.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.engine import Engine, Stream
from tokenflow_sgl.core.baselines import Fcfs, Scripted, ScriptedPark
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.journal import Journal, replay
from tokenflow_sgl.core.policies import header_of, make_policy, policy_from_header
from tokenflow_sgl.core.policy import TokenFlowPolicy

Ask = dict[str, Any]  # arguments of Engine.submit
PUBLISH = 16

# An arrival: the asks, and when they are sent.
Arrival = tuple[Callable[[Engine], bool], Sequence[Ask]]


def prompt(tokens: int, *seed: Any) -> list[int]:
    """Random token ids past the special ones; the same for the same seed in every process."""
    rng = random.Random(repr(seed))
    return [rng.randrange(10, 1000) for _ in range(tokens)]


def ask(rid: str, prompt_tokens: int, max_new_tokens: int, *, rate: float = 6.0, **options: Any) -> Ask:
    """`same_as` gives the prompt of another rid."""
    seed = options.pop("same_as", rid)
    return {
        "rid": rid,
        "prompt": prompt(prompt_tokens, seed),
        "max_new_tokens": max_new_tokens,
        "tokenflow": {"rate": rate},
        **options,
    }


def scripted(*parks: tuple[str, int, int], publish: int = PUBLISH) -> Scripted:
    """(rid, at token, steps away)."""
    return Scripted([ScriptedPark(*p) for p in parks], publish_interval_tokens=publish)


def tokenflow(**settings: Any) -> TokenFlowPolicy:
    return TokenFlowPolicy(PolicyConfig(**settings))


def journaled(policy: TokenFlowPolicy | Scripted, path: Path) -> Journal:
    if isinstance(policy, TokenFlowPolicy):
        return Journal.open(path, header_of("tokenflow", policy.config))
    parks = [{"rid": p.rid, "at_token": p.at_token, "steps": p.steps} for p in policy.script]
    script = {"parks": parks, "publish_interval_tokens": policy.publish_interval_tokens}
    return Journal.open(path, header_of("scripted", PolicyConfig(), script))


def play(
    engine: Engine,
    asks: Sequence[Ask],
    policy: Any = None,
    *,
    later: Sequence[Arrival] = (),
    each: Callable[[Engine], None] | None = None,
    journal: Path | None = None,
    keep_cache: bool = False,
    max_iterations: int = 100_000,
    max_s: float = 120.0,
) -> dict[str, Any]:
    """Send `asks` at once and every arrival of `later` when its condition holds; run until all have ended.

    No policy is stock's admission on our scheduler. `each` is asked at the start of every iteration. Streams that have
    not ended after `max_iterations` are named as stuck, with their tokens so far, and aborted.
    """
    scheduler = engine.scheduler
    ours = hasattr(scheduler, "ledger")
    book = None
    if ours:
        policy = Fcfs() if policy is None else policy
        book = journaled(policy, journal) if journal is not None else None
        engine.use(policy, book)
        first_seq, before = scheduler.ledger.seq, dict(scheduler.ledger.counters)
    first_step, first_iteration = scheduler.forward_ct, engine.iterations
    streams = [engine.submit(**a) for a in asks]
    pending = list(later)

    def done(e: Engine) -> bool:
        if each is not None:
            each(e)
        for arrival in list(pending):
            condition, arriving = arrival
            if condition(e):
                pending.remove(arrival)
                streams.extend(e.submit(**a) for a in arriving)
        return not pending and all(s.finish is not None for s in streams)

    stuck: dict[str, int] = {}
    try:
        engine.run(done, max_iterations=max_iterations, max_s=max_s)
    except TimeoutError:
        stuck = engine.unfinished()
        engine.abort(abort_all=True)
    steps = scheduler.forward_ct - first_step
    iterations = engine.iterations - first_iteration
    engine.run_until_idle()
    report: dict[str, Any] = {
        "streams": {s.rid: client_saw(s) for s in streams},
        "idle": engine.idle_report(),
        "stuck": stuck,
        "steps": steps,
        "iterations": iterations,
    }
    if ours:
        moves = [t for t in scheduler.ledger.transitions if t["seq"] > first_seq]
        report["moves"] = moves
        report["parks"] = {s.rid: sum(t["id"] == s.rid and t["what"] == "park" for t in moves) for s in streams}
        report["counters"] = {k: v - before[k] for k, v in scheduler.ledger.counters.items()}
        engine.use(Fcfs())
    if book is not None:
        book.close()
        report["replay"] = replay(journal, policy_from_header)
    if not keep_cache:
        engine.reset()
        host = scheduler.tree_cache.cache_controller.mem_pool_host
        report["idle"]["host"] = (host.available_size(), host.size)
    else:
        engine.streams.clear()
    return report


def solo_tokens(engine: Engine, asks: list[Ask]) -> dict[str, list[int]]:
    """Each ask alone in the engine, nobody parked."""
    return {a["rid"]: play(engine, [a])["streams"][a["rid"]]["tokens"] for a in asks}


def client_saw(s: Stream) -> dict[str, Any]:
    return {
        "tokens": s.tokens,
        "logprobs": s.logprobs,
        "top": s.top_logprobs,
        "finish": s.finish,
        "completion_tokens": s.completion_tokens,
        "prompt_tokens": s.prompt_tokens,
        "cached_tokens": s.cached_tokens,
        "chunks": [len(c) for c in s.chunks],
        "sent_s": s.sent_s,
        "times_s": s.times_s,
    }


def has(rid: str, tokens: int) -> Callable[[Engine], bool]:
    """The stream has sent that many tokens to its client."""
    return lambda e: rid in e.streams and len(e.streams[rid].tokens) >= tokens


__all__ = [
    "Ask",
    "Arrival",
    "ask",
    "client_saw",
    "has",
    "make_policy",
    "play",
    "prompt",
    "scripted",
    "solo_tokens",
    "tokenflow",
]
