"""The simulator as a whole: by hand, under random load with every check on, and twice with the same bytes."""

from __future__ import annotations

import dataclasses
import random

import pytest

from support.standin import Pure
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.journal import Journal, replay
from tokenflow_sgl.core.policies import header_of, make_policy, policy_from_header
from tokenflow_sgl.sim.rivals import ABLATIONS, RIVALS
from tokenflow_sgl.sim.run import Simulation
from tokenflow_sgl.sim.settings import EngineSettings
from tokenflow_sgl.sim.timing import Fixed
from tokenflow_sgl.workload.arrivals import Request, Segment

STEP_S, PREFILL_TOK_S = 0.02, 10_000.0


def ask(rid, *, at_s=0.0, prompt=100, answer=50, limit=None, rate=6.0, segments=None, reader="reader", **more):
    segments = segments or (Segment(rid, prompt),)
    return Request(rid, "all", at_s, tuple(segments), answer, limit or answer, rate, reader=reader, **more)


def settings_of(rival, **sizes):
    given = {
        "pool_tokens": 4096,
        "page_tokens": 16,
        "chunk_tokens": 512,
        "max_running": 64,
        "host_tokens": 16384,
        **sizes,
    }
    return EngineSettings(
        **given,
        batching=rival.batching,
        copies=rival.copies,
        loads=rival.loads,
        conservativeness=rival.conservativeness,
        inserts=rival.inserts,
        host_reserve=rival.host_reserve,
    )


def simulate(name, requests, *, wrap=lambda policy: policy, journal=None, check=True, store_bytes_s=1e5, **sizes):
    rival = {**RIVALS, **ABLATIONS}[name]
    simulation = Simulation(
        wrap(rival.make()), requests, settings=settings_of(rival, **sizes), timing=Fixed(STEP_S, PREFILL_TOK_S),
        store_bytes_s=store_bytes_s, load_bytes_s=1e5, check=check, journal=journal,
    )  # fmt: skip
    return simulation.run(), simulation


def burst(seed, *, count=40, at_s=4.0):
    """A dozen long answers, then a rush of short ones; ids that sort otherwise than they come."""
    rng = random.Random(seed)
    long = [
        ask(f"l{i}", at_s=rng.random() * 2, prompt=rng.randrange(40, 300), answer=rng.randrange(200, 400))
        for i in range(12)
    ]
    short = [
        ask(f"a{i}", at_s=at_s + rng.random(), prompt=rng.randrange(20, 200), answer=rng.randrange(1, 80))
        for i in range(count)
    ]
    return long + short


def test_one_stream_gets_its_tokens_when_the_steps_end():
    # 100 tokens at 10,000/s are below a step: prefill 0.02 s, then a token every 0.02 s; Fixed has no other cost.
    run, _ = simulate("sglang-fcfs", [ask("a", at_s=1.0, prompt=100, answer=5)])
    (record,) = run.records
    assert record.arrivals_s == pytest.approx([1.02, 1.04, 1.06, 1.08, 1.10])
    assert not record.failed
    assert (run.counters.prefill_steps, run.counters.decode_steps) == (1, 4)


def test_a_prompt_longer_than_a_chunk_takes_as_many_steps_as_it_has_chunks():
    # 1,200 tokens in chunks of 512: 512, 512, 176; at 10,000/s 0.0512 + 0.0512 + 0.02.
    run, _ = simulate("sglang-fcfs", [ask("a", prompt=1200, answer=1)])
    assert run.records[0].arrivals_s == pytest.approx([0.1224])
    assert run.counters.prefill_steps == 3


def test_mixed_batches_decode_beside_a_prompt_and_others_do_not():
    requests = [ask("a", prompt=50, answer=100), ask("b", at_s=0.5, prompt=2000, answer=2)]
    alone, _ = simulate("sglang-fcfs", requests)
    mixed, _ = simulate("sglang-mixed", requests)
    gap = {
        n: max(b - a for a, b in zip(t, t[1:], strict=False))
        for n, t in (("alone", times(alone, "a")), ("mixed", times(mixed, "a")))
    }
    # Four chunks of 512 in 0.0512 s each stand before the next token of `a`, or one of them.
    assert gap["alone"] > 0.2
    assert gap["mixed"] < 0.08


def times(run, rid):
    return next(r.arrivals_s for r in run.records if r.rid == rid)


def test_a_follow_up_is_sent_when_the_answer_was_read_and_finds_its_history_cached():
    # 20 tokens at 10 tok/s: the last is shown 1.9 s after the first, which comes at 0.02 s; the reader thinks for 3 s.
    first = ask("t0", prompt=160, answer=20, rate=10.0)
    history = (Segment("t0", 160), Segment("out:t0", 20), Segment("t1", 60))
    run, simulation = simulate(
        "sglang-fcfs", [first, ask("t1", segments=history, answer=3, rate=10.0, after="t0", think_s=3.0)]
    )
    assert run.sent_s["t1"] == pytest.approx(0.02 + 1.9 + 3.0)
    # Of 240 tokens 11 whole pages (176) are in the tree: 179 had their KV.
    assert (
        simulation.ex.memory.tree.hit_pages(
            simulation.ex.memory.tree.path([("t0", 160), ("out:t0", 20)]), limit_pages=99
        )[0]
        == 11
    )
    assert [r.failed for r in run.records] == [False, False]


def test_what_can_never_fit_fails_at_once_and_the_rest_goes_on():
    run, _ = simulate("tokenflow", [ask("big", prompt=5000), ask("ok", prompt=100)])
    assert {r.rid: r.failed for r in run.records} == {"big": True, "ok": False}
    assert next(r.error for r in run.records if r.rid == "big")


@pytest.mark.parametrize("name", [*RIVALS, *ABLATIONS])
@pytest.mark.parametrize("seed", [1, 2])
def test_every_policy_serves_everybody_legally_and_the_pool_balances(name, seed):
    requests = burst(seed)
    run, simulation = simulate(name, requests)
    assert sorted(r.rid for r in run.records) == sorted(r.rid for r in requests)
    assert not [r.rid for r in run.records if r.failed]
    tree = simulation.ex.memory.tree
    # Copies may still be open when the last stream ends: they hold their pages.
    assert tree.free_pages + sum(n.device for n in tree.nodes()) == tree.device_pages


@pytest.mark.parametrize("name", ["tokenflow", "vllm-offload", "andes", "vlt", "tokenflow-paper"])
def test_a_request_of_nearly_the_whole_pool_comes_in_and_ends(name):
    requests = [ask("huge", at_s=0.5, prompt=3600, answer=400), *burst(3, count=20, at_s=1.0)]
    run, _ = simulate(name, requests)
    assert not [r.rid for r in run.records if r.failed]


def test_a_burst_is_served_sooner_by_parking_than_by_waiting():
    requests = burst(5)
    new = {r.rid for r in requests if r.rid.startswith("a")}
    ttft = {}
    for name in ("sglang-fcfs", "tokenflow"):
        run, _ = simulate(name, requests)
        ttft[name] = sorted(r.arrivals_s[0] - r.sent_s for r in run.records if r.rid in new)
    assert ttft["tokenflow"][-1] < 0.5 * ttft["sglang-fcfs"][-1]


@pytest.mark.parametrize("name", ["sglang-fcfs", "tokenflow", "andes"])
def test_the_same_run_twice_has_the_same_bytes(name):
    def bytes_of():
        lines = []
        run, _ = simulate(name, burst(7), journal=lambda *step: lines.append(repr(step[0]) + repr(step[2])))
        return lines, repr(run.records)

    assert bytes_of() == bytes_of()


@pytest.mark.parametrize("name", ["tokenflow", "tokenflow-guide", "andes", "vlt", "vllm-offload", "tokenflow-paper"])
def test_the_journal_of_a_simulation_replays_to_the_same_plans(name, tmp_path):
    rival, path = RIVALS[name], tmp_path / "journal.jsonl"
    config = PolicyConfig.from_mapping({"copies": rival.copies, "loads": rival.loads})
    book = Journal.open(path, header_of(rival.policy, config))
    run, _ = simulate(name, burst(11), journal=book, check=False)
    book.close()
    steps, difference = replay(path, policy_from_header)
    assert difference is None
    assert steps > 300 and run.counters.parks > 0


@pytest.mark.parametrize("name", list(RIVALS))
def test_plan_is_pure(name):
    run, _ = simulate(name, burst(9, count=12), wrap=Pure)
    assert not [r.rid for r in run.records if r.failed]


def test_priority_and_limits_reach_the_policy():
    seen = {}

    def look(events, view, plan):
        for r in view.requests():
            seen[r.rid] = r.max_output_tokens

    simulate("sglang-fcfs", [ask("a", answer=5, limit=99)], journal=look)
    assert seen == {"a": 99}


def test_a_part_of_the_host_pool_is_kept_free_as_the_shipped_tier_does():
    # 40 answers of 150 tokens pass through a host pool of 2,048 tokens, twice the device's: it was full long ago. A
    # sixteenth of it is 8 pages, made free again when 4 are left.
    requests = [ask(f"r{i}", at_s=2.0 * i) for i in range(40)]
    free = {}
    for name in ("tokenflow", "vllm-offload"):
        _, simulation = simulate(name, requests, pool_tokens=1024, host_tokens=2048)
        free[name] = simulation.ex.memory.tree.host_free_pages
    assert free["tokenflow"] >= 4 > free["vllm-offload"]


def crowd(rng):
    """A pool of a few pages, answers that nearly fill it, and a link of any speed."""
    page = rng.choice([1, 4, 16])
    pool = page * rng.randint(8, 60)
    requests = []
    for i in range(rng.randint(2, 14)):
        prompt = rng.randint(1, max(1, pool // 3))
        most = pool - page - prompt - 1 if rng.random() < 0.5 else pool // 4
        answer, at_s = rng.randint(1, max(1, most)), rng.random() * rng.choice([0, 1, 20])
        if prompt + answer + page <= pool:
            requests.append(ask(f"r{i:02}", prompt=prompt, answer=answer, at_s=at_s))
    sizes = {
        "pool_tokens": pool, "page_tokens": page, "chunk_tokens": page * rng.randint(1, 8),
        "max_running": rng.randint(1, 8), "host_tokens": page * rng.randint(0, 80),
        "store_bytes_s": rng.choice([5.0, 50.0, 1e3, 1e5]),
    }  # fmt: skip
    return requests, sizes


@pytest.mark.parametrize("seed", [*range(1, 13), 57])
def test_in_a_tiny_pool_nobody_keeps_the_others_out_for_ever(seed):
    # Of seed 57: three were loaded back, and what was kept for each left no room for the rest of any of them.
    requests, sizes = crowd(random.Random(seed))
    for name in ("tokenflow", "tokenflow-no-forecast", "tokenflow-mixed", "andes", "vlt"):
        run, _ = simulate(name, requests, **sizes)
        assert len(run.records) == len(requests) and not any(r.failed for r in run.records), name


def test_settings_name_what_is_wrong():
    good = settings_of(RIVALS["tokenflow"])
    with pytest.raises(ValueError, match=r"batching='odd': valid are prefill_first, mixed"):
        dataclasses.replace(good, batching="odd")
    with pytest.raises(ValueError, match=r"pool_tokens=3: valid is at least a page \(16\)"):
        dataclasses.replace(good, pool_tokens=3)


def test_the_policy_that_ships_is_the_one_that_is_simulated():
    assert type(RIVALS["tokenflow"].make()) is type(make_policy("tokenflow", PolicyConfig()))
    assert RIVALS["tokenflow"].make().config == PolicyConfig()


# ---- memory that is not there because something else holds it


@pytest.mark.parametrize("name", ["sglang-fcfs", "sglang-eager", "sglang-hrrn", "sglang-priority"])
def test_the_last_stream_is_retracted_while_the_copy_of_one_that_ended_holds_what_it_lacks(name):
    # 126 pages. "a" ends at 16 + 1009 tokens, 64 pages whose copy to the host is still under way (a page each 1.6 s)
    # when "b" wants its 63rd: nothing is free, nothing can be evicted, and "b" is the only one left.
    requests = [ask("a", prompt=16, answer=1009), ask("b", prompt=11, answer=1200, at_s=0.5)]
    run, simulation = simulate(name, requests, pool_tokens=2016, host_tokens=8064, store_bytes_s=10.0)
    assert not any(r.failed for r in run.records)
    assert run.counters.retractions >= 1
    assert len(simulation.ex.running) == 0


@pytest.mark.parametrize("name", [*RIVALS, *ABLATIONS])
@pytest.mark.parametrize("seed", range(3))
def test_a_pool_of_two_requests_serves_them_all_over_a_slow_link(name, seed):
    rng = random.Random(seed)
    requests = [ask(f"r{i:02}", prompt=rng.randint(1, 9), answer=rng.randint(15, 22)) for i in range(12)]
    run, _ = simulate(
        name, requests, pool_tokens=32, page_tokens=1, chunk_tokens=4, max_running=3, host_tokens=9, store_bytes_s=20.0
    )
    assert len(run.records) == 12 and not any(r.failed for r in run.records)
