"""Who has which chip: a worker holds a lock on each of its own, and the kernel releases it with the process.

The locks are files in one place for the whole machine. Containers see each other's locks only if they share that place.
"""

import fcntl
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import DeviceError

LOCKS = Path("/run/lock")  # by the Filesystem Hierarchy Standard for this; elsewhere the temporary folder


@dataclass(frozen=True, slots=True)
class Chips:
    """Chips that are ours until the process ends. descriptors: open files that hold the locks."""

    numbers: tuple[int, ...]
    descriptors: tuple[int, ...]

    def release(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def claim(device: str, among: Sequence[int], count: int) -> Chips:
    """The first `count` free chips. Raises DeviceError, which says who has them, if there are not so many."""
    held: dict[int, int] = {}
    for number in among:
        descriptor = _open(device, number)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            continue
        held[number] = descriptor
        _sign(descriptor)
        if len(held) == count:
            return Chips(tuple(held), tuple(held.values()))
    for descriptor in held.values():
        os.close(descriptor)
    taken = ", ".join(f"{number} by {holder(device, number) or 'nobody'}" for number in among) or "none is there"
    raise DeviceError(f"{count} free {device} chips are needed, {len(held)} are free of those allowed ({taken})")


def holder(device: str, number: int) -> str | None:
    """Who has a chip, None if nobody."""
    descriptor = _open(device, number)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return os.pread(descriptor, 100, 0).decode(errors="replace") or "a process that did not sign"
    finally:
        os.close(descriptor)
    return None


def _open(device: str, number: int) -> int:
    folder = LOCKS if os.access(LOCKS, os.W_OK) else Path(tempfile.gettempdir())
    path = folder / f"kvrelay-{device}-{number}.lock"
    if path.exists():  # perhaps somebody else's, who may not let us write; a lock needs no more than reading
        return os.open(path, os.O_RDWR if os.access(path, os.W_OK) else os.O_RDONLY)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)


def _sign(descriptor: int) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
    except OSError:
        pass  # the file is another user's: the lock holds all the same
