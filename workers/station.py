"""A worker's place in the system: its name, its keeper, the bell, the leases it holds, and the way out."""

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from brokers.metrics import Tally
from brokers.queue import JobQueue
from brokers.registry import Registry
from brokers.store import Store
from brokers.tombstones import Bell
from pipeline.config import Config
from pipeline.errors import RedisAway, RedisRefused
from workers.keeper import listen_to, start_keeper, worker_lifetime
from workers.versions import versions
from workers.vitals import Vitals

log = logging.getLogger(__name__)

LONGEST_PAUSE = 2.0  # seconds between tries while Redis is away

Figures = dict[str, str | int | float]


class Station:
    def __init__(self, role: str, config: Config, device: str) -> None:
        """device: its name, for people."""
        self.device = device
        self.worker = f"{role}-{secrets.token_hex(3)}"
        self.config = config
        self.store = Store(config)
        self.queue = JobQueue(self.store)
        self.tally = Tally(self.store, self.worker)
        self.vitals = Vitals()
        self.draining = asyncio.Event()
        self.failed = False  # a part ended that should not have
        self._role = role
        self._registry = Registry(self.store, worker_lifetime(config))
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._figures: Callable[[], Figures] = dict

    async def enter(
        self,
        facts: Figures,
        *,
        figures: Callable[[], Figures],
        ended: Callable[[str], None],
        lost: Callable[[str], None],
    ) -> None:
        """Registers the worker and starts its keeper.

        facts never change, figures are asked for again and again. ended(job id) is called for every job that ends
        anywhere, lost(lease id) for a lease of ours that could not be renewed.
        """
        self._figures = figures
        self.vitals.facts = {
            "role": self._role,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": " ".join(f"{package}={version}" for package, version in versions().items()),
            "told": int(time.time() * 1000),
            **facts,
            **figures(),
        }
        self.vitals.publish()
        await self.insist(lambda: self._registry.announce(self.worker, {**self.vitals.facts, "state": "alive"}))
        if warning := await self.insist(self.store.warning):
            log.warning(warning, extra={"action": "redis_policy"})
        self.spawn(Bell(self.store).listen(ended))
        self.spawn(self._keep(lost))
        self.spawn(self._publish_figures())
        self.spawn(self._report())
        log.info("%s is ready", self.worker, extra={"action": "ready", "worker": self.worker})

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs beside the worker's loop; an exception that nobody expected ends the worker rather than hide.

        What only Redis did not take is no such thing: a lease that nobody renews is swept, a record is for people.
        """
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def insist(self, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Tries until Redis answers; the pause grows, with some randomness so that workers do not come back in step.

        Raises RedisAway only while draining: what is not said then, the sweep finds out.
        """
        pause = 0.05
        while True:
            try:
                return await attempt()
            except RedisAway as error:
                if self.draining.is_set():
                    raise
                log.warning("%s; trying again", error, extra={"action": "redis_away"})
                await asyncio.sleep(pause * (1 + secrets.randbelow(1000) / 1000))
                pause = min(2 * pause, LONGEST_PAUSE)

    async def leave(self) -> None:
        """The worker is done: nothing of it stays in Redis."""
        while self._tasks:  # again and again: see brokers.store.heed_cancel
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks, timeout=0.2)
        if self._keeper is not None:
            self._keeper.communicate()  # closes its input: that is its end; before it could announce us again
        try:
            async with asyncio.timeout(self.config.grace_seconds):
                await self.tally.report()
                await self.queue.retire(self.worker)
                await self._registry.leave(self.worker)
        except (RedisAway, RedisRefused, TimeoutError) as error:
            log.warning("left without a word: %s", str(error) or "Redis hangs", extra={"action": "leave"})
        await self.store.close()

    async def _keep(self, lost: Callable[[str], None]) -> None:
        while True:
            self._keeper = start_keeper(self.worker, self.vitals)
            await listen_to(self._keeper, lost)
            log.error("the keeper ended; another one starts", extra={"action": "keeper_ended"})
            await asyncio.sleep(self.config.tick_seconds)

    async def _publish_figures(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_seconds)
            self.vitals.facts.update({**self._figures(), "told": int(time.time() * 1000)})
            self.vitals.publish()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self.config.tick_seconds)
            with contextlib.suppress(RedisAway, RedisRefused):  # the next report says it
                await self.tally.report()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, RedisAway | RedisRefused):
            log.warning("left unsaid: %s", error, extra={"action": "unsaid"})
        elif error is not None:
            self.failed = True
            log.critical("a part of %s failed", self.worker, exc_info=error, extra={"action": "part_failed"})
            self.draining.set()
