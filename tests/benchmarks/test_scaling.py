"""Throughput with 1 to 16 workers of the saturated role, on sim devices of fixed speed. Prints target and figure.

Counted is while every worker is busy and more jobs wait than they can take: neither the start nor the last wave weighs. What
the processes take of the cores meanwhile is printed beside: where little of them is left, cores were measured, not workers.
"""

import asyncio
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from brokers.queue import JobQueue
from brokers.store import Store
from pipeline.job import Job, Priority
from pipeline.sampling import SamplingParams
from tests.acceptance.system import System, wait_for

COUNTS, TARGET = (1, 2, 4, 8, 16), 0.95
IDLE_SECONDS, START_SECONDS, COUNTED_SECONDS = 4.0, 15.0, 20.0

Cores = Counter[str]  # in use, by what uses them


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Saturates one role. The device takes so long that the processes of 16 workers fit into two cores several times."""

    settings: dict[str, float]
    device_rate: float  # jobs a second that one device could do
    prompt: int
    max_tokens: Callable[[int], int]  # of the nth job
    counter: str  # of the system's metrics: grows with the work
    each: int  # … by so much for a job, in the mean

    def jobs(self, workers: int) -> dict[str, Job]:
        """More than they can do until all is counted."""
        number = round(workers * self.device_rate * (START_SECONDS + COUNTED_SECONDS))
        sampling = SamplingParams(seed=1)
        return {
            f"job-{n}": Job(prompt=(n % 200,) * self.prompt, max_tokens=self.max_tokens(n), sampling=sampling)
            for n in range(number)
        }


LOADS = {
    "prefill": Load(
        settings={"sim_prefill_us": 500, "sim_step_ms": 5, "slots": 16},
        device_rate=2,
        prompt=1000,
        max_tokens=lambda _: 2,
        counter="prompt_tokens",
        each=1000,
    ),
    # 9 to 25 tokens, one of them prefill's: slots do not become free all at once
    "decode": Load(
        settings={"sim_prefill_us": 1, "sim_step_ms": 100, "slots": 4},
        device_rate=2.5,
        prompt=16,
        max_tokens=lambda n: 9 + n * 7 % 17,
        counter="generation_tokens",
        each=17,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    jobs_per_second: float
    idle: Cores
    busy: Cores

    def line(self, workers: int, one: float, device_rate: float) -> str:
        ratio, speed = self.jobs_per_second / one, self.jobs_per_second / workers / device_rate
        idle = 1000 * sum(share for who, share in self.idle.items() if "worker" in who) / (workers + 1)
        return (
            f"{workers:7} {self.jobs_per_second:7.2f} {ratio:6.2f} {ratio / workers:11.3f} {speed:9.3f}   {idle:6.1f}   "
            + "  ".join(f"{who} {share:.2f}" for who, share in self.busy.items())
        )


def measured(redis_url: str, folder: Path, role: str, workers: int) -> Figures:
    load = LOADS[role]
    sim = {"model": "sim", "prefill_device": "sim", "decode_device": "sim"}
    system = System(redis_url, folder, **sim, served_name=f"scale-{secrets.token_hex(4)}", **load.settings)
    try:
        system.start_all(**{role: workers})
        wait_for(lambda: all("seen" in facts for facts in living(system)), "all keepers are there", 60)
        idle = Meter(system)
        time.sleep(IDLE_SECONDS)
        idle_cores = idle.read()
        asyncio.run(submit(system, load.jobs(workers)))
        wait_for(lambda: all_have_worked(system, role, workers), "every worker has ended a job", START_SECONDS)
        busy, (before, began) = Meter(system), edge(system, load.counter)
        time.sleep(COUNTED_SECONDS)
        after, ended = edge(system, load.counter)
        busy_cores = busy.read()
        assert system.redis.zcard(system.key("line")), "none waits any more: perhaps not all were busy"
    finally:
        system.close()
    jobs = (after - before) / load.each
    return Figures(jobs_per_second=jobs / (ended - began), idle=idle_cores, busy=busy_cores)


async def submit(system: System, jobs: dict[str, Job]) -> None:
    store, items = Store(system.config), list(jobs.items())
    for at in range(0, len(items), 100):
        part = dict(items[at : at + 100])
        await JobQueue(store).submit_all(part, priority=Priority.NORMAL, bound=len(items), lifetime=600)
    await store.close()


def living(system: System) -> list[dict[str, str]]:
    """What each worker, and then its keeper, says of it."""
    names = system.redis.smembers(system.key("workers"))
    return [system.redis.hgetall(system.key(f"worker:{name}")) for name in names]


def all_have_worked(system: System, role: str, workers: int) -> bool:
    return sum(facts.get("role") == role and int(facts["jobs"]) > 0 for facts in living(system)) == workers


def edge(system: System, counter: str) -> tuple[int, float]:
    """What it grows to next, and when: between two edges are whole steps, or prompts."""

    def count() -> int:
        return int(system.redis.hget(system.key("metrics"), counter) or 0)

    before = count()
    return wait_for(lambda: (now := count()) > before and now, f"{counter} grows"), time.monotonic()


class Meter:
    """What a system's processes use of the cores, and all others of this machine."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._before, self._since = self._seconds(), time.monotonic()

    def read(self) -> Cores:
        """Since it was made."""
        took = time.monotonic() - self._since
        cores = Counter({who: (used - self._before[who]) / took for who, used in self._seconds().items()})
        cores["others"] = cores.pop("machine") - cores.total()
        return cores

    def _seconds(self) -> Counter[str]:
        machine = psutil.cpu_times()
        used: Counter[str] = Counter(machine=sum(machine) - machine.idle - machine.iowait)
        for process in self._system.processes:
            role = f"{process.args[3]} workers" if "workers" in process.args else "api"
            first = psutil.Process(process.pid)
            for member in (first, *first.children(recursive=True)):
                times = member.cpu_times()
                used["workers' keepers" if "keeper" in member.cmdline() else role] += times.user + times.system
        redis = self._system.redis.info("cpu")
        used["redis"] = redis["used_cpu_user"] + redis["used_cpu_sys"]
        return used


@pytest.mark.benchmark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", LOADS)
def test_throughput_grows_with_the_saturated_role(redis_url: str, tmp_path: Path, role: str) -> None:
    print(
        f"\n{role}; speed: share of what the devices could do; idle: CPU ms/s of a worker and its keeper without work"
    )
    print(f"workers  jobs/s  × one  efficiency     speed     idle   cores in use, of {os.cpu_count()}")
    print(f"{'target':7}{TARGET:27}")
    one = 0.0
    for workers in COUNTS:
        folder = tmp_path / str(workers)
        folder.mkdir()
        figures = measured(redis_url, folder, role, workers)
        one = one or figures.jobs_per_second
        print(figures.line(workers, one, LOADS[role].device_rate), flush=True)
