"""The brokers of one process, as the tests reach for them: short calls in, plain values out."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from brokers.credits import Credits
from brokers.keys import GROUP
from brokers.queue import JobQueue, Lease, Nothing, Stopped
from brokers.registry import Registry
from brokers.store import Store
from brokers.token_log import Append, Entry, TokenLog
from pipeline.job import Job, Priority
from pipeline.sampling import SamplingParams
from pipeline.states import Status

JOB = Job(prompt=(1, 2, 3), max_tokens=8, sampling=SamplingParams(seed=7))
OTHER_JOB = replace(JOB, prompt=(3, 2, 1))
WAIT_SECONDS = 10.0
POLL_SECONDS = 0.002


async def until(condition: Callable[[], Awaitable[Any]], seconds: float = WAIT_SECONDS) -> Any:
    """Asks until the answer is true, and returns it; fails at the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not (answer := await condition()):
        assert loop.time() < deadline, f"still {answer!r} after {seconds} s"
        await asyncio.sleep(POLL_SECONDS)
    return answer


async def end(task: asyncio.Task[Any]) -> None:
    """Cancels until it is over: `wait_for` of Python 3.11, which the driver uses, now and then swallows a cancel."""

    async def over() -> bool:
        task.cancel()
        await asyncio.wait([task], timeout=0.2)
        return task.done()

    await until(over)


class Hands:
    def __init__(self, store: Store) -> None:
        self.store, self.redis, self.keys = store, store.redis, store.keys
        self.queue = JobQueue(store)
        self.log = TokenLog(store)
        self.registry = Registry(store, lifetime_seconds=60.0)
        self._nonces = itertools.count(1)

    async def submit(self, job_id: str, job: Job = JOB, **how: Any) -> str:
        how = {"priority": Priority.NORMAL, "bound": 100, "lifetime": 0.0, **how}
        return (await self.queue.submit(job_id, job, **how)).outcome

    async def credit(self, worker: str = "d1", nonce: str = "", busy: int = 0) -> str:
        """A credit of a decode worker that lives."""
        nonce = nonce or f"n{next(self._nonces)}"
        await self.registry.announce(worker, {"role": "decode", "endpoint": f"tcp://{worker}:1"})
        await Credits(self.store, worker).publish([nonce], busy)
        return f"{worker}/{nonce}"

    async def lease(self, worker: str = "p1") -> Lease:
        answer = await self.queue.lease(worker)
        assert isinstance(answer, list), answer
        (lease,) = answer
        return lease

    async def no_lease(self, worker: str = "p1") -> str:
        """The mark to wait from."""
        answer = await self.queue.lease(worker)
        assert isinstance(answer, Nothing), answer
        return answer.mark

    async def leased(self, job_id: str, worker: str = "p1", **how: Any) -> Lease:
        """Submitted, and taken by a prefill worker."""
        assert await self.submit(job_id, **how) == "ok"
        await self.credit()
        lease = await self.lease(worker)
        assert lease.job_id == job_id
        return lease

    async def decoding(self, job_id: str, lease_id: str = "d1#x", **how: Any) -> str:
        """… its first token drawn (token 100), and handed over. Answers the lease id of the decode worker."""
        lease = await self.leased(job_id, **how)
        assert await self.append(job_id, lease.lease_id, 0, 100) == "1"
        await self.queue.handover(job_id, lease.lease_id, lease_id)
        return lease_id

    async def append(
        self, job_id: str, lease_id: str, start: int, *tokens: int, end: str = "", reason: str = ""
    ) -> str:
        written = [(token, f"<{token}>", "") for token in tokens]
        (answer,) = await self.log.append(
            [Append(job_id=job_id, lease_id=lease_id, start=start, tokens=written, end=end, reason=reason)]
        )
        return answer

    async def cancel(self, job_id: str) -> Stopped:
        return await self.queue.stop(job_id, Status.CANCELLED, "user")

    async def entries(self, job_id: str) -> list[tuple[str, str]]:
        """The log as it lies in Redis: entry id, and the token or END and the status."""
        found = await self.redis.xrange(self.keys.tokens(job_id))
        return [(entry, fields.get("t") or f"END {fields['end']}") for entry, fields in found]

    async def field(self, job_id: str, name: str) -> str | None:
        value: str | None = await self.redis.hget(self.keys.job(job_id), name)
        return value

    async def status(self, job_id: str) -> str | None:
        return await self.field(job_id, "status")

    async def unfinished(self) -> int:
        return sum(load.unfinished for load in await self.queue.load())

    async def working(self) -> int:
        return sum(load.working for load in await self.queue.load())

    async def idle(self) -> bool:
        return (await self.unfinished(), await self.working()) == (0, 0)

    async def credits(self) -> list[str]:
        members: list[str] = await self.redis.zrange(self.keys.credits, 0, -1)
        return members

    async def owner(self, job_id: str) -> str | None:
        """Who the pending list says works on a job."""
        queue = self.keys.queues[int(await self.field(job_id, "queue") or 0)]
        entry = await self.field(job_id, "entry")
        found = await self.redis.xpending_range(queue, GROUP, entry, entry, 1)
        return found[0]["consumer"] if found else None

    async def sweep(self, expecting: list[str]) -> None:
        """Sweeps jobs that were silent for 10 ms, until the expected ones were."""
        seen: list[str] = []

        async def swept() -> bool:
            seen.extend(await self.queue.sweep(0.01))
            return len(seen) >= len(expecting)

        await until(swept)
        assert sorted(seen) == sorted(expecting)


def shown(entries: list[Entry]) -> list[int | str]:
    """Tokens, and the end status."""
    return [
        entry.end if entry.token is None else entry.token for entry in entries if entry.end or entry.token is not None
    ]
