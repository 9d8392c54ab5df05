"""The token log: what a job has produced, in order, and how it ended.

Writing is fenced by the lease and checked by index. Reading is one blocking XREAD for all followers of a process: a
thousand streams cost one connection.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from brokers.store import BLOCK_SECONDS, Store, heed_cancel, translated
from pipeline.errors import RedisAway, RedisRefused
from pipeline.logprobs import TokenLogprobs

log = logging.getLogger(__name__)

#: Entries that a follower may leave unread before the reader passes it over: bounded memory for a slow client.
BACKLOG = 256
#: A look at the job for each of a thousand silent streams costs as much as their tokens do: not every second.
SILENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """index i: entry id (i+1)-0. A token and the text that it lets be shown, or, last of all, the end."""

    index: int
    token: int | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    end: str | None = None  # a terminal status
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class Append:
    """What a holder wants written: tokens from index `start` on, each with its text and its logprobs (as text, or ''), and,
    with the last of them, the end."""

    job_id: str
    lease_id: str
    start: int
    tokens: list[tuple[int, str, str]] = field(default_factory=list)
    end: str = ""
    reason: str = ""


class TokenLog:
    def __init__(self, store: Store) -> None:
        self._store = store

    @translated
    async def append(self, batch: Sequence[Append]) -> list[str]:
        """One round trip for all jobs. Answers per job: the next index | lost:<status> | gap:<length>."""
        args: list[str | int] = []
        for job in batch:
            args += [job.job_id, job.lease_id, job.start, len(job.tokens)]
            args += [part for token in job.tokens for part in token]
            args += [job.end, job.reason]
        answers: list[str] = await self._store.run("append", *args, jobs=[job.job_id for job in batch])
        return answers

    @translated
    async def read(self, job_id: str, after: int = 0) -> list[Entry]:
        """Entries from index `after` on."""
        found = await self._store.redis.xrange(self._store.keys.tokens(job_id), min=f"{after + 1}-0")
        return [_entry(item) for item in found]

    @translated
    async def exists(self, job_id: str) -> bool:
        return bool(await self._store.redis.exists(self._store.keys.tokens(job_id)))


class Follower:
    """One reader's place in one log. Made by `LogReader.follow`. news: set when something came, for several together."""

    def __init__(self, after: int, news: asyncio.Event) -> None:
        self.position = after  # index of the next entry
        self.included = False  # in a read that has started
        self.entries: list[Entry] = []
        self.news = news


class LogReader:
    """Reads the logs of all followers together. `run` is its loop; `follow` may be called from any task."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._followers: dict[Follower, str] = {}
        self._changed = asyncio.Event()
        self._client_id: int | None = None  # of the connection that blocks in XREAD

    async def follow(self, job_ids: Sequence[str], after: int = 0) -> AsyncIterator[tuple[int, list[Entry]]]:
        """(number of the log, entries from index `after` on), none twice, until all logs have ended. [] for each of them after
        SILENCE_SECONDS without news.

        An `after` beyond a log's end just waits: Redis may have lost its last second, and the job goes on.
        """
        news = asyncio.Event()
        open_logs = {number: Follower(after, news) for number in range(len(job_ids))}
        followers = {follower: self._store.keys.tokens(job_ids[number]) for number, follower in open_logs.items()}
        self._followers |= followers
        try:
            await self._hear_of(*followers)
            while open_logs:
                await _wait(news, SILENCE_SECONDS)
                came = {number: follower for number, follower in open_logs.items() if follower.entries}
                for number, follower in (came or dict(open_logs)).items():
                    entries, follower.entries = follower.entries, []
                    if len(entries) >= BACKLOG:  # it had been passed over, and has room again
                        await self._hear_of(follower)
                    if entries and entries[-1].end is not None:
                        del open_logs[number]
                    yield number, entries
        finally:
            for follower in followers:
                self._followers.pop(follower, None)

    async def run(self) -> None:
        """For ever; a lost connection is made anew."""
        while True:
            try:
                await self._read_until_lost()
            except (RedisAway, RedisRefused) as error:
                log.warning("cannot read token logs: %s", error, extra={"action": "log_reader_lost"})
                await asyncio.sleep(0.2)

    @translated
    async def _read_until_lost(self) -> None:
        async with self._store.redis.client() as connection:
            while True:
                heed_cancel()
                self._client_id = await connection.client_id()  # each time: the driver may have reconnected in silence
                positions = self._positions()
                if not positions:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                answer = await connection.xread(positions, block=int(BLOCK_SECONDS * 1000), count=BACKLOG)
                self._deliver(answer or [])

    def _positions(self) -> dict[Any, Any]:
        """Per stream, the position of the follower that is furthest behind and still has room."""
        positions: dict[str, int] = {}
        for follower, key in self._followers.items():
            follower.included = True
            if len(follower.entries) < BACKLOG:
                positions[key] = min(follower.position, positions.get(key, follower.position))
        return {key: f"{position}-0" for key, position in positions.items()}

    def _deliver(self, answer: Any) -> None:
        fresh = {key: [_entry(item) for item in items] for key, items in answer}
        for follower, key in self._followers.items():
            new = [entry for entry in fresh.get(key, ()) if entry.index >= follower.position]
            # not those of a newcomer that this read began without: it would miss what came before
            if new and new[0].index == follower.position and len(follower.entries) < BACKLOG:
                follower.entries += new
                follower.position = new[-1].index + 1
                follower.news.set()

    async def _hear_of(self, *newcomers: Follower) -> None:
        with contextlib.suppress(RedisAway):  # then the next connection reads for them anyway
            await self._interrupt(*newcomers)

    @translated
    async def _interrupt(self, *newcomers: Follower) -> None:
        """A read that blocks on the old set of followers starts again. It may be about to block: hence the tries."""
        for newcomer in newcomers:
            newcomer.included = False
        self._changed.set()
        for _ in range(20):
            await asyncio.sleep(0.001)
            if all(newcomer.included for newcomer in newcomers):
                return
            if self._client_id is not None:
                await self._store.redis.client_unblock(self._client_id)


async def _wait(news: asyncio.Event, seconds: float) -> None:
    """Until there are some, or for so long."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(news.wait(), seconds)
    news.clear()


def _entry(item: tuple[str, dict[str, str]]) -> Entry:
    entry_id, fields = item
    index = int(entry_id.partition("-")[0]) - 1
    if "end" in fields:
        return Entry(index=index, end=fields["end"], reason=fields["reason"])
    logprobs = TokenLogprobs.decode(fields["p"]) if "p" in fields else None
    return Entry(index=index, token=int(fields["t"]), text=fields["x"], logprobs=logprobs)
