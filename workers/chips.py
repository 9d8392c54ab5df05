"""Who has which chip: a worker holds a lock on each of its own, and the kernel releases it with the process.

Or two workers use one chip by turns. The locks are files in KVR_LOCKS, one folder for the whole machine: containers that
share chips must share it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Chips:
    """Chips that are ours until the process ends. descriptors: open files that hold the locks."""

    numbers: tuple[int, ...]
    descriptors: list[int]

    def release(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class SharedChip:
    """A chip that processes use for one call at a time.

    Whoever waits holds the `next` lock, so that whoever just had the chip comes after it: two take turns, and with one lock
    alone the faster one would keep the other from it."""

    def __init__(self, locks: str, device: str, name: str) -> None:
        self._next, self._chip = (
            open_lock(Path(locks) / f"kvrelay-{device}-{name}.{lock}") for lock in ("next", "chip")
        )

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        fcntl.flock(self._next, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._chip, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._chip, fcntl.LOCK_UN)


def claim(locks: str, device: str, among: Sequence[int], count: int) -> Chips:
    """The first `count` free chips. Raises DeviceError, which says who has them, if there are not so many."""
    held: dict[int, int] = {}
    with _one_at_a_time(locks, device):
        for number in among:
            descriptor = open_lock(_path(locks, device, number))
            if len(held) < count and _lock(descriptor):
                held[number] = descriptor
            else:
                os.close(descriptor)
        if len(held) == count:
            for descriptor in held.values():
                _sign(descriptor)
            return Chips(tuple(held), list(held.values()))
        for descriptor in held.values():
            os.close(descriptor)
        taken = [f"{number} is held by {_holder(locks, device, number)}" for number in among if number not in held]
    why = "; ".join(taken) or f"{len(among)} in all"
    raise DeviceError(
        f"this worker needs {count} free {device} chip{'s' * (count > 1)}, and there are {len(held)}: {why}"
    )


def holder(locks: str, device: str, number: int) -> str | None:
    """Who has a chip, None if nobody."""
    if not _path(locks, device, number).exists():
        return None
    with _one_at_a_time(locks, device):
        return _holder(locks, device, number)


def _holder(locks: str, device: str, number: int) -> str | None:
    descriptor = open_lock(_path(locks, device, number))
    try:
        if _lock(descriptor):
            return None
        return os.pread(descriptor, 100, 0).decode(errors="replace") or "a process of another user"
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _one_at_a_time(locks: str, device: str) -> Iterator[None]:
    """Who looks holds a lock for a moment, too, and two that need two chips each must not end with one."""
    descriptor = open_lock(Path(locks) / f"kvrelay-{device}.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _path(locks: str, device: str, number: int) -> Path:
    return Path(locks) / f"kvrelay-{device}-{number}.lock"


def open_lock(path: Path) -> int:
    """Descriptor of a lock, made if need be. Raises DeviceError."""
    try:
        if path.exists():  # perhaps another user's, who may not let us write; a lock needs no more than reading
            return os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise DeviceError(
            f"the lock {path} cannot be opened ({error.strerror}): set KVR_LOCKS to another folder"
        ) from error


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # where only reading is allowed the lock holds all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
