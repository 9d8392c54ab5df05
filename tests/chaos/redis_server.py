"""A Redis of a test's own, with an append-only file, to be killed, stopped and started again."""

import signal
import subprocess
from pathlib import Path

import redis

from tests.acceptance.system import free_port, wait_for
from tests.conftest import redis_server


class RedisServer:
    def __init__(self, folder: Path, *, fsync: str = "always") -> None:
        """fsync: Redis' appendfsync; "" keeps nothing."""
        self._folder, self._fsync, self.port = folder, fsync, free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port, decode_responses=True)
        self.start()

    def start(self) -> None:
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._folder, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": self._fsync} if self._fsync else {"appendonly": "no"}
        command = [redis_server(), *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
        with (self._folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_for(self._answers, "Redis answers")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        self.kill()
        self.start()

    def close(self) -> None:
        self.client.close()
        self.kill()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False
