"""A system on the sim device with short leases, and workers that fail where a test says."""

import secrets
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.pull import pull
from pipeline.config import Config
from tests.acceptance.system import System, wait_for
from workers.devices.sim import expected

SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim"}
QUICK = {
    "lease_seconds": 1.5,
    "heartbeat_seconds": 0.4,
    "open_seconds": 0.5,
    "grace_seconds": 1,
    "no_worker_seconds": 30,
}
OTHER = {"prefill": "decode", "decode": "prefill"}


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * 7) % 200 for index in range(length)]


class Client:
    """Follows a job's events in a thread of its own, as somebody's program would."""

    def __init__(self, system: System, job: str) -> None:
        self._system, self._job = system, job
        self.events: list[dict[str, str]] = []
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        self.events.extend(self._system.events(f"/v1/jobs/{self._job}/events"))

    def check(self, tokens: list[int]) -> None:
        """No gap, no repeat, the end; and the text of those tokens."""
        self._thread.join(120)
        assert not self._thread.is_alive(), "the stream did not end"
        assert [event["id"] for event in self.events] == [str(n) for n in range(1, len(tokens) + 2)]
        assert self.events[-1]["event"] == "end"


class Chaos(System):
    def __init__(self, redis_url: str, folder: Path, **settings: object) -> None:
        name = {"served_name": f"chaos-{secrets.token_hex(4)}"}
        super().__init__(redis_url, folder, **{**SIM, **QUICK, **name, **settings})

    def start_all_but_the_api(self) -> None:
        self.start("prefill")
        self.start("decode")
        self.wait_ready()

    def start_faulty(self, role: str, fault: str, **settings: object) -> "subprocess.Popen[bytes]":
        """A worker with a fault in it; see tests/chaos/worker.py."""
        (process,) = self.start(role, module="tests.chaos.worker", test_fault=fault, **settings)
        return process

    def wait_fault(self) -> None:
        wait_for(lambda: "fault at " in self.logs(), "the fault happened")

    def stop_all(self, role: str) -> None:
        for process in [process for process in self.processes if role in process.args]:  # type: ignore[operator]
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            self.processes.remove(process)

    def finishes(self, job: str, tokens: list[int], count: int, seconds: float = 60) -> None:
        shown = self.finished(job, seconds)
        assert shown["status"] == "finished", shown
        assert self.tokens(job) == expected(tokens, count)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder, but for the soak, is for `make chaos`: it takes some minutes."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name != "test_soak.py":
            item.add_marker(pytest.mark.chaos)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return pull(Config())


@pytest.fixture
def system(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chaos]:
    """With its API; settings come from an indirect parameter, if there is one."""
    settings: dict[str, Any] = getattr(request, "param", {})
    system = Chaos(redis_url, tmp_path, **{"sim_prefill_us": 100, "sim_step_ms": 10, "slots": 4, **settings})
    system.start("api")
    wait_for(system.answers, "the API answers")
    yield system
    system.close()
