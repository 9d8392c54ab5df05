"""Prefill has all cores while it computes alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import workers.devices.cores as cores_module
from pipeline.config import Config
from workers.devices.cores import Cores, cores_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere every worker keeps to its own cores")

ANOTHER = """
import fcntl, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_CREAT, 0o666)
fcntl.lockf(descriptor, fcntl.LOCK_SH)
print("computes", flush=True)
time.sleep(60)
"""


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four cores, of which compiled loops can use all."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(cores_module, "_loops", lambda wanted: wanted)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    return tmp_path


def of(locks: Path, threads: int = 0, role: str = "prefill") -> Cores:
    return cores_for(Config(locks=str(locks), prefill_threads=threads, decode_threads=threads), role)


def looked(cores: Cores) -> int:
    cores.look()
    return cores.now


def another(locks: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ANOTHER, str(locks / "kvrelay-cpu.computing")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "computes\n"
    return process


def test_prefill_has_all_cores_while_no_other_process_computes(locks: Path) -> None:
    """The other one is killed, and has cleaned nothing up."""
    cores = of(locks)
    cores.begin()
    assert looked(cores) == 4
    with another(locks) as other:
        assert looked(cores) == 2
        other.kill()
        other.wait()
        assert looked(cores) == 4


def test_others_know_that_one_computes_and_when_it_does_not_any_more(locks: Path) -> None:
    """Also of a decode worker, and of one whose number of threads is fixed: they never have more."""
    ask = f"""
import os, pathlib
os.cpu_count = lambda: 4
import workers.devices.cores as cores
cores._loops = lambda wanted: wanted
from pipeline.config import Config
mine = cores.cores_for(Config(locks={str(locks)!r}), "prefill")
mine.begin()
while input():
    mine.look()
    print(mine.now, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", ask], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as other:

        def answer() -> int:
            assert other.stdin is not None
            assert other.stdout is not None
            print("?", file=other.stdin, flush=True)
            return int(other.stdout.readline())

        for cores, threads in ((of(locks, role="decode"), 2), (of(locks, 1), 1)):
            assert answer() == 4
            cores.begin()
            assert looked(cores) == threads
            assert answer() == 2
            cores.end()
            assert answer() == 4
        other.communicate("\n")


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_chosen_number_of_threads_is_kept(locks: Path, threads: int) -> None:
    cores = of(locks, threads)
    cores.begin()
    assert looked(cores) == threads
    assert list(cores.each()) == [threads]


def test_both_numbers_are_compiled_for_whoever_computes_meanwhile(locks: Path) -> None:
    cores = of(locks)
    assert [looked(cores) for _ in cores.each()] == [4, 2]


def test_without_a_lock_everyone_keeps_to_its_own(
    locks: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(37, "No locks available")

    places: dict[str, Callable[[], Path]] = {"cannot be opened": lambda: locks / "nowhere", "No locks": lambda: locks}
    for reason, place in places.items():
        if reason == "No locks":
            monkeypatch.setattr("fcntl.fcntl", fail)
        cores = of(place())
        cores.begin()
        assert looked(cores) == 2
        cores.end()
        assert reason in caplog.text
