"""Batches, and the lease that says which API process works on one.

What a holder writes into Redis is fenced by the lease, and what it writes to the disk goes into files of its own: who was
paused, and wakes up after somebody else went on, can harm neither.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from brokers.catalogue import Catalogue
from brokers.store import Store, translated
from pipeline.batch import Batch, BatchStatus
from pipeline.errors import Cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """seconds: until its window is over."""

    status: BatchStatus
    seconds: float


class Batches:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.catalogue = Catalogue(store, store.keys.batches, store.keys.batch)

    @translated
    async def add(
        self, input_file_id: str, window_seconds: int, owner: str, fields: Mapping[str, str | int]
    ) -> str | None:
        """Answers its id; None if the input is gone."""
        batch_id = f"batch_{secrets.token_hex(16)}"
        pairs = [part for pair in fields.items() for part in pair]
        answer = await self._store.run("batch_add", batch_id, input_file_id, window_seconds * 1000, owner, *pairs)
        return batch_id if answer == "ok" else None

    async def find(self, batch_id: str) -> Batch | None:
        stored = await self.catalogue.find(batch_id)
        return Batch.decode(stored) if stored else None

    @translated
    async def open(self) -> list[tuple[str, str]]:
        """(owner, id) of those that are not over, the oldest first."""
        members = await self._store.redis.zrange(self._store.keys.open_batches, 0, -1)
        return [(owner, batch_id) for owner, _, batch_id in (member.rpartition("/") for member in members)]

    @translated
    async def claim(self, batch_id: str, seconds: float) -> Batch | None:
        """The right to work on it, for so long. None: it is over, or in other hands."""
        answer = await self._store.run("batch_claim", batch_id, secrets.token_hex(8), int(seconds * 1000))
        return Batch.decode(dict(zip(answer[::2], answer[1::2], strict=True))) if answer else None

    @translated
    async def save(
        self, batch: Batch, seconds: float, progress: Mapping[str, str | int], status: BatchStatus | None = None
    ) -> Saved:
        """Notes how far its holder is; the lease is good for so long again. Raises Cancelled if it has another holder."""
        pairs = [part for pair in progress.items() for part in pair]
        answer = await self._store.run(
            "batch_save", batch.id, batch.lease, int(seconds * 1000), str(status or ""), *pairs
        )
        if not answer:
            raise Cancelled(f"somebody else works on {batch.id}")
        return Saved(status=BatchStatus(answer[0]), seconds=int(answer[1]) / 1000)

    @translated
    async def end(
        self, batch: Batch, status: BatchStatus, *, errors: str, output: tuple[str, int], error_output: tuple[str, int]
    ) -> None:
        """With the id and the size of each file of results. Raises Cancelled if it has another holder."""
        kept = batch.result_seconds * 1000
        answer = await self._store.run(
            "batch_end", batch.id, batch.lease, str(status), errors, kept, *output, *error_output
        )
        if answer == "lost":
            raise Cancelled(f"somebody else works on {batch.id}")

    @translated
    async def cancel(self, batch_id: str) -> str:
        """Answers the status that it has now, '' if it is gone."""
        answer: str = await self._store.run("batch_cancel", batch_id)
        return answer
