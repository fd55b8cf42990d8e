"""paced(openai_client): the user's own OpenAI or AsyncOpenAI, whose streams come at reading pace and are reported on.

Owns `chat.completions.create` and `completions.create`; everything else is the user's client as it is. Never imports
the package openai. Invariant: what is iterated are the chunk objects that the client made, each of them, in order; and
a stream is asked for once: a retry of the client would be a second answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx

from . import reports
from .answer import Answer, on_the_wire
from .client import READ_RATE_TOK_S
from .errors import Cut
from .events import Delta
from .http import cut_by, gone_of, hang_up
from .reports import Count
from .tasks import AsyncSender, AsyncStream
from .threads import Sender, Stream


def paced(openai_client: Any, read_rate: float = READ_RATE_TOK_S) -> Any:
    """The client, with `create(stream=True, ...)` paced. Another rate for one stream: `extra_body={"tokenflow":
    {"read_rate": 12}}`. The streams have read_rate, stalls, usage, id and cancel() as those of Client."""
    answers = _AsyncAnswers if hasattr(openai_client, "__aenter__") else _Answers
    of_client = answers(openai_client, read_rate)
    chat = openai_client.chat
    completions = {"completions": _with(chat.completions, create=of_client.creates(lambda c: c.chat.completions))}
    return _with(
        openai_client,
        chat=_Overlay(chat, completions),
        completions=_with(openai_client.completions, create=of_client.creates(lambda c: c.completions)),
        with_options=lambda **options: paced(openai_client.with_options(**options), read_rate),
        copy=lambda **options: paced(openai_client.copy(**options), read_rate),
    )


class _Overlay:
    """An object with some attributes replaced."""

    def __init__(self, inner: Any, own: Mapping[str, Any]) -> None:
        self._inner, self._own = inner, own

    def __getattr__(self, name: str) -> Any:
        return self._own[name] if name in self._own else getattr(self._inner, name)


def _with(inner: Any, **own: Any) -> _Overlay:
    return _Overlay(inner, own)


class PacedStream(Stream[Any]):
    """As openai.Stream: iterate, close, response."""

    response: httpx.Response


class AsyncPacedStream(AsyncStream[Any]):
    response: httpx.Response


class _OfClient:
    def __init__(self, client: Any, read_rate: float) -> None:
        self._client, self._read_rate = client, read_rate
        self._once = client.with_options(max_retries=0)
        self._for_reports = client.with_options(max_retries=0, timeout=reports.TIMEOUT_S)


class _Answers(_OfClient):
    def __init__(self, client: Any, read_rate: float) -> None:
        super().__init__(client, read_rate)
        self._sender = Sender(self._deliver)

    def creates(self, resource: Any) -> Any:
        def create(*args: Any, **said: Any) -> Any:
            if said.get("stream") is not True:
                return resource(self._client).create(*args, **said)
            asked, rate, usage = _asked(said, self._read_rate)
            answer = _answer(rate, usage)
            chunks = resource(self._once).create(*args, **asked)
            stream = PacedStream(answer, _ChunkSource(chunks, answer), self._sender)
            stream.response = chunks.response
            return stream

        return create

    def _deliver(self, counts: Sequence[Count]) -> list[Any]:
        gone = []
        for body in reports.bodies_of(counts):
            reply = self._for_reports.post(_ack_url(self._client), cast_to=httpx.Response, body=body)
            gone += gone_of(body, reply.json())
        return gone


class _AsyncAnswers(_OfClient):
    def __init__(self, client: Any, read_rate: float) -> None:
        super().__init__(client, read_rate)
        self._sender = AsyncSender(self._deliver)

    def creates(self, resource: Any) -> Any:
        async def create(*args: Any, **said: Any) -> Any:
            if said.get("stream") is not True:
                return await resource(self._client).create(*args, **said)
            asked, rate, usage = _asked(said, self._read_rate)
            answer = _answer(rate, usage)
            chunks = await resource(self._once).create(*args, **asked)
            stream = AsyncPacedStream(answer, _AsyncChunkSource(chunks, answer), self._sender)
            stream.response = chunks.response
            return await stream.open()

        return create

    async def _deliver(self, counts: Sequence[Count]) -> list[Any]:
        gone = []
        for body in reports.bodies_of(counts):
            reply = await self._for_reports.post(_ack_url(self._client), cast_to=httpx.Response, body=body)
            gone += gone_of(body, reply.json())
        return gone


class _ChunkSource:
    def __init__(self, chunks: Any, answer: Answer[Any]) -> None:
        self._chunks, self._answer = chunks, answer
        self.key = reports.key_of(chunks.response.headers)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._chunks
        except httpx.HTTPError as error:
            raise cut_by(error) from error
        finally:
            self._chunks.close()
        _check_complete(self._answer)

    def hang_up(self) -> None:
        hang_up(self._chunks.response)


class _AsyncChunkSource:
    def __init__(self, chunks: Any, answer: Answer[Any]) -> None:
        self._chunks, self._answer = chunks, answer
        self.key = reports.key_of(chunks.response.headers)

    async def open(self) -> None:
        """It is."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except httpx.HTTPError as error:
            raise cut_by(error) from error
        _check_complete(self._answer)

    async def hang_up(self) -> None:
        await self._chunks.close()


def _check_complete(answer: Answer[Any]) -> None:
    """The openai package ends a stream without [DONE] as if it were complete. Raises Cut."""
    if not answer.complete:
        raise Cut("the connection ended without a finish reason")


def _answer(read_rate: float, wants_usage: bool) -> Answer[Any]:
    def item_of(chunk: Any, delta: Delta) -> Any:
        # A user who did not ask for usage expects a choice in every chunk.
        return chunk if wants_usage or delta.index is not None else None

    return Answer(read_rate, item_of, as_dict=lambda chunk: chunk.model_dump())


def _asked(said: dict[str, Any], read_rate: float) -> tuple[dict[str, Any], float, bool]:
    """The arguments of create, the stream's read rate, whether the user asked for the usage chunk."""
    extra = said.get("extra_body") or {}
    own = extra.get("tokenflow") or {}
    rate = float(own.get("read_rate", read_rate))
    options = said.get("stream_options")
    options = options if isinstance(options, Mapping) else {}  # the package has marks of its own for "not given"
    asked = {
        **said,
        "stream_options": {**options, "include_usage": True, "continuous_usage_stats": True},
        "extra_body": {**extra, "tokenflow": {**own, "read_rate": on_the_wire(rate)}},
    }
    return asked, rate, bool(options.get("include_usage"))


def _ack_url(client: Any) -> str:
    return str(client.base_url).rstrip("/").removesuffix("/v1") + reports.PATH
