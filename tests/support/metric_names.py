"""The tokenflow metrics as three places name them: the table of docs/metrics.md, the Grafana board, a server.

Owns the reading of each. Invariant: a histogram is one name everywhere, without _bucket, _sum and _count.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenflow_sgl

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
BOARD = Path(tokenflow_sgl.__file__).parent / "dashboard" / "grafana.json"
NAME = re.compile(r"tokenflow:[a-z_]+")
UPSTREAM_LABELS = {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", "dp_rank"}


def in_table() -> dict[str, tuple[str, set[str]]]:
    """name -> (type, further labels)."""
    rows = [[c.strip() for c in line.strip("| \n").split("|")] for line in TABLE.open() if line.startswith("| `")]
    assert all(len(row) == 5 and row[3] and row[4] for row in rows), rows
    return {row[0].strip("`"): (row[1], set(re.findall(r"`(\w+)`", row[2]))) for row in rows}


def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def queries() -> list[str]:
    return [target["expr"] for panel in board()["panels"] for target in panel.get("targets", [])]


def in_board() -> set[str]:
    return {whole(name) for query in queries() for name in NAME.findall(query)}


def whole(name: str) -> str:
    return re.sub(r"(?<=slack_at_park_seconds)_(bucket|sum|count)$", "", name)


def in_reply(text: str) -> dict[str, tuple[str, set[str]]]:
    """name -> (type, labels), of the text that Prometheus reads."""
    types = dict(re.findall(r"^# TYPE (tokenflow:\S+) (\w+)$", text, re.MULTILINE))
    found: dict[str, tuple[str, set[str]]] = {}
    for name, labels in re.findall(r"^(tokenflow:[a-z_]+)\{(.*?)\} ", text, re.MULTILINE):
        if name.endswith("_created"):  # prometheus_client's own, in a process that is the only one
            continue
        kind, seen = found.get(whole(name), (types[whole(name)], set()))
        found[whole(name)] = (kind, seen | set(re.findall(r'(\w+)="', labels)))
    return found
