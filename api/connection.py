"""What a connection may cost: how many there are, how long a head may take, and how long an answer may go unread.

It stands between the transport and the server's own protocol, because gunicorn's ASGI worker (27.0) bounds the size of a
head and the time between two requests, and no more: it pays no heed to `worker_connections`, waits for a head for ever, and
its `send` waits for ever for a client that does not read. Bodies are bounded in `api.disconnect` and `api.body`.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any

from api.errors import ApiError, TooManyConnections, TooSlow, response
from pipeline.config import Config

log = logging.getLogger(__name__)

SPARE = 100  # connections beyond the bound that are told so; what comes then is dropped
REFUSED_SECONDS = 1.0  # in which who was refused may read why
#: Bytes of an answer that the kernel takes while the client reads nothing: it would take megabytes for each.
UNREAD = 16 << 10
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: end with RST, and forget what was not sent


class Gate:
    """The connections of one process."""

    def __init__(self, config: Config) -> None:
        self.bound = config.connections
        self.request_seconds = config.request_seconds
        self.stall_seconds = config.stall_seconds
        self.open = 0

    def guard(self, make: Callable[..., Any]) -> Callable[..., "Connection"]:
        """make: gunicorn's protocol."""
        return lambda *arguments: Connection(self, make(*arguments))


class Connection(asyncio.Protocol):
    """One of them. Passes on what is within bounds."""

    _transport: asyncio.Transport

    def __init__(self, gate: Gate, server: Any) -> None:
        """server: the protocol that is guarded. It calls its `app` when the head of a request is there."""
        self._gate = gate
        self._server = server
        self._app, server.app = server.app, self._serve
        self._refused = False
        self._calls = 0  # requests that are being answered
        self._heard = False  # something of a head has come
        self._timers: dict[Callable[[], None], asyncio.TimerHandle] = {}
        self._unread = 0  # bytes, when last looked at

    # What the transport says

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._gate.open += 1
        if self._gate.open > self._gate.bound:
            self._refuse()
            return
        _bound_what_the_kernel_takes(transport)
        self._server.connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever the kernel does not take makes `send` wait
        self._start(self._late, self._gate.request_seconds)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._calls:
            self._heard = True
            if self._late not in self._timers:
                self._start(self._late, self._gate.request_seconds)
        self._server.data_received(data)

    def eof_received(self) -> bool | None:
        return None if self._refused else self._server.eof_received()

    def pause_writing(self) -> None:
        self._server.pause_writing()
        self._unread = self._transport.get_write_buffer_size()
        self._start(self._stalled, self._gate.stall_seconds)

    def resume_writing(self) -> None:
        self._stop(self._stalled)
        self._server.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._gate.open -= 1
        for what in list(self._timers):
            self._stop(what)
        if not self._refused:
            self._server.connection_lost(error)

    # What the server says

    async def _serve(self, *arguments: Any) -> None:
        """A head is there."""
        self._stop(self._late)
        self._heard = False
        self._calls += 1
        try:
            await self._app(*arguments)
        finally:
            self._calls -= 1

    # What is out of bounds

    def _refuse(self) -> None:
        self._refused = True
        if self._gate.open > self._gate.bound + SPARE:
            self._transport.abort()
            return
        self._tell(TooManyConnections(f"{self._gate.bound} connections are open; try again later"))
        # closed now, with a request that nobody read, it would be reset, and the answer lost
        self._start(self._transport.abort, REFUSED_SECONDS)

    def _late(self) -> None:
        """To who has said nothing, nothing is said: browsers open connections ahead of need."""
        if self._heard:
            self._tell(TooSlow(f"a request's head did not come within {self._gate.request_seconds:g} s"))
        self._transport.close()

    def _stalled(self) -> None:
        """While writing is paused, the buffer can only shrink."""
        unread = self._transport.get_write_buffer_size()
        if unread < self._unread:
            self._unread = unread
            self._start(self._stalled, self._gate.stall_seconds)
            return
        log.info(
            "a client read nothing of its answer for %g s: disconnected",
            self._gate.stall_seconds,
            extra={"action": "client_stalled"},
        )
        # closed, it would wait for the rest to be read, here and then in the kernel
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._transport.abort()

    def _tell(self, error: ApiError) -> None:
        self._transport.write(response(error))

    def _start(self, what: Callable[[], None], seconds: float) -> None:
        self._stop(what)
        self._timers[what] = asyncio.get_running_loop().call_later(seconds, what)

    def _stop(self, what: Callable[[], None]) -> None:
        if timer := self._timers.pop(what, None):
            timer.cancel()


def _bound_what_the_kernel_takes(transport: asyncio.Transport) -> None:
    connection = transport.get_extra_info("socket")
    if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNREAD)
