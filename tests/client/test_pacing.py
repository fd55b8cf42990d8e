"""The pacing of all clients, on a clock that the test holds."""

from __future__ import annotations

import math
import random

import pytest

from tokenflow_sgl.client.pacing import Schedule
from tokenflow_sgl.core.qoe import StreamRecord, display_times, stalls


def read_all(schedule: Schedule[str], now_s: float = 0.0) -> list[tuple[str, float]]:
    """What a loop that always waits is given, and when."""
    shown = []
    while math.isfinite(due_s := schedule.due_s()):
        asked_s, now_s = now_s, max(now_s, due_s)
        item = schedule.show(asked_s, now_s)
        assert item is not None
        shown.append((item.item, now_s))
    return shown


def test_what_came_at_once_is_shown_at_the_rate() -> None:
    schedule: Schedule[str] = Schedule(8)
    for number in range(4):
        schedule.put(0, f"{number}", number + 1, 1.0)
    # d_1 = a_1 = 1, then one each 1/8 s.
    assert read_all(schedule, 1.0) == [("0", 1.0), ("1", 1.125), ("2", 1.25), ("3", 1.375)]


def test_nothing_is_shown_before_it_is_due() -> None:
    schedule: Schedule[str] = Schedule(8)
    assert schedule.show(0.0, 5.0) is None and schedule.due_s() == math.inf
    schedule.put(0, "a", 1, 5.0)
    schedule.put(0, "b", 2, 5.0)
    assert schedule.show(5.0, 5.0) is not None
    assert schedule.show(5.0, 5.124) is None and schedule.due_s() == 5.125


def test_a_piece_of_four_tokens_is_shown_whole_and_the_next_one_four_paces_later() -> None:
    schedule: Schedule[str] = Schedule(8)
    schedule.put(0, "four", 4, 0.0)
    schedule.put(0, "one", 5, 0.0)
    assert read_all(schedule) == [("four", 0.0), ("one", 0.5)]


def test_what_holds_no_token_takes_no_time() -> None:
    """A role before, a reason and the usage after: they are the reader's at once, in their order."""
    schedule: Schedule[str] = Schedule(2)
    for index, item, total in ((0, "role", 0), (0, "a", 1), (0, "b", 2), (0, "reason", 2), (None, "usage", 0)):
        schedule.put(index, item, total, 0.0)
    assert read_all(schedule) == [("role", 0.0), ("a", 0.0), ("b", 0.5), ("reason", 0.5), ("usage", 0.5)]


def test_at_an_infinite_rate_everything_is_shown_as_it_comes() -> None:
    schedule: Schedule[str] = Schedule(math.inf)
    for number in range(3):
        schedule.put(0, f"{number}", 10 * (number + 1), 2.0)
    assert [now_s for _, now_s in read_all(schedule, 2.0)] == [2.0, 2.0, 2.0]


def test_a_reader_that_speeds_up_is_given_the_next_piece_by_its_new_rate() -> None:
    schedule: Schedule[str] = Schedule(1)
    schedule.put(0, "a", 1, 0.0)
    schedule.put(0, "b", 2, 0.0)
    schedule.show(0.0, 0.0)
    assert schedule.due_s() == 1.0
    schedule.read_rate = 4
    assert schedule.due_s() == 0.25


@pytest.mark.parametrize("rate", [0, -1, math.nan, True, "8"])
def test_a_rate_that_is_none_is_refused_with_what_is_valid(rate: object) -> None:
    with pytest.raises(ValueError, match=r"read_rate: .* valid is tokens per second above 0, or math\.inf"):
        Schedule(rate)  # type: ignore[arg-type]


def test_a_token_that_came_too_late_by_more_than_the_grace_is_a_stall_of_what_was_waited() -> None:
    schedule: Schedule[str] = Schedule(8)
    # Due at 0.125: at 0.375 it is late by exactly 0.25 and no stall. Due then at 0.5: at 1.25 a stall of 0.75.
    for total, at_s in ((1, 0.0), (2, 0.375), (3, 1.25)):
        schedule.put(0, "x", total, at_s)
        shown = schedule.show(at_s - 0.3 if total == 2 else 0.0, at_s)
        assert shown is not None and shown.stall_s == (0.75 if total == 3 else 0.0)
    assert (schedule.stalls.count, schedule.stalls.total_s, schedule.stalls.longest_s) == (1, 0.75, 0.75)


def test_a_loop_that_stopped_goes_on_from_there_at_its_rate_and_that_is_no_stall() -> None:
    schedule: Schedule[str] = Schedule(8)
    for number in range(4):
        schedule.put(0, f"{number}", number + 1, 0.0)
    schedule.show(0.0, 0.0)
    assert schedule.show(9.0, 9.0) is not None  # it was due at 0.125
    assert schedule.due_s() == 9.125
    # A token that came while it was away, however late, kept nobody waiting.
    read_all(schedule, 9.0)
    schedule.put(0, "late", 5, 20.0)
    assert schedule.show(30.0, 30.0) is not None
    assert schedule.stalls.count == 0


def test_a_loop_that_is_late_by_less_than_the_grace_does_not_slow_the_reading_down() -> None:
    schedule: Schedule[str] = Schedule(8)
    for number in range(3):
        schedule.put(0, f"{number}", number + 1, 0.0)
    schedule.show(0.0, 0.0)
    assert schedule.show(0.3, 0.3) is not None  # 0.175 late
    assert schedule.due_s() == 0.25


def test_each_choice_has_a_reader_of_its_own() -> None:
    schedule: Schedule[str] = Schedule(2)
    for index, item, total in ((0, "a0", 1), (0, "a1", 2), (1, "b0", 1), (1, "b1", 2)):
        schedule.put(index, item, total, 0.0)
    assert read_all(schedule) == [("a0", 0.0), ("b0", 0.0), ("a1", 0.5), ("b1", 0.5)]
    assert schedule.received_tokens == {0: 2, 1: 2}


def test_what_is_shown_counts_as_consumed_and_what_waits_does_not() -> None:
    schedule: Schedule[str] = Schedule(8)
    schedule.put(0, "ab", 2, 0.0)
    schedule.put(0, "c", 3, 0.0)
    shown = schedule.show(0.0, 0.0)
    assert shown is not None and shown.consumed_tokens == 2
    assert schedule.received_tokens == {0: 3}


def test_a_count_that_goes_back_takes_nothing_back() -> None:
    schedule: Schedule[str] = Schedule(8)
    schedule.put(0, "a", 5, 0.0)
    schedule.put(0, "b", 3, 0.0)
    assert schedule.received_tokens == {0: 5}


@pytest.mark.parametrize("seed", range(30))
def test_a_loop_that_always_waits_sees_what_the_measures_say(seed: int) -> None:
    rng = random.Random(seed)
    rate = rng.choice([1.0, 3.5, 8.0, 100.0])
    arrivals, now_s = [], 0.0
    for _ in range(60):
        now_s += rng.choice([0.0, 0.0, 0.05, 0.2, 1.5])
        arrivals.append(now_s)
    schedule: Schedule[int] = Schedule(rate)
    shown: list[float] = []
    for number, at_s in enumerate(arrivals):
        while schedule.due_s() <= at_s:  # what was due before this one came
            due_s = schedule.due_s()
            assert schedule.show(shown[-1] if shown else 0.0, due_s) is not None
            shown.append(due_s)
        schedule.put(0, number, number + 1, at_s)
    while math.isfinite(due_s := schedule.due_s()):
        assert schedule.show(shown[-1], due_s) is not None
        shown.append(due_s)
    record = StreamRecord("r", "g", 0.0, tuple(arrivals), rate, 60)
    assert shown == pytest.approx(display_times(arrivals, rate))
    wanted = stalls(record)
    assert schedule.stalls.count == wanted.count
    assert schedule.stalls.total_s == pytest.approx(wanted.total_s)
    assert schedule.stalls.longest_s == pytest.approx(wanted.longest_s)
