"""What every rival must keep: purity, legality, nobody lost, an end, and a steady step that looks at nobody.

In the stand-in a decode step takes 0.03 s and prefill makes 2000 tok/s, unless said otherwise.
"""

from __future__ import annotations

import copy
import random

import pytest

from core.test_policy import RandomWorld, random_jobs
from support.standin import Job, Pure, StandIn, state_of
from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.driver import check_plan
from tokenflow_sgl.core.policies import POLICIES, header_of, make_policy, policy_from_header
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.rivals import RIVALS
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, Plan, ReaderClass, Tick

NAMES = sorted(RIVALS)
PARKERS = ("andes", "tokenflow-guide", "tokenflow-paper", "vllm", "vllm-offload", "vlt")


def copies_of(policy):
    return policy.config.copies if isinstance(policy, TokenFlowPolicy) else getattr(policy, "copies", "ahead")


def standin(name, *, pure=False, **settings):
    policy = make_policy(name, PolicyConfig())
    return StandIn(Pure(policy) if pure else policy, copies=copies_of(policy), **settings)


def random_run(name, seed, *, pure=False):
    """A random load on a random engine: small pages or large, a host that fills up or fails, quick or slow links."""
    rng = random.Random(seed)
    pool = rng.choice([512, 1024, 2048])
    jobs = random_jobs(rng, pool)
    if rng.random() < 0.5:  # one that needs nearly all of it: 3 pages of 16 are left
        jobs.append(Job("big", pool * 3 // 4, pool // 4 - 48, at_s=round(rng.uniform(0, 5), 2)))
    faults, failing = random.Random(seed), rng.choice([0.0, 0.0, 0.3])
    e = standin(
        name,
        pure=pure,
        pool_tokens=pool,
        page_tokens=rng.choice([1, 16]),
        max_running=rng.choice([4, 64]),
        chunk_tokens=rng.choice([64, 256, 8192]),
        prefill_tok_s=rng.choice([500.0, 2000.0]),
        load_tok_s=rng.choice([500.0, 5000.0, 100_000.0]),
        store_tok_s=rng.choice([500.0, 5000.0, 100_000.0]),
        publish_s=lambda context_tokens: 1e-4,
        host_tokens=rng.choice([pool // 4, pool, 1 << 30]),
        host_ok=lambda now_s: not failing or now_s % 5.0 < 4.0,
        load_slots=rng.choice([1, 3]),
        load_fails=lambda rid, now_s: faults.random() < failing,
    )
    return jobs, e.run(jobs, max_steps=40_000)


def test_every_name_makes_its_policy_also_from_a_journals_header():
    assert set(RIVALS) < set(POLICIES) and len(set(POLICIES)) == len(POLICIES)
    config = PolicyConfig(mu=3.0, step_prior_s=0.02)
    for name in NAMES:
        made, again = make_policy(name, config), policy_from_header(header_of(name, config))
        assert type(made) is type(again) and state_of(made) == state_of(again)


@pytest.mark.parametrize("name", NAMES)
def test_each_says_what_its_executor_must_copy(name):
    expected = {"hrrn": "none", "priority": "none", "vllm": "none", "andes": "at_park"}
    assert copies_of(make_policy(name, PolicyConfig(copies="none"))) == expected.get(name, "ahead")


@pytest.mark.parametrize("name", NAMES)
def test_random_load_never_breaks_legality_and_everything_ends(name):
    """The stand-in asserts legality and the balance of memory after every step: 16 runs, some 200 requests."""
    parks = loads = 0
    for seed in range(16):
        jobs, record = random_run(name, seed)
        assert len(record.finished) == len(jobs), seed
        for j in jobs:
            if record.finished[j.rid] == "stop":
                assert len(record.token_times[j.rid]) == j.answer_tokens, (seed, j.rid)
        parks, loads = parks + len(record.parks), loads + len(record.loads)
    assert (parks > 16) == (name in PARKERS) or name == "priority", parks
    assert (loads > 16) == (name in ("andes", "tokenflow-guide", "tokenflow-paper", "vllm-offload", "vlt")), loads


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(500, 502))
def test_planning_twice_gives_the_same_plan_and_changes_nothing(name, seed):
    jobs, record = random_run(name, seed, pure=True)
    assert len(record.finished) == len(jobs)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_run_twice_gives_the_same_plans(name):
    (_, a), (_, b) = random_run(name, 7), random_run(name, 7)
    assert a.plans == b.plans and a.token_times == b.token_times


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_views_that_no_engine_would_show_break_neither_legality_nor_purity(name, seed):
    world = RandomWorld(seed)
    world.policy = make_policy(name, PolicyConfig())
    for step in range(200):
        for event in world.events():
            world.policy.observe(event)
        view = world.view()
        before = copy.deepcopy(world.policy) if step % 20 == 0 else None
        plan = world.policy.plan(view)
        assert check_plan(view, plan) == [], (seed, step)
        world.plan = plan
        assert world.policy.plan(view) == plan
        if before is not None:
            assert state_of(before) == state_of(world.policy)


@pytest.mark.parametrize("name", NAMES)
def test_a_steady_step_asks_for_no_requests(name):
    policy = make_policy(name, PolicyConfig())
    policy.observe(Tick(0.0))
    policy.observe(Arrived("a", 10, 1000, ReaderClass.READER, 6.0))
    policy.observe(Applied(admitted=(("a", 10, 0),), prefill_tokens=10))
    policy.observe(Tick(0.03, 0.03))
    policy.observe(Emitted(("a",), (1,)))
    view = engine([request("a", context=11, output=1)])
    assert policy.plan(view) == Plan()
    assert view.built is None


@pytest.mark.parametrize("name", NAMES)
def test_with_memory_to_spare_nobody_is_parked_and_newcomers_come_in_at_once(name):
    record = standin(name, pool_tokens=65_536).run([Job(f"r{i}", 100, 200, at_s=i * 0.1) for i in range(20)])
    assert not record.parks and not record.retractions
    # Worst: it came while a decode step ran (0.03 s), waits for one more that was planned, and is prefilled (0.05 s).
    assert max(record.token_times[f"r{i}"][0] - i * 0.1 for i in range(20)) < 0.2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page", [1, 16])
def test_one_that_needs_nearly_the_whole_pool_is_served_among_small_ones(name, page):
    # 900 + 90 of 1024 tokens; 34 are left, two pages and a little.
    small = [Job(f"s{i}", 60, 60, at_s=i * 0.2, rate_tok_s=20.0) for i in range(20)]
    record = standin(name, pool_tokens=1024, page_tokens=page).run([*small, Job("big", 900, 90, at_s=1.0)])
    assert set(record.finished.values()) == {"stop"}
    assert len(record.token_times["big"]) == 90


def test_one_that_is_on_its_way_back_is_named_by_nobody():
    """`waiting` counts it as well."""
    for name in NAMES:
        policy = make_policy(name, PolicyConfig())
        policy.observe(Tick(0.0))
        policy.observe(Arrived("l", 10, 1000, ReaderClass.READER, 6.0))
        view = engine([request("l", Phase.LOADING, takes_tokens=5)])
        assert check_plan(view, policy.plan(view)) == [], name
