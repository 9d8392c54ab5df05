"""The receiver against senders that leave in the middle, repeat themselves or send rubbish, over real ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
import xxhash
import zmq
import zmq.asyncio
from hands import WAIT_SECONDS, end, until

from brokers.kv_receiver import KVReceiver
from pipeline.errors import Cancelled
from pipeline.frames import Abort, Ack, Commit, Message, Nack, Ok, Open, Part, decode, encode
from pipeline.geometry import Geometry, Layer
from pipeline.transfer import Transfer

GEOMETRY = Geometry(model="m", kv_heads=1, head_dim=2, dtype="float32", layers=(Layer(),))
TOKENS = 2
DATA = bytes(range(GEOMETRY.token_bytes * TOKENS))
OPEN = Open(nonce="n", job="j", lease="p#1", tokens=TOKENS, fingerprint=GEOMETRY.fingerprint())
COMMIT = Commit(nonce="n", lease="p#1", tokens=(5,))


def part(tensor: str) -> Part:
    return Part(
        nonce="n",
        layer=0,
        tensor=tensor,
        start=0,
        tokens=TOKENS,
        dtype="float32",
        shape=(1, TOKENS, 2),
        digest=xxhash.xxh3_128_digest(DATA),
    )


class Desk:
    """Has one credit, n; takes jobs over when it is let."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.credits = {"n"}
        self.may_answer = asyncio.Event()
        self.refuses = False

    def take(self, nonce: str) -> bool:
        ours = nonce in self.credits
        self.credits.discard(nonce)
        return ours

    def dropped(self, nonce: str) -> None:
        self.heard.append("dropped")

    async def arrived(self, transfer: Transfer, commit: Commit) -> None:
        self.heard.append("arrives")
        await self.may_answer.wait()
        if self.refuses:
            raise Cancelled("lost:cancelled")
        self.heard.append("arrived")


class Sender:
    """A socket that says what it likes."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)

    async def send(self, message: Message | bytes, *tensors: bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        await self._socket.send_multipart([frame, *tensors])

    async def answer(self) -> Message:
        async with asyncio.timeout(WAIT_SECONDS):
            (frame,) = await self._socket.recv_multipart()
        return decode(frame)

    async def send_all(self) -> None:
        await self.send(OPEN)
        assert await self.answer() == Ok(nonce="n")
        for tensor in "kv":
            await self.send(part(tensor), DATA)
        await self.send(COMMIT)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
async def receiver(desk: Desk) -> AsyncIterator[KVReceiver]:
    receiver = KVReceiver(host="127.0.0.1", key=None, geometry=GEOMETRY, context=64, part_seconds=5.0, desk=desk)
    running = asyncio.create_task(receiver.run())
    yield receiver
    died = running.done() and running.exception()
    await end(running)
    receiver.close()
    assert not died, f"the receiver died: {died!r}"


@pytest.fixture
async def sender(receiver: KVReceiver) -> AsyncIterator[Sender]:
    sender = Sender(receiver.endpoint)
    yield sender
    sender.close()


async def heard(desk: Desk, what: str) -> None:
    async def was_heard() -> bool:
        return what in desk.heard

    await until(was_heard)


async def still_answers(sender: Sender) -> None:
    """Everything sent before was dealt with, and the receiver lives."""
    await sender.send(Open(nonce="unknown", job="j", lease="p#1", tokens=1, fingerprint={}))
    answer = await sender.answer()
    assert isinstance(answer, Nack), answer
    assert (answer.nonce, answer.void) == ("unknown", True)


async def test_a_whole_cache_is_acknowledged_when_the_job_is_taken_over(desk: Desk, sender: Sender) -> None:
    desk.may_answer.set()
    await sender.send_all()
    assert await sender.answer() == Ack(nonce="n")
    assert desk.heard == ["arrives", "arrived"]


async def test_a_cache_whose_job_is_lost_is_refused_and_its_place_is_free(desk: Desk, sender: Sender) -> None:
    desk.refuses = True
    desk.may_answer.set()
    await sender.send_all()
    assert await sender.answer() == Nack(nonce="n", reason="lost:cancelled")
    assert desk.heard == ["arrives", "dropped"]


async def test_an_abort_during_the_takeover_does_not_free_the_place_that_the_job_is_about_to_take(
    desk: Desk, sender: Sender
) -> None:
    await sender.send_all()
    await heard(desk, "arrives")
    await sender.send(Abort(nonce="n", reason="no ACK in time"))
    await still_answers(sender)
    assert desk.heard == ["arrives"]
    desk.may_answer.set()
    assert await sender.answer() == Ack(nonce="n")
    assert desk.heard == ["arrives", "arrived"]


@pytest.mark.parametrize("again", [COMMIT, part("k")], ids=["commit", "part"])
async def test_what_is_said_again_during_the_takeover_is_not_heard(desk: Desk, sender: Sender, again: Message) -> None:
    await sender.send_all()
    await heard(desk, "arrives")
    await sender.send(again, *([DATA] if isinstance(again, Part) else []))
    await still_answers(sender)
    desk.may_answer.set()
    assert await sender.answer() == Ack(nonce="n")
    assert desk.heard == ["arrives", "arrived"]


async def test_a_transfer_is_not_given_up_during_the_takeover(desk: Desk, receiver: KVReceiver, sender: Sender) -> None:
    """Who compared its lease with Redis meanwhile finds another one: the takeover's. Without the look at `committing` the job
    would be held and never stepped."""
    await sender.send_all()
    await heard(desk, "arrives")
    await receiver.drop("n", "the lease is not yours any more")
    desk.may_answer.set()
    assert await sender.answer() == Ack(nonce="n")
    assert desk.heard == ["arrives", "arrived"]


async def test_an_abort_before_the_commit_frees_the_place(desk: Desk, receiver: KVReceiver, sender: Sender) -> None:
    await sender.send(OPEN)
    assert await sender.answer() == Ok(nonce="n")
    await sender.send(Abort(nonce="n", reason="cancelled"))
    await heard(desk, "dropped")
    assert receiver.arrivals() == {}


async def test_a_stranger_cannot_speak_for_a_transfer(desk: Desk, receiver: KVReceiver, sender: Sender) -> None:
    await sender.send(OPEN)
    assert await sender.answer() == Ok(nonce="n")
    stranger = Sender(receiver.endpoint)
    try:
        await stranger.send(Abort(nonce="n", reason="mine"))
        await stranger.send(part("k"), bytes(len(DATA)))
        await stranger.send(COMMIT)
        assert await stranger.answer() == Nack(nonce="n", reason="there is no such transfer")
    finally:
        stranger.close()
    assert list(receiver.arrivals()) == ["n"]
    assert desk.heard == []


async def test_one_flipped_byte_is_refused_and_the_place_is_free(desk: Desk, sender: Sender) -> None:
    await sender.send(OPEN)
    await sender.answer()
    await sender.send(part("k"), DATA[:-1] + b"\xff")
    answer = await sender.answer()
    assert isinstance(answer, Nack)
    assert "digest" in answer.reason
    assert desk.heard == ["dropped"]


@pytest.mark.parametrize("fingerprint", [{}, {**GEOMETRY.fingerprint(), "layers": 5}, {"model": ["m"] * 100}], ids=repr)
async def test_a_strange_fingerprint_is_refused_and_the_place_is_free(
    desk: Desk, sender: Sender, fingerprint: dict[str, Any]
) -> None:
    await sender.send(Open(nonce="n", job="j", lease="p#1", tokens=TOKENS, fingerprint=fingerprint))
    answer = await sender.answer()
    assert isinstance(answer, Nack)
    assert "differ" in answer.reason
    assert desk.heard == ["dropped"]


RUBBISH = {
    "nothing": b"",
    "no header": b"hello",
    "nested kind": b"\x82\xa5nonce\xa1n\xa4kind" + b"\x91" * 1010 + b"\xc0",
    "other field": msgpack.packb({"kind": "ok", "nonce": "n", "x": 1}),
    "a reply": encode(Ok(nonce="n")),
    "a part without its tensor": encode(part("k")),
}


@pytest.mark.parametrize("rubbish", RUBBISH)
async def test_rubbish_is_passed_over(desk: Desk, sender: Sender, rubbish: str) -> None:
    await sender.send(RUBBISH[rubbish])
    await sender.send(RUBBISH[rubbish], b"", b"", b"")
    await still_answers(sender)
    assert desk.heard == []
