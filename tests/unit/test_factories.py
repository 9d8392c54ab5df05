"""A device comes from a factory: the built-in ones and those that a worker's command line names go through the same door."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.config import DECODE_DEVICES, PREFILL_DEVICES, Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.model import SIM, Model
from workers.devices import DECODE_FACTORIES, PREFILL_FACTORIES, open_decode, open_prefill
from workers.devices.sim import SimDecode

CONFIG = Config(model="sim", prefill_device="sim", decode_device="sim", context=64)


def test_every_device_of_the_settings_has_a_factory() -> None:
    assert sorted(PREFILL_FACTORIES) == sorted(PREFILL_DEVICES)
    assert sorted(DECODE_FACTORIES) == sorted(DECODE_DEVICES)


def test_a_factory_of_one_s_own_makes_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_chip.py").write_text(
        "from workers.devices.sim import SimDecode\n"
        "class Mine(SimDecode): ...\n"
        "def build(config, model): return Mine(config)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    device = open_decode(CONFIG, Model(SIM), "my_chip:build")
    assert isinstance(device, SimDecode)
    assert type(device).__name__ == "Mine"


@pytest.mark.parametrize(
    "name", ["", ":", "no_such_package:build", "pipeline.job:no_such_name", "pipeline.job", "..:x"]
)
def test_a_factory_that_is_not_there_is_refused_with_its_name(name: str) -> None:
    if not name:
        assert isinstance(open_decode(CONFIG, Model(SIM), name), SimDecode)  # none named: the setting's
        return
    with pytest.raises(ConfigError, match=r"--factory=.*package\.module:callable"):
        open_prefill(CONFIG, Model(SIM), name)


def test_the_error_of_a_factory_is_the_device_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_chip.py").write_text(
        "from pipeline.errors import DeviceError\ndef build(config, model): raise DeviceError('the chip is on fire')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match="on fire"):
        open_decode(CONFIG, Model(SIM), "broken_chip:build")


def test_a_worker_whose_factory_is_not_there_ends_with_a_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "workers", "decode", "--factory", "no_such_package:build"],
        env={"KVR_MODEL": "sim", "KVR_DECODE_DEVICE": "sim"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("kvrelay decode: --factory=no_such_package:build: must be package.module:callable")
    assert len(ended.stderr.splitlines()) == 1


def test_an_atom_worker_without_its_sdk_ends_with_a_sentence() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "workers", "decode"],
        env={"KVR_MODEL": "sim", "KVR_DECODE_DEVICE": "atom"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("kvrelay decode: the atom device needs optimum-rbln, which this Python lacks")
    assert len(ended.stderr.splitlines()) == 1


def test_a_device_that_cannot_prefill_is_no_fallback() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "workers", "decode"],
        env={"KVR_MODEL": "sim", "KVR_DECODE_DEVICE": "sim", "KVR_FALLBACK": "local"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("kvrelay decode: KVR_FALLBACK=local: the sim device cannot prefill")
