"""A client that leaves is noticed at once: one owner of `receive()`.

An ASGI server says `http.disconnect` to whoever calls `receive()`, and only one may. So one task receives everything,
passes it on through a small queue, and notes in `scope["kvrelay.client"]` when the client has left; everybody else waits for
that. A half-closed connection counts as leaving.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

CLIENT = "kvrelay.client"
AHEAD = 8  # body chunks received and not yet read: beyond them TCP pushes back
LINGER_SECONDS, QUIET_SECONDS = 5.0, 1.0


@dataclass(slots=True)
class Bodies:
    """Of all requests of a process. held: bytes that have come of those that are not whole."""

    seconds: float  # that one may take to come
    held: int = 0


@dataclass(slots=True, kw_only=True)
class Client:
    """Of one request. whole: all of its body has come."""

    bodies: Bodies
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    whole: bool = False


class Disconnect:
    """Wraps an ASGI application."""

    def __init__(self, app: App, body_seconds: float) -> None:
        self._app = app
        self._bodies = Bodies(body_seconds)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})  # before it is accepted: a 403
            return
        client = scope[CLIENT] = Client(bodies=self._bodies)
        events: asyncio.Queue[Event] = asyncio.Queue(AHEAD)
        # Falcon waits for a first event before it does anything. Who is not let in need not be waited for.
        events.put_nowait({"type": "http.request", "body": b"", "more_body": True})
        pump = asyncio.create_task(_pump(receive, events, client))
        await asyncio.sleep(0)  # it takes what is there already; of most requests that is all

        async def next_event() -> Event:
            return {"type": "http.disconnect"} if client.gone.is_set() and events.empty() else await events.get()

        async def send_from(event: Event) -> None:
            if event["type"] == "http.response.start" and not client.whole:
                event["headers"] = [*event["headers"], (b"connection", b"close")]
            await send(event)

        try:
            await self._app(scope, next_event, send_from)
            await _linger(events, client)
        finally:
            pump.cancel()


async def _pump(receive: Receive, events: asyncio.Queue[Event], client: Client) -> None:
    while not client.gone.is_set():
        event = await receive()
        if event["type"] == "http.disconnect":
            client.gone.set()
        elif not event.get("more_body"):
            client.whole = True
        await events.put(event)


async def _linger(events: asyncio.Queue[Event], client: Client) -> None:
    """Who is answered before all was said may go on saying it for a while, to nobody, as long as something comes.

    The server closes the connection when we return. What came and was not read makes that a reset, and a reset can destroy
    the answer before the client has seen it (RFC 9112, 9.6).
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            while not (client.whole or client.gone.is_set()):
                async with asyncio.timeout(QUIET_SECONDS):
                    await events.get()
