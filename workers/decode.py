"""The decode loop: take KV caches in, step all slots together, log each token, free the slot at the end.

Writing the tokens of step n to Redis overlaps step n + 1. The compute thread owns device and generations; the event loop
owns the scheduler and everything that talks. As long as the same jobs go on, the thread does not wait for the loop: the way
there and back would take half a millisecond of every step.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from brokers.credits import Credits
from brokers.curve import Key
from brokers.kv_receiver import KVReceiver
from brokers.token_log import Append, TokenLog
from pipeline.errors import ConfigError, DeviceError, KVRelayError, RedisAway, RedisRefused, TransferError
from pipeline.frames import Commit
from pipeline.generation import Emission, Generation
from pipeline.job import Job
from pipeline.scheduler import Scheduler
from pipeline.states import Status
from pipeline.text import Decode
from pipeline.transfer import Transfer
from pipeline.vocabulary import Vocabulary
from workers.devices import DecodeDevice, RefillsSlots
from workers.sampler import Sampler, sampler_for
from workers.station import Figures, Station

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Sequence:
    """A job that this worker has taken over."""

    job_id: str
    lease_id: str
    generation: Generation
    sampler: Sampler
    transfer: Transfer | None  # until the cache is in a slot
    first: int  # index of the first token that this worker produces
    at: float  # when its last token was drawn, or the job taken over
    emissions: list[Emission] = field(default_factory=list)
    written: int = 0  # how many of them Redis has confirmed
    over: bool = False  # ended by us, or taken away from us


@dataclass(slots=True)
class Step:
    """What one device call did. failures: sequences that cannot go on, and why. fallbacks: those that the device had to
    prefill itself."""

    emissions: dict[Sequence, Emission] = field(default_factory=dict)
    failures: dict[Sequence, str] = field(default_factory=dict)
    fallbacks: dict[Sequence, str] = field(default_factory=dict)

    def all_go_on(self, running: dict[int, Sequence]) -> bool:
        """Another one may follow with nobody asked."""
        return 0 < len(self.emissions) == len(running) and not any(one.end for one in self.emissions.values())


class DecodeWorker:
    def __init__(self, station: Station, device: DecodeDevice, vocabulary: Vocabulary, decode: Decode) -> None:
        config = station.config
        self._station = station
        self._device = device
        self._refills = _refills(station, device)
        self._vocabulary = vocabulary
        self._decode = decode
        self._log = TokenLog(station.store)
        self._credits = Credits(station.store, station.worker)
        self._scheduler: Scheduler[Sequence] = Scheduler(slots=device.slots, waiting=config.waiting)
        self._receiver = KVReceiver(
            host=config.kv_host,
            key=Key.read(config.kv_key),
            geometry=device.geometry,
            context=config.context,
            part_seconds=config.part_seconds,
            desk=self,
        )
        self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._sequences: dict[str, Sequence] = {}  # job id → until Redis has confirmed its end
        self._evictions: list[tuple[int, Sequence]] = []
        self._work = asyncio.Event()  # something to step or to evict
        self._changed = False  # since the compute thread was told what to do
        self._news = asyncio.Event()  # something to write
        self._room = asyncio.Event()  # a place became free
        self._offering = asyncio.Lock()  # credits on their way to Redis
        self._jobs_done = self._tokens_done = 0

    async def run(self) -> None:
        """Until the station drains; then running jobs may finish for the grace time, the rest is handed back."""
        facts: Figures = {
            "device": self._station.device,
            "model": self._device.geometry.model,
            "dtype": self._device.geometry.dtype,
            "slots": self._device.slots,
            "capacity": self._scheduler.capacity,
            "endpoint": self._receiver.endpoint,
        }
        await self._station.enter(facts, figures=self._figures, ended=self._ended, lost=self._lost)
        receiver = (self._receiver.run(), self._receiver.watch())
        for part in (*receiver, self._keep_credits(), self._write_tokens(), self._step_forever()):
            self._station.spawn(part)
        await self._station.draining.wait()
        await self._drain()
        self._receiver.close()
        await self._station.leave()
        self._compute.shutdown()

    # The desk of the receiver

    def take(self, nonce: str) -> bool:
        self._room.set()  # this worker is busier now, and its other credits must say so
        return self._scheduler.open(nonce)

    def dropped(self, nonce: str) -> None:
        self._scheduler.drop(nonce)
        self._room.set()

    async def arrived(self, transfer: Transfer, commit: Commit) -> None:
        """Takes the job over in Redis. The new lease id is chosen once, so that a repeat after a lost reply is the same."""
        if self._station.draining.is_set():
            raise TransferError("the decode worker shuts down")
        lease_id = f"{self._station.worker}#{secrets.token_hex(6)}"
        job = await self._station.insist(lambda: self._station.queue.handover(transfer.job, transfer.lease, lease_id))
        self._station.vitals.hold(transfer.job, lease_id)
        try:
            sequence = await self._sequence(job, lease_id, transfer, commit)
        except Exception as error:  # held without a sequence it would be renewed, and never stepped
            self._station.vitals.let_go(transfer.job, lease_id)
            await self._give_back(transfer.job, lease_id, str(error))
            raise TransferError(str(error)) from error
        self._sequences[sequence.job_id] = sequence
        self._scheduler.arrived(transfer.nonce, sequence)
        self._wake()

    async def _sequence(self, job: Job, lease_id: str, transfer: Transfer, commit: Commit) -> Sequence:
        """What ends it meanwhile shows at its first append."""
        tokens = commit.tokens
        if not tokens or len(job.prompt) + len(tokens) - 1 != transfer.tokens:
            reason = f"KV of {transfer.tokens} tokens for a prompt of {len(job.prompt)} and {len(tokens)} more"
            raise TransferError(reason)
        sampler = await sampler_for(job, self._vocabulary, tokens)
        generation = Generation(job, eos=self._vocabulary.eos, decode=self._decode, tokens=tokens)
        return Sequence(transfer.job, lease_id, generation, sampler, transfer, len(tokens), time.monotonic())

    # Stepping

    async def _step_forever(self) -> None:
        while True:
            await self._work.wait()
            await self._step()

    def _wake(self) -> None:
        """The compute thread has something else to do than what it does."""
        self._changed = True
        self._work.set()

    async def _step(self) -> None:
        """Admit, run for as long as nothing changes, settle."""
        self._changed = False
        admitted = self._scheduler.admit()
        evictions, self._evictions = self._evictions, []
        running = dict(self._scheduler.running)
        if not running and not evictions:
            self._work.clear()
            return
        loop = asyncio.get_running_loop()
        steps: asyncio.Queue[Step | None] = asyncio.Queue()

        def run() -> None:
            step = self._advance([slot for slot, _ in evictions], admitted, running)
            loop.call_soon_threadsafe(steps.put_nowait, step)
            while step.all_go_on(running) and not self._changed:
                step = self._advance([], [], running)
                loop.call_soon_threadsafe(steps.put_nowait, step)

        running_on = loop.run_in_executor(self._compute, run)
        running_on.add_done_callback(lambda _: steps.put_nowait(None))
        while (step := await steps.get()) is not None:
            for _, sequence in evictions:
                self._station.spawn(self._settle_stopped(sequence))
            evictions = []
            self._settle(step)
        await running_on

    def _advance(self, evicted: list[int], admitted: list[tuple[int, Sequence]], running: dict[int, Sequence]) -> Step:
        """In the compute thread: the device, and what follows from its logits. Never raises for one job's sake."""
        step = Step()
        for slot in evicted:
            self._device.evict(slot)
        for slot, sequence in admitted:
            with self._station.vitals.device_call():
                try:
                    if (reason := self._insert(slot, sequence)) is not None:
                        step.fallbacks[sequence] = reason
                except Exception as error:
                    step.failures[sequence] = f"insert: {type(error).__name__}: {error}"
        going = {slot: sequence for slot, sequence in running.items() if sequence not in step.failures}
        if going:
            with self._station.vitals.device_call():
                try:
                    logits = self._device.step()
                except Exception as error:
                    step.failures |= dict.fromkeys(going.values(), f"step: {type(error).__name__}: {error}")
                    going = {}
        for slot, sequence in going.items():
            try:
                drawn = sequence.sampler.draw(logits[slot])
            except Exception as error:
                step.failures[sequence] = f"draw: {type(error).__name__}: {error}"
                continue
            emission = sequence.generation.accept(drawn.token, drawn.logprobs)
            step.emissions[sequence] = emission
            if emission.end is None:
                self._device.commit(slot, drawn.token)
            else:
                self._device.evict(slot)
        return step

    def _insert(self, slot: int, sequence: Sequence) -> str | None:
        """Answers why the device had to prefill the job itself, None if it did not."""
        transfer, sequence.transfer = sequence.transfer, None
        if transfer is None:
            raise DeviceError("this KV cache is in a slot already")
        *tokens, token = *sequence.generation.job.prompt, *sequence.generation.tokens
        reason = None
        try:
            for block in transfer.blocks():
                self._device.insert(slot, block.layer, block.start, block.tokens, block.k, block.v)
            self._device.begin(slot, transfer.tokens, token)
        except Exception as error:
            if self._refills is None:
                raise
            reason = f"{type(error).__name__}: {error}"
            self._device.evict(slot)
            try:
                self._refills.refill(slot, tokens)
                self._device.begin(slot, len(tokens), token)
            except Exception as second:
                raise DeviceError(f"{second}; and before: {reason}") from second
        return reason

    def _settle(self, step: Step) -> None:
        """Slot freed first, credit published then; a job that was taken away meanwhile says nothing any more."""
        now = time.monotonic()
        for sequence, emission in step.emissions.items():
            if sequence.over:
                continue
            self._tokens_done += 1
            self._station.tally.observe("itl", now - sequence.at)
            sequence.at = now
            sequence.emissions.append(emission)
            if emission.end is not None:
                sequence.over = True
                self._jobs_done += 1
                self._scheduler.remove(sequence)
                self._room.set()
        for sequence, reason in step.fallbacks.items():
            log.warning("prefilled job %s here: %s", sequence.job_id, reason, extra={"action": "local_fallback"})
            self._station.tally.add("local_fallbacks")
            self._station.spawn(self._note_fallback(sequence, reason))
        for sequence, reason in step.failures.items():
            if not sequence.over:
                log.error("job %s cannot go on: %s", sequence.job_id, reason, extra={"action": "decode_failed"})
                self._forget(sequence)
                self._station.spawn(self._give_back(sequence.job_id, sequence.lease_id, reason))
        if step.emissions:
            self._news.set()

    async def _note_fallback(self, sequence: Sequence, reason: str) -> None:
        note = self._station.queue.note
        await self._station.insist(lambda: note(sequence.job_id, sequence.lease_id, "local_fallback", reason))

    # Writing

    async def _write_tokens(self) -> None:
        """One append for all jobs; while Redis is away they pile up, at most max_tokens each."""
        while True:
            await self._news.wait()
            self._news.clear()
            batch = [sequence for sequence in self._sequences.values() if sequence.written < len(sequence.emissions)]
            if batch:
                try:
                    await self._station.insist(lambda batch=batch: self._append(batch))  # type: ignore[misc]
                except (RedisAway, RedisRefused) as error:  # away: while it drains; perhaps it is back in time
                    log.error("cannot write tokens: %s", error, extra={"action": "append_refused"})
                    await asyncio.sleep(self._station.config.tick_seconds)
                    self._news.set()

    async def _append(self, batch: list[Sequence]) -> None:
        batch = [sequence for sequence in batch if sequence.job_id in self._sequences]
        appends = [_append(sequence) for sequence in batch]
        counts = [sequence.written + len(append.tokens) for sequence, append in zip(batch, appends, strict=True)]
        answers = await self._log.append(appends)
        for sequence, append, count, answer in zip(batch, appends, counts, answers, strict=True):
            if answer.startswith("lost:"):
                # a repeat after a lost reply finds its own end: then nothing is lost
                self._lose(sequence, stopped=not append.end)
            elif answer.startswith("gap:"):
                self._close_gap(sequence, int(answer.removeprefix("gap:")))
            else:
                sequence.written = count
                if append.end:
                    self._forget(sequence)

    def _close_gap(self, sequence: Sequence, length: int) -> None:
        """Redis has fewer tokens than it confirmed (it lost its last second): write them again, if they are ours."""
        if length < sequence.first:
            self._forget(sequence)
            reason = "Redis lost tokens of an earlier attempt"
            self._station.spawn(self._give_back(sequence.job_id, sequence.lease_id, reason))
        else:
            sequence.written = length - sequence.first
            self._news.set()

    # Losing

    def _ended(self, job_id: str) -> None:
        """The bell: a job has ended, perhaps by us."""
        sequence = self._sequences.get(job_id)
        if sequence is not None and not sequence.over:
            self._lose(sequence, stopped=True)
        for nonce, transfer in self._receiver.arrivals().items():
            if transfer.job == job_id:
                self._station.spawn(self._receiver.drop(nonce, "the job is over"))

    def _lost(self, lease_id: str) -> None:
        """The keeper could not renew it."""
        for sequence in list(self._sequences.values()):
            if sequence.lease_id == lease_id and not sequence.over:
                self._lose(sequence, stopped=True)

    def _lose(self, sequence: Sequence, *, stopped: bool) -> None:
        has_slot = self._forget(sequence)
        if stopped and not has_slot:
            self._station.spawn(self._settle_stopped(sequence))

    async def _settle_stopped(self, sequence: Sequence) -> None:
        """Its slot is empty now: phase and milliseconds go into the record, if somebody had stopped it."""
        await self._station.insist(lambda: self._station.queue.settle(sequence.job_id, "decode"))

    def _forget(self, sequence: Sequence) -> bool:
        """True if it had a slot, which the next device call empties before anything else."""
        sequence.over = True
        if self._sequences.get(sequence.job_id) is sequence:
            del self._sequences[sequence.job_id]
        self._station.vitals.let_go(sequence.job_id, sequence.lease_id)
        slot = self._scheduler.remove(sequence)
        self._room.set()
        if slot is None:
            return False
        self._evictions.append((slot, sequence))
        self._wake()
        return True

    async def _give_back(self, job_id: str, lease_id: str, reason: str, *, refund: bool = False) -> None:
        answer = await self._station.insist(
            lambda: self._station.queue.release(job_id, lease_id, reason, refund=refund)
        )
        log.warning("gave job %s back: %s (%s)", job_id, reason, answer, extra={"action": "released"})

    # Credits

    async def _keep_credits(self) -> None:
        """Publishes a credit for every place that is owed one, and compares with Redis at each heartbeat."""
        audited = 0.0
        tick = self._station.config.tick_seconds
        self._room.set()
        while not self._station.draining.is_set():
            try:
                if self._room.is_set():
                    self._room.clear()
                    await self._publish_credits()
                if time.monotonic() - audited >= tick:
                    audited = time.monotonic()
                    await self._audit()
                await asyncio.wait_for(self._room.wait(), tick)
            except TimeoutError:
                continue
            except (RedisAway, RedisRefused) as error:
                log.warning("credits: %s", error, extra={"action": "credits_redis"})
                await asyncio.sleep(tick)
                self._room.set()

    async def _publish_credits(self) -> None:
        async with self._offering:
            if self._station.draining.is_set():
                return
            listed = list(self._scheduler.listed)
            fresh = [secrets.token_hex(12) for _ in range(self._scheduler.owed)]
            for nonce in fresh:
                self._scheduler.publish(nonce)
            await self._credits.publish(fresh, self._scheduler.busy, listed=listed)

    async def _audit(self) -> None:
        """Credits that got lost, and transfers whose sender lost the lease or went silent."""
        unknown = self._scheduler.audit(
            await self._credits.listed(), time.monotonic(), self._station.config.open_seconds
        )
        await self._credits.withdraw(unknown)
        arrivals = self._receiver.arrivals()
        leases = await self._station.queue.leases([transfer.job for transfer in arrivals.values()])
        for (nonce, transfer), lease_id in zip(arrivals.items(), leases, strict=True):
            if lease_id != transfer.lease:
                await self._receiver.drop(nonce, "the lease is not yours any more")
        for nonce in self._receiver.stale():
            await self._receiver.drop(nonce, "nothing came for too long")
        if self._scheduler.owed:
            self._room.set()

    # The end

    async def _drain(self) -> None:
        """No new KV caches; running jobs may finish for the grace time; the rest goes back at once."""
        deadline = time.monotonic() + self._station.config.grace_seconds
        with contextlib.suppress(RedisAway, RedisRefused):  # the sweep takes them, and their OPEN is refused
            async with self._offering:
                withdrawn, self._scheduler.listed = list(self._scheduler.listed), {}
                await self._credits.withdraw(withdrawn)
        for nonce in self._receiver.arrivals():  # their senders need not find out by waiting
            await self._receiver.drop(nonce, "the decode worker shuts down")
        try:
            while (self._sequences or self._receiver.committing) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            for sequence in list(self._sequences.values()):
                self._forget(sequence)
                await asyncio.wait_for(
                    self._give_back(sequence.job_id, sequence.lease_id, "the worker shuts down", refund=True),
                    self._station.config.grace_seconds,
                )
        except (KVRelayError, TimeoutError) as error:
            log.warning("left jobs to the sweep: %s", error, extra={"action": "drain"})

    def _figures(self) -> Figures:
        return {
            "busy": self._scheduler.busy,
            "jobs": self._jobs_done,
            "tokens": self._tokens_done,
            **self._device.figures,
        }


def _refills(station: Station, device: DecodeDevice) -> RefillsSlots | None:
    """The device again, if it may prefill what it could not take in."""
    if station.config.fallback != "local":
        return None
    if not isinstance(device, RefillsSlots):
        raise ConfigError("KVR_FALLBACK", "local", f"the {station.device} device cannot prefill: leave it empty")
    return device


def _append(sequence: Sequence) -> Append:
    """What Redis has not confirmed yet."""
    fresh = sequence.emissions[sequence.written :]
    end = fresh[-1].end
    return Append(
        job_id=sequence.job_id,
        lease_id=sequence.lease_id,
        start=sequence.first + sequence.written,
        tokens=[emission.entry for emission in fresh],
        end=str(Status.FINISHED) if end else "",
        reason=end or "",
    )
