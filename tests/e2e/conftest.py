"""One server of this checkout for all tests that can share it, and the proof after each that it is as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import OURS, Server, serving


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    with serving(OURS, folder, "--page-size", "16", "--tokenflow-check-plans", journal=True) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The shared server. Whatever a test does to it, nothing is left in flight and no page is taken."""
    yield shared_server
    assert shared_server.process._process.poll() is None, shared_server.process.log_tail()
    shared_server.settle()
