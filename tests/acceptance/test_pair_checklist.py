"""`python -m workers checklist pair`: a prefill worker in a process of its own, its KV cache over the pipe, decoded here."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from tests.unit.test_device_validation import Bad
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


def zeros(config: Config, model: Model) -> Any:
    device = Bad(open_prefill(config, model))
    device.FAULT = "zeros"
    return device


def another_model(config: Config, model: Model) -> Any:
    device = Bad(open_prefill(config, model))
    device.geometry = type(device.geometry)(
        **{**{name: getattr(device.geometry, name) for name in type(device.geometry).__slots__}, "model": "another"}
    )
    return device


def no_chip(_config: Config, _model: Model) -> Any:
    raise DeviceError("no chip is in this machine")


def lines(done: "subprocess.CompletedProcess[str]", verdict: str) -> list[str]:
    return [line.removeprefix(verdict).strip() for line in done.stdout.splitlines() if line.startswith(verdict)]


def test_two_good_halves_pass(gemma3: Path) -> None:
    done = checklist(gemma3, dtype="float32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done, "FAIL") == []
    passed = lines(done, "PASS")
    assert passed[0].startswith(f"a prefill worker in its own environment opens its device: cpu, in {sys.executable} ")
    lengths = [int(found[1]) for line in passed if (found := re.match(r"(\d+) tokens, prefilled there", line))]
    assert lengths == [15, 16, 17, 24, 31, 32, 33], "below, at and above the window and each width, in the context"
    assert all("16 of 16 tokens equal" in line for line in passed if "prefilled there" in line)
    assert len(passed) == 3 + len(lengths) + 3


def test_what_arrives_wrong_is_seen_at_every_length(gemma3: Path) -> None:
    done = checklist(gemma3, "--factory", f"{__name__}:zeros", dtype="float32")
    assert done.returncode == 1
    failed = lines(done, "FAIL")
    assert len([line for line in failed if "prefilled there" in line]) == 7
    assert re.search(r"token \d+ is \d+, not \d+; \d+ are wrong", failed[0])


def test_a_half_with_another_model_and_one_that_does_not_open_are_named(gemma3: Path) -> None:
    other = checklist(gemma3, "--factory", f"{__name__}:another_model", dtype="float32")
    assert other.returncode == 1
    assert "model differs: prefill has 'another'" in lines(other, "FAIL")[0]
    none = checklist(gemma3, "--factory", f"{__name__}:no_chip", dtype="float32")
    assert none.returncode == 1
    (failed,) = lines(none, "FAIL")
    assert "DeviceError: the prefill worker says: load: no chip is in this machine" in failed
    assert len(lines(none, "PASS")) == 1, "the decode device, and nothing that needs both"
