"""DistServe's two engines, by hand."""

from __future__ import annotations

import pytest

from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policies import make_policy
from tokenflow_sgl.sim.run import Simulation
from tokenflow_sgl.sim.settings import EngineSettings
from tokenflow_sgl.sim.timing import Fixed
from tokenflow_sgl.sim.two_pools import simulate_two_pools
from tokenflow_sgl.workload.arrivals import Request, Segment

SETTINGS = EngineSettings(
    pool_tokens=4096, page_tokens=16, chunk_tokens=512, max_running=64, host_tokens=0, loads="at_admission"
)


def ask(rid, *, at_s=0.0, prompt=100, answer=4, **more):
    return Request(rid, "all", at_s, (Segment(rid, prompt),), answer, answer, 6.0, **more)


def run(requests, twins=()):
    # A step of 0.02 s, prompts at 10,000 tok/s, KV of one byte a token over 1000 bytes a second.
    return simulate_two_pools(
        requests, twins, settings=SETTINGS, timing=Fixed(0.02, 10_000.0), store_bytes_s=1000.0, load_bytes_s=1000.0
    )


def test_the_first_token_comes_from_the_prompts_side_and_the_rest_when_the_kv_has_moved():
    # Prefill 0.02 s; 100 tokens move in 0.1 s; then a token every 0.02 s.
    (record,) = run([ask("a")]).records
    assert record.arrivals_s == pytest.approx([0.02, 0.14, 0.16, 0.18])
    assert not record.failed


def test_prompts_are_computed_in_batches_up_to_the_limit_and_never_beside_decoding():
    # 300 + 200 fit 512 (0.05 s), the third does not: it is next.
    run_ = run([ask("a", prompt=300), ask("b", prompt=200), ask("c", prompt=100)])
    first = {r.rid: r.arrivals_s[0] for r in run_.records}
    assert first == pytest.approx({"a": 0.05, "b": 0.05, "c": 0.07})


def test_the_twins_take_time_and_are_not_reported():
    alone, beside = run([ask("z", prompt=400)]), run([ask("z", prompt=400)], [ask("a", prompt=400)])
    assert [r.rid for r in beside.records] == ["z"]
    assert beside.records[0].arrivals_s[0] > alone.records[0].arrivals_s[0]


def test_an_answer_of_one_token_ends_on_the_prompts_side():
    (record,) = run([ask("a", answer=1)]).records
    assert record.arrivals_s == pytest.approx([0.02]) and not record.failed


def test_follow_ups_are_refused_by_name():
    with pytest.raises(ValueError, match="distserve: follow-up turns"):
        run([ask("a"), ask("b", after="a")])


def test_what_the_other_servers_refuse_is_refused_here_too_and_delivers_nothing():
    # 4080 + 1 tokens and a page do not fit 4096; 4079 + 1 do. An answer of one token never reaches the second pool.
    long, fits = ask("long", prompt=4080, answer=1), ask("fits", at_s=50.0, prompt=4079, answer=1)
    two = {r.rid: r for r in run([long, fits]).records}
    one = Simulation(
        make_policy("fcfs", PolicyConfig()), [long, fits], settings=SETTINGS, timing=Fixed(0.02, 10_000.0),
        store_bytes_s=1000.0, load_bytes_s=1000.0,
    ).run()  # fmt: skip
    assert {rid: r.failed for rid, r in two.items()} == {r.rid: r.failed for r in one.records}
    assert two["long"].failed and two["long"].arrivals_s == ()
    assert two["fits"].arrivals_s[0] == pytest.approx(50.4079)  # nobody computed the refused prompt before it


def test_a_twin_that_is_too_long_takes_no_time():
    alone, beside = run([ask("z", prompt=400)]), run([ask("z", prompt=400)], [ask("a", prompt=4080, answer=9)])
    assert beside.records == alone.records
