"""Comments in a silent event stream: what is in between hangs up on a connection that says nothing.

Owns the clock of one reply. Invariant: a comment stands between two messages of the app, whole events each, and none
follows the last.

A stream that is parked, or waits to begin, sends no token for as long as its reader has enough; a proxy cannot tell
that from a server that died. Comments are no events: clients of server-sent events skip lines that begin with a colon.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
COMMENT = b": still here\n\n"


class KeepAlive:
    """Async context manager around one request: give `send` to the app. Silent streams get a comment each interval."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send, self._interval_s = send, interval_s
        self._lock = asyncio.Lock()  # a comment while the app sends would stand inside an event
        self._is_open = False
        self._last_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        async with self._lock:
            if message["type"] == "http.response.start":
                self._is_open = is_event_stream(message)
                self._task = asyncio.create_task(self._comment()) if self._is_open else None
            elif not message.get("more_body", False):
                self._is_open = False
            self._last_s = asyncio.get_running_loop().time()
            await self._send(message)

    async def _comment(self) -> None:
        now_s = asyncio.get_running_loop().time
        while self._is_open:
            left_s = self._last_s + self._interval_s - now_s()
            if left_s > 0.0:
                await asyncio.sleep(left_s)
                continue
            async with self._lock:
                if self._is_open and now_s() - self._last_s >= self._interval_s:
                    self._last_s = now_s()
                    await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def __aenter__(self) -> KeepAlive:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._is_open = False
        if self._task is not None:
            self._task.cancel()


def is_event_stream(start: Message) -> bool:
    headers = {bytes(k).lower(): bytes(v) for k, v in start.get("headers", ())}
    return start.get("status") == 200 and headers.get(b"content-type", b"").startswith(b"text/event-stream")
