"""What the views say of shared and held prefixes, against what the pool really gives and takes."""

from __future__ import annotations

import random
from typing import Any

from support.engine import Engine
from support.play import ask, has, play, prompt, scripted

COMMON = 200


def _sharing(rid: str, own_tokens: int, max_new_tokens: int) -> dict[str, Any]:
    a = ask(rid, own_tokens, max_new_tokens)
    return {**a, "prompt": [*prompt(COMMON, "common"), *a["prompt"]]}


def _measure_parks(engine: Engine, found: list[dict[str, Any]]) -> None:
    """Every park: what the view said it frees, and what it freed."""
    executor = engine.scheduler.executor
    park = type(executor).park

    def measured(rid: str) -> bool:
        claimed = next(r.frees_tokens for r in executor.view().requests() if r.rid == rid)
        held = next(r for r in engine.scheduler.running_batch.reqs if r.rid == rid).kv.kv_allocated_len
        before = engine.free_tokens()
        done = park(executor, rid)
        found.append({"rid": rid, "claimed": claimed, "freed": engine.free_tokens() - before, "held": held})
        return done

    executor.park = measured


def frees(engine: Engine) -> dict[str, Any]:
    """Two streams with a common prompt and one alone; each parked while the other two run, and then two at once."""
    asks = [_sharing("a", 20, 90), _sharing("b", 23, 90), ask("c", 220, 90)]
    found: list[dict[str, Any]] = []
    _measure_parks(engine, found)
    script = scripted(
        ("a", 20, 5), ("b", 35, 5), ("c", 50, 5), ("a", 65, 5), ("b", 65, 5), publish=24
    )  # fmt: skip
    report = play(engine, asks, script, each=Engine.settle_stores)  # an open copy would keep what is to be freed
    del engine.scheduler.executor.park
    return {"report": report, "parks": found}


def frees_at_random(engine: Engine) -> dict[str, Any]:
    """Ten streams that share prefixes of random length, parked at random: the claim is exact every time."""
    rng = random.Random(7)
    asks = []
    for i in range(10):
        shared = rng.choice((0, 17, 64, 120, 200))
        a = ask(f"s{i}", rng.randrange(5, 60), 80)
        asks.append({**a, "prompt": [*prompt(COMMON, "common")[:shared], *a["prompt"]]})
    parks = [(f"s{i}", rng.randrange(2, 76), rng.randrange(1, 12)) for i in range(10) for _ in range(5)]
    found: list[dict[str, Any]] = []
    _measure_parks(engine, found)
    report = play(engine, asks, scripted(*parks, publish=rng.randrange(8, 40)))
    del engine.scheduler.executor.park
    return {"report": report, "parks": found, "solo": play(engine, asks)["streams"]}


def takes(engine: Engine) -> dict[str, Any]:
    """A waiting request whose prefix somebody holds, and the same when the prefix is in the tree and held by nobody."""
    executor = engine.scheduler.executor
    found: dict[str, dict[str, int]] = {}

    def look(name: str) -> Any:
        """Before the step that admits it: what the view says, and what is free."""
        admit = type(executor).admit

        def recorded(order: Any, **limits: Any) -> None:
            view = next((r for r in executor.view().requests() if r.rid == name and not r.output_tokens), None)
            if view is not None and name not in found and view.phase.value == "waiting":
                found[name] = {
                    "takes": view.takes_tokens,
                    "cached": view.cached_tokens,
                    "context": view.context_tokens,
                    "free": engine.free_tokens(),
                }
            admit(executor, order, **limits)

        executor.admit = recorded

    def after(name: str) -> Any:
        def each(e: Engine) -> None:
            running = any(r.rid == name for r in e.scheduler.running_batch.reqs)
            if running and name in found and "left" not in found[name]:
                found[name]["left"] = e.free_tokens()

        return each

    look("b")
    play(engine, [_sharing("a", 20, 60)], scripted(), later=[(has("a", 10), [_sharing("b", 23, 4)])])
    look("c")
    play(engine, [_sharing("a", 20, 4)], scripted(), keep_cache=True)
    play(engine, [_sharing("c", 23, 8)], scripted(), each=after("c"))
    del executor.admit
    return found
