"""Receives KV caches: one ROUTER on an ephemeral port, shared by all prefill workers.

It believes nothing until `pipeline/transfer.py` has checked it, keeps what came in its own memory, and asks its desk
(the decode worker) three things: is this credit yours, this transfer came to nothing, this one is whole.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import xxhash
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from brokers.curve import FAILURES, Key
from pipeline.errors import FrameError, KVRelayError
from pipeline.frames import FRAME_LIMIT, Abort, Ack, Commit, Message, Nack, Ok, Open, Part, decode, encode
from pipeline.geometry import Geometry
from pipeline.transfer import Transfer

log = logging.getLogger(__name__)

HIGH_WATER = 64  # messages per peer that libzmq holds before TCP pushes back
KNOCK_SECONDS = 10.0  # between lines about refused peers
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
REPLY_SECONDS = 1.0  # replies are tiny; a peer that does not take one for so long is gone


class Desk(Protocol):
    def take(self, nonce: str) -> bool:
        """Uses the credit up; False if it is not one of ours."""
        ...

    def dropped(self, nonce: str) -> None:
        """The transfer came to nothing."""
        ...

    async def arrived(self, transfer: Transfer, commit: Commit) -> None:
        """The KV cache is whole. Returns when the job is ours; any KVRelayError means that it is not."""
        ...


class _Arrival:
    """A transfer under way, and whose it is."""

    def __init__(self, peer: bytes, transfer: Transfer) -> None:
        self.peer = peer
        self.transfer = transfer
        self.heard = time.monotonic()
        self.committing = False


class KVReceiver:
    def __init__(
        self, *, host: str, key: Key | None, geometry: Geometry, context: int, part_seconds: float, desk: Desk
    ) -> None:
        self._geometry = geometry
        self._context = context
        self._part_seconds = part_seconds
        self._desk = desk
        self._arrivals: dict[str, _Arrival] = {}
        self._commits: set[asyncio.Task[None]] = set()
        self._zmq = zmq.asyncio.Context()
        self._socket = self._zmq.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),  # a reply to a peer that is gone is an error, not silence
            (zmq.RCVHWM, HIGH_WATER),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.SNDTIMEO, int(REPLY_SECONDS * 1000)),
            (zmq.MAXMSGSIZE, FRAME_LIMIT),
            (zmq.LINGER, 0),
            (zmq.TCP_KEEPALIVE, 1),
        ):
            self._socket.setsockopt(option, value)
        if key is not None:
            key.serve(self._socket)
        elif host not in LOOPBACK:
            log.warning(
                "KV caches are received on %s in the clear, from anybody; KVR_KV_KEY encrypts them",
                host,
                extra={"action": "no_key"},
            )
        self._monitor = self._socket.get_monitor_socket(FAILURES)
        self._socket.bind(f"tcp://{host}:0")
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """For ever. The receive is never cancelled while the worker lives: a cancelled one loses its message."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            try:
                await self._receive(frames)
            except FrameError as error:
                log.warning("refused a KV message: %s", error, extra={"action": "frame_refused"})

    async def watch(self) -> None:
        """For ever: says when somebody knocks who has another key, or none. Once in a while, for he will knock again."""
        quiet_until = 0.0
        while True:
            await recv_monitor_message(self._monitor)
            if time.monotonic() > quiet_until:
                quiet_until = time.monotonic() + KNOCK_SECONDS
                log.warning(
                    "a handshake came to nothing: a peer with another key, or none", extra={"action": "key_refused"}
                )

    def arrivals(self) -> dict[str, Transfer]:
        """nonce → transfer, of those that wait for more frames."""
        return {nonce: arrival.transfer for nonce, arrival in self._arrivals.items() if not arrival.committing}

    @property
    def committing(self) -> bool:
        """A takeover is under way in Redis."""
        return bool(self._commits)

    def stale(self) -> list[str]:
        """Transfers that have been silent for too long."""
        limit = time.monotonic() - self._part_seconds
        return [nonce for nonce in self.arrivals() if self._arrivals[nonce].heard < limit]

    async def drop(self, nonce: str, reason: str) -> None:
        """Gives a transfer up and tells its sender. Not once it is being taken over, which whoever asks may not know yet: the
        handover in Redis decides then."""
        arrival = self._arrivals.get(nonce)
        if arrival is not None and not arrival.committing:
            self._forget(nonce)
            await self._reply(arrival.peer, Abort(nonce=nonce, reason=reason))

    def close(self) -> None:
        for task in self._commits:
            task.cancel()
        self._socket.disable_monitor()
        self._zmq.destroy(linger=0)

    async def _receive(self, frames: list[zmq.Frame]) -> None:
        if not 2 <= len(frames) <= 3:
            raise FrameError(f"{len(frames)} frames")
        peer, message = frames[0].bytes, decode(frames[1].buffer)
        if isinstance(message, Part) != (len(frames) == 3):
            raise FrameError(f"{message.kind} with {len(frames) - 2} tensors")
        if isinstance(message, Open):
            await self._open(peer, message)
            return
        arrival = self._arrivals.get(message.nonce)
        if arrival is None or arrival.peer != peer:
            if isinstance(message, Commit):
                await self._reply(peer, Nack(nonce=message.nonce, reason="there is no such transfer"))
            else:
                log.debug("late %s", message.kind, extra={"action": "frame_late"})
            return
        if arrival.committing:  # whatever comes now is late: the handover in Redis decides
            return
        arrival.heard = time.monotonic()
        try:
            if isinstance(message, Part):
                tensor = frames[2].buffer
                arrival.transfer.accept(message, tensor, xxhash.xxh3_128_digest(tensor))
            elif isinstance(message, Commit):
                arrival.transfer.check_complete(message)
                arrival.committing = True
                self._spawn(self._commit(arrival, message))
            elif isinstance(message, Abort):
                self._forget(message.nonce)
            else:
                raise FrameError(f"{message.kind} is not for a decode worker")
        except FrameError as error:
            self._forget(message.nonce)
            await self._refuse(peer, message.nonce, error)

    async def _open(self, peer: bytes, opened: Open) -> None:
        if not self._desk.take(opened.nonce):
            reason = "the credit is void"
            await self._reply(peer, Nack(nonce=opened.nonce, reason=reason, void=True))
            return
        try:
            transfer = Transfer(opened, self._geometry, self._context)
        except FrameError as error:
            self._desk.dropped(opened.nonce)
            await self._refuse(peer, opened.nonce, error)
            return
        self._arrivals[opened.nonce] = _Arrival(peer, transfer)
        await self._reply(peer, Ok(nonce=opened.nonce))

    async def _commit(self, arrival: _Arrival, commit: Commit) -> None:
        try:
            await self._desk.arrived(arrival.transfer, commit)
        except KVRelayError as error:
            self._forget(commit.nonce)
            await self._reply(arrival.peer, Nack(nonce=commit.nonce, reason=str(error)))
        else:
            del self._arrivals[commit.nonce]
            await self._reply(arrival.peer, Ack(nonce=commit.nonce))

    async def _refuse(self, peer: bytes, nonce: str, error: FrameError) -> None:
        log.warning("refused a KV cache: %s", error, extra={"action": "transfer_refused"})
        await self._reply(peer, Nack(nonce=nonce, reason=str(error)))

    async def _reply(self, peer: bytes, message: Message) -> None:
        try:
            await self._socket.send_multipart([peer, encode(message)])
        except zmq.ZMQError as error:  # unreachable or not reading: its transfer ends by itself
            log.info("no %s for a peer that is gone: %s", message.kind, error, extra={"action": "peer_gone"})

    def _forget(self, nonce: str) -> None:
        del self._arrivals[nonce]
        self._desk.dropped(nonce)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._commits.add(task)
        task.add_done_callback(self._commits.discard)
