"""The way of a KV cache: cut, stuck, to nowhere; and every order in which the processes may start."""

import asyncio
import itertools
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import zmq
import zmq.asyncio

from brokers.curve import Key
from brokers.kv_receiver import KVReceiver
from brokers.kv_sender import KVSender, Outbound
from pipeline.frames import Commit, Message, Ok, Open, decode, encode
from pipeline.geometry import Geometry, Layer
from pipeline.transfer import Transfer
from tests.acceptance.system import wait_for
from tests.chaos.conftest import Chaos, Client, prompt
from tests.chaos.proxy import Proxy
from tests.chaos.redis_server import RedisServer
from workers.devices.sim import expected

BIG = {"sim_layers": 64, "sim_prefill_us": 20}
COUNT = 5
GEOMETRY = Geometry(model="m", kv_heads=4, head_dim=64, dtype="bfloat16", layers=(Layer(),) * 2)
TOKENS = 2048  # of GEOMETRY: 1 MiB a tensor
WAITS, WAITERS = 100_000, 64
TRANSFERS, WARM = 1000, 50
RSS_GROWTH = 32 << 20  # a thousand caches are 4 GiB


def endpoint_of(system: Chaos, pid: int) -> str:
    """host:port of a decode worker; '' if it is not there yet."""
    for worker in system.redis.smembers(system.key("workers")):
        facts = system.redis.hgetall(system.key(f"worker:{worker}"))
        if facts.get("pid") == str(pid):
            return str(facts["endpoint"]).removeprefix("tcp://")
    return ""


def expected_of(tokens: list[int], layers: int) -> list[int]:
    return expected(tokens, COUNT, layers)


@pytest.mark.parametrize("cut_after", [200, 20_000, 1_000_000, 3_900_000])
@pytest.mark.parametrize("system", [BIG], indirect=True)
def test_a_connection_that_is_reset_in_mid_transfer_never_leaves_half_a_cache(system: Chaos, cut_after: int) -> None:
    """Z3, Z1. Without the count of parts before an ACK, half a cache would be decoded; without a bound on the wait for the ACK
    the job would hang."""
    (decode,) = system.start("decode")
    wait_for(lambda: endpoint_of(system, decode.pid), "the decode worker is there")
    proxy = Proxy(endpoint_of(system, decode.pid), cut_after=cut_after)
    system.start_faulty("prefill", "", test_proxy=proxy.address, part_seconds=2)
    tokens = prompt(4000)
    job = system.submit(tokens, max_tokens=COUNT)
    client = Client(system, job)
    assert system.finished(job, 60)["status"] == "finished"
    assert system.tokens(job) == expected_of(tokens, 64)
    client.check(system.tokens(job))
    assert proxy.cuts == 1, "the connection was cut"
    assert system.job(job)["attempt"] <= 2, "one that was cut before its OPEN is not counted"
    proxy.close()
    system.wait_idle()
    system.check()


@pytest.mark.parametrize("system", [BIG], indirect=True)
def test_a_worker_leaves_in_time_though_its_peer_takes_nothing(system: Chaos) -> None:
    """Z4, P1. With a linger, or a send that waits, the process would stay for as long as its peer stays deaf."""
    system.start("decode")
    (deaf,) = (process for process in system.processes if "decode" in process.args)  # type: ignore[operator]
    stuck = system.start_faulty("prefill", "sent#40=wait=0.1", kv_buffer_mib=1)
    job = system.submit(prompt(8000), max_tokens=COUNT)
    wait_for(lambda: system.job(job)["status"] == "prefilling", "it is under way")
    deaf.send_signal(signal.SIGSTOP)
    time.sleep(1)
    started = time.monotonic()
    stuck.send_signal(signal.SIGTERM)
    stuck.wait(10)
    assert stuck.returncode == 0, system.logs()[-3000:]
    assert time.monotonic() - started < 8, "twice the grace time of a second, with slack"
    system.processes.remove(stuck)
    deaf.send_signal(signal.SIGCONT)
    system.start("prefill")
    assert system.finished(job, 60)["status"] == "finished"
    assert system.tokens(job) == expected_of(prompt(8000), 64)
    system.wait_idle()
    system.check()


async def test_a_hundred_thousand_answers_to_waits_of_a_millisecond_are_all_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Z2. With a receive in each wait, rather than one reader that nobody cancels, a wait that is cut short would take a
    message with it."""
    read = cut_short = 0
    answered = Outbound.answered

    def count(outbound: Outbound, message: Message) -> None:
        nonlocal read
        read += 1
        answered(outbound, message)

    monkeypatch.setattr(Outbound, "answered", count)
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")

    async def answer() -> None:
        while True:
            peer, header = await router.recv_multipart()
            await router.send_multipart([peer, encode(Ok(nonce=decode(header).nonce))])

    answering = asyncio.create_task(answer())
    sender = KVSender(key=None, geometry=GEOMETRY, buffer_bytes=1 << 20, open_seconds=30, part_seconds=30)
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)

    async def wait_again_and_again(nonce: str) -> None:
        nonlocal cut_short
        outbound = await sender.open(endpoint, nonce=nonce, job_id="j", lease_id="l", tokens=4)
        again = Open(nonce=nonce, job="j", lease="l", tokens=4, fingerprint=GEOMETRY.fingerprint())
        for _ in range(WAITS // WAITERS):
            try:
                await outbound.ask(again, 0.001)
            except TimeoutError:
                cut_short += 1

    try:
        async with asyncio.timeout(100):
            await asyncio.gather(*(wait_again_and_again(str(number)) for number in range(WAITERS)))
            while read < WAITERS + WAITS // WAITERS * WAITERS:
                await asyncio.sleep(0.01)
    finally:  # a socket left open would be another test's failure
        answering.cancel()
        sender.close()
        context.destroy(linger=0)
    assert cut_short > WAITS / 10


class Desk:
    """Takes whatever comes."""

    def take(self, nonce: str) -> bool:
        return True

    def dropped(self, nonce: str) -> None:
        raise AssertionError(f"{nonce} was dropped")

    async def arrived(self, transfer: Transfer, commit: Commit) -> None:
        assert sum(block.tokens for block in transfer.blocks()) == TOKENS * len(GEOMETRY.layers)


async def test_a_thousand_transfers_leave_no_memory_behind() -> None:
    """Z5. With a frame that is kept, in the books of either side, gigabytes would stay."""
    receiver = KVReceiver(
        host="127.0.0.1", key=None, geometry=GEOMETRY, context=2 * TOKENS, part_seconds=30, desk=Desk()
    )
    receiving = asyncio.create_task(receiver.run())
    sender = KVSender(key=None, geometry=GEOMETRY, buffer_bytes=4 << 20, open_seconds=30, part_seconds=30)
    process = psutil.Process()
    before = 0
    try:
        for number in range(WARM + TRANSFERS):
            outbound = await sender.open(receiver.endpoint, nonce=str(number), job_id="j", lease_id="l", tokens=TOKENS)
            for layer in range(len(GEOMETRY.layers)):
                k, v = (np.full(TOKENS * GEOMETRY.token_bytes, number % 251, dtype=np.uint8) for _ in range(2))
                await asyncio.to_thread(outbound.put, layer, 0, TOKENS, k, v)
            await outbound.commit((5,))
            outbound.close()
            if number == WARM:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < RSS_GROWTH
    finally:
        receiving.cancel()
        sender.close()
        receiver.close()


ORDERS = list(itertools.permutations(("redis", "api", "prefill", "decode")))


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[tuple[RedisServer, Chaos]]:
    """Nothing of it has started."""
    server = RedisServer(tmp_path, fsync="")
    server.kill()
    system = Chaos(server.url, tmp_path, sim_step_ms=5)
    yield server, system
    system.close()
    server.close()


@pytest.mark.parametrize("order", ORDERS, ids=["-".join(order) for order in ORDERS])
def test_the_next_job_works_in_whatever_order_the_processes_start(
    whole: tuple[RedisServer, Chaos], order: tuple[str, ...]
) -> None:
    """P2. With a process that gives up because another is not there yet, some orders would not work."""
    server, system = whole
    for name in order:
        if name == "redis":
            server.start()
        else:
            system.start(name)
        time.sleep(0.3)
    system.wait_ready()
    tokens = prompt(30)
    system.finishes(system.submit(tokens, max_tokens=3), tokens, 3)
    system.check()


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    for name in ("right.key", "wrong.key"):
        Key.write(tmp_path / name)
    return [str(tmp_path / "right.key"), str(tmp_path / "wrong.key")]


def test_with_the_same_key_a_cache_arrives_and_nobody_else_can_send_one(system: Chaos, keys: list[str]) -> None:
    """Z6. Without a line in the log a wrong key would be silence on both sides."""
    right, wrong = keys
    system.start("decode", kv_key=right)
    job = system.submit(prompt(60), max_tokens=COUNT)
    for other in (wrong, ""):
        (stranger,) = system.start("prefill", kv_key=other)
        seen = system.logs().count("no answer to OPEN")
        wait_for(lambda seen=seen: system.logs().count("no answer to OPEN") > seen, "its OPEN is not answered")
        system.stop(stranger)
    assert "a peer with another key, or none" in system.logs()
    assert system.logs().count("a handshake came") <= 3, "and not a line for each knock"
    system.start("prefill", kv_key=right)
    system.finishes(job, prompt(60), COUNT)
    assert system.job(job)["attempt"] == 1
    system.wait_idle()
    system.check()


def test_what_goes_over_the_wire_cannot_be_read(system: Chaos, keys: list[str]) -> None:
    """Z6. The names of the protocol stand in its headers: without encryption, on the wire, too."""
    for key, readable in (("", True), (keys[0], False)):
        system.stop_all("decode")
        system.stop_all("prefill")
        (decode,) = system.start("decode", kv_key=key)
        wait_for(lambda decode=decode: endpoint_of(system, decode.pid), "it is there")
        proxy = Proxy(endpoint_of(system, decode.pid))
        system.start_faulty("prefill", "", test_proxy=proxy.address, kv_key=key)
        system.finishes(system.submit(prompt(60), max_tokens=COUNT), prompt(60), COUNT)
        assert (b"digest" in proxy.seen) == readable
        proxy.close()
