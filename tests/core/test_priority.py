"""The guide's formula to the letter, by hand: P = -ln(max(S, delta)) + lambda / (Wait + delta) + mu * [unstarted]."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.priority import PRIORITIES, aged, guide

CONFIG = PolicyConfig(delta_s=0.1, lambda_s=0.1, mu=2.0)
SECONDS = st.floats(0.0, 1e4)
LEADS = st.floats(-1e4, 1e4)


def p(variant, config=CONFIG, *, slack=0.0, wait=0.0, unstarted=False, prefill=0.1):
    return variant(slack_s=slack, wait_s=wait, unstarted=unstarted, prefill_s=prefill, config=config)


@pytest.mark.parametrize(
    ("slack", "wait", "unstarted", "expected"),
    [
        (4.0, 0.0, False, -0.38629436),  # -ln 4 = -1.38629436; 0.1 / 0.1 = 1
        (1.0, 0.0, False, 1.0),  # ln 1 = 0
        (1.0, 0.4, False, 0.2),  # 0.1 / 0.5
        (0.0, 0.0, False, 3.30258509),  # -ln 0.1 = 2.30258509, +1
        (0.05, 0.0, False, 3.30258509),  # below delta counts as delta
        (0.0, 0.0, True, 5.30258509),  # +2
        (0.0, 0.9, True, 4.40258509),  # 2.30258509 + 0.1 + 2
    ],
)
def test_guide_is_the_formula_to_the_letter(slack, wait, unstarted, expected):
    assert p(guide, slack=slack, wait=wait, unstarted=unstarted) == pytest.approx(expected, abs=1e-8)


def test_every_symbol_of_the_formula_is_a_setting():
    # delta 0.5: -ln 0.5 = 0.69314718; lambda 0.3: 0.3 / (0.25 + 0.5) = 0.4; mu 7.
    config = PolicyConfig(delta_s=0.5, lambda_s=0.3, mu=7.0)
    assert p(guide, config, slack=0.2, wait=0.25, unstarted=True) == pytest.approx(8.09314718, abs=1e-8)
    assert p(guide, PolicyConfig(delta_s=0.1, lambda_s=0.0, mu=0.0), slack=1.0, unstarted=True) == 0.0


def test_guide_ignores_prefill_cost():
    assert p(guide, prefill=0.1, unstarted=True) == p(guide, prefill=99.0, unstarted=True)


def test_guide_favours_the_newest_of_the_unstarted_which_is_its_known_flaw():
    assert p(guide, wait=0.0, unstarted=True) > p(guide, wait=5.0, unstarted=True)


def test_aged_ranks_started_streams_as_the_guide_does():
    for slack, wait in ((0.0, 0.0), (3.0, 0.0), (3.0, 2.0)):
        assert p(aged, slack=slack, wait=wait) == p(guide, slack=slack, wait=wait)


def test_aged_is_the_response_ratio_in_the_formulas_units():
    # -ln 0.1 = 2.30258509; ln(1 + 3 / 0.5) = ln 7 = 1.94591015; mu 2.
    assert p(aged, wait=3.0, unstarted=True, prefill=0.5) == pytest.approx(6.24849524, abs=1e-8)
    # A cost below delta counts as delta: ln(1 + 3 / 0.1) = ln 31 = 3.43398720.
    assert p(aged, wait=3.0, unstarted=True, prefill=0.0) == pytest.approx(7.73657229, abs=1e-8)


def test_aged_lets_a_dry_stream_gain_like_a_waiting_one_without_the_head_start():
    # -ln 0.1 = 2.30258509; lambda: 0.1 / (0.9 + 0.1) = 0.1; ln(1 + 3 / 0.5) = ln 7 = 1.94591015.
    assert p(aged, slack=-3.0, wait=0.9, prefill=0.5) == pytest.approx(4.34849524, abs=1e-8)
    # A second of waiting for the first token goes before 7 s of being dry, and not before 9 (e^2 = 7.39; tau = 0.1).
    assert p(aged, slack=-7.0, wait=9.0) < p(aged, wait=1.0, unstarted=True) < p(aged, slack=-9.0, wait=9.0)


def test_of_two_that_waited_as_long_the_cheaper_goes_first():
    assert p(aged, wait=1.0, unstarted=True, prefill=0.2) > p(aged, wait=1.0, unstarted=True, prefill=2.0)


@given(cost=st.floats(0.1, 100.0), rival_cost=st.floats(0.1, 100.0), rival_wait=st.floats(0.0, 60.0))
def test_under_aged_no_request_is_overtaken_for_ever(cost, rival_cost, rival_wait):
    # (1 + w / c) beats (1 + w' / c') once w > w' c / c': while those served wait at most w', the old one's turn comes.
    wait = 1.001 * rival_wait * cost / rival_cost + 0.01
    old = p(aged, wait=wait, unstarted=True, prefill=cost)
    assert old > p(aged, wait=rival_wait, unstarted=True, prefill=rival_cost)


@pytest.mark.parametrize("name", sorted(PRIORITIES))
@given(slacks=st.tuples(LEADS, LEADS), wait=SECONDS, unstarted=st.booleans(), prefill=st.floats(0.0, 100.0))
def test_more_slack_never_ranks_higher(name, slacks, wait, unstarted, prefill):
    low, high = (p(PRIORITIES[name], slack=s, wait=wait, unstarted=unstarted, prefill=prefill) for s in sorted(slacks))
    assert low >= high and math.isfinite(low)


@pytest.mark.parametrize("name", sorted(PRIORITIES))
def test_an_unstarted_reader_outranks_every_running_stream_with_slack_of_a_second(name):
    # Running: at most -ln 1 + lambda / delta = 1. Unstarted: at least 2.30 + mu = 4.30.
    assert p(PRIORITIES[name], unstarted=True, wait=100.0) > p(PRIORITIES[name], slack=1.0)
