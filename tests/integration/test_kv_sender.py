"""The sender and a decode worker that goes away, or reads no more."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio

from brokers.kv_sender import KVSender, Outbound
from pipeline.errors import TransferError
from pipeline.frames import Ok, Open, decode, encode
from pipeline.geometry import Geometry, Layer

GEOMETRY = Geometry(model="m", kv_heads=1, head_dim=4, dtype="bfloat16", layers=(Layer(),) * 64)
TOKENS = 1 << 17  # a mebibyte of K
SOON = 5.0  # seconds; the time-outs that must not be waited for are far longer


class Opened:
    """A transfer to a decode worker that has said OK, and reads nothing more."""

    def __init__(self) -> None:
        self.worker = zmq.asyncio.Context()
        self.router = self.worker.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.RCVHWM, 1)
        self.router.bind("tcp://127.0.0.1:0")
        self.sender = KVSender(key=None, geometry=GEOMETRY, buffer_bytes=1 << 30, open_seconds=SOON, part_seconds=60.0)
        self.outbound: Outbound

    async def open(self) -> None:
        endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        opening = asyncio.create_task(self.sender.open(endpoint, nonce="n", job_id="j", lease_id="l", tokens=TOKENS))
        peer, header = await self.router.recv_multipart()
        opened = decode(header)
        assert isinstance(opened, Open)
        await self.router.send_multipart([peer, encode(Ok(nonce=opened.nonce))])
        self.outbound = await opening

    async def send_until_stuck(self) -> None:
        deadline = time.monotonic() + SOON
        while not self.outbound._link._socket._send_futures:
            self.outbound.put(0, 0, TOKENS, bytes(8 * TOKENS), bytes(8 * TOKENS))
            await asyncio.sleep(0.01)
            assert time.monotonic() < deadline, "no send is stuck"


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    opened = Opened()
    await opened.open()
    yield opened
    opened.sender.close()
    opened.worker.destroy(linger=0)


async def test_nobody_waits_to_abort_behind_a_send_that_is_stuck(opened: Opened) -> None:
    """Fails when `abort` awaits its send: pyzmq queues it behind the stuck one, NOBLOCK or not."""
    await opened.send_until_stuck()
    began = time.monotonic()
    opened.outbound.abort("the job is over")
    opened.sender.close()
    assert time.monotonic() - began < SOON


async def test_a_transfer_ends_with_its_connection(opened: Opened) -> None:
    """Without, its sender waits for part_seconds: of a decode worker that closes with something unread, a farewell is lost."""
    await opened.send_until_stuck()
    opened.worker.destroy(linger=0)
    with pytest.raises(TransferError, match="was lost"):
        await asyncio.wait_for(opened.outbound.commit((1,)), SOON)
    with pytest.raises(TransferError, match="was lost"):
        opened.outbound.put(0, 0, 4, bytes(32), bytes(32))
