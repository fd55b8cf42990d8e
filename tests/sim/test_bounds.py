"""The bounds: against brute force where that is possible, and never on the wrong side of a schedule."""

from __future__ import annotations

import math
import random
from itertools import combinations, permutations

import pytest

from tokenflow_sgl.core.qoe import percentile
from tokenflow_sgl.sim.bounds import (
    Wanted,
    capacity_tok_s,
    demand_tok_s,
    fewest_late,
    goodput_bound_tok_s,
    least_limit_s,
    ttft_p99_bound_s,
)
from tokenflow_sgl.sim.hardware import load_hardware, load_model
from tokenflow_sgl.sim.limits import bounds_of
from tokenflow_sgl.sim.timing import Fixed, Roofline, StepWork
from tokenflow_sgl.sim.world import World
from tokenflow_sgl.workload.arrivals import Request, Segment

ROUGH = 2e-6  # the bound is at most 1e-6 too low


def waits_s(order):
    """Seconds from arrival to end of each job, served in this order and never idle with one waiting for its turn."""
    free_s, waits = -math.inf, []
    for arrival_s, need_s in order:
        free_s = max(free_s, arrival_s) + need_s
        waits.append(free_s - arrival_s)
    return waits


def brute_limit_s(jobs, late):
    """The smallest T over every choice of who is late."""
    kept = len(jobs) - late
    return min((max(waits_s(sorted(chosen)), default=0.0) for chosen in combinations(jobs, kept)), default=0.0)


def draw_jobs(rng, count):
    """Small whole numbers, so that ties and idle gaps are common."""
    return sorted((float(rng.randint(0, 12)), float(rng.randint(0, 6))) for _ in range(count))


def split(jobs):
    return [arrival_s for arrival_s, _ in jobs], [need_s for _, need_s in jobs]


def test_one_long_job_among_three_may_be_the_late_one():
    arrivals_s, needs_s = [0.0, 0.0, 0.0], [10.0, 1.0, 1.0]
    assert least_limit_s(arrivals_s, needs_s, late=0) == pytest.approx(12.0, abs=ROUGH)
    # Without the long one the others end at 1 and 2 s.
    assert least_limit_s(arrivals_s, needs_s, late=1) == pytest.approx(2.0, abs=ROUGH)


def test_who_is_dropped_is_who_lets_the_rest_end_soonest_and_not_the_longest():
    # The job of 5 s is over before the others arrive at 6 s: to drop it gains nothing. 4, 3 and 2 s from 6 s on end
    # within 9 s all three, within 5 s without the longest of them.
    arrivals_s, needs_s = [0.0, 6.0, 6.0, 6.0], [5.0, 4.0, 3.0, 2.0]
    assert least_limit_s(arrivals_s, needs_s, late=0) == pytest.approx(9.0, abs=ROUGH)
    assert least_limit_s(arrivals_s, needs_s, late=1) == pytest.approx(5.0, abs=ROUGH)


def test_those_behind_a_dropped_job_move_up_no_further_than_the_first_of_them_can():
    # In order: 0-9, 9-12, 12-15, 15-17, which is 9.6 s for the 4th. Without the 1st the 2nd starts as it arrives, and
    # all are 3 s earlier, not 9: 6-9, 9-12, 12-14; then 14-16, and 16-18 is 10.4 s for the 6th. Without the 3rd too,
    # the 4th, which had 4.6 s still to wait, is another 3 s earlier, and the last ends at 17, after 9.3 s.
    arrivals_s, needs_s = [0.0, 6.0, 7.0, 7.4, 7.5, 7.6, 7.7], [9.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    jobs = list(zip(arrivals_s, needs_s, strict=True))
    assert [brute_limit_s(jobs, late) <= 9.5 for late in (1, 2)] == [False, True]
    assert fewest_late(arrivals_s, needs_s, within_s=9.5, stop_above=7) == 2


@pytest.mark.parametrize("seed", range(20))
def test_the_limit_is_that_of_brute_force_over_who_is_late(seed):
    rng = random.Random(seed)
    for _ in range(10):
        jobs = draw_jobs(rng, rng.randint(1, 9))
        for late in range(len(jobs)):
            found = least_limit_s(*split(jobs), late=late)
            exact = brute_limit_s(jobs, late)
            assert exact - ROUGH <= found <= exact, (jobs, late)


@pytest.mark.parametrize("seed", range(20))
def test_the_number_late_is_that_of_brute_force(seed):
    rng = random.Random(1000 + seed)
    for _ in range(10):
        jobs = draw_jobs(rng, rng.randint(1, 10))
        limits_s = [brute_limit_s(jobs, late) for late in range(len(jobs) + 1)]
        for within_s in (0.0, 1.0, 2.5, 4.0, 5.5, 7.0, 9.0, 11.0):
            exact = next(late for late, limit_s in enumerate(limits_s) if limit_s <= within_s)
            assert fewest_late(*split(jobs), within_s=within_s, stop_above=len(jobs)) == exact, (jobs, within_s)


@pytest.mark.parametrize("seed", range(25))
def test_no_order_of_service_at_all_beats_the_order_of_arrival(seed):
    rng = random.Random(2000 + seed)
    jobs = draw_jobs(rng, 5)
    for late in range(5):
        best = min(sorted(waits_s(order))[4 - late] for order in permutations(jobs))
        assert best >= least_limit_s(*split(jobs), late=late), (jobs, late)


def test_p99_of_201_prompts_leaves_two_of_three_long_ones_late():
    # Nearest rank: ceil(0.99 * 201) = 199, so 2 may be later. All are 10 s apart and nobody waits.
    jobs = [(10.0 * number, 5 if number in (40, 90, 140) else 1) for number in range(201)]
    assert ttft_p99_bound_s(jobs, prefill_s=float) == pytest.approx(5.0, abs=ROUGH)
    # With 199 prompts and two long ones: ceil(197.01) = 198, so 1 may be later and the other counts.
    assert ttft_p99_bound_s(jobs[:139] + jobs[141:], prefill_s=float) == pytest.approx(5.0, abs=ROUGH)
    # With one long one and one that may be later, nothing long is left.
    assert ttft_p99_bound_s(jobs[:89] + jobs[91:139] + jobs[141:], prefill_s=float) == pytest.approx(1.0, abs=ROUGH)


@pytest.mark.parametrize("seed", range(20))
def test_p99_of_any_order_of_service_is_never_below_the_bound(seed):
    rng = random.Random(3000 + seed)
    count = rng.choice([99, 100, 150, 420])
    jobs = sorted((rng.uniform(0.0, 40.0), rng.randint(1, 2000)) for _ in range(count))
    bound = ttft_p99_bound_s(jobs, prefill_s=lambda tokens: tokens / 10_000)
    for order in (jobs, sorted(jobs, key=lambda job: job[1]), rng.sample(jobs, count)):
        served = waits_s([(arrival_s, tokens / 10_000) for arrival_s, tokens in order])
        assert percentile(served, 99) >= bound


def test_prompts_that_cost_nothing_need_not_wait():
    assert ttft_p99_bound_s([(1.0, 0), (1.0, 0)], prefill_s=float) == 0.0


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="no jobs"):
        ttft_p99_bound_s([], prefill_s=float)
    with pytest.raises(ValueError, match="no requests"):
        goodput_bound_tok_s([], timing=Fixed(0.1, 1000.0), pool_tokens=1, max_running=1)


def test_demand_is_spread_from_the_first_arrival_to_the_soonest_end_of_the_last():
    # Each: 100 tokens in one step of 0.1 s, then 10 steps. The second ends at 4 + 1.1 s: 22 tokens in 5.1 s.
    wanted = [Wanted(0.0, 100, 100, 11), Wanted(4.0, 100, 100, 11)]
    timing = Fixed(0.1, 10_000.0)
    assert demand_tok_s(wanted, timing=timing) == pytest.approx(22 / 5.1)
    assert goodput_bound_tok_s(wanted, timing=timing, pool_tokens=10_000, max_running=8) == pytest.approx(22 / 5.1)


def test_capacity_is_the_largest_batch_where_a_step_takes_the_same_whatever_is_in_it():
    wanted = [Wanted(0.0, 100, 100, 11)] * 50
    # 8 streams in 0.1 s; 10 of 11 tokens come from decode steps, the first of each from its prefill.
    found = capacity_tok_s(wanted, timing=Fixed(0.1, 10_000.0), pool_tokens=1_000_000, max_running=8)
    assert found == pytest.approx(80 * 11 / 10)


def test_capacity_is_what_memory_holds_of_streams_of_mean_size():
    wanted = [Wanted(0.0, 400, 100, 11)] * 50
    # Own tokens before each of 10 decode tokens: 100 + 0..9, on average 104.5; 1,000 / 104.5 = 9.6, so at most 10.
    found = capacity_tok_s(wanted, timing=Fixed(0.1, 10_000.0), pool_tokens=1_000, max_running=64)
    assert found == pytest.approx(100 * 11 / 10)


def test_capacity_stops_where_more_streams_only_take_longer():
    class Quadratic(Fixed):
        def step_s(self, work: StepWork) -> float:
            return 1.0 + work.decoding**2 / 16

    wanted = [Wanted(0.0, 10, 10, 101)] * 50
    # n / (1 + n^2 / 16) is largest at n = 4: 2 a second.
    found = capacity_tok_s(wanted, timing=Quadratic(1.0, 1.0), pool_tokens=10**9, max_running=64)
    assert found == pytest.approx(2.0 * 101 / 100)


def test_answers_of_one_token_are_bounded_by_demand_alone():
    wanted = [Wanted(float(number), 10, 10, 1) for number in range(5)]
    assert capacity_tok_s(wanted, timing=Fixed(0.5, 1e9), pool_tokens=10, max_running=1) == math.inf
    assert goodput_bound_tok_s(wanted, timing=Fixed(0.5, 1e9), pool_tokens=10, max_running=1) == pytest.approx(5 / 4.5)


@pytest.mark.parametrize("seed", range(10))
def test_no_schedule_of_decode_steps_within_memory_makes_more_than_the_capacity(seed):
    rng = random.Random(4000 + seed)
    timing = Roofline(load_hardware("rtx4090"), load_model("llama3-8b"))
    wanted = [Wanted(0.0, rng.randint(50, 900), 0, rng.randint(2, 60)) for _ in range(40)]
    wanted = [Wanted(0.0, w.prompt_tokens, w.prompt_tokens, w.answer_tokens) for w in wanted]
    pool, running = 6_000, rng.choice([4, 16, 64])
    left = [[w.prompt_tokens, w.answer_tokens - 1] for w in wanted]
    spent_s, made = 0.0, len(wanted)
    while left:
        batch, used = [], 0
        for stream in rng.sample(left, len(left)):
            if len(batch) < running and used + stream[0] <= pool:
                batch.append(stream)
                used += stream[0]
        spent_s += timing.step_s(StepWork(decoding=len(batch), decode_context_tokens=used))
        made += len(batch)
        for stream in batch:
            stream[0] += 1
            stream[1] -= 1
        left = [stream for stream in left if stream[1] > 0]
    assert made == sum(w.answer_tokens for w in wanted)
    assert made / spent_s <= capacity_tok_s(wanted, timing=timing, pool_tokens=pool, max_running=running)


# ---- requests that no server can serve


def test_a_request_longer_than_the_pool_counts_in_no_bound():
    # Its answer alone would take 4000 steps of 0.02 s, and with that in the span the others would be held to far less
    # than the 4 * 100 tokens in 0.01 + 99 * 0.02 s that they can reach.
    world = World(4096, 16, 512, 64, 0, Fixed(0.02, 10_000.0), 1e9, 1e9)
    fits = [Request(f"r{i}", "all", 5.0, (Segment(f"r{i}", 100),), 100, 100, 6.0) for i in range(4)]
    long = Request("long", "all", 0.0, (Segment("long", 90),), 4000, 4000, 6.0)
    sent_s = {r.rid: r.sent_s for r in [*fits, long]}
    assert bounds_of([*fits, long], world, sent_s=sent_s) == bounds_of(fits, world, sent_s=sent_s)
    assert bounds_of([long], world, sent_s=sent_s) == {"ttft_p99_s": 0.0, "effective_goodput_tok_s": 0.0}
