"""SGLang's own orders: highest response ratio next, and the client's priority with eviction."""

from __future__ import annotations

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core.rivals.hrrn import Hrrn
from tokenflow_sgl.core.rivals.priority import ClientPriority
from tokenflow_sgl.core.types import Applied, Arrived, Phase, Plan, ReaderClass


def arrived(rid, prompt=100):
    return Arrived(rid, prompt, 1000, ReaderClass.READER, 6.0)


def waits(rid, context=100, **fields):
    return request(rid, Phase.WAITING, context=context, max_output_tokens=100, **fields)


# ---- hrrn


def test_of_two_that_waited_as_long_the_shorter_prompt_goes_first():
    policy = Hrrn()
    for rid, prompt in (("long", 400), ("short", 100)):
        policy.observe(arrived(rid, prompt))
    policy.observe(Applied(prefill_tokens=200))
    # 200 / 400 = 0.5 and 200 / 100 = 2.
    assert policy.plan(engine([waits("long", 400), waits("short", 100)])).admit == ("short", "long")


def test_a_long_prompt_overtakes_once_it_waited_long_enough():
    policy = Hrrn()
    policy.observe(arrived("long", 400))
    policy.observe(Applied(prefill_tokens=1000))
    policy.observe(arrived("short", 100))
    policy.observe(Applied(prefill_tokens=300))
    # long: 1300 / 400 = 3.25; short: 300 / 100 = 3.
    assert policy.plan(engine([waits("short", 100), waits("long", 400)])).admit == ("long", "short")


def test_a_prompt_that_is_cached_whole_goes_before_all_others():
    policy = Hrrn()
    for rid in ("a", "hit"):
        policy.observe(arrived(rid))
    policy.observe(Applied(prefill_tokens=10_000))
    hit = waits("hit", cached_tokens=60, host_hit_tokens=40)
    assert policy.plan(engine([waits("a"), hit])).admit == ("hit", "a")


def test_a_retracted_request_queues_anew_and_counts_its_prompt_only():
    policy = Hrrn()
    for rid in ("old", "new"):
        policy.observe(arrived(rid))
    policy.observe(Applied(prefill_tokens=500))
    policy.observe(Applied(parked=("old",), prefill_tokens=100))
    # old: 100 / (150 - 50) = 1 since it was retracted; new: 600 / 100 = 6.
    old = request("old", Phase.PARKED, context=150, output=50)
    assert policy.plan(engine([old, waits("new")])).admit == ("new", "old")


def test_a_queue_of_more_than_128_is_left_as_it_stands():
    policy = Hrrn()
    requests = [waits(f"r{i:03}", 129 - i) for i in range(129)]
    for r in requests:
        policy.observe(arrived(r.rid, r.context_tokens))
    policy.observe(Applied(prefill_tokens=1000))
    view = engine(requests, device_free_tokens=10_000)
    assert policy.plan(view).admit == tuple(r.rid for r in requests)
    # One fewer, and the shortest comes first.
    assert policy.plan(engine(requests[1:], device_free_tokens=10_000)).admit[0] == "r128"


def test_an_order_names_no_more_than_would_fit():
    policy = Hrrn()
    plan = policy.plan(engine([waits("a"), waits("b")], device_free_tokens=150))
    assert plan == Plan(admit=("a",))


# ---- priority


def test_without_priorities_it_wishes_for_nothing_as_fcfs():
    policy = ClientPriority()
    policy.observe(arrived("n"))
    view = engine([request("a"), waits("n")], device_free_tokens=0)
    assert policy.plan(view) == Plan()


def runs(rid, priority, **fields):
    return request(rid, context=300, output=50, max_output_tokens=60, priority=priority, **fields)


def evicts(newcomer, *running, free=0, **fields):
    policy = ClientPriority()
    for r in (*running, newcomer):
        policy.observe(arrived(r.rid))
    return policy.plan(engine([*running, newcomer], device_free_tokens=free, device_total_tokens=2000, **fields))


def test_a_newcomer_evicts_who_is_lower_by_more_than_the_threshold():
    for lead, parked in ((10, ()), (11, ("low",))):
        plan = evicts(waits("new", priority=lead), runs("low", 0))
        assert plan.park == parked, lead
        assert plan.admit == (("new",) if parked else ()), lead


def test_the_lowest_priority_goes_first_and_of_these_the_latest():
    running = [runs("low early", 0), runs("low late", 0), runs("lower", -5)]
    # new: 100 + 100 to come + 1; each gives back 300 + 0.7 x 10, and 0.7 x 30 are reserved for the three: one will do.
    assert evicts(waits("new", priority=20), *running).park == ("lower",)
    # 400 + 100 + 1 takes two.
    assert evicts(waits("new", 400, priority=20), *running).park == ("lower", "low late")


def test_nobody_is_evicted_where_not_enough_comes_free():
    assert evicts(waits("new", 900, priority=20), runs("a", 0), runs("b", 0)).park == ()


def test_a_shortage_of_slots_evicts_too():
    plan = evicts(waits("new", priority=20), runs("a", 0), free=1500, max_running=1)
    assert (plan.park, plan.admit) == (("a",), ("new",))


def test_what_cannot_be_parked_is_not_evicted():
    assert evicts(waits("new", priority=20), runs("a", 0, preemptible=False)).park == ()


def test_a_high_priority_burst_is_served_while_low_ones_fill_the_pool():
    e = StandIn(ClientPriority(), pool_tokens=1024, copies="none")
    low = [Job(f"low{i}", 100, 200, priority=0) for i in range(5)]
    high = [Job(f"high{i}", 100, 20, at_s=1.5, priority=50) for i in range(3)]
    record = e.run([*low, *high])
    assert set(record.finished.values()) == {"stop"} and record.parks
    # Three prefills of 0.05 s each, and the step in which they came.
    assert max(record.token_times[f"high{i}"][0] for i in range(3)) < 1.5 + 0.3
