"""The Grafana board and the table of metrics say what there is, and all of it; test_metrics_live.py asks a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from support.metric_names import UPSTREAM_LABELS, board, in_board, in_reply, in_table, queries
from tokenflow_sgl.adapter.metrics import SchedulerMetrics


def test_the_table_names_every_metric_with_its_type_and_labels_and_no_other() -> None:
    registry = CollectorRegistry()
    SchedulerMetrics({"tp_rank": "0"}, registry)
    made = {f"{f.name}_total" if f.type == "counter" else f.name: f.type for f in registry.collect()}
    assert {name: kind for name, (kind, _) in in_table().items()} == made
    # Only those without a further label have a series before the first update.
    shown = in_reply(generate_latest(registry).decode())
    assert {n: labels - {"tp_rank"} for n, (_, labels) in shown.items()} == {n: in_table()[n][1] for n in shown}


def test_the_board_asks_for_every_metric_of_the_table_and_for_no_other() -> None:
    assert in_board() == set(in_table())


def test_every_query_is_of_the_models_that_were_chosen_and_counters_are_rates() -> None:
    for query in queries():
        assert query.count("tokenflow:") == query.count('{model_name=~"$model"}') == 1, query
        assert ("_total{" in query or "_bucket" in query) == ("rate(" in query or "increase(" in query), query
        assert query.count("(") == query.count(")")
        assert set(re.findall(r"by \((\w+)\)", query)) <= {*UPSTREAM_LABELS, "phase", "le"}


def test_the_panels_of_the_board_are_whole_and_do_not_overlap() -> None:
    panels = board()["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] >= 0 and at["x"] + at["w"] <= 24 and at["h"] > 0
        assert panel["title"] and (panel["type"] == "row" or panel["targets"])
    for one, other in combinations([p["gridPos"] for p in panels], 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


def test_grafanas_own_types_know_every_field_of_the_board() -> None:
    """Read into the classes that Grafana makes from its schema and written again, nothing is lost."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="no grafana-foundation-sdk")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    plugins.register_default_plugins()
    back = json.loads(JSONEncoder(sort_keys=True).encode(models.Dashboard.from_json(board())))
    assert list(lost(board(), back)) == []


def lost(wanted: Any, found: Any, where: str = "") -> Iterator[str]:
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, value in wanted.items():
            yield from lost(value, found.get(key), f"{where}.{key}")
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for number, (one, other) in enumerate(zip(wanted, found, strict=True)):
            yield from lost(one, other, f"{where}[{number}]")
    elif wanted != found:
        yield f"{where}: {wanted!r} became {found!r}"
