"""What is told of consumption, and when, on a clock that the test holds."""

from __future__ import annotations

import math

from tokenflow_sgl.client.reports import MAX_ITEMS, Count, Reports, bodies_of, key_of

A, B = ("a", "token-a"), ("b", "token-b")


def test_the_first_count_is_told_at_once_and_the_next_ones_half_a_second_later_together() -> None:
    reports = Reports()
    reports.open(A)
    reports.open(B)
    assert reports.next_s() == math.inf
    reports.took(A, 0, 1, 10.0)
    assert reports.next_s() == 10.0
    assert reports.take(10.0) == [Count(A, 0, 1)]
    reports.took(A, 0, 2, 10.125)
    reports.took(B, 0, 1, 10.25)
    reports.took(A, 0, 3, 10.375)
    assert reports.next_s() == 11.0, "not before something is taken half a second later, or a whole one is over"
    reports.took(A, 0, 4, 10.5)
    assert reports.next_s() == 10.5
    assert reports.take(10.5) == [Count(A, 0, 4), Count(B, 0, 1)]


def test_the_last_count_of_a_loop_that_stops_is_told_a_second_after_the_one_before_and_then_nothing() -> None:
    reports = Reports()
    reports.open(A)
    reports.took(A, 0, 1, 0.0)
    reports.take(0.0)
    reports.took(A, 0, 2, 0.125)
    assert reports.next_s() == 1.0
    assert reports.take(1.0) == [Count(A, 0, 2)]
    assert reports.next_s() == math.inf


def test_choices_are_told_of_one_by_one() -> None:
    reports = Reports()
    reports.open(A)
    reports.took(A, 0, 3, 0.0)
    reports.took(A, 1, 5, 0.0)
    assert reports.take(0.0) == [Count(A, 0, 3), Count(A, 1, 5)]


def test_of_a_stream_that_ended_nothing_more_is_told() -> None:
    reports = Reports()
    reports.open(A)
    reports.took(A, 0, 3, 0.0)
    reports.close(A)
    reports.took(A, 0, 4, 0.0)
    assert reports.next_s() == math.inf and reports.open_streams == 0


def test_more_streams_than_a_request_may_hold_take_several() -> None:
    bodies = bodies_of([Count((f"{i}", "t"), 0, i) for i in range(MAX_ITEMS + 1)])
    assert [len(body["acks"]) for body in bodies] == [MAX_ITEMS, 1]
    assert bodies[1]["acks"] == [{"id": "1000", "token": "t", "consumed_tokens": 1000, "index": 0}]


def test_a_server_without_the_two_headers_is_told_nothing() -> None:
    assert key_of({}) is None and key_of({"x-tokenflow-request-id": "a"}) is None
    assert key_of({"x-tokenflow-request-id": "a", "x-tokenflow-ack-token": "t"}) == ("a", "t")
