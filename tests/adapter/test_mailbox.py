"""Reports on their way to the scheduler: few messages, nothing lost, in order."""

from __future__ import annotations

import asyncio

from tokenflow_sgl.adapter.acks import Ack
from tokenflow_sgl.adapter.mailbox import Mailbox
from tokenflow_sgl.adapter.messages import AckReq


def test_all_of_a_moment_goes_in_one_message_and_in_order() -> None:
    sent: list[AckReq] = []

    async def tell() -> None:
        async def send(message: AckReq) -> None:
            sent.append(message)

        mailbox = Mailbox(send)
        for count in range(100):
            mailbox.report([Ack("a", 0, count)])
        mailbox.halt("b", True)
        mailbox.halt("b", False)
        await mailbox._sending  # type: ignore[misc]

    asyncio.run(tell())
    assert [m.acks for m in sent] == [tuple(("a", 0, count) for count in range(100))]
    assert [m.halts for m in sent] == [(("b", True), ("b", False))]


def test_what_is_told_while_a_message_is_on_its_way_goes_in_the_next() -> None:
    sent: list[AckReq] = []

    async def tell() -> None:
        async def send(message: AckReq) -> None:
            sent.append(message)
            if len(sent) == 1:
                mailbox.report([Ack("late", 0, 1)])
            if len(sent) == 2:
                raise ConnectionError("the scheduler is gone")

        mailbox = Mailbox(send)
        mailbox.report([Ack("first", 0, 1)])
        await asyncio.wait([mailbox._sending])  # type: ignore[list-item]
        mailbox.report([Ack("after", 0, 1)])
        await asyncio.wait([mailbox._sending])  # type: ignore[list-item]

    asyncio.run(tell())
    assert [m.acks[0][0] for m in sent] == ["first", "late", "after"]
