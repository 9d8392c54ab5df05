"""Deliveries to a receiver that is really there: what arrives, what is tried again, and what is never sent."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hands import JOB, Hands, end, until

from api import webhooks
from api.webhooks import Deliverer
from brokers.webhooks import TRIES
from pipeline.config import Config
from tests.receiver import CERTIFICATE, Receiver, receiving, verify

SHARED = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"


@pytest.fixture
def config(config: Config) -> Config:
    return replace(config, webhook_secret=SHARED, webhook_networks="127.0.0.1/32")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as receiver:
        yield receiver


@asynccontextmanager
async def delivering(hands: Hands, config: Config) -> AsyncIterator[None]:
    task = asyncio.create_task(Deliverer(hands.store, config).run())
    try:
        yield
    finally:
        await end(task)


@pytest.fixture
async def deliverer(hands: Hands, config: Config) -> AsyncIterator[None]:
    async with delivering(hands, config):
        yield


async def ended(hands: Hands, job_id: str, url: str) -> None:
    assert await hands.submit(job_id, webhook=url) == "ok"
    await hands.cancel(job_id)


async def tries(hands: Hands, job_id: str = "j") -> int:
    return int(await hands.field(job_id, "webhook_tries") or 0)


async def tried_again(hands: Hands, url: str, job_id: str = "j") -> None:
    """Now, and not when the calendar says; if it is still on it."""
    target = url.split("/")[2]
    await hands.redis.zadd(hands.keys.owed(target), {job_id: 0}, xx=True)
    await hands.redis.zadd(hands.keys.webhooks, {target: 0})


async def last_try(hands: Hands, job_id: str = "j") -> None:
    """The next one, before anybody delivers: so that its outcome is told."""
    await hands.redis.hset(hands.keys.job(job_id), "webhook_tries", TRIES - 1)


async def said(hands: Hands, job_id: str = "j") -> str:
    """The timeline's word of the webhook, once there is one."""

    async def line() -> str:
        return (await hands.field(job_id, "timeline") or "").partition(" webhook ")[2]

    return str(await until(line))


@pytest.mark.usefixtures("deliverer")
async def test_what_arrives_is_signed_and_says_how_the_job_ended(hands: Hands, receiver: Receiver) -> None:
    lease = await hands.decoding("j", webhook=receiver.url("/a;b?c=1"))
    await hands.append("j", lease, 1, 101, end="finished", reason="length")
    assert await said(hands) == "arrived: answered 200 at try 1"
    (came,) = receiver.came
    verify(came.body, dict(came.headers), SHARED)
    assert came.path == "/a;b?c=1"
    assert came.headers["Host"] == f"127.0.0.1:{receiver.port}"
    assert came.headers["Content-Type"] == "application/json"
    assert came.event["type"] == "job.finished"
    assert came.event["data"]["usage"] == {
        "prompt_tokens": len(JOB.prompt),
        "completion_tokens": 2,
        "total_tokens": len(JOB.prompt) + 2,
    }


@pytest.mark.usefixtures("deliverer")
@pytest.mark.parametrize("status", [500, 404, 301, 307])
async def test_another_answer_than_2xx_is_tried_again_and_a_redirect_is_one(
    hands: Hands, receiver: Receiver, status: int
) -> None:
    """A client that followed redirects would ask /elsewhere, wherever that leads."""
    receiver.answers = [(status, {"Location": receiver.url("/elsewhere")})]
    await ended(hands, "j", receiver.url())

    async def tried() -> bool:
        return len(receiver.came) == 1 and receiver.at_once == 0

    await until(tried)
    await tried_again(hands, receiver.url())
    assert await said(hands) == "arrived: answered 200 at try 2"
    assert [came.path for came in receiver.came] == ["/hook", "/hook"]
    first, second = (came.headers["webhook-id"] for came in receiver.came)
    assert first == second


@pytest.mark.usefixtures("deliverer")
async def test_who_says_gone_is_asked_no_more(hands: Hands, receiver: Receiver) -> None:
    receiver.answers = [(410, {})]
    await ended(hands, "j", receiver.url())
    assert await said(hands) == "given up: answered 410 at try 1"


@pytest.mark.usefixtures("deliverer")
async def test_a_receiver_that_is_away_is_tried_until_it_is_back(hands: Hands) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/hook"
    await ended(hands, "j", url)

    async def tried() -> bool:
        return await tries(hands) == 1

    await until(tried)
    with receiving(Receiver(port)) as receiver:
        await tried_again(hands, url)
        assert (await said(hands)).startswith("arrived: answered 200 at try ")
        assert len(receiver.came) == 1


@pytest.mark.usefixtures("deliverer")
async def test_after_the_last_try_it_is_given_up_and_the_timeline_says_so(hands: Hands, receiver: Receiver) -> None:
    receiver.answers = [(503, {})] * TRIES
    await ended(hands, "j", receiver.url())
    for number in range(1, TRIES + 1):

        async def tried(number: int = number) -> bool:
            return len(receiver.came) == number and receiver.at_once == 0

        await until(tried)
        await tried_again(hands, receiver.url())
    assert await said(hands) == f"given up: answered 503 at try {TRIES}"
    assert not await hands.redis.exists(hands.keys.owed(f"127.0.0.1:{receiver.port}"))


# Where it may not go

PRIVATE = "given up: its address is private at try 1"


async def test_a_private_address_is_not_connected_to(hands: Hands, config: Config, receiver: Receiver) -> None:
    """Without the check at the connection. The submission's own sees no names, and settings may have changed since."""
    async with delivering(hands, replace(config, webhook_networks="")):
        for number, host in enumerate(("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001")):
            await ended(hands, f"j{number}", receiver.url(host=host))
            assert await said(hands, f"j{number}") == PRIVATE, host
    assert receiver.came == []


def leads_to(monkeypatch: pytest.MonkeyPatch, host: str, *answers: list[str]) -> list[str]:
    """What the name servers say of a name, time after time; without answers, that there is none. Answers the list of times."""
    looked_up: list[str] = []
    really = socket.getaddrinfo

    def getaddrinfo(asked: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if asked != host:
            return really(asked, port, *args, **kwargs)
        looked_up.append(host)
        if not answers:
            raise socket.gaierror("no such name")
        addresses = answers[min(len(looked_up), len(answers)) - 1]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return looked_up


@pytest.mark.usefixtures("deliverer")
async def test_a_name_that_leads_elsewhere_at_the_second_look_comes_no_further(
    hands: Hands, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding. If httpcore looked the name up once more, the first one would have gone to 127.0.0.2."""
    looked_up = leads_to(monkeypatch, "rebind.test", ["127.0.0.1"], ["127.0.0.2"])
    await ended(hands, "j", receiver.url(host="rebind.test"))
    assert await said(hands) == "arrived: answered 200 at try 1"
    assert looked_up == ["rebind.test"]
    assert receiver.came[0].headers["Host"] == f"rebind.test:{receiver.port}"
    await ended(hands, "again", receiver.url(host="rebind.test"))
    assert await said(hands, "again") == PRIVATE
    assert len(receiver.came) == 1


async def test_of_many_addresses_those_that_are_permitted_are_tried_in_turn(
    hands: Hands, config: Config, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one is refused, and nobody listens at the second."""
    leads_to(monkeypatch, "many.test", ["10.0.0.1", "127.0.0.2", "127.0.0.1"])
    async with delivering(hands, replace(config, webhook_networks="127.0.0.0/8")):
        await ended(hands, "j", receiver.url(host="many.test"))
        assert await said(hands) == "arrived: answered 200 at try 1"


@pytest.mark.parametrize(("host", "why"), [("no-such-name.test", "gaierror"), ("x" * 70 + ".test", "UnicodeError")])
async def test_a_name_that_is_none_is_no_answer(
    hands: Hands, config: Config, monkeypatch: pytest.MonkeyPatch, host: str, why: str
) -> None:
    leads_to(monkeypatch, "no-such-name.test")
    await ended(hands, "j", f"http://{host}/")
    await last_try(hands)
    async with delivering(hands, config):
        assert await said(hands) == f"given up: no answer ({why}) at try {TRIES}"


async def test_no_proxy_is_asked(
    hands: Hands, config: Config, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that heeded the environment would send it there, name and all."""
    with receiving(Receiver()) as proxy:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url(""))
        async with delivering(hands, config):
            await ended(hands, "j", receiver.url())
            assert await said(hands) == "arrived: answered 200 at try 1"
        assert proxy.came == []


@pytest.mark.parametrize(
    ("host", "outcome"),
    [("receiver.test", "arrived: answered 200"), ("stranger.test", "given up: no answer (ConnectError)")],
)
async def test_the_certificate_must_be_that_of_the_name(
    hands: Hands, config: Config, monkeypatch: pytest.MonkeyPatch, host: str, outcome: str
) -> None:
    """And not of the address, which is what is connected to."""
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    leads_to(monkeypatch, host, ["127.0.0.1"])
    with receiving(Receiver().with_tls()) as receiver:
        await ended(hands, "j", receiver.url(host=host, scheme="https"))
        await last_try(hands)
        async with delivering(hands, config):
            assert await said(hands) == f"{outcome} at try {TRIES}"
        assert receiver.names == [host]
        assert [came.headers["Host"] for came in receiver.came] in ([], [f"receiver.test:{receiver.port}"])


# Who is slow


@asynccontextmanager
async def answering(*parts: bytes, endless: bytes) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A receiver that never comes to an end. The event: its client has left."""
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for part in parts:
                writer.write(part)
            while True:
                writer.write(endless)
                await writer.drain()
                await asyncio.sleep(0.01)
        except (ConnectionError, asyncio.CancelledError):
            left.set()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", left


@pytest.mark.usefixtures("deliverer")
async def test_an_answer_is_not_read_beyond_its_head(hands: Hands) -> None:
    """Else whoever answers without end keeps a place until the time is up, and is asked again."""
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n", endless=bytes(65536)) as (url, left):
        await ended(hands, "j", url)
        assert await said(hands) == "arrived: answered 200 at try 1"
        await asyncio.wait_for(left.wait(), 5)


async def test_an_answer_that_drips_is_cut_off(hands: Hands, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit for all of it: time-outs of single reads never see one that is too slow."""
    monkeypatch.setattr(webhooks, "TRY_SECONDS", 0.3)
    async with answering(b"HTTP/1.1 200 OK\r\nX: ", endless=b"x") as (url, left):
        await ended(hands, "j", url)
        await last_try(hands)
        async with delivering(hands, config):
            assert await said(hands) == f"given up: no answer (TimeoutError) at try {TRIES}"
            await asyncio.wait_for(left.wait(), 5)


async def test_a_target_that_hangs_holds_up_no_other_one(
    hands: Hands, config: Config, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bound per target its jobs, all of them older, would have all the places."""
    monkeypatch.setattr(webhooks, "AT_ONCE", 6)
    monkeypatch.setattr(webhooks, "AT_ONCE_PER_TARGET", 2)
    with receiving(Receiver()) as slow:
        slow.ready.clear()
        for number in range(20):
            await ended(hands, f"slow-{number}", slow.url())
        async with delivering(hands, config):
            for number in range(10):
                await ended(hands, f"quick-{number}", receiver.url())
            for number in range(10):
                assert await said(hands, f"quick-{number}") == "arrived: answered 200 at try 1"
            assert len(slow.came) == 2
            slow.ready.set()
            for number in range(20):
                assert await said(hands, f"slow-{number}") == "arrived: answered 200 at try 1"
        assert slow.most_at_once == 2


async def test_deliveries_at_once_are_bounded(
    hands: Hands, config: Config, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "AT_ONCE", 3)
    receiver.ready.clear()
    for number in range(8):
        await ended(hands, f"j{number}", receiver.url())
    async with delivering(hands, config):

        async def full() -> bool:
            return len(receiver.came) == 3

        await until(full)
        receiver.ready.set()
        for number in range(8):
            await said(hands, f"j{number}")
    assert receiver.most_at_once == 3


async def test_a_bug_in_one_delivery_ends_no_other(
    hands: Hands, config: Config, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the last rung of `_deliver` the group of all tries would end with it, and its loop."""
    really = webhooks.message

    def message(webhook: webhooks.Webhook) -> bytes:
        if webhook.job_id == "odd":
            raise ValueError(webhook.job_id)
        return really(webhook)

    monkeypatch.setattr(webhooks, "message", message)
    async with delivering(hands, config):
        await ended(hands, "odd", receiver.url())

        async def tried() -> bool:
            return await tries(hands, "odd") == 1

        await until(tried)
        await ended(hands, "j", receiver.url())
        assert await said(hands) == "arrived: answered 200 at try 1"
