"""SuperInfer's Virtual Lag Time, on numbers worked out by hand, and its rotation on the stand-in."""

from __future__ import annotations

import pytest

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.rivals.vlt import ROUND_STEPS, VirtualLag
from tokenflow_sgl.core.types import Applied, Arrived, Phase, ReaderClass, Tick


def arrived(rid):
    return Arrived(rid, 100, 1000, ReaderClass.READER, 10.0)


def waits(rid, context=100, **fields):
    return request(rid, Phase.WAITING, context=context, **fields)


def at(policy, now_s):
    policy.observe(Tick(now_s, 0.03))
    return policy


def rotating(*, decodes=40):
    """old came in at 1 s and young at 6 s; gone came in at 0 s and left at 8 s; new arrived at 9 s; it is 10 s.

    Since young came in, `decodes` steps ran.
    """
    p = VirtualLag(PolicyConfig())
    at(p, 0.0)
    for rid in ("old", "young", "gone"):
        p.observe(arrived(rid))
    p.observe(Applied(admitted=(("gone", 100, 0),)))
    at(p, 1.0).observe(Applied(admitted=(("old", 100, 0),)))
    at(p, 6.0).observe(Applied(admitted=(("young", 100, 0),)))
    for _ in range(decodes):
        p.observe(Applied(decoding=2))
    at(p, 8.0).observe(Applied(parked=("gone",)))
    at(p, 9.0).observe(arrived("new"))
    return at(p, 10.0)


def view(*extra, free=6, **fields):
    """Of the free tokens 6 are for the next three steps of two streams."""
    running = [request("old", context=300), request("young", context=300)]
    return engine([*running, *extra], device_free_tokens=free, **fields)


def gone(**fields):
    return request("gone", Phase.PARKED, context=200, **fields)


def test_the_lag_of_each():
    p = rotating()
    # new: 10 - 9 - 0.5 x 0.5; gone: 3 x (10 - 8); old and young: since they came in.
    assert p.lag_s(waits("new")) == pytest.approx(0.75)
    assert p.lag_s(gone()) == pytest.approx(6.0)
    assert p.lag_s(request("old")) == pytest.approx(-9.0)
    assert p.lag_s(request("young")) == pytest.approx(-4.0)


def test_who_ran_longest_makes_room_for_the_largest_lag():
    # old's 300 hold gone's 202 and 98 more: a newcomer of 96 + 2, and not one of 97 + 2.
    for prompt, park in ((96, ("old",)), (97, ("old", "young"))):
        plan = rotating().plan(view(waits("new", prompt), gone(host_hit_tokens=192)))
        assert (plan.park, plan.load, plan.admit) == (park, ("gone",), ("new",)), prompt


def test_where_all_that_waits_fits_it_is_first_come_first_served():
    plan = rotating().plan(view(waits("new"), gone(), free=400))
    assert (plan.park, plan.admit) == ((), ("gone", "new"))


def test_rotated_streams_come_back_in_rounds_and_newcomers_at_once():
    p = rotating()
    p.observe(arrived("back"))
    p.observe(Applied(admitted=(("back", 100, 0),)))
    p.observe(Applied(parked=("back",)))
    p.observe(Applied(admitted=(("back", 100, 0),)))  # a return: the round begins
    p.observe(Applied(parked=("back",)))
    back = request("back", Phase.PARKED, context=250)
    for steps in range(ROUND_STEPS + 1):
        plan = p.plan(view(back, waits("new")))
        assert ("back" in plan.admit) == (steps == ROUND_STEPS), steps
        assert "new" in plan.admit or steps == ROUND_STEPS
        p.observe(Applied(decoding=2))


def test_a_stream_runs_its_minimum_before_it_goes():
    for decodes, park in ((31, ()), (32, ("old",))):
        p = VirtualLag(PolicyConfig(min_run_tokens=32))
        at(p, 0.0).observe(arrived("old"))
        p.observe(Applied(admitted=(("old", 100, 0),)))
        for _ in range(decodes):
            p.observe(Applied(decoding=1))
        p.observe(arrived("new"))
        at(p, 5.0)
        plan = p.plan(engine([request("old", context=300), waits("new")], device_free_tokens=10))
        assert plan.park == park, decodes


def test_no_more_is_moved_in_a_step_than_the_link_carries():
    p = rotating()
    for _ in range(60):
        p.observe(Tick(10.0, 0.03, loads_s=((1000, 0.1),)))  # 10,000 tok/s: 300 in a step of 0.03 s
    # gone takes 202 of 300; new's 102 are more than the 98 that are left, small's 52 are not.
    p.observe(arrived("small"))
    plan = p.plan(view(gone(), waits("new"), waits("small", 50)))
    assert plan.admit == ("gone", "small")


def test_full_blocks_are_stored_while_streams_run_and_readers_rotate_to_the_end():
    jobs = [Job(f"r{i}", 100, 200, at_s=i * 0.01) for i in range(10)]
    record = StandIn(VirtualLag(PolicyConfig()), pool_tokens=1024, copies="ahead").run(jobs)
    assert set(record.finished.values()) == {"stop"}
    assert record.parks and record.loads and record.published_tokens > 0
    # First come, first served would let the last ones wait for whole answers, 200 x 0.03 = 6 s.
    assert max(record.token_times[j.rid][0] for j in jobs) < 3.0
