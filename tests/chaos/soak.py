"""Mixed load, and everything that can happen to it, at random times; ``python -m tests.chaos.soak --seed 7 --seconds 600``.

Workers are killed and stopped, Redis crashes and comes back, connections of either kind are cut, API processes die, jobs are
cancelled and clients leave. In the end every accepted job must be over, once; every finished text must be that of an
undisturbed run; every stream must have shown it without a gap or a repeat; `kvrelay check` must find nothing; memory and
descriptors must be flat. The seed repeats the plan, as far as time allows.
"""

import argparse
import contextlib
import json
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis

from tests.acceptance.system import wait_for
from tests.chaos.conftest import Chaos, prompt
from tests.chaos.redis_server import RedisServer
from workers.devices.sim import expected

CLIENTS = 6
CUTS: dict[str, Any] = {"module": "tests.chaos.worker", "test_cuts": 0.01}  # of KV connections
SETTLE_SECONDS = 120.0
RSS_GROWTH, FILES_GROWTH = 60 << 20, 40  # of the API's processes, from a tenth of the time on
OVER = {"finished", "failed", "cancelled", "expired"}


@dataclass
class Job:
    prompt: list[int]
    count: int
    cancelled: bool = False
    seen: list[int] = field(default_factory=list)  # places of a stream, in the order that they came


class Load:
    """Clients that submit, watch, cancel and leave, each after a plan of its own."""

    def __init__(self, system: Chaos, seed: int) -> None:
        self._system, self._seed = system, seed
        self._stop = threading.Event()
        self.jobs: dict[str, Job] = {}
        self.left = 0
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SETTLE_SECONDS)
            assert not thread.is_alive(), "a client does not come to its end"

    def _run(self, number: int) -> None:
        draw = random.Random(f"{self._seed} {number}")
        while not self._stop.is_set():
            tokens, count = prompt(draw.choice((5, 60, 300, 900)), draw.randrange(1000)), draw.choice((1, 3, 20, 60))
            do = draw.choices((self._watch, self._cancel, self._leave, self._forget), (5, 2, 2, 1))[0]
            with contextlib.suppress(OSError, json.JSONDecodeError):  # the API is away: nothing was promised
                do(draw, tokens, count)
            time.sleep(draw.random() * 0.2)

    def _submit(self, tokens: list[int], count: int) -> str:
        status, answer = self._system.call("POST", "/v1/jobs", {"prompt": tokens, "max_tokens": count})
        if status != 202:
            time.sleep(0.2)
            raise OSError(status)
        self.jobs[answer["id"]] = Job(tokens, count)
        return str(answer["id"])

    def _watch(self, _draw: random.Random, tokens: list[int], count: int) -> None:
        """To the end, however often the connection breaks."""
        job_id = self._submit(tokens, count)
        job, deadline = self.jobs[job_id], time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline:
            last = str(job.seen[-1]) if job.seen else "0"
            try:
                for event in self._system.events(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": last}):
                    if "id" in event:
                        job.seen.append(int(event["id"]))
                    if event.get("event") == "end":
                        return
            except (OSError, urllib.error.HTTPError):
                time.sleep(0.2)

    def _cancel(self, draw: random.Random, tokens: list[int], count: int) -> None:
        job_id = self._submit(tokens, count)
        time.sleep(draw.random() * 0.5)
        self.jobs[job_id].cancelled = True  # before it is asked for: the answer may get lost
        self._system.call("DELETE", f"/v1/jobs/{job_id}")

    def _leave(self, draw: random.Random, tokens: list[int], count: int) -> None:
        """A synchronous client, whose job nobody knows by name."""
        connection = self._system.stream("/v1/completions", {"prompt": tokens, "max_tokens": count, "stream": True})
        time.sleep(draw.random() * 0.5)
        connection.close()
        self.left += 1

    def _forget(self, _draw: random.Random, tokens: list[int], count: int) -> None:
        self._submit(tokens, count)


class Faults:
    def __init__(self, system: Chaos, server: RedisServer, seed: int) -> None:
        self._system, self._server, self._random = system, server, random.Random(seed)
        self.counts: Counter[str] = Counter()

    def one(self) -> None:
        weighted: list[tuple[int, Callable[[], None]]] = [
            (5, self.kill),
            (4, self.pause),
            (2, self.leave),
            (1, self.crash_redis),
            (1, self.hang_redis),
            (3, self.cut_connections),
            (1, self.kill_api),
        ]
        weights, doers = zip(*weighted, strict=True)
        (do,) = self._random.choices(doers, weights)
        self.counts[do.__name__] += 1
        do()

    def kill(self) -> None:
        self._replace(signal.SIGKILL)

    def leave(self) -> None:
        self._replace(signal.SIGTERM)

    def pause(self) -> None:
        """Past the lease, sometimes."""
        process = self._worker()[1]
        process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.random() * 4)
        process.send_signal(signal.SIGCONT)

    def crash_redis(self) -> None:
        self._server.kill()
        time.sleep(self._random.random())
        self._server.start()

    def hang_redis(self) -> None:
        self._server.process.send_signal(signal.SIGSTOP)
        time.sleep(self._random.random() * 5)
        self._server.process.send_signal(signal.SIGCONT)

    def cut_connections(self) -> None:
        with contextlib.suppress(redis.RedisError):
            self._server.client.client_kill_filter(_type=self._random.choice(("normal", "pubsub")), skipme=True)

    def kill_api(self) -> None:
        """One of gunicorn's; its master starts another."""
        master = psutil.Process(self._system.processes[0].pid)
        with contextlib.suppress(psutil.Error, IndexError):
            self._random.choice(master.children()).kill()

    def _replace(self, number: int) -> None:
        role, process = self._worker()
        process.send_signal(number)
        process.wait(30)
        self._system.processes.remove(process)
        time.sleep(self._random.random())
        self._system.start(role, **(CUTS if role == "prefill" else {}))

    def _worker(self) -> tuple[str, Any]:
        role = self._random.choice(("prefill", "decode"))
        workers = [process for process in self._system.processes if role in process.args]  # type: ignore[operator]
        return role, self._random.choice(workers)


def verdict(system: Chaos, server: RedisServer, load: Load) -> list[str]:
    """What is not as it must be; [] if all is."""
    wrong = []
    ends: Counter[str] = Counter()
    for job_id, job in load.jobs.items():
        shown = system.job(job_id)
        ends[shown["status"]] += 1
        tokens = system.tokens(job_id)
        right = expected(job.prompt, job.count)
        if shown["status"] == "finished" and tokens != right:
            wrong.append(f"job {job_id} has {tokens}, not {right}")
        if tokens != right[: len(tokens)]:
            wrong.append(f"job {job_id}, {shown['status']}, has a wrong token: {tokens}, not {right}")
        if shown["status"] not in ("finished", "cancelled") or (shown["status"] == "cancelled" and not job.cancelled):
            wrong.append(f"job {job_id} is {shown['status']}: {shown['reason']}; {shown['failed_attempts']}")
        if job.seen and job.seen != list(range(1, len(tokens) + 2)):
            wrong.append(f"the stream of {job_id} showed {job.seen} of {len(tokens)} tokens")
    print(f"{len(load.jobs)} jobs: {dict(ends)}; {load.left} clients left", flush=True)
    try:
        system.check()
    except AssertionError as error:
        wrong.append(f"kvrelay check: {error}")
    if "Traceback" in system.logs():
        wrong.append("there is a traceback in a log")
    unknown = [
        key for key in server.client.scan_iter(system.key("job:*")) if server.client.hget(key, "status") not in OVER
    ]
    return wrong + [f"{key} is not over" for key in unknown]


def soak(seed: int, seconds: float, folder: Path) -> int:
    """0 if nothing was wrong."""
    print(f"seed {seed}, {seconds:g} s", flush=True)
    server = RedisServer(folder)
    settings = {"slots": 4, "attempts": 50, "queue_bound": 5000, "api_workers": 2, "job_seconds": 600}
    system = Chaos(server.url, folder, sim_prefill_us=200, sim_step_ms=5, **settings)
    try:
        system.start("api")
        wait_for(system.answers, "the API answers")
        system.start("prefill", 2, **CUTS)
        system.start("decode", 2)
        system.wait_ready(2, 2)
        load, faults = Load(system, seed), Faults(system, server, seed)
        load.start()
        started, usage = time.monotonic(), (0, 0)
        while (elapsed := time.monotonic() - started) < seconds:
            faults.one()
            if not usage[0] and elapsed > seconds / 10:
                usage = api_usage(system)
            time.sleep(faults._random.random() * 3)
        load.stop()
        wait_for(lambda: settled(system), "everything is over", SETTLE_SECONDS)
        print(f"faults: {dict(faults.counts)}", flush=True)
        wrong = verdict(system, server, load)
        rss, files = (after - before for after, before in zip(api_usage(system), usage, strict=True))
        print(f"API: {rss >> 20} MiB and {files} descriptors more than at a tenth of the time", flush=True)
        if rss > RSS_GROWTH or files > FILES_GROWTH:
            wrong.append("memory or descriptors grow")
        for sentence in wrong[:20]:
            print(f"not so: {sentence}", flush=True)
        return int(bool(wrong))
    finally:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
        system.close()
        server.close()


def api_usage(system: Chaos) -> tuple[int, int]:
    """Bytes resident and open descriptors of gunicorn's master, and the mean of its children."""
    master = psutil.Process(system.processes[0].pid)
    children = master.children() or [master]
    rss = sum(child.memory_info().rss for child in children) // len(children)
    return rss, sum(child.num_fds() for child in children) // len(children)


def settled(system: Chaos) -> bool:
    try:
        return bool(system.call("GET", "/health/ready")[1]["ready"]) and system.idle()
    except (OSError, redis.RedisError, KeyError):
        return False


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    parser.add_argument("--seconds", type=float, default=600.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return soak(arguments.seed, arguments.seconds, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
