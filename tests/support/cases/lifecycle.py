"""Parked streams among everything else that happens to requests: aborts, upstream's retractions, chunked prompts, the
end of the server (field report B13 a)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from support.engine import Engine
from support.play import Ask, ask, has, play, scripted, solo_tokens, tokenflow

FOR_EVER = 10**9
NAMES = ("u1", "u10", "u100", "v1")


def is_parked(engine: Engine, rid: str) -> bool:
    return any(r.rid == rid and r.output_ids for r in engine.scheduler.waiting_queue)


def _once(condition: Callable[[Engine], bool], act: Callable[[Engine], None]) -> Callable[[Engine], None]:
    done: list[bool] = []

    def each(e: Engine) -> None:
        if not done and condition(e):
            done.append(True)
            act(e)

    return each


def abort_by_exact_id(engine: Engine) -> dict[str, Any]:
    asks = [ask(name, 20, 60) for name in NAMES]
    running = _once(has("u1", 20), lambda e: e.abort("u1"))
    parked = _once(lambda e: is_parked(e, "u1") and is_parked(e, "u10"), lambda e: e.abort("u1"))
    return {
        "running": play(engine, asks, scripted(("u10", 15, 10)), each=running),
        "parked": play(engine, asks, scripted(("u1", 15, FOR_EVER), ("u10", 15, 30)), each=parked),
        "solo": solo_tokens(engine, asks),
    }


def abort_all(engine: Engine) -> dict[str, Any]:
    """Running, parked, in the middle of a chunked prompt, and waiting."""
    asks = [ask(f"s{i}", 20, 200) for i in range(4)]
    script = scripted(("s0", 10, FOR_EVER), ("s1", 12, FOR_EVER))
    held: list[int] = []

    def act(e: Engine) -> None:
        held.append(sum(is_parked(e, f"s{i}") for i in range(4)))
        e.abort(abort_all=True)

    later = [(has("s2", 20), [ask("long", 1500, 10), ask("behind", 20, 10)])]
    chunked = _once(lambda e: e.scheduler.chunked_req is not None and is_parked(e, "s1"), act)
    report = play(engine, asks, script, later=later, each=chunked)
    return {"report": report, "parked": held, "after": play(engine, [ask("after", 20, 10)])}


def parks_during_a_chunked_prompt(engine: Engine) -> dict[str, Any]:
    """900 tokens take four chunks; four streams are parked one after the other while they run."""
    asks = [ask(f"s{i}", 20 + i, 60, return_logprob=i == 0) for i in range(4)]
    long = ask("long", 900, 20)
    parks = [(f"s{i}", at, 6) for i in range(4) for at in (11 + i, 25, 40)]
    report = play(
        engine, asks, scripted(*parks, ("long", 5, 4)), later=[(has("s0", 10), [long])],
        journal=Path(mkdtemp()) / "chunked.jsonl",
    )  # fmt: skip
    return {"report": report, "solo": solo_tokens(engine, [*asks, long])}


@contextmanager
def upstream_retracts(every: int) -> Iterator[list[str]]:
    """SGLANG_TEST_RETRACT, which upstream reads at import. Gives the ids it retracted."""
    from sglang.srt.managers import schedule_batch, scheduler

    retracted: list[str] = []
    release = schedule_batch.release_req

    def counted(**kwargs: Any) -> Any:
        retracted.append(kwargs["req"].rid)
        return release(**kwargs)

    before = scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL
    scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = True, every
    schedule_batch.release_req = counted
    try:
        yield retracted
    finally:
        scheduler.TEST_RETRACT, scheduler.TEST_RETRACT_INTERVAL = before
        schedule_batch.release_req = release


def _mixed_asks() -> list[Ask]:
    return [
        *(ask(f"s{i}", 20 + 7 * i, 70, return_logprob=i % 3 == 0) for i in range(6)),
        ask("regex", 30, 70, regex="[a-f]{40,70}", ignore_eos=False),
    ]


def upstream_retractions_beside_ours(engine: Engine) -> dict[str, Any]:
    asks = _mixed_asks()
    parks = [(f"s{i}", at, 3) for i in range(6) for at in (8, 21, 35, 50)]
    with upstream_retracts(9) as of_scripted:
        by_script = play(engine, asks, scripted(*parks), journal=Path(mkdtemp()) / "retract.jsonl")
    with upstream_retracts(9) as of_policy:
        by_policy = play(engine, asks, tokenflow(), journal=Path(mkdtemp()) / "retract.jsonl")
    return {
        "scripted": by_script,
        "policy": by_policy,
        "retracted": [len(of_scripted), len(of_policy)],
        "solo": solo_tokens(engine, asks),
    }


def shutdown_with_parked_streams(engine: Engine) -> dict[str, Any]:
    """The last case of an engine: its loop ends, and with it everything."""
    from sglang.srt.managers.io_struct import ShutdownReq

    engine.use(scripted(("s*", 5, FOR_EVER)))
    for i in range(4):
        engine.submit(**ask(f"s{i}", 20, 50))
    engine.submit(**ask("runs", 20, 1000))
    engine.run(lambda e: all(is_parked(e, f"s{i}") for i in range(4)), max_iterations=500)
    before = engine.iterations
    engine.send(ShutdownReq())
    # Raises TimeoutError if the loop goes on.
    engine.run(lambda e: False, max_iterations=20, max_s=20.0)
    return {"iterations": engine.iterations - before}


def idle_spell(engine: Engine) -> dict[str, Any]:
    """Two requests with 500 idle iterations between them."""
    scheduler = engine.scheduler
    play(engine, [ask("before", 20, 8)])
    first, iteration = scheduler._steps, engine.iterations
    engine.run(lambda e: e.iterations >= iteration + 500, max_iterations=1000)
    steps, ended = scheduler._steps - first, scheduler.ledger.transitions[-1]
    report = play(engine, [ask("after", 20, 8)])
    told = [t for t in scheduler.ledger.transitions if t["seq"] > ended["seq"]]
    return {**report, "idle_steps": steps, "ended_s": ended["at_s"], "told": told}
