"""Jobs that were given up: kept for a while with the reason of every attempt, to be looked at, tried again or forgotten."""

from collections.abc import Sequence
from dataclasses import dataclass

from brokers.store import Store, translated


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """reasons: attempt → why it failed; {} once the job's record has expired. at: milliseconds of Unix time."""

    entry: str
    job_id: str
    attempts: int
    reason: str
    reasons: dict[int, str]

    @property
    def at(self) -> int:
        return int(self.entry.partition("-")[0])


class DeadLetters:
    def __init__(self, store: Store) -> None:
        self._store = store

    @translated
    async def all(self) -> list[DeadLetter]:
        """The oldest first."""
        redis, keys = self._store.redis, self._store.keys
        entries = await redis.xrange(keys.dead)
        async with redis.pipeline(transaction=False) as pipe:
            for _, fields in entries:
                pipe.hgetall(keys.job(fields["job"]))
            records = await pipe.execute()
        return [
            DeadLetter(
                entry=entry,
                job_id=fields["job"],
                attempts=int(fields["attempts"]),
                reason=fields["reason"],
                reasons={int(name[4:]): why for name, why in sorted(record.items()) if name.startswith("why:")},
            )
            for (entry, fields), record in zip(entries, records, strict=True)
        ]

    @translated
    async def requeue(self, letter: DeadLetter) -> str:
        """Its attempts begin anew, after the tokens that it has. Answers ok | gone | over:<status>, if it is not dead."""
        answer: str = await self._store.run("revive", letter.job_id, letter.entry, jobs=[letter.job_id])
        return answer

    @translated
    async def purge(self, letters: Sequence[DeadLetter]) -> int:
        """Forgets them, with prompts and tokens; answers how many. A job that was queued again meanwhile goes on."""
        forgotten = 0
        for letter in letters:
            forgotten += await self._store.run("purge", letter.job_id, letter.entry, jobs=[letter.job_id])
        return forgotten
