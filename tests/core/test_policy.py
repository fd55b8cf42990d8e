"""TokenFlow's policy: single decisions on views made by hand, then whole runs on the stand-in engine.

In the stand-in a decode step takes 0.03 s (33.3 tok/s a stream) and prefill makes 2000 tok/s, unless said otherwise.
"""

from __future__ import annotations

import copy
import random

import pytest

from support.standin import Job, Pure, StandIn, dry_s, state_of
from support.views import engine, request
from tokenflow_sgl.core.baselines import Fcfs
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.driver import check_plan
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.priority import PRIORITIES
from tokenflow_sgl.core.types import (
    Applied,
    Arrived,
    Emitted,
    Finished,
    Halted,
    Phase,
    Plan,
    ReaderClass,
    Reported,
    Tick,
    Visible,
)

STEP_S = 0.03
BATCH, AGENT, READER = ReaderClass.BATCH, ReaderClass.AGENT, ReaderClass.READER


def policy(**settings):
    return TokenFlowPolicy(PolicyConfig(**settings))


def standin(pool, *, page=16, chunk=8192, pure=False, **settings):
    made = policy(**settings)
    return StandIn(Pure(made) if pure else made, pool_tokens=pool, page_tokens=page, chunk_tokens=chunk)


def ttft_s(record, job):
    return record.token_times[job.rid][0] - job.at_s


def dry(record, job):
    return dry_s(record.token_times[job.rid], job.rate_tok_s or 6.0)


# ---- single decisions


def believing(streams, *, now_s=10.0, waiting=(), parked=(), **settings):
    """A policy in which {rid: slack_s} run and are read at 10 tok/s; `parked` left at `now_s`, `waiting` came then."""
    p = policy(**settings)
    p.observe(Tick(0.0))
    for rid in streams:
        p.observe(Arrived(rid, 10, 10_000, READER, 10.0))
    p.observe(Applied(admitted=tuple((rid, 10, 0) for rid in streams)))
    # All tokens come at 0; at `now_s` the reader has read 10 x now_s of them, and S x 10 more lie before it.
    p.observe(Emitted(tuple(streams), tuple(round(10 * (now_s + s)) for s in streams.values())))
    p.observe(Applied(parked=tuple(parked)))
    p.observe(Tick(now_s))
    for event in waiting:
        p.observe(event)
    p.streams.settle()
    return p


def newcomer(rid="new", prompt=100, reader=READER, rate=10.0):
    return Arrived(rid, prompt, 500, reader, rate if reader is READER else None)


def waits(rid="new", context=100, **fields):
    return request(rid, Phase.WAITING, context=context, **fields)


def running(rid, output, context=200, **fields):
    return request(rid, context=context, output=output, **fields)


def test_a_steady_step_does_not_ask_for_the_requests():
    p = believing({"a": 20.0})
    view = engine([running("a", 300)])
    assert p.plan(view) == Plan()
    assert view.built is None


def test_a_newcomer_that_fits_comes_in_and_nobody_is_parked():
    p = believing({"a": 60.0, "b": 60.0}, waiting=[newcomer()])
    plan = p.plan(engine([running("a", 700), running("b", 700), waits()], device_free_tokens=600))
    assert (plan.admit, plan.park) == (("new",), ())


def test_a_full_buffer_is_parked_before_one_about_to_run_dry():
    p = believing({"dry": 0.5, "half": 9.0, "full": 60.0}, waiting=[newcomer()])
    view = engine([running(r, 500) for r in ("dry", "half", "full")] + [waits()], device_free_tokens=0)
    plan = p.plan(view)
    assert (plan.admit, plan.park) == (("new",), ("full",))


def test_a_stream_below_the_minimal_slack_is_no_candidate_however_short_the_prefill():
    for slack, parked in ((1.9, ()), (2.1, ("a",))):
        p = believing({"a": slack}, waiting=[newcomer(prompt=1)], min_slack_s=2.0)
        view = engine([running("a", 500), running("other", 500, preemptible=False), waits(context=1)])
        view.device_free_tokens = 6  # room to grow, and none for the newcomer
        assert p.plan(view).park == parked, slack


def test_a_stream_needs_slack_for_the_whole_prefill_of_the_newcomer():
    # 8000 uncached tokens at the believed 2000 tok/s: 4 s + overhead 0.05 + eps 0.5 = 4.55 s. Its own return takes
    # 0.09 s for the copy of 8999 tokens at 100,000 tok/s and a step each to notice, to compute the tail, and to decode.
    for slack, parked in ((4.7, ()), (4.75, ("a",))):
        p = believing({"a": slack}, waiting=[newcomer(prompt=8000)], prefill_prior_tok_s=2000.0)
        view = engine([running("a", 500, context=9000), running("b", 500, context=9000), waits(context=8000)])
        view.device_free_tokens = 1000
        assert p.plan(view).park == parked, slack


def test_a_prompt_in_the_cache_costs_no_prefill():
    # 8000 tokens of which 7900 are cached: 0.05 + 0.05 + 0.5, so the minimal slack of 2 s decides.
    p = believing({"a": 2.5}, waiting=[newcomer(prompt=8000)], prefill_prior_tok_s=2000.0)
    for cached, host in ((7900, 0), (0, 7900)):
        new = waits(context=8000, cached_tokens=cached, host_hit_tokens=host, takes_tokens=1000)
        view = engine([running("a", 500, context=9000), running("b", 500, context=9000), new], device_free_tokens=1000)
        assert p.plan(view).park == ("a",), (cached, host)


def test_pages_that_others_share_free_nothing():
    p = believing({"shares": 60.0, "alone": 9.0}, waiting=[newcomer()])
    view = engine([running("shares", 500, frees_tokens=0), running("alone", 500), waits()], device_free_tokens=0)
    assert p.plan(view).park == ("alone",)


@pytest.mark.parametrize("fields", [{"preemptible": False}, {"copying_tokens": 64}])
def test_what_cannot_be_parked_now_is_not_parked(fields):
    p = believing({"pinned": 60.0, "free": 9.0}, waiting=[newcomer()])
    view = engine([running("pinned", 500, **fields), running("free", 500), waits()], device_free_tokens=0)
    assert p.plan(view).park == ("free",)


def test_a_stream_is_not_parked_for_a_newcomer_before_its_minimum_run_nor_beyond_its_number_of_parks():
    p = believing({"a": 60.0}, waiting=[newcomer()], min_run_tokens=32)
    p.streams.by_rid["a"].output_at_admission = 700 - 31
    view = engine([running("a", 700), running("b", 700), waits()], device_free_tokens=100)
    assert p.plan(view).park == ()
    p.streams.by_rid["a"].output_at_admission = 700 - 32
    assert p.plan(view).park == ("a",)
    p.streams.by_rid["a"].parks = p.config.max_parks
    assert p.plan(view).park == ()


def full(*rids, output=500, free=0):
    return engine([running(r, output) for r in rids], device_free_tokens=free, waiting=0)


def test_streams_that_outgrow_memory_make_room_among_themselves_largest_slack_first():
    p = believing({"a": 9.0, "b": 60.0, "c": 20.0})
    assert p.plan(full("a", "b", "c")).park == ("b",)


def test_streams_are_left_in_a_nearly_full_pool_while_their_own_pages_hold_the_next_tokens():
    p = believing({"a": 9.0, "b": 60.0})
    # Pages of 16. The KV of `context` - 1 tokens is written, and three steps are looked ahead.
    for contexts, free, parked in (
        ((200, 200), 0, ()),
        ((200, 206), 0, ()),
        ((200, 207), 0, ("b",)),
        ((207, 207), 31, ("b",)),
        ((207, 207), 32, ()),
    ):
        streams = [running(rid, 500, context=context) for rid, context in zip("ab", contexts, strict=True)]
        view = engine(streams, device_free_tokens=free, waiting=0)
        view.page_tokens = 16
        assert p.plan(view).park == parked, (contexts, free)


def test_memory_that_runs_out_spares_a_stream_at_its_limit_of_parks_while_another_can_go():
    # "pinned" has more slack and was parked as often as allowed; "other" has too little to be a candidate by choice.
    p = believing({"pinned": 1.5, "other": 1.0})
    p.streams.by_rid["pinned"].parks = p.config.max_parks
    assert p.plan(full("pinned", "other")).park == ("other",)


def test_memory_that_runs_out_spares_a_stream_that_just_returned_while_another_can_go():
    p = believing({"back": 1.5, "other": 1.0})
    p.streams.by_rid["back"].output_at_admission = 499
    assert p.plan(full("back", "other")).park == ("other",)


def test_memory_promised_to_a_prefill_under_way_is_not_eaten_by_growth():
    # 100 tokens of the chunked prompt are still to come and 45 are free: upstream goes on with the prefill all the same
    # and dies for lack of memory, unless somebody leaves first.
    p = believing({"a": 20.0, "b": 9.0})
    chunked = request("big", Phase.PREFILL, context=500, takes_tokens=100)
    view = engine([running("a", 500), running("b", 500), chunked], device_free_tokens=45, waiting=0)
    assert p.plan(view).park == ("a",)


def test_one_reader_beside_a_chunked_prompt_gives_way_to_it_and_does_not_grow_meanwhile():
    # The prompt takes its memory chunk by chunk all the same, and upstream dies where it cannot.
    chunked = request("big", Phase.PREFILL, context=1800, takes_tokens=264)
    for free, parked in ((320, ()), (256, ("fast",))):
        p = believing({"fast": 0.0})
        p.decodes_since_prefill = 0
        plan = p.plan(engine([running("fast", 500), chunked], device_free_tokens=free, waiting=0))
        assert plan.park == parked, free
        assert plan.prefill_tokens == (None if parked else 0), free


def test_as_many_streams_give_way_to_a_prompt_under_way_as_it_needs_whatever_their_slack():
    # Each frees 200; 500 of the prompt are still to come, and nobody has slack to spare.
    p = believing({"a": 0.5, "b": 0.4, "c": 0.3})
    chunked = request("big", Phase.PREFILL, context=900, takes_tokens=500)
    view = engine([*(running(rid, 500) for rid in "abc"), chunked], device_free_tokens=0, waiting=0)
    assert sorted(p.plan(view).park) == ["a", "b", "c"]


def test_a_parked_stream_comes_back_before_a_newcomer_when_its_buffer_nears_the_end():
    p = believing({"due": 0.5, "full": 60.0}, parked=["due"], waiting=[newcomer()])
    due = request("due", Phase.PARKED, context=200, output=500)
    view = engine([running("full", 700), due, waits()], device_free_tokens=600)
    assert p.plan(view).admit == ("due", "new")


@pytest.mark.parametrize(("dry_s", "order"), [(1.0, ("new", "dry")), (3.0, ("dry", "new"))])
def test_a_newcomer_goes_before_a_reader_who_ran_dry_a_moment_ago_and_not_before_one_who_waits_long(dry_s, order):
    # Its slack of 0.5 s ends at 10.5 s. A return of 200 tokens is believed to take 0.03 + 0.1 + 0.05 s: after 1 s it
    # ranks ln(1 + 1 / 0.18) = 1.9 + 0.1 above a slack of delta, after 3 s 2.9; the newcomer has its mu of 2.
    p = believing({"dry": 0.5}, parked=["dry"])
    p.observe(Tick(10.5 + dry_s))
    p.observe(newcomer())
    dry = request("dry", Phase.PARKED, context=200, output=105)
    assert p.plan(engine([dry, waits()], device_free_tokens=600)).admit == order


def test_of_readers_who_ran_dry_the_one_who_waits_longest_comes_back_first():
    p = believing({"a": 1.0, "b": 0.1, "c": 0.5}, parked=["a", "b", "c"])
    p.observe(Tick(12.0))
    away = [request(rid, Phase.PARKED, context=200, output=100) for rid in "abc"]
    assert p.plan(engine(away, device_free_tokens=900)).admit == ("b", "c", "a")


def test_one_that_fits_only_alone_holds_memory_back_for_itself_after_its_wait():
    # 990 of 1000 tokens: less than it would like to grow into, but it can run. Readers that keep coming must not keep
    # it out for ever.
    for waited_s, admitted in ((1.0, ("new",)), (60.0, ())):
        p = believing({"busy": 0.5}, waiting=[newcomer("big", prompt=990)], min_slack_s=2.0)
        p.observe(Tick(10.0))
        p.observe(Tick(10.0 + waited_s))
        p.observe(newcomer())
        view = engine([running("busy", 500), waits("big", context=990), waits()], device_free_tokens=200)
        assert p.plan(view).admit == admitted, waited_s


def test_a_parked_stream_with_a_full_buffer_stays_away_while_a_newcomer_wants_the_memory():
    p = believing({"away": 60.0, "busy": 1.0}, parked=["away"], waiting=[newcomer()])
    away = request("away", Phase.PARKED, context=200, output=700)
    view = engine([running("busy", 500), away, waits()], device_free_tokens=200)
    assert p.plan(view).admit == ("new",)


def test_parked_streams_come_back_ahead_of_need_while_memory_is_idle():
    p = believing({"away": 60.0, "busy": 9.0}, parked=["away"])
    away = request("away", Phase.PARKED, context=200, output=700)
    assert p.plan(engine([running("busy", 500), away], device_free_tokens=900)).admit == ("away",)


def test_an_engine_with_nothing_else_to_do_lets_a_parked_stream_return_however_tight_it_is():
    # 1000 tokens, 930 of them for the one stream: too little for return_steps of growth, but nobody else wants it.
    p = believing({"away": 60.0}, parked=["away"])
    away = request("away", Phase.PARKED, context=930, output=700)
    assert p.plan(engine([away], device_free_tokens=1000)).admit == ("away",)


def test_an_unstarted_reader_goes_before_work_without_a_reader_however_long_that_waited():
    for name in PRIORITIES:
        p = policy(priority=name)
        p.observe(Tick(0.0))
        p.observe(newcomer("batch", reader=BATCH))
        p.observe(newcomer("agent", reader=AGENT))
        p.observe(Tick(1000.0))
        p.observe(newcomer("new"))
        waiting = [waits("batch", priority=9), waits("agent", priority=9), waits("new")]
        assert p.plan(engine(waiting)).admit[0] == "new"
        assert p.plan(engine(waiting, device_free_tokens=150)).admit == ("new",)


def test_the_clients_own_priority_decides_among_newcomers():
    p = believing({}, waiting=[newcomer("a"), newcomer("b"), newcomer("c")])
    plan = p.plan(engine([waits("a"), waits("b", priority=1), waits("c", priority=2)]))
    assert plan.admit == ("c", "b", "a")


def test_of_newcomers_that_came_together_the_cheaper_goes_first():
    # Their wait is 0 in the step they are first seen in, where the response ratio says nothing yet.
    p = believing({}, waiting=[newcomer("a-long", prompt=800), newcomer("short", prompt=20)])
    plan = p.plan(engine([waits("a-long", context=800), waits("short", context=20)]))
    assert plan.admit == ("short", "a-long")


def test_what_the_engine_refused_is_left_alone_for_a_moment_and_then_tried_again():
    p = believing({}, waiting=[newcomer("a"), newcomer("b")])
    p.observe(Applied(refused=("a",)))
    view = engine([waits("a"), waits("b")])
    assert p.plan(view).admit == ("b",)
    p.observe(Tick(11.0))
    assert set(p.plan(view).admit) == {"a", "b"}


def test_reports_move_the_slack_that_decides():
    p = believing({"a": 60.0, "b": 30.0}, waiting=[newcomer()])
    view = engine([running("a", 700), running("b", 700), waits()], device_free_tokens=0)
    assert p.plan(view).park == ("a",)
    p.observe(Reported("a", 650))  # 50 left of its 700: 5 s
    assert p.plan(view).park == ("b",)


def test_who_takes_nothing_off_its_connection_is_parked_before_who_reads():
    p = believing({"a": 60.0, "b": 30.0}, waiting=[newcomer()])
    view = engine([running("a", 700), running("b", 700), waits()], device_free_tokens=0)
    p.observe(Halted("b", True))
    p.observe(Halted("nobody", True))
    p.observe(Tick(50.0))  # 40 s later: a holds 20 s, b still 30 s
    assert p.plan(view).park == ("b",)
    p.observe(Halted("b", False))
    p.observe(Tick(65.0))
    assert p.slack_of("b", 65.0) == 15.0


def test_withheld_reasoning_counts_as_batch_until_it_is_visible():
    p = policy()
    p.observe(Tick(0.0))
    p.observe(Arrived("a", 10, 500, READER, 10.0, withheld=True))
    assert [row["class"] for row in p.snapshot(0.0)] == ["batch"]
    p.observe(Applied(admitted=(("a", 10, 0),)))
    p.observe(Emitted(("a",), (40,)))
    p.observe(Visible("a", 40))
    p.observe(Tick(1.0))
    p.observe(Emitted(("a",), (60,)))
    p.streams.settle()
    assert [row["class"] for row in p.snapshot(1.0)] == ["reader"]
    assert p.slack_of("a", 1.0) == 2.0  # 60 - 40 = 20 visible tokens at 10 tok/s
    assert p.slack_of("nobody", 1.0) is None


def test_the_forecast_can_be_seen_with_the_mode_of_publishing_where_memory_is_known():
    p = policy()
    p.observe(Tick(0.0))
    for i in range(100):  # 10 streams take one token each in 0.1 s: 100 tok/s, and after 10 s the fast average has 99%
        p.observe(Applied(decoding=10))
        p.observe(Tick(0.1 * (i + 1), 0.1))
    seen = p.forecast_snapshot(None)
    assert seen["mode"] is None
    assert seen["demand_tokens"] == pytest.approx(4 * 100, rel=0.01)
    assert set(seen) == {
        *("horizon_s", "arrivals_per_s", "tokens_per_s", "demand_tokens", "error_ratio", "bias_ratio", "mode")
    }
    # 1000 tokens of which 400 are spoken for: rest down to 900 free, hard below 400.
    for free, mode in ((900, "rest"), (890, "steady"), (390, "hard")):
        assert p.forecast_snapshot(engine(device_free_tokens=free))["mode"] == mode, free


# ---- whole runs

BACKGROUND = [Job(f"b{i}", 100, 600) for i in range(4)]
BURST = [Job(f"n{i}", 100, 40, at_s=8.0) for i in range(6)]


@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_a_burst_parks_surplus_streams_and_serves_newcomers_at_once(name):
    # At 8 s the four hold 4 x (100 + 266) = 1464 of 2048: four newcomers of 100 fit, six do not.
    record = standin(2048, pure=True, priority=name).run(BACKGROUND + BURST)
    # The pass under way, all six prompts in one prefill of 600 tokens (0.3 s), and one pass to spare.
    assert max(ttft_s(record, j) for j in BURST) <= 600 / 2000 + 2 * STEP_S + 1e-6
    assert record.parks and all(rid.startswith("b") for _, _, rid in record.parks)
    assert [dry(record, j) for j in BACKGROUND + BURST] == [pytest.approx(0.0, abs=1e-6)] * 10
    assert not record.retractions
    assert set(record.finished.values()) == {"stop"}


def test_the_same_burst_waits_in_stocks_own_order():
    record = StandIn(Fcfs(), pool_tokens=2048).run(BACKGROUND + BURST)
    assert max(ttft_s(record, j) for j in BURST) > 1.0
    assert not record.parks


@pytest.mark.parametrize("seed", range(5))
def test_each_parked_stream_returns_before_its_reader_runs_dry(seed):
    # 16 readers take 3 to 6 tok/s each; a running stream makes 33 tok/s, and 1536 tokens hold four or five of them.
    rng = random.Random(seed)
    jobs = [Job(f"b{i}", 80, 500, at_s=i / 10, rate_tok_s=rng.uniform(3.0, 6.0)) for i in range(6)]
    jobs += [Job(f"n{i}", 60, 60, at_s=rng.uniform(5.0, 12.0), rate_tok_s=rng.uniform(3.0, 6.0)) for i in range(10)]
    record = standin(1536).run(jobs)
    assert record.parks
    for j in jobs:
        assert dry(record, j) == pytest.approx(0.0, abs=1e-6), (j.rid, record.parks_of(j.rid), record.returns_of(j.rid))


@pytest.mark.parametrize("name", sorted(PRIORITIES))
@pytest.mark.parametrize("reader", [BATCH, AGENT])
def test_work_without_a_reader_is_never_starved_by_readers_that_keep_coming(name, reader):
    # A reader of 60 + 60 tokens every 0.5 s wants 120 tok/s. Room for 4 of them at 33 tok/s, less their prefills, makes
    # some 130: hardly anything is left, so the work lives on its turns of min_run tokens every batch_turn_s.
    config = PolicyConfig()
    turns = -(-100 // config.min_run_tokens)
    rng = random.Random(1)
    readers = [Job(f"r{i:03}", 60, 60, at_s=0.5 * i + rng.uniform(0, 0.1)) for i in range(400)]
    work = [Job(f"w{i}", 100, 100, at_s=1.0 + i, reader=reader) for i in range(3)]
    record = standin(512, priority=name).run(readers + work)
    assert set(record.finished.values()) == {"stop"} and len(record.finished) == 403
    for j in work:
        assert ttft_s(record, j) < config.batch_turn_s
        # A turn is one batch_turn_s of waiting, and as long again while the two others are owed theirs first.
        assert record.token_times[j.rid][-1] < 4.0 + turns * 2 * config.batch_turn_s < readers[-1].at_s
    # Work in its turn cannot be parked for min_run tokens: a return may wait for a part of it. To `guide` newcomers are
    # before all that have been dry for eps, whatever they wait for.
    longest_s = config.min_run_tokens * STEP_S + (config.eps_s if name == "guide" else 0.0)
    for j in readers:
        assert dry(record, j) < longest_s, j.rid


@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_in_no_plan_of_a_run_does_work_without_a_reader_stand_before_an_unstarted_reader(name):
    rng = random.Random(2)
    jobs = [Job(f"r{i:02}", 60, 60, at_s=float(rng.randint(0, 10))) for i in range(50)]
    jobs += [Job(f"w{i}", 60, 60, at_s=float(rng.randint(0, 10)), reader=(BATCH, AGENT)[i % 2]) for i in range(12)]
    e = standin(2048, priority=name)
    plan_of, orders = e.policy.plan, 0

    def plan(view):
        nonlocal orders
        made = plan_of(view)
        if made.admit and view.built:
            unstarted = {r.rid for r in view.built if r.phase is Phase.WAITING}
            order = [(rid[0], rid in unstarted) for rid in made.admit]
            new = [i for i, entry in enumerate(order) if entry == ("r", True)]
            orders += bool(new) and any(kind == "w" for kind, _ in order)
            assert not new or all(kind == "r" for kind, _ in order[: new[-1]]), order
        return made

    e.policy.plan = plan
    e.run(jobs)
    assert orders, "no plan named both: the run shows nothing"


# B03: priority preemption must fire when memory, not slots, is the limit.


def b03(rate):
    # At 4 s the two low ones hold 2 x (180 + 133) = 626 of 1024: 398 are free, 400 are wanted.
    return [
        Job("low0", 180, 260, rate_tok_s=rate),
        Job("low1", 180, 260, rate_tok_s=rate),
        Job("high", 400, 20, at_s=4.0),
    ]


@pytest.mark.parametrize("page", [1, 16])
def test_b03_a_newcomer_is_served_within_two_decode_steps_and_its_prefill(page):
    jobs = b03(5.0)
    record = standin(1024, page=page, pure=True).run(jobs)
    assert ttft_s(record, jobs[2]) <= 2 * STEP_S + 400 / 2000 + 1e-6
    assert record.parks
    for low in jobs[:2]:
        assert len(record.parks_of(low.rid)) <= 2
        assert dry(record, low) == pytest.approx(0.0, abs=1e-6)
    assert {j.rid: len(record.token_times[j.rid]) for j in jobs} == {"low0": 260, "low1": 260, "high": 20}


@pytest.mark.parametrize("page", [1, 16])
def test_b03_with_zero_surplus_nobody_is_preempted_and_the_newcomer_waits(page):
    jobs = b03(40.0)  # faster than the 33 tok/s they get
    record = standin(1024, page=page).run(jobs)
    assert not record.parks
    assert ttft_s(record, jobs[2]) > 3.0  # the low ones end at 0.18 + 259 x 0.03 = 7.95 s
    assert set(record.finished.values()) == {"stop"}


# B07: no ping-pong.


def test_b07_a_burst_over_a_full_pool_does_not_ping_pong():
    streams = [Job(f"s{i}", 40, 260, rate_tok_s=8.0) for i in range(4)]
    burst = [Job(f"n{i}", 100, 20, at_s=2.0, rate_tok_s=8.0) for i in range(6)]
    alone = standin(512).run(streams)
    record = standin(512).run(streams + burst)
    assert set(record.finished.values()) == {"stop"} and len(record.finished) == 10
    assert record.decode_steps <= 1.6 * alone.decode_steps
    assert not record.retractions
    for j in streams + burst:
        parks, admissions = record.parks_of(j.rid), [s for s, _, rid in record.admissions if rid == j.rid]
        assert len(parks) <= 8
        for parked in parks:
            back = max(s for s in admissions if s < parked)
            assert back == admissions[0] or sum(back <= s < parked for s in record.token_steps[j.rid]) >= 16


def test_b07_a_stream_comes_back_only_where_it_can_stay():
    streams = [Job(f"s{i}", 40, 260, rate_tok_s=8.0) for i in range(4)]
    e = standin(512)
    config = e.policy.config
    plan_of = e.policy.plan

    def plan(view):
        made = plan_of(view)
        parked = [r for r in view.requests() if r.phase is Phase.PARKED and r.rid in (made.admit or ())]
        if parked and view.running:
            freed = sum(r.frees_tokens for r in view.requests() if r.rid in made.park)
            wanted = sum(r.takes_tokens for r in parked) + config.growth_tokens * len(parked)
            assert wanted <= view.device_free_tokens + freed, (wanted, view)
        return made

    e.policy.plan = plan
    assert e.run(streams).parks


# B09: what never fits, and what fits exactly.


@pytest.mark.parametrize("prompt", [450, 463, 464, 465, 479, 480, 481, 494, 495])
@pytest.mark.parametrize("page", [1, 16])
def test_b09_a_request_that_fits_alone_is_served_alone(page, prompt):
    # The engine takes what is smaller than the pool less a page: up to 512 - 16 - 1 = 495.
    record = standin(512, page=page).run([Job("big", prompt, 10)], max_steps=200)
    assert record.finished == {"big": "stop"}


@pytest.mark.parametrize("prompt", [480, 495])
def test_b09_a_request_that_fits_exactly_gets_the_pool_to_itself_when_others_run(prompt):
    jobs = [Job("big", prompt, 10, at_s=0.5), *(Job(f"s{i}", 40, 200) for i in range(3))]
    record = standin(512).run(jobs, max_steps=2000)
    assert set(record.finished.values()) == {"stop"}
    assert ttft_s(record, jobs[0]) < 20.0


@pytest.mark.parametrize("prompt", [513, 600, 5000])
def test_b09_a_request_that_never_fits_does_not_block_those_behind_it(prompt):
    # The adapter refuses it at its entry; should one come through all the same, the others must not pay for it.
    e = standin(512)
    small = [Job(f"s{i:02}", 40, 40, at_s=0.6 * i) for i in range(50)]
    record = e.run([Job("never", prompt, 10), *small], max_steps=4000, until=lambda: len(e.record.finished) == 50)
    assert "never" not in record.token_times
    assert max(ttft_s(record, j) for j in small) < 1.0


def test_b09_one_that_grows_to_the_wall_ends_there_and_small_ones_beside_it_end_normally():
    big, small = Job("big", 450, 200), [Job(f"s{i}", 20, 30, at_s=0.1 * i) for i in range(5)]
    record = standin(512).run([big, *small], max_steps=5000)
    assert {record.finished[j.rid] for j in small} == {"stop"}
    assert len(record.parks_of("big")) <= 8
    assert record.finished["big"] in ("stop", "abort")


# B32: neither the big one blocks the small ones, nor do they starve it.


@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_b32_small_ones_pass_the_big_one_and_it_is_served_within_a_bound(name):
    streams = [Job(f"a{i}", 60, 600) for i in range(2)]
    big, small = Job("big", 1800, 30, at_s=5.0), [Job(f"s{i:02}", 30, 30, at_s=5.0) for i in range(20)]
    record = standin(2048, chunk=256, priority=name).run([*streams, big, *small])
    # 20 x 30 = 600 tokens are three chunks of 256: 0.3 s; the report allows 1 s.
    assert max(ttft_s(record, j) for j in small) <= 1.0
    assert ttft_s(record, big) <= 20.0
    assert set(record.finished.values()) == {"stop"}


@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_b32_a_big_one_is_served_while_small_ones_keep_coming(name):
    # One of 30 + 60 tokens every 0.3 s runs 1.8 s: 6 x 90 = 540 of 2048 at any time. The big one wants 1800, so the
    # small ones must be held for the 1.8 s that those running need to end, and no longer than it runs.
    big, small = Job("big", 1800, 30, at_s=2.0), [Job(f"s{i:03}", 30, 60, at_s=0.3 * i) for i in range(200)]
    record = standin(2048, chunk=256, priority=name).run([big, *small])
    assert ttft_s(record, big) <= 20.0
    assert max(ttft_s(record, j) for j in small) <= 6.0


def test_b32_a_long_prefill_lets_no_reader_run_dry():
    # 4000 tokens in chunks of 256 take 16 x 0.128 = 2.05 s; the six have about 3 s of surplus.
    streams = [Job(f"a{i}", 40, 300, rate_tok_s=10.0) for i in range(6)]
    record = standin(8192, chunk=256).run([*streams, Job("long", 4000, 20, at_s=1.3, rate_tok_s=10.0)])
    assert [dry(record, j) for j in streams] == [pytest.approx(0.0, abs=1e-6)] * 6


# ---- degeneration


def test_with_memory_to_spare_nothing_is_planned_but_admission():
    jobs = [Job(f"r{i}", 50 + i, 100, at_s=0.1 * i, reader=(READER, AGENT, BATCH)[i % 3]) for i in range(30)]
    record = standin(16384, pure=True).run(jobs)
    assert not record.parks and not record.published_tokens and not record.recomputed_tokens
    # A prefill may be put off for the defer_steps that a reader in need may claim, no longer.
    defer_s = PolicyConfig().defer_steps * STEP_S
    assert max(ttft_s(record, j) for j in jobs) <= defer_s + 2 * STEP_S + 79 / 2000
    assert all(plan.reserve_tokens is None or plan.admit or plan.prefill_tokens == 0 for plan in record.plans)


# Answers shorter than the growth reserved at admission: nobody outgrows memory, so a park could only be for a newcomer.
SHORT = PolicyConfig().growth_tokens - 2


@pytest.mark.parametrize("kind", [{"rate_tok_s": 1000.0}, {"reader": AGENT}, {"reader": BATCH}], ids=str)
def test_with_infinite_rates_nobody_is_parked_however_many_wait(kind):
    jobs = [Job(f"r{i}", 90, SHORT, at_s=0.05 * i, **kind) for i in range(60)]
    record = standin(512, min_run_tokens=1).run(jobs)
    assert not record.parks and not record.retractions
    assert set(record.finished.values()) == {"stop"}


# ---- purity and legality


def random_jobs(rng, pool):
    jobs = []
    for i in range(rng.randint(3, 25)):
        reader = rng.choices([READER, AGENT, BATCH], [8, 1, 1])[0]
        jobs.append(
            Job(
                f"r{i}",
                rng.randint(1, pool // 3),
                rng.randint(1, pool // 3),
                at_s=round(rng.uniform(0, 10), 2),
                rate_tok_s=rng.choice([None, 2.0, 8.0, 20.0, 100.0]) if reader is READER else None,
                reader=reader,
                priority=rng.randint(0, 2),
                preemptible=rng.random() < 0.9,
            )
        )
    return jobs


def random_run(seed, *, pure):
    """A random load on an engine with a random host: large or full, quick or slow, sound or failing."""
    rng = random.Random(seed)
    pool = rng.choice([512, 1024, 2048])
    jobs = random_jobs(rng, pool)
    copies = rng.choice(["ahead", "ahead", "ahead", "at_park", "none"])
    loads = rng.choice(["ahead", "ahead", "at_admission"])
    settings = {
        "priority": rng.choice(sorted(PRIORITIES)),
        "max_parks": rng.choice([3, 64]),
        "copies": copies,
        "loads": loads,
        "forecast_s": rng.choice([0.0, 4.0]),
        "prefill_prior_tok_s": 2000.0,
    }
    faults = random.Random(seed)
    failing = rng.choice([0.0, 0.0, 0.3])
    e = StandIn(
        Pure(policy(**settings)) if pure else policy(**settings),
        pool_tokens=pool,
        page_tokens=rng.choice([1, 16]),
        max_running=rng.choice([4, 64]),
        chunk_tokens=rng.choice([64, 256, 8192]),
        prefill_tok_s=rng.choice([500.0, 2000.0]),
        load_tok_s=rng.choice([500.0, 5000.0, 100_000.0]),
        store_tok_s=rng.choice([500.0, 5000.0, 100_000.0]),
        publish_s=lambda context_tokens: 1e-4 + 1e-6 * context_tokens,
        host_tokens=rng.choice([pool // 4, pool, 1 << 30]),
        host_ok=lambda now_s: not failing or now_s % 5.0 < 4.0,
        load_slots=rng.choice([1, 3]),
        load_fails=lambda rid, now_s: faults.random() < failing,
        copies=copies,
        loads=loads,
    )
    return jobs, e.run(jobs, max_steps=8000)


@pytest.mark.parametrize("block", range(10))
def test_random_load_never_breaks_legality_and_memory_balances(block):
    """The stand-in asserts both after every step and verb; 300 runs are some 200,000 plans."""
    loads = 0
    for seed in range(30 * block, 30 * block + 30):
        jobs, record = random_run(seed, pure=False)
        assert len(record.finished) == len(jobs), seed
        loads += len(record.loads)
        for j in jobs:
            if record.finished[j.rid] == "stop":
                assert len(record.token_times[j.rid]) == j.answer_tokens, (seed, j.rid)
    assert loads, "no run of the block loaded anything: it shows nothing of loads"


@pytest.mark.parametrize("seed", range(1000, 1006))
def test_planning_twice_gives_the_same_plan_and_changes_nothing(seed):
    """Pure compares each plan with a second one, and the policy with the copy made before."""
    jobs, record = random_run(seed, pure=True)
    assert len(record.finished) == len(jobs)


class RandomWorld:
    """Views and events that fit each other but no real engine: phases, sizes and memory jump as they like."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.policy = policy(
            priority=self.rng.choice(sorted(PRIORITIES)),
            publish_below=1.0,
            loads=self.rng.choice(["ahead", "ahead", "at_admission"]),
            forecast_s=self.rng.choice([0.0, 4.0]),
        )
        self.now_s, self.born = 0.0, 0
        self.prompt, self.output, self.phase, self.in_tree = {}, {}, {}, {}
        self.held, self.plan = set(), Plan()

    def events(self):
        rng = self.rng
        running = [r for r, p in self.phase.items() if p is Phase.RUNNING]
        away = [r for r, p in self.phase.items() if p in (Phase.WAITING, Phase.PARKED)]
        parked = tuple(r for r in running if rng.random() < 0.1 and self.output[r])
        admitted = tuple(r for r in away if rng.random() < 0.3)
        refused = tuple(r for r in away if r not in admitted and rng.random() < 0.2)
        loading = [r for r, p in self.phase.items() if p is Phase.LOADING]
        loaded = tuple(r for r in loading if rng.random() < 0.3)
        unloaded = tuple(r for r in loading if r not in loaded and rng.random() < 0.2)
        lost = tuple(r for r in loading if r not in loaded and rng.random() < 0.05)  # the engine took it off, loading
        published = tuple((r, up_to if rng.random() < 0.8 else 0) for r, up_to in self.plan.publish if r in self.phase)
        yield Applied(
            published=published,
            loaded=tuple((r, rng.randint(1, 99)) for r in loaded),
            unloaded=(*unloaded, *(r for r in lost if r not in unloaded), *(["ghost"] if rng.random() < 0.1 else [])),
            admitted=tuple((r, rng.randint(1, 50), rng.randint(0, 50)) for r in admitted),
            parked=(*parked, *lost, *(["ghost"] if rng.random() < 0.1 else [])),
            refused=refused,
            prefill_tokens=rng.choice([0, 0, 40]),
            decoding=len(running),
        )
        for r in admitted:
            self.phase[r], self.in_tree[r] = Phase.RUNNING, self.prompt[r] + self.output[r]
            self.held.discard(r)
        for r in parked:
            self.phase[r] = Phase.PARKED
        for r, up_to in published:
            if self.phase[r] is Phase.RUNNING and r not in admitted:
                self.in_tree[r] = max(self.in_tree[r], up_to)
        for r in (*loaded, *unloaded, *lost):
            self.phase[r] = Phase.PARKED if self.output[r] else Phase.WAITING
        self.held.update(loaded)
        for r in self.plan.load:
            if self.phase.get(r) in (Phase.WAITING, Phase.PARKED) and rng.random() < 0.9:
                self.phase[r] = Phase.LOADING
        self.now_s += rng.choice([0.0, 0.01, 0.03, 1.0])
        # Mostly such that a copy is worth its while.
        timings = [((rng.randint(0, 99), rng.uniform(0, 1e-3)),) if rng.random() < 0.2 else () for _ in range(3)]
        yield Tick(self.now_s, rng.choice([None, 0.0, 0.03, 0.03, 0.03, 2.0]), *timings)
        emitting = tuple(r for r, p in self.phase.items() if p is Phase.RUNNING and rng.random() < 0.9)
        for r in emitting:
            self.output[r] += rng.choice([1, 1, 5])
        yield Emitted((*emitting, "ghost"), (*(self.output[r] for r in emitting), 7))
        for r in list(self.phase):
            if rng.random() < 0.05:
                yield Reported(r, rng.randint(-5, 2000))
            if rng.random() < 0.05:
                yield Halted(r, rng.random() < 0.5)
            if rng.random() < 0.05:
                yield Visible(r, self.output[r])
            if rng.random() < 0.03:
                yield Finished(r)
                del self.phase[r]
                self.held.discard(r)
        if rng.random() < 0.4:
            rid = f"r{self.born}"
            self.born += 1
            self.prompt[rid], self.output[rid], self.phase[rid] = rng.randint(1, 600), 0, Phase.WAITING
            reader = rng.choice([READER, READER, READER, AGENT, BATCH])
            rate = rng.choice([None, 0.1, 6.0, 1000.0]) if reader is READER else None
            yield Arrived(rid, self.prompt[rid], 10_000, reader, rate, withheld=rng.random() < 0.2)

    def view(self):
        rng = self.rng
        requests = []
        host_ok = rng.random() < 0.8
        for rid, phase in self.phase.items():
            context = self.prompt[rid] + self.output[rid]
            cached = rng.randint(0, context)
            away = phase in (Phase.WAITING, Phase.PARKED, Phase.LOADING)
            held = rng.randint(1, max(1, cached)) if rid in self.held and away and phase is not Phase.LOADING else 0
            hits = away and not held and phase is not Phase.LOADING and host_ok
            takes = rng.randint(context - cached, context) if away else 0
            requests.append(
                request(
                    rid,
                    phase,
                    context=context,
                    output=self.output[rid],
                    backed_tokens=rng.randint(0, context),
                    held_tokens=held,
                    published_tokens=0 if away else min(self.in_tree[rid], context - 1),
                    copying_tokens=rng.choice([0, 0, 0, 16]),
                    frees_tokens=rng.randint(0, context),
                    cached_tokens=cached if away else 0,
                    host_hit_tokens=rng.randint(0, context - cached) if hits else 0,
                    takes_tokens=takes,
                    output_tokens=self.output[rid],
                    preemptible=rng.random() < 0.8,
                    priority=rng.randint(-2, 2),
                )
            )
        return engine(
            requests,
            now_s=self.now_s,
            device_free_tokens=rng.choice([0, rng.randint(0, 200), rng.randint(0, 3000)]),
            device_total_tokens=3000,
            max_running=rng.choice([len(requests), 2, 64]),
            page_tokens=rng.choice([1, 16]),
            host_ok=host_ok,
            host_free_tokens=rng.choice([0, 100, 10_000]),
            storing_tokens=rng.choice([0, 0, 64]),
            load_slots=rng.choice([0, 1, 3]),
            waiting=sum(r.phase in (Phase.WAITING, Phase.PARKED, Phase.LOADING) for r in requests),
        )


@pytest.mark.parametrize("seed", range(20))
def test_random_views_and_events_never_break_legality_nor_purity(seed):
    """20 x 200 plans on views that no engine would show."""
    run_world(seed)


def run_world(seed):
    """The number of loads planned."""
    world, loads = RandomWorld(seed), 0
    for step in range(200):
        for event in world.events():
            world.policy.observe(event)
        view = world.view()
        before = copy.deepcopy(world.policy) if step % 10 == 0 else None
        plan = world.policy.plan(view)
        assert check_plan(view, plan) == [], (seed, step)
        world.plan, loads = plan, loads + len(plan.load)
        assert world.policy.plan(view) == plan
        if before is not None:
            assert state_of(before) == state_of(world.policy) and before.plan(view) == plan
    return loads


def test_the_random_views_have_loads_in_them_too():
    assert sum(run_world(seed) for seed in range(3)) > 10


def test_the_same_run_twice_gives_the_same_plans():
    (_, a), (_, b) = random_run(7, pure=False), random_run(7, pure=False)
    assert a.plans == b.plans and a.token_times == b.token_times
