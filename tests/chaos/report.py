"""How long a cancel and a recovery take, with the leases that are the default; ``python -m tests.chaos.report [DOCUMENT]``.

Prints a table, and puts it between the marks of the document, if one is named. For an idle machine of two cores.
"""

import argparse
import datetime
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.system import WAYS_TO_LEAVE, System, leave, wait_for
from tests.chaos.conftest import SIM, prompt
from tests.chaos.redis_server import RedisServer

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
CANCELS, DEATHS = 50, 20
WAVE, GOOD = 200, 20  # clients that leave within a second, and jobs after them
AWAY_SECONDS = 1.0  # of Redis
STEP_MS, LAYER_MS, CHUNK = 20, 50, 512
PREFILL_SECONDS = 0.8  # of the prompt that is decoded by another worker
SLACK_MS = 20


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    unit: str
    figures: Sequence[float]
    target: float  # of the median; twice that for the worst
    why: str

    def line(self) -> str:
        figures = sorted(self.figures)
        median, worst = figures[len(figures) // 2], figures[min(len(figures) - 1, int(len(figures) * 0.99))]
        met = "met" if median <= self.target and worst <= 2 * self.target else "**not met**"
        shown = [f"{figure:.0f} ms" if self.unit == "ms" else f"{figure:.2f} {self.unit}" for figure in (median, worst)]
        return (
            f"| {self.what} | {len(figures)} | {shown[0]} | {shown[1]} | "
            f"≤ {self.target:.0f} {self.unit} ({self.why}) | {met} |"
        )


class Watcher:
    """A client that notes when each event came."""

    def __init__(self, system: System, job: str) -> None:
        self.at: list[float] = []
        self._thread = threading.Thread(target=self._watch, args=(system, job), daemon=True)
        self._thread.start()

    def _watch(self, system: System, job: str) -> None:
        for event in system.events(f"/v1/jobs/{job}/events"):
            if event.get("event") != "end":
                self.at.append(time.monotonic())

    def next_after(self, moment: float) -> float:
        """Milliseconds from the moment to the next token."""
        wait_for(lambda: self.at and self.at[-1] > moment, "a token comes", 60)
        return 1000 * (next(at for at in self.at if at > moment) - moment)

    def first(self) -> float:
        """When its first token came."""
        return float(wait_for(lambda: self.at, "a token comes", 60)[0])


class Measurement:
    def __init__(self, server: RedisServer, folder: Path) -> None:
        sim = {"sim_step_ms": STEP_MS, "sim_prefill_us": 2000 * LAYER_MS // CHUNK, "chunk": CHUNK, "attempts": 1000}
        self.server = server
        self.system = System(server.url, folder, **{**SIM, **sim, "slots": 4})
        for role in ("api", "prefill", "decode"):
            self.system.start(role)
        wait_for(self._ready, "the system is ready", 60)

    def rows(self) -> Iterator[Row]:
        yield self.cancel("queued", SLACK_MS, "nobody to ask")
        yield self.cancel("prefill", LAYER_MS + SLACK_MS, f"a layer of {LAYER_MS} ms + {SLACK_MS}")
        yield self.cancel("decode", STEP_MS + SLACK_MS, f"a step of {STEP_MS} ms + {SLACK_MS}")
        for way in WAYS_TO_LEAVE:
            yield Row(
                f"a client leaves in prefill, {way} → tombstone", "ms", self.leaves(way), 500, "C11: within a second"
            )
        lease = 1000 * self.system.config.lease_seconds
        prefill = 1000 * PREFILL_SECONDS
        recovered = lease + 500 + prefill
        why = f"lease + 0.5 s + the prefill of {prefill:.0f} ms"
        yield Row("kill -9 of a prefill worker → first token", "ms", self.deaths("prefill"), recovered, why)
        yield Row("kill -9 of a decode worker → next token", "ms", self.deaths("decode"), recovered, why)
        running, new = self.redis_restarts()
        away = f"Redis killed, answers again after {AWAY_SECONDS:g} s →"
        yield Row(f"{away} next token of a running job", "ms", running, 10_000, "R2 of the fault list")
        yield Row(f"{away} first token of a new job", "ms", new, 10_000, "R2 of the fault list")
        wave = f"p95 TTFT of {GOOD} jobs after {WAVE} clients left, to that of an idle system"
        yield Row(wave, "×", self.waves(), 2, "C1 of the fault list")
        grace = 1000 * self.system.config.grace_seconds
        for role in ("prefill", "decode"):
            yield Row(
                f"SIGTERM of a busy {role} worker → gone", "ms", self.drains(role), 2 * grace, "twice the grace time"
            )

    def cancel(self, phase: str, target: float, why: str) -> Row:
        """Milliseconds: for a queued job until the API has answered, else until its holder has undone its side."""
        figures = []
        for number in range(CANCELS):
            blockers = []
            if phase == "queued":  # behind one that takes the prefill worker
                blockers.append(self.system.submit(prompt(8000, number), max_tokens=1))
                self._wait_status(blockers[0], "prefilling")
            job = self.system.submit(prompt(6000 if phase == "prefill" else 20, number), max_tokens=500)
            self._wait_status(job, {"queued": "queued", "prefill": "prefilling", "decode": "decoding"}[phase])
            time.sleep((number % 10) / 50)
            started = time.monotonic()
            self.system.call("DELETE", f"/v1/jobs/{job}")
            answered = 1000 * (time.monotonic() - started)
            shown = wait_for(lambda job=job: self._confirmed(job), "the cancel is confirmed")
            assert shown["stopped"]["phase"] == phase, shown
            figures.append(answered if phase == "queued" else float(shown["stopped"]["milliseconds"]))
            for blocker in blockers:
                self.system.call("DELETE", f"/v1/jobs/{blocker}")
            self.system.wait_idle()
        return Row(f"cancel in {phase} → effect", "ms", figures, target, why)

    def leaves(self, way: str) -> list[float]:
        """Milliseconds, by the clock of the machine, which is also Redis'."""
        figures = []
        for number in range(CANCELS):
            known = set(self._tombstones())
            body = {"prompt": prompt(4000, number), "max_tokens": 5, "stream": True}
            connection = self.system.stream("/v1/completions", body)
            wait_for(self.system.unfinished, "it is submitted")
            time.sleep((number % 10) / 50)
            left = time.time()
            leave(connection, way)
            (tombstone,) = wait_for(lambda known=known: set(self._tombstones()) - known, "the tombstone stands")
            figures.append(float(self.system.redis.get(tombstone).split()[0]) - 1000 * left)
            connection.close()
            self.system.wait_idle()
        return figures

    def _tombstones(self) -> list[str]:
        return list(self.system.redis.scan_iter(self.system.key("tombstone:*"), count=10_000))

    def deaths(self, role: str) -> list[float]:
        figures = []
        tokens = prompt(int(PREFILL_SECONDS * 1000 / (2 * LAYER_MS) * CHUNK))
        for number in range(DEATHS):
            job = self.system.submit(tokens, max_tokens=200)
            watcher = Watcher(self.system, job)
            if role == "prefill":
                self._wait_status(job, "prefilling")
            else:
                wait_for(lambda watcher=watcher: len(watcher.at) > 5, "it decodes")
            time.sleep((number % 7) / 20)
            self._replace(role, signal.SIGKILL)
            figures.append(watcher.next_after(self._left))
            self.system.call("DELETE", f"/v1/jobs/{job}")
            self.system.wait_idle(20)
        return figures

    def redis_restarts(self) -> tuple[list[float], list[float]]:
        """Milliseconds from its first answer on, for a job that runs and for one that is submitted then."""
        running, new = [], []
        for _ in range(DEATHS):
            job = self.system.submit(prompt(20), max_tokens=2000)
            watcher = Watcher(self.system, job)
            wait_for(lambda watcher=watcher: len(watcher.at) > 5, "it decodes")
            self.server.kill()
            time.sleep(AWAY_SECONDS)
            self.server.start()
            back = time.monotonic()
            following = wait_for(lambda: self.system.try_submit(prompt(9), max_tokens=3), "a job is accepted")
            new.append(1000 * (Watcher(self.system, following).first() - back))
            running.append(watcher.next_after(back))
            self.system.call("DELETE", f"/v1/jobs/{job}")
            self.system.wait_idle(20)
        return running, new

    def waves(self) -> list[float]:
        """How the p95 TTFT of jobs after a wave of clients that left compares with that of the same jobs on an idle system."""
        ratios = []
        for _ in range(DEATHS):
            idle = self._p95_ttft()
            body = {"prompt": prompt(400), "max_tokens": 200}
            connections = [self.system.stream("/v1/completions", body) for _ in range(WAVE)]
            for connection in connections:
                connection.close()
            ratios.append(self._p95_ttft() / idle)
            self.system.wait_idle(20)
        return ratios

    def _p95_ttft(self) -> float:
        """Seconds, of jobs that come together."""

        def took(number: int) -> float:
            started = time.monotonic()
            self.system.complete(prompt(50, number), max_tokens=1)
            return time.monotonic() - started

        with ThreadPoolExecutor(GOOD) as clients:
            return sorted(clients.map(took, range(GOOD)))[int(0.95 * (GOOD - 1))]

    def drains(self, role: str) -> list[float]:
        figures = []
        for number in range(DEATHS):
            job = self.system.submit(prompt(6000 if role == "prefill" else 20, number), max_tokens=2000)
            self._wait_status(job, "prefilling" if role == "prefill" else "decoding")
            figures.append(self._replace(role, signal.SIGTERM))
            self.system.call("DELETE", f"/v1/jobs/{job}")
            self.system.wait_idle(20)
        return figures

    def _replace(self, role: str, number: int) -> float:
        """Milliseconds until it was gone. A second one is there before: what is measured is recovery, not a start."""
        (worker,) = (process for process in self.system.processes if role in process.args)  # type: ignore[operator]
        self.system.start(role)
        wait_for(lambda: self._count(role) == 2, "the other one is there", 60)
        self._left = time.monotonic()
        self.system.stop(worker, number)
        return 1000 * (time.monotonic() - self._left)

    def _count(self, role: str) -> int:
        return int(self.system.call("GET", "/health/ready")[1][role])

    def _ready(self) -> bool:
        try:
            return bool(self.system.call("GET", "/health/ready")[1]["ready"])
        except OSError:
            return False

    def _confirmed(self, job: str) -> dict[str, object] | None:
        shown = self.system.job(job)
        return shown if (shown.get("stopped") or {}).get("milliseconds") is not None else None

    def _wait_status(self, job: str, status: str) -> None:
        wait_for(lambda: self.system.job(job)["status"] == status, f"the job is {status}")


def table(rows: Sequence[Row], redis: str, lease: float) -> str:
    cores = os.cpu_count()
    today = datetime.datetime.now(datetime.UTC).date()
    machine = (
        f"{cores} cores, {platform.system()} {platform.machine()}, Python {platform.python_version()}, Redis {redis}"
    )
    head = [
        f"Measured on {today} by `make chaos-report`: {machine}; sim device, leases of {lease:g} s, `appendfsync always`.",
        "",
        "| | n | p50 | p99 | target of p50; p99 ≤ twice that | |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *(row.line() for row in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.report", description=__doc__)
    parser.add_argument("document", nargs="?", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        measurement = Measurement(server, Path(folder))
        rows = []
        try:
            for row in measurement.rows():
                rows.append(row)
                print(row.line(), flush=True)
            redis = str(server.client.info("server")["redis_version"])
            text = table(rows, redis, measurement.system.config.lease_seconds)
        finally:
            measurement.system.close()
            server.close()
    if arguments.document:
        before, _, rest = arguments.document.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        arguments.document.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
