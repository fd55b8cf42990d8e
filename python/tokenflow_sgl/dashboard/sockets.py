"""The WebSocket of the page's chat, carried on to the server's with the key given at the start.

Owns no message: texts pass both ways as they are. Invariant: when one side ends, the other is ended with the same code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect

MAX_MESSAGE_BYTES = 8 << 20
# What may not be sent in a close frame: "no code" and "connection lost".
_UNSENDABLE = {1005: 1000, 1006: 1011}


async def relay(browser: WebSocket, url: str, headers: Mapping[str, str]) -> None:
    """Until one side ends. A server that refuses the handshake refuses the browser's."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidHandshake
    from websockets.typing import Subprotocol

    at = url.replace("http", "ws", 1) + "/tokenflow/stream"
    try:
        server = await connect(
            at,
            additional_headers=headers,
            subprotocols=[Subprotocol("tokenflow")],
            max_size=MAX_MESSAGE_BYTES,
            proxy=None,
        )
    except (OSError, InvalidHandshake, TimeoutError):
        await browser.close(1011)  # before accept: the browser sees a refused handshake
        return
    async with server:
        offered = browser.scope.get("subprotocols", [])
        await browser.accept("tokenflow" if "tokenflow" in offered else None)
        ways = [asyncio.create_task(_up(browser, server)), asyncio.create_task(_down(server, browser))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)


async def _up(browser: WebSocket, server: Any) -> None:
    from websockets.exceptions import ConnectionClosed

    try:
        while True:
            await server.send(await browser.receive_text())
    except WebSocketDisconnect as end:
        await server.close(_UNSENDABLE.get(end.code, end.code))
    except ConnectionClosed:
        return  # _down tells the browser
    except KeyError:
        await server.close(1003)  # a binary frame: the protocol has none


async def _down(server: Any, browser: WebSocket) -> None:
    async for message in server:
        await browser.send_text(message)
    await browser.close(_UNSENDABLE.get(server.close_code, server.close_code or 1000))
