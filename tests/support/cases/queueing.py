"""The queue limit, the waiting timeout and priorities meet parked streams (field report B01)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from support.engine import Engine
from support.play import Arrival, Ask, ask, has, play, scripted, solo_tokens, tokenflow
from tokenflow_sgl.core.baselines import Scripted
from tokenflow_sgl.core.types import Applied, EngineView, Event, Phase, Plan, Rid

STEP_S = 0.02
CAP = 8
POLICY_CAP = 1
QUEUE_LIMIT = 4
PRIORITY_QUEUE_LIMIT = 6
MAX_RUNNING = 8


class Rotation:
    """Parks one stream of class `l` every three steps, each at most `CAP` times; it returns three steps later."""

    def __init__(self) -> None:
        self.step = 0
        self.parks: dict[Rid, int] = {}
        self.away_since: dict[Rid, int] = {}

    def observe(self, event: Event) -> None:
        if isinstance(event, Applied):
            self.step += 1
            for rid in event.parked:
                self.parks[rid] = self.parks.get(rid, 0) + 1
                self.away_since[rid] = self.step

    def plan(self, view: EngineView) -> Plan:
        requests = view.requests()
        victims = [r for r in requests if r.phase is Phase.RUNNING and r.preemptible and r.rid.startswith("l")]
        victims = [r for r in victims if self.parks.get(r.rid, 0) < CAP]
        victims.sort(key=lambda r: (self.parks.get(r.rid, 0), r.rid))
        unstarted = [r.rid for r in requests if r.phase is Phase.WAITING]
        back = [r.rid for r in requests if r.phase is Phase.PARKED and self.step >= self.away_since.get(r.rid, 0) + 3]
        park = (victims[0].rid,) if victims and self.step % 3 == 0 else ()
        return Plan(park=park, admit=(*unstarted, *back), reserve_tokens=view.page_tokens * view.running)


def _waves() -> list[Arrival]:
    """30 short requests in waves of five, one more than may queue, twelve tokens of the first stream apart."""
    return [
        (has("l0", 30 + 12 * wave), [ask(f"n{wave}-{i}", 20, 30) for i in range(5)]) for wave in range(6)
    ]  # fmt: skip


def _staggered(long: list[Ask]) -> list[Arrival]:
    """All of `long` but the first, two tokens of the first apart: at once they would be more than the queue takes."""
    return [(has("l0", 2 * i), [a]) for i, a in enumerate(long) if i]


def _longest_queue(seen: list[int]) -> Callable[[Engine], None]:
    return lambda e: seen.append(len(e.scheduler.waiting_queue))


def full_queue_with_forced_parks(engine: Engine) -> dict[str, Any]:
    long = [ask(f"l{i}", 20, 240) for i in range(MAX_RUNNING)]
    seen: list[int] = []
    report = play(engine, long[:1], Rotation(), later=[*_staggered(long), *_waves()], each=_longest_queue(seen))
    return {"report": report, "longest_queue": max(seen), "solo": solo_tokens(engine, long)}


def full_queue_under_the_policy(engine: Engine) -> dict[str, Any]:
    """Slots are short, not memory. A low cap on parks: a stream that reached it stays until it ends."""
    engine.fake_clock(STEP_S)
    long = [ask(f"l{i}", 20, 300, rate=4.0) for i in range(MAX_RUNNING)]
    waves: list[Arrival] = [
        (has("l0", 30 + 8 * wave), [ask(f"n{wave}-{i}", 20, 8) for i in range(6)]) for wave in range(16)
    ]
    seen: list[int] = []

    def run(max_parks: int) -> dict[str, Any]:
        policy = tokenflow(max_parks=max_parks, min_run_tokens=4, min_slack_s=0.5, eps_s=0.1, return_steps=1)
        return play(engine, long[:1], policy, later=[*_staggered(long), *waves], each=_longest_queue(seen))

    report, uncapped = run(POLICY_CAP), run(1000)
    return {
        "report": report,
        "uncapped": uncapped["parks"],
        "longest_queue": max(seen),
        "solo": solo_tokens(engine, long),
    }


# ---- the waiting timeout


@contextmanager
def waiting_timeout(seconds: float) -> Iterator[None]:
    os.environ["SGLANG_REQ_WAITING_TIMEOUT"] = str(seconds)
    try:
        yield
    finally:
        del os.environ["SGLANG_REQ_WAITING_TIMEOUT"]


class _Holding(Scripted):
    """Admits nobody whose id begins with `held` while `holds` is set."""

    holds = True

    def plan(self, view: EngineView) -> Plan:
        plan = super().plan(view)
        return replace(plan, admit=tuple(r for r in plan.admit or () if not (self.holds and r.startswith("held"))))


def long_wait(engine: Engine) -> dict[str, Any]:
    """Two streams are parked until the timeout is long over for one that never started.

    With everybody held the loop sleeps half a millisecond a step: 800 steps are at least 0.4 s.
    """
    asks = [ask("a", 20, 30), ask("b", 30, 30)]
    policy = _Holding(scripted(("a", 10, 800), ("b", 10, 800)).script)
    with waiting_timeout(0.15):
        report = play(engine, asks, policy, later=[(has("a", 8), [ask("held", 20, 10)])])
    return {"report": report, "solo": solo_tokens(engine, asks)}


# ---- priorities


def priority_inside_its_class(engine: Engine) -> dict[str, Any]:
    """Slots for four; newcomers of two priorities arrive together, the lower ones first."""
    engine.fake_clock(STEP_S)
    long = [ask(f"l{i}", 20, 200, rate=4.0, priority=0) for i in range(4)]
    low = [ask(f"low{i}", 20, 20, priority=1) for i in range(3)]
    high = [ask(f"high{i}", 20, 20, priority=9) for i in range(3)]
    policy = tokenflow(min_run_tokens=8, min_slack_s=0.5)
    report = play(engine, long, policy, later=[(has("l0", 60), [*low, *high])])
    return {"report": report, "solo": solo_tokens(engine, [*long, *low, *high])}


def higher_priority_meets_a_full_queue(engine: Engine) -> dict[str, Any]:
    """Upstream makes room in a full queue by aborting the lowest priority in it: here four parked streams."""
    long = [ask(f"l{i}", 20, 60, priority=1) for i in range(4)]
    fill = [ask(f"held{i}", 20, 10, priority=2 + i) for i in range(PRIORITY_QUEUE_LIMIT)]
    policy = _Holding(scripted(*((f"l{i}", 10, 30) for i in range(4))).script)

    def each(e: Engine) -> None:
        policy.holds = "urgent" not in e.streams

    later: list[Arrival] = [
        (_all_parked(4), fill),
        (lambda e: len(e.scheduler.waiting_queue) == 4 + len(fill), [ask("urgent", 20, 10, priority=99)]),
    ]
    return {"report": play(engine, long, policy, later=later, each=each), "solo": solo_tokens(engine, long)}


def _all_parked(count: int) -> Callable[[Engine], bool]:
    return lambda e: sum(bool(r.output_ids) for r in e.scheduler.waiting_queue) >= count
