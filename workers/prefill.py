"""The prefill loop: lease a job with a credit, compute its KV cache, send it layer by layer, draw the first token.

Leases and hand-overs cost round trips, in which the device would idle. So the next job is leased, and a place opened for its
KV cache, while the last of another one is computed; several at once if they are short. But what is leased must not wait long
for the device: another worker might be free earlier. A long prompt is computed in slices, and between two of them short ones
that nobody has taken go first.
"""

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from brokers.curve import Key
from brokers.kv_sender import KVSender, Outbound
from brokers.queue import Lease, Nothing
from brokers.token_log import Append, TokenLog
from pipeline.errors import (
    Cancelled,
    ConstraintError,
    CreditVoid,
    DeviceError,
    RedisAway,
    RedisRefused,
    TransferError,
)
from pipeline.generation import Generation
from pipeline.states import Status
from pipeline.text import Decode
from pipeline.vocabulary import Vocabulary
from workers.devices import Logits, PrefillDevice, Prompt
from workers.sampler import sampler_for
from workers.station import Figures, Station

log = logging.getLogger(__name__)


#: Jobs in hand that the device has yet to compute, and how long it may take for them when another one is leased: many round
#: trips, and less than anybody notices. So long are slices of long prompts, too: short ones take half of the time at most.
AHEAD, AHEAD_SECONDS = 8, 0.2
#: For a short job from its lease until its KV cache may be sent; the device idles meanwhile.
READY_SECONDS = 0.02


class Work:
    """A job in hand. `ended` is read by the compute thread, between layers."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.left = len(lease.job.prompt) + lease.log_length  # tokens to compute
        self.phase = "prefill"
        self.ended = False
        self.outbound: Outbound | None = None
        self.ready = asyncio.Event()  # waits for nothing but the device, or for nothing any more

    def end(self) -> None:
        """The job is over or lost: stop computing for it, and wait for no answer about it."""
        self.ended = True
        if self.outbound is not None:
            self.outbound.fail(TransferError("the job is over"))


class PrefillWorker:
    def __init__(self, station: Station, device: PrefillDevice, vocabulary: Vocabulary, decode: Decode) -> None:
        config = station.config
        self._station = station
        self._device = device
        self._vocabulary = vocabulary
        self._decode = decode
        self._log = TokenLog(station.store)
        self._sender = KVSender(
            key=Key.read(config.kv_key),
            geometry=device.geometry,
            buffer_bytes=config.kv_buffer_mib << 20,
            open_seconds=config.open_seconds,
            part_seconds=config.part_seconds,
        )
        self._compute = ThreadPoolExecutor(
            1, thread_name_prefix="compute", initializer=_give_way, initargs=(config.prefill_nice,)
        )
        self._turn = asyncio.Lock()  # the device's
        self._leasing = asyncio.Lock()
        self._ahead: set[Work] = set()  # what it has yet to compute
        self._less = asyncio.Event()  # … has become less
        self._reach = 0  # tokens that it computes in AHEAD_SECONDS, as far as one knows
        self._rung: set[str] = set()  # jobs that ended while a lease was asked for: one of them may be the answer
        self._work: dict[asyncio.Task[None], Work] = {}
        self._jobs_done = self._tokens_done = self._bytes_sent = 0

    async def run(self) -> None:
        """Until the station drains; then running jobs may finish for the grace time, the rest is handed back."""
        facts: Figures = {
            "device": self._station.device,
            "model": self._device.geometry.model,
            "dtype": self._device.geometry.dtype,
            "slots": 1,
        }
        await self._station.enter(facts, figures=self._figures, ended=self._ended, lost=self._lost)
        with contextlib.suppress(RedisAway):  # only when it is time to go
            while not self._station.draining.is_set():
                await self._station.insist(self._step)
        if self._work:
            await asyncio.wait(self._work, timeout=self._station.config.grace_seconds)
        for work in self._work.values():
            work.end()
        if self._work:  # bounded too: a device call cannot be interrupted, and the sweep takes what is left
            await asyncio.wait(self._work, timeout=self._station.config.grace_seconds)
        self._sender.close()
        self._compute.shutdown()
        await self._station.leave()

    async def _step(self) -> None:
        """Lease when the device will soon have nothing to do; otherwise, and without work, wait."""
        if not await self._has_room():
            return
        answer = await self._lease()
        if isinstance(answer, Nothing):
            await (self._empty_hands() if answer.alone else self._station.queue.wait(answer.mark))

    async def _lease(self, *, passing: Work | None = None) -> list[Work] | Nothing:
        """passing: a long one, before which short ones may go."""
        async with self._leasing:
            self._rung.clear()
            before = self._ahead - {passing}
            answer = await self._station.queue.lease(
                self._station.worker,
                most=AHEAD - len(before),
                tokens=self._reach - sum(work.left for work in before),
                others=bool(self._ahead),
                short=passing is not None,
            )
            return answer if isinstance(answer, Nothing) else [self._take(lease) for lease in answer]

    def _take(self, lease: Lease) -> Work:
        work = Work(lease)
        work.ended = lease.job_id in self._rung
        self._station.vitals.hold(lease.job_id, lease.lease_id)
        self._ahead.add(work)
        task = asyncio.create_task(self._serve(work))
        self._work[task] = work
        task.add_done_callback(self._work.pop)
        return work

    async def _empty_hands(self) -> None:
        while self._ahead:
            self._less.clear()
            await self._less.wait()

    async def _has_room(self) -> bool:
        """Waits for it. False: the worker is to leave, and takes no more jobs."""
        leaving = asyncio.ensure_future(self._station.draining.wait())
        while not (self._station.draining.is_set() or self._is_light()):
            self._less.clear()
            less = asyncio.ensure_future(self._less.wait())
            await asyncio.wait({less, leaving}, return_when=asyncio.FIRST_COMPLETED)
            less.cancel()
        leaving.cancel()
        return not self._station.draining.is_set()

    def _is_light(self) -> bool:
        """What was begun before by others is alone here: if it ends this worker, too, no other job is to suffer for it."""
        if any(work.lease.attempt > 1 for work in self._ahead):
            return False
        if len(self._ahead) >= AHEAD:
            return False
        return not self._ahead or sum(work.left for work in self._ahead) <= self._reach

    def _computed(self, work: Work, tokens: int) -> None:
        work.left -= tokens
        if work.left <= 0:
            self._ahead.discard(work)
        self._less.set()

    async def _serve(self, work: Work) -> None:
        """One job from lease to hand-over."""
        lease = work.lease
        extra: dict[str, Any] = {"job": lease.job_id, "worker": self._station.worker}
        try:
            await self._attempt(work)
        except (RedisAway, RedisRefused) as error:
            log.warning("left job %s to the sweep: %s", lease.job_id, error, extra={"action": "left", **extra})
        finally:
            work.ready.set()
            self._computed(work, work.left)
            self._station.vitals.let_go(lease.job_id, lease.lease_id)

    async def _attempt(self, work: Work) -> None:
        """What each way of failing means."""
        lease = work.lease
        extra: dict[str, Any] = {"job": lease.job_id, "worker": self._station.worker}
        try:
            await self._prefill(work)
        except RedisAway:
            raise
        except Cancelled:
            if self._station.draining.is_set():
                await self._release(work, "the worker shuts down", refund=True)
            else:
                log.info("left job %s in %s", lease.job_id, work.phase, extra={"action": "left", **extra})
                await self._station.insist(lambda: self._station.queue.settle(lease.job_id, work.phase))
        except CreditVoid as error:
            self._station.tally.add("transfer_failures:void")
            await self._release(work, str(error), refund=True)
        except (TransferError, DeviceError, ConstraintError, RedisRefused) as error:
            if isinstance(error, TransferError) and not work.ended:  # else we broke it off, the job being over
                self._station.tally.add("transfer_failures:failed")
            await self._release(work, f"{work.phase}: {error}", refund=self._station.draining.is_set())
        except Exception as error:
            log.exception("prefill of job %s failed", lease.job_id, extra={"action": "prefill_failed", **extra})
            await self._release(work, f"{work.phase}: {type(error).__name__}: {error}")

    async def _prefill(self, work: Work) -> None:
        lease = work.lease
        tokens = await self._tokens_so_far(lease)
        prompt = [*lease.job.prompt, *tokens]
        outbound = await self._sender.open(
            lease.endpoint, nonce=lease.nonce, job_id=lease.job_id, lease_id=lease.lease_id, tokens=len(prompt)
        )
        work.outbound = outbound
        committed = False
        try:
            logits = await self._run_device(work, prompt, outbound)
            computed = time.monotonic()
            work.phase = "transfer"
            generation = Generation(lease.job, eos=self._vocabulary.eos, decode=self._decode, tokens=tokens)
            over = await self._first_token(work, generation, logits)
            if not over:
                # only now: the decode worker goes on from a token that is in the log
                await outbound.commit(tuple(generation.tokens))
                committed = True
                self._station.tally.observe("transfer", time.monotonic() - computed)
            self._jobs_done += 1
            self._tokens_done += len(prompt)
        finally:
            self._bytes_sent += outbound.bytes_sent
            self._station.tally.add("transfer_bytes", outbound.bytes_sent)
            outbound.close()
            if not committed:
                outbound.abort("the prefill worker gave up, or the job is over")

    async def _tokens_so_far(self, lease: Lease) -> list[int]:
        """What an earlier attempt left in the log."""
        if not lease.log_length:
            return []
        entries = await self._station.insist(lambda: self._log.read(lease.job_id))
        return [entry.token for entry in entries if entry.token is not None]

    async def _run_device(self, work: Work, prompt: list[int], outbound: Outbound) -> Logits:
        """Chunk by chunk in the compute thread; KV goes out on the way."""
        if len(prompt) > self._device.max_tokens:
            raise DeviceError(f"{len(prompt)} prompt tokens; this device holds {self._device.max_tokens}")

        work.ready.set()
        running: Prompt | None = None
        logits = None
        while logits is None:
            async with self._turn:
                if running is None:
                    running = self._device.begin(prompt)
                logits = await self._slice(work, running, outbound)
            if logits is None:
                await self._let_short_ones_pass(work)
        return logits

    async def _slice(self, work: Work, running: Prompt, outbound: Outbound) -> Logits | None:
        """Chunks for a while; all of them if that would not take longer, or if the job is to be alone."""

        def advance() -> Logits | None:
            if work.ended:
                raise Cancelled
            with self._station.vitals.device_call():
                return running.advance(outbound.put, lambda: work.ended)

        ends = time.monotonic() + AHEAD_SECONDS
        while work.left <= self._reach or work.lease.attempt > 1 or time.monotonic() < ends:
            began, tokens = time.monotonic(), min(work.left, self._station.config.chunk)
            logits = await asyncio.get_running_loop().run_in_executor(self._compute, advance)
            self._reach = int(tokens * AHEAD_SECONDS / (time.monotonic() - began))
            if logits is not None:
                self._computed(work, work.left)
                return logits
            self._computed(work, tokens)
        return None

    async def _let_short_ones_pass(self, work: Work) -> None:
        """Once they are ready: then they stand before it in the line for the device."""
        if self._station.draining.is_set():
            return
        with contextlib.suppress(RedisAway, RedisRefused):  # nobody passes, then
            answer = await self._lease(passing=work)
            if not isinstance(answer, Nothing):
                ready = [asyncio.ensure_future(short.ready.wait()) for short in answer]
                _, late = await asyncio.wait(ready, timeout=READY_SECONDS)
                for waiting in late:
                    waiting.cancel()

    async def _first_token(self, work: Work, generation: Generation, logits: Logits) -> bool:
        """Draws and logs it. True if the job is over with it."""
        lease = work.lease
        index = generation.index
        sampler = await sampler_for(lease.job, self._vocabulary, generation.tokens)
        drawn = sampler.draw(logits)
        emission = generation.accept(drawn.token, drawn.logprobs)
        append = Append(
            job_id=lease.job_id,
            lease_id=lease.lease_id,
            start=index,
            tokens=[emission.entry],
            end=str(Status.FINISHED) if emission.end else "",
            reason=emission.end or "",
        )
        answer = (await self._station.insist(lambda: self._log.append([append])))[0]
        if answer.startswith("lost:"):
            raise Cancelled(answer)
        if answer.startswith("gap:"):
            raise TransferError("Redis lost tokens of this job")
        return emission.end is not None

    async def _release(self, work: Work, reason: str, *, refund: bool = False) -> None:
        lease = work.lease
        answer = await self._station.insist(
            lambda: self._station.queue.release(lease.job_id, lease.lease_id, reason, refund=refund)
        )
        if answer.startswith("lost:"):  # handed over, or over: perhaps a cancel that we met as a refusal
            await self._station.insist(lambda: self._station.queue.settle(lease.job_id, work.phase))
        else:
            log.warning(
                "gave job %s back: %s (%s)",
                *(lease.job_id, reason, answer),
                extra={"action": "released", "job": lease.job_id},
            )

    def _ended(self, job_id: str) -> None:
        self._rung.add(job_id)
        for work in self._work.values():
            if work.lease.job_id == job_id:
                work.end()

    def _lost(self, lease_id: str) -> None:
        for work in self._work.values():
            if work.lease.lease_id == lease_id:
                work.end()

    def _figures(self) -> Figures:
        return {
            "busy": len(self._work),
            "jobs": self._jobs_done,
            "tokens": self._tokens_done,
            "bytes": self._bytes_sent,
        }


def _give_way(nice: int) -> None:
    """For the thread that computes, and the threads that its libraries start from it. Where the two roles share cores, whoever
    waits for the next token of a running answer goes first; what sends KV and renews leases stays as it was."""
    thread = threading.get_native_id()
    if sys.platform == "linux" and nice > os.getpriority(os.PRIO_PROCESS, thread):  # elsewhere it is of whole processes
        os.setpriority(os.PRIO_PROCESS, thread, nice)
