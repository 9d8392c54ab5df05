"""A thousand open streams on one API process: how long a token takes from its log to the client's socket.

The decode workers are played here, through the real scripts: then it is known when each token was written. Sixteen of them,
64 jobs each, step once a second, one after the other.
"""

import asyncio
import resource
import secrets
import time
from pathlib import Path

import pytest

from brokers.credits import Credits
from brokers.queue import JobQueue
from brokers.registry import Registry
from brokers.store import Store
from brokers.token_log import Append, TokenLog
from pipeline.job import Job, Priority
from pipeline.sampling import SamplingParams
from tests.acceptance.system import System, wait_for

STREAMS, WORKERS, STEPS = 1000, 16, 20
STEP_SECONDS = 1.0
TARGET_MS = 50


class Streams:
    def __init__(self, system: System, store: Store) -> None:
        self._system = system
        self._store = store
        self._queue = JobQueue(store)
        self._log = TokenLog(store)
        self.delays: list[float] = []  # milliseconds
        self.opened = 0

    async def run(self) -> None:
        jobs = [f"stream-{number}" for number in range(STREAMS)]
        leases = await self._decoding(jobs)
        clients = [asyncio.create_task(self._client(job)) for job in jobs]
        while self.opened < STREAMS:
            await asyncio.sleep(0.05)
        await asyncio.gather(*(self._worker(number, jobs[number::WORKERS], leases) for number in range(WORKERS)))
        await asyncio.gather(*clients)

    async def _decoding(self, jobs: list[str]) -> dict[str, str]:
        """Submits them and takes them all; answers their leases."""
        job = Job(prompt=(1, 2, 3), max_tokens=STEPS, sampling=SamplingParams())
        for job_id in jobs:
            await self._queue.submit(job_id, job, priority=Priority.NORMAL, bound=2 * STREAMS, lifetime=0)
        await Registry(self._store, 3600).announce("d1", {"role": "decode", "endpoint": "tcp://127.0.0.1:1"})
        await Credits(self._store, "d1").publish([str(number) for number in range(len(jobs))], 0)
        leases = {}
        for _ in jobs:
            answer = await self._queue.lease("d1")
            assert isinstance(answer, list)
            leases |= {lease.job_id: lease.lease_id for lease in answer}
        return leases

    async def _worker(self, number: int, jobs: list[str], leases: dict[str, str]) -> None:
        await asyncio.sleep(number * STEP_SECONDS / WORKERS)
        for step in range(STEPS):
            started = time.monotonic()
            end = {"end": "finished", "reason": "length"} if step == STEPS - 1 else {}
            batch = [
                Append(job_id=job, lease_id=leases[job], start=step, tokens=[(65, str(time.monotonic_ns()), "")], **end)
                for job in jobs
            ]
            answers = await self._log.append(batch)
            assert not [answer for answer in answers if not answer.isdigit()], answers
            await asyncio.sleep(max(0.0, STEP_SECONDS - (time.monotonic() - started)))

    async def _client(self, job: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._system.port)
        writer.write(f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        status = await reader.readline()
        assert status.startswith(b"HTTP/1.1 200"), status
        self.opened += 1
        seen = 0
        while seen < STEPS:
            line = await reader.readline()
            assert line, "the stream ended early"
            if line.startswith(b"data:") and b'"text":"' in line.replace(b": ", b":"):
                written = int(line.replace(b": ", b":").split(b'"text":"')[1].split(b'"')[0])
                self.delays.append((time.monotonic_ns() - written) / 1e6)
                seen += 1
        writer.close()


@pytest.mark.benchmark
@pytest.mark.timeout(300)
async def test_a_thousand_streams_on_one_process(redis_url: str, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    name = {"served_name": f"streams-{secrets.token_hex(4)}"}
    sim = {
        "model": "sim",
        "prefill_device": "sim",
        "decode_device": "sim",
        "lease_seconds": 600,
        "queue_bound": 2 * STREAMS,
    }
    system = System(redis_url, tmp_path, **sim, **name)
    store = Store(system.config)
    try:
        (api,) = system.start("api")
        await asyncio.to_thread(wait_for, system.answers, "the API answers")
        before = system.memory(api)
        streams = Streams(system, store)
        await streams.run()
        delays = sorted(streams.delays)
        assert len(delays) == STREAMS * STEPS
        p50, p99 = delays[len(delays) // 2], delays[int(0.99 * len(delays))]
        grown = system.memory(api) - before
        print(
            f"\n{STREAMS} streams, {STREAMS / STEP_SECONDS:.0f} tokens/s: log to socket p50 {p50:.1f}, p99 {p99:.1f} ms "
            f"(target {TARGET_MS}); memory of the API {system.memory(api) >> 20} MiB, {grown / STREAMS / 1024:.0f} KiB a stream"
        )
    finally:
        await store.close()
        system.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
