"""How many threads compute on the CPU: a worker has some of the cores for itself, and prefill all of them while no other worker
of the machine has anything to compute.

Each that has holds a lock, for reading, on one file in KVR_LOCKS, and asks the kernel whether another process does. So of a
worker that dies nothing is left.
"""

import contextlib
import fcntl
import importlib
import logging
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import numba

from pipeline.config import Config
from pipeline.errors import DeviceError
from workers.chips import open_lock
from workers.devices.family import use_threads

log = logging.getLogger(__name__)

_FLOCK = "hhqqi"  # Linux, 64 bits: type, whence, first byte, bytes (0: all), process


class Cores:
    """now: threads of what is computed next."""

    def __init__(self, own: int, *, most: int = 0, file: Path | None = None) -> None:
        """own: threads that are there in any case. most: threads while nobody else computes. file: by which one knows."""
        self.loops = _loops(max(own, most))
        self.fit_loops = self.loops >= own
        self.now = self._own = min(own, self.loops)
        self._most = min(max(own, most), self.loops)
        self._lock = None if file is None else _Lock.at(file)
        self.computes = False

    def begin(self) -> None:
        """There is something to compute."""
        self.computes = True
        if self._lock is not None:
            self._lock.take()

    def end(self) -> None:
        self.computes = False
        if self._lock is not None:
            self._lock.release()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def look(self) -> None:
        """Brings `now` up to date. In a microsecond: between layers there is time for it."""
        if self.computes and self._lock is not None and self._most > self._own:
            self.now = self._own if self._lock.is_shared() else self._most

    def each(self) -> Iterator[int]:
        """The numbers that `now` can have, for what is compiled for one thread and for several."""
        for now in sorted({self._most, self._own}, reverse=True):
            self.now = now
            yield now


def cores_for(config: Config, role: str) -> Cores:
    """As many threads as the settings say. If they leave it open, half of the cores; and for prefill all, while nobody else
    computes.

    Not for decode: between its many short loops threads wait awake, in the way of what writes tokens and answers."""
    chosen: int = getattr(config, f"{role}_threads")
    own = use_threads(chosen)
    if getattr(config, f"{role}_device") != "cpu":
        return Cores(own)
    most = own if chosen or role == "decode" else os.cpu_count() or 1
    return Cores(own, most=most, file=Path(config.locks) / "kvrelay-cpu.computing")


class _Lock:
    """For reading, so that any number of processes have it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def at(cls, file: Path) -> "_Lock | None":
        if sys.platform != "linux":
            return None
        try:
            lock = cls(open_lock(file))
            lock.take()
            lock.release()
        except (OSError, DeviceError) as error:
            extra = {"action": "cores_not_shared"}
            log.warning("the worker keeps to its own cores: %s (%s)", error, file, extra=extra)
            return None
        return lock

    def take(self) -> None:
        self._call(fcntl.F_SETLK, fcntl.F_RDLCK)

    def release(self) -> None:
        self._call(fcntl.F_SETLK, fcntl.F_UNLCK)

    def is_shared(self) -> bool:
        """Another process has it."""
        return self._call(fcntl.F_GETLK, fcntl.F_WRLCK) != fcntl.F_UNLCK

    def _call(self, command: int, kind: int) -> int:
        answer = fcntl.fcntl(self._descriptor, command, struct.pack(_FLOCK, kind, os.SEEK_SET, 0, 0, 0))
        kind, *_ = struct.unpack(_FLOCK, answer)
        return kind


def _loops(wanted: int) -> int:
    """Threads that compiled loops can have. More than one only through OpenMP, as PyTorch's: Numba's other ways take longer to
    begin."""
    wanted = min(wanted, numba.config.NUMBA_NUM_THREADS)
    if wanted > 1:
        try:
            importlib.import_module("numba.np.ufunc.omppool")
        except ImportError:
            return 1
        numba.config.THREADING_LAYER = "omp"
    return wanted
