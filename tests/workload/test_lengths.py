"""Lengths: where the mass of each shape lies. Bounds are four standard deviations of what is counted."""

from __future__ import annotations

import math
import random

import pytest

from tokenflow_sgl.workload.lengths import Lognormal, Normal, bounds, draw_tokens

N = 4000


def drawn(lengths):
    rnd = random.Random("lengths")
    return [draw_tokens(lengths, rnd) for _ in range(N)]


def near_share(values, condition, share):
    return abs(sum(map(condition, values)) / N - share) < 4 * math.sqrt(share * (1 - share) / N)


def test_normal_lengths_have_their_mean_and_deviation():
    values = drawn(Normal(512, 128, (1, 2000)))
    # The mean of 4,000 draws strays by 128 / sqrt(4000) = 2.0; 68.27% lie within one standard deviation.
    assert abs(sum(values) / N - 512) < 4 * 2.03
    assert near_share(values, lambda tokens: 384 <= tokens <= 640, 0.6827)


def test_lognormal_lengths_have_their_median_and_their_tail():
    values = drawn(Lognormal(5.02, 0.86, (1, 100_000)))
    # e^5.02 = 151.4; e^(5.02 + 1.2816 x 0.86) = 456.
    assert near_share(values, lambda tokens: tokens <= 151, 0.5)
    assert near_share(values, lambda tokens: tokens > 456, 0.1)


def test_what_falls_outside_the_clip_lands_on_its_nearer_end():
    values = drawn(Lognormal(7.0, 1.36, (300, 7437)))
    assert (min(values), max(values)) == (300, 7437)
    # Phi((ln 300 - 7) / 1.36) = Phi(-0.9531) = 0.1703; 1 - Phi((ln 7437 - 7) / 1.36) = 1 - Phi(1.4076) = 0.0796.
    assert near_share(values, lambda tokens: tokens == 300, 0.1703)
    assert near_share(values, lambda tokens: tokens == 7437, 0.0796)


def test_a_range_is_drawn_uniformly_with_both_ends():
    values = drawn((3, 6))
    assert all(near_share(values, lambda tokens, end=end: tokens == end, 0.25) for end in (3, 4, 5, 6))


@pytest.mark.parametrize("lengths", [Normal(10.0, 0.0, (1, 20)), Lognormal(math.log(10), 0.0, (1, 20))])
def test_without_spread_every_length_is_the_centre(lengths):
    assert set(drawn(lengths)) == {10}


def test_a_draw_that_no_float_holds_is_cut_too():
    assert set(drawn(Lognormal(1e6, 0.0, (1, 20)))) == {20}


def test_bounds_are_what_can_be_drawn():
    assert bounds((3, 6)) == (3, 6)
    assert bounds(Normal(10.0, 1.0, (2, 20))) == bounds(Lognormal(1.0, 1.0, (2, 20))) == (2, 20)
