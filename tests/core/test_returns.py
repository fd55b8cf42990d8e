"""How those that wait come in: by a copy ahead of admission, at once, or not yet. Views made by hand, then whole runs.

A step takes 0.03 s, prefill makes 2000 tok/s and a copy 100,000 tok/s, unless said otherwise.
"""

from __future__ import annotations

import pytest

from support.standin import Job, Pure, StandIn, dry_s
from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass, Tick

READER, BATCH = ReaderClass.READER, ReaderClass.BATCH


def believing(parked=None, *, now_s=10.0, running=(), **settings):
    """{rid: slack_s} of streams parked at `now_s`, read at 10 tok/s; those of `running` have 60 s."""
    p = TokenFlowPolicy(PolicyConfig(**settings))
    slacks = {**(parked or {}), **dict.fromkeys(running, 60.0)}
    p.observe(Tick(0.0))
    for rid in slacks:
        p.observe(Arrived(rid, 10, 10_000, READER, 10.0))
    p.observe(Applied(admitted=tuple((rid, 10, 0) for rid in slacks)))
    p.observe(Emitted(tuple(slacks), tuple(round(10 * (now_s + s)) for s in slacks.values())))
    p.observe(Applied(parked=tuple(parked or ())))
    p.observe(Tick(now_s))
    return p


def away(rid, *, context=800, host=780, cached=0, **fields):
    """A parked stream: `host` tokens on the host and the rest to compute."""
    return request(rid, Phase.PARKED, context=context, host_hit_tokens=host, cached_tokens=cached, **fields)


def new(rid, *, context=800, host=780, **fields):
    return request(rid, Phase.WAITING, context=context, host_hit_tokens=host, **fields)


def arrive(p, *rids, reader=READER, prompt=800):
    for rid in rids:
        p.observe(Arrived(rid, prompt, 500, reader, 10.0 if reader is READER else None))


def plan(p, requests, **fields):
    made = p.plan(engine(requests, **({"device_free_tokens": 5000, "device_total_tokens": 9000} | fields)))
    return made.load, made.admit


# ---- single decisions


def test_a_due_stream_is_loaded_first_and_admitted_when_its_pages_are_back():
    p = believing({"a": 0.5})
    assert plan(p, [away("a")]) == (("a",), ())
    p.observe(Applied(loaded=(("a", 780),)))
    back = away("a", host=0, cached=780, held_tokens=780, takes_tokens=20)
    assert plan(p, [back]) == ((), ("a",))


def test_several_returns_of_a_step_share_one_load():
    p = believing({"a": 0.3, "b": 0.4, "c": 0.5})
    assert plan(p, [away("a"), away("b"), away("c")]) == (("a", "b", "c"), ())


def test_a_return_is_due_by_the_time_its_copy_and_its_prefill_take():
    # 5000 tok/s: the copy of 5000 tokens takes 1 s, then a step to notice, one for the tail of 20 and one to decode:
    # 1.09 s, and 0.55 s of margin (eps + overhead): due at 1.64 s of slack. Nobody returns early: the pool is tight.
    for slack, due in ((1.7, ()), (1.6, ("a",))):
        p = believing({"a": slack}, running=["r"], load_prior_tok_s=5000.0)
        view = [request("r", context=3000, output=700), away("a", context=5020, host=5000)]
        assert plan(p, view, device_free_tokens=5060) == (due, ()), slack


def test_a_return_behind_others_on_the_link_is_due_sooner():
    # As above, and another load of 5000 is under way: one second more, 2.64 s, and the step of its own prefill.
    for slack, due in ((2.75, ()), (2.6, ("a",))):
        p = believing({"a": slack, "b": 0.5}, running=["r"], load_prior_tok_s=5000.0)
        under_way = request("b", Phase.LOADING, context=5020, takes_tokens=20)
        view = [request("r", context=3000, output=700), under_way, away("a", context=5020, host=5000)]
        assert plan(p, view, device_free_tokens=5100) == (due, ()), slack


def test_what_is_computed_sooner_than_copied_is_computed():
    # A return of 20 on the host and 60 to compute spares the engine 80 / 2000 - 60 / 2000 = 10 ms, and copies at 1000
    # tok/s in 20 ms; at 10,000 tok/s in 2 ms.
    for speed, loads in ((1000.0, False), (10_000.0, True)):
        p = believing({"a": 0.5}, load_prior_tok_s=speed)
        expected = (("a",), ()) if loads else ((), ("a",))
        assert plan(p, [away("a", context=80, host=20)]) == expected, speed


def test_a_tiny_hit_is_not_worth_the_start_of_a_load():
    # The 20 tokens of the host add 0.01 s to the prefill, and a copy begins to move after 0.02 s; 60 tokens add 0.03 s.
    for host, expected in ((20, ((), ("a",))), (60, (("a",), ()))):
        p = believing({"a": 0.5})
        p.cost.load.fixed_s = 0.02
        assert plan(p, [away("a", context=host + 20, host=host)]) == expected, host


def test_an_unstarted_reader_is_loaded_as_others_are_though_it_comes_in_a_step_later():
    """Computing what the host has would hold up everybody; in a rush of them each would make the next one slower."""
    # A copy begins to move after 0.02 s, computing takes 0.5 ms a token: 41 tokens are equal.
    for host, expected in ((40, ((), ("n",))), (42, (("n",), ()))):
        p = believing()
        p.cost.load.fixed_s = 0.02
        arrive(p, "n", prompt=host + 20)
        assert plan(p, [new("n", context=host + 20, host=host)]) == expected, host


def test_held_ones_come_in_before_anybody_else_and_those_under_way_keep_their_room():
    p = believing({"due": 0.1, "held": 30.0, "coming": 30.0}, running=["r"])
    arrive(p, "n", prompt=100)
    view = [
        request("r", output=700),
        away("due", context=100, host=0),
        new("n", context=100, host=0),
        away("held", context=500, host=0, cached=480, held_tokens=480, takes_tokens=20),
        request("coming", Phase.LOADING, context=500, takes_tokens=120),
    ]
    # Each needs what it takes and 16 + 1 + 1: held 38, due 118, n 118, and coming keeps 138; "r" 16 for its growth.
    assert plan(p, view, device_free_tokens=16 + 138 + 38 + 118 + 118) == ((), ("held", "due", "n"))
    p.streams.by_rid["r"].parks = p.config.max_parks  # nobody can be parked for them
    assert plan(p, view, device_free_tokens=16 + 138 + 38 + 118 + 117) == ((), ("held", "due"))
    assert plan(p, view, device_free_tokens=16 + 138 + 38 + 117) == ((), ("held",))


def test_what_is_kept_for_those_under_way_is_kept_from_the_engines_admission_too():
    p = believing({"a": 0.3, "coming": 30.0})
    view = [away("a"), request("coming", Phase.LOADING, context=500, takes_tokens=120), new("n", context=50, host=0)]
    arrive(p, "n", prompt=50)
    made = p.plan(engine(view, device_free_tokens=5000, device_total_tokens=9000))
    assert (made.load, made.admit) == (("a",), ("n",))
    # Growth of 16 for "n"; of "a" the 20 that are not on the host and 16; of "coming" 120 + 16 + 1 + 1.
    assert made.reserve_tokens == 16 + 36 + 138


def test_nothing_is_loaded_while_the_host_cannot_be_trusted_nor_where_loads_belong_to_admission():
    p = believing({"a": 0.5})
    assert plan(p, [away("a")], host_ok=False) == ((), ("a",))
    p = believing({"a": 0.5}, loads="at_admission")
    assert plan(p, [away("a")]) == ((), ("a",))


def test_without_a_free_transfer_a_return_waits_even_where_its_reader_ran_dry():
    """A transfer ends sooner than its KV is computed, and computing would hold up all the others."""
    for slack in (0.5, 0.0):
        p = believing({"a": slack}, running=["r"])
        assert plan(p, [request("r", output=700), away("a")], load_slots=0) == ((), ()), slack
        assert plan(p, [request("r", output=700), away("a")], load_slots=1) == (("a",), ()), slack


def test_without_a_free_transfer_an_unstarted_reader_waits_no_longer_than_computing_takes():
    # Computed in 0.43 s; copied in 7.8 + 30 ms, with 40 ms for the tail, after the wait: until it waited 0.352 s.
    for waited_s, expected in ((0.0, ((), ())), (0.35, ((), ())), (0.36, ((), ("n",)))):
        p = believing(running=["r"])
        arrive(p, "n")
        p.observe(Tick(10.0))
        p.observe(Tick(10.0 + waited_s))
        assert plan(p, [request("r", output=700), new("n")], load_slots=0) == expected, waited_s


def test_what_failed_to_load_is_computed_and_loaded_again_only_after_it_came_in():
    p = believing({"a": 0.5})
    p.observe(Applied(unloaded=("a", "ghost")))
    assert plan(p, [away("a")]) == ((), ("a",))
    p.observe(Applied(admitted=(("a", 800, 0),)))
    p.observe(Applied(parked=("a",)))
    assert plan(p, [away("a")]) == (("a",), ())


def test_early_returns_are_loaded_first_too():
    p = believing({"a": 60.0}, running=["r"])
    assert plan(p, [request("r", output=700), away("a")]) == (("a",), ())


def test_an_empty_engine_loads_for_whoever_is_first_and_computes_where_that_does_not_fit():
    p = believing({"a": 0.5})
    assert plan(p, [away("a")], device_free_tokens=800) == (("a",), ())
    assert plan(p, [away("a")], device_free_tokens=700) == ((), ("a",))
    # While a load is under way the engine has something to wait for.
    under_way = request("b", Phase.LOADING, context=800, takes_tokens=20)
    assert plan(p, [away("a"), under_way], device_free_tokens=100) == ((), ())


def test_a_stream_that_the_engine_takes_off_while_it_is_away_keeps_its_place():
    p = believing({"a": 5.0})
    p.observe(Tick(20.0))
    p.observe(Applied(parked=("a",), unloaded=("a",)))
    s = p.streams.by_rid["a"]
    assert (s.parks, s.wait_s(20.0), s.recompute) == (1, 10.0, True)


@pytest.mark.parametrize(
    ("settings", "backed", "host_ok", "slack", "parked"),
    [
        # 2 s of window (min_slack) and: 999 x 1e-5 + three steps = 0.1 s; 1000 to compute, 0.53 s and a step.
        ({}, 999, True, 2.15, True),
        ({}, 0, True, 2.15, False),
        ({}, 0, True, 2.5, False),
        ({}, 0, True, 2.6, True),
        ({}, 999, False, 2.5, False),
        ({"copies": "none"}, 999, True, 2.5, False),
        ({"copies": "at_park"}, 0, True, 2.15, True),
    ],
)
def test_a_stream_is_parked_only_with_slack_for_its_own_return(settings, backed, host_ok, slack, parked):
    p = believing({}, **settings)
    p.observe(Arrived("a", 10, 10_000, READER, 10.0))
    p.observe(Applied(admitted=(("a", 10, 0),)))
    p.observe(Emitted(("a",), (1000,)))
    p.streams.settle()
    p.streams.by_rid["a"].buffer.report(10.0, round(1000 - 10 * slack))
    p.streams.by_rid["a"].buffer.anchor_tokens = 1000 - 10 * slack
    arrive(p, "n", prompt=100)
    view = [
        request("a", context=1000, output=900, backed_tokens=backed),
        request("r", context=100, output=700, preemptible=False),
        new("n", context=100, host=0),
    ]
    made = p.plan(engine(view, device_free_tokens=100, host_ok=host_ok))
    assert made.park == (("a",) if parked else ())


def test_memory_that_runs_out_takes_streams_with_an_open_copy_last():
    p = believing({}, running=["a", "b"])
    copying = request("a", output=700, copying_tokens=16, frees_tokens=90)
    assert p.plan(engine([copying, request("b", output=700)], device_free_tokens=0, waiting=0)).park == ("b",)
    held = request("b", output=700, preemptible=False)
    assert p.plan(engine([copying, held], device_free_tokens=0, waiting=0)).park == ("a",)


# ---- whole runs


def standin(pool=2048, *, pure=False, config=None, **engine_fields):
    made = TokenFlowPolicy(config or PolicyConfig())
    return StandIn(Pure(made) if pure else made, pool_tokens=pool, **engine_fields)


BACKGROUND = [Job(f"b{i}", 150, 600, rate_tok_s=5.0) for i in range(5)]
WAVES = [Job(f"n{w}{i}", 100, 60, at_s=7.0 + 4.0 * w, rate_tok_s=5.0) for w in range(3) for i in range(5)]


@pytest.mark.parametrize("load_tok_s", [100_000.0, 5_000.0, 2_500.0])
def test_no_reader_runs_dry_however_slow_the_copies_back_are(load_tok_s):
    # 2500 tok/s: 400 tokens of a stream take 0.16 s, five of them together 0.8 s.
    e = standin(pure=True, load_tok_s=load_tok_s)
    record = e.run([*BACKGROUND, *WAVES])
    assert record.loads and set(record.finished.values()) == {"stop"}
    for j in [*BACKGROUND, *WAVES]:
        assert dry_s(record.token_times[j.rid], 5.0) == pytest.approx(0.0, abs=1e-6), j.rid


def test_the_cost_of_copies_is_learned_and_a_link_slower_than_computing_is_given_up():
    # 500 tok/s against 2000 tok/s of prefill, believed 100,000 at first: the first copies teach it.
    e = standin(load_tok_s=500.0)
    record = e.run([*BACKGROUND, *WAVES])
    late = [at_s for _, at_s, _ in record.loads if at_s > record.loads[0][1] + 2.0]
    assert record.loads and not late
    assert record.recomputed_tokens > 0 and set(record.finished.values()) == {"stop"}


def test_loads_that_fail_are_computed_and_end_all_the_same():
    e = standin(load_fails=lambda rid, now_s: True)
    record = e.run([*BACKGROUND, *WAVES])
    assert record.unloaded and not record.loaded_tokens
    assert set(record.finished.values()) == {"stop"}


def test_copies_back_spare_most_of_what_returns_would_compute():
    # Without a copy each return computes its whole context again.
    ahead = standin().run([*BACKGROUND, *WAVES])
    none = standin(config=PolicyConfig(copies="none"), copies="none").run([*BACKGROUND, *WAVES])
    assert none.recomputed_tokens > 1000
    assert ahead.recomputed_tokens < 0.2 * none.recomputed_tokens
