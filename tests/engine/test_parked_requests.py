"""Any request may be parked at any token: what its client gets is what it gets when nobody is parked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from support.cases import grammars, inflight, limits
from support.reports import assert_balanced, assert_same_answer

LOOPS = [pytest.param(c, marks=pytest.mark.engine("support.cases", c)) for c in ("overlap", "normal")]
OVERLAP = [LOOPS[0]]
Results = Callable[[str], dict[str, Any]]


@pytest.mark.parametrize("config", LOOPS)
def test_the_undisturbed_batch_says_what_each_stream_says_alone(results: Results) -> None:
    solo = results("park_in_flight")["solo"]["streams"]
    assert [s["tokens"] for s in solo.values()] == results("alone")["one by one"]


@pytest.mark.parametrize("k", inflight.INDICES)
@pytest.mark.parametrize("mode", inflight.MODES)
@pytest.mark.parametrize("config", LOOPS)
def test_park_while_step_k_is_in_flight_loses_and_doubles_nothing(results: Results, mode: str, k: int) -> None:
    """B04. Logprob entry i belongs to token i: a cursor that ran ahead would give its neighbour's."""
    report = results("park_in_flight")
    solo, parked = report["solo"]["streams"][f"k{k}"], report[mode]["streams"][f"k{k}"]
    assert report[mode]["parks"][f"k{k}"] == len(inflight.MODES[mode])
    assert_same_answer(parked, solo)
    assert [token for _, token in parked["logprobs"]] == parked["tokens"]
    gaps = [abs(a - b) for (a, _), (b, _) in zip(parked["logprobs"], solo["logprobs"], strict=True)]
    assert max(gaps) < 1e-4
    assert parked["top"] == solo["top"]
    assert [len(top) for top in parked["top"]] == [3] * inflight.TOKENS


@pytest.mark.parametrize("mode", inflight.MODES)
@pytest.mark.parametrize("config", LOOPS)
def test_nothing_leaks_after_parks_in_flight(results: Results, mode: str) -> None:
    assert_balanced(results("park_in_flight")[mode])


def _limit_keys() -> list[str]:
    return [f"{v}/{n}/{w}" for v in limits.VARIANTS for n in limits.MAX_NEW for w in limits.WHERE]


@pytest.mark.parametrize("key", _limit_keys())
@pytest.mark.parametrize("config", LOOPS)
def test_limits_stops_and_usage_survive_a_park(results: Results, key: str) -> None:
    """B12. A stream that the token in flight ends by length is not parked at all."""
    report = results("limits")
    variant, max_new, where = key.rsplit("/", 2)
    case, parked = report["cases"][key], report["parked"]["streams"][key]
    assert_same_answer(parked, report["solo"]["streams"][f"{variant}/{max_new}/solo"])
    assert parked["completion_tokens"] <= int(max_new)
    by_length = case["ended"] == int(max_new)
    parkable = 0 < case["park_at"] < case["ended"] - by_length
    assert report["parked"]["parks"][key] == int(parkable), where


@pytest.mark.parametrize("config", LOOPS)
def test_the_limits_cases_end_the_way_they_are_meant_to(results: Results) -> None:
    """Else a stop that never comes would pass for one that survived."""
    solo = results("limits")["solo"]["streams"]
    ends = {
        v: (solo[f"{v}/16/solo"]["finish"]["type"], solo[f"{v}/16/solo"]["completion_tokens"]) for v in limits.VARIANTS
    }
    both = ends.pop("min_new_tokens and stop token")
    assert both[1] > 5, both  # its stop token is the third of the plain answer, and five come first
    assert ends == {
        "plain": ("length", 16),
        "stop string": ("stop", limits.STOP_AT + 2),
        "stop token": ("stop", limits.STOP_AT + 1),
        "stop token ignored": ("length", 16),
        "eos": ("stop", 1),
        "eos ignored": ("length", 16),
        "min_new_tokens": ("stop", 9),
    }
    assert_balanced(results("limits")["parked"])


def _grammar_params() -> list[Any]:
    both = [("overlap", g) for g in ("json_schema", "regex", "stop_token_inside")] + [("normal", "json_schema")]
    return [pytest.param(c, g, id=f"{c}-{g}", marks=pytest.mark.engine("support.cases", c)) for c, g in both]


@pytest.mark.parametrize("config", LOOPS)
def test_a_stream_whose_grammar_was_compiled_for_it_is_published_like_any_other(results: Results) -> None:
    """The policy must hear of its arrival before its admission, or it takes a running stream for one that is away."""
    report = results("first_use_of_a_grammar")
    made = len(report["streams"]["fresh"]["tokens"])
    assert made > 60
    # One that is taken for away is never published. How much is, the learned costs decide, on a busy machine less.
    assert report["counters"]["published_tokens"] >= 16, report["counters"]


@pytest.mark.parametrize(("config", "grammar"), _grammar_params())
def test_a_grammar_survives_a_park_at_every_token(results: Results, grammar: str) -> None:
    """B10. A machine that is one token off rejects the next token: the stream hangs or ends with an error."""
    report = results(grammar)
    for i in grammars.INDICES:
        rid = next(r for r in report["parked"]["streams"] if r.endswith(f"-{i}"))
        solo, parked = report["solo"]["streams"][rid], report["parked"]["streams"][rid]
        assert_same_answer(parked, solo)
        assert parked["finish"]["type"] == "stop", rid
        assert report["parked"]["parks"][rid] == int(i < len(solo["tokens"])), rid
    assert_balanced(report["parked"])


@pytest.mark.parametrize(("config", "grammar"), _grammar_params()[:2])
def test_every_token_up_to_the_60th_was_parked_at(results: Results, grammar: str) -> None:
    assert sum(results(grammar)["parked"]["parks"].values()) == len(grammars.INDICES)


@pytest.mark.parametrize("config", LOOPS)
def test_parked_json_is_valid(results: Results) -> None:
    for text in results("json_schema")["texts"].values():
        value = json.loads(text, strict=False)  # the grammar lets a tab stand in a string
        assert len(value["name"]) == 12 and 160 <= len(value["inner"]["text"]) <= 180
        assert value["kind"] in ("one", "two") and isinstance(value["inner"]["flag"], bool)


@pytest.mark.parametrize("config", OVERLAP)
def test_parked_text_matches_its_regex(results: Results) -> None:
    assert all(re.fullmatch(grammars.REGEX, text) for text in results("regex")["texts"].values())
