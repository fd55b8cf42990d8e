"""One server of this checkout for all tests that can share it, and the proof after each that it is as before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.live import GREEDY_PROMPT, GREEDY_TOKENS, OURS, STOCK, Server, body_of, serving
from support.sockets import KEY


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("server")
    with serving(OURS, folder, "--page-size", "16", "--tokenflow-check-plans", journal=True) as server:
        yield server


def unharmed(shared: Server) -> Iterator[Server]:
    """A shared server. Whatever a test does to it, nothing is left in flight and no page is taken."""
    yield shared.wake()
    assert shared.process._process.poll() is None, shared.process.log_tail()
    shared.settle()


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    yield from unharmed(shared_server)


@pytest.fixture(scope="session")
def strict_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It asks for a key and has no patience with clients that do not read."""
    flags = ("--api-key", KEY, "--tokenflow-stall-limit", "3", "--tokenflow-origins", "https://chat.example.com")
    with serving(OURS, tmp_path_factory.mktemp("strict"), "--page-size", "16", *flags) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


@pytest.fixture
def strict_server(strict_shared: Server) -> Iterator[Server]:
    yield from unharmed(strict_shared)


@pytest.fixture(scope="session")
def stock_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a stock SGLang server from this same environment says; it is started for these questions only."""
    import sglang as sgl
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

    from support.frontend import PROGRAMS, run_program

    with serving(STOCK, tmp_path_factory.mktemp("stock"), "--page-size", "16") as stock:
        sgl.set_default_backend(RuntimeEndpoint(stock.url))
        answers = {
            "programs": {name: {k: v for k, v in run_program(name).items() if k != "pieces"} for name in PROGRAMS},
            "state": stock.http.get("/tokenflow/state").status_code,
            "config": stock.http.get("/tokenflow/config").status_code,
            "text": stock.generate(GREEDY_PROMPT, GREEDY_TOKENS)["text"],
            "generate_headers": dict(stock.http.post("/generate", json=body_of("x", 1)).headers),
            "metrics": stock.metrics(),
            "log": stock.log.read_text(errors="replace"),
            "server_info": stock.http.get("/server_info").json(),
        }
        sgl.set_default_backend(None)
    return answers
