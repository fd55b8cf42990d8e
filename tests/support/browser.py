"""Chromium for tests of pages, and the servers of pages in threads of this process.

Owns their start and end; judges nothing. Invariant: a machine without Chromium or Playwright skips, and says which.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.live import until


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Close it before another test needs an event loop: Playwright holds this thread's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright (requirements/dev.txt)")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium on this machine (Debian: apt install chromium)")
    with playwright.sync_playwright() as driver:
        # Without the sandbox: containers and root have none.
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """Serve an ASGI app on a free port of 127.0.0.1; its URL."""
    import uvicorn

    # A page's open streams would keep it for ever.
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "a server in a thread")
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def watched(page: Any) -> list[str]:
    """What goes wrong in a page from now on: its errors, and what its policy of content blocks."""
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    return wrong


def seen(page: Any, expression: str) -> Any:
    """Ask the page until the answer is true. Playwright's own way to wait evaluates text, which our pages forbid."""
    return until(lambda: page.evaluate(expression), expression)
