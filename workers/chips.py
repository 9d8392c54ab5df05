"""Who has which chip: a worker holds a lock on each of its own, and the kernel releases it with the process.

The locks are files in KVR_LOCKS, one folder for the whole machine: containers that share chips must share it.
"""

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DeviceError


@dataclass(frozen=True, slots=True)
class Chips:
    """Chips that are ours until the process ends. descriptors: open files that hold the locks."""

    numbers: tuple[int, ...]
    descriptors: tuple[int, ...]

    def release(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def claim(locks: str, device: str, among: Sequence[int], count: int) -> Chips:
    """The first `count` free chips. Raises DeviceError, which says who has them, if there are not so many."""
    held: dict[int, int] = {}
    for number in among:
        descriptor = _open(_path(locks, device, number))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        held[number] = descriptor
        _sign(descriptor)
        if len(held) == count:
            return Chips(tuple(held), tuple(held.values()))
    taken = [f"{number} is held by {holder(locks, device, number)}" for number in among if number not in held]
    for descriptor in held.values():
        os.close(descriptor)
    why = "; ".join(taken) or f"only {len(among)} are here and allowed"
    raise DeviceError(
        f"this worker needs {count} free {device} chip{'s' * (count > 1)}, and there are {len(held)}: {why}"
    )


def holder(locks: str, device: str, number: int) -> str | None:
    """Who has a chip, None if nobody."""
    path = _path(locks, device, number)
    if not path.exists():
        return None
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 100, 0).decode(errors="replace") or "a process of another user"
    finally:
        os.close(descriptor)
    return None


def _path(locks: str, device: str, number: int) -> Path:
    return Path(locks) / f"kvrelay-{device}-{number}.lock"


def _open(path: Path) -> int:
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
