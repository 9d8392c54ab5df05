"""Sends KV caches: one DEALER to each decode worker, any number of transfers on it.

The compute thread hands over layers as they become ready; the event loop sends them. Between the two lies a bounded
buffer: when the wire is slower than the device, the device waits. Tensor frames go out without a copy; pyzmq keeps each
buffer alive until libzmq has let go of it.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash
import zmq
import zmq.asyncio
from typing_extensions import Buffer
from zmq.utils.monitor import recv_monitor_message

from brokers.curve import Key
from pipeline.errors import CreditVoid, FrameError, TransferError
from pipeline.frames import PART_BYTES, Abort, Ack, Commit, Message, Nack, Ok, Open, Part, decode, encode
from pipeline.geometry import Geometry

log = logging.getLogger(__name__)

HIGH_WATER = 8  # messages of up to 1 MiB that libzmq holds per peer, beside our own buffer
IDLE_SECONDS = 60.0  # a connection unused for so long is closed: its decode worker may be gone


class KVSender:
    def __init__(
        self,
        *,
        key: Key | None,
        geometry: Geometry,
        buffer_bytes: int,
        open_seconds: float,
        part_seconds: float,
    ) -> None:
        """open_seconds: for an answer to OPEN. part_seconds: for the wire to take a frame, and for the ACK."""
        self._key = key
        self.geometry = geometry
        self.buffer_bytes = buffer_bytes
        self.open_seconds = open_seconds
        self.part_seconds = part_seconds
        self._zmq = zmq.asyncio.Context()
        self._links: dict[str, _Link] = {}

    async def open(self, endpoint: str, *, nonce: str, job_id: str, lease_id: str, tokens: int) -> "Outbound":
        """Asks for the place that the credit promised. tokens: length of the KV cache.

        Raises CreditVoid if the place is gone or nobody answers, TransferError if the cache is refused.
        """
        self._close_idle()
        link = self._links.get(endpoint) or _Link(self._zmq, endpoint, self._key, int(self.part_seconds * 1000))
        self._links[endpoint] = link
        outbound = Outbound(self, link, nonce, lease_id)
        opened = Open(nonce=nonce, job=job_id, lease=lease_id, tokens=tokens, fingerprint=self.geometry.fingerprint())
        try:
            await outbound.ask(opened, self.open_seconds)
        except TimeoutError:
            outbound.close()
            self._links.pop(endpoint).close()
            raise CreditVoid(f"no answer to OPEN from {endpoint}") from None
        except TransferError:
            outbound.close()
            raise
        outbound.is_open = True
        return outbound

    def close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()
        self._zmq.destroy(linger=0)

    def _close_idle(self) -> None:
        limit = time.monotonic() - IDLE_SECONDS
        for endpoint, link in list(self._links.items()):
            if not link.transfers and link.used < limit:
                self._links.pop(endpoint).close()


class _Link:
    """The connection to one decode worker."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, key: Key | None, send_ms: int) -> None:
        self.endpoint = endpoint
        self.transfers: dict[str, Outbound] = {}
        self.used = time.monotonic()
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),  # do not queue for a peer that is not there
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.SNDTIMEO, send_ms),
            (zmq.MAXMSGSIZE, PART_BYTES),  # nothing large comes back
            (zmq.LINGER, 0),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            self._socket.setsockopt(option, value)
        if key is not None:
            key.call(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    async def send(self, message: Message, tensor: memoryview | None = None) -> None:
        frames: list[bytes | memoryview] = [encode(message)] + ([] if tensor is None else [tensor])
        self.used = time.monotonic()
        try:
            await self._socket.send_multipart(frames, copy=tensor is None)
        except zmq.ZMQError as error:
            raise TransferError(f"{self.endpoint} takes nothing: {error}") from error

    def tell(self, message: Message) -> None:
        """Sends without waiting. (NOBLOCK would not do: behind a send that waits, pyzmq queues it all the same.)"""
        sent: asyncio.Future[Any] = asyncio.ensure_future(self._socket.send_multipart([encode(message)]))
        sent.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard or not

    def close(self) -> None:
        for outbound in list(self.transfers.values()):
            outbound.fail(TransferError(f"the connection to {self.endpoint} was closed"))
        for task in self._tasks:
            task.cancel()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close(linger=0)

    async def _watch(self) -> None:
        """A transfer ends with its connection, for the next one is another peer to the decode worker. Its farewell may be lost:
        TCP throws away what it has received when the other side closes with something unread."""
        while True:
            await recv_monitor_message(self._monitor)
            for outbound in self.transfers.values():
                if outbound.is_open:
                    outbound.fail(TransferError(f"the connection to {self.endpoint} was lost"))

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                message = decode(frames[0].buffer)
            except FrameError as error:
                log.warning("refused a reply: %s", error, extra={"action": "frame_refused"})
                continue
            outbound = self.transfers.get(message.nonce)
            if outbound is not None:
                outbound.answered(message)


class Outbound:
    """One transfer. `put` is for the compute thread, everything else for the event loop."""

    def __init__(self, sender: KVSender, link: _Link, nonce: str, lease_id: str) -> None:
        self._sender = sender
        self._link = link
        self._nonce = nonce
        self._lease_id = lease_id
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[None] = self._loop.create_future()
        self._outbox: asyncio.Queue[tuple[Message, memoryview | None]] = asyncio.Queue()
        self._room = threading.Condition()
        self._buffered = 0  # bytes handed over and not yet with libzmq
        self._failure: TransferError | None = None
        self.bytes_sent = 0
        self.is_open = False  # the decode worker has said OK
        link.transfers[nonce] = self
        self._writer = asyncio.create_task(self._write())

    def put(self, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        """K and V `[kv_heads, tokens, head_dim]`, never written again. Waits while the buffer is full.

        Raises TransferError when the transfer has failed meanwhile, so that the device stops computing for it.
        """
        for tensor, buffer in (("k", k), ("v", v)):
            for part, frame in self._cut(layer, tensor, start, tokens, buffer):
                self._reserve(frame.nbytes)
                self._loop.call_soon_threadsafe(self._outbox.put_nowait, (part, frame))

    async def commit(self, tokens: tuple[int, ...]) -> None:
        """After the last `put`: everything was sent. tokens: what the job has generated so far.

        Returns when the decode worker has taken the job over; raises TransferError otherwise. Never to be repeated.
        """
        try:
            await self.ask(Commit(nonce=self._nonce, lease=self._lease_id, tokens=tokens), self._sender.part_seconds)
        except TimeoutError:
            raise TransferError(f"no ACK from {self._link.endpoint}") from None

    def abort(self, reason: str) -> None:
        """Tells the decode worker to forget it; harmless when it has already. A courtesy, so nobody waits for it: a
        decode worker that does not hear it finds out from the lease."""
        self.close()
        self._link.tell(Abort(nonce=self._nonce, reason=reason))

    def close(self) -> None:
        self.fail(TransferError("closed"))
        self._writer.cancel()
        self._link.transfers.pop(self._nonce, None)

    async def ask(self, message: Open | Commit, seconds: float) -> None:
        """Sends after all that was put, and waits for the answer."""
        if self._failure is not None:
            raise self._failure
        self._answer = self._loop.create_future()
        self._outbox.put_nowait((message, None))
        await asyncio.wait_for(self._answer, seconds)

    def answered(self, message: Message) -> None:
        if isinstance(message, Ok | Ack):
            if not self._answer.done():
                self._answer.set_result(None)
        elif isinstance(message, Nack):
            kind = CreditVoid if message.void else TransferError
            self.fail(kind(f"decode refused: {message.reason}"))
        elif isinstance(message, Abort):
            self.fail(TransferError(f"decode gave up: {message.reason}"))

    def fail(self, error: TransferError) -> None:
        with self._room:
            self._failure = self._failure or error
            self._room.notify_all()
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()  # seen here: nobody may be waiting

    async def _write(self) -> None:
        try:
            while True:
                message, tensor = await self._outbox.get()
                await self._link.send(message, tensor)
                if tensor is not None:
                    self.bytes_sent += tensor.nbytes
                    with self._room:
                        self._buffered -= tensor.nbytes
                        self._room.notify_all()
        except TransferError as error:
            self.fail(error)

    def _reserve(self, size: int) -> None:
        deadline = time.monotonic() + self._sender.part_seconds
        with self._room:
            while self._failure is None and self._buffered and self._buffered + size > self._sender.buffer_bytes:
                if not self._room.wait(deadline - time.monotonic()):
                    raise TransferError(f"{self._link.endpoint} has taken nothing for {self._sender.part_seconds} s")
            if self._failure is not None:
                raise self._failure
            self._buffered += size

    def _cut(
        self, layer: int, tensor: str, start: int, tokens: int, buffer: Buffer
    ) -> Iterator[tuple[Part, memoryview]]:
        """Frames of about PART_BYTES; one that fits is not copied."""
        geometry = self._sender.geometry
        step = max(1, PART_BYTES // geometry.token_bytes)
        rows = np.frombuffer(memoryview(buffer), dtype=np.uint8).reshape(geometry.kv_heads, tokens, -1)
        for at in range(0, tokens, step):
            piece = np.ascontiguousarray(rows[:, at : at + step])
            frame = piece.data.cast("B")
            count = piece.shape[1]
            yield (
                Part(
                    nonce=self._nonce,
                    layer=layer,
                    tensor=tensor,
                    start=start + at,
                    tokens=count,
                    dtype=geometry.dtype,
                    shape=(geometry.kv_heads, count, geometry.head_dim),
                    digest=xxhash.xxh3_128_digest(frame),
                ),
                frame,
            )
