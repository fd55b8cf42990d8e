"""Streams over HTTP: the request, the reply's events, and POST /tokenflow/ack.

Owns what goes over the wire with httpx; no pacing. Invariant: a reply without [DONE] is not complete, and no request is
ever sent twice.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import httpx

from . import reports
from .errors import Cut, RequestRefused
from .events import DONE, EventSplitter
from .reports import Count


class HttpSource:
    """A reply that is read by a thread. Raises RequestRefused."""

    def __init__(self, http: httpx.Client, path: str, body: Mapping[str, Any]) -> None:
        self._response = http.send(http.build_request("POST", path, json=body), stream=True)
        if self._response.status_code != 200:
            try:
                raise refused(self._response.status_code, self._response.read())
            finally:
                self._response.close()
        self.key = reports.key_of(self._response.headers)

    def __iter__(self) -> Iterator[Any]:
        splitter = EventSplitter()
        try:
            for read in self._response.iter_bytes():
                for data in splitter.feed(read):
                    if data == DONE:
                        return
                    yield chunk_of(data)
        except httpx.HTTPError as error:
            raise cut_by(error) from error
        finally:
            self._response.close()
        raise Cut("the connection ended without [DONE]")

    def hang_up(self) -> None:
        hang_up(self._response)


class AsyncHttpSource:
    def __init__(self, http: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> None:
        self._http, self._path, self._body = http, path, body
        self.key: tuple[str, str] | None = None

    async def open(self) -> None:
        request = self._http.build_request("POST", self._path, json=self._body)
        self._response = await self._http.send(request, stream=True)
        if self._response.status_code != 200:
            try:
                raise refused(self._response.status_code, await self._response.aread())
            finally:
                await self._response.aclose()
        self.key = reports.key_of(self._response.headers)

    async def __aiter__(self) -> AsyncIterator[Any]:
        splitter = EventSplitter()
        try:
            async for read in self._response.aiter_bytes():
                for data in splitter.feed(read):
                    if data == DONE:
                        return
                    yield chunk_of(data)
        except httpx.HTTPError as error:
            raise cut_by(error) from error
        raise Cut("the connection ended without [DONE]")

    async def hang_up(self) -> None:
        await self._response.aclose()


def send_reports(http: httpx.Client, counts: Sequence[Count]) -> list[Any]:
    """Returns the keys of streams that the server knows no more."""
    gone = []
    for body in reports.bodies_of(counts):
        reply = http.post(reports.PATH, json=body, timeout=reports.TIMEOUT_S)
        gone += gone_of(body, reply.json() if reply.status_code == 200 else {})
    return gone


async def send_reports_async(http: httpx.AsyncClient, counts: Sequence[Count]) -> list[Any]:
    gone = []
    for body in reports.bodies_of(counts):
        reply = await http.post(reports.PATH, json=body, timeout=reports.TIMEOUT_S)
        gone += gone_of(body, reply.json() if reply.status_code == 200 else {})
    return gone


def gone_of(body: Mapping[str, Any], reply: Mapping[str, Any]) -> list[tuple[str, str]]:
    verdicts = reply.get("acks") or []
    pairs = zip(body["acks"], verdicts, strict=False)
    return [(item["id"], item["token"]) for item, said in pairs if said.get("verdict") == "not_found"]


def hang_up(response: httpx.Response) -> None:
    """End the connection below a thread that may be waiting for its next byte: close() alone would not wake it, and
    the server would go on."""
    network = response.extensions.get("network_stream")
    sock = network.get_extra_info("socket") if network is not None else None
    if isinstance(sock, socket.socket):
        with suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def cut_by(error: httpx.HTTPError) -> Cut:
    return Cut(f"{type(error).__name__}: {error}")


def refused(status: int, body: bytes | bytearray) -> RequestRefused:
    """From a reply that is no stream: with an OpenAI error, a bare text for one, or something else in between."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        error = body.decode(errors="replace")[:500]
    return RequestRefused(status, error if isinstance(error, Mapping) else {"message": str(error)})


def chunk_of(data: bytes | str) -> Any:
    """Raises Cut."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise Cut(f"an event is no JSON: {data[:80]!r}") from error
