"""The broker alone: empty jobs, no KV cache. Jobs a second, time to a lease, and tokens a second through one Redis.

A worker is played here with the real classes, in one loop, as the two workers use them: it leases short jobs together while
the ends of others are being written, writes all that have piled up in one call, and publishes credits as places become free.
Beside it taskiq (Redis streams) and dramatiq (Redis), in the same run, each with an empty task, no results kept, acknowledged
when done, and otherwise as their command lines start them: `pip install taskiq taskiq-redis 'dramatiq[redis]'`. All three run
in this process.
"""

import asyncio
import contextlib
import importlib.util
import logging
import platform
import secrets
import statistics
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from brokers.credits import Credits
from brokers.queue import JobQueue, Lease, Nothing
from brokers.registry import Registry
from brokers.store import Store
from brokers.token_log import Append, TokenLog
from pipeline.config import Config
from pipeline.job import Job, Priority
from pipeline.sampling import SamplingParams
from pipeline.scheduler import Scheduler
from workers.prefill import AHEAD

JOBS, ROUNDS = 10_000, 3
IDLE_JOBS, PAUSE = 200, 0.01  # seconds between two jobs for an idle worker
SLOTS, WAITING, CHUNK = 16, 2, 512
STEPS, WRITERS, STEP_SECONDS = (1, 4, 16, 64), 4, 1.5
EMPTY = Job(prompt=(1, 2, 3), max_tokens=1, sampling=SamplingParams(seed=1))
TARGETS = {"drained": "≥ 5000", "one at a time": "≥ 2000", "idle p50": "≤ 1.5"}

Figures = dict[str, float]


class Worker:
    """Both halves: what the prefill worker leases, the decode worker ends."""

    def __init__(self, store: Store) -> None:
        self._queue, self._log = JobQueue(store), TokenLog(store)
        self._credits = Credits(store, "d1")
        self._scheduler: Scheduler[str] = Scheduler(slots=SLOTS, waiting=WAITING)
        self._room, self._news = asyncio.Event(), asyncio.Event()
        self._held: deque[Lease] = deque()
        self.ended = 0

    @contextlib.asynccontextmanager
    async def offering(self) -> AsyncIterator[None]:
        """Credits are published meanwhile."""
        self._room.set()
        task = asyncio.create_task(self._offer())
        try:
            yield
        finally:
            await end(task)

    async def drain(self, jobs: int) -> None:
        writer = asyncio.create_task(self._write(jobs))
        while jobs > 0:
            leases = await self.lease(most=AHEAD, tokens=CHUNK)
            jobs -= len(leases)
            self._held += leases
            self._news.set()
        await writer

    async def one_at_a_time(self, jobs: int) -> None:
        for _ in range(jobs):
            await self.end(await self.lease())

    async def lease(self, most: int = 1, tokens: int = 0) -> list[Lease]:
        """The next ones; waits where there is none, or no credit."""
        while isinstance(answer := await self._queue.lease("p1", most=most, tokens=tokens), Nothing):
            await self._queue.wait(answer.mark)
        for lease in answer:
            self._scheduler.open(lease.nonce)
            self._scheduler.arrived(lease.nonce, lease.job_id)
        self._scheduler.admit()
        return answer

    async def end(self, leases: list[Lease]) -> None:
        end = {"end": "finished", "reason": "length"}
        appends = [
            Append(job_id=lease.job_id, lease_id=lease.lease_id, start=0, tokens=[(65, "A", "")], **end)
            for lease in leases
        ]
        assert set(await self._log.append(appends)) == {"1"}
        for lease in leases:
            self._scheduler.remove(lease.job_id)
        self.ended += len(leases)
        self._room.set()

    async def _write(self, jobs: int) -> None:
        while self.ended < jobs:
            await self._news.wait()
            self._news.clear()
            leases = list(self._held)
            self._held.clear()
            await self.end(leases)

    async def _offer(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            listed = list(self._scheduler.listed)
            fresh = [secrets.token_hex(12) for _ in range(self._scheduler.owed)]
            for nonce in fresh:
                self._scheduler.publish(nonce)
            await self._credits.publish(fresh, self._scheduler.busy, listed=listed)


async def kvrelay(redis_url: str) -> Figures:
    figures: Figures = {}
    async with opened(redis_url) as store:
        for name, run in (("drained", Worker.drain), ("one at a time", Worker.one_at_a_time)):
            worker = Worker(store)
            await submit(store, name, JOBS)
            async with worker.offering():
                began = time.perf_counter()
                await run(worker, JOBS)
                figures[name] = JOBS / (time.perf_counter() - began)
            await store.redis.flushall()
            await Registry(store, 3600).announce("d1", {"role": "decode", "endpoint": "tcp://127.0.0.1:1"})
        worker = Worker(store)
        submitted: dict[str, float] = {}
        waits: list[float] = []

        async def work() -> None:
            while True:
                leases = await worker.lease(most=AHEAD, tokens=CHUNK)
                waits.extend(time.perf_counter() - submitted[lease.job_id] for lease in leases)
                await worker.end(leases)

        async with worker.offering():
            working = asyncio.create_task(work())
            for number in range(IDLE_JOBS):
                await asyncio.sleep(PAUSE)
                submitted[f"idle-{number}"] = time.perf_counter()
                await submit(store, "idle", number + 1, number)
            await asyncio.sleep(PAUSE)
            await end(working)
    return figures | percentiles(waits)


@contextlib.asynccontextmanager
async def opened(redis_url: str) -> AsyncIterator[Store]:
    """Of a system of its own, with a decode worker that lives."""
    store = Store(Config(redis_url=redis_url, model="sim", served_name=f"broker-{secrets.token_hex(4)}"))
    try:
        await Registry(store, 3600).announce("d1", {"role": "decode", "endpoint": "tcp://127.0.0.1:1"})
        yield store
    finally:
        await store.redis.flushall()
        await store.close()


async def end(task: asyncio.Task[None]) -> None:
    """Again and again: `wait_for` of Python 3.11, which the driver uses, now and then swallows a cancel."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=0.2)


async def submit(store: Store, name: str, upto: int, start: int = 0) -> None:
    for at in range(start, upto, 100):
        jobs = {f"{name}-{number}": EMPTY for number in range(at, min(at + 100, upto))}
        await JobQueue(store).submit_all(jobs, priority=Priority.NORMAL, bound=2 * JOBS, lifetime=600)


async def taskiq(redis_url: str) -> Figures:
    from taskiq.receiver import Receiver
    from taskiq_redis import RedisStreamBroker

    seen: list[float] = []
    broker = RedisStreamBroker(redis_url, queue_name=secrets.token_hex(4), consumer_id="0")

    @broker.task(task_name="empty")
    async def empty(at: float) -> None:
        seen.append(time.perf_counter() - at)

    @contextlib.asynccontextmanager
    async def working(at_once: int) -> AsyncIterator[None]:
        over = asyncio.Event()
        with ThreadPoolExecutor(1) as pool:
            receiver = Receiver(broker, pool, max_async_tasks=at_once, run_startup=False)
            task = asyncio.create_task(receiver.listen(over))
            try:
                yield
            finally:
                over.set()
                await task

    async def drained(jobs: int) -> None:
        while len(seen) < jobs or (await client.xpending(broker.queue_name, broker.consumer_group_name))["pending"]:
            await asyncio.sleep(0.002)

    figures: Figures = {}
    async with redis.asyncio.from_url(redis_url) as client:
        await broker.startup()
        for name, jobs, at_once in (("drained", JOBS, 100), ("one at a time", JOBS // 10, 1)):
            seen.clear()
            for _ in range(jobs // 100):
                await asyncio.gather(*(empty.kiq(0.0) for _ in range(100)))
            began = time.perf_counter()
            async with working(at_once):
                await drained(jobs)
                figures[name] = jobs / (time.perf_counter() - began)
        seen.clear()
        async with working(100):
            for _ in range(IDLE_JOBS):
                await asyncio.sleep(PAUSE)
                await empty.kiq(time.perf_counter())
            await asyncio.sleep(PAUSE)
        await broker.shutdown()
        await client.flushall()
    return figures | percentiles(seen)


async def dramatiq(redis_url: str) -> Figures:
    return await asyncio.to_thread(_dramatiq, redis_url)


def _dramatiq(redis_url: str) -> Figures:
    from dramatiq import Worker as DramatiqWorker
    from dramatiq import actor
    from dramatiq.brokers.redis import RedisBroker

    seen: list[float] = []
    broker = RedisBroker(url=redis_url, namespace=secrets.token_hex(4))

    @actor(broker=broker)
    def empty(at: float) -> None:
        seen.append(time.perf_counter() - at)

    @contextlib.contextmanager
    def working(threads: int) -> Iterator[Any]:
        worker = DramatiqWorker(broker, worker_threads=threads)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop()
            broker.middleware.remove(broker.middleware[-1])

    figures: Figures = {}
    for name, jobs, threads in (("drained", JOBS, 8), ("one at a time", JOBS // 10, 1)):
        seen.clear()
        for _ in range(jobs):
            empty.send(0.0)
        began = time.perf_counter()
        with working(threads) as worker:
            while len(seen) < jobs:
                time.sleep(0.002)
            worker.join()
            figures[name] = jobs / (time.perf_counter() - began)
    seen.clear()
    with working(8):
        for _ in range(IDLE_JOBS):
            time.sleep(PAUSE)
            empty.send(time.perf_counter())
        while len(seen) < IDLE_JOBS:
            time.sleep(PAUSE)
    broker.client.flushall()
    broker.close()
    return figures | percentiles(seen)


def percentiles(seconds: list[float]) -> Figures:
    cuts = statistics.quantiles(seconds, n=100)
    return {"idle p50": cuts[49] * 1e3, "idle p99": cuts[98] * 1e3}


def show_server(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        version = client.info("server")["redis_version"]
        log = client.config_get("appendonly")["appendonly"]
        fsync = client.config_get("appendfsync")["appendfsync"] if log == "yes" else "none"
    print(
        f"\nRedis {version}, appendonly {log}, fsync {fsync}; Python {platform.python_version()}, {platform.machine()}"
    )


@pytest.mark.benchmark
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_empty_jobs_beside_other_brokers(redis_url: str) -> None:
    """In turns; medians."""
    show_server(redis_url)
    logging.getLogger("dramatiq").setLevel(logging.CRITICAL)
    logging.getLogger("taskiq").setLevel(logging.CRITICAL)
    brokers: dict[str, Callable[[str], Awaitable[Figures]]] = {"kvrelay": kvrelay}
    for name, run, modules in (("taskiq", taskiq, ("taskiq", "taskiq_redis")), ("dramatiq", dramatiq, ("dramatiq",))):
        if all(importlib.util.find_spec(module) for module in modules):
            brokers[name] = run
        else:
            print(f"{name} is not installed: no figures of it")
    found: dict[str, list[Figures]] = {name: [] for name in brokers}
    for _ in range(ROUNDS):
        for name, run in brokers.items():
            found[name].append(asyncio.run(_alone(run, redis_url)))
    print(
        f"{JOBS} empty jobs, medians of {ROUNDS} rounds; jobs/s, and milliseconds from submit to lease of an idle worker"
    )
    print(f"{'':10}" + "".join(f"{column:>16}" for column in found["kvrelay"][0]))
    print(f"{'target':10}" + "".join(f"{TARGETS.get(column, ''):>16}" for column in found["kvrelay"][0]))
    for name, rounds in found.items():
        medians = [statistics.median(figures[column] for figures in rounds) for column in rounds[0]]
        print(f"{name:10}" + "".join(f"{figure:16.{0 if figure > 100 else 2}f}" for figure in medians))


async def _alone(run: Callable[[str], Awaitable[Figures]], redis_url: str) -> Figures:
    return await run(redis_url)


@pytest.mark.benchmark
@pytest.mark.timeout(300)
def test_tokens_through_one_redis(redis_url: str) -> None:
    """Decode workers that do nothing but append. What Redis could do with a core of its own follows from its time for them."""
    show_server(redis_url)
    print(f"{WRITERS} decode workers, each on its own connection, in one process: tokens/s")
    for rows in STEPS:
        figures = asyncio.run(ceiling(redis_url, rows))
        print(
            f"steps of {rows:2}: {figures['written']:8.0f} written, {figures['possible']:8.0f} if Redis did nothing else"
        )


async def ceiling(redis_url: str, rows: int) -> Figures:
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(redis_url)) for _ in range(WRITERS)]
        jobs = [await held(store, rows) for store in stores]
        before, began = await cpu_seconds(stores[0]), time.perf_counter()
        written = sum(await asyncio.gather(*map(append_steps, stores, jobs)))
        took, worked = time.perf_counter() - began, await cpu_seconds(stores[0]) - before
    return {"written": written / took, "possible": written / worked}


async def held(store: Store, rows: int) -> list[Lease]:
    await submit(store, "row", rows)
    await Credits(store, "d1").publish([secrets.token_hex(12) for _ in range(rows)], 0)
    leases = await JobQueue(store).lease("d1", most=rows, tokens=1 << 20)
    assert isinstance(leases, list)
    return leases


async def append_steps(store: Store, jobs: list[Lease]) -> int:
    log, until, step = TokenLog(store), time.perf_counter() + STEP_SECONDS, 0
    while time.perf_counter() < until:
        batch = [Append(job_id=job.job_id, lease_id=job.lease_id, start=step, tokens=[(65, "A", "")]) for job in jobs]
        await log.append(batch)
        step += 1
    return step * len(jobs)


async def cpu_seconds(store: Store) -> float:
    used = await store.redis.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])
