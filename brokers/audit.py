"""The invariants of everything in Redis, proved by looking at all of it; `kvrelay check`.

- An unfinished job is in exactly one queue, once, and has one living holder, or none while it waits.
- A job that is over owns nothing, its log says how it ended, and both go in time.
- A token log has no gaps.
- A decode worker's places are each in use or on offer.
- Nobody who is gone owns anything, and no key stays that nobody needs.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from brokers.keys import GROUP
from brokers.store import Store, translated

BATCH = 100  # jobs per script call: a script holds up everybody
LOOKS = 4  # a worker's figures are some heartbeats old: what it really lacks, it lacks each time


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """subject: as in "job 3f…", "worker decode-1a2b3c", "key …"."""

    subject: str
    what: str

    def __str__(self) -> str:
        return f"{self.subject} {self.what}"


class Audit:
    def __init__(self, store: Store, *, lease_seconds: float, tick_seconds: float) -> None:
        self._store = store
        self._keys = store.keys
        self._lease_ms = int(lease_seconds * 1000)
        self._tick_seconds = tick_seconds

    async def problems(self) -> list[Problem]:
        """What is broken, and stays so for some heartbeats. It may run beside a system that works."""
        found = await self._look(mend=False)
        for _ in range(LOOKS):
            if not found:
                break
            await asyncio.sleep(2 * self._tick_seconds)
            found &= await self._look(mend=False)
        return sorted(found)

    async def repair(self) -> list[Problem]:
        """Mends what `problems` finds, and answers what it did not find mended afterwards."""
        if await self.problems():
            await self._look(mend=True)
        return await self.problems()

    @translated
    async def _look(self, *, mend: bool) -> set[Problem]:
        workers = await self._workers()
        jobs = await self._jobs(mend=mend)
        return (
            jobs
            | await self._credits(workers, mend=mend)
            | await self._consumers(workers, mend=mend)
            | (await self._others(mend=mend))
        )

    async def _workers(self) -> dict[str, dict[str, str]]:
        """Every worker that has a hash, with what the hash says."""
        keys = [key async for key in self._scan(self._keys.worker(""))]
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            found = await pipe.execute()
        return {key.removeprefix(self._keys.worker("")): facts for key, facts in zip(keys, found, strict=True) if facts}

    # Jobs

    async def _jobs(self, *, mend: bool) -> set[Problem]:
        entries = []
        for index, queue in enumerate(self._keys.queues):
            entries += [
                (index, entry, fields.get("job", "")) for entry, fields in await self._store.redis.xrange(queue)
            ]
        found = []
        for some in _batches(entries):
            flat = [part for entry in some for part in entry]
            found += await self._store.run("strays", int(mend), *flat, jobs=[job for *_, job in some])
        ids = {job for *_, job in entries}
        for name in (self._keys.job, self._keys.tokens):
            async for key in self._scan(name("")):
                ids.add(key.removeprefix(name("")))
        for batch in _batches(sorted(ids)):
            found += await self._store.run("audit", int(mend), self._lease_ms, *batch, jobs=batch)
        return {Problem(f"job {job}", what) for job, what in zip(found[::2], found[1::2], strict=True)}

    # Workers

    async def _credits(self, workers: dict[str, dict[str, str]], *, mend: bool) -> set[Problem]:
        offered: dict[str, int] = {}
        problems, orphans = set(), []
        for credit in await self._store.redis.zrange(self._keys.credits, 0, -1):
            worker = credit.partition("/")[0]
            offered[worker] = offered.get(worker, 0) + 1
            if worker not in workers:
                problems.add(Problem(f"worker {worker}", "is gone, and still offers places"))
                orphans.append(credit)
        if mend and orphans:
            await self._store.redis.zrem(self._keys.credits, *orphans)
        for worker, facts in workers.items():
            if facts.get("state") == "alive" and "capacity" in facts:
                free, busy = offered.get(worker, 0), int(facts["busy"])
                if free + busy != int(facts["capacity"]):
                    what = f"has {facts['capacity']} places: {busy} in use, {free} on offer"
                    problems.add(Problem(f"worker {worker}", what))
        return problems

    async def _consumers(self, workers: dict[str, dict[str, str]], *, mend: bool) -> set[Problem]:
        """Of workers that are gone and own nothing; what they own still, the sweep takes first."""
        pending: dict[str, int] = {}
        for queue in self._keys.queues:
            with contextlib.suppress(redis.ResponseError):  # no queue yet, or no group
                for consumer in await self._store.redis.xinfo_consumers(queue, GROUP):
                    pending[consumer["name"]] = pending.get(consumer["name"], 0) + consumer["pending"]
        problems = set()
        for worker, owned in pending.items():
            if not owned and worker not in workers:
                problems.add(Problem(f"worker {worker}", "is gone, and still a consumer of the queues"))
                if mend:
                    await self._store.run("retire", worker)
        return problems

    # Everything else

    async def _others(self, *, mend: bool) -> set[Problem]:
        """Keys that must expire by themselves and will not, and keys that are none of kvrelay's."""
        known = {self._keys.wake, self._keys.credits, self._keys.dead, self._keys.deadlines, self._keys.workers}
        jobs = (self._keys.job(""), self._keys.tokens(""))
        mortal = (self._keys.worker(""), self._keys.tombstone(""))
        problems = set()
        async for key in self._scan(self._keys.prefix):
            if key in known or key in self._keys.queues or key.startswith(jobs):
                continue
            if not key.startswith(mortal):
                problems.add(Problem(f"key {key}", "is none of kvrelay's"))
            elif await self._store.redis.pttl(key) == -1:
                problems.add(Problem(f"key {key}", "would be kept for ever"))
                if mend:
                    await self._store.redis.pexpire(key, self._lease_ms)
        return problems

    def _scan(self, prefix: str) -> AsyncIterator[str]:
        pattern = "".join(f"\\{character}" if character in "[]*?^\\" else character for character in prefix)
        keys: AsyncIterator[str] = self._store.redis.scan_iter(match=f"{pattern}*", count=1000)
        return keys


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
