"""What returns may cost the engine: a share of its time, saved up in quiet times, and longer turns beyond it.

A step takes 0.03 s, prefill 0.03 s and 5e-4 s a token.
"""

from __future__ import annotations

import pytest

from support.views import engine, request
from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.policy import TokenFlowPolicy
from tokenflow_sgl.core.types import Applied, Arrived, Emitted, Phase, ReaderClass, Tick

READER = ReaderClass.READER


def policy_with(output, **settings):
    """One running stream of so many tokens, and a newcomer that finds no room."""
    p = TokenFlowPolicy(PolicyConfig(**settings))
    p.observe(Tick(0.0))
    p.observe(Arrived("a", 100, 10_000, READER, 10.0))
    p.observe(Applied(admitted=(("a", 100, 0),)))
    p.observe(Emitted(("a",), (output,)))
    p.streams.settle()
    p.observe(Arrived("n", 100, 500, READER, 10.0))
    p.observe(Tick(1.0))
    return p


def parks(p, *, output, backed):
    view = [
        request("a", context=100 + output, output=output, backed_tokens=backed),
        request("r", context=100, output=700, preemptible=False),
        request("n", Phase.WAITING, context=100),
    ]
    return p.plan(engine(view, device_free_tokens=100)).park


@pytest.mark.parametrize(
    ("output", "backed", "credit_s", "parked"),
    [
        # Two run, so a token costs 0.03 / 2 s of the engine: at a share of 0.1, 667 tokens for each second of swapping.
        # One token to compute and a publish of 500: 0.0305 + 0.0004 s, 20.6 tokens, less than min_run.
        (400, 499, -0.1, True),
        # 500 tokens to compute: 0.28 + 0.0004 s, 187 tokens.
        (400, 0, -0.1, True),
        # 1000 to compute after 900 of its own: 0.53 + 0.0005 s, 354 tokens: it ran for longer.
        (900, 0, -0.1, True),
        # 130 to compute after 30: below min_run, whatever the credit.
        (30, 0, 1.0, False),
        # 200 to compute after 100 of its own: 0.13 s, 87 tokens.
        (100, 0, -0.1, True),
        (80, 0, -0.1, False),  # 180 to compute: 0.12 s, 80.2 tokens
        (80, 0, 0.1, True),
        (80, 179, -0.1, True),
    ],
)
def test_without_credit_a_stream_runs_for_as_long_as_its_swap_is_worth(output, backed, credit_s, parked):
    p = policy_with(output, min_slack_s=0.5)
    p.swap_credit_s = credit_s
    assert parks(p, output=output, backed=backed) == (("a",) if parked else ())


def test_a_return_takes_what_its_prefill_takes_and_time_gives_its_share_back():
    p = policy_with(400)
    assert p.swap_credit_s == pytest.approx(3.0)  # 0.1 of the 30 s that may be saved up
    p.observe(Applied(admitted=(("n", 100, 0),)))
    assert p.swap_credit_s == pytest.approx(3.0), "a first admission is no return"
    p.observe(Applied(parked=("a",)))
    p.observe(Applied(admitted=(("a", 500, 0),)))
    assert p.swap_credit_s == pytest.approx(3.0 - 0.28)
    p.observe(Applied(decoding=2))
    p.observe(Tick(2.0, 0.5))
    assert p.swap_credit_s == pytest.approx(3.0 - 0.28 + 0.05)
    p.observe(Tick(3.0, None))
    assert p.swap_credit_s == pytest.approx(3.0 - 0.28 + 0.05), "an idle spell earns nothing"


def test_what_is_owed_is_bounded():
    p = policy_with(400)
    for _ in range(100):
        p.observe(Applied(parked=("a",)))
        p.observe(Applied(admitted=(("a", 1000, 0),)))
    assert p.swap_credit_s == pytest.approx(-3.0)


def test_memory_that_runs_out_asks_for_no_credit():
    p = policy_with(40)
    p.swap_credit_s = -1.0
    view = [request("a", context=140, output=40), request("b", context=140, output=40, preemptible=False)]
    assert p.plan(engine(view, device_free_tokens=0, waiting=0)).park == ("a",)
