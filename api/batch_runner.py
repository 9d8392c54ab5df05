"""Works on the batches that nobody works on, for as long as the process serves."""

import asyncio
import contextlib
import logging
import time
from collections import Counter

from api.batch_run import BatchRun
from api.front import Front
from brokers.batches import Batches
from brokers.files import Files
from brokers.store import heed_cancel
from brokers.tombstones import Bell
from pipeline.errors import Cancelled, KVRelayError, RedisAway, RedisRefused

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between looks for batches
SWEEP_SECONDS = 600.0  # between looks for files that nobody knows
AT_ONCE = 2  # batches of one owner in one process: the others have their turn, however many he has


class BatchRunner:
    def __init__(self, front: Front, batches: Batches, files: Files) -> None:
        self._front = front
        self._batches = batches
        self._files = files
        self._runs: dict[asyncio.Task[None], BatchRun] = {}
        self._wanted = asyncio.Event()
        self._swept_at = 0.0

    def wake(self) -> None:
        """There is a new batch."""
        self._wanted.set()

    async def run(self) -> None:
        """For ever. When it is cancelled, other processes may go on with its batches at once."""
        bell = asyncio.create_task(Bell(self._front.store).listen(self._rung))
        try:
            while True:
                heed_cancel()
                try:
                    await self._look()
                except (RedisAway, RedisRefused):
                    pass  # readiness says it
                except Exception:  # a disk that fails, or a bug: the next look may find more
                    log.exception("looking for batches", extra={"action": "batch_runner"})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await self._wanted.wait()
                self._wanted.clear()
        finally:
            tasks = [bell, *self._runs]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _rung(self, job_id: str) -> None:
        for run in self._runs.values():
            run.rung(job_id)

    async def _look(self) -> None:
        mine = {run.batch.id for run in self._runs.values()}
        busy = Counter(run.batch.owner for run in self._runs.values())
        for owner, batch_id in await self._batches.open():
            if batch_id not in mine and busy[owner] < AT_ONCE and await self._take(batch_id):
                busy[owner] += 1
        if time.monotonic() - self._swept_at > SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            await self._sweep()

    async def _sweep(self) -> None:
        batches = [await self._batches.find(batch_id) for _, batch_id in await self._batches.open()]
        await self._files.sweep({name for batch in batches if batch for name in (batch.output, batch.error_output)})

    async def _take(self, batch_id: str) -> bool:
        claimed = await self._batches.claim(batch_id, self._front.config.lease_seconds)
        if claimed is None:
            return False
        run = BatchRun(self._front, self._batches, self._files, claimed)
        task = asyncio.create_task(self._serve(run))
        self._runs[task] = run
        task.add_done_callback(self._runs.pop)
        return True

    async def _serve(self, run: BatchRun) -> None:
        """What each way of failing means."""
        extra = {"action": "batch_left", "batch": run.batch.id}
        log.info("works on batch %s from line %d", run.batch.id, run.batch.line + 1, extra={**extra, "action": "batch"})
        try:
            await run.run()
        except asyncio.CancelledError:
            with contextlib.suppress(KVRelayError):
                await run.ledger.release()
            raise
        except Cancelled:
            log.warning("lost batch %s to another process", run.batch.id, extra=extra)
        except OSError as error:  # no room on the disk: its lease runs out, and somebody tries again
            log.error("left batch %s: %s", run.batch.id, error, extra=extra)
        except Exception:
            log.exception("batch %s", run.batch.id, extra=extra)
            with contextlib.suppress(Cancelled):
                await run.fail("server_error", "an internal error; the log has it")
        finally:
            run.ledger.close()
