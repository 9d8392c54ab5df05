"""Which chips the atom device takes, and that nobody else has them."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import rebel
from optimum.rbln.utils.runtime_utils import compiler_num_devices_kwarg
from rig import Models, Opened, prompt_of

from pipeline.errors import ConfigError, DeviceError
from workers.chips import claim, holder

CHILD_SECONDS = 30


def test_who_looks_at_a_lock_is_in_nobodys_way(tmp_path: Path) -> None:
    watching = threading.Event()

    def watch() -> None:
        while not watching.is_set():
            holder(str(tmp_path), "atom", 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(2000):
            claim(str(tmp_path), "atom", [0], 1).release()
    finally:
        watching.set()
        watcher.join()


def test_two_devices_never_have_the_same_chip_and_a_third_is_told_who_has_them(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebel, "CHIPS", 2)
    rigs = [opened(reference("llama")) for _ in range(2)]
    assert [rig.device.figures["chips"] for rig in rigs] == ["0", "1"]
    rigs[0].fill(1, prompt_of(40))
    rigs[1].fill(1, prompt_of(20))
    for rig in (*rigs, *rigs):
        rig.step()
    for rig in rigs:
        rig.check(1)
    me = f"process {os.getpid()}"
    with pytest.raises(DeviceError, match=f"needs 1 free atom chip, .*0 is held by {me}; 1 is held by {me}"):
        opened(reference("llama"))
    opened.release(rigs[0])
    assert opened(reference("llama")).device.figures["chips"] == "0"


HOLDER = """
import sys
from workers.chips import claim
print(claim(sys.argv[1], "atom", [0, 1], 1).numbers[0], flush=True)
sys.stdin.read()
"""


def test_another_process_has_its_chip_until_it_is_killed(
    opened: Opened, reference: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebel, "CHIPS", 2)
    opened(reference("llama"))
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with child:
        try:
            assert child.stdout.readline() == b"1\n"
            with pytest.raises(DeviceError, match=f"1 is held by process {child.pid}$"):
                opened(reference("llama"))
        finally:
            child.send_signal(signal.SIGKILL)
        child.wait(CHILD_SECONDS)
    assert opened(reference("llama")).device.figures["chips"] == "1"


def test_only_the_chips_that_the_setting_names_are_taken(opened: Opened, reference: Models) -> None:
    assert opened(reference("llama"), atom_chips="1").device.figures["chips"] == "1"
    assert opened(reference("llama"), atom_chips="5,3").device.figures["chips"] == "3"
    with pytest.raises(DeviceError, match="1 is held by"):
        opened(reference("llama"), atom_chips="1")
    with pytest.raises(ConfigError, match="KVR_ATOM_CHIPS=64: no chip 64 is here, only 0, 1"):
        opened(reference("llama"), atom_chips="64")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_worker_may_have_two_chips(
    opened: Opened,
    reference: Models,
    route: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compilations: list[dict[str, Any]],
    family: str,
) -> None:
    monkeypatch.setattr(rebel, "CHIPS", 4)
    opened(reference("llama"), atom_chips="1")
    compilations.clear()
    rig = opened(reference(family), cache=str(tmp_path), atom_chips_per_worker=2, atom_import=route)
    assert rig.device.figures["chips"] == "0,2"
    assert {asked[compiler_num_devices_kwarg()] for asked in compilations} == {2}
    assert set(map(tuple, rig.device._loaded.rbln_config.device_map.values())) == {(0, 2)}
    rig.serve(1, prompt_of(40))
    with pytest.raises(DeviceError, match="needs 2 free atom chips, and there are 1: 0 is held"):
        opened(reference(family), atom_chips_per_worker=2)
    assert opened(reference("llama")).device.figures["chips"] == "3"  # what a refused one held is free again
