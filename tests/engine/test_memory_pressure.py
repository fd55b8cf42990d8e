"""Memory is short: newcomers come in at once, nobody bounces, starves or waits for ever (reports B03, B07, B09, B32).

The clock is fake: a step takes 20 ms, prefill runs at 2000 tokens a second. Seconds below are seconds of that clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.cases import pressure
from support.reports import (
    assert_balanced,
    assert_replays,
    assert_same_answer,
    assert_served,
    steps_run_between_return_and_park,
    ttft_s,
)
from tokenflow_sgl.core.qoe import display_times

Results = Callable[[str], dict[str, Any]]


def on(config: str) -> Any:
    """The test runs on what this engine configuration saw."""
    return pytest.mark.parametrize("config", [pytest.param(config, marks=pytest.mark.engine("support.cases", config))])


STEP_S = pressure.STEP_S


@on("pool-1024")
@pytest.mark.parametrize(("at_token", "most_parks"), [(60, 2), (200, 2)])
def test_newcomer_gets_memory_from_readers_with_surplus(
    results: Results, at_token: int, most_parks: int, record_property: Callable[[str, object], None]
) -> None:
    """B03. 400 tokens of prefill in two chunks take 0.2 s and two steps; two decode steps are allowed beside."""
    report = results("newcomer_against_memory")[f"{at_token} tokens in, 5 tok/s"]
    waited_s = ttft_s(report["streams"]["new"])
    record_property("newcomer_ttft_s", waited_s)
    print(f"newcomer's first token after {waited_s:.2f} s; under fcfs, 200 tokens in: {fcfs_wait_s(results):.2f} s")
    assert waited_s <= 400 / pressure.PREFILL_TOK_S + (2 + 2) * STEP_S + 1e-6
    assert max(report["parks"].values()) <= most_parks
    assert_served(report, results("newcomer_against_memory")["solo"])
    assert_replays(report)


@on("pool-1024")
def test_memory_was_really_short_when_the_newcomer_came_late(results: Results) -> None:
    """Two streams of 380 tokens in 1024: 264 are left for a prompt of 400."""
    report = results("newcomer_against_memory")["200 tokens in, 5 tok/s"]
    assert report["counters"]["parks"] == report["counters"]["returns"] >= 1
    assert fcfs_wait_s(results) > 1.0


def fcfs_wait_s(results: Results) -> float:
    return ttft_s(results("stock_newcomer")["streams"]["new"])


@on("pool-1024")
def test_nobody_without_surplus_is_parked_and_the_newcomer_waits(results: Results) -> None:
    report = results("newcomer_against_memory")["200 tokens in, 1000 tok/s"]
    assert report["counters"]["parks"] == 0
    assert report["streams"]["new"]["times_s"][0] >= min(report["streams"][f"low{i}"]["times_s"][-1] for i in range(2))
    assert_served(report, results("newcomer_against_memory")["solo"])


@on("pool-512")
def test_a_burst_makes_nobody_bounce(results: Results) -> None:
    """B07."""
    report = results("ping_pong")
    burst, calm = report["burst"], report["no burst"]
    print(f"steps: burst {burst['steps']}, no burst {calm['steps']}, stock {report['stock']['steps']}")
    assert_served(burst, report["solo"])
    assert_served(calm, report["solo"])
    assert burst["counters"]["parks"] > 0
    assert max(burst["parks"].values()) <= 8
    assert min(steps_run_between_return_and_park(burst), default=16) >= 16
    assert burst["steps"] <= 1.6 * calm["steps"]
    assert_replays(burst)


@on("pool-512")
def test_a_stream_returns_only_where_its_context_fits_with_room_to_grow(results: Results) -> None:
    rooms = results("ping_pong")["rooms"]
    assert rooms
    for room in rooms:
        assert room["needs"] + 16 <= room["free"], room


@on("pool-512")
@pytest.mark.parametrize("prompt_tokens", ["600", "512", "511", "498", "497", "496", "495"])
def test_a_prompt_that_can_never_fit_is_refused_and_the_next_is_served(results: Results, prompt_tokens: str) -> None:
    """B09 a, d. Stock accepts 496 to 505 tokens here, admits them never, and nobody behind them."""
    report = results("too_long")[prompt_tokens]
    big = report["streams"]["big"]["finish"]
    assert (big["type"], big["status_code"]) == ("abort", 400)
    assert "exceeds the maximum allowed length (495 tokens)" in big["message"]
    assert report["streams"]["next"]["completion_tokens"] == 8
    assert_balanced(report)


@on("pool-512")
def test_the_longest_prompt_that_is_accepted_is_served(results: Results) -> None:
    for prompt_tokens in ("480", "494"):
        report = results("too_long")[prompt_tokens]
        assert report["streams"]["big"]["finish"]["type"] == "length"
        assert_balanced(report)


@on("pool-512")
@pytest.mark.parametrize("beside", ["alone", "after small", "before small"])
def test_an_answer_that_outgrows_the_pool_ends_by_length(results: Results, beside: str) -> None:
    """B09 b, c. Upstream cuts max_new_tokens to what the empty pool can hold: 512 - 464 - 16 - 1 = 31."""
    report = results("outgrows_the_pool")
    assert_served(report[beside], report["solo"])
    assert_same_answer(report[beside]["streams"]["big"], report["stock alone"]["streams"]["big"])
    assert report[beside]["streams"]["big"]["completion_tokens"] == 31
    assert max(report[beside]["parks"].values()) <= 8


@on("pool-512")
def test_streams_parked_for_want_of_memory_say_what_they_say_alone(results: Results) -> None:
    report = results("identity_in_a_small_pool")
    assert report["parked"]["counters"]["parks"] >= 4
    assert_served(report["parked"], report["solo"])
    assert_replays(report["parked"])


@on("pool-2048")
def test_a_big_prompt_at_the_head_does_not_block_small_ones(results: Results) -> None:
    """B32 a."""
    report = results("big_one_at_the_head")
    waits = {rid: ttft_s(s) for rid, s in report["streams"].items() if rid.startswith(("small", "large"))}
    large_s = waits.pop("large")
    print(f"small: {max(waits.values()):.2f} s at most; large: {large_s:.2f} s")
    assert max(waits.values()) <= 1.0
    assert large_s <= 20.0
    assert_served(report, {})
    assert_replays(report)


@on("overlap")
@pytest.mark.parametrize("prefill", ["2000 tok/s", "1000 tok/s"])
def test_no_reader_runs_dry_beside_a_long_prefill(results: Results, prefill: str) -> None:
    """B32 b. At 1000 tok/s the prefill alone takes longer than the three seconds that readers have in hand."""
    report = results("long_prefill_beside_readers")[prefill]
    for i in range(6):
        shown = display_times(report["streams"][f"reader{i}"]["times_s"], 10.0)
        gaps = [b - a for a, b in zip(shown, shown[1:], strict=False)]
        # d_j > d_{j-1} + 1/R: the reader had nothing left to read.
        assert max(gaps) <= 1 / 10.0 + 1e-6, f"reader{i}: {max(gaps):.2f} s"
    print(f"long prompt's first token after {ttft_s(report['streams']['long']):.2f} s")
    assert_served(report, {})
    assert_replays(report)
