"""The keeper: a small child process that speaks for its worker while the worker computes.

As long as the worker is not stopped and its device call is younger than its bound, the keeper renews its leases and says
that it lives. It also sweeps for all: jobs of workers that nobody speaks for any more go back to the queue. What it
learns about lost leases it writes to the worker, a line of JSON each.
"""

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from brokers.queue import JobQueue
from brokers.registry import Registry
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import RedisAway, RedisRefused
from workers.vitals import Vitals, VitalsReader

log = logging.getLogger(__name__)


def worker_lifetime(config: Config) -> float:
    """Seconds after which a worker that says nothing is gone: three heartbeats, never more than a lease."""
    return min(config.lease_seconds, 3 * config.tick_seconds)


class Keeper:
    def __init__(self, config: Config, worker: str, vitals: VitalsReader) -> None:
        self._config = config
        self._worker = worker
        self._vitals = vitals
        self._process = psutil.Process(os.getppid())
        self._store = Store(config)
        self._queue = JobQueue(self._store)
        self._registry = Registry(self._store, worker_lifetime(config))
        self._sweep_after = time.monotonic() + config.lease_seconds
        self._told: set[str] = set()

    async def run(self) -> None:
        """Until the worker is gone."""
        gone = asyncio.Event()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
        watch = asyncio.create_task(_end_of(reader, gone))
        while not gone.is_set():
            started = time.monotonic()
            await self._tick()
            rest = self._config.tick_seconds - (time.monotonic() - started)
            try:
                await asyncio.wait_for(gone.wait(), max(0.0, rest))
            except TimeoutError:
                continue
        watch.cancel()
        await self._store.close()

    async def _tick(self) -> None:
        try:
            await self._speak()
            if time.monotonic() >= self._sweep_after:
                for outcome in await self._queue.sweep(self._config.lease_seconds):
                    log.warning("a lease ran out: %s", outcome, extra={"action": "swept"})
                self._sweep_after = time.monotonic() + self._config.lease_seconds / 3
        except (RedisAway, RedisRefused) as error:
            # idle times will include the outage: let every holder renew before anybody sweeps
            self._sweep_after = time.monotonic() + self._config.lease_seconds
            log.warning("keeper: %s", error, extra={"action": "keeper_redis"})

    async def _speak(self) -> None:
        try:
            stopped = self._process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        except psutil.NoSuchProcess:
            return
        reading = self._vitals.read()
        if stopped or reading is None:
            await self._registry.mark(self._worker, "stopped")
        elif reading.call_seconds > self._config.device_call_seconds:
            await self._registry.mark(self._worker, "wedged")
        else:
            lost = await self._queue.renew(reading.held)
            await self._registry.announce(
                self._worker, {**reading.facts, "state": "alive", "seen": int(time.time() * 1000)}
            )
            self._tell({reading.held[job_id] for job_id in lost})

    def _tell(self, lost: set[str]) -> None:
        for lease_id in lost - self._told:
            print(json.dumps({"lost": lease_id}), flush=True)
        self._told = lost


async def _end_of(reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
    """The worker holds the other end of our standard input for as long as it lives."""
    while await reader.read(4096):
        pass
    gone.set()


def start_keeper(worker: str, vitals: Vitals) -> "subprocess.Popen[bytes]":
    """Starts the keeper of this process. Its life ends with ours: it reads the end of its standard input."""
    return subprocess.Popen(
        [sys.executable, "-m", "workers", "keeper", worker, str(vitals.fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[vitals.fd],
        start_new_session=True,  # a Ctrl-C is for the worker; the keeper stays until it has drained
    )


async def listen_to(keeper: "subprocess.Popen[bytes]", lost: Callable[[str], None]) -> None:
    """Calls `lost(lease id)` for each lease that the keeper could not renew. Returns when the keeper ends."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, keeper.stdout)
    async for line in reader:
        lost(json.loads(line)["lost"])
