"""Random interleavings of whole scripts by forgetful actors; after every step the invariants are read back from Redis.

STORM_SEED repeats a run (as far as time allows), STORM_SECONDS makes it longer.
"""

import os
import random
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any

from hands import Hands

from brokers.audit import Audit
from brokers.keys import GROUP
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import Cancelled
from pipeline.job import Priority
from pipeline.states import TERMINAL, Status

JOBS = ("j0", "j1", "j2")
TOKENS = 4  # that a job is made of
STEPS = 500  # of a round, in which everything must come to its end …
CALM = 200  # … and from this one on nobody is submitted or cancelled by intent
HASTE = 0.05  # of all appends leave a token out
LOST = 0.2  # of all replies: the caller acts as if it had not been done


@dataclass
class Holder:
    """What somebody believes: that the job is his, and how many tokens it has."""

    job_id: str
    lease_id: str
    index: int
    role: str


@dataclass
class Round:
    hands: Hands
    random: random.Random
    holders: list[Holder]
    stopped: set[str]
    step: int = 0

    def often(self, share: float) -> bool:
        return self.random.random() < share

    async def act(self) -> None:
        calm = self.step >= CALM
        actions: list[tuple[float, Any]] = [
            (20, self.publish),
            (20, self.lease),
            (35, self.work if self.holders else self.lease),
            (5, self.release if self.holders else self.publish),
            (4, self.die),
            (6, self.sweep),
            (2, self.sweep if calm else self.cancel),
            (1, self.sweep if calm else self.destroy_groups),
            (2, self.sweep if calm else self.submit),
            (5, self.renew),
        ]
        weights, doers = zip(*actions, strict=True)
        (do,) = self.random.choices(doers, weights)
        await do()

    async def submit(self) -> None:
        priority = self.random.choice((Priority.HIGH, Priority.NORMAL, Priority.LOW))
        await self.hands.submit(self.random.choice(JOBS), priority=priority)

    async def publish(self) -> None:
        await self.hands.credit(self.random.choice(("d1", "d2")))

    async def lease(self) -> None:
        worker, most = self.random.choice(("p1", "p2")), self.random.choice((1, 1, 3))
        answer = await self.hands.queue.lease(worker, most=most, tokens=100, others=self.often(0.3))
        if isinstance(answer, list) and not self.often(LOST):
            self.holders += [Holder(lease.job_id, lease.lease_id, lease.log_length, "prefill") for lease in answer]

    async def work(self) -> None:
        holder = self.random.choice(self.holders)
        if holder.role == "prefill" and holder.index < TOKENS - 1 and self.often(0.4):
            await self.hand_over(holder)
        else:
            await self.append(holder)

    async def hand_over(self, holder: Holder) -> None:
        taker = f"{self.random.choice(('d1', 'd2'))}#{self.step}"
        try:
            await self.hands.queue.handover(holder.job_id, holder.lease_id, taker)
        except Cancelled:
            self.forget(holder)
        else:  # … and the old holder goes on believing
            self.holders.append(Holder(holder.job_id, taker, holder.index, "decode"))

    async def append(self, holder: Holder) -> None:
        index = holder.index + self.often(HASTE)
        end = "finished" if index + 1 >= TOKENS else ""
        answer = await self.hands.append(holder.job_id, holder.lease_id, index, index, end=end, reason="length")
        if answer.startswith("lost"):
            self.forget(holder)
        elif answer.isdigit() and not self.often(LOST):
            holder.index = index + 1

    def forget(self, holder: Holder) -> None:
        if not self.often(LOST):
            self.holders.remove(holder)

    async def release(self) -> None:
        holder = self.random.choice(self.holders)
        await self.hands.queue.release(holder.job_id, holder.lease_id, "x", refund=self.often(0.3))

    async def die(self) -> None:
        if self.holders:
            self.holders.remove(self.random.choice(self.holders))

    async def sweep(self) -> None:
        await self.hands.queue.sweep(self.random.choice((0.0, 0.003)))

    async def cancel(self) -> None:
        job_id = self.random.choice(JOBS)
        if (await self.hands.cancel(job_id)).outcome == "ok":
            self.stopped.add(job_id)

    async def destroy_groups(self) -> None:
        for queue in self.hands.keys.queues:
            if await self.hands.redis.exists(queue):
                await self.hands.redis.xgroup_destroy(queue, GROUP)

    async def renew(self) -> None:
        if self.holders:
            holder = self.random.choice(self.holders)
            await self.hands.queue.renew({holder.job_id: holder.lease_id})

    async def check(self) -> bool:
        """The invariants. True: every job is over."""
        keys = self.hands.keys
        async with self.hands.redis.pipeline(transaction=True) as pipe:
            for job_id in JOBS:
                pipe.hmget(keys.job(job_id), "status", "lease")
                pipe.xrange(keys.tokens(job_id))
            answers = await pipe.execute()
        open_jobs = 0
        for job_id, (status, lease), log in zip(JOBS, answers[::2], answers[1::2], strict=True):
            over = Status(status) in TERMINAL
            open_jobs += not over
            tokens = [fields["t"] for _, fields in log if "t" in fields]
            ends = [fields["end"] for _, fields in log if "end" in fields]
            assert [entry for entry, _ in log] == [f"{index + 1}-0" for index in range(len(log))], (job_id, log)
            assert tokens == [str(index) for index in range(len(tokens))], (job_id, log)
            assert ends == ([status] if over else []), (job_id, status, log)
            assert not over or "end" in log[-1][1], (job_id, log)
            assert status != "finished" or len(tokens) == TOKENS, (job_id, log)
            assert (lease == "") == (over or status == "queued"), (job_id, status, lease)
            assert job_id not in self.stopped or status == "cancelled", (job_id, status)
            assert sum(holder.job_id == job_id and holder.lease_id == lease for holder in self.holders) <= 1
        assert await self.hands.unfinished() == open_jobs
        assert await self.hands.working() <= open_jobs
        return open_jobs == 0


async def test_nothing_is_lost_repeated_or_left_over_whatever_happens_in_whatever_order(config: Config) -> None:
    seed = int(os.environ.get("STORM_SEED") or secrets.randbelow(1 << 32))
    seconds = float(os.environ.get("STORM_SECONDS") or 4.0)
    print(f"STORM_SEED={seed}")
    chance = random.Random(seed)
    started, rounds, steps = time.monotonic(), 0, 0
    while time.monotonic() - started < seconds:
        store = Store(replace(config, served_name=f"{config.served_name}-{rounds}", attempts=50))
        try:
            steps += await storm(Hands(store), chance)
        except AssertionError as error:
            error.add_note(f"STORM_SEED={seed}, round {rounds}")
            raise
        finally:
            await store.close()
        rounds += 1
    print(f"{rounds} rounds, {steps} steps")
    assert rounds


async def storm(hands: Hands, chance: random.Random) -> int:
    round_ = Round(hands, chance, [], set())
    for job_id in JOBS:
        await hands.submit(job_id, priority=chance.choice((Priority.HIGH, Priority.NORMAL)))
    while not await round_.check() or round_.step < CALM:
        assert round_.step < STEPS, f"not drained: {[await hands.queue.record(job_id) for job_id in JOBS]}"
        await round_.act()
        round_.step += 1
    audit = Audit(hands.store, lease_seconds=60, tick_seconds=0)
    # of the workers here there are only names, which keep no count of their places
    assert [problem for problem in await audit.problems() if not problem.subject.startswith("worker")] == []
    return round_.step
