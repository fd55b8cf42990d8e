"""Copies between the tiers in a real engine: late, out of order, lost, failing, on pages that others want.

Field reports B15, B19, B21, B22 (b), B23 and B25; what each expects is said at its test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine import REPO
from support.reports import assert_balanced, assert_served

Results = Callable[[str], dict[str, Any]]


def engines(*names: str) -> pytest.MarkDecorator:
    marked = [pytest.param(name, marks=pytest.mark.engine("support.cases", name)) for name in names]
    return pytest.mark.parametrize("config", marked)


# ---- B15


@engines("copies-tight")
def test_completions_are_collected_while_nothing_but_decode_happens(results: Results) -> None:
    """Four streams of 340 tokens each in a pool of 1440: what a copy holds back is needed. (a) No acknowledgement waits
    longer than three steps. (c) Nobody is retracted."""
    found = results("collected_while_decoding")
    assert found["seen"]["transfers"] >= 15 and found["seen"]["most_open"] >= 2, "no copy was ever open"
    assert found["seen"]["longest_after_end"] <= 3
    assert set(found["report"]["parks"].values()) == {0}
    assert not [m for m in found["report"]["moves"] if m["what"] in ("park", "return")]
    assert_served(found["report"], found["solo"])


@engines("copies-16")
def test_an_idle_server_collects_what_ends(results: Results) -> None:
    """(b) Copies that stood still while the last stream ended are collected without any request."""
    found = results("collected_while_idle")
    assert found["open_while_frozen"] >= 3
    assert found["iterations_after"] <= 3
    idle = dict(found["idle"])
    assert idle.pop("idle")
    assert all(have == want for have, want in idle.values()), idle


# ---- B19


@engines("copies-16", "copies-1", "copies-64")
def test_what_was_parked_is_what_comes_back_however_the_copies_run(results: Results) -> None:
    """300 parks over ten streams. Copies are late and in random page order, freed pages are overwritten at once; what
    parked is pushed off the device, and the host tier holds half of them. Every page that comes back from a cache
    is the one that left, and a return while a store is open is nothing special."""
    found = results("reused_while_copied")
    report, sums = found["report"], found["sums"]
    assert report["counters"]["parks"] == sums["returns"] == 300
    assert sums["different"] == []
    assert sums["lost"] == [], "the full host tier gave away the only copy of a parked stream"
    assert sums["pages"] >= 300
    assert report["counters"]["loads"] >= 30
    assert found["open_at_return"] >= 1
    assert report["counters"]["loads_failed"] == report["counters"]["stores_failed"] == 0
    assert_served(report, found["solo"])


# ---- B21


@engines("copies-16", "copies-1", "copies-64")
def test_whole_pages_are_copied_and_the_rest_is_computed_again(results: Results) -> None:
    """Contexts around page ends; a host tier with one page to spare, none, and one too few."""
    found = results("whole_pages")
    page = found["page"]
    for run in found["runs"]:
        where = f"context {run['context']}, host pages {run['whole'] + run['spare']}"
        assert run["tokens"] == run["solo"], where
        assert run["parks"] == 1, where
        assert run["stored"] % page == 0 and run["stored"] <= max(1, run["whole"] + run["spare"]) * page, where
        assert run["sums"]["different"] == [], where
        idle = dict(run["idle"])
        assert idle.pop("idle") and all(have == want for have, want in idle.values()), (where, idle)
    roomy = [run for run in found["runs"] if run["spare"] == 1 and run["whole"] > 1]
    # All whole pages below the newest token's, whose KV is written by the step that reads it.
    assert all(run["sums"]["pages"] >= (run["context"] - 2) // page - 1 for run in roomy)
    assert page == 64 or any(run["sums"]["pages"] > 1 for run in roomy)


# ---- B22 (b); (a) is scripts/soak, (c) a start that is refused (tests/e2e)


@engines("copies-16", "stock-overlap")
def test_host_memory_that_cannot_be_pinned_is_used_as_it_is_with_one_warning(results: Results) -> None:
    """No process may lock more than 64 KiB here, and there is no CUDA driver."""
    (warning,) = results("engine")["host_memory_warnings"]
    assert "pageable" in warning


# ---- B23


@engines("copies-16", "copies-1")
@pytest.mark.parametrize("how", ["first", "middle", "last", "all", "corrupt"])
def test_a_load_that_fails_costs_its_own_stream_one_recompute(results: Results, how: str) -> None:
    found = results("failed_load")
    report = found["runs"][how]["report"]
    counters = report["counters"]
    assert counters["loads_failed"] == counters["loads_given_up"] == 1
    assert counters["parks"] == counters["returns"] == 2
    # The second return finds the pages made good: one load failed, the other loaded all there was.
    assert counters["loads"] == 2 and counters["loaded_tokens"] > 100
    assert found["runs"][how]["trust"]
    assert_served(report, found["solo"])
    # Nobody else noticed: the other stream was given its tokens one by one, as alone.
    assert set(report["streams"]["b"]["chunks"]) == {1}


@engines("copies-16")
def test_three_failures_in_a_row_degrade_the_tier_and_everybody_is_served(results: Results) -> None:
    found = results("degraded")
    counters = found["report"]["counters"]
    assert counters["loads_failed"] >= 3
    assert counters["loads"] < counters["parks"], "loads were tried on and on"
    assert not found["tier"]["ok"]
    assert found["degraded_states"] >= 1, "no state told of it"
    assert counters["parks"] == counters["returns"] == 16
    assert_served(found["report"], found["solo"])


# ---- deadlines: a completion that never comes


@engines("copies-16")
@pytest.mark.parametrize("case", ["lost_store", "lost_load"])
def test_a_lost_completion_is_given_up_and_nobody_waits_on(results: Results, case: str) -> None:
    found = results(case)
    assert found["told"] == 1, "nothing was lost"
    assert found["counters"]["copies_overdue"] >= 1
    assert found["tokens"] == found["solo"]
    assert not found["idle_before_it_was_told"], "its pages were anybody's while it could still write them"
    idle = dict(found["idle"])
    assert idle.pop("idle")
    assert all(have == want for have, want in idle.values()), idle
    if case == "lost_load":
        moves = {(m["what"], m["id"]): m["step"] for m in found["moves"]}
        # 2 s of 20 ms steps, and one to notice.
        assert 95 <= moves["recompute", "s0"] - moves["load", "s0"] <= 105


@engines("copies-16")
def test_a_stream_that_is_aborted_while_it_loads_leaves_nothing_behind(results: Results) -> None:
    """Its pages are nobody's until the copy ends: upstream's check of the idle pool must not take them for lost."""
    found = results("aborted_while_loading")
    assert found["loading"] == 1
    idle = dict(found["idle"])
    assert idle.pop("idle")
    assert all(have == want for have, want in idle.values()), idle


@engines("copies-tight")
def test_a_host_tier_that_was_full_once_does_not_end_publishing(results: Results) -> None:
    """Finished prefixes make room before it is asked for. 4 streams of 60 tokens grow by 240 a wave; of so small a
    model the last pages are computed again sooner than published. Had publishing ended, a wave would show none."""
    found = results("host_full_once")
    assert min(found["free"]) < found["total"] // 8, "the host tier was never full"
    assert min(found["published"]) >= 32, found["published"]
    assert sum(found["published"]) >= 100 * len(found["published"]), found["published"]
    assert min(found["free"]) > 0, found["free"]
    idle = dict(found["idle"])
    assert idle.pop("idle")
    assert all(have == want for have, want in idle.values()), idle


# ---- B25


@engines("copies-16")
def test_one_prompt_under_three_keys_is_three_streams(results: Results) -> None:
    """All parked at once and brought back in reverse order: each says what it says alone, and none found the KV of
    another."""
    found = results("salts_and_flushes")
    parked = found["parked"]
    assert {rid: s["tokens"] for rid, s in parked["streams"].items()} == found["solo"]
    assert {s["cached_tokens"] for s in parked["streams"].values()} == {0}
    returns = [m["id"] for m in parked["moves"] if m["what"] == "return"]
    assert returns == ["k2", "k1", "k0"]
    assert parked["counters"]["loads"] == 3
    assert_balanced(parked)


@engines("copies-16")
def test_emptying_the_cache_is_refused_while_a_stream_is_parked_or_its_kv_is_computed_again(results: Results) -> None:
    flush = results("salts_and_flushes")["flush"]
    refused, paused = flush["answers"]
    assert not refused and paused
    assert flush["loaded"] == 0
    assert flush["computed"] == 220  # the prompt of 200 and the 20 tokens it had
    assert flush["report"]["streams"]["k0"]["tokens"] == results("salts_and_flushes")["solo"]["k0"]
    assert_balanced(flush["report"])


@pytest.mark.engine
def test_the_engine_part_of_gpu_check_runs_where_there_is_no_gpu(tmp_path: Path) -> None:
    """What it measures there is this machine's; a step that cannot run says so."""
    command = [sys.executable, REPO / "scripts" / "gpu_check", REPO / "models" / "tiny", "--engine", "cpu"]
    log = tmp_path / "log"
    with log.open("w") as stream:
        done = subprocess.run(
            [*command, "--pool-tokens", "8192"],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, log.read_text()[-3000:]
    facts = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert facts["same"] == facts["same_undisturbed"] == facts["streams"]
    # A stream whose store is still open when it comes back is on the device yet.
    assert 0 < facts["loads"] <= facts["parks"] == 12 and facts["failed"] == 0
    assert facts["publishes"] > 20 and facts["syncs"] is None
    assert facts["store_gb_s"] > 0 and facts["load_gb_s"] > 0
