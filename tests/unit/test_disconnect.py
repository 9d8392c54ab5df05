"""The one owner of `receive`, against a server that says what a test wants."""

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from api import disconnect
from api.disconnect import CLIENT, Disconnect, Event, Receive, Scope, Send

LAST = {"type": "http.request", "body": b"end", "more_body": False}
PART = {"type": "http.request", "body": b"part", "more_body": True}
GONE = {"type": "http.disconnect"}
START: Event = {"type": "http.response.start", "status": 200, "headers": []}
END: Event = {"type": "http.response.body", "body": b""}


class Server:
    """Says its events in order, and then nothing more."""

    def __init__(self, *events: Event) -> None:
        self._events = list(events)
        self.received = 0
        self.sent: list[Event] = []
        self.more = asyncio.Event()

    async def receive(self) -> Event:
        if self._events:
            self.received += 1
            return self._events.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    async def send(self, event: Event) -> None:
        self.sent.append(event)

    async def serve(self, app: Any, kind: str = "http") -> None:
        await Disconnect(app, 1.0)({"type": kind}, self.receive, self.send)


async def answer(scope: Scope, receive: Receive, send: Send) -> None:
    """Without a look at the body."""
    await receive()
    await send(dict(START))
    await send(END)


def headers(server: Server) -> Iterable[tuple[bytes, bytes]]:
    found: Iterable[tuple[bytes, bytes]] = server.sent[0]["headers"]
    return found


async def test_a_client_that_leaves_is_known_though_nobody_receives() -> None:
    """C11. Without the task that is always at `receive`, an application that waits for something else would not hear of it."""

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        async with asyncio.timeout(1):
            await scope[CLIENT].gone.wait()

    await Server(LAST, GONE).serve(app)


async def test_an_application_hears_all_events_in_order() -> None:
    heard = []

    async def app(_scope: Scope, receive: Receive, _send: Send) -> None:
        while (event := await receive())["type"] == "http.request":
            heard.append(event["body"])

    await Server(PART, PART, LAST, GONE).serve(app)
    assert heard == [b"", b"part", b"part", b"end"]


async def test_a_body_that_nobody_reads_is_not_read_ahead_without_bound() -> None:
    """Without the queue's bound all of it would come into memory."""
    server = Server(*[PART] * 1000, LAST)

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        for _ in range(2000):
            await asyncio.sleep(0)
        assert server.received <= disconnect.AHEAD + 1

    await server.serve(app)
    assert server.received == 1001, "after the answer it was taken, for nobody"


async def test_an_answer_before_the_body_has_come_announces_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the header a client would use the connection again, and be reset."""
    monkeypatch.setattr(disconnect, "LINGER_SECONDS", 0.01)
    early, late = Server(PART), Server(LAST)
    await early.serve(answer)
    await late.serve(answer)
    assert list(headers(early)) == [(b"connection", b"close")]
    assert list(headers(late)) == []


@pytest.mark.parametrize("bound", ["LINGER_SECONDS", "QUIET_SECONDS"])
async def test_a_client_that_never_ends_its_body_is_not_waited_for_without_bound(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """H2. Without the bounds on the lingering the connection would stay, or stay for long."""
    monkeypatch.setattr(disconnect, bound, 0.01)
    async with asyncio.timeout(0.5):
        await Server(PART, PART).serve(answer)


@pytest.mark.parametrize("last", [LAST, GONE])
async def test_a_client_that_has_said_all_or_left_is_not_waited_for(last: Event) -> None:
    async with asyncio.timeout(1):
        await Server(PART, last).serve(answer)


async def test_a_websocket_is_refused_before_the_application_hears_of_it() -> None:
    """Without the refusal each would be a traceback in the log."""
    server = Server()

    async def app(_scope: Scope, _receive: Receive, _send: Send) -> None:
        raise AssertionError

    await server.serve(app, "websocket")
    assert server.sent == [{"type": "websocket.close"}]
