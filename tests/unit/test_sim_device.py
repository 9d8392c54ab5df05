"""How long the sim device takes, and who may use it meanwhile. What it answers is proved with whole systems."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import SIM, Model
from workers.chips import SharedChip
from workers.devices import sim

SECONDS = 10.0  # that a thread may take, on a busy machine


def config(**settings: Any) -> Config:
    return Config(model="sim", prefill_device="sim", decode_device="sim", context=64, **settings)


def decode(**settings: Any) -> sim.SimDecode:
    return sim.open_decode(config(**settings), Model(SIM))


def in_a_thread(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_a_step_takes_longer_with_each_job_and_an_insertion_with_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it a chip that decodes for two would be as fast as two chips."""
    slept: list[float] = []
    monkeypatch.setattr(sim.time, "sleep", slept.append)
    device = decode(slots=4, sim_step_ms=20, sim_row_ms=0.5, sim_insert_us=10)
    device.begin(0, 1000, 7)
    device.step()
    device.begin(2, 100, 7)
    device.step()
    device.evict(0)
    device.step()
    assert slept == pytest.approx([0.01, 0.0205, 0.001, 0.021, 0.0205])


@pytest.mark.parametrize("chips", [("one", "one"), ("one", "two"), ("", "")])
def test_a_step_waits_for_the_chunk_that_the_same_chip_computes(chips: tuple[str, str], tmp_path: Path) -> None:
    """Without the turn they would be two chips. The prompt's next chunk is another call."""
    settings = {"locks": str(tmp_path), "sim_prefill_us": 0, "sim_step_ms": 0, "chunk": 4}
    prefill = sim.open_prefill(config(sim_chip=chips[0], **settings), Model(SIM))
    other = decode(sim_chip=chips[1], **settings)
    threads: list[threading.Thread] = []

    def on_layer(*_block: Any) -> None:
        if not threads:
            threads.append(in_a_thread(other.step))
            threads[0].join(0.2 if chips == ("one", "one") else SECONDS)
            assert threads[0].is_alive() == (chips == ("one", "one"))

    running = prefill.begin([1] * 8)
    assert running.advance(on_layer, lambda: False) is None
    threads[0].join(SECONDS)
    assert not threads[0].is_alive()
    assert running.advance(on_layer, lambda: False) is not None


def test_two_on_one_chip_take_turns(tmp_path: Path) -> None:
    """Without the second lock whoever just had the chip would mostly have it again."""
    mine, other = (SharedChip(str(tmp_path), "sim", "one") for _ in range(2))
    order: list[str] = []
    both = threading.Barrier(2)

    def use(chip: SharedChip, name: str) -> None:
        both.wait(SECONDS)
        for _ in range(50):
            with chip.turn():
                order.append(name)
                threading.Event().wait(0.002)

    thread = in_a_thread(lambda: use(other, "other"))
    use(mine, "mine")
    thread.join(SECONDS)
    again = sum(before == after for before, after in itertools.pairwise(order))
    assert again < 30, order  # some: on a busy machine the other is not always back in time


def test_a_chip_whose_user_was_killed_is_free(tmp_path: Path) -> None:
    """Without a lock of the kernel's, the other half would wait for somebody who is gone."""
    code = "import sys, time; from workers.chips import SharedChip\n"
    code += "with SharedChip(sys.argv[1], 'sim', 'one').turn(): print('mine', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "mine\n"
        got = threading.Event()

        def take() -> None:
            with SharedChip(str(tmp_path), "sim", "one").turn():
                got.set()

        in_a_thread(take)
        assert not got.wait(0.2)
        holder.kill()
        assert got.wait(SECONDS)


def test_a_folder_that_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="set KVR_LOCKS to another folder"):
        decode(sim_chip="one", locks=os.fspath(tmp_path / "nowhere"))
