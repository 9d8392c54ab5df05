"""What every resource needs: read a body, submit a job, follow it to its end."""

import asyncio
import uuid
from collections.abc import AsyncIterator

from falcon.asgi import Request as HttpRequest

from api.disconnect import GONE
from api.errors import JobGone, JobUnknown, NoWorkers, QueueFull, TooLarge
from api.requests import Request, make_job
from api.text import PromptCodec
from brokers.queue import JobQueue
from brokers.registry import Registry
from brokers.store import Store
from brokers.token_log import Entry, LogReader, TokenLog
from pipeline.config import Config
from pipeline.errors import RedisAway
from pipeline.job import Job
from pipeline.states import TERMINAL, Status

BODY_LIMIT = 8 << 20  # bytes; the longest prompts as token ids stay well below
POLL = 0.2  # seconds between looks for a worker


class Front:
    def __init__(self, config: Config, codec: PromptCodec, store: Store) -> None:
        self.config = config
        self.store = store
        self.codec = codec
        self.queue = JobQueue(store)
        self.registry = Registry(store, config.lease_seconds)
        self.log = TokenLog(store)
        self.reader = LogReader(store)

    async def body(self, request: HttpRequest) -> bytes:
        """Counted while it is read. Raises TooLarge."""
        body = bytearray()
        async for chunk in request.stream:
            body += chunk
            if len(body) > BODY_LIMIT:
                raise TooLarge(f"the body exceeds {BODY_LIMIT} bytes")
        return bytes(body)

    async def job(self, request: Request) -> Job:
        return await make_job(request, self.codec, self.config)

    async def submit(self, job: Job, request: Request) -> str:
        """Queues the job; answers its id. Raises QueueFull."""
        job_id = uuid.uuid4().hex
        submitted = await self.queue.submit(
            job_id,
            job,
            priority=request.queue,
            bound=self.config.queue_bound,
            lifetime=request.timeout or self.config.job_seconds,
        )
        if submitted.outcome == "full":
            raise QueueFull(f"{self.config.queue_bound} jobs are waiting; try again later")
        return job_id

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

    async def expect(self, job_id: str) -> None:
        """The job is there and can be read; if its deadline has passed unseen, it ends now.

        Raises JobUnknown without a job, JobGone when it is over and its log has expired.
        """
        standing = await self.queue.standing(job_id)
        if standing is None:
            raise JobUnknown(f"there is no job {job_id}")
        if standing.late and standing.status not in TERMINAL:
            await self.queue.stop(job_id, Status.EXPIRED, "deadline")
        elif standing.status in TERMINAL and not await self.log.exists(job_id):
            raise JobGone(f"job {job_id} is {standing.status}, and its answer has expired")

    async def follow(self, job_id: str, after: int = 0) -> AsyncIterator[list[Entry]]:
        """Batches of entries until the job ends; a deadline that passes meanwhile ends it. While Redis is away it pauses.

        Raises JobUnknown or JobGone, as `expect`; RedisAway at the beginning, and later once no job can be left to follow.
        """
        await self.expect(job_id)
        heard = asyncio.get_running_loop().time()
        async for entries in self.reader.follow(job_id, after):
            try:
                if not entries:
                    await self.expect(job_id)
                heard = asyncio.get_running_loop().time()
            except RedisAway:
                if asyncio.get_running_loop().time() - heard > self.config.job_seconds:
                    raise
            yield entries

    async def follow_for_client(self, job_id: str, gone: asyncio.Event) -> AsyncIterator[list[Entry]]:
        """The same for a synchronous request: a client that leaves cancels its job. The first batch, empty, comes at once.

        The cancel writes the end into the log, which is how this iterator learns of it.
        """
        leaving = asyncio.create_task(self._cancel_when(gone, job_id))
        ended = False
        try:
            yield []  # here and not in the caller: whoever has begun to answer is watched already
            async for entries in self.follow(job_id):
                ended = bool(entries) and entries[-1].end is not None
                yield entries
        finally:
            leaving.cancel()
            if not ended:  # this generator was closed before the end: nobody reads any more
                await self.queue.stop(job_id, Status.CANCELLED, "client left")

    async def _cancel_when(self, gone: asyncio.Event, job_id: str) -> None:
        await gone.wait()
        await self.queue.stop(job_id, Status.CANCELLED, "client left")


def gone(request: HttpRequest) -> asyncio.Event:
    """Set when the client of this request has left."""
    event: asyncio.Event = request.scope[GONE]
    return event
