"""What is expected to be wanted, and how wrong it was. Ticks of 0.1 s and a horizon of 4 s unless said otherwise."""

from __future__ import annotations

import copy
import math

import pytest

from tokenflow_sgl.core.burst import Forecast
from tokenflow_sgl.core.types import Arrived, ReaderClass

TICK_S = 0.1


def arrival(tokens, rid="r"):
    return Arrived(rid, tokens, 500, ReaderClass.READER, 6.0)


def play(forecast, seconds, *, start_s=0.0, grew=0, prompts=(), every_s=None):
    """Ticks over `seconds` from `start_s`; `prompts` arrive at the first, or at one every `every_s`."""
    ticks = round(seconds / TICK_S)
    for i in range(ticks):
        if i == 0 if every_s is None else i % round(every_s / TICK_S) == 0:
            for tokens in prompts:
                forecast.arrived(arrival(tokens))
        forecast.tick(start_s + (i + 1) * TICK_S, grew_tokens=grew, idle=False)
    return start_s + seconds


def started(horizon_s=4.0):
    f = Forecast(horizon_s)
    f.tick(0.0, grew_tokens=0, idle=True)
    return f


def near(value, rel=1e-6):
    return pytest.approx(value, rel=rel)


def test_growth_of_running_streams_is_demand():
    # 10 streams take one token each per 0.1 s: 100 tok/s. After t seconds an average has 1 - exp(-t / tau) of it.
    f = started()
    play(f, 4.0, grew=10)
    assert f.tokens.fast == near(100 * (1 - math.exp(-4 / 2)))
    assert f.tokens.slow == near(100 * (1 - math.exp(-4 / 30)))
    assert f.demand_tokens(4.0) == near(400 * (1 - math.exp(-2)))  # the larger one, times the horizon
    assert f.demand_tokens(1.0) == near(100 * (1 - math.exp(-2)))


def test_a_burst_shows_at_once_in_the_fast_average_and_fades_there_first():
    # 6 prompts of 100 tokens within one tick: 6000 tok/s for 0.1 s, of which 1 - exp(-0.1 / tau) counts.
    f = started()
    now_s = play(f, TICK_S, prompts=[100] * 6)
    assert f.arrivals.fast == near(60 * (1 - math.exp(-0.05)))  # 2.9 per second
    assert f.tokens.fast == near(6000 * (1 - math.exp(-0.05)))  # 293 tok/s
    assert f.tokens.slow == near(6000 * (1 - math.exp(-0.1 / 30)))  # 20 tok/s
    assert f.demand_tokens(4.0) == near(4 * f.tokens.fast)
    play(f, 10.0, start_s=now_s)
    # After 10 s: 293 exp(-10 / 2) = 2 and 20 exp(-10 / 30) = 14 tok/s. What is usual is remembered longer.
    assert f.tokens.fast < f.tokens.slow
    assert f.demand_tokens(4.0) == near(4 * f.tokens.slow)


def test_averages_fall_with_time_alone_in_one_tick_as_in_many():
    f = started()
    now_s = play(f, 2.0, grew=10)
    before = f.tokens.fast
    many, one = f, copy.deepcopy(f)
    play(many, 3.0, start_s=now_s)
    one.tick(now_s + 3.0, grew_tokens=0, idle=False)
    assert one.tokens.fast == near(many.tokens.fast) == near(before * math.exp(-1.5))


def test_an_idle_spell_is_no_load_and_what_ends_it_counts_from_the_step_that_begins():
    f = started()
    now_s = play(f, 2.0, grew=10)
    before = f.tokens.fast
    f.arrived(arrival(1000))
    f.tick(now_s + 3.0, grew_tokens=10, idle=True)  # a batch's growth told after the spell did not happen in it
    assert f.tokens.fast == near(before * math.exp(-1.5))
    rest = f.tokens.fast
    f.tick(now_s + 3.1, grew_tokens=0, idle=False)
    # 1000 tokens in 0.1 s: 10,000 tok/s, and not 1000 over the 3 s of the spell.
    assert f.tokens.fast == near(rest * math.exp(-0.05) + 10_000 * (1 - math.exp(-0.05)))


def test_a_clock_that_stands_still_loses_no_arrival():
    f = started()
    f.arrived(arrival(100))
    f.tick(0.0, grew_tokens=0, idle=False)
    f.tick(0.1, grew_tokens=0, idle=False)
    assert f.tokens.fast == near(1000 * (1 - math.exp(-0.05)))


def test_the_error_on_a_constant_load_goes_to_zero_and_is_reported():
    f = started()
    assert f.snapshot()["error_ratio"] is None
    now_s = play(f, 5.0, grew=10)
    # The first prediction that came due was made at 0.1 s: 4 x 100 (1 - exp(-0.05)) = 20 of the 400 that came.
    early = f.snapshot()
    assert early["error_ratio"] > 0.3 and early["bias_ratio"] == near(-early["error_ratio"])
    # The fast average is within exp(-60 / 2) of the load after a minute; the comparisons weigh a tenth each, and there
    # are two a second: 0.9^(2 x 26) = 0.4% of the early error is left after 30 s, 0.001% after 60 s.
    play(f, 60.0, start_s=now_s, grew=10)
    late = f.snapshot()
    assert late["error_ratio"] < 0.001 and abs(late["bias_ratio"]) < 0.001
    assert late["demand_tokens"] == near(400, rel=1e-3)


def test_a_load_that_stops_shows_as_a_positive_bias():
    f = started()
    now_s = play(f, 40.0, grew=10)
    # All that is predicted in the last 4 s of it comes short, and nothing that is predicted after it comes at all.
    play(f, 4.5, start_s=now_s)
    snapshot = f.snapshot()
    assert snapshot["bias_ratio"] > 0.1 and snapshot["error_ratio"] >= snapshot["bias_ratio"]


def test_arrivals_at_a_steady_pace_are_foretold_within_their_own_unevenness():
    # 200 tokens every 0.5 s: 400 tok/s, 1600 in 4 s. Right after an arrival the fast average stands at most
    # 0.5 / 2 / (1 - exp(-0.25)) = 1.13 of the load, so no prediction is off by more than 13%, once both have risen.
    f = started()
    play(f, 120.0, prompts=[200], every_s=0.5)
    snapshot = f.snapshot()
    assert snapshot["error_ratio"] < 0.13
    assert snapshot["arrivals_per_s"]["slow"] == near(2.0, rel=0.05)


def test_without_a_horizon_nothing_is_foretold():
    f = started(horizon_s=0.0)
    play(f, 5.0, grew=10, prompts=[100], every_s=0.5)
    assert f.demand_tokens(4.0) == 0.0
    assert f.snapshot()["demand_tokens"] == 0.0 and f.snapshot()["error_ratio"] is None


def test_the_same_events_give_the_same_forecast():
    a, b = started(), started()
    for f in (a, b):
        play(f, 20.0, grew=7, prompts=[30, 50], every_s=0.7)
    assert a.snapshot() == b.snapshot()
