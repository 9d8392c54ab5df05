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
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.system import System, wait_for
from tests.chaos.conftest import SIM, prompt
from tests.chaos.redis_server import RedisServer

BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
CANCELS, DEATHS = 50, 20
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
        return (
            f"| {self.what} | {len(figures)} | {median:.0f} {self.unit} | {worst:.0f} {self.unit} | "
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
        lease = 1000 * self.system.config.lease_seconds
        prefill = 1000 * PREFILL_SECONDS
        recovered = lease + 500 + prefill
        why = f"lease + 0.5 s + the prefill of {prefill:.0f} ms"
        yield Row("kill -9 of a prefill worker → first token", "ms", self.deaths("prefill"), recovered, why)
        yield Row("kill -9 of a decode worker → next token", "ms", self.deaths("decode"), recovered, why)
        yield Row("Redis killed and started → next token", "ms", self.redis_restarts(), 10_000, "R2 of the fault list")
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

    def redis_restarts(self) -> list[float]:
        figures = []
        for _ in range(DEATHS // 2):
            job = self.system.submit(prompt(20), max_tokens=2000)
            watcher = Watcher(self.system, job)
            wait_for(lambda watcher=watcher: len(watcher.at) > 5, "it decodes")
            killed = time.monotonic()
            self.server.restart()
            figures.append(watcher.next_after(killed + 0.05))  # what was on its way already does not count
            self.system.call("DELETE", f"/v1/jobs/{job}")
            self.system.wait_idle(20)
        return figures

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
