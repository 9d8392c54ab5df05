"""The atom device on the vendor's real optimum-rbln, over the emulated chip. Runs in `.venv-atom` (`make test-atom`)."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import Reference, Rig

import workers.chips
import workers.devices.atom
from pipeline.config import Config
from pipeline.model import Model
from workers.chips import Chips, claim
from workers.devices import open_decode

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
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """By family, made once."""

    @functools.cache
    def made(family: str) -> Reference:
        return Reference(family, tmp_path_factory.mktemp(family))

    return made


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where compiled models are kept for the next test, unless a test has a place of its own."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=["graph", "private"])
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The chips' locks of this test: another run on this machine does not meet them."""
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(workers.chips, "LOCKS", folder)
    return folder


@pytest.fixture
def opened(locks: Path, shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rig]]:
    """Opens devices; at the end their chips are free, and the emulated memory is gone."""
    claimed: list[Chips] = []

    def recorded(*arguments: Any) -> Chips:
        claimed.append(claim(*arguments))
        return claimed[-1]

    def made(model: Reference, **settings: Any) -> Rig:
        usual = {"context": 128, "slots": 4, "dtype": "float32", "atom_dtype": "float32", "cache": str(shared_cache)}
        config = Config(model=str(model.directory), decode_device="atom", **{**usual, **settings})
        return Rig(open_decode(config, Model(model.directory)), model)

    monkeypatch.setattr(workers.devices.atom, "claim", recorded)
    yield made
    for chips in claimed:
        chips.release()
    rebel._memory.clear()
