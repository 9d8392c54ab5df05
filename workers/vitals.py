"""What a worker's keeper must see even while the worker cannot run a line of Python: a page of shared memory.

The worker writes, the keeper reads. A pipe would do for messages, but a full pipe would block the worker; and a device
call that holds the GIL can answer no question.
"""

import contextlib
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgpack

from pipeline.errors import KVRelayError

PAGE_BYTES = 1 << 20  # some thousand leases of a hundred bytes
_HEAD = struct.Struct("<QQI")  # version (odd: being written), device call began (ns, 0: none), payload bytes
_CALL_AT = 8


@dataclass(frozen=True, slots=True)
class Reading:
    held: dict[str, str]  # job id → lease id
    facts: dict[str, str | int | float]
    call_seconds: float  # age of the current device call, 0 if none


class Vitals:
    """The worker's side. One writer, so no locks: a version that is odd while the payload changes."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self._file.truncate(PAGE_BYTES)
        self._page = mmap.mmap(self._file.fileno(), PAGE_BYTES)
        self._version = 0
        self.held: dict[str, str] = {}
        self.facts: dict[str, str | int | float] = {}
        self.publish()

    @property
    def fd(self) -> int:
        return self._file.fileno()

    def hold(self, job_id: str, lease_id: str) -> None:
        self.held[job_id] = lease_id
        self.publish()

    def let_go(self, job_id: str, lease_id: str) -> None:
        """Forgets a lease; a newer one on the same job stays."""
        if self.held.get(job_id) == lease_id:
            del self.held[job_id]
            self.publish()

    def close(self) -> None:
        self._page.close()
        self._file.close()

    @contextlib.contextmanager
    def device_call(self) -> Iterator[None]:
        struct.pack_into("<Q", self._page, _CALL_AT, time.monotonic_ns())
        try:
            yield
        finally:
            struct.pack_into("<Q", self._page, _CALL_AT, 0)

    def publish(self) -> None:
        payload = msgpack.packb([self.held, self.facts])
        if _HEAD.size + len(payload) > PAGE_BYTES:
            raise KVRelayError(f"{len(self.held)} leases do not fit the vitals page")
        struct.pack_into("<Q", self._page, 0, self._version + 1)
        self._page[_HEAD.size : _HEAD.size + len(payload)] = payload
        struct.pack_into("<I", self._page, 16, len(payload))
        self._version += 2
        struct.pack_into("<Q", self._page, 0, self._version)


class VitalsReader:
    """The keeper's side."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
        os.close(fd)

    def read(self) -> Reading | None:
        """None if the worker is in the middle of writing, and stays there (it is stopped): look again later."""
        for _ in range(50):
            version, began, size = _HEAD.unpack_from(self._page, 0)
            payload = self._page[_HEAD.size : _HEAD.size + size]
            if version % 2 == 0 and _HEAD.unpack_from(self._page, 0)[0] == version:
                held, facts = msgpack.unpackb(payload)
                age = (time.monotonic_ns() - began) / 1e9 if began else 0.0
                return Reading(held, facts, age)
            time.sleep(0.0001)
        return None
