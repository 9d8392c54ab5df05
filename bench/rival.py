"""Another server that is started here, with the same model on the same cores, to be measured in turns: `transformers serve`."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.client import Server
from bench.errors import Away, Unfit

NAME = "transformers"
START_SECONDS, END_SECONDS = 180.0, 20.0
#: It refuses fields of others; without end-of-text tokens its answers are as long as was asked for.
EXTRA = {"ignore_eos": None, "min_tokens": None, "generation_config": "{}"}


@contextmanager
def transformers_serve(model: Path) -> Iterator[Server]:
    """Ends it afterwards, also on SIGTERM. Raises Unfit where it is not installed, Away if it does not come up."""
    command = shutil.which("transformers", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if command is None:
        raise Unfit("--rival", NAME, "is not installed: pip install 'transformers[serving]'")
    port = _free_port()
    server = Server(name=NAME, url=f"http://127.0.0.1:{port}", model=str(model), extra=EXTRA)
    process = subprocess.Popen(
        [command, "serve", str(model), "--device", "cpu", "--dtype", "bfloat16", "--port", str(port)],
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _wait(process, server.url)
        yield server
    finally:
        signal.signal(signal.SIGTERM, before)
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):  # noqa: S310 - ours
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise Away(f"{NAME} serve did not come up at {url}: does it start by itself? (see docs/bench.md)")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
