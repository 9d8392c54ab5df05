"""One batch in the hands of this process: from lines to jobs, from logs to the two files of results.

A window of lines is worked on at once, and what is ended is written in the order of the input. Whoever goes on with a batch
begins after the lines that count (`Ledger`), and finds the jobs of those after them, for their ids follow from batch and line.
So after a crash between any two steps every line is answered, once.
"""

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any, BinaryIO

from api.batch_ledger import AWAY_SECONDS, Ledger
from api.batch_lines import LINE_LIMIT, Line, examine, name_of
from api.front import Front
from brokers.batches import Batches
from brokers.files import Files
from brokers.store import heed_cancel
from pipeline.batch import Batch, BatchStatus, job_id_of
from pipeline.errors import RedisAway, RedisRefused
from pipeline.job import Priority
from pipeline.states import TERMINAL, Status

log = logging.getLogger(__name__)

WINDOW_BYTES = 16 << 20  # of lines that are worked on: of very long ones fewer
LOOK_SECONDS = 2.0  # between looks at all jobs: a bell may be lost
TICK_SECONDS = 0.25  # without news
TOGETHER_SECONDS = 0.02  # jobs that end within it are looked at together
#: A job outlives its batch's window by so much: it is the batch that ends it, and says so.
SLACK_SECONDS = 60.0

ENDINGS = {
    BatchStatus.CANCELLED: ("batch_cancelled", "the batch was cancelled before this request was answered"),
    BatchStatus.EXPIRED: ("batch_expired", "the batch's window was over before this request was answered"),
}


class BatchRun:
    def __init__(self, front: Front, batches: Batches, files: Files, batch: Batch) -> None:
        self.batch = batch
        self.ledger = Ledger(batches, files, batch, front.config.lease_seconds)
        self._front = front
        self._path = files.path(batch.input_file_id)
        self._most = front.config.batch_window
        self._last_begun = batch.line + self._most  # line that an earlier holder may have submitted
        self._number, self._offset = batch.line, batch.offset  # of the input, as far as it is read
        self._at_end = False
        self._next: Line | None = None  # read, and without room in the queue so far
        self._window: deque[Line] = deque()
        self._bytes = 0  # of the lines in it
        self._open: dict[str, Line] = {}  # job id → its line
        self._rung: set[str] = set()  # jobs to look at
        self._news = asyncio.Event()
        self._looked_at = 0.0

    def rung(self, job_id: str) -> None:
        """A job has ended."""
        if job_id in self._open:
            self._rung.add(job_id)
            self._news.set()

    async def run(self) -> None:
        """To the end of the batch. Raises Cancelled if somebody else works on it."""
        try:
            if not self.batch.total:
                total, errors = await self.ledger.meanwhile(asyncio.to_thread(self._examine))
                if errors:
                    await self.ledger.end(BatchStatus.FAILED, errors)
                    return
                await self.ledger.begin(total)
            await self.ledger.carry_on()
            with self._path.open("rb") as lines:
                lines.seek(self.batch.offset)
                await self._answer(lines)
        except FileNotFoundError as error:
            message = f"{error}: the file is gone, or API processes do not share KVR_FILES"
            await self.fail("file_not_found", message)

    def _examine(self) -> tuple[int, list[Any]]:
        with self._path.open("rb") as lines:
            return examine(lines)

    async def fail(self, code: str, message: str) -> None:
        log.error("batch %s failed: %s", self.batch.id, message, extra={"action": "batch_failed"})
        await self.ledger.end(BatchStatus.FAILED, [{"code": code, "message": message, "param": None, "line": None}])

    async def _answer(self, lines: BinaryIO) -> None:
        while self._window or self._next or not self._at_end:
            heed_cancel()
            try:
                await self._step(lines)
            except (RedisAway, RedisRefused) as error:
                log.warning("batch %s waits: %s", self.batch.id, error, extra={"action": "batch_waits"})
                await asyncio.sleep(AWAY_SECONDS)
        await self.ledger.finalize()
        await self.ledger.end(self.ledger.ending or BatchStatus.COMPLETED)

    async def _step(self, lines: BinaryIO) -> None:
        await self._fill(lines)
        if self.ledger.ending:
            await self._stop(list(self._open))
        else:
            await self._wait()
        await self._collect()
        self._write()
        await self.ledger.save_when_due(urgent=not self._open or self.ledger.unsaved > self._most / 2)

    # Lines in

    async def _fill(self, lines: BinaryIO) -> None:
        """As many lines as there is room for, here and in the queue."""
        while not self._is_full():
            self._next = self._next or await self._read(lines)
            if self._next is None or not await self._place(self._next):
                return
            self._window.append(self._next)
            self._bytes += self._next.size
            self._next = None
            await self.ledger.save_when_due(urgent=False)  # of long lines, a window takes its time

    def _is_full(self) -> bool:
        """Lines that do not count yet are in the window, too: so who comes next knows how far lines can be submitted."""
        begun = self._window[-1].number if self._window else self.ledger.line
        first = self.ledger.line if self.ledger.ending else self.ledger.saved_line
        return begun - first >= self._most or self._bytes >= WINDOW_BYTES

    async def _read(self, lines: BinaryIO) -> Line | None:
        """The next one that is not blank."""
        while raw := await asyncio.to_thread(lines.readline, LINE_LIMIT):
            self._offset += len(raw)
            if raw.strip():
                self._number += 1
                ids = [job_id_of(self.batch.id, self._number)]
                line = Line(number=self._number, end=self._offset, size=len(raw), job_ids=ids)
                await self._prepare(line, raw)
                return line
        self._at_end = True
        return None

    async def _prepare(self, line: Line, raw: bytes) -> None:
        if self.ledger.ending and line.number > self._last_begun:
            line.custom_id = name_of(raw)
            line.refuse(*ENDINGS[self.ledger.ending])
        else:
            await self.ledger.meanwhile(line.prepare(raw, self.batch, self._front))

    async def _place(self, line: Line) -> bool:
        """Makes jobs of a line, or finds those that it has. False: the queue is full."""
        if line.result:
            return True
        if not self.ledger.ending:
            return await self._submit(line)
        self._open |= dict.fromkeys(line.job_ids, line)
        return True

    async def _submit(self, line: Line) -> bool:
        """At low priority, up to half of what may wait: the other half is for whoever waits for an answer."""
        assert line.request is not None
        self._open |= dict.fromkeys(line.job_ids, line)  # before: they may end at once
        submitted = await self._front.queue.submit_all(
            dict(zip(line.job_ids, line.jobs, strict=True)),
            priority=Priority.LOW,
            bound=max(len(line.jobs), self._front.config.queue_bound // 2),
            lifetime=line.request.timeout or self.ledger.seconds_left + SLACK_SECONDS,
            owner=self.batch.owner,
            owner_bound=self.batch.owner_waiting and max(len(line.jobs), self.batch.owner_waiting // 2),
            digest=self.batch.id,  # the id says the rest
        )
        if submitted.outcome in ("full", "owner_full"):
            for job_id in line.job_ids:
                del self._open[job_id]
            return False
        if submitted.outcome == "exists":
            self._rung |= set(line.job_ids)
        return True

    # Results out

    async def _wait(self) -> None:
        """Until a job ends, or for a while."""
        if (self._open or self._next) and not self._rung:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._news.wait()
                    await asyncio.sleep(TOGETHER_SECONDS)
        self._news.clear()

    async def _stop(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            await self._front.queue.stop(job_id, Status.CANCELLED, "its batch is to end")
        self._rung |= set(job_ids)

    async def _collect(self) -> None:
        """Looks at the jobs that rang, and now and then at all."""
        now = asyncio.get_running_loop().time()
        if now - self._looked_at > LOOK_SECONDS:
            self._rung, self._looked_at = set(self._open), now
        job_ids, self._rung = sorted(self._rung & self._open.keys()), set()
        for job_id, status in zip(job_ids, await self._front.queue.statuses(job_ids), strict=True):
            line = self._open.get(job_id)
            if line is None:
                continue
            if status in TERMINAL:
                await self._take(job_id, line)
            elif status is None and self.ledger.ending:
                self._refuse(line)
            elif status is None:  # Redis has forgotten it
                await self._submit(line)

    async def _take(self, job_id: str, line: Line) -> None:
        entries = await self._front.log.read(job_id)
        end = entries[-1].end if entries else None
        if self.ledger.ending and end in (None, Status.CANCELLED, Status.EXPIRED):
            self._refuse(line)
        elif end is not None:  # otherwise it has expired; so does its record within a minute, and then it is made again
            del self._open[job_id]
            line.logs[job_id] = entries
            if line.logs.keys() == set(line.job_ids):
                line.finish(self._front)

    def _refuse(self, line: Line) -> None:
        assert self.ledger.ending is not None
        for job_id in line.job_ids:
            self._open.pop(job_id, None)
        line.refuse(*ENDINGS[self.ledger.ending])

    def _write(self) -> None:
        """What is ended, up to the first line that is not."""
        while self._window and self._window[0].result:
            line = self._window.popleft()
            self._bytes -= line.size
            self.ledger.write(line)
