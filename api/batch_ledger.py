"""How far a batch is: its lease, its counts, and the two files that its results go into."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from api.batch_lines import Line
from brokers.batches import Batches
from brokers.files import Files, Growing
from brokers.store import heed_cancel
from pipeline.batch import Batch, BatchStatus
from pipeline.errors import RedisAway, RedisRefused

T = TypeVar("T")

SAVE_SECONDS = 0.1  # between saves: each waits for the disk
AWAY_SECONDS = 0.5  # between tries while Redis is away


class Ledger:
    """A save puts the files on the disk first, and then says in Redis how much of them counts. So what counts is there."""

    def __init__(self, batches: Batches, files: Files, batch: Batch, lease_seconds: float) -> None:
        self.batch = batch
        self.status = batch.status
        self.seconds_left = 1.0  # until its window is over; a save knows better
        self.saved_line = self.line = batch.line  # how many lines count, and how many are written
        self._offset = batch.offset
        self._completed, self._failed = batch.completed, batch.failed
        self._input_tokens, self._output_tokens = batch.input_tokens, batch.output_tokens
        self._batches, self._files = batches, files
        self._lease_seconds = lease_seconds
        self._saved_at = 0.0
        self._output: Growing | None = None
        self._errors: Growing | None = None
        self._counts = ("", 0), ("", 0)  # id of each, and how much of it counts

    @property
    def ending(self) -> BatchStatus | None:
        """It is to end before all lines are answered, as this."""
        if self.status == BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        return BatchStatus.EXPIRED if self.seconds_left <= 0 and self.status != BatchStatus.FINALIZING else None

    async def meanwhile(self, work: Awaitable[T]) -> T:
        """Its result; the lease is kept until it is there."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({task}, timeout=self._lease_seconds / 3))[0]:
                await self._insist(self.renew)
            return task.result()
        finally:
            task.cancel()

    async def carry_on(self) -> None:
        """Files of its own, which begin with what counts. Those that nobody may write into any more go."""
        batch = self.batch
        self._output, self._errors = self._files.new(), self._files.new()
        if batch.output_bytes:
            await self.meanwhile(self._files.copy(batch.output, batch.output_bytes, self._output))
        if batch.error_bytes:
            await self.meanwhile(self._files.copy(batch.error_output, batch.error_bytes, self._errors))
        await self._insist(self.save)
        for old in filter(None, (batch.output, batch.error_output)):
            await self._files.discard(old)

    def write(self, line: Line) -> None:
        assert self._output is not None
        assert self._errors is not None
        (self._errors if line.failed else self._output).add(line.result)
        self.line, self._offset = line.number, line.end
        self._failed += line.failed
        self._completed += not line.failed
        self._input_tokens += line.input_tokens
        self._output_tokens += line.output_tokens

    @property
    def unsaved(self) -> int:
        """Lines that are written, and do not count yet."""
        return self.line - self.saved_line

    async def save_when_due(self, *, urgent: bool) -> None:
        """Now and then; an urgent one at once, if there is something to save."""
        age = time.monotonic() - self._saved_at
        if age > self._lease_seconds / 3 or (self.unsaved and (urgent or age > SAVE_SECONDS)):
            await self.save()

    async def save(self, status: BatchStatus | None = None) -> None:
        """Raises Cancelled if somebody else has the lease."""
        assert self._output is not None
        assert self._errors is not None
        await self._output.flush()
        await self._errors.flush()
        counts = (self._output.id, self._output.size), (self._errors.id, self._errors.size)
        await self._note(
            status,
            line=self.line,
            offset=self._offset,
            output=self._output.id,
            output_bytes=self._output.size,
            error_output=self._errors.id,
            error_bytes=self._errors.size,
            completed=self._completed,
            failed=self._failed,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
        )
        self.saved_line, self._counts = self.line, counts

    async def renew(self) -> None:
        await self._note(None)

    async def begin(self, total: int) -> None:
        """The file is a batch, of so many lines."""
        await self._insist(lambda: self._note(BatchStatus.IN_PROGRESS, total=total))

    async def finalize(self) -> None:
        """All lines are written."""
        await self._insist(lambda: self.save(None if self.ending else BatchStatus.FINALIZING))

    async def end(self, status: BatchStatus, errors: Sequence[Any] = ()) -> None:
        """What counts can be seen from now on."""
        output, error_output = self._counts
        shown = json.dumps(list(errors)) if errors else ""
        await self._insist(
            lambda: self._batches.end(self.batch, status, errors=shown, output=output, error_output=error_output)
        )
        for file_id, size in (output, error_output):
            if file_id and not size:
                await self._files.discard(file_id)

    async def release(self) -> None:
        """Somebody else may go on at once."""
        await self._batches.save(self.batch, 0, {})

    def close(self) -> None:
        for file in filter(None, (self._output, self._errors)):
            file.close()

    async def _note(self, status: BatchStatus | None, **progress: str | int) -> None:
        asked = time.monotonic()
        saved = await self._batches.save(self.batch, self._lease_seconds, progress, status)
        self.status, self.seconds_left, self._saved_at = saved.status, saved.seconds, asked

    async def _insist(self, step: Callable[[], Awaitable[None]]) -> None:
        while True:
            heed_cancel()
            try:
                return await step()
            except (RedisAway, RedisRefused):
                await asyncio.sleep(AWAY_SECONDS)
