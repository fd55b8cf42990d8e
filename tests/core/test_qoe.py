"""Measures against numbers worked out by hand. R = 10 tok/s unless said otherwise, so a token is due every 0.1 s."""

from __future__ import annotations

import math
import random

import pytest

from tokenflow_sgl.core import qoe
from tokenflow_sgl.core.qoe import StreamRecord

RESULT_KEYS = [
    *("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tbt_p99_s", "stall_count", "stall_total_s", "stall_longest_s"),
    *("effective_goodput_tok_s", "effective_throughput_tok_s", "raw_throughput_tok_s", "qoe_mean"),
    *("completion_mean_s", "completion_p99_s", "requests", "failed", "parks", "resumes"),
]


def stream(arrivals, *, rate=10.0, sent=0.0, wanted=None, error=None, rid="a", group="g"):
    return StreamRecord(rid, group, sent, tuple(arrivals), rate, len(arrivals) if wanted is None else wanted, error)


def near(*values):
    return pytest.approx(values if len(values) > 1 else values[0], abs=1e-9)


def test_a_reader_shows_tokens_no_faster_than_its_rate_and_no_earlier_than_they_come():
    # 0.0, 0.01 and 0.02 wait for their turn (0.0, 0.1, 0.2); 0.9 comes late and is shown at once; 0.91 waits till 1.0.
    assert qoe.display_times((0.0, 0.01, 0.02, 0.9, 0.91), 10.0) == near(0.0, 0.1, 0.2, 0.9, 1.0)


def test_a_program_without_a_pace_shows_tokens_as_they_come():
    assert qoe.display_times((0.5, 0.5, 0.7), math.inf) == (0.5, 0.5, 0.7)


def test_ttft_counts_from_sending():
    assert qoe.ttft_s(stream((3.25, 3.3), sent=3.0)) == near(0.25)


@pytest.mark.parametrize(
    "broken",
    [stream((), wanted=3), stream((0.1, 0.2), wanted=3), stream((0.1, 0.2), wanted=1), stream((0.1,), error="cut")],
    ids=["no token", "short", "too long", "error"],
)
def test_a_failed_or_short_or_overlong_stream_has_infinite_ttft_and_completion_and_no_quality(broken):
    assert broken.failed
    assert qoe.ttft_s(broken) == math.inf
    assert qoe.completion_s(broken) == math.inf
    assert qoe.andes_qoe(broken) == 0.0
    assert qoe.good_tokens(broken) == 0
    assert qoe.effective_throughput_tok_s([broken]) == 0.0


def test_tbt_is_what_the_reader_sees_and_not_what_the_server_emits():
    # A burst of three at 0.2 s: the emitted gaps are 0.2, 0, 0; the reader sees 0.2, 0.1, 0.1.
    assert qoe.tbt_s(stream((0.0, 0.2, 0.2, 0.2))) == near(0.2, 0.1, 0.1)


def test_a_stall_is_a_gap_of_more_than_the_pace_and_250_ms_and_is_counted_less_the_pace():
    # Gaps seen: 0.35 (exactly the limit: none), 0.36 (stall of 0.26), 1.1 (stall of 1.0).
    found = qoe.stalls(stream((0.0, 0.35, 0.71, 1.81)))
    assert (found.count, found.total_s, found.longest_s) == (2, near(1.26), near(1.0))


def test_a_buffer_hides_a_pause_of_the_server():
    # 11 tokens at once last from 0.0 to 1.0 s, the next is due at 1.1 s: a pause until 1.1 s is not seen at all.
    assert qoe.stalls(stream([0.0] * 11 + [1.1])).count == 0
    # Until 1.5 s the reader waits 0.4 s longer than it should.
    assert qoe.stalls(stream([0.0] * 11 + [1.5])) == qoe.Stalls(1, near(0.4), near(0.4))


def test_stall_intervals_begin_when_the_token_was_due():
    assert qoe.stall_intervals(stream((0.0, 1.0))) == ((near(0.1), near(1.0)),)


def test_rebuffer_time_has_no_grace():
    # Gaps 0.15 and 0.1: 50 ms with an empty buffer, no stall.
    assert qoe.rebuffer_s(stream((0.0, 0.15, 0.25))) == near(0.05)


def test_the_buffer_holds_what_came_and_is_not_shown_yet():
    # Four at 0.0: shown at 0.0, 0.1, 0.2, 0.3.
    assert qoe.buffer_tokens(stream([0.0] * 4), (-0.1, 0.0, 0.15, 0.31)) == (0, 3, 2, 0)


def test_the_buffer_at_production_leaves_out_the_token_itself():
    # The fifth comes at 0.15 s, when tokens 3 and 4 are still unread.
    assert qoe.buffers_at_production(stream([0.0] * 4 + [0.15])) == (0, 0, 1, 2, 2)


def test_raw_throughput_is_all_delivered_tokens_from_the_first_sending_to_the_last_token():
    # 3 + 2 tokens, the cut stream's too, from 1.0 s to 3.5 s.
    records = [stream((1.5, 2.0, 3.5), sent=1.0), stream((2.0, 2.1), sent=1.2, wanted=9, error="cut")]
    assert qoe.raw_throughput_tok_s(records) == near(5 / 2.5)


def test_goodput_counts_tokens_in_time_of_requests_in_time():
    # R = 10: the limit is max(0.2, 0.15) = 0.2. Gaps 0.2 (counts), 0.21 (not), 0.1 (counts), and the first: 3 of 4.
    in_time = stream((0.5, 0.7, 0.91, 1.01))
    assert qoe.good_tokens(in_time) == 3
    # TTFT 0.6 s: nothing counts, however smooth.
    late = stream((0.6, 0.7, 0.8))
    assert qoe.good_tokens(late) == 0
    # Span 0 to 1.01 s.
    assert qoe.effective_goodput_tok_s([in_time, late]) == near(3 / 1.01)


def test_goodput_gives_a_slow_reader_its_pace_and_50_ms():
    # R = 2: limit 0.55. A reader who sees gaps of 0.55 and 0.56 loses the second.
    assert qoe.good_tokens(stream((0.0, 0.55, 1.11), rate=2.0)) == 2


@pytest.mark.parametrize(("buffered", "weight"), [(0, 1.0), (10, 1.0), (12, 0.8), (15, 0.5), (20, 0.0), (90, 0.0)])
def test_a_token_is_worth_less_the_more_is_buffered(buffered, weight):
    # Answer of 100: full credit up to 10, none from 20 on, linear between.
    assert qoe.effective_weight(buffered, 100) == near(weight)


def test_effective_throughput_weighs_each_token_by_the_buffer_it_met():
    # 10 tokens at once, answer of 10: buffers 0, 0, 1, 2, .. 8. Limits are 1 and 2: weights 1, 1, 1, 0, .. 0.
    # One second from sending to the last token.
    assert qoe.effective_throughput_tok_s([stream([1.0] * 10)]) == near(3.0)


def test_andes_gives_1_to_a_stream_on_time_and_nothing_for_early_tokens():
    on_time = [1.0 + 0.1 * index for index in range(20)]
    assert qoe.andes_qoe(stream(on_time)) == near(1.0)
    assert qoe.andes_qoe(stream([0.0] * 20)) == near(1.0)


def test_andes_takes_the_delayed_area_from_the_whole():
    # Two tokens at 2.0 and 2.1 with the target 1.0: S_delay = 1.0 + 1.0; the actual curve ends at 2.2, its area is
    # 0.2 + 0.1 = 0.3. QoE = 1 - 2.0 / 2.3.
    assert qoe.andes_qoe(stream((2.0, 2.1))) == near(1 - 2.0 / 2.3)


def test_andes_takes_the_target_of_a_long_prompt():
    assert qoe.andes_qoe(stream((2.0, 2.1)), ttft_target_s=2.0) == near(1.0)


def test_andes_needs_a_finite_rate():
    with pytest.raises(ValueError, match="read_rate_tok_s is inf"):
        qoe.andes_qoe(stream((1.0,), rate=math.inf))


def test_the_papers_qos_is_value_less_waiting_and_rebuffering_per_second():
    # Answer of 10 at once at 1.0 s: tau = 1; buffers 0, 0, 1, 2, 3, .. 8; alpha 0.5: 1, 1, 1, 0.5, 0, .. -> 3.5.
    # TTFT 1.0 s at weight 2; no rebuffering. One second in all.
    record = stream([1.0] * 10)
    assert qoe.paper_qos([record], alpha=0.5, ttft_weight=2.0, rebuffer_weight=3.0) == near(1.5)
    # Tokens at 0.0 and 1.1 s: value 2, the reader's buffer is empty for 1.0 s; 1.1 s in all.
    gap = stream((0.0, 1.1))
    assert qoe.paper_qos([gap], alpha=0.5, ttft_weight=2.0, rebuffer_weight=0.5) == near(1.5 / 1.1)


def test_the_papers_qos_has_no_value_once_a_request_failed():
    failed = stream((), wanted=3)
    assert qoe.paper_qos([failed, stream((1.0,))], alpha=1, ttft_weight=1, rebuffer_weight=1) == -math.inf


def test_percentiles_are_nearest_rank():
    values = range(1, 101)
    assert [qoe.percentile(values, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    # Of 24 values the 99th percentile is the largest: ceil(23.76) = 24.
    assert qoe.percentile(range(24), 99) == 23
    assert qoe.percentile([3.0, 1.0, math.inf], 50) == 3.0


@pytest.mark.parametrize("percent", [0, -1, 101, math.nan])
def test_a_percentile_outside_0_to_100_is_refused(percent):
    with pytest.raises(ValueError, match="percent"):
        qoe.percentile([1.0], percent)


def test_a_summary_has_exactly_the_keys_of_the_shared_schema():
    assert list(qoe.summarize([stream((0.1, 0.2))], parks=3, resumes=2)) == RESULT_KEYS


def test_a_failed_request_shows_in_the_mean_and_is_never_averaged_away():
    rows = [stream((0.1, 0.2), rid="a"), stream((0.3, 0.4), rid="b"), stream((), wanted=2, error="503", rid="c")]
    found = qoe.summarize(rows)
    assert (found["requests"], found["failed"]) == (3, 1)
    assert found["ttft_mean_s"] == math.inf
    assert found["ttft_p50_s"] == near(0.3)
    assert found["ttft_p99_s"] == math.inf
    assert found["completion_p99_s"] == math.inf


def test_a_summary_of_two_streams_by_hand():
    # a: sent 0.0, tokens 0.2, 0.3, 1.0: TTFT 0.2; seen gaps 0.1, 0.7: one stall of 0.6; done after 1.0 s.
    # b: sent 1.0, tokens 1.4, 1.4: TTFT 0.4; seen gap 0.1; done after 0.4 s. Span 0.0 to 1.4 s.
    found = qoe.summarize([stream((0.2, 0.3, 1.0)), stream((1.4, 1.4), sent=1.0)])
    assert found["ttft_mean_s"] == near(0.3)
    assert found["tbt_p99_s"] == near(0.7)
    assert (found["stall_count"], found["stall_total_s"]) == (1, near(0.6))
    # a: first and second token; b: both.
    assert found["effective_goodput_tok_s"] == near(4 / 1.4)
    assert found["raw_throughput_tok_s"] == near(5 / 1.4)
    assert found["completion_mean_s"] == near(0.7)
    assert (found["parks"], found["resumes"]) == (None, None)


def test_a_run_in_which_nothing_was_delivered_has_throughput_zero():
    found = qoe.summarize([stream((), wanted=5, error="refused")])
    assert (found["raw_throughput_tok_s"], found["effective_goodput_tok_s"]) == (0.0, 0.0)
    assert found["tbt_p99_s"] is None


def test_no_records_are_no_summary():
    with pytest.raises(ValueError, match="at least one"):
        qoe.summarize([])


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ValueError, match="read_rate_tok_s"):
        stream((1.0,), rate=rate)


def test_times_that_go_backwards_are_refused():
    with pytest.raises(ValueError, match="backwards"):
        stream((1.0, 0.9))


def test_random_streams_keep_the_bounds():
    rnd = random.Random(7)
    for _ in range(200):
        now, arrivals = rnd.random(), []
        for _ in range(rnd.randint(1, 60)):
            now += rnd.choice((0.0, 0.02, 0.3, 2.0)) * rnd.random()
            arrivals.append(now)
        record = stream(arrivals, rate=rnd.choice((0.5, 3.5, 10.0)))
        shown = qoe.display_times(record.arrivals_s, record.read_rate_tok_s)
        assert all(later >= earlier for earlier, later in zip(record.arrivals_s, shown, strict=True))
        assert 0.0 <= qoe.andes_qoe(record) <= 1.0
        assert qoe.stalls(record).total_s <= qoe.rebuffer_s(record) + 1e-9
        assert min(qoe.buffer_tokens(record, arrivals)) >= 0
        assert qoe.effective_throughput_tok_s([record]) <= qoe.raw_throughput_tok_s([record]) + 1e-9
