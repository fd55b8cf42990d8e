"""Streams over the WebSocket /tokenflow/stream: request, chunks, reports and cancel on one socket, one stream each.

Owns its messages. The package `websockets` is imported when a stream is opened, not before. Invariant: a socket that
closes before "done" is an answer that is not complete.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from .errors import Cut, MissingExtra, RequestRefused, StreamBroken, StreamError, TokenFlowError
from .http import chunk_of, refused
from .reports import Count

PATH = "/tokenflow/stream"
CANCEL = json.dumps({"type": "cancel"})
_CLOSE_TIMEOUT_S = 2.0


def url_of(base_url: str) -> str:
    return base_url.replace("http", "ws", 1) + PATH


def _options(headers: Mapping[str, str], timeout_s: float) -> dict[str, Any]:
    # No limit on a message or on those that wait: the answer is the limit, and a full queue would hold the server up.
    return {
        "additional_headers": dict(headers), "open_timeout": timeout_s, "close_timeout": _CLOSE_TIMEOUT_S,
        "max_size": None, "max_queue": None,
    }  # fmt: skip


class WebSocketSource:
    """A stream that is read by a thread. Raises RequestRefused, MissingExtra."""

    def __init__(self, url: str, headers: Mapping[str, str], body: Mapping[str, Any], timeout_s: float) -> None:
        try:
            from websockets import exceptions
            from websockets.sync.client import connect
        except ImportError as error:
            raise _missing() from error
        try:
            # As a context manager: called for its connection alone, it will reconnect by itself in later releases.
            self._exit = ExitStack()
            self._socket = self._exit.enter_context(connect(url, **_options(headers, timeout_s)))
        except exceptions.InvalidStatus as error:
            raise refused(error.response.status_code, error.response.body or b"") from error
        self._closed = exceptions.ConnectionClosed
        self._is_done = False
        self.key = self._socket
        try:
            self._socket.send(json.dumps(body))
            _check_started(self._socket.recv(timeout=timeout_s))
        except BaseException as error:  # an interrupt too: an open socket keeps its stream, and nobody reads it
            self._exit.close()
            if isinstance(error, (self._closed, TimeoutError, RequestRefused, Cut)):
                raise _before_start(error) from error
            raise

    def __iter__(self) -> Iterator[Any]:
        try:
            while (chunk := _message(self._socket.recv())) is not _DONE:
                if chunk is not None:
                    yield chunk
            self._is_done = True
        except self._closed as error:
            raise _cut(error) from error
        finally:
            self._exit.close()

    def hang_up(self) -> None:
        with suppress(self._closed):
            if not self._is_done:
                self._socket.send(CANCEL)
        self._exit.close()


class AsyncWebSocketSource:
    def __init__(self, url: str, headers: Mapping[str, str], body: Mapping[str, Any], timeout_s: float) -> None:
        self._url, self._headers, self._body, self._timeout_s = url, headers, body, timeout_s
        self._is_done = False
        self.key: Any = None

    async def open(self) -> None:
        try:
            from websockets import exceptions
            from websockets.asyncio.client import connect
        except ImportError as error:
            raise _missing() from error
        try:
            self._socket = await connect(self._url, **_options(self._headers, self._timeout_s))
        except exceptions.InvalidStatus as error:
            raise refused(error.response.status_code, error.response.body or b"") from error
        self._closed = exceptions.ConnectionClosed
        self.key = self._socket
        try:
            await self._socket.send(json.dumps(self._body))
            async with asyncio.timeout(self._timeout_s):
                _check_started(await self._socket.recv())
        except BaseException as error:  # a cancelled caller too: an open socket keeps its stream, and nobody reads it
            await self._socket.close()
            if isinstance(error, (self._closed, TimeoutError, RequestRefused, Cut)):
                raise _before_start(error) from error
            raise

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            while (chunk := _message(await self._socket.recv())) is not _DONE:
                if chunk is not None:
                    yield chunk
            self._is_done = True
        except self._closed as error:
            raise _cut(error) from error

    async def hang_up(self) -> None:
        with suppress(self._closed):
            if not self._is_done:
                await self._socket.send(CANCEL)
        await self._socket.close()


def send_reports(counts: Sequence[Count]) -> list[Any]:
    """The keys of the counts are the sockets. Returns those that are closed."""
    gone = []
    for count in counts:
        try:
            count.key.send(_ack(count))
        except Exception:  # whatever ails one socket, the others' reports must go out
            gone.append(count.key)
    return gone


async def send_reports_async(counts: Sequence[Count]) -> list[Any]:
    gone = []
    for count in counts:
        try:
            await count.key.send(_ack(count))
        except Exception:  # as above
            gone.append(count.key)
    return gone


_DONE = object()


def _message(text: str | bytes) -> Any:
    """The chunk in a message, None where it holds none, _DONE at the end. Raises Cut, StreamError."""
    message = chunk_of(text)
    kind = message.get("type") if isinstance(message, Mapping) else None
    if kind == "error" and message.get("ended") is False:
        return None  # of a report of ours: the stream goes on
    if kind == "error":
        raise StreamError(message.get("error"))
    if kind == "cancelled":
        raise Cut("the stream was cancelled")
    if kind == "done":
        return _DONE
    return None if kind in ("ack", "started") else message


def _check_started(first: str | bytes) -> None:
    """Raises RequestRefused, Cut."""
    message = chunk_of(first)
    kind = message.get("type") if isinstance(message, Mapping) else None
    if kind == "error":
        raise RequestRefused(message.get("status", 0), message.get("error") or {})
    if kind != "started":
        raise Cut(f"the first message is not started: {str(first)[:80]!r}")


def _before_start(error: Exception) -> TokenFlowError:
    if isinstance(error, RequestRefused):
        return error
    return StreamBroken(None, {}, f"before the reply began: {type(error).__name__} {error}")


def _ack(count: Count) -> str:
    return json.dumps({"type": "ack", "consumed_tokens": count.consumed_tokens, "index": count.index})


def _cut(error: Exception) -> Cut:
    return Cut(f"the socket closed without done: {error}")


def _missing() -> MissingExtra:
    return MissingExtra('transport "websocket" needs the package websockets: pip install "tokenflow_sgl[client]"')
