"""Beliefs about seconds, learned from steps over a prior. Exact numbers: running means first, then a gain of 0.1."""

from __future__ import annotations

import pytest

from tokenflow_sgl.core.config import PolicyConfig
from tokenflow_sgl.core.cost import CostBelief, Line


def belief():
    return CostBelief.prior(PolicyConfig(step_prior_s=0.03, prefill_prior_tok_s=2000.0, load_prior_tok_s=100_000.0))


def near(value):
    return pytest.approx(value, rel=1e-9)


def test_before_the_first_step_the_prior_is_believed():
    c = belief()
    assert c.prefill_s(1000) == near(0.03 + 0.5)  # a step, and 1000 / 2000
    # The copy, a step to notice its end, the prefill, and one step.
    assert c.return_s(tail_tokens=100, host_tokens=1000) == near(0.01 + 0.03 + 0.08 + 0.03)
    assert c.publish.seconds(5000) == near(0.0003 + 0.001)
    assert c.store_s_per_token == c.load_s_per_token == near(1e-5)


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
    # 0.08 s was believed: both parts are scaled by 2.5.
    assert (c.prefill.fixed_s, c.prefill.per_token_s) == (near(0.075), near(0.00125))


def test_of_a_mixed_step_a_prefill_costs_what_is_beyond_a_decode_step():
    c = belief()
    c.learn_step(0.03, prefill_tokens=0, decoding=4)
    c.learn_step(0.23, prefill_tokens=100, decoding=4)  # 0.2 s of it, as above
    assert (c.step_s, c.prefill.fixed_s, c.prefill.per_token_s) == (near(0.03), near(0.075), near(0.00125))


def test_a_mixed_step_as_quick_as_a_decode_step_still_costs_the_prefill_something():
    c = belief()
    c.learn_step(0.03, prefill_tokens=0, decoding=4)
    c.learn_step(0.026, prefill_tokens=12, decoding=1)
    assert c.prefill_s(12) == near(0.0026)
    unseen = belief()
    unseen.learn_step(0.026, prefill_tokens=12, decoding=1)  # no decode step was seen: the prior is no measure
    assert unseen.prefill_s(12) == near(0.026)


def test_short_and_long_prefills_tell_what_is_fixed_from_what_grows():
    c = belief()
    for tokens in (10, 1000, 40):
        c.learn_step(0.01 + 1e-4 * tokens, prefill_tokens=tokens, decoding=0)
    assert (c.prefill.fixed_s, c.prefill.per_token_s) == (near(0.01), near(1e-4))


def test_a_run_of_short_tails_does_not_make_a_long_prompt_be_forgotten():
    # 100 samples of 20 and 40 tokens after one of 2000: at a fiftieth each its weight is 13%, at a tenth it was 3e-5.
    c = belief()
    c.learn_step(0.41, prefill_tokens=2000, decoding=0)
    for i in range(100):
        c.learn_step(0.014 if i % 2 else 0.024, prefill_tokens=20 if i % 2 else 40, decoding=0)
    assert c.prefill_s(2000) == pytest.approx(0.41, rel=0.05)


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
    assert c.prefill_s(100) == near(0.10)


def test_copies_all_alike_scale_the_belief_to_their_mean():
    c = belief()
    c.load.learn(1000, 0.02)  # 2e-5 a token
    assert c.load_s_per_token == near(2e-5) and c.load.fixed_s == 0.0
    c.load.learn(1000, 0.04)
    assert c.load.seconds(1000) == near(0.03)
    assert c.store_s_per_token == near(1e-5)  # the other direction is another link


def test_copies_of_different_sizes_tell_what_is_fixed_from_what_grows():
    # 2 ms and 3e-5 a token, exactly: 32 ms for 1000, 17 ms for 500.
    line = Line(0.0, 1e-5)
    for tokens in (1000, 500, 2000):
        line.learn(tokens, 0.002 + 3e-5 * tokens)
    assert (line.fixed_s, line.per_token_s) == (near(0.002), near(3e-5))


def test_copies_that_fit_no_line_leave_no_negative_part():
    line = Line(0.0, 1e-5)
    line.learn(1000, 0.5)
    line.learn(2000, 0.1)  # the larger was quicker: the shape is kept, the mean is 1500 tokens in 0.3 s
    assert (line.fixed_s, line.per_token_s) == (0.0, near(0.3 / 1500))
    line = Line(0.0, 1e-5)
    line.learn(1000, 0.01)
    line.learn(2000, 0.11)  # 1e-4 a token would leave -0.09 s for none: 0.06 s for 1500 tokens and nothing fixed
    assert (line.fixed_s, line.per_token_s) == (0.0, near(0.06 / 1500))


def test_a_publish_is_learned_over_the_whole_context():
    c = belief()
    for context in (1000, 8000, 3000, 5000):
        c.publish.learn(context, 0.0002 + 4e-7 * context)
    assert c.publish.seconds(10_000) == near(0.0042)


def test_an_impossible_copy_teaches_nothing_and_one_hiccup_neither():
    line = Line(0.0, 1e-5)
    line.learn(0, 1.0)
    line.learn(100, 0.0)
    assert line == Line(0.0, 1e-5)
    for _ in range(3):
        line.learn(1000, 0.01)
    line.learn(1000, 5.0)
    assert line.seconds(1000) == near(0.01)


def test_a_load_waits_for_those_ahead_and_for_the_step_that_notices():
    # 1e-5 a token: 3000 behind 2000 take 50 ms, and a step of 30 ms.
    assert belief().load_s(3000, 2000) == near(0.05 + 0.03)


def test_a_copy_is_begun_where_it_is_quicker_token_for_token_and_nowhere_else():
    # Prefill 5e-4 a token. With a start of 10 ms, 1e-5 a token: equal at 4.9e-4 h = 0.01, h = 20.4.
    c = belief()
    assert c.load_spares_engine(host_tokens=1)
    c.load.fixed_s = 0.01
    assert not c.load_spares_engine(host_tokens=20)
    assert c.load_spares_engine(host_tokens=21)


def test_the_break_even_is_learned():
    c = belief()
    assert c.load_spares_engine(host_tokens=1000)
    for _ in range(3):
        c.load.learn(1000, 1.0)  # 1 ms a token, twice the prefill
    assert not c.load_spares_engine(host_tokens=1000)
    assert c.return_s(tail_tokens=20, host_tokens=1000) == near(0.03 + 1020 / 2000 + 0.03)  # by the quicker way


def test_what_is_stored_within_a_time():
    c = belief()
    assert c.stores_within(0.015) == pytest.approx(1500, abs=1)  # 1e-5 a token
    for tokens in (1000, 500, 2000):
        c.store.learn(tokens, 0.002 + 1e-5 * tokens)
    assert c.stores_within(0.0125) == pytest.approx(1050, abs=1)
    assert c.stores_within(0.001) == 0  # less than the fixed part


def test_the_same_steps_give_the_same_beliefs():
    a, b = belief(), belief()
    for c in (a, b):
        for i in range(50):
            c.learn_step(0.01 + i / 1000, prefill_tokens=(i % 3) * 40, decoding=i % 5)
            for line in (c.store, c.load, c.publish):
                line.learn(i * i, i / 1e5)
    assert a == b
