"""What a park frees and an admission takes, as the views say it: shared pages free nothing and take nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.cases import prefixes
from support.reports import assert_balanced

Results = Callable[[str], dict[str, Any]]
PAGE = {"overlap": 16, "normal": 1}
both_loops = pytest.mark.parametrize(
    "config", [pytest.param(c, marks=pytest.mark.engine("support.cases", c)) for c in PAGE]
)


@both_loops
@pytest.mark.parametrize("case", ["frees", "frees_at_random"])
def test_a_park_frees_exactly_what_its_view_says(results: Results, case: str) -> None:
    parks = results(case)["parks"]
    assert len(parks) >= 5
    for park in parks:
        assert park["claimed"] == park["freed"], park


@both_loops
def test_pages_shared_with_a_running_stream_are_not_counted_as_freed(results: Results, config: str) -> None:
    """a and b share a prompt of 200 tokens: whole pages of it stay held when one of them goes; c shares with nobody."""
    shared = prefixes.COMMON // PAGE[config] * PAGE[config]
    by_rid = {p["rid"]: p for p in results("frees")["parks"][:3]}
    assert set(by_rid) == {"a", "b", "c"}
    for rid in ("a", "b"):
        park = by_rid[rid]
        assert park["held"] - shared <= park["freed"] < park["held"] - shared + 2 * PAGE[config], park
    assert by_rid["c"]["freed"] >= by_rid["c"]["held"]


@both_loops
def test_streams_that_share_prefixes_keep_their_answers(results: Results) -> None:
    found = results("frees_at_random")
    for rid, solo in found["solo"].items():
        assert found["report"]["streams"][rid]["tokens"] == solo["tokens"], rid
    assert_balanced(found["report"])
    assert_balanced(results("frees")["report"])


@both_loops
def test_a_waiting_request_takes_nothing_for_what_is_held_and_all_for_what_is_only_cached(
    results: Results, config: str
) -> None:
    page = PAGE[config]
    found = results("takes")
    shared = prefixes.COMMON // page * page
    held, cached = found["b"], found["c"]
    assert held["cached"] == cached["cached"] == shared
    # 223 tokens of prompt; a running stream holds the pages of the common 200.
    assert held["takes"] == held["context"] - shared
    # Nobody holds them: they are evictable until the request comes in, and then they are not.
    assert cached["takes"] == cached["context"]
    really = cached["free"] - cached["left"]
    assert cached["takes"] <= really <= cached["takes"] + 2 * page
