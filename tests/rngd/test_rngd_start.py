"""How an rngd worker starts, or says in a sentence why it does not: in child processes, as people meet it. The SDK is here,
a chip and its driver are not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.model import SIM
from workers.devices.drift import drift
from workers.devices.rngd.vendor import CALLS

TOP = Path(__file__).parents[2]
NO_DRIVER = "the rngd device finds no driver in this machine (librenegade.so)"
SIGABRT = 6


def run(folder: Path, *arguments: str, given: str = "", **environ: str) -> "subprocess.CompletedProcess[str]":
    """In an environment that says nothing of how torch loads its backends, as anybody's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVR_", "PYTHON", "TORCH_"))}
    settings = {"KVR_MODEL": str(SIM), "KVR_CONTEXT": "128", "KVR_PREFILL_DEVICE": "rngd", "KVR_LOCKS": str(folder)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=TOP,
        env=kept | settings | environ,
        input=given,
        capture_output=True,
        text=True,
        timeout=300,
    )


def sentence(finished: "subprocess.CompletedProcess[str]") -> str:
    """What the process said at its end: one line, with an exit code, and no traceback."""
    assert finished.returncode == 1, finished
    assert "Traceback" not in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("kvrelay ")]
    assert finished.stderr.splitlines()[-1] == line
    return line


@pytest.mark.parametrize("command", ["prefill", "devices prefill", "checklist rngd", "validate", "sweep causality"])
def test_without_a_driver_every_command_says_so(command: str, tmp_path: Path) -> None:
    said = sentence(run(tmp_path, "-m", "workers", *command.split()))
    assert said == f"kvrelay {command.split()[0]}: {NO_DRIVER}"


def test_the_pipe_says_it_to_its_client_who_may_try_again(tmp_path: Path) -> None:
    asked = "\n".join(json.dumps({"op": op}) for op in ("load", "load", "exit")) + "\n"
    done = run(tmp_path, "-m", "workers", "prefill", "--stdio", given=asked)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(event["event"], event["message"]) for event in events] == [("error", f"load: {NO_DRIVER}")] * 2


def test_float32_is_refused_by_name(tmp_path: Path) -> None:
    said = sentence(run(tmp_path, "-m", "workers", "prefill", KVR_DTYPE="float32"))
    assert said == "kvrelay prefill: KVR_DTYPE=float32: the rngd device computes in bfloat16: set it, or auto"


COMPILE = "import torch; torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)); print('compiled')"


def test_what_loads_the_sdk_by_itself_dies_at_torch_compile_and_a_worker_does_not(tmp_path: Path) -> None:
    dead = run(tmp_path, "-c", COMPILE)
    assert dead.returncode == -SIGABRT, dead
    as_a_worker = "import sys; from workers.__main__ import main; sys.argv = ['workers', 'devices', 'prefill']; main()"
    alive = run(tmp_path, "-c", f"{as_a_worker}\n{COMPILE}")
    assert (alive.returncode, alive.stdout) == (0, "compiled\n"), alive.stderr


def test_what_the_chip_cannot_compute_is_not_computed_on_the_host(tmp_path: Path) -> None:
    look = "import furiosa.torch; print(furiosa.torch.config.get_cpu_fallback())"
    prepare = "from workers.devices.rngd.chip import prepare; prepare(8)"
    usual = run(tmp_path, "-c", look, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    ours = run(tmp_path, "-c", f"{prepare}; {look}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert (usual.stdout.strip(), ours.stdout.strip()) == ("True", "False"), usual.stderr + ours.stderr


def test_the_vendor_s_calls_are_those_that_were_tested() -> None:
    assert drift(CALLS) == []
    assert drift({**CALLS, "furiosa.torch:set_fusion": "another"}) != []
