"""What clients report, on its way to the scheduler: all of a moment in one message.

Owns what has not been sent yet; judges nothing. Invariant: what is told is sent once, in the order it was told.

A message costs the HTTP process and every scheduler rank as much as a hundred reports in it, and over WebSockets each
report comes alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from .acks import Ack
from .messages import AckReq

EVERY_S = 0.02  # no reader notices


class Mailbox:
    """`send` takes a message to the scheduler."""

    def __init__(self, send: Callable[[AckReq], Awaitable[None]]) -> None:
        self._send = send
        self._acks: list[tuple[str, int, int]] = []
        self._halts: list[tuple[str, bool]] = []
        self._sending: asyncio.Task[None] | None = None

    def report(self, acks: Sequence[Ack]) -> None:
        self._acks += [(ack.rid, ack.index, ack.consumed_tokens) for ack in acks]
        self._soon()

    def halt(self, rid: str, halted: bool) -> None:
        self._halts.append((rid, halted))
        self._soon()

    def _soon(self) -> None:
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._acks or self._halts:
            await asyncio.sleep(EVERY_S)
            message = AckReq(acks=tuple(self._acks), halts=tuple(self._halts))
            self._acks, self._halts = [], []
            await self._send(message)
