"""The queue of jobs, and the lease that says who works on one.

Each method is one Lua script: atomic, and safe to repeat when its reply was lost. `Lost` is never an error of Redis: it
says that the job is over or has another holder, and the caller leaves it alone.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brokers.api_keys import NOBODY
from brokers.keys import GROUP
from brokers.store import BLOCK_SECONDS, Store, translated
from pipeline.errors import Cancelled
from pipeline.job import Job, Priority
from pipeline.states import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """outcome: ok | exists (same id, same request) | conflict (same id, other request) | full | owner_full | late.
    retry_seconds: of the full ones, an estimate of when there is room."""

    outcome: str
    retry_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to prefill a job, and the place in a decode worker for its KV cache."""

    job_id: str
    lease_id: str
    attempt: int  # 1: the first
    job: Job
    decode_worker: str
    nonce: str
    endpoint: str
    log_length: int  # tokens that an earlier attempt left


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """No job, or no credit. `mark`: wait from here, and no wake-up is lost. alone: the next one is for empty hands only."""

    mark: str
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """outcome: ok | over | unknown. status: where it was (ok) or how it had ended (over)."""

    outcome: str
    status: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """late: its deadline has passed, by Redis' clock."""

    status: Status
    late: bool
    owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Of one queue stream."""

    unfinished: int
    working: int

    @property
    def waiting(self) -> int:
        return self.unfinished - self.working


class JobQueue:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def submit(self, job_id: str, job: Job, **how: Any) -> Submitted:
        """One job; see `submit_all`."""
        return await self.submit_all({job_id: job}, **how)

    @translated
    async def submit_all(
        self,
        jobs: Mapping[str, Job],
        *,
        priority: Priority,
        bound: int,
        lifetime: float,
        owner: str = NOBODY.id,
        owner_bound: int = 0,
        digest: str = "",
        valid_until: int = 1 << 50,
        webhook: str = "",
    ) -> Submitted:
        """Queues jobs, by their ids: all or none. bound: jobs that may wait. lifetime: seconds to their deadline, 0 for none.
        owner: whose turns they take; owner_bound: jobs of his that may wait, 0 for any number.
        digest: tells another request under the same id from a repeat; the job's own if there is none.
        valid_until: Redis time in ms after which a belated retry must not queue them any more.
        webhook: URL of who wants to hear of their ends."""
        args: list[str | int] = [int(priority), bound, owner, owner_bound, valid_until, int(lifetime * 1000), webhook]
        for job_id, job in jobs.items():
            args += [job_id, digest or job.digest(), len(job.prompt), job.encode()]
        answer = await self._store.run("submit", *args, jobs=jobs)
        return Submitted(outcome=answer[0], retry_seconds=answer[1] / 1000 if len(answer) > 1 else 0.0)

    @translated
    async def lease(
        self, worker: str, *, most: int = 1, tokens: int = 0, others: bool = False, short: bool = False
    ) -> list[Lease] | Nothing:
        """The next job and a credit for it, or neither.

        most: so many jobs, if there are enough for all workers, and their prompts have no more `tokens` together. others: the
        worker has some in hand, beside which it takes none that was begun before. short: nor one that is longer alone.
        """
        answer = await self._store.run("lease", worker, secrets.token_hex(6), most, tokens, int(others), int(short))
        if answer[0] != "ok":
            return Nothing(mark=answer[1], alone=answer[0] == "alone")
        return [_lease(answer[at : at + 7]) for at in range(1, len(answer), 7)]

    @translated
    async def wait(self, mark: str) -> None:
        """Until a job or a credit is new since `mark`, or a second has passed."""
        await self._store.redis.xread({self._store.keys.wake: mark}, block=int(BLOCK_SECONDS * 1000))

    @translated
    async def renew(self, held: Mapping[str, str]) -> list[str]:
        """held: job id → lease id. Answers the jobs that are not ours any more."""
        if not held:
            return []
        pairs = [part for pair in held.items() for part in pair]
        answers = await self._store.run("renew", *pairs, jobs=held)
        return [job_id for job_id, mine in zip(held, answers, strict=True) if not mine]

    @translated
    async def handover(self, job_id: str, prefill_lease: str, decode_lease: str) -> Job:
        """The decode worker takes the job over. Raises Cancelled if it is over or has another holder."""
        answer = await self._store.run("handover", job_id, prefill_lease, decode_lease, jobs=[job_id])
        if answer[0] != "ok":
            raise Cancelled(answer[0])
        return Job.decode(answer[1])

    @translated
    async def release(self, job_id: str, lease_id: str, reason: str, *, refund: bool = False) -> str:
        """Gives a job back. refund: the attempt does not count. Answers queued | dead | expired | lost:<status>."""
        answer: str = await self._store.run("release", job_id, lease_id, reason, int(refund), jobs=[job_id])
        return answer

    @translated
    async def stop(self, job_id: str, status: Status, reason: str) -> Stopped:
        """Ends a job as cancelled or expired, in whatever state it is, at once."""
        answer = await self._store.run("stop", job_id, str(status), reason, jobs=[job_id])
        return Stopped(outcome=answer[0], status=answer[1] if len(answer) > 1 else "")

    @translated
    async def settle(self, job_id: str, phase: str) -> None:
        """The holder of a stopped job has undone its side: notes the phase, and milliseconds since it was asked."""
        await self._store.run("settle", job_id, phase, jobs=[job_id])

    @translated
    async def note(self, job_id: str, lease_id: str, event: str, detail: str) -> None:
        """A line for the job's timeline, if the lease is still good."""
        await self._store.run("note", job_id, lease_id, event, detail, jobs=[job_id])

    @translated
    async def sweep(self, lease_seconds: float) -> list[str]:
        """Requeues the jobs of holders that did not renew for a lease. Answers `<job>:<outcome>` of each."""
        answer: list[str] = await self._store.run("sweep", int(lease_seconds * 1000))
        return answer

    @translated
    async def retire(self, worker: str) -> bool:
        """Removes the worker's consumers. False: it still owns something."""
        return bool(await self._store.run("retire", worker))

    @translated
    async def record(self, job_id: str) -> dict[str, str]:
        """The job's hash, {} if there is none."""
        fields: dict[str, str] = await self._store.redis.hgetall(self._store.keys.job(job_id))
        return fields

    @translated
    async def leases(self, job_ids: Sequence[str]) -> list[str | None]:
        """The lease id in each job's hash: the truth about who holds it."""
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(self._store.keys.job(job_id), "lease")
            answers: list[str | None] = await pipe.execute()
        return answers

    @translated
    async def statuses(self, job_ids: Sequence[str]) -> list[Status | None]:
        """Of each job; None if there is no such job."""
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(self._store.keys.job(job_id), "status")
            return [None if status is None else Status(status) for status in await pipe.execute()]

    @translated
    async def load(self) -> list[Load]:
        """Of each queue, 0 first."""
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for queue in self._store.keys.queues:
                pipe.xlen(queue)
                pipe.xpending(queue, GROUP)
            answers: list[Any] = await pipe.execute(raise_on_error=False)
        return [
            Load(unfinished=length, working=0 if isinstance(pending, Exception) else pending["pending"])
            for length, pending in zip(answers[::2], answers[1::2], strict=True)
        ]

    @translated
    async def standing(self, job_id: str) -> Standing | None:
        """None if there is no such job."""
        async with self._store.redis.pipeline(transaction=False) as pipe:
            pipe.hmget(self._store.keys.job(job_id), "status", "deadline", "owner")
            pipe.time()
            (status, deadline, owner), (seconds, microseconds) = await pipe.execute()
        if status is None:
            return None
        now = seconds * 1000 + microseconds // 1000
        return Standing(status=Status(status), late=0 < int(deadline) < now, owner=owner or NOBODY.id)


def _lease(facts: Sequence[Any]) -> Lease:
    job_id, lease_id, attempt, credit, endpoint, request, log_length = facts
    decode_worker, nonce = credit.split("/")
    return Lease(
        job_id=job_id,
        lease_id=lease_id,
        attempt=attempt,
        job=Job.decode(request),
        decode_worker=decode_worker,
        nonce=nonce,
        endpoint=endpoint,
        log_length=log_length,
    )
