"""The sender and a decode worker that goes away."""

import asyncio
import time

import zmq
import zmq.asyncio

from brokers.kv_sender import KVSender
from pipeline.frames import Ok, Open, decode, encode
from pipeline.geometry import Geometry, Layer

GEOMETRY = Geometry(model="m", kv_heads=1, head_dim=4, dtype="bfloat16", layers=(Layer(),) * 64)
SOON = 5.0  # seconds; the send time-out that must not be waited for is far longer


async def test_nobody_waits_to_abort_behind_a_send_that_is_stuck() -> None:
    """Fails when `abort` awaits its send: pyzmq queues it behind the stuck one, NOBLOCK or not."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    sender = KVSender(key=None, geometry=GEOMETRY, buffer_bytes=1 << 20, open_seconds=SOON, part_seconds=60.0)

    async def accept() -> None:
        peer, header = await router.recv_multipart()
        opened = decode(header)
        assert isinstance(opened, Open)
        await router.send_multipart([peer, encode(Ok(nonce=opened.nonce))])

    accepting = asyncio.create_task(accept())
    outbound = await sender.open(
        router.getsockopt_string(zmq.LAST_ENDPOINT), nonce="n", job_id="j", lease_id="l", tokens=4
    )
    await accepting
    context.destroy(linger=0)  # the decode worker dies
    link = outbound._link
    deadline = time.monotonic() + SOON
    while not link._socket._send_futures:  # until a frame waits for a peer that is not there
        outbound.put(0, 0, 4, bytes(32), bytes(32))
        await asyncio.sleep(0.01)
        assert time.monotonic() < deadline, "no send is stuck"
    began = time.monotonic()
    outbound.abort("the job is over")
    sender.close()
    assert time.monotonic() - began < SOON
