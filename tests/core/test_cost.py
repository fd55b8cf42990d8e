"""Beliefs about seconds, learned from steps over a prior. Exact numbers: running means first, then a gain of 0.1."""

from __future__ import annotations

import pytest

from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.cost import CostBelief


def belief():
    return CostBelief.prior(PolicyConfig(step_prior_s=0.03, prefill_prior_tok_s=2000.0, load_prior_tok_s=100_000.0))


def near(value):
    return pytest.approx(value, rel=1e-9)


def test_before_the_first_step_the_prior_is_believed():
    c = belief()
    assert c.prefill_s(1000) == near(0.5)  # 1000 / 2000
    assert c.prefill_s(1) == near(0.03)  # never less than a step
    assert c.return_s(tail_tokens=100, host_tokens=1000) == near(0.01 + 0.05 + 0.03)  # load, prefill, one step


def test_the_first_decode_steps_replace_the_prior_by_their_mean():
    c = belief()
    c.learn_step(0.020, prefill_tokens=0, decoding=4)
    assert c.step_s == near(0.020)
    c.learn_step(0.040, prefill_tokens=0, decoding=4)
    assert c.step_s == near(0.030)


def test_later_decode_steps_count_a_tenth():
    c = belief()
    for _ in range(20):
        c.learn_step(0.020, prefill_tokens=0, decoding=4)
    c.learn_step(0.030, prefill_tokens=0, decoding=4)
    assert c.step_s == near(0.021)


def test_a_prefill_step_teaches_prefill_and_not_decode():
    c = belief()
    c.learn_step(0.2, prefill_tokens=100, decoding=0)
    assert c.step_s == near(0.03)
    assert c.prefill_s(500) == near(1.0)  # 2 ms a token


def test_a_tiny_prefill_teaches_nothing():
    c = belief()
    c.learn_step(0.2, prefill_tokens=10, decoding=3)
    assert (c.step_s, c.prefill_s(1000)) == (near(0.03), near(0.5))


def test_an_empty_or_impossible_step_teaches_nothing():
    c = belief()
    c.learn_step(0.5, prefill_tokens=0, decoding=0)
    c.learn_step(0.0, prefill_tokens=0, decoding=3)
    c.learn_step(-1.0, prefill_tokens=64, decoding=3)
    assert c == belief()


def test_one_hiccup_of_the_machine_is_not_a_cost():
    c = belief()
    for _ in range(5):
        c.learn_step(0.02, prefill_tokens=0, decoding=4)
        c.learn_step(0.10, prefill_tokens=100, decoding=0)
    c.learn_step(5.0, prefill_tokens=0, decoding=4)
    c.learn_step(5.0, prefill_tokens=100, decoding=0)
    assert c.step_s == near(0.02)
    assert c.prefill_s(1000) == near(1.0)


def test_copies_teach_the_load_speed_and_impossible_ones_do_not():
    c = belief()
    c.learn_copy(0, 1.0)
    c.learn_copy(100, 0.0)
    assert c.load_s_per_token == near(1e-5)
    c.learn_copy(1000, 0.11)  # 1.1e-4 a token: 1e-5 + 0.1 x (1.1e-4 - 1e-5) = 2e-5
    assert c.load_s_per_token == near(2e-5)


def test_the_same_steps_give_the_same_beliefs():
    a, b = belief(), belief()
    for c in (a, b):
        for i in range(50):
            c.learn_step(0.01 + i / 1000, prefill_tokens=(i % 3) * 40, decoding=i % 5)
            c.learn_copy(i, i / 1e5)
    assert a == b
