"""More work than memory: who is looked at, who stands in line, and that the quick way out decides as the long one."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.returns import Returns
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass, Tick

READER, BATCH, AGENT = ReaderClass.READER, ReaderClass.BATCH, ReaderClass.AGENT


def away(streams, *, now_s, **settings):
    """A policy whose {rid: tokens at 1 s} were parked then, readers of 6 tok/s."""
    p = TokenFlowPolicy(PolicyConfig(**settings))
    p.observe(Tick(0.0))
    for rid in streams:
        p.observe(Arrived(rid, 100, 10_000, READER, 6.0))
    p.observe(Applied(admitted=tuple((rid, 100, 0) for rid in streams)))
    p.observe(Tick(1.0, 0.03))
    p.observe(Emitted(tuple(streams), tuple(streams.values())))
    p.observe(Applied(parked=tuple(streams)))
    p.observe(Tick(now_s))
    return p


def parked(rid, output, **fields):
    return request(rid, Phase.PARKED, context=100 + output, output=output, **fields)


def test_a_crowd_of_dry_readers_does_not_make_a_full_buffer_look_due():
    # At 6 s, 6 tokens lasted until 2 s and 72 last until 13 s. The returns of 60 dry ones take longer than those 7 s,
    # but they come after whoever is due.
    streams = {f"dry{i:02}": 6 for i in range(60)} | {"rich": 72}
    p = away(streams, now_s=6.0)
    views = [parked(rid, output) for rid, output in streams.items()]
    plan = p.plan(engine(views, device_free_tokens=400, device_total_tokens=20_000))
    assert plan.admit and "rich" not in plan.admit


@pytest.mark.parametrize("dry_s", [10.0, 100.0, 1000.0])
@pytest.mark.parametrize("priority", ["aged", "guide"])
def test_a_dry_reader_is_not_kept_out_by_newcomers_for_ever(priority, dry_s):
    # The newcomer has waited for 1 s. e^mu = 7.4 times as long and its return costs twice as much: 10 s are enough.
    p = away({"dry": 6}, now_s=1.0 + dry_s, priority=priority)
    p.observe(Arrived("new", 100, 1000, READER, 6.0))
    p.observe(Tick(1.0 + dry_s))
    p.observe(Tick(2.0 + dry_s))
    busy = request("busy", preemptible=False)
    view = engine([parked("dry", 6), request("new", Phase.WAITING, context=100), busy], device_free_tokens=200)
    assert p.plan(view).admit == ("dry",)


def test_a_clients_priority_does_not_freeze_an_answer_that_began():
    for dry_s, first in ((2.0, "new"), (10.0, "low")):
        p = away({"low": 6}, now_s=2.0 + dry_s)
        p.observe(Arrived("new", 100, 1000, READER, 6.0))
        p.observe(Tick(2.0 + dry_s))
        views = [parked("low", 6, priority=0), request("new", Phase.WAITING, context=100, priority=5)]
        assert p.plan(engine(views, device_free_tokens=600)).admit[0] == first, dry_s


def test_work_without_a_reader_that_waited_longest_is_owed_first():
    p = TokenFlowPolicy(PolicyConfig())
    for at_s, rid in ((0.0, "oldest"), (30.0, "middle"), (60.0, "newest")):
        p.observe(Tick(at_s))
        p.observe(Arrived(rid, 100, 1000, BATCH, None))
        p.observe(Tick(at_s + 0.01))
    p.observe(Tick(100.0))
    waiting = [request(rid, Phase.WAITING, context=100) for rid in ("newest", "middle", "oldest")]
    view = engine([*waiting, request("busy", preemptible=False)], device_free_tokens=150)
    assert p.plan(view).admit == ("oldest",)


def test_streams_that_rode_along_with_a_prompt_are_not_published_in_the_next_step():
    published = {}
    for decoding in (0, 2):
        p = TokenFlowPolicy(PolicyConfig(publish_below=1.0, publish_interval_tokens=16, forecast_s=0.0))
        p.observe(Tick(0.0))
        p.observe(Arrived("a", 100, 1000, READER, 6.0))
        p.observe(Applied(admitted=(("a", 100, 0),)))
        for step in range(40):
            p.observe(Tick(0.03 * step, 0.03))
            p.observe(Emitted(("a",), (3 * step + 1,)))
            p.observe(Applied(decoding=1))
        p.observe(Applied(prefill_tokens=64, decoding=decoding))
        plans = []
        for _ in range(4):  # the publisher looks every few steps
            p.observe(Tick(p.now_s + 0.03, 0.03))
            plans.append(p.plan(engine([request("a", context=218, output=118)], waiting=0, device_free_tokens=300)))
        published[decoding] = any(plan.publish for plan in plans)
    assert published == {0: True, 2: False}


def situation(seed):
    """A policy and a view in a random state, memory short more often than not."""
    g = random.Random(seed)
    p = TokenFlowPolicy(
        PolicyConfig(
            priority=g.choice(["aged", "guide"]), min_slack_s=g.choice([0.0, 0.5, 2.0]),
            loads=g.choice(["ahead", "at_admission"]), copies=g.choice(["ahead", "none", "at_park"]),
        )
    )  # fmt: skip
    kinds = {f"r{i}": g.choice([READER, READER, READER, AGENT, BATCH]) for i in range(g.randint(1, 14))}
    phases = {rid: g.choice(["run", "run", "wait", "parked", "parked", "loading", "prefill"]) for rid in kinds}
    p.observe(Tick(0.0))
    for rid, kind in kinds.items():
        p.observe(Arrived(rid, 100, 10_000, kind, g.choice([3.0, 6.0, 10.0]) if kind is READER else None))
    outputs = {rid: g.randint(1, 150) for rid, phase in phases.items() if phase in ("run", "parked", "loading")}
    gone = tuple(rid for rid in outputs if phases[rid] != "run")
    p.observe(Applied(admitted=tuple((rid, 100, 0) for rid in outputs), prefill_tokens=g.choice([0, 100])))
    p.observe(Tick(1.0, 0.03))
    p.observe(Emitted(tuple(outputs), tuple(outputs.values())))
    left_s = 1.0 + g.choice([0.0, 1.0, 5.0, 20.0])
    p.observe(Applied(parked=gone, decoding=3))
    p.observe(Tick(left_s, 0.03))
    p.observe(Applied(decoding=3, refused=tuple(rid for rid in gone if g.random() < 0.1)))
    p.observe(Tick(left_s + g.choice([0.03, 1.0, 8.0, 30.0]), 0.03))
    host_ok = g.random() < 0.9
    views = [look(g, rid, phases[rid], outputs.get(rid, 0), host_ok) for rid in kinds]
    memory = {
        "device_free_tokens": g.choice([0, 10, 30, 60, 120, 200, 400]), "device_total_tokens": 2000,
        "page_tokens": g.choice([1, 16]), "load_slots": g.choice([0, 1, 3]), "max_running": g.choice([4, 64]),
        "host_ok": host_ok,
    }  # fmt: skip
    return p, lambda: engine(views, **memory)


def look(g, rid, phase, output, host_ok):
    context = 100 + output
    if phase == "run":
        return request(
            rid, context=context, output=output, copying_tokens=g.choice([0, 0, 16]), preemptible=g.random() < 0.9,
            frees_tokens=g.choice([context, context // 2, 0]), backed_tokens=g.choice([0, context - 1]),
        )  # fmt: skip
    if phase == "prefill":
        return request(rid, Phase.PREFILL, context=100, takes_tokens=g.choice([0, 50]))
    if phase == "loading":
        return request(rid, Phase.LOADING, context=context, output=output, takes_tokens=g.choice([1, 20]))
    held = g.choice([0, 0, 0, 0, 64]) if phase == "parked" else 0
    host = g.choice([0, context - 10]) if host_ok and not held else 0
    return request(
        rid, Phase.PARKED if output else Phase.WAITING, context=context, output=output, host_hit_tokens=host,
        held_tokens=held, takes_tokens=max(host + 1, g.choice([0, 20, context])), priority=g.choice([0, 0, 1]),
    )  # fmt: skip


def test_where_nobody_fits_and_nobody_can_go_the_plan_is_that_of_weighing_all():
    quick = 0
    for seed in range(1500):
        p, view = situation(seed)
        plan = p.plan(view())
        with mock.patch.object(Returns, "least_tokens", lambda self, waiting: float("-inf")):
            weighed = p.plan(view())
        quick += "must" not in plan.why and "must" in weighed.why
        for what in ("park", "load", "admit", "publish"):
            assert getattr(plan, what) == getattr(weighed, what), (seed, what)
    assert quick > 100, "the quick way out was hardly taken: the run shows nothing"
