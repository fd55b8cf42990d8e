"""The chat stand-in, for each test anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.chat_standin import StandIn


@pytest.fixture
def standin() -> Iterator[StandIn]:
    server = StandIn()
    yield server
    server.close()
