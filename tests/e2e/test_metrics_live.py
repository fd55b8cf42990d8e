"""What docs/metrics.md and the Grafana board name is what a server shows."""

from __future__ import annotations

import pytest

from support.live import Server, until
from support.metric_names import UPSTREAM_LABELS, in_board, in_reply, in_table

pytestmark = pytest.mark.e2e


def test_the_table_and_the_board_agree_with_a_live_server(server: Server) -> None:
    server.generate("something to count", 4)
    until(lambda: "tokenflow:active" in server.metrics(), "metrics of the scheduler")
    shown = in_reply(server.metrics())
    assert {name: (kind, labels - UPSTREAM_LABELS) for name, (kind, labels) in shown.items()} == in_table()
    assert in_board() == set(shown)
