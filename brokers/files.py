"""Files of clients and results of batches: the bytes in a folder that all API processes share, what they are in Redis.

A file can be seen when its record is there, which comes last. So the folder may hold what nobody knows: what is being
written, and what a process that died has left. `sweep` removes that in time.
"""

import asyncio
import contextlib
import os
import re
import secrets
import time
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from brokers.catalogue import Catalogue, Fields
from brokers.store import Store, translated

FILE_ID = re.compile("file-[0-9a-f]{32}")
BLOCK = 1 << 20  # bytes that go to the disk, or come from it, at once
ORPHAN_SECONDS = 86400.0  # nobody writes into it any more, and who wants to rescue something had a day


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """Times in seconds of Unix time."""

    id: str
    owner: str
    purpose: str
    filename: str  # what its owner calls it; never a path of ours
    bytes: int
    created_at: int
    expires_at: int

    @classmethod
    def decode(cls, stored: Fields) -> "File":
        return cls(
            id=stored["id"],
            owner=stored["owner"],
            purpose=stored["purpose"],
            filename=stored["filename"],
            bytes=int(stored["bytes"]),
            created_at=int(stored["created_at"]),
            expires_at=int(stored["expires_at"]),
        )


class Growing:
    """A file while it is written. What was added counts once it is flushed: then it is on the disk."""

    def __init__(self, file_id: str, file: BinaryIO) -> None:
        self.id = file_id
        self.size = 0
        self._file = file
        self._held = bytearray()
        self._synced = 0

    def add(self, data: bytes) -> None:
        self._held += data
        self.size += len(data)

    async def write(self, data: bytes) -> None:
        """Adds, and keeps no more than a block of it in memory."""
        self.add(data)
        if len(self._held) >= BLOCK:
            await asyncio.to_thread(self._write)

    async def flush(self) -> None:
        if self._synced < self.size:
            size = self.size
            await asyncio.to_thread(self._sync)
            self._synced = size

    def _write(self) -> None:
        held, self._held = self._held, bytearray()
        self._file.write(held)

    def _sync(self) -> None:
        self._write()
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class Files:
    def __init__(self, store: Store, folder: Path) -> None:
        self._store = store
        self._folder = folder
        self.catalogue = Catalogue(store, store.keys.files, store.keys.file)

    def path(self, file_id: str) -> Path:
        """No id gets past this that could be another path."""
        if not FILE_ID.fullmatch(file_id):
            raise ValueError(f"{file_id!r} is no id of a file")
        return self._folder / file_id

    async def find(self, file_id: str) -> File | None:
        stored = await self.catalogue.find(file_id)
        return File.decode(stored) if stored else None

    @translated
    async def add(self, file_id: str, *, owner: str, purpose: str, filename: str, size: int, seconds: float) -> None:
        """The file is whole and on the disk: others may see it."""
        await self._store.run("file_add", file_id, owner, purpose, filename, size, int(seconds * 1000))

    async def remove(self, file_id: str) -> None:
        """First what is known of it; whoever reads its bytes may end."""
        await self.catalogue.forget(file_id)
        await self.discard(file_id)

    async def discard(self, file_id: str) -> None:
        """The bytes alone, of a file that has no record."""
        await asyncio.to_thread(self.path(file_id).unlink, missing_ok=True)

    def new(self) -> Growing:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file_id = f"file-{secrets.token_hex(16)}"
        return Growing(file_id, self.path(file_id).open("xb"))

    @contextlib.asynccontextmanager
    async def receive(self) -> AsyncIterator[Growing]:
        """A new file to write, on the disk afterwards; nothing is left of it if that goes wrong."""
        growing = self.new()
        try:
            yield growing
            await growing.flush()
        except BaseException:
            self.path(growing.id).unlink()
            raise
        finally:
            growing.close()

    async def copy(self, file_id: str, size: int, growing: Growing) -> None:
        """The first `size` bytes. Raises FileNotFoundError if there are not so many."""
        with self.path(file_id).open("rb") as source:
            while growing.size < size:
                block = await asyncio.to_thread(source.read, min(BLOCK, size - growing.size))
                if not block:
                    raise FileNotFoundError(f"{file_id} has {growing.size} bytes, and {size} of it were written")
                await growing.write(block)

    async def sweep(self, used: Collection[str]) -> None:
        """Removes old files that have no record. used: ids that are known otherwise."""
        for name in await asyncio.to_thread(self._old):
            if name not in used and await self.find(name) is None:
                await self.discard(name)

    def _old(self) -> list[str]:
        """Ids of files that nobody has written to for long."""
        if not self._folder.is_dir():
            return []
        before, old = time.time() - ORPHAN_SECONDS, []
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # somebody else has removed it
                if FILE_ID.fullmatch(path.name) and path.stat().st_mtime < before:
                    old.append(path.name)
        return old
