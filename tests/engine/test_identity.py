"""Parked and returned streams say exactly what undisturbed ones say, and every token reaches its client once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support import identity

CONFIGS = list(identity.PAGE)
RUNS = ("forced", "policy")


@pytest.fixture(params=[pytest.param(c, marks=pytest.mark.engine("support.identity", c)) for c in CONFIGS])
def config(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def seen(program: Callable[[str, str], Any], config: str) -> dict[str, Any]:
    return program("support.identity", config)


@pytest.fixture(params=RUNS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_loop_is_the_one_the_case_is_named_for(seen: dict[str, Any], config: str) -> None:
    assert seen["overlap"] is config.startswith("overlap")


def test_undisturbed_runs_agree_with_each_other(seen: dict[str, Any]) -> None:
    """Else the comparisons below would say nothing."""
    r = seen
    exact = [i for i in range(12) if not (r["overlap"] and i in identity.PENALTIES)]
    for i in exact:
        assert r["base"]["streams"][i]["tokens"] == r["base_again"]["streams"][i]["tokens"], f"stream {i}"
    assert r["base"]["counters"]["parks"] == 0


def test_every_stream_is_parked_at_least_five_times(seen: dict[str, Any], kind: str) -> None:
    assert min(seen[kind]["parks"]) >= 5, seen[kind]["parks"]


def test_token_ids_equal_the_undisturbed_run(seen: dict[str, Any], kind: str) -> None:
    """Penalties in the overlap loop drift in stock itself, with no park at all: there only the counts are exact."""
    r = seen
    for i, (base, parked) in enumerate(zip(r["base"]["streams"], r[kind]["streams"], strict=True)):
        if r["overlap"] and i in identity.PENALTIES:
            assert len(parked["tokens"]) == len(base["tokens"]) == identity.TOKENS
        else:
            assert parked["tokens"] == base["tokens"], f"stream {i}: {identity.FEATURES[i]}"


def test_every_event_carries_a_token_as_in_the_undisturbed_run(seen: dict[str, Any], kind: str) -> None:
    """An empty event would be counted as a token by clients that count events. (One that may hold the beginning of a
    stop string is sent together with the next one, parked or not.)"""
    r = seen
    for i, (base, parked) in enumerate(zip(r["base"]["streams"], r[kind]["streams"], strict=True)):
        assert set(parked["chunk_sizes"]) <= set(base["chunk_sizes"]), f"stream {i}"
        assert 0 not in parked["chunk_sizes"], f"stream {i}"


def test_usage_counts_the_tokens_that_were_sent(seen: dict[str, Any], kind: str) -> None:
    for i, stream in enumerate(seen[kind]["streams"]):
        assert stream["completion_tokens"] == len(stream["tokens"]) <= identity.TOKENS, f"stream {i}"


def test_streams_end_for_the_same_reason(seen: dict[str, Any], kind: str) -> None:
    r = seen
    for i, (base, parked) in enumerate(zip(r["base"]["streams"], r[kind]["streams"], strict=True)):
        assert parked["finish"] == base["finish"], f"stream {i}"
    assert r["base"]["streams"][9]["finish"]["type"] == "stop", "no stream ended at its stop string"


def test_logprobs_belong_to_their_tokens(seen: dict[str, Any], kind: str) -> None:
    r = seen
    for i in (4, 5):
        base, parked = r["base"]["streams"][i], r[kind]["streams"][i]
        assert len(parked["logprobs"]) == len(parked["tokens"]) == identity.TOKENS
        assert [token for _, token in parked["logprobs"]] == parked["tokens"]
        gap = max(abs(a - b) for (a, _), (b, _) in zip(base["logprobs"], parked["logprobs"], strict=True))
        assert gap < 1e-4


def test_a_return_computes_at_most_one_interval_and_a_page_again(seen: dict[str, Any], config: str, kind: str) -> None:
    """The script looks at every stream once a step, so it may publish one token late. The policy has a limit a step,
    and a stream's turn may come some steps late; and while three transfers are on their way, which are made late here,
    a reader who has run dry is computed again at once. That is the exception."""
    late = {"forced": 1, "policy": 8}[kind]
    returns = sorted(seen[kind]["reprefills"])
    assert len(returns) >= 55  # 11 streams x 5 parks, and the one that stops at its string
    judged = returns if kind == "forced" else returns[: len(returns) * 4 // 5]
    assert judged[-1] <= identity.PUBLISH + identity.PAGE[config] + late, returns[-5:]


def test_some_returns_load_from_the_host(seen: dict[str, Any], kind: str) -> None:
    assert seen[kind]["counters"]["loaded_tokens"] > 0


def test_no_page_and_no_row_is_lost(seen: dict[str, Any], kind: str) -> None:
    r = seen[kind]
    assert (r["free_tokens"], r["free_rows"]) == (r["total_tokens"], r["total_rows"])
    assert r["counters"]["parks"] == r["counters"]["returns"] == sum(r["parks"])
