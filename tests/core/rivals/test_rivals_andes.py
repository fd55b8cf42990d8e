"""Andes: its QoE as one definition with ours, its knapsack, and when it swaps."""

from __future__ import annotations

import random

import pytest

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.qoe import StreamRecord, andes_qoe
from tokenflow_sgl.core.rivals.andes import PREEMPTIONS_PER_REQUEST, SOLVE_EVERY, Andes
from tokenflow_sgl.core.rivals.knapsack import Item, most_that_fit, pack
from tokenflow_sgl.core.rivals.timeline import Timeline
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass, Tick


def arrived(rid, rate=10.0):
    return Arrived(rid, 100, 10_000, ReaderClass.READER, rate)


def waits(rid, context=100, **fields):
    return request(rid, Phase.WAITING, context=context, **fields)


# ---- the timeline


def test_the_target_of_the_first_token_follows_the_prompt():
    assert Timeline.of(4000, 5.0).target_s == 1.0
    assert Timeline.of(20_000, 5.0).target_s == 4.0


@pytest.mark.parametrize("seed", range(40))
def test_a_prediction_is_what_qoe_says_of_the_answer_that_comes_out_so(seed):
    rng = random.Random(seed)
    rate, made, missing = rng.choice([2.0, 8.0, 40.0]), rng.randint(0, 30), rng.randint(1, 60)
    line = Timeline.of(100, rate)
    at_s, arrivals = rng.uniform(0, 3), []
    for n in range(made):
        at_s += rng.choice([0.01, 0.05, 2.0])
        arrivals.append(at_s)
        line.deliver(at_s, n + 1)
    start_s, step_s = at_s + rng.uniform(0, 5), rng.choice([0.01, 0.1, 0.5])
    arrivals += [start_s + (j + 1) * step_s for j in range(missing)]
    record = StreamRecord("a", "g", 0.0, tuple(arrivals), rate, len(arrivals))
    assert line.qoe(made + missing, start_s=start_s, step_s=step_s) == pytest.approx(andes_qoe(record), abs=1e-9)


def test_tokens_that_are_there_already_are_not_predicted():
    line = Timeline.of(100, 10.0)
    line.deliver(0.5, 50)
    # Due by 3 s: the first at 1 s, then ten a second.
    assert line.due_tokens(3.0) == 21 and line.due_tokens(0.9) == 0
    assert line.qoe(21, start_s=99.0, step_s=1.0) == line.qoe(50, start_s=0.0, step_s=1.0) == pytest.approx(1.0)


# ---- the knapsack


def item(rid, weight, gain, runs=False):
    return Item(request(rid), weight, 0.0, runs).worth(gain)


def test_the_densest_are_packed_and_a_large_one_is_passed_over():
    items = [item("a", 100, 0.5), item("b", 1000, 1.0), item("c", 50, 0.2)]
    # 0.005, 0.001 and 0.004 a token; b does not fit beside a into 200.
    assert pack(items, capacity=200, size=3) == (0.7, {"a", "c"})
    assert pack(items, capacity=2000, size=1) == (0.5, {"a"})
    assert most_that_fit(items, capacity=200) == 2


def test_who_runs_has_a_tenth_more_weight_of_two_alike():
    items = [item("new", 100, 0.50), item("runs", 100, 0.46, runs=True)]
    assert pack(items, capacity=100, size=2)[1] == {"runs"}  # 0.506 against 0.500
    items[1].worth(0.45)
    assert pack(items, capacity=100, size=2)[1] == {"new"}  # 0.495


# ---- when it swaps


def believing(buffers, *, now_s=20.0, steps=SOLVE_EVERY, waiting=()):
    """A policy in which {rid: seconds unread} run, read at 10 tok/s since second 1; `waiting` came at `now_s` - 5."""
    p = Andes(PolicyConfig())
    p.observe(Tick(0.0, 0.03))
    for rid in buffers:
        p.observe(arrived(rid))
    p.observe(Applied(admitted=tuple((rid, 100, 0) for rid in buffers)))
    p.observe(Emitted(tuple(buffers), tuple(round(10 * (now_s - 1.0 + s)) for s in buffers.values())))
    p.observe(Tick(now_s - 5.0, 0.03))
    for rid in waiting:
        p.observe(arrived(rid))
    for _ in range(steps - 1):
        p.observe(Applied())
    p.observe(Tick(now_s, 0.03))
    return p


def full(*rids, free=30, output=250, context=1000, waiting=("new",)):
    running = [request(r, context=context, output=output) for r in rids]
    return engine(
        [*running, *map(waits, waiting)], device_free_tokens=free, device_total_tokens=len(rids) * context + free
    )


def test_the_stream_that_loses_least_makes_room_for_a_late_newcomer():
    plan = believing({"dry": 0.1, "full": 60.0, "half": 3.0}, waiting=["new"]).plan(full("dry", "full", "half"))
    assert (plan.park, plan.admit) == (("full",), ("new",))


def test_it_acts_only_every_tenth_step():
    for steps, park in ((SOLVE_EVERY - 1, ()), (SOLVE_EVERY, ("full",)), (SOLVE_EVERY + 1, ())):
        plan = believing({"dry": 0.1, "full": 60.0}, steps=steps, waiting=["new"]).plan(full("dry", "full"))
        assert plan.park == park, steps


def test_it_acts_only_above_nine_tenths_of_memory():
    view = engine(
        [request("full", context=1000, output=250), waits("new", 300)], device_free_tokens=250, device_total_tokens=1250
    )
    assert believing({"full": 60.0}, waiting=["new"]).plan(view).park == ()  # 1000 of 1250 in use


def test_the_refiner_swaps_nobody_whose_loss_outweighs_the_gain():
    # All have run dry: each would lose about what the newcomer gains, and the bonus of who runs decides.
    plan = believing({"a": 0.0, "b": 0.0}, waiting=["new"]).plan(full("a", "b", context=100))
    assert (plan.park, plan.admit) == ((), ())


def test_it_stops_swapping_at_one_preemption_for_each_request():
    p = believing({"dry": 0.1, "full": 60.0}, waiting=["new"])
    view = full("dry", "full")
    p.preemptions = int(PREEMPTIONS_PER_REQUEST * 3) - 1
    assert p.plan(view).park == ("full",)
    p.preemptions += 1
    assert p.plan(view).park == ()


def test_a_stream_comes_back_by_the_cheaper_way():
    p = believing({"a": 60.0})
    p.observe(Applied(parked=("a",)))
    p.observe(Tick(20.03, 0.03))
    for load_s, load, admit in ((0.001, ("a",), ()), (60.0, (), ("a",))):
        for _ in range(60):
            p.observe(Tick(20.03, loads_s=((900, load_s),)))
        parked = request("a", Phase.PARKED, context=1000, host_hit_tokens=990)
        plan = p.plan(engine([parked], device_free_tokens=2000, device_total_tokens=2000))
        assert (plan.load, plan.admit) == (load, admit), load_s


def test_a_burst_over_a_full_pool_gets_its_first_tokens_by_parking_full_buffers():
    old = [Job(f"old{i}", 100, 400, rate_tok_s=5.0) for i in range(4)]
    burst = [Job(f"new{i}", 100, 60, at_s=8.0, rate_tok_s=5.0) for i in range(3)]
    e = StandIn(Andes(PolicyConfig()), pool_tokens=2048, copies="at_park")
    record = e.run([*old, *burst])
    assert set(record.finished.values()) == {"stop"}
    # 4 x 500 tokens fill the pool when the old ones end, after 12 s: without swaps a newcomer waited about until then.
    assert record.parks
    assert max(record.token_times[j.rid][0] - j.at_s for j in burst) < 2.5
