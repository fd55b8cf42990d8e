"""Time that moves only when everybody waits: timings in tests are then exact and no machine is too slow for them."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from itertools import count
from typing import TypeVar

T = TypeVar("T")

# Rounds of the event loop until nothing more happens without a step of time; the code under test needs a handful.
SETTLE_ROUNDS = 50


class VirtualTime:
    """A clock and a sleep for code that takes both; `run` drives a coroutine to its end."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = count()

    def clock(self) -> float:
        return self.now_s

    async def sleep_until(self, at_s: float) -> None:
        if at_s > self.now_s:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (at_s, next(self._order), future))
            await future

    def run(self, start: Callable[[], Awaitable[T]]) -> T:
        async def drive() -> T:
            task = asyncio.ensure_future(start())
            while True:
                for _ in range(SETTLE_ROUNDS):
                    await asyncio.sleep(0)
                if task.done():
                    return task.result()
                assert self._waiting, "everybody waits and nobody for the clock"
                self.now_s, _, future = heapq.heappop(self._waiting)
                future.set_result(None)

        return asyncio.run(drive())
