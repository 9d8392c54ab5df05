"""`python -m workers checklist pair`: a prefill worker in a process of its own, its KV cache over the pipe, decoded here."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from tests.unit.test_rngd_device import save
from workers.devices import open_prefill

TOP = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma3")
    save("gemma3", folder)
    return folder


def checklist(model: Path, *words: str, **settings: object) -> "subprocess.CompletedProcess[str]":
    usual = {"model": model, "cache": model, "context": 64, "chunk": 16, "slots": 2, "rngd_widths": "16,32"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVR_")}
    environ |= {f"KVR_{name.upper()}": str(value) for name, value in {**usual, **settings}.items()}
    environ["PYTHONPATH"] = str(TOP)
    command = [sys.executable, "-m", "workers", "checklist", "pair", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=110)


def no_chip(_config: Config, _model: Model) -> Any:
    raise DeviceError("no chip is in this machine")


def dies(config: Config, model: Model) -> Any:
    """Once it has a prompt that is longer than the one that it is tried with at the start."""
    device = open_prefill(config, model)
    begin = device.begin

    def begin_or_die(tokens: Sequence[int]) -> Any:
        if len(tokens) > 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin(tokens)

    device.begin = begin_or_die  # type: ignore[method-assign]
    return device


def lines(done: "subprocess.CompletedProcess[str]", verdict: str) -> list[str]:
    return [line.removeprefix(verdict).strip() for line in done.stdout.splitlines() if line.startswith(verdict)]


def test_two_good_halves_pass(gemma3: Path) -> None:
    done = checklist(gemma3, dtype="float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done, "FAIL") == []
    passed = lines(done, "PASS")
    assert passed[0].startswith(f"a prefill worker in its own environment opens its device: cpu, in {sys.executable} ")
    lengths = [int(found[1]) for line in passed if (found := re.match(r"(\d+) tokens, prefilled there", line))]
    assert lengths == [15, 16, 17, 24, 31, 32, 33, 48], "below, at and above window, chunk and widths; the longest"
    assert all("16 of 16 tokens equal" in line for line in passed if "prefilled there" in line)
    assert len(passed) == 3 + len(lengths) + 3


def test_a_half_that_does_not_open_is_named(gemma3: Path) -> None:
    done = checklist(gemma3, "--factory", f"{__name__}:no_chip", dtype="float32")
    assert done.returncode == 1
    (failed,) = lines(done, "FAIL")
    assert "DeviceError: the prefill worker says: load: no chip is in this machine" in failed
    assert len(lines(done, "PASS")) == 1, "the decode device, and nothing that needs both"


def test_a_worker_that_is_killed_is_a_failure_of_each_check_and_the_end_is_clean(gemma3: Path) -> None:
    done = checklist(gemma3, "--factory", f"{__name__}:dies", dtype="float32")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert all("the prefill worker ended with code -9" in line for line in lines(done, "FAIL"))
    assert len(lines(done, "PASS")) == 3
