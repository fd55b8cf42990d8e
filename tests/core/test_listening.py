"""What reports teach: the rate, within bounds; and that silence means nobody reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_sgl.core.buffers import ClientBuffer
from tokenflow_sgl.core.listening import MAX_RATE_TOK_S, MIN_RATE_TOK_S, Listening


def heard(rate, reports, *, dry=()):
    """The rate after each (seconds, tokens consumed)."""
    listening = Listening(rate)
    return [listening.hear(at_s, tokens, ran_dry=at_s in dry) for at_s, tokens in reports]


def test_a_reader_of_twice_the_declared_rate_is_known_after_three_reports():
    # 6 declared, 12 read: 6; 6 + 0.7 x (12 - 6) = 10.2; 10.2 + 0.7 x 1.8 = 11.46.
    assert heard(6.0, [(1.0, 12), (2.0, 24), (3.0, 36)]) == pytest.approx([6.0, 10.2, 11.46])


def test_a_report_moves_the_rate_by_a_bounded_factor_whatever_it_says():
    # 1,000,000 tokens in a second: twice 6 counts, 6 + 0.7 x 6. Nothing in a second: half counts.
    assert heard(6.0, [(1.0, 0), (2.0, 1_000_000)])[-1] == pytest.approx(10.2)
    assert heard(6.0, [(1.0, 0), (2.0, 0)])[-1] == pytest.approx(3.9)


def test_a_reader_that_waited_for_tokens_is_not_taken_for_a_slow_one():
    assert heard(6.0, [(1.0, 6), (2.0, 7)], dry={2.0})[-1] == 6.0
    assert heard(6.0, [(1.0, 6), (2.0, 18)], dry={2.0})[-1] == pytest.approx(10.2)  # a quick one all the same


def test_reports_in_quick_succession_are_compared_over_a_longer_time():
    # At 1.05 s one token more would be 20 tok/s; at 1.3 s there are 3 in 0.3 s: 10.
    assert heard(6.0, [(1.0, 6), (1.05, 7), (1.3, 9)]) == pytest.approx([6.0, 6.0, 6.0 + 0.7 * 4])


@given(st.lists(st.tuples(st.floats(0.0, 100.0), st.integers(0, 10**9)), min_size=1, max_size=30))
def test_no_reports_lead_out_of_the_range_that_a_client_may_declare(reports):
    listening, at_s, tokens = Listening(6.0), 0.0, 0
    for dt_s, more in reports:
        at_s, tokens = at_s + dt_s, tokens + more
        assert MIN_RATE_TOK_S <= listening.hear(at_s, tokens, ran_dry=False) <= MAX_RATE_TOK_S


def test_a_client_that_reported_and_falls_silent_stops_reading_some_reports_later():
    b = ClientBuffer("tab", 5.0)
    b.emit(0.0, 1000)
    for second in (1, 2, 3):
        b.report(float(second), 5 * second)
    # Four gaps of 1 s after the last report it is believed to have read on to 15 + 20, and no further.
    assert (b.consumed_tokens(5.0), b.consumed_tokens(7.0), b.consumed_tokens(60.0)) == (25.0, 35.0, 35.0)
    assert b.slack_s(60.0) == b.lead_s(60.0) == (1000 - 35) / 5
    b.report(61.0, 40)  # back again
    assert b.consumed_tokens(61.0) == 40.0


def test_a_client_that_takes_nothing_off_its_connection_keeps_what_it_holds():
    b = ClientBuffer("stuck", 5.0)
    b.emit(0.0, 100)
    b.halt(4.0, True)  # 20 are read
    b.emit(9.0, 150)
    assert (b.consumed_tokens(9.0), b.slack_s(9.0), b.slack_s(99.0)) == (20.0, 26.0, 26.0)
    b.halt(100.0, True)  # said again: nothing new
    b.halt(104.0, False)
    assert (b.consumed_tokens(104.0), b.consumed_tokens(106.0)) == (20.0, 30.0)


def test_a_client_that_stops_with_nothing_to_show_gains_what_comes_next():
    b = ClientBuffer("stuck", 5.0)
    b.emit(0.0, 10)  # read by 2.0
    b.halt(5.0, True)
    assert b.lead_s(6.0) == -4.0  # for how long it is dry is not forgotten
    b.emit(7.0, 20)
    assert (b.slack_s(7.0), b.slack_s(60.0)) == (2.0, 2.0)
    b.halt(60.0, False)
    assert (b.slack_s(60.0), b.slack_s(61.0)) == (2.0, 1.0)


def test_a_report_is_believed_while_nothing_is_taken_and_does_not_start_the_clock():
    b = ClientBuffer("stuck", 5.0)
    b.emit(0.0, 100)
    b.halt(4.0, True)
    b.report(5.0, 40)
    assert (b.consumed_tokens(5.0), b.consumed_tokens(50.0)) == (40.0, 40.0)
    b.halt(50.0, False)
    assert b.consumed_tokens(52.0) == 50.0


def test_one_that_stopped_before_its_first_token_reads_none_of_them():
    b = ClientBuffer("stuck", 5.0)
    b.halt(0.0, True)
    b.emit(1.0, 50)
    assert b.slack_s(1.0) == b.slack_s(30.0) == 10.0


def test_a_client_that_reports_once_is_believed_to_read_on():
    b = ClientBuffer("once", 5.0)
    b.emit(0.0, 1000)
    b.report(1.0, 5)
    assert b.consumed_tokens(101.0) == 505.0


def test_what_a_client_said_is_never_taken_back():
    b = ClientBuffer("liar", 5.0)
    b.emit(0.0, 100)
    b.report(1.0, 50)
    b.report(2.0, 10)
    assert b.consumed_tokens(2.0) == 50.0


def test_the_model_may_have_run_ahead_of_what_is_reported():
    b = ClientBuffer("slow", 10.0)
    b.emit(0.0, 1000)
    b.report(5.0, 20)  # 50 were modelled
    assert b.consumed_tokens(5.0) == 20.0
