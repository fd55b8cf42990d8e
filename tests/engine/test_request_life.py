"""Aborts, upstream's own retractions, chunked prompts, a full queue, timeouts and shutdown, with streams parked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.cases import lifecycle, queueing
from support.reports import assert_balanced, assert_replays, assert_served

Results = Callable[[str], dict[str, Any]]


def on(*configs: str) -> Any:
    """The test runs on what each of these engine configurations saw."""
    params = [pytest.param(c, marks=pytest.mark.engine("support.cases", c)) for c in configs]
    return pytest.mark.parametrize("config", params)


both_loops = on("overlap", "normal")


@both_loops
@pytest.mark.parametrize("state", ["running", "parked"])
def test_abort_ends_the_named_request_and_no_other(results: Results, state: str) -> None:
    """B13 a. Stock ends u10 and u100 too: it matches by the beginning of the id."""
    report, solo = results("abort_by_exact_id")[state], results("abort_by_exact_id")["solo"]
    streams = report["streams"]
    assert streams["u1"]["finish"]["type"] == "abort"
    assert streams["u1"]["tokens"] == solo["u1"][: len(streams["u1"]["tokens"])]
    assert 15 <= len(streams["u1"]["tokens"]) < 60
    for rid in lifecycle.NAMES[1:]:
        assert streams[rid]["tokens"] == solo[rid] and streams[rid]["finish"]["type"] == "length", rid
    assert report["counters"]["aborts"] == 1
    assert report["parks"]["u10"] == 1
    assert_balanced(report)


@both_loops
def test_abort_all_ends_running_parked_chunked_and_waiting_requests(results: Results) -> None:
    found = results("abort_all")
    assert found["parked"] == [2]
    assert {s["finish"]["type"] for s in found["report"]["streams"].values()} == {"abort"}
    assert all(len(s["tokens"]) < 200 for s in found["report"]["streams"].values())
    assert_balanced(found["report"])
    assert_served(found["after"], {})


@on("overlap", "normal", "mixed")
def test_parks_and_a_chunked_prompt_do_not_disturb_each_other(results: Results) -> None:
    found = results("parks_during_a_chunked_prompt")
    assert_served(found["report"], found["solo"])
    assert min(found["report"]["parks"].values()) >= 1
    assert sum(found["report"]["parks"].values()) == 4 * 3 + 1
    assert_replays(found["report"])


@on("overlap", "normal", "mixed")
@pytest.mark.parametrize("policy", ["scripted", "policy"])
def test_upstream_retractions_beside_ours_change_no_answer(results: Results, policy: str) -> None:
    """A retracted stream forgets its unpublished KV and comes back through the same queue."""
    found = results("upstream_retractions_beside_ours")
    report = found[policy]
    assert min(found["retracted"]) >= 5
    for rid, stream in report["streams"].items():
        assert stream["tokens"] == found["solo"][rid], rid
        assert stream["completion_tokens"] == len(stream["tokens"])
        assert 0 not in stream["chunks"]
        if stream["logprobs"]:
            assert [token for _, token in stream["logprobs"]] == stream["tokens"]
    if policy == "scripted":
        assert report["counters"]["parks"] >= 6
    assert_balanced(report)
    assert_replays(report)


@both_loops
def test_a_parked_stream_outlives_the_waiting_timeout(results: Results) -> None:
    """A request that never started is ended by it: the timeout was really over."""
    found = results("long_wait")
    streams = found["report"]["streams"]
    assert streams["held"]["finish"]["type"] == "abort" and streams["held"]["finish"]["status_code"] == 503
    for rid, tokens in found["solo"].items():
        assert streams[rid]["tokens"] == tokens and streams[rid]["finish"]["type"] == "length", rid
    assert found["report"]["parks"]["a"] == found["report"]["parks"]["b"] == 1
    assert_balanced(found["report"])


@both_loops
def test_shutdown_ends_the_loop_while_streams_are_parked(results: Results) -> None:
    assert results("shutdown_with_parked_streams")["iterations"] <= 3


# ---- B01: the queue limit


def _refused(report: dict[str, Any]) -> list[str]:
    return [rid for rid, s in report["streams"].items() if s["finish"]["type"] == "abort"]


@on("queue")
@pytest.mark.parametrize("case", ["full_queue_with_forced_parks", "full_queue_under_the_policy"])
def test_a_full_queue_refuses_only_who_has_not_started(results: Results, case: str) -> None:
    found = results(case)
    report = found["report"]
    refused = _refused(report)
    assert refused, "the queue was never full: the case proves nothing"
    for rid in refused:
        stream = report["streams"][rid]
        assert stream["tokens"] == [] and stream["finish"]["status_code"] == 503, rid
    assert not [rid for rid in refused if rid.startswith("l")]
    for rid, tokens in found["solo"].items():
        assert report["streams"][rid]["tokens"] == tokens, rid
    assert found["longest_queue"] <= queueing.QUEUE_LIMIT + queueing.MAX_RUNNING
    assert_balanced(report)


@on("queue")
def test_forced_parks_reached_their_cap(results: Results) -> None:
    parks = results("full_queue_with_forced_parks")["report"]["parks"]
    assert [parks[f"l{i}"] for i in range(queueing.MAX_RUNNING)] == [queueing.CAP] * queueing.MAX_RUNNING


@on("queue")
def test_a_stream_parked_as_often_as_allowed_is_pinned(results: Results) -> None:
    """The same work without a cap parks some stream more often."""
    found = results("full_queue_under_the_policy")
    assert max(found["report"]["parks"].values()) == queueing.POLICY_CAP < max(found["uncapped"].values())


# ---- priorities


@on("priority")
def test_the_clients_priority_counts_inside_its_class(results: Results) -> None:
    found = results("priority_inside_its_class")
    streams = found["report"]["streams"]
    first_s = {rid: s["times_s"][0] for rid, s in streams.items()}
    assert max(first_s[f"high{i}"] for i in range(3)) <= min(first_s[f"low{i}"] for i in range(3)), first_s
    assert found["report"]["counters"]["parks"] > 0
    assert_served(found["report"], found["solo"])


@on("priority")
def test_a_higher_priority_never_ends_a_started_stream(results: Results) -> None:
    """Stock's full queue aborts the lowest priority in it, and the parked streams are the lowest."""
    found = results("higher_priority_meets_a_full_queue")
    assert _refused(found["report"]) == ["held0"]
    for rid, tokens in found["solo"].items():
        assert found["report"]["streams"][rid]["tokens"] == tokens, rid
    assert_balanced(found["report"])


@on("overlap", "normal")
def test_an_idle_loop_decides_nothing_and_the_first_request_after_it_gets_the_time_it_came(results: Results) -> None:
    report = results("idle_spell")
    # What the last request's end came to is still told.
    assert report["idle_steps"] <= 3
    assert [t["what"] for t in report["told"]] == ["admit", "finish"]
    assert all(t["at_s"] > report["ended_s"] for t in report["told"]), report["told"]
