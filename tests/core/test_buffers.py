"""The model of one reader, against numbers worked out by hand and against a fluid that is integrated event by event."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenflow_sgl.core.buffers import ClientBuffer

TIMES = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 40)), min_size=1, max_size=60)


def test_nothing_is_read_before_the_first_token():
    b = ClientBuffer("a", 5.0)
    assert (b.consumed_tokens(100.0), b.buffer_tokens(100.0), b.slack_s(100.0)) == (0.0, 0.0, 0.0)
    assert b.runs_dry_at_s() == -math.inf


def test_consumption_grows_at_the_read_rate_from_the_first_delivered_token():
    b = ClientBuffer("a", 5.0)
    b.emit(10.0, 1)
    b.emit(10.1, 40)
    # C = 5 x (12 - 10) = 10, B = 40 - 10 = 30, S = 30 / 5 = 6 s: dry at 18 s, as 10 + 40 / 5.
    assert b.consumed_tokens(12.0) == 10.0
    assert b.buffer_tokens(12.0) == 30.0
    assert b.slack_s(12.0) == 6.0
    assert b.runs_dry_at_s() == 18.0


def test_consumption_is_capped_by_what_was_generated():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 10)
    assert b.consumed_tokens(60.0) == 10.0
    assert b.slack_s(60.0) == 0.0


def test_a_reader_who_ran_dry_does_not_catch_up_on_tokens_that_were_not_there():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 10)  # read to the end at 2 s
    b.emit(6.0, 20)  # four dry seconds later; C restarts at 10
    # 1 s later C = 10 + 5, and not 5 x 7 = 35 capped to 20.
    assert b.consumed_tokens(7.0) == 15.0
    assert b.runs_dry_at_s() == 8.0


def test_an_emission_that_brings_nothing_new_changes_nothing():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 10)
    b.emit(50.0, 10)
    b.emit(51.0, 9)
    assert (b.generated_tokens, b.anchor_s) == (10, 0.0)


def test_withheld_tokens_are_never_shown():
    b = ClientBuffer("a", 5.0, hidden_tokens=100)
    b.emit(0.0, 100)
    assert b.anchor_s is None
    b.emit(1.0, 110)
    assert b.slack_s(1.0) == 2.0  # 110 - 100 = 10 visible tokens at 5 tok/s


def test_a_report_re_anchors_consumption():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 100)
    b.report(10.0, 20)  # modelled 50; the client says 20
    assert b.consumed_tokens(10.0) == 20.0
    assert b.consumed_tokens(12.0) == 30.0
    b.report(12.0, 60)  # 20 tok/s of a reader of 5: 5 + 0.7 x (10 - 5) = 8.5 are believed
    assert b.slack_s(12.0) == pytest.approx(40 / 8.5)


def test_a_report_is_never_believed_above_what_was_generated_nor_below_an_earlier_report():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 100)
    b.report(1.0, 10**12)
    assert b.consumed_tokens(1.0) == 100.0
    b.report(2.0, 3)
    assert b.consumed_tokens(2.0) == 100.0
    b.report(3.0, -5)
    assert b.consumed_tokens(3.0) == 100.0


def test_a_reader_who_reports_that_all_is_read_has_been_dry_for_as_long_as_before():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 10)  # dry at 2 s
    b.report(9.0, 10)
    assert b.lead_s(10.0) == -8.0
    b.report(9.5, 3)  # never back
    assert b.lead_s(10.0) == -8.0
    b.emit(10.0, 15)
    assert b.lead_s(10.0) == 1.0


def test_a_reader_who_is_quicker_than_believed_is_dry_from_its_report_on():
    b = ClientBuffer("a", 5.0)
    b.emit(0.0, 100)
    b.report(4.0, 100)  # the model said 20
    assert b.lead_s(6.0) == -2.0


def test_a_report_before_the_first_token_is_ignored():
    b = ClientBuffer("a", 5.0)
    b.report(1.0, 50)
    b.emit(2.0, 10)
    assert b.consumed_tokens(2.0) == 0.0


def test_a_clock_that_stands_still_or_goes_back_reads_nothing():
    b = ClientBuffer("a", 5.0)
    b.emit(10.0, 10)
    assert b.consumed_tokens(9.0) == 0.0


def test_a_run_is_taken_at_once_only_where_the_reader_cannot_have_run_dry():
    b = ClientBuffer("a", 5.0)
    assert not b.emit_run(1.0, 10)  # no anchor yet
    b.emit(0.0, 10)
    assert not b.emit_run(2.0, 20)  # 5 x 2 = all 10 read: dry exactly at 2 s
    assert b.generated_tokens == 10
    assert b.emit_run(1.9, 20)
    assert (b.generated_tokens, b.anchor_s, b.anchor_tokens) == (20, 0.0, 0.0)


@given(st.floats(0.1, 1000.0), TIMES)
def test_the_model_equals_a_fluid_integrated_event_by_event(rate, steps):
    b, now_s, generated, consumed, started = ClientBuffer("a", rate), 0.0, 0, 0.0, False
    for wait_s, tokens in steps:
        now_s += wait_s
        if started:
            consumed = min(generated, consumed + rate * wait_s)
        generated += tokens
        started = started or tokens > 0
        b.emit(now_s, generated)
        assert b.consumed_tokens(now_s) == pytest.approx(consumed, rel=1e-6, abs=1e-6)
        assert b.slack_s(now_s) == pytest.approx((generated - consumed) / rate, rel=1e-6, abs=1e-6)


@given(st.floats(0.1, 1000.0), TIMES, st.lists(st.integers(-10, 3000), max_size=60))
def test_consumption_stays_between_nothing_and_everything_whatever_a_client_reports(rate, steps, reports):
    b, now_s, generated = ClientBuffer("a", rate), 0.0, 0
    said = 0.0
    for i, (wait_s, tokens) in enumerate(steps):
        now_s += wait_s
        generated += tokens
        b.emit(now_s, generated)
        if i < len(reports):
            b.report(now_s, reports[i])
            said = max(said, min(reports[i], generated)) if generated else 0.0
        consumed = b.consumed_tokens(now_s)
        assert said - 1e-6 <= consumed <= generated or (generated == 0 and consumed == 0.0)
