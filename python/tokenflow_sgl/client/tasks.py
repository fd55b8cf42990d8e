"""Streams for asyncio: one task reads the connection, the user's loop takes pieces as they are due.

Owns tasks and waiting; what is due is the answer's, and how bytes come the source's. Invariant: the connection is read
whether or not the loop consumes, as long as it leaves the event loop free.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from .answer import Answer, Facts
from .reports import Count, Reports

T = TypeVar("T")


class AsyncSource(Protocol):
    """As threads.Source; `open` sends the request and raises RequestRefused."""

    key: Any

    async def open(self) -> None: ...

    def __aiter__(self) -> AsyncIterator[Any]: ...

    async def hang_up(self) -> None: ...


class AsyncSender:
    """Sends the reports of all streams of a client from one task, which lives while there are streams."""

    def __init__(self, deliver: Callable[[Sequence[Count]], Awaitable[Sequence[Any]]]) -> None:
        self._deliver = deliver
        self._reports = Reports()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def open(self, key: Any) -> None:
        self._reports.open(key)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="tokenflow-reports")

    def close(self, key: Any) -> None:
        self._reports.close(key)
        self._changed.set()

    async def stop(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def took(self, key: Any, index: int, consumed_tokens: int) -> None:
        self._reports.took(key, index, consumed_tokens, time.monotonic())
        self._changed.set()

    async def _run(self) -> None:
        while self._reports.open_streams:
            left_s = self._reports.next_s() - time.monotonic()
            if left_s > 0.0:
                await wait_for(self._changed, left_s)
                continue
            gone: Sequence[Any] = ()
            with suppress(Exception):  # a report that fails must not make a stream fail; the next one tells it all
                gone = await self._deliver(self._reports.take(time.monotonic()))
            for key in gone:
                self.close(key)


class AsyncStream(Facts[T], Generic[T]):
    """Iterate it in its `async with` block; leave that, or cancel it, to let the server forget it."""

    def __init__(self, answer: Answer[T], source: AsyncSource, sender: AsyncSender | None) -> None:
        self._answer, self._source = answer, source
        self._sender = sender if math.isfinite(answer.schedule.read_rate) else None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> Self:
        """Send the request, unless that is done. Raises RequestRefused."""
        if self._task is None:
            await self._source.open()
            if self._sender is not None and self._source.key is not None:
                self._sender.open(self._source.key)
            self._task = asyncio.create_task(self._read(), name="tokenflow-stream")
        return self

    async def _read(self) -> None:
        error: Exception | None = None
        try:
            async for chunk in self._source:
                self._answer.hear(chunk, time.monotonic())
                self._changed.set()
        except Exception as failure:  # for the loop that waits: raised in this task, nobody would see it
            error = failure
        finally:
            if self._sender is not None and self._source.key is not None:
                self._sender.close(self._source.key)
            if not self._answer.ended:
                self._answer.end(error)
            self._changed.set()
            await self._source.hang_up()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        await self.open()
        asked_s = time.monotonic()
        while (wait_s := self._answer.wait_s(now_s := time.monotonic())) is not None:
            if (shown := self._answer.show(asked_s, now_s)) is not None:
                break
            await wait_for(self._changed, wait_s)
        else:
            self._answer.raise_error()
            raise StopAsyncIteration
        if self._sender is not None and self._source.key is not None and shown.index is not None:
            self._sender.took(self._source.key, shown.index, shown.consumed_tokens)
        return shown.item

    async def cancel(self) -> None:
        """Hang up: the server stops and frees what it holds for this stream; the loop ends without an error."""
        was_read_to_its_end = self._answer.ended
        self._answer.cancel()
        self._changed.set()
        if self._task is not None:
            if not was_read_to_its_end:  # else it is closing its connection, and must not be disturbed
                self._task.cancel()
            await asyncio.wait([self._task])

    close = cancel

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.cancel()

    def _wake(self) -> None:
        self._changed.set()


async def wait_for(changed: asyncio.Event, wait_s: float) -> None:
    """Until `changed` is set, which it is not any more afterwards, or wait_s seconds are over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
            await changed.wait()
    changed.clear()
