"""`kvrelay up`, which `make run` calls last: it starts the Procfile, says when it is ready, and leaves nothing behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from api.up import CannotStart, up
from pipeline.config import Config
from tests.acceptance.system import System, free_port, wait_for

ROOT = Path(__file__).parents[2]


class Up:
    """`kvrelay up` in a folder and a process group of its own."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        shutil.copy(ROOT / "Procfile", folder)
        self.output = folder / "output"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())", "up"],
                cwd=folder,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.family: list[psutil.Process] = []

    def wait_ready(self) -> None:
        wait_for(lambda: "ready after" in self.text() or self.process.poll() is not None, "it says ready", 60)
        assert self.process.poll() is None, self.text()
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait(20)


@pytest.fixture
def environ(redis_url: str, request: pytest.FixtureRequest) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("KVR_")},
        "PYTHONPATH": str(ROOT),
        "KVR_MODEL": "sim",
        "KVR_SERVED_NAME": f"up-{request.node.name}",
        "KVR_PREFILL_DEVICE": "sim",
        "KVR_DECODE_DEVICE": "sim",
        "KVR_REDIS_URL": redis_url,
        "KVR_PORT": str(free_port()),
    }


@pytest.fixture
def running(tmp_path: Path, environ: dict[str, str]) -> Iterator[Up]:
    started = Up(tmp_path, environ)
    started.wait_ready()
    yield started
    if started.process.poll() is None:
        started.interrupt()


def test_ctrl_c_leaves_no_process_behind(running: Up, environ: dict[str, str]) -> None:
    assert len(running.family) >= 6  # shells apart: honcho, api and its child, two workers, two keepers
    running.interrupt()
    assert running.process.returncode == 0
    _, alive = psutil.wait_procs(running.family, timeout=5)
    assert not alive, [process.cmdline() for process in alive]


def test_a_second_copy_says_that_one_runs_already(running: Up, tmp_path: Path, environ: dict[str, str]) -> None:
    second = Up(tmp_path, environ | {"KVR_PORT": str(free_port())})
    assert second.process.wait(20) == 1
    assert f"runs here already (process {running.process.pid})" in second.text()
    assert "Traceback" not in second.text()


def test_a_taken_port_is_a_sentence(tmp_path: Path, environ: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        started = Up(tmp_path, environ | {"KVR_PORT": str(port)})
        assert started.process.wait(20) == 1
    assert f"port {port} on 127.0.0.1 is taken" in started.text()
    assert "KVR_PORT" in started.text()


def test_a_missing_redis_server_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_args, **_kwargs: None)
    with pytest.raises(CannotStart, match="no redis-server on PATH"):
        up(Config(model="sim"), own_redis=True, scale="", since=None)


def test_the_command_submits_watches_cancels_and_shows(redis_url: str, tmp_path: Path, environ: dict[str, str]) -> None:
    settings = {"model": "sim", "served_name": "command", "prefill_device": "sim", "decode_device": "sim"}
    system = System(redis_url, tmp_path, **settings, sim_step_ms=20)

    def kvrelay(*words: str) -> str:
        command = [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())", *words]
        done = subprocess.run(command, env=system.environ, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    try:
        system.start_all()
        assert "[finished: length]" in kvrelay("submit", "hello", "--max-tokens", "8", "--watch")
        job = kvrelay("submit", "hello", "--max-tokens", "3000").strip()
        wait_for(lambda: system.job(job)["status"] == "decoding", "it decodes")
        assert "normal              0        1" in kvrelay("queue")
        assert kvrelay("cancel", job) == "cancelled, in phase decode\n"
        assert "[cancelled: asked by the client]" in kvrelay("watch", job)
        assert "there is no job nobody" in kvrelay("watch", "nobody")
        workers = kvrelay("workers")
        assert "decode-" in workers
        assert "prefill-" in workers
        assert kvrelay("--version").strip()
    finally:
        system.close()
    assert "is it running?" in kvrelay("cancel", job)


def test_a_model_that_was_not_fetched_is_a_sentence(tmp_path: Path, environ: dict[str, str]) -> None:
    started = Up(tmp_path, environ | {"KVR_MODEL": "nobody/nothing", "KVR_CACHE": str(tmp_path)})
    assert started.process.wait(20) == 1
    assert "run `kvrelay pull`" in started.text()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_cannot_work_says_why_in_a_sentence(tmp_path: Path, environ: dict[str, str], role: str) -> None:
    for setting, value, sentence in (
        ("KVR_CONTEXT", "999999", "KVR_CONTEXT=999999: "),
        ("KVR_SLOTS", "many", "KVR_SLOTS=many: must be a whole number"),
        ("KVR_NONSENSE", "1", "KVR_NONSENSE=1: there is no such setting"),
        (f"KVR_{role.upper()}_DEVICE", "abacus", "=abacus: must be one of"),
    ):
        command = [sys.executable, "-m", "workers", role]
        done = subprocess.run(
            command, env=environ | {setting: value}, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 1
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1
