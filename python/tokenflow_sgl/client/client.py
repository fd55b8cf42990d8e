"""Client and AsyncClient: an OpenAI chat or completion as a stream that comes at reading pace, and is reported on.

Owns the request's body and which transport carries it. Invariant: what the user's loop has taken is what the server
hears of; a stream that ends in any other way than complete or cancelled raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx

from . import http, websocket
from .answer import Answer, Piece, on_the_wire, piece_of
from .tasks import AsyncSender, AsyncSource, AsyncStream
from .threads import Sender, Source, Stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TRANSPORTS = ("http", "websocket")
READ_RATE_TOK_S = 8.0
TIMEOUT_S = 120.0
OnStall = Callable[[float], None]
S = TypeVar("S")


class _Asks(Generic[S]):
    """What both clients say of a request, and to which server. S: the stream that the user gets."""

    def __init__(self, base_url: str, api_key: str | None, timeout: float, transport: str) -> None:
        self._base_url, self._headers, self._timeout_s = _root(base_url), _headers(api_key), timeout
        self._transport = _checked(transport)

    @property
    def _httpx_options(self) -> dict[str, Any]:
        # A pool with a limit would hold streams back that the server has room for.
        limits = httpx.Limits(max_connections=None)
        return {"base_url": self._base_url, "headers": self._headers, "timeout": self._timeout_s, "limits": limits}

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        model: str = "default",
        *,
        read_rate: float = READ_RATE_TOK_S,
        on_stall: OnStall | None = None,
        **body: Any,
    ) -> S:
        """`read_rate`: tokens per second, inf for a program. `on_stall`: called with the seconds of each stall.
        `body`: further fields of the request. Raises RequestRefused."""
        return self._stream(CHAT, read_rate, on_stall, {"model": model, "messages": list(messages), **body})

    def complete(
        self,
        prompt: Any,
        model: str = "default",
        *,
        read_rate: float = READ_RATE_TOK_S,
        on_stall: OnStall | None = None,
        **body: Any,
    ) -> S:
        """As `chat`, of /v1/completions."""
        return self._stream(COMPLETIONS, read_rate, on_stall, {"model": model, "prompt": prompt, **body})

    def _stream(self, path: str, read_rate: float, on_stall: OnStall | None, said: dict[str, Any]) -> S:
        raise NotImplementedError


class Client(_Asks[Stream[Piece]]):
    """base_url: of the server, with or without /v1. timeout: seconds of silence after which a stream counts as broken.

    `with client.chat(messages=[...]) as stream: for piece in stream: ...`. Streams may run in any number of threads.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout: float = TIMEOUT_S, transport: str = "http"
    ) -> None:
        super().__init__(base_url, api_key, timeout, transport)
        self._http = httpx.Client(**self._httpx_options)
        post = partial(http.send_reports, self._http)
        self._sender = Sender(post if transport == "http" else websocket.send_reports)

    def _stream(self, path: str, read_rate: float, on_stall: OnStall | None, said: dict[str, Any]) -> Stream[Piece]:
        answer = Answer(read_rate, piece_of, on_stall=on_stall)
        body = _body(said, read_rate)
        source: Source
        if self._transport == "http":
            source = http.HttpSource(self._http, path, body)
        else:
            url = websocket.url_of(self._base_url)
            source = websocket.WebSocketSource(url, self._headers, body, self._timeout_s)
        return Stream(answer, source, self._sender)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class AsyncClient(_Asks[AsyncStream[Piece]]):
    """As Client, for asyncio: `async with client.chat(...) as stream: async for piece in stream: ...`. A request is
    sent, and refused, when that block is entered."""

    def __init__(
        self, base_url: str, api_key: str | None = None, timeout: float = TIMEOUT_S, transport: str = "http"
    ) -> None:
        super().__init__(base_url, api_key, timeout, transport)
        self._http = httpx.AsyncClient(**self._httpx_options)
        post = partial(http.send_reports_async, self._http)
        self._sender = AsyncSender(post if transport == "http" else websocket.send_reports_async)

    def _stream(
        self, path: str, read_rate: float, on_stall: OnStall | None, said: dict[str, Any]
    ) -> AsyncStream[Piece]:
        answer = Answer(read_rate, piece_of, on_stall=on_stall)
        body = _body(said, read_rate)
        source: AsyncSource
        if self._transport == "http":
            source = http.AsyncHttpSource(self._http, path, body)
        else:
            url = websocket.url_of(self._base_url)
            source = websocket.AsyncWebSocketSource(url, self._headers, body, self._timeout_s)
        return AsyncStream(answer, source, self._sender)

    async def close(self) -> None:
        await self._sender.stop()
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()


def _root(base_url: str) -> str:
    """As users have it in their OpenAI settings, or without /v1."""
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"base_url: {base_url!r} is not valid; valid is http:// or https:// and a host")
    return base_url.rstrip("/").removesuffix("/v1")


def _headers(api_key: str | None) -> dict[str, str]:
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


def _checked(transport: str) -> str:
    if transport not in TRANSPORTS:
        raise ValueError(f"transport: {transport!r} is not valid; valid is one of {', '.join(TRANSPORTS)}")
    return transport


def _body(said: dict[str, Any], read_rate: float) -> dict[str, Any]:
    if said.get("stream", True) is not True:
        raise ValueError(
            f"stream: {said['stream']!r} is not valid; valid is True, or no stream field: this reads along"
        )
    if "tokenflow" in said:
        raise ValueError(f"tokenflow: {said['tokenflow']!r} is not valid; valid is the argument read_rate")
    options = {**(said.get("stream_options") or {}), "include_usage": True, "continuous_usage_stats": True}
    rate = on_the_wire(read_rate)
    return {**said, "stream": True, "stream_options": options, "tokenflow": {"read_rate": rate}}
