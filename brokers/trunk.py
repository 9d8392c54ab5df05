"""The connection on which a process calls its scripts: any number under way at once, and the answers come in order.

The driver's pool lends each call a connection for itself, and takes longer for that than Redis for a script. Connecting is the
driver's work here, too, and so is whatever is not asked a thousand times a second.
"""

import asyncio
from collections import deque
from typing import Any

import hiredis
import redis
from redis.asyncio.retry import Retry

_MORE = object()  # is to come before there is an answer


class Trunk:
    def __init__(self, pool: Any, *, seconds: float, retry: Retry) -> None:
        """pool: makes the connection. seconds: for an answer. retry: when the connection was lost, and with it the answers."""
        self._pool = pool
        self._seconds = seconds
        self._retry = retry
        self._current: _Connection | None = None
        self._opening: asyncio.Task[_Connection] | None = None

    async def call(self, *command: str | bytes | memoryview | int | float) -> Any:
        """A command that is safe to repeat. Raises the driver's exceptions."""
        packed = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows commands of one word only
        return await self._retry.call_with_retry(lambda: self._ask(packed), _nothing)

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
        if self._current is not None:
            await self._current.close()

    async def _ask(self, packed: bytes) -> Any:
        current = self._current
        if current is None or current.lost:
            current = await self._open()
        return await current.ask(packed)

    async def _open(self) -> "_Connection":
        """Once for all who want it now, and what comes of it is theirs: a Redis that hangs would hang for each in turn."""
        if self._opening is None:
            self._opening = asyncio.create_task(self._connect())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _connect(self) -> "_Connection":
        if self._current is not None:
            await self._current.close()
        connection = self._pool.make_connection()
        await connection.connect()
        self._current = _Connection(connection, self._seconds)
        return self._current

    def _opened(self, opening: "asyncio.Task[_Connection]") -> None:
        self._opening = None
        if not opening.cancelled():
            opening.exception()  # seen here: perhaps nobody waits any more


class _Connection(asyncio.Protocol):
    """One connection, made by the driver and read here, until it is lost."""

    def __init__(self, connection: Any, seconds: float) -> None:
        self.lost = False
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._transport = connection._writer.transport
        self._transport.set_protocol(self)
        self._reader = hiredis.Reader(encoding="utf-8", replyError=_refusal, notEnoughData=_MORE)
        self._outbox: list[bytes] = []  # what is asked in one turn of the loop goes out together
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # in the order in which they asked, and when
        self._watch: asyncio.TimerHandle | None = None

    def ask(self, packed: bytes) -> asyncio.Future[Any]:
        if self.lost:
            raise redis.ConnectionError("the connection was lost as soon as it was there")
        if not self._outbox:
            self._loop.call_soon(self._flush)
        if self._watch is None:
            self._watch = self._loop.call_later(self._seconds, self._look)
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._outbox.append(packed)
        self._waiting.append((answer, self._loop.time()))
        return answer

    async def close(self) -> None:
        self._drop(redis.ConnectionError("closed"))
        await self._connection.disconnect(nowait=True)

    def _flush(self) -> None:
        self._transport.write(b"".join(self._outbox))
        self._outbox.clear()

    def _look(self) -> None:
        """Has anybody waited for too long? Who hangs for one hangs for all."""
        self._watch = None
        if not self._waiting:
            return
        left = self._waiting[0][1] + self._seconds - self._loop.time()
        if left > 0:
            self._watch = self._loop.call_later(left, self._look)
        else:
            self._drop(redis.TimeoutError(f"no answer for {self._seconds} s"))

    def _drop(self, error: Exception) -> None:
        """Whoever waits is told."""
        self.lost = True
        self._transport.abort()
        if self._watch is not None:
            self._watch.cancel()
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)

    def data_received(self, data: bytes) -> None:
        """Whoever was cancelled still gets an answer, and it is thrown away: so all others get their own."""
        self._reader.feed(data)
        while (answer := self._reader.gets()) is not _MORE:
            if isinstance(answer, hiredis.PushNotification):
                continue  # nobody asked
            waiting, _ = self._waiting.popleft()
            if waiting.done():
                continue
            if isinstance(answer, Exception):
                waiting.set_exception(answer)
            else:
                waiting.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        self._drop(redis.ConnectionError(str(error or "Redis has closed the connection")))


def _refusal(text: str) -> Exception:
    """What Redis has against a command; as the driver has it, who is loading is as good as away."""
    kinds = {"NOSCRIPT": redis.exceptions.NoScriptError, "LOADING": redis.BusyLoadingError}
    return kinds.get(text.partition(" ")[0], redis.ResponseError)(text)


async def _nothing(_: Exception) -> None:
    """Whoever waited on the connection that was lost has been told."""
