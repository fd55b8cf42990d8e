"""vLLM's scheduler without and with its offloading, on views made by hand and on the stand-in."""

from __future__ import annotations

from support.standin import Job, StandIn
from support.views import engine, request
from tokenflow_sgl.core.driver import HOLD_NOTHING
from tokenflow_sgl.core.rivals.blocks import FullBlocks
from tokenflow_sgl.core.rivals.vllm import Vllm
from tokenflow_sgl.core.rivals.vllm_offload import VllmOffload
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass


def arrived(rid, prompt=100):
    return Arrived(rid, prompt, 1000, ReaderClass.READER, 6.0)


def waits(rid, context=100, **fields):
    return request(rid, Phase.WAITING, context=context, **fields)


def knowing(policy, *, running=(), waiting=(), parked=()):
    """Those that run came in in this order; those parked left in theirs; then the waiting came."""
    for rid in (*running, *parked):
        policy.observe(arrived(rid))
    policy.observe(Applied(admitted=tuple((rid, 100, 0) for rid in (*running, *parked))))
    if parked:
        policy.observe(Applied(parked=tuple(parked)))
    for rid in waiting:
        policy.observe(arrived(rid))
    return policy


def test_requests_come_in_by_arrival_up_to_the_first_that_does_not_fit():
    policy = knowing(Vllm(), waiting=("a", "big", "c"))
    # Each takes its tokens, a page of 1 and one token more: 102 + 502 of 600, so `big` does not fit, and `c` must wait.
    view = engine([waits("c"), waits("big", 500), waits("a")], device_free_tokens=600)
    assert policy.plan(view).admit == ("a",)


def test_no_growth_is_reserved_beyond_the_next_steps():
    policy = knowing(Vllm(), running=("r",), waiting=("n",))
    # r opens 3 pages of one token in the next steps: 102 + 3.
    for free, admit in ((104, ()), (105, ("n",))):
        plan = policy.plan(engine([request("r"), waits("n")], device_free_tokens=free))
        assert (plan.admit, plan.reserve_tokens) == (admit, 0), free


def test_the_last_admitted_goes_first_and_nobody_comes_in_meanwhile():
    policy = knowing(Vllm(), running=("a", "b", "c"), waiting=("n",))
    view = engine([request(r) for r in "abc"] + [waits("n", 1)], device_free_tokens=8)  # 3 x 3 are wanted
    plan = policy.plan(view)
    assert (plan.park, plan.admit) == (("c",), ())


def test_the_preempted_stand_before_all_that_wait_the_last_preempted_first():
    policy = knowing(Vllm(), parked=("b", "a"), waiting=("n",))
    view = engine([waits("n"), *(request(r, Phase.PARKED) for r in "ab")])
    assert policy.plan(view).admit == ("a", "b", "n")


def test_the_only_one_that_runs_gives_way_to_nobody():
    policy = knowing(Vllm(), running=("a",))
    assert policy.plan(engine([request("a")], device_free_tokens=0)).park == ()


def test_who_would_go_next_is_published_when_memory_nears_its_end():
    policy = knowing(Vllm(), running=("a", "b"))
    # Near: less than a block of 16 for each. No shortage: three tokens each are 6.
    for free, publish in ((32, ()), (31, (("b", 96),))):
        plan = policy.plan(engine([request("a", context=100), request("b", context=100)], device_free_tokens=free))
        assert (plan.park, plan.publish) == ((), publish), free


def test_recompute_preemption_ends_and_serves_everybody_in_order():
    e = StandIn(Vllm(), pool_tokens=1024, copies="none")
    record = e.run([Job(f"r{i}", 100, 200, at_s=i * 0.01) for i in range(8)])
    assert set(record.finished.values()) == {"stop"}
    assert record.parks and not record.retractions and not record.loads
    firsts = [record.token_times[f"r{i}"][0] for i in range(8)]
    assert firsts == sorted(firsts)


# ---- with offloading


def test_a_block_is_due_when_the_token_after_its_last_one_has_come():
    blocks = FullBlocks()
    blocks.observe(arrived("a", 40))
    blocks.observe(Applied(admitted=(("a", 40, 0),)))
    view = engine([request("a")], page_tokens=16)
    # 40 + 8 - 1 = 47 written; 48 fill the third block.
    for output, due in ((8, ()), (9, (("a", 48),))):
        blocks.observe(Emitted(("a",), (output,)))
        assert blocks.publish(view) == due
    blocks.observe(Applied(published=(("a", 48),)))
    assert blocks.publish(view) == ()
    # 64 are written with the 25th token: 40 + 25 - 1.
    for output, due in ((24, ()), (25, (("a", 64),))):
        blocks.observe(Emitted(("a",), (output,)))
        assert blocks.publish(view) == due


def test_a_block_the_engine_refused_is_tried_again_with_the_next_one():
    blocks = FullBlocks()
    blocks.observe(arrived("a", 40))
    blocks.observe(Applied(admitted=(("a", 40, 0),)))
    blocks.observe(Emitted(("a",), (9,)))
    view = engine([request("a")], page_tokens=16)
    assert blocks.publish(view)
    blocks.observe(Applied(published=(("a", 0),)))
    for output, due in ((10, ()), (24, ()), (25, (("a", 64),))):
        blocks.observe(Emitted(("a",), (output,)))
        assert blocks.publish(view) == due


def test_blocks_are_stored_in_a_steady_step_that_looks_at_nobody():
    policy = knowing(VllmOffload(), running=("a",))
    policy.observe(Emitted(("a",), (13,)))  # 100 + 13 - 1 = 112 = 7 blocks
    view = engine([request("a")], page_tokens=16)
    assert policy.plan(view).publish == (("a", 112),)
    assert view.built is None
    policy.observe(Applied(published=(("a", 112),)))
    assert policy.plan(view) == HOLD_NOTHING


def test_a_prefix_on_the_host_is_loaded_first_and_those_behind_may_come_in():
    policy = knowing(VllmOffload(), parked=("p",), waiting=("n",))
    parked = request("p", Phase.PARKED, host_hit_tokens=96)
    plan = policy.plan(engine([parked, waits("n")]))
    assert (plan.load, plan.admit) == (("p",), ("n",))
    # What it will still compute, 100 - 96, and a page and a token, are kept from the newcomer.
    assert plan.reserve_tokens == 4 + 1 + 1


def test_what_came_back_stands_before_all_others():
    policy = knowing(VllmOffload(), parked=("p", "q"))
    held = request("p", Phase.PARKED, held_tokens=96, takes_tokens=4)
    plan = policy.plan(engine([request("q", Phase.PARKED), held]))
    assert plan.admit == ("p", "q")


def test_without_a_free_transfer_it_waits_its_turn_and_after_a_failed_one_it_is_computed():
    policy = knowing(VllmOffload(), parked=("p",), waiting=("n",))
    view = engine([request("p", Phase.PARKED, host_hit_tokens=96), waits("n")], load_slots=0)
    assert (policy.plan(view).load, policy.plan(view).admit) == ((), ("n",))
    policy.observe(Applied(unloaded=("p",)))
    assert policy.plan(view).admit == ("p", "n")


def test_offloading_spares_what_recompute_computes_again():
    jobs = [Job(f"r{i}", 100, 200, at_s=i * 0.01) for i in range(8)]
    with_host = StandIn(VllmOffload(), pool_tokens=1024, copies="ahead").run(jobs)
    without = StandIn(Vllm(), pool_tokens=1024, copies="none").run(jobs)
    assert set(with_host.finished.values()) == {"stop"} and with_host.loads
    assert with_host.recomputed_tokens < without.recomputed_tokens / 2
