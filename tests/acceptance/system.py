"""A whole system in processes of its own: API and workers on a private Redis, with whatever settings a test asks for."""

import asyncio
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from brokers.audit import Audit, Problem
from brokers.store import Store
from pipeline.config import Config
from tests.acceptance import promises


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 20) -> Any:
    """The condition's first true value; fails with a sentence when the deadline passes."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)
    return value


WAYS_TO_LEAVE = ("close", "reset", "half-close")


def leave(connection: socket.socket, way: str) -> None:
    """As a client may: with FIN, with RST, or with no more to say and still listening."""
    if way == "half-close":
        connection.shutdown(socket.SHUT_WR)
        return
    if way == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


class System:
    """Start and stop workers by role; talk HTTP; look into Redis."""

    def __init__(self, redis_url: str, folder: Path, **settings: object) -> None:
        self.port = free_port()
        self.folder = folder
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("KVR_")},
            "KVR_REDIS_URL": redis_url,
            "KVR_PORT": str(self.port),
            **{f"KVR_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self.config = Config.from_env({name: value for name, value in self.environ.items() if name.startswith("KVR_")})
        self.name = self.environ.get("KVR_SERVED_NAME", self.environ["KVR_MODEL"])
        self.python = {"prefill": sys.executable, "decode": sys.executable}
        self.ready_seconds = 90.0
        self.arguments: dict[str, list[str]] = {"prefill": [], "decode": []}
        self.redis = redis.Redis.from_url(redis_url, decode_responses=True)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.headers = {"Content-Type": "application/json"}  # of every request

    def key(self, name: str) -> str:
        return f"kvr:{{{self.name}}}:{name}"

    # Processes

    def start(
        self, role: str, count: int = 1, module: str = "workers", **settings: object
    ) -> list["subprocess.Popen[bytes]"]:
        """role: api, prefill or decode. module: what runs a worker."""
        command = [self.python.get(role, sys.executable), "-m", module, role, *self.arguments.get(role, [])]
        if role == "api":
            command = [sys.executable, "-m", "gunicorn", "-c", "python:api.server", "-k", "asgi"]
            command += ["--no-control-socket", "api.app:build()"]
        environ = self.environ | {f"KVR_{name.upper()}": str(value) for name, value in settings.items()}
        started = []
        for _ in range(count):
            log = (self.folder / f"{role}-{len(self.processes)}.log").open("wb")
            started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT))
            self.processes.append(started[-1])
            log.close()
        return started

    def start_all(self, *, prefill: int = 1, decode: int = 1) -> "System":
        self.start("api")
        self.start("prefill", prefill)
        self.start("decode", decode)
        self.wait_ready(prefill, decode)
        return self

    def wait_ready(self, prefill: int = 1, decode: int = 1) -> None:
        def ready() -> bool:
            self.check_alive()
            try:
                state = self.call("GET", "/health/ready")[1]
            except OSError:
                return False
            return state["prefill"] >= prefill and state["decode"] >= decode

        wait_for(ready, "the system is ready", self.ready_seconds)

    def check_alive(self) -> None:
        for process in self.processes:
            assert process.poll() is None, f"a process ended with {process.returncode}:\n{self.logs()[-3000:]}"

    def stop(self, process: "subprocess.Popen[bytes]", number: int = signal.SIGTERM) -> None:
        process.send_signal(number)
        process.wait(20)
        self.processes.remove(process)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        late = []
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                late.append(process.args)
                process.kill()
                process.wait()
        self.redis.close()
        assert not late, f"did not end within 10 s of SIGTERM: {late}\n{self.logs()[-3000:]}"

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.log")))

    def memory(self, process: "subprocess.Popen[bytes]") -> int:
        """Bytes resident, of the process and what gunicorn forked from it, the largest."""
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        return max(int(member.memory_info().rss) for member in family if "keeper" not in member.cmdline())

    # HTTP

    def asking(self, **headers: str) -> "System":
        """The same system, as somebody sees it whose requests have these headers."""
        other = copy.copy(self)
        other.headers = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        return other

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        status, answer = self._call(method, path, body)
        promises.check(method, path, status, answer)
        return status, answer

    def _call(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{self.port}{path}"
        request = urllib.request.Request(url, data=data, headers=self.headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=110) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def answers(self) -> bool:
        """The API does."""
        try:
            return self.call("GET", "/health/live")[0] == 200
        except OSError:
            return False

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        status, answer = self.call("POST", "/v1/completions", {"prompt": prompt, **fields})
        assert status == 200, answer
        return dict(answer)

    def submit(self, prompt: str | list[int], **fields: Any) -> str:
        status, answer = self.call("POST", "/v1/jobs", {"prompt": prompt, **fields})
        assert status == 202, answer
        return str(answer["id"])

    def try_submit(self, prompt: str | list[int], **fields: Any) -> str:
        """Empty if it was not accepted: the API or Redis is away."""
        try:
            status, answer = self.call("POST", "/v1/jobs", {"prompt": prompt, **fields})
        except OSError:
            return ""
        return str(answer["id"]) if status == 202 else ""

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/jobs/{job_id}")[1])

    def finished(self, job_id: str, seconds: float = 60) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            shown = self.job(job_id)
            return shown if shown["status"] not in ("queued", "prefilling", "decoding") else None

        return dict(wait_for(over, f"job {job_id} ends", seconds))

    def tokens(self, job_id: str) -> list[int]:
        """Token ids from the log."""
        return [int(fields["t"]) for _, fields in self.redis.xrange(self.key(f"tokens:{job_id}")) if "t" in fields]

    def stream(self, path: str, body: Any = None, headers: str = "") -> socket.socket:
        """An open connection whose response has begun to be asked for; the caller reads or leaves."""
        data = b"" if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        kind = "Content-Type: application/json\r\n" if data else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n{kind}{headers}\r\n"
        connection.sendall(head.encode() + data)
        return connection

    def events(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Iterator[dict[str, str]]:
        """Server-sent events, each as its fields."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers=self.headers | (headers or {})
        )
        fields: dict[str, str] = {}
        with urllib.request.urlopen(request, timeout=60) as response:
            for raw in response:
                line = raw.decode().rstrip("\n")
                if found := re.fullmatch(r"(\w+): (.*)", line):
                    fields[found[1]] = found[2]
                elif not line and fields:
                    yield fields
                    fields = {}

    # What must be true when nothing runs

    def unfinished(self) -> int:
        return sum(self.redis.xlen(self.key(f"queue:{index}")) for index in range(4))

    def idle(self) -> bool:
        """No queue entry, no holder, and every place of every decode worker on offer again."""
        offered: dict[str, int] = {}
        for credit in self.redis.zrange(self.key("credits"), 0, -1):
            offered[credit.split("/")[0]] = offered.get(credit.split("/")[0], 0) + 1
        for worker in self.redis.smembers(self.key("workers")):
            facts = self.redis.hgetall(self.key(f"worker:{worker}"))
            if facts and int(facts["busy"]):
                return False
            if facts.get("role") == "decode" and offered.get(worker, 0) < int(facts["slots"]):
                return False
        return self.unfinished() == 0

    def check(self) -> None:
        """What `kvrelay check` looks for. Beside a system at work, too."""

        async def look() -> list[Problem]:
            store = Store(self.config)
            try:
                return await Audit(
                    store, lease_seconds=self.config.lease_seconds, tick_seconds=self.config.tick_seconds
                ).problems()
            finally:
                await store.close()

        assert asyncio.run(look()) == []

    def wait_idle(self, seconds: float = 10) -> None:
        wait_for(self.idle, "the system is idle again: no slot, credit, lease or queue entry left over", seconds)
        self.check()
