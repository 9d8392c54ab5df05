"""The atom device on the vendor's real optimum-rbln, over the emulated chip. Runs in `.venv-atom` (`make test-atom`)."""

import functools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Models, Opened, Reference

import workers.devices.atom
from workers.chips import Chips, claim

EMULATION = Path(__file__).parents[1] / "emulation"

os.environ["KVR_TEST_EMULATED_NPU"] = "RBLN-CA22"
os.environ["KVR_TEST_EMULATED_CHIPS"] = "64"  # devices of this process that were not collected yet keep theirs
sys.path.insert(0, str(EMULATION))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the vendor's import warns that rebel-compiler is not installed, and rightly so
    import optimum.rbln  # noqa: F401
    import rebel


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # small tensors; threads would only wait for each other


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """By family, made once."""

    @functools.cache
    def made(family: str, seed: int) -> Reference:
        return Reference(family, tmp_path_factory.mktemp(family), seed)

    return lambda family, seed=1: made(family, seed)


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled models are kept for the next test, unless a test has a place of its own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=["graph", "private"])
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def opened(tmp_path: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens devices; at the end their chips are free, and the emulated memory is gone."""
    opened = Opened(
        context=128,
        slots=4,
        dtype="float32",
        atom_dtype="float32",
        cache=str(shared_cache),
        locks=str(tmp_path),  # another run on this machine does not meet them
    )

    def recorded(*arguments: Any) -> Chips:
        opened.claimed.append(claim(*arguments))
        return opened.claimed[-1]

    monkeypatch.setattr(workers.devices.atom, "claim", recorded)
    yield opened
    for chips in opened.claimed:
        chips.release()
    rebel._memory.clear()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the compiler, for each graph."""
    counted: list[dict[str, Any]] = []
    compile_from_torch = rebel.compile_from_torch

    def counting(*arguments: Any, **named: Any) -> Any:
        counted.append(named)
        return compile_from_torch(*arguments, **named)

    monkeypatch.setattr(rebel, "compile_from_torch", counting)
    return counted
