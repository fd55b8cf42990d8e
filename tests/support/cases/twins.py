"""The same work on stock's scheduler class and on ours under policy `fcfs`: same batches, same answers."""

from __future__ import annotations

from typing import Any

from support import identity
from support.cases.lifecycle import upstream_retracts
from support.engine import Engine
from support.play import Arrival, ask, has, play


def _recorded(engine: Engine, batches: list[Any]) -> None:
    scheduler = engine.scheduler
    forms = type(scheduler).get_next_batch_to_run

    def recorded(*args: Any, **kwargs: Any) -> Any:
        plan = forms(scheduler, *args, **kwargs)
        batch = plan.batch_to_run
        if batch is not None:
            batches.append([batch.forward_mode.name, [r.rid for r in batch.reqs]])
        return plan

    scheduler.get_next_batch_to_run = recorded


def same_work(engine: Engine) -> dict[str, Any]:
    """More than fits: a queue, chunked prompts, shared prefixes, an abort, and upstream's retractions."""
    batches: list[Any] = []
    _recorded(engine, batches)
    asks = [ask(f"s{i}", 30 + 40 * (i % 4), 60 + 10 * i) for i in range(8)]
    later: list[Arrival] = [
        (has("s0", 20), [ask("long", 600, 20), ask("again", 150, 30, same_as="s3")]),
        (has("s1", 40), [ask(f"t{i}", 25, 40, return_logprob=True) for i in range(6)]),
    ]
    aborted: list[str] = []

    def each(e: Engine) -> None:
        if not aborted and len(e.streams["s2"].tokens) >= 15:
            aborted.append("s2")
            e.abort("s2")

    plain = play(engine, asks, later=later, each=each)
    with upstream_retracts(7) as retracted:
        retracting = play(engine, [ask(f"r{i}", 30, 40) for i in range(6)])
    del engine.scheduler.get_next_batch_to_run
    return {"plain": plain, "retracting": retracting, "retracted": len(retracted), "batches": batches}


def identity_streams(engine: Engine) -> dict[str, Any]:
    """The twelve streams of support.identity, for the comparison with what they say on our scheduler, parked."""
    base = play(engine, identity.asks({}))
    stops = {9: identity.stop_of(engine, base["streams"]["s9"]["tokens"])}
    return play(engine, identity.asks(stops))
