"""The paper's two-step scheduler: its interval, its order, what it parks, and where it falls back."""

from __future__ import annotations

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.rivals.balance import Member, balance
from tokenflow_sgl.core.rivals.guide import guide_policy
from tokenflow_sgl.core.rivals.paper import PaperTokenFlow
from tokenflow_sgl.core.streams import Stream
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass, Tick


def arrived(rid, rate=10.0, reader=ReaderClass.READER):
    return Arrived(rid, 100, 10_000, reader, rate)


def waits(rid, context=100, **fields):
    return request(rid, Phase.WAITING, context=context, **fields)


def believing(buffers, *, now_s=10.0, waiting=(), parked=(), rate=10.0):
    """{rid: seconds unread} run, read at `rate` since 0; it schedules at `now_s`."""
    p = PaperTokenFlow(PolicyConfig())
    p.observe(Tick(0.0, 0.03))
    for rid in buffers:
        p.observe(arrived(rid, rate))
    p.observe(Applied(admitted=tuple((rid, 100, 0) for rid in buffers)))
    p.observe(Emitted(tuple(buffers), tuple(round(rate * (now_s + s)) for s in buffers.values())))
    p.observe(Applied(parked=tuple(parked)))
    for rid in waiting:
        p.observe(arrived(rid))
    p.observe(Tick(now_s, 0.03))
    return p


def full(*rids, free=40, waiting=("new",), parked=(), context=1000):
    running = [request(r, context=context) for r in rids if r not in parked]
    away = [request(r, Phase.PARKED, context=context) for r in parked]
    return engine([*running, *away, *map(waits, waiting)], device_free_tokens=free, device_total_tokens=10_000)


def test_the_largest_buffer_makes_room_for_a_newcomer_at_a_schedule():
    p = believing({"dry": 0.5, "full": 60.0, "half": 20.0}, waiting=["new"])
    plan = p.plan(full("dry", "full", "half"))
    assert (plan.park, plan.admit) == (("full",), ("new",))


def test_between_schedules_newcomers_come_in_where_they_fit_and_nobody_is_parked():
    p = believing({"full": 60.0}, waiting=["new"])
    p.observe(Tick(10.1, 0.03))
    assert (p.plan(full("full")).park, p.plan(full("full")).admit) == ((), ())
    assert p.plan(full("full", free=400)).admit == ("new",)
    p.observe(Tick(10.5, 0.03))  # 0.5 s after the last one
    assert p.plan(full("full")).park == ("full",)


def test_nobody_is_parked_whose_buffer_does_not_last_for_the_way_there_and_back():
    # mu = 2 times: next to nothing to store (9 tokens, 0.1 ms); back 9.9 ms for 990 tokens at 100,000 tok/s, and steps
    # of 30 ms to notice it, for the tail and to decode; and the interval: 2 x (0.0001 + 0.0099 + 0.09 + 0.5) = 1.2 s.
    for unread_s, park in ((1.1, ()), (1.3, ("a",))):
        view = engine([request("a", context=1000, backed_tokens=990), waits("new")], device_free_tokens=40)
        assert believing({"a": unread_s}, waiting=["new"]).plan(view).park == park, unread_s


def test_a_parked_stream_that_runs_dry_comes_back_before_a_newcomer_of_less_delay():
    p = believing({"full": 60.0, "gone": -3.0}, parked=["gone"])
    p.observe(arrived("new"))
    plan = p.plan(full("full", "gone", parked=["gone"], free=1100))
    # Neither has anything unread, and 1100 hold only one of them beside 3 pages and the growth of half a second.
    assert plan.park == ("full",) and set(plan.admit) == {"gone", "new"}


def test_rates_above_what_the_device_makes_fall_back_to_first_come_first_served():
    # Ten streams of some 910 tokens fill 10,000, and in steps of 30 ms make 333 tok/s: nine of 30 tok/s ask for 270, of
    # 40 for 360. Beside the 27 for three steps of nine streams, 40 are free: no room for the newcomer's 102.
    for rate, parks in ((30.0, True), (40.0, False)):
        buffers = {f"r{i}": 60.0 for i in range(9)}
        plan = believing(buffers, waiting=["new"], rate=rate).plan(full(*buffers, free=40 + 27))
        assert bool(plan.park) == bool(plan.admit) == parks, rate


def test_whoever_has_no_reader_is_read_at_the_reference_rate():
    p = PaperTokenFlow(PolicyConfig())
    p.observe(arrived("agent", None, ReaderClass.AGENT))
    assert p.streams.by_rid["agent"].read_rate_tok_s == 6.0
    assert p.streams.by_rid["agent"].buffer is not None


def member(rid, weight, utility, unread=0.0):
    s = Stream(rid, ReaderClass.READER, 1, 1, 1.0, None, 0.0)
    return Member(request(rid), s, weight, (unread, 0.0, 0.0), utility, False)


def test_adjacent_pairs_are_swapped_where_the_utility_rises_and_it_fits():
    order = [member("a", 50, 1.0), member("b", 60, 2.0), member("c", 10, 0.5)]
    # a and c fill 60; b instead of a needs 10 more, which are taken.
    assert balance(order, capacity=60, slots=3) == {"a", "c"}
    assert balance(order, capacity=70, slots=3) == {"b", "c"}


def test_a_burst_over_a_full_pool_is_served_while_readers_read_on():
    old = [Job(f"old{i}", 100, 400, rate_tok_s=5.0) for i in range(4)]
    burst = [Job(f"new{i}", 100, 60, at_s=8.0, rate_tok_s=5.0) for i in range(3)]
    record = StandIn(PaperTokenFlow(PolicyConfig()), pool_tokens=2048).run([*old, *burst])
    assert set(record.finished.values()) == {"stop"} and record.parks
    assert max(record.token_times[j.rid][0] - j.at_s for j in burst) < 1.0


def test_the_guides_policy_has_its_formula_and_its_numbers_and_keeps_what_it_leaves_open():
    config = guide_policy(PolicyConfig(mu=3.0, eps_s=9.0, priority="aged")).config
    assert (config.priority, config.eps_s, config.min_slack_s, config.default_read_rate_tok_s) == (
        "guide",
        0.5,
        2.0,
        6.0,
    )
    assert (config.mu, config.min_run_tokens) == (3.0, 1)
