"""What every resource needs: submit a job, follow it to its end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence

from falcon.asgi import Request as HttpRequest

from api.disconnect import CLIENT, Client
from api.errors import JobGone, JobUnknown, KeyReused, NoWorkers, QueueFull
from api.idempotency import Identity
from api.requests import Request, make_jobs
from api.text import PromptCodec
from brokers.api_keys import ApiKey
from brokers.queue import JobQueue, Standing
from brokers.registry import Registry
from brokers.store import Store
from brokers.token_log import Entry, LogReader, TokenLog
from pipeline.config import Config
from pipeline.errors import RedisAway
from pipeline.job import Job
from pipeline.states import TERMINAL, Status

POLL = 0.2  # seconds between looks for a worker, or for Redis


class Front:
    def __init__(self, config: Config, codec: PromptCodec, store: Store) -> None:
        self.config = config
        self.store = store
        self.codec = codec
        self.queue = JobQueue(store)
        self.registry = Registry(store, config.lease_seconds)
        self.log = TokenLog(store)
        self.reader = LogReader(store)
        self.cancels: set[asyncio.Task[None]] = set()  # that Redis has not taken yet

    async def jobs(self, request: Request, seed: int) -> list[Job]:
        """seed: of a request that names none."""
        return await make_jobs(request, self.codec, self.config, seed)

    async def submit(
        self, jobs: Sequence[Job], request: Request, identity: Identity, key: ApiKey, webhook: str = ""
    ) -> list[str]:
        """Queues all of them, or none, for the key's owner; answers their ids. webhook: who wants to hear of their ends.

        Raises QueueFull, KeyReused."""
        job_ids = identity.job_ids(len(jobs))
        submitted = await self.queue.submit_all(
            dict(zip(job_ids, jobs, strict=True)),
            priority=request.queue,
            bound=self.config.queue_bound,
            lifetime=request.timeout or self.config.job_seconds,
            owner=key.id,
            owner_bound=key.waiting,
            digest=identity.digest,
            webhook=webhook,
        )
        if submitted.outcome == "full":
            raise QueueFull(f"{self.config.queue_bound} jobs may wait, and this would be more", submitted.retry_seconds)
        if submitted.outcome == "owner_full":
            raise QueueFull(f"{key.waiting} jobs of this key may wait, and this would be more", submitted.retry_seconds)
        if submitted.outcome == "conflict":
            raise KeyReused("this Idempotency-Key came with another body before: another request needs another key")
        return job_ids

    async def knows(self, identity: Identity) -> bool:
        """The request came before, and its jobs are still there: perhaps they are over, and nobody needs to work."""
        return identity.may_come_again and await self.queue.standing(identity.job_ids(1)[0]) is not None

    async def workers(self) -> dict[str, int]:
        """role → how many live and answer."""
        counts = {"prefill": 0, "decode": 0}
        for facts in (await self.registry.living()).values():
            if facts.get("state") == "alive":
                counts[facts["role"]] = counts.get(facts["role"], 0) + 1
        return counts

    async def require_workers(self, gone: asyncio.Event) -> None:
        """A waiting client needs both halves of the system. Raises NoWorkers after KVR_NO_WORKER_SECONDS."""
        deadline = asyncio.get_running_loop().time() + self.config.no_worker_seconds
        while not all((counts := await self.workers()).values()):
            if asyncio.get_running_loop().time() >= deadline or gone.is_set():
                missing = " and no ".join(role for role, count in counts.items() if not count)
                raise NoWorkers(f"no {missing} worker is there; `kvrelay workers` shows who is")
            await asyncio.sleep(POLL)

    async def visible(self, job_id: str, key: ApiKey) -> Standing:
        """Raises JobUnknown without a job, and in the same words for another's: nobody learns that it exists."""
        standing = await self.queue.standing(job_id)
        if standing is None or not key.sees(standing.owner):
            raise JobUnknown(f"there is no job {job_id}")
        return standing

    async def expect(self, job_id: str, key: ApiKey) -> bool:
        """The job is there for this key and can be read; if its deadline has passed unseen, it ends now. Answers whether it
        was over.

        Raises JobUnknown as `visible`, JobGone when it is over and its log has expired.
        """
        standing = await self.visible(job_id, key)
        if standing.late and standing.status not in TERMINAL:
            await self.queue.stop(job_id, Status.EXPIRED, "deadline")
        elif standing.status in TERMINAL and not await self.log.exists(job_id):
            raise JobGone(f"job {job_id} is {standing.status}, and its answer has expired")
        return standing.status in TERMINAL

    async def has_said_all(self, job_id: str, key: ApiKey, after: int) -> bool:
        """It is over, and its log has nothing from index `after` on: nothing will come. Raises as `expect`."""
        return await self.expect(job_id, key) and not await self.log.read(job_id, after)

    async def follow(
        self, job_ids: Sequence[str], key: ApiKey, after: int = 0
    ) -> AsyncIterator[tuple[int, list[Entry]]]:
        """(number of the job, entries) until all have ended, [] now and then; a deadline that passes meanwhile ends one. While
        Redis is away it pauses, from the beginning: the response may have begun already.

        Raises JobUnknown or JobGone, as `expect`; RedisAway once no job can be left to follow.
        """
        with contextlib.suppress(RedisAway):
            for job_id in job_ids:
                await self.expect(job_id, key)
        clock = asyncio.get_running_loop().time
        heard = clock()
        async for number, entries in self.reader.follow(job_ids, after):
            try:
                if not entries and await self.has_said_all(job_ids[number], key, after):
                    return
                heard = clock()
            except RedisAway:
                if clock() - heard > self.config.job_seconds:
                    raise
            yield number, entries

    async def follow_for_client(
        self, job_ids: Sequence[str], key: ApiKey, gone: asyncio.Event, *, may_come_again: bool
    ) -> AsyncIterator[tuple[int, list[Entry]]]:
        """The same for a synchronous request. The first batch, empty, comes at once.

        A client that leaves cancels its jobs, unless its request may come again. The cancel writes the end into the logs,
        which is how this iterator learns of it.
        """
        going = {} if may_come_again else dict(enumerate(job_ids))
        leaving = asyncio.create_task(self._cancel_when(gone, list(going.values())))
        try:
            yield 0, []  # here and not in the caller: whoever has begun to answer is watched already
            async for number, entries in self.follow(job_ids, key):
                if entries and entries[-1].end is not None:
                    going.pop(number, None)
                yield number, entries
        finally:
            leaving.cancel()
            self._cancel(going.values())  # this generator was closed before the end: nobody reads any more

    async def _cancel_when(self, gone: asyncio.Event, job_ids: Sequence[str]) -> None:
        await gone.wait()
        self._cancel(job_ids)

    def _cancel(self, job_ids: Iterable[str]) -> None:
        """In tasks of their own: while Redis is away they try again, and the request may be over by then."""
        for job_id in job_ids:
            task = asyncio.create_task(self._insist_on_cancel(job_id))
            self.cancels.add(task)
            task.add_done_callback(self.cancels.discard)

    async def _insist_on_cancel(self, job_id: str) -> None:
        with contextlib.suppress(TimeoutError):  # a job that nobody cancelled in all that time is over
            async with asyncio.timeout(self.config.job_seconds):
                while True:
                    with contextlib.suppress(RedisAway):
                        await self.queue.stop(job_id, Status.CANCELLED, "client left")
                        return
                    await asyncio.sleep(POLL)


def gone(request: HttpRequest) -> asyncio.Event:
    """Set when the client of this request has left."""
    client: Client = request.scope[CLIENT]
    return client.gone
