"""A client that leaves is noticed at once: one owner of `receive()`.

An ASGI server says `http.disconnect` to whoever calls `receive()`, and only one may. So one task receives everything,
passes it on through a small queue, and sets `scope["kvrelay.gone"]` when the client has left; everybody else waits for
that event. A half-closed connection counts as leaving.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GONE = "kvrelay.gone"
AHEAD = 8  # body chunks received and not yet read: beyond them TCP pushes back


class Disconnect:
    """Wraps an ASGI application."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gone = scope[GONE] = asyncio.Event()
        events: asyncio.Queue[Event] = asyncio.Queue(AHEAD)
        pump = asyncio.create_task(_pump(receive, events, gone))

        async def next_event() -> Event:
            return {"type": "http.disconnect"} if gone.is_set() and events.empty() else await events.get()

        try:
            await self._app(scope, next_event, send)
        finally:
            pump.cancel()


async def _pump(receive: Receive, events: asyncio.Queue[Event], gone: asyncio.Event) -> None:
    while not gone.is_set():
        event = await receive()
        if event["type"] == "http.disconnect":
            gone.set()
        await events.put(event)
