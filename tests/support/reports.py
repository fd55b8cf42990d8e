"""What every report of support.play must satisfy, whatever the case."""

from __future__ import annotations

from typing import Any


def assert_balanced(report: dict[str, Any]) -> None:
    """Pool, rows, copies and books are back where they were."""
    idle = dict(report["idle"])
    assert idle.pop("idle")
    assert all(have == want for have, want in idle.values()), idle
    assert report["stuck"] == {}


def assert_same_answer(parked: dict[str, Any], solo: dict[str, Any]) -> None:
    """Ids, finish and usage of two runs of a request; every token was sent once and no event was empty."""
    for key in ("tokens", "finish", "completion_tokens", "prompt_tokens"):
        assert parked[key] == solo[key], key
    assert parked["completion_tokens"] == len(parked["tokens"])
    assert parked["cached_tokens"] <= parked["prompt_tokens"]
    assert set(parked["chunks"]) <= set(solo["chunks"])  # no event without a token, unless stock sends one too


def assert_replays(report: dict[str, Any]) -> None:
    steps, difference = report["replay"]
    assert steps > 0 and difference is None, difference


def assert_served(report: dict[str, Any], solo: dict[str, list[int]]) -> None:
    """Everybody ended at their limit with the tokens of their solo run, and nothing leaked."""
    assert_balanced(report)
    for rid, stream in report["streams"].items():
        assert stream["finish"]["type"] == "length", rid
        if rid in solo:
            assert stream["tokens"] == solo[rid], rid
        assert stream["completion_tokens"] == len(stream["tokens"])


def ttft_s(stream: dict[str, Any]) -> float:
    return stream["times_s"][0] - stream["sent_s"]


def steps_run_between_return_and_park(report: dict[str, Any]) -> list[int]:
    """Forward steps between each return of a stream and its next park."""
    returned: dict[str, int] = {}
    runs: list[int] = []
    for move in report["moves"]:
        if move["what"] == "return":
            returned[move["id"]] = move["step"]
        elif move["what"] == "park" and move["id"] in returned:
            runs.append(move["step"] - returned.pop(move["id"]))
    return runs
