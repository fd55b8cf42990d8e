"""The policies beside TokenFlow's: stock's own admission, and parks by script."""

from __future__ import annotations

import pytest

from support.standin import Job, Pure, StandIn
from support.views import engine, request
from tokenflow_sgl.core.baselines import Fcfs, Scripted, ScriptedPark
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policies import POLICIES, header_of, make_policy, policy_from_header
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.types import Applied, Phase, Plan, Tick


def test_fcfs_wishes_for_nothing_and_never_asks_for_the_requests():
    view = engine([request("a"), request("n", Phase.WAITING)], device_free_tokens=0)
    policy = Fcfs()
    policy.observe(Tick(1.0))
    assert policy.plan(view) == Plan()
    assert view.built is None


def test_fcfs_on_a_full_pool_parks_nobody_and_everything_ends():
    e = StandIn(Pure(Fcfs()), pool_tokens=512)
    record = e.run([Job(f"r{i}", 50, 60, at_s=i / 10) for i in range(12)])
    assert not record.parks and set(record.finished.values()) == {"stop"}


def test_a_script_parks_at_its_token_and_returns_after_its_steps():
    e = StandIn(Pure(Scripted([ScriptedPark("a", at_token=10, steps=5)])), pool_tokens=2048)
    record = e.run([Job("a", 40, 50), Job("b", 40, 50)])
    ((parked_at, _, rid),) = record.parks
    (returned_at,) = record.returns_of("a")
    assert rid == "a"
    assert len([s for s in record.token_steps["a"] if s < parked_at]) == 10
    # Parked in step s, told in step s + 1, five more steps held: it comes in five passes after it was told.
    assert returned_at == parked_at + 6
    assert len(record.token_times["a"]) == len(record.token_times["b"]) == 50


def test_a_script_may_name_many_by_a_star_and_one_several_times():
    script = [ScriptedPark("a*", 5, 2), ScriptedPark("a*", 20, 2), ScriptedPark("a1", 30, 2)]
    record = StandIn(Pure(Scripted(script)), pool_tokens=4096).run([Job(r, 40, 50) for r in ("a0", "a1", "b")])
    assert {r: len(record.parks_of(r)) for r in ("a0", "a1", "b")} == {"a0": 2, "a1": 3, "b": 0}
    assert all(len(t) == 50 for t in record.token_times.values())


def test_a_park_that_the_engine_refused_is_wished_for_again():
    policy = Scripted([ScriptedPark("a", 5, 3)])
    view = engine([request("a", output=5)])
    assert policy.plan(view).park == ("a",)
    policy.observe(Applied())  # nothing was parked
    assert policy.plan(view).park == ("a",)
    policy.observe(Applied(parked=("a",)))
    assert policy.plan(view).park == ()


def test_a_script_parks_nobody_whom_the_engine_cannot_park():
    policy = Scripted([ScriptedPark("a", 5, 3)])
    assert policy.plan(engine([request("a", output=50, preemptible=False)])).park == ()
    assert policy.plan(engine([request("a", Phase.PREFILL)])).park == ()


def test_a_script_publishes_by_its_own_interval():
    policy = Scripted([], publish_interval_tokens=64)
    assert policy.plan(engine([request("a", context=100, published_tokens=36)])).publish == ()  # 100 - 1 - 36 = 63
    assert policy.plan(engine([request("a", context=101, published_tokens=36)])).publish == (("a", 100),)


def test_policies_are_made_by_name_and_by_a_journals_header():
    config = PolicyConfig(mu=3.0)
    script = {"parks": [{"rid": "a", "at_token": 3, "steps": 4}], "publish_interval_tokens": 8}
    kinds = {"tokenflow": TokenFlowPolicy, "fcfs": Fcfs, "scripted": Scripted}
    assert set(kinds) <= set(POLICIES)
    for name, kind in kinds.items():
        made = policy_from_header(header_of(name, config, script))
        assert type(made) is kind
    assert made.script == (ScriptedPark("a", 3, 4),) and made.publish_interval_tokens == 8
    assert policy_from_header(header_of("tokenflow", config)).config == config


@pytest.mark.parametrize(("name", "script"), [("lifo", None), ("", {}), ("scripted", None)])
def test_an_unknown_policy_and_a_script_that_is_missing_are_refused_by_name(name, script):
    with pytest.raises(ValueError, match=f"policy={name!r}.*tokenflow, fcfs, scripted"):
        make_policy(name, PolicyConfig(), script)
