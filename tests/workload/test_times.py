"""Arrival processes. Bounds are four standard deviations of what is counted."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tokenflow_sgl.workload.groups import Group, ReadRate, Trace
from tokenflow_sgl.workload.times import arrival_times
from tokenflow_sgl.workload.traces import TraceRow

POISSON = Group("g", None, 10.0, "poisson", None, 5.0, (1, 1), (1, 1), (ReadRate(6.0, 1),), for_s=400.0)
SPELLS = replace(POISSON, arrival="onoff", per_s=50.0, for_s=2000.0, on_mean_s=2.0, off_mean_s=3.0)


def times(group):
    return arrival_times(group, random.Random("times"))


def test_a_poisson_stream_that_lasts_brings_its_rate_and_ends_in_time():
    at = times(POISSON)
    # 5/s for 400 s: 2,000, give or take sqrt(2000) = 44.7; sum of (gap / mean)^2 / n is 2 for exponential gaps.
    assert abs(len(at) - 2000) < 4 * 44.7
    assert at == sorted(at) and at[0] >= 10 and 408 < at[-1] < 410
    second = sum((5 * (b - a)) ** 2 for a, b in pairwise(at)) / len(at)
    assert abs(second - 2) < 4 * math.sqrt(20 / 2000)  # var(x^2) of an exponential is 24 - 4 = 20


def test_a_counted_poisson_stream_starts_as_one_that_lasts():
    assert times(replace(POISSON, for_s=None, count=100)) == times(POISSON)[:100]


def test_spells_bring_their_rate_for_their_share_of_the_time():
    at = times(SPELLS)
    # On for 2 of 5 s: 800 s of 2,000, at 50/s 40,000. Time on strays by sqrt(2 x 2^2 x 3^2 / 5^3 x 2000) = 34 s, worth
    # 1,700 requests, beside which the 200 of the counting itself are nothing.
    assert abs(len(at) - 40_000) < 4 * math.hypot(1700, 200)
    assert at == sorted(at) and at[0] >= 10 and at[-1] < 2010


def test_between_spells_nothing_comes():
    gaps = [b - a for a, b in pairwise(times(SPELLS))]
    # A gap of 1 s inside a spell has odds of e^-50. Of some 400 silences (+- 4 x 20) e^(-1/3) = 72% last longer.
    silences = [gap for gap in gaps if gap > 1]
    assert 320 * 0.72 - 4 * 9 < len(silences) < 480 * 0.72 + 4 * 9
    # What an exponential silence of mean 3 s has left after 1 s is 3 s again.
    mean = sum(silences) / len(silences)
    assert abs(mean - 4) < 4 * 3 / math.sqrt(len(silences))


def test_a_spell_comes_first():
    # The first request within 1 s: all but e^-50, unless the first spell (mean 2 s) ends before it, 1/(1 + 2 x 50).
    firsts = [arrival_times(SPELLS, random.Random(f"first {seed}"))[0] for seed in range(40)]
    assert sum(first < 11 for first in firsts) >= 37


@pytest.mark.parametrize(("scale", "at"), [(1.0, [7.0, 9.5]), (0.5, [6.0, 7.25])])
def test_a_trace_is_stretched_from_the_start_of_its_group(scale, at):
    rows = (TraceRow(2.0, 10, 3), TraceRow(4.5, 20, 4))
    group = replace(POISSON, arrival="trace", start_s=5.0, trace=Trace(Path("t.csv"), scale, rows))
    assert times(group) == at
