"""The invariants of everything in Redis, proved by looking at all of it; `kvrelay check`.

- An unfinished job is in exactly one queue, once, and has one living holder, or none while it waits.
- Who is in line waits, who waits is in line, and of each tenant as many are noted as are there.
- A job that is over owns nothing, its log says how it ended, and both go in time. A webhook that it owes is on the calendar.
- A token log has no gaps.
- A decode worker's places are each in use or on offer.
- A batch that is not over can be found, one that is over goes in time, and so does every file.
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
from pipeline.batch import BATCH_OVER

BATCH = 100  # jobs per script call: a script holds up everybody
LOOKS = 4  # a worker's figures are some heartbeats old: what it really lacks, it lacks each time


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """subject: as in "job 3f…", "worker decode-1a2b3c", "tenant 5e…", "key …"."""

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
        found = jobs | self._places(workers, credits) | await self._consumers(workers) | await self._batches()
        return found | await self._tenants() | await self._others()

    @translated
    async def _mend(self, problems: Sequence[Problem]) -> None:
        subjects: dict[str, list[str]] = {}
        for problem in problems:
            kind, _, name = problem.subject.partition(" ")
            subjects.setdefault(kind, []).append(name)
        await self._jobs(only=set(subjects.get("job", [])))
        if problems:  # what workers that are gone have left behind
            await self._store.run("sweep", self._lease_ms)
            await self._store.run("tenants", 1)  # last: it counts what those before have put in line
        for key in subjects.get("key", []):
            if key.startswith(self._mortal):
                await self._store.redis.pexpire(key, self._lease_ms)
        for batch in subjects.get("batch", []):
            await self._mend_batch(batch)

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
        ids = {job for *_, job in entries} | set(await self._store.redis.zrange(self._keys.line, 0, -1))
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

    async def _tenants(self) -> set[Problem]:
        found = await self._store.run("tenants", 0)
        return {
            Problem(f"tenant {owner}", "has other jobs in line than are noted", f": {counted}, and {noted} noted")
            for owner, noted, counted in zip(found[::3], found[1::3], found[2::3], strict=True)
        }

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

    # Batches

    async def _batches(self) -> set[Problem]:
        """The index of open ones is what is looked through for work, and an open one must not expire."""
        found = set()
        listed = await self._store.redis.zrange(self._keys.open_batches, 0, -1)
        open_ones = {member.rpartition("/")[2] for member in listed}
        batches = {key.removeprefix(self._keys.batch("")) async for key in self._scan(self._keys.batch(""))}
        for batch in batches | open_ones:
            lifetime, is_open = await self._store.redis.pttl(self._keys.batch(batch)), batch in open_ones
            if lifetime == -2:
                found.add(Problem(f"batch {batch}", "is open, and has no record"))
            elif is_open and lifetime >= 0:
                found.add(Problem(f"batch {batch}", "is open, and will be forgotten"))
            elif not is_open and lifetime == -1:
                found.add(Problem(f"batch {batch}", "is in no list of open ones, and would be kept for ever"))
        return found

    async def _mend_batch(self, batch: str) -> None:
        """One that is not over can be found again; otherwise it goes in time."""
        redis, key = self._store.redis, self._keys.batch(batch)
        stored = await redis.hgetall(key)
        if stored and stored["status"] not in BATCH_OVER:
            await redis.persist(key)
            await redis.zadd(self._keys.open_batches, {f"{stored['owner']}/{batch}": int(stored["created_at"]) * 1000})
            return
        if stored:
            await redis.expire(key, stored["result_seconds"])
        for member in await redis.zrange(self._keys.open_batches, 0, -1):
            if member.rpartition("/")[2] == batch:
                await redis.zrem(self._keys.open_batches, member)

    # Everything else

    @property
    def _mortal(self) -> tuple[str, ...]:
        """Beginnings of keys that must expire by themselves."""
        return (
            self._keys.worker(""),
            self._keys.tombstone(""),
            self._keys.file(""),
            self._keys.bucket(""),
            self._keys.owed(""),
        )

    async def _others(self) -> set[Problem]:
        """Keys that will not expire and should, and keys that are none of kvrelay's."""
        known = {self._keys.wake, self._keys.credits, self._keys.dead, self._keys.deadlines, self._keys.workers}
        known |= {self._keys.line, self._keys.tenants, self._keys.metrics, self._keys.api_keys}
        known |= {self._keys.files, self._keys.batches, self._keys.open_batches, self._keys.webhooks}
        seen = (self._keys.job(""), self._keys.tokens(""), self._keys.batch(""))
        problems = set()
        async for key in self._scan(self._keys.prefix):
            if key in known or key in self._keys.queues or key.startswith(seen):
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
