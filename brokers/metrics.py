"""The counters of a system, in the hash `metrics`: how workers add to them, and all that a scrape asks for at one moment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brokers.store import Store, translated
from pipeline.metrics import bucket

#: Of a worker's facts, those that are shown.
FACTS = ("role", "state", "slots", "capacity", "busy")


class Tally:
    """What one worker counts. Only in memory, for its loops must not wait; `report` adds it to the system's counters."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._counts: Counter[str] = Counter()
        self._unheard: Counter[str] = Counter()  # in a report that was not answered
        self._reports = 0

    def add(self, field: str, by: int = 1) -> None:
        self._counts[field] += by

    def observe(self, histogram: str, seconds: float) -> None:
        self._counts[f"{histogram}:{bucket(seconds)}"] += 1
        self._counts[f"{histogram}:us"] += round(seconds * 1e6)

    @translated
    async def report(self) -> None:
        """What was counted since the last report; before it that one again, by its number, if its answer was lost."""
        await self._say()
        self._unheard, self._counts = self._counts, Counter()
        self._reports += 1
        await self._say()

    async def _say(self) -> None:
        if self._unheard:
            counted = [part for item in self._unheard.items() for part in item]
            await self._store.run("report", self._worker, self._reports, *counted)
            self._unheard = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Of one queue. held: jobs that were taken from it and are worked on."""

    waiting: int
    held: int
    oldest_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """queues: 0 first. workers: FACTS of each, as far as it tells them; none of one that is gone."""

    counts: Mapping[str, int]
    queues: Sequence[Waits]
    credits: int
    dead: int
    workers: Sequence[Mapping[str, str]]


class Counters:
    def __init__(self, store: Store) -> None:
        self._store = store

    @translated
    async def read(self) -> Reading:
        """One script call, whatever waits."""
        counts, queues, credits, dead, workers = await self._store.run("measure", *FACTS)
        return Reading(
            counts={field: int(count) for field, count in zip(counts[::2], counts[1::2], strict=True)},
            queues=[Waits(waiting=waiting, held=held, oldest_seconds=age / 1000) for waiting, held, age in queues],
            credits=credits,
            dead=dead,
            workers=[
                {name: fact for name, fact in zip(FACTS, facts, strict=True) if fact is not None} for facts in workers
            ],
        )
