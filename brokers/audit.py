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
from dataclasses import dataclass, field
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
    detail: str = field(default="", compare=False)  # figures, which change from look to look

    def __str__(self) -> str:
        return f"{self.subject} {self.what}{self.detail}"


class Audit:
    def __init__(self, store: Store, *, lease_seconds: float, tick_seconds: float) -> None:
        self._store = store
        self._keys = store.keys
        self._lease_ms = int(lease_seconds * 1000)
        self._tick_seconds = tick_seconds

    async def problems(self) -> list[Problem]:
        """What is broken, and stays so for some heartbeats. It may run beside a system that works."""
        found = await self._look()
        for _ in range(LOOKS):
            if not found:
                break
            await asyncio.sleep(2 * self._tick_seconds)
            found &= await self._look()
        return sorted(found)

    async def repair(self) -> list[Problem]:
        """Mends what `problems` finds, and answers what it finds afterwards."""
        await self._mend(await self.problems())
        return await self.problems()

    @translated
    async def _look(self) -> set[Problem]:
        jobs, credits = await self._jobs(), await self._store.redis.zrange(self._keys.credits, 0, -1)
        workers = await self._workers()  # last: whoever comes meanwhile is known
        return jobs | self._places(workers, credits) | await self._consumers(workers) | await self._others()

    @translated
    async def _mend(self, problems: Sequence[Problem]) -> None:
        subjects: dict[str, list[str]] = {}
        for problem in problems:
            kind, _, name = problem.subject.partition(" ")
            subjects.setdefault(kind, []).append(name)
        await self._jobs(only=set(subjects.get("job", [])))
        if problems:  # what workers that are gone have left behind
            await self._store.run("sweep", self._lease_ms)
        for key in subjects.get("key", []):
            if key.startswith(self._mortal):
                await self._store.redis.pexpire(key, self._lease_ms)

    async def _workers(self) -> dict[str, dict[str, str]]:
        """Every worker that has a hash, with what the hash says."""
        keys = [key async for key in self._scan(self._keys.worker(""))]
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.hgetall(key)
            found = await pipe.execute()
        return {key.removeprefix(self._keys.worker("")): facts for key, facts in zip(keys, found, strict=True) if facts}

    # Jobs

    async def _jobs(self, only: set[str] | None = None) -> set[Problem]:
        """only: these are mended, and no others looked at."""
        mends = int(only is not None)
        entries = []
        for index, queue in enumerate(self._keys.queues):
            entries += [
                (index, entry, fields.get("job", "")) for entry, fields in await self._store.redis.xrange(queue)
            ]
        ids = {job for *_, job in entries}
        for name in (self._keys.job, self._keys.tokens):
            async for key in self._scan(name("")):
                ids.add(key.removeprefix(name("")))
        if only is not None:
            ids, entries = only, [entry for entry in entries if entry[2] in only]
        found = []
        for some in _batches(entries):
            flat = [part for entry in some for part in entry]
            found += await self._store.run("strays", mends, *flat, jobs=[job for *_, job in some])
        for batch in _batches(sorted(ids)):
            found += await self._store.run("audit", mends, self._lease_ms, *batch, jobs=batch)
        return {Problem(f"job {job}", what) for job, what in zip(found[::2], found[1::2], strict=True)}

    # Workers

    def _places(self, workers: dict[str, dict[str, str]], credits: Sequence[str]) -> set[Problem]:
        offered: dict[str, int] = {}
        problems = set()
        for credit in credits:
            worker = credit.partition("/")[0]
            offered[worker] = offered.get(worker, 0) + 1
            if worker not in workers:
                problems.add(Problem(f"worker {worker}", "is gone, and still offers places"))
        for worker, facts in workers.items():
            if facts.get("state") != "alive" or "capacity" not in facts or self._is_silent(facts):
                continue
            free, busy = offered.get(worker, 0), int(facts["busy"])
            if free + busy != int(facts["capacity"]):
                figures = f": {facts['capacity']}, {busy} in use and {free} on offer"
                problems.add(Problem(f"worker {worker}", "has places that do not add up", figures))
        return problems

    def _is_silent(self, facts: dict[str, str]) -> bool:
        """Its keeper speaks, and it does not: in a device call that holds the interpreter its figures stand still."""
        return int(facts.get("seen", 0)) - int(facts.get("told", 0)) > 4000 * self._tick_seconds

    async def _consumers(self, workers: dict[str, dict[str, str]]) -> set[Problem]:
        """Of workers that are gone and own nothing; what they own still, the sweep takes first."""
        pending: dict[str, int] = {}
        for queue in self._keys.queues:
            with contextlib.suppress(redis.ResponseError):  # no queue yet, or no group
                for consumer in await self._store.redis.xinfo_consumers(queue, GROUP):
                    pending[consumer["name"]] = pending.get(consumer["name"], 0) + consumer["pending"]
        return {
            Problem(f"worker {worker}", "is gone, and still a consumer of the queues")
            for worker, owned in pending.items()
            if not owned and worker not in workers
        }

    # Everything else

    @property
    def _mortal(self) -> tuple[str, ...]:
        """Beginnings of keys that must expire by themselves."""
        return (self._keys.worker(""), self._keys.tombstone(""))

    async def _others(self) -> set[Problem]:
        """Keys that will not expire and should, and keys that are none of kvrelay's."""
        known = {self._keys.wake, self._keys.credits, self._keys.dead, self._keys.deadlines, self._keys.workers}
        jobs = (self._keys.job(""), self._keys.tokens(""))
        problems = set()
        async for key in self._scan(self._keys.prefix):
            if key in known or key in self._keys.queues or key.startswith(jobs):
                continue
            if not key.startswith(self._mortal):
                problems.add(Problem(f"key {key}", "is none of kvrelay's"))
            elif await self._store.redis.pttl(key) == -1:
                problems.add(Problem(f"key {key}", "would be kept for ever"))
        return problems

    def _scan(self, prefix: str) -> AsyncIterator[str]:
        pattern = "".join(f"\\{character}" if character in "[]*?^\\" else character for character in prefix)
        keys: AsyncIterator[str] = self._store.redis.scan_iter(match=f"{pattern}*", count=1000)
        return keys


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]
