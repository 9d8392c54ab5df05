"""The connection to Redis, and the Lua scripts. Driver exceptions end here."""

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from typing import Any, ParamSpec, TypeVar

import redis
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from brokers.keys import Keys
from brokers.trunk import Trunk
from pipeline.batch import BATCH_OVER, BatchStatus
from pipeline.config import Config
from pipeline.errors import RedisAway, RedisRefused
from pipeline.metrics import BUCKETS
from pipeline.states import TERMINAL, Status

P = ParamSpec("P")
T = TypeVar("T")

#: Redis waits no longer than this in a blocking read, well under the socket's own time-out.
BLOCK_SECONDS = 1.0
SOCKET_SECONDS = 3.0
CONNECTIONS = 32  # a burst of requests waits for one, rather than open a thousand

SCRIPTS = (
    "submit",
    "lease",
    "offer",
    "renew",
    "append",
    "handover",
    "release",
    "stop",
    "settle",
    "sweep",
    "retire",
    "mark",
    "note",
    "audit",
    "revive",
    "purge",
    "strays",
    "report",
    "measure",
    "file_add",
    "batch_add",
    "batch_claim",
    "batch_save",
    "batch_end",
    "batch_cancel",
    "tenants",
    "admit",
    "grant",
    "deliver",
    "delivered",
)


def translated(method: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Turns the driver's exceptions into ours: RedisAway (try again) and RedisRefused (do not)."""

    @functools.wraps(method)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await method(*args, **kwargs)
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise RedisAway(f"Redis does not answer: {error}") from error
        except redis.RedisError as error:
            raise RedisRefused(f"Redis refused: {error}") from error

    return call


def heed_cancel() -> None:
    """For loops around the driver: Python 3.11's `wait_for`, which it uses, loses a cancel that comes together with a
    result (cpython#86296). The task still knows that it was asked."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class Store:
    """One per process: a pool of connections, the key names, the scripts."""

    def __init__(self, config: Config) -> None:
        self.keys = Keys(config.prefix)
        # a few quick tries for a connection that died unnoticed; longer outages are the callers' business, and one that hangs
        # would hang again
        retry = Retry(
            ExponentialWithJitterBackoff(base=0.01, cap=0.2), retries=2, supported_errors=(redis.ConnectionError,)
        )
        pool = BlockingConnectionPool.from_url(
            config.redis_url,
            max_connections=CONNECTIONS,
            timeout=SOCKET_SECONDS,
            decode_responses=True,
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=2.0,
            retry=retry,
        )
        # Any: the driver types every reply as bytes or str at once
        self.redis: Any = Redis.from_pool(pool)
        self.trunk = Trunk(pool, seconds=SOCKET_SECONDS, retry=retry)
        self._prefix = config.prefix
        self._shared_keys = [
            *(
                self.keys.wake,
                self.keys.dead,
                self.keys.credits,
                self.keys.deadlines,
                self.keys.line,
                self.keys.tenants,
                self.keys.metrics,
                self.keys.webhooks,
            ),
            *self.keys.queues,
        ]
        self._scripts = {name: self.redis.register_script(_source(name, config)) for name in SCRIPTS}

    async def run(self, script: str, *args: str | int | float, jobs: Iterable[str] = ()) -> Any:
        """Runs a script on the shared keys and those of `jobs`."""
        keys = [*self._shared_keys, *(key for job in jobs for key in (self.keys.job(job), self.keys.tokens(job)))]
        command = ("EVALSHA", self._scripts[script].sha, len(keys), *keys, self._prefix, *args)
        try:
            return await self.trunk.call(*command)
        except redis.exceptions.NoScriptError:  # another server, or the same one started anew
            await self.trunk.call("SCRIPT", "LOAD", self._scripts[script].script)
            return await self.trunk.call(*command)

    @translated
    async def ping(self) -> None:
        await self.redis.ping()

    @translated
    async def warning(self) -> str:
        """A sentence about a setting of Redis under which jobs can vanish; '' if there is none, or we may not look."""
        try:
            policy = (await self.redis.info("memory")).get("maxmemory_policy", "noeviction")
        except redis.ResponseError:
            return ""
        if policy == "noeviction":
            return ""
        return (
            f"Redis has maxmemory-policy {policy}: when memory is short it drops jobs and tokens without a word. "
            "Set it to noeviction"
        )

    async def close(self) -> None:
        await self.trunk.close()
        await self.redis.aclose()


def _source(name: str, config: Config) -> str:
    scripts = files("brokers") / "scripts"
    states, batch = (", ".join(f"{status} = '{status}'" for status in kind) for kind in (Status, BatchStatus))
    bounds = ", ".join(BUCKETS[:-1])
    over = ", ".join(f"{status} = true" for status in Status if status in TERMINAL)
    batch_over = ", ".join(f"{status} = true" for status in BatchStatus if status in BATCH_OVER)
    return "\n".join(
        [
            f"local STATE, OVER = {{{states}}}, {{{over}}}",
            f"local BATCH, BATCH_OVER = {{{batch}}}, {{{batch_over}}}",
            f"local function BOUNDS() return {{{bounds}}} end",  # made when asked for: most calls observe nothing
            f"local KEEP_MS, DEAD_MS = {config.keep_seconds * 1000:.0f}, {config.dead_seconds * 1000:.0f}",
            f"local MAX_ATTEMPTS = {config.attempts}",
            (scripts / "prelude.lua").read_text(encoding="utf-8"),
            (scripts / f"{name}.lua").read_text(encoding="utf-8"),
        ]
    )
