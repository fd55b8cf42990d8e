"""One direction of the link: who shares it when, and when each transfer ends."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenflow_sgl.sim.link import Link

# (seconds after the start before, bytes)
STARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 500)), min_size=1, max_size=12)


def run(link, starts):
    """{number: (started, ended)} with every end taken when `next_done_s` says."""
    ends, at_s, times = {}, 0.0, []
    for number, (gap_s, n_bytes) in enumerate(starts):
        at_s += gap_s
        while link.next_done_s() <= at_s:
            collect(link, link.next_done_s(), ends)
        link.start(at_s, n_bytes, number)
        times.append(at_s)
    while link.next_done_s() < math.inf:
        collect(link, link.next_done_s(), ends)
    return {number: (times[number], end_s) for number, end_s in ends.items()}


def collect(link, now_s, ends):
    ended = link.done(now_s)
    assert ended, f"next_done_s said {now_s} and nothing ended"
    for what, _ in ended:
        ends[what] = now_s


def exact_ends(starts, bytes_s, setup_s=0):
    """The same in fractions, one event after the other."""
    at, arrivals = Fraction(0), []
    for number, (gap_s, n_bytes) in enumerate(starts):
        at += gap_s
        arrivals.append((at + setup_s, number, Fraction(n_bytes)))
    now, left, ends = Fraction(0), {}, {}
    while arrivals or left:
        opens = arrivals[0][0] if arrivals else None
        least = min(left.values(), default=None)
        ends_at = None if least is None else now + least * len(left) / bytes_s
        until = min(t for t in (opens, ends_at) if t is not None)
        moved = (until - now) * bytes_s / len(left) if left else Fraction(0)
        left = {number: n_bytes - moved for number, n_bytes in left.items()}
        now = until
        for number in [number for number, n_bytes in left.items() if n_bytes == 0]:
            ends[number] = now
            del left[number]
        while arrivals and arrivals[0][0] == now:
            _, number, n_bytes = arrivals.pop(0)
            left[number] = n_bytes
    return ends


def test_a_transfer_alone_takes_its_bytes_over_the_bandwidth():
    link = Link(10.0)
    link.start(5.0, 40, "kv")
    assert link.next_done_s() == 9.0
    assert link.done(8.9) == []
    assert link.done(9.0) == [("kv", 4.0)]
    assert link.next_done_s() == math.inf


@pytest.mark.parametrize("count", [2, 7, 64])
def test_equal_transfers_started_together_end_together_after_as_many_times_their_own_time(count):
    link = Link(128.0)
    for number in range(count):
        link.start(3.0, 256, number)
    # 256 bytes at 128 a second are 2 s alone.
    assert link.next_done_s() == 3.0 + 2.0 * count
    assert link.done(3.0 + 2.0 * count) == [(number, 2.0 * count) for number in range(count)]


def test_a_later_transfer_slows_the_earlier_and_leaves_it_the_rest():
    link = Link(10.0)
    link.start(0.0, 100, "early")
    assert link.next_done_s() == 10.0
    link.start(5.0, 20, "late")
    # At 5 s 50 are left; each then moves 5 a second: late is over at 9 s, early has 30 left, alone again: 12 s.
    assert link.next_done_s() == 9.0
    assert link.done(9.0) == [("late", 4.0)]
    assert link.next_done_s() == 12.0
    assert link.done(12.0) == [("early", 12.0)]


def test_ends_that_were_missed_come_in_order_of_end_with_their_own_times():
    link = Link(10.0)
    link.start(0.0, 100, "long")
    link.start(0.0, 20, "short")
    # Both move 5 a second: short over at 4 s, long has 80 left: 12 s.
    assert link.done(100.0) == [("short", 4.0), ("long", 12.0)]


def test_an_end_that_only_a_start_has_passed_is_still_announced():
    link = Link(10.0)
    link.start(0.0, 10, "over")
    link.start(2.0, 1000, "open")
    # It ended at 1 s; 2 s have passed and an event loop cannot go back.
    assert link.next_done_s() == 2.0
    assert link.done(2.0) == [("over", 1.0)]
    assert link.next_done_s() == 102.0


def test_a_transfer_being_set_up_moves_nothing_and_slows_nobody_yet():
    link = Link(10.0, setup_s=2.0)
    link.start(0.0, 100, "early")
    assert link.next_done_s() == 12.0
    link.start(8.0, 50, "late")
    # early opens at 2 and has 20 left when late opens at 10; 5 a second each: early over at 14, having taken 14.
    assert link.next_done_s() == 14.0
    assert link.done(14.0) == [("early", 14.0)]
    # late has 30 left at 14 and the link for itself: 17, since 8.
    assert link.done(17.0) == [("late", 9.0)]


def test_a_transfer_that_opens_after_the_next_end_does_not_delay_it():
    link = Link(10.0, setup_s=2.0)
    link.start(0.0, 50, "early")
    link.start(6.0, 50, "late")
    assert link.next_done_s() == 7.0


def test_how_many_are_open_counts_those_being_set_up():
    link = Link(10.0, setup_s=1.0)
    link.start(0.0, 10, "a")
    link.start(0.5, 10, "b")
    assert len(link) == 2
    link.done(50.0)
    assert len(link) == 0


@settings(max_examples=200, deadline=None)
@given(STARTS, st.sampled_from([1.0, 3.0, 7.5, 100.0]), st.sampled_from([0.0, 0.25, 4.0]))
def test_every_end_is_where_an_exact_simulation_has_it(starts, bytes_s, setup_s):
    ends = run(Link(bytes_s, setup_s=setup_s), starts)
    exact = exact_ends(starts, Fraction(bytes_s), Fraction(setup_s))
    assert ends.keys() == exact.keys()
    for number, (_, end_s) in ends.items():
        assert end_s == pytest.approx(float(exact[number]), abs=1e-9)


@settings(max_examples=200, deadline=None)
@given(STARTS, st.sampled_from([1.0, 7.5, 100.0]))
def test_the_link_moves_all_bytes_in_the_time_it_is_busy_and_no_other(starts, bytes_s):
    spans = sorted(run(Link(bytes_s), starts).values())
    busy_s, until_s = 0.0, -math.inf
    for begin_s, end_s in spans:
        busy_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    assert busy_s * bytes_s == pytest.approx(sum(n_bytes for _, n_bytes in starts), abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(STARTS, st.lists(st.floats(0.0, 400.0), max_size=20))
def test_looking_in_between_changes_no_time_by_a_single_bit(starts, looks):
    def ends(looks):
        link, told, at_s = Link(7.0, setup_s=0.5), [], 0.0
        plan = []
        for number, (gap_s, n_bytes) in enumerate(starts):
            at_s += gap_s
            plan.append((at_s, 1, number, n_bytes))
        for when_s, is_start, number, n_bytes in sorted(plan + [(look, 0, -1, 0) for look in looks]):
            if is_start:
                link.start(when_s, n_bytes, number)
            else:
                link.next_done_s()
                told += link.done(when_s)
        return told + link.done(1e6)

    assert ends(looks) == ends([])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(0.0), "bytes_s of the link: 0.0, valid"),
        (lambda: Link(math.inf), "bytes_s of the link: inf, valid"),
        (lambda: Link(1.0, setup_s=-1.0), "setup_s of the link: -1.0, valid"),
        (lambda: Link(1.0).start(0.0, -1, "x"), "n_bytes of a transfer: -1, valid"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_time_that_goes_back_is_refused():
    link = Link(1.0)
    link.start(2.0, 1, "x")
    with pytest.raises(ValueError, match="time does not go back"):
        link.done(1.0)
