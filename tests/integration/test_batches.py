"""Batches against a real Redis: who may work on one, and that no line is lost or doubled wherever that ends."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hands import Hands, end, until

from api import batch_ledger, batch_run
from api.batch_lines import LINE_LIMIT, Line
from api.batch_run import BatchRun
from api.batch_runner import BatchRunner
from api.batches import find as find_batch
from api.errors import BatchUnknown, FileUnknown
from api.files import find as find_file
from api.front import Front
from api.text import PromptCodec
from brokers import catalogue
from brokers.api_keys import NOBODY, ApiKey
from brokers.audit import Audit
from brokers.batches import Batches
from brokers.files import Files, Growing
from brokers.queue import JobQueue, Load
from brokers.store import Store
from brokers.token_log import TokenLog
from pipeline.batch import BATCH_OVER, Batch, BatchStatus, job_id_of
from pipeline.config import Config
from pipeline.errors import Cancelled, RedisAway
from pipeline.model import Model
from pipeline.states import Status

LINES = 5
LEASE = 30.0  # it runs out when a test says so


class Crash(BaseException):
    """As if the process had been killed."""


class Office:
    """What works on batches in an API process, as the tests reach for it."""

    def __init__(self, config: Config, store: Store, folder: Path) -> None:
        self.store, self.redis, self.keys = store, store.redis, store.keys
        self.front = Front(config, PromptCodec(Model.locate(config), config.context), store)
        self.batches, self.files = Batches(store), Files(store, folder)
        self.folder = folder
        self.runs: list[BatchRun] = []

    async def upload(self, text: bytes, owner: str = "-") -> str:
        async with self.files.receive() as growing:
            await growing.write(text)
        await self.files.add(
            growing.id, owner=owner, purpose="batch", filename="in.jsonl", size=growing.size, seconds=3600
        )
        return growing.id

    async def add(self, text: bytes, window: int = 3600, owner: str = "-", waiting: int = 0) -> str:
        fields = {"owner_waiting": waiting, "endpoint": "/v1/completions", "result_seconds": 3600}
        batch_id = await self.batches.add(await self.upload(text, owner), window, owner, fields)
        assert batch_id is not None
        return batch_id

    async def claim(self, batch_id: str) -> BatchRun:
        batch = await self.batches.claim(batch_id, LEASE)
        assert batch is not None
        self.runs.append(BatchRun(self.front, self.batches, self.files, batch))
        return self.runs[-1]

    def ring(self, job_id: str) -> None:
        for run in self.runs:
            run.rung(job_id)

    async def run(self, batch_id: str) -> Batch:
        """By one process, to its end."""
        await serve(await self.claim(batch_id))
        return await self.batch(batch_id)

    async def let_lease_run_out(self, batch_id: str) -> None:
        await self.redis.hset(self.keys.batch(batch_id), "lease_until", 0)

    async def batch(self, batch_id: str) -> Batch:
        batch = await self.batches.find(batch_id)
        assert batch is not None
        return batch

    def results(self, file_id: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.files.path(file_id).read_bytes().splitlines()] if file_id else []

    def names(self, file_id: str) -> list[str]:
        return [result["custom_id"] for result in self.results(file_id)]


async def serve(run: BatchRun) -> None:
    try:
        await run.run()
    finally:
        run.ledger.close()


@pytest.fixture
def config(config: Config) -> Config:
    return Config(
        redis_url=config.redis_url,
        model="sim",
        served_name=config.name,
        batch_window=3,
        lease_seconds=LEASE,
        keep_seconds=60.0,
        context=512,
    )


@pytest.fixture
async def office(config: Config, tmp_path: Path) -> AsyncIterator[Office]:
    store = Store(config)  # of its own: what a test does to it concerns no worker
    yield Office(config, store, tmp_path / "files")
    await store.close()


@pytest.fixture
async def worker(hands: Hands, office: Office) -> AsyncIterator[None]:
    """Answers each job with one token, the first of its prompt plus one, and rings."""

    async def work() -> None:
        while True:
            if not await hands.credits():
                await hands.credit()
            answer = await hands.queue.lease("p1")
            if isinstance(answer, list):
                (lease,) = answer
                token = lease.job.prompt[0] + 1
                await hands.append(lease.job_id, lease.lease_id, 0, token, end="finished", reason="length")
                office.ring(lease.job_id)
            else:
                await asyncio.sleep(0.002)

    task = asyncio.create_task(work())
    yield
    await end(task)


def request(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": [number], "max_tokens": 1, **fields}
    return {"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def text_of(result: dict[str, Any]) -> str:
    return str(result["response"]["body"]["choices"][0]["text"])


INPUT = jsonl(*(request(number) for number in range(LINES)), {"custom_id": "odd"})


def check_results(office: Office, batch: Batch) -> None:
    """Every line of INPUT is answered, once, in order, and rightly."""
    assert batch.status == BatchStatus.COMPLETED
    answers = office.results(batch.output_file_id)
    assert [(answer["custom_id"], text_of(answer)) for answer in answers] == [
        (f"n{number}", f"<{number + 1}>") for number in range(LINES)
    ]
    assert office.names(batch.error_file_id) == ["odd"]
    assert (batch.total, batch.completed, batch.failed) == (LINES + 1, LINES, 1)
    assert (batch.input_tokens, batch.output_tokens) == (LINES, LINES)


async def check_nothing_is_left(office: Office, batch: Batch) -> None:
    """Files that nobody will ask for."""
    known = {batch.input_file_id, batch.output_file_id, batch.error_file_id}
    assert {path.name for path in office.folder.iterdir()} <= known
    assert await problems(Audit(office.store, lease_seconds=0.02, tick_seconds=0.01)) == []


async def problems(audit: Audit) -> list[str]:
    """Apart from the workers of these tests, which are none."""
    return [str(problem) for problem in await audit.problems() if not problem.subject.startswith("worker")]


# Crashes

Step = Callable[[], Awaitable[None]]

#: Where a process may end: before and after each of these, which are all that reaches Redis or the disk.
PLACES = (
    (Store, "run"),
    (TokenLog, "read"),
    (JobQueue, "statuses"),
    (Growing, "flush"),
    (Files, "discard"),
    (Files, "copy"),
)


def break_into(
    monkeypatch: pytest.MonkeyPatch, office: Office, step: Step, places: Sequence[tuple[type, str]] = PLACES
) -> None:
    """Calls `step` at all places of the office's process, and in no other's."""

    def wrapped(original: Any) -> Any:
        async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            mine = getattr(self, "_store", self) is office.store or isinstance(self, Growing)
            if mine:
                await step()
            answer = await original(self, *args, **kwargs)
            if mine:
                await step()
            return answer

        return call

    for owner, name in places:
        monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))


async def test_a_crash_between_any_two_steps_loses_no_line_and_doubles_none(
    office: Office, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the bytes that count in Redis, what a dead process had written last is there twice."""
    monkeypatch.setattr(batch_ledger, "SAVE_SECONDS", 0.0)
    left, crashed = 0, True

    async def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash

    break_into(monkeypatch, office, step)
    for place in range(1, 1000):
        left = 0
        batch_id = await office.add(INPUT)
        run = await office.claim(batch_id)
        left = place
        try:
            await serve(run)
            crashed = False
        except Crash:
            await office.let_lease_run_out(batch_id)
            left = 0
            if (await office.batch(batch_id)).status in BATCH_OVER:
                assert await office.batches.claim(batch_id, LEASE) is None
            else:
                await office.run(batch_id)
        left = 0
        check_results(office, await office.batch(batch_id))
        if not crashed:
            print(f"{place} steps", end=" ")
            assert place > 30
            return


async def test_a_process_that_was_paused_at_any_step_can_harm_nothing_when_it_goes_on(
    office: Office, worker: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without files of its own it would write into what its successor has written."""
    monkeypatch.setattr(batch_ledger, "SAVE_SECONDS", 0.0)
    left, paused, go_on = 0, asyncio.Event(), asyncio.Event()

    async def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            paused.set()
            await go_on.wait()

    break_into(monkeypatch, office, step)
    for place in range(1, 1000):
        left = 0
        paused.clear()
        go_on.clear()
        batch_id = await office.add(INPUT)
        run = await office.claim(batch_id)
        left = place
        old = asyncio.create_task(serve(run))
        pausing = asyncio.create_task(paused.wait())
        await asyncio.wait({old, pausing}, return_when=asyncio.FIRST_COMPLETED)
        if old.done():
            pausing.cancel()
            assert place > 30
            return
        await office.let_lease_run_out(batch_id)
        over = (await office.batch(batch_id)).status in BATCH_OVER
        if not over:
            await office.run(batch_id)
        go_on.set()
        (outcome,) = await asyncio.gather(old, return_exceptions=True)
        assert isinstance(outcome, Cancelled) != over, outcome
        check_results(office, await office.batch(batch_id))


async def test_redis_may_be_away_at_any_step(office: Office, worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the step took effect, or after it, when only the answer is lost."""
    for module in (batch_ledger, batch_run):
        monkeypatch.setattr(module, "AWAY_SECONDS", 0.0)
    monkeypatch.setattr(batch_run, "LOOK_SECONDS", 0.05)
    left = 0

    async def step() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RedisAway("as if")

    break_into(monkeypatch, office, step, PLACES[:3])
    for place in range(1, 1000):
        left = 0
        batch_id = await office.add(INPUT)
        run = await office.claim(batch_id)
        left = place
        (outcome,) = await asyncio.gather(serve(run), return_exceptions=True)
        # its last step took effect, and it did not hear of it
        ended = (await office.batch(batch_id)).status in BATCH_OVER
        assert outcome is None or (ended and isinstance(outcome, Cancelled)), outcome
        check_results(office, await office.batch(batch_id))
        if left > 0:
            assert place > 20
            return


async def test_what_counts_is_on_the_disk(office: Office, worker: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the flush before it, a save would promise lines that a machine that crashes has never written."""
    run, counted = Store.run, []

    async def checked(self: Store, script: str, *args: Any, **kwargs: Any) -> Any:
        fields = dict(zip(args[4::2], args[5::2], strict=False)) if script == "batch_save" else {}
        for name, size in (("output", "output_bytes"), ("error_output", "error_bytes")):
            if fields.get(size):
                assert office.files.path(fields[name]).stat().st_size >= fields[size]
                counted.append(fields[size])
        return await run(self, script, *args, **kwargs)

    monkeypatch.setattr(Store, "run", checked)
    check_results(office, await office.run(await office.add(INPUT)))
    assert counted


# The lease


async def test_one_process_has_a_batch_until_its_lease_runs_out(office: Office) -> None:
    batch_id = await office.add(INPUT)
    first = await office.batches.claim(batch_id, LEASE)
    assert first is not None
    assert await office.batches.claim(batch_id, LEASE) is None
    await office.let_lease_run_out(batch_id)
    await office.batches.save(first, LEASE, {"line": 2})
    assert await office.batches.claim(batch_id, LEASE) is None, "a save keeps it"
    await office.batches.save(first, 0, {})
    second = await office.batches.claim(batch_id, LEASE)
    assert second is not None
    assert second.line == 2
    with pytest.raises(Cancelled):
        await office.batches.save(first, LEASE, {"line": 1})
    with pytest.raises(Cancelled):
        await office.batches.end(first, BatchStatus.FAILED, errors="", output=("", 0), error_output=("", 0))
    assert (await office.batch(batch_id)).line == 2


async def test_a_cancel_is_not_overwritten_by_a_holder_that_has_not_heard_of_it(office: Office) -> None:
    batch_id = await office.add(INPUT)
    batch = await office.batches.claim(batch_id, LEASE)
    assert batch is not None
    assert await office.batches.cancel(batch_id) == "cancelling"
    saved = await office.batches.save(batch, LEASE, {"total": 6}, BatchStatus.IN_PROGRESS)
    assert saved.status == BatchStatus.CANCELLING
    assert await office.batches.cancel(batch_id) == "cancelling"
    await office.batches.end(batch, BatchStatus.CANCELLED, errors="", output=("", 0), error_output=("", 0))
    assert await office.batches.cancel(batch_id) == "cancelled"
    assert await office.batches.cancel("batch_none") == ""
    stored = await office.batch(batch_id)
    assert stored.cancelling_at
    assert stored.cancelled_at


async def test_of_one_owner_two_batches_are_worked_on_at_once_and_another_owner_need_not_wait(
    office: Office, config: Config
) -> None:
    mine = [await office.add(INPUT, owner="a") for _ in range(5)]
    other = await office.add(INPUT, owner="b")
    oldest = [
        batch_id for _, batch_id in await office.batches.open() if batch_id in mine
    ]  # of a millisecond, in no order
    runner = BatchRunner(office.front, office.batches, office.files)
    running = asyncio.create_task(runner.run())

    async def held() -> list[str]:
        return [batch_id for _, batch_id in await office.batches.open() if (await office.batch(batch_id)).lease_until]

    await until(lambda: _in(other, held))
    assert await held() == [*oldest[:2], other]
    running.cancel()
    await asyncio.wait({running})
    for batch_id in await held():
        assert await office.batches.claim(batch_id, LEASE) is not None, "given back when the process ended"


async def _in(item: str, items: Callable[[], Awaitable[list[str]]]) -> bool:
    return item in await items()


# Endings


async def begin(office: Office, text: bytes, jobs: int, **how: Any) -> tuple[str, BatchRun, "asyncio.Task[None]"]:
    """A batch whose first jobs are submitted, and that waits for them."""
    batch_id = await office.add(text, **how)
    run = await office.claim(batch_id)
    task = asyncio.create_task(serve(run))

    async def submitted() -> bool:
        return sum(load.waiting for load in await office.front.queue.load()) == jobs

    await until(submitted)
    return batch_id, run, task


async def test_a_cancel_stops_its_jobs_and_keeps_what_is_done(office: Office, hands: Hands) -> None:
    batch_id, run, task = await begin(office, INPUT, 3)
    await hands.credit()
    lease = await hands.lease()
    await hands.append(lease.job_id, lease.lease_id, 0, 1, end="finished", reason="length")
    office.ring(lease.job_id)
    assert await office.batches.cancel(batch_id) == "cancelling"
    await run.ledger.renew()
    await task
    batch = await office.batch(batch_id)
    assert (batch.status, batch.total, batch.completed, batch.failed) == (BatchStatus.CANCELLED, 6, 1, 5)
    assert office.names(batch.output_file_id) == ["n0"]
    assert office.names(batch.error_file_id) == ["n1", "n2", "n3", "n4", "odd"]
    codes = {result["custom_id"]: (result["error"] or {}).get("code") for result in office.results(batch.error_file_id)}
    assert codes == {**dict.fromkeys(("n1", "n2", "n3", "n4", "odd"), "batch_cancelled")}
    assert await hands.idle()
    await check_nothing_is_left(office, batch)


async def test_a_cancel_also_finds_the_jobs_of_a_process_that_died(office: Office, hands: Hands) -> None:
    """Without looking for them they would run on, and what is done of them would be thrown away."""
    batch_id, _, task = await begin(office, INPUT, 3)
    await end(task)
    await hands.credit()
    lease = await hands.lease()
    await hands.append(lease.job_id, lease.lease_id, 0, 1, end="finished", reason="length")
    await office.batches.cancel(batch_id)
    await office.let_lease_run_out(batch_id)
    batch = await office.run(batch_id)
    assert office.names(batch.output_file_id) == ["n0"]
    assert office.names(batch.error_file_id) == ["n1", "n2", "n3", "n4", "odd"]
    assert await hands.idle()


async def test_a_cancel_before_the_lines_are_counted(office: Office) -> None:
    batch_id = await office.add(INPUT)
    await office.batches.cancel(batch_id)
    batch = await office.run(batch_id)
    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.CANCELLED, 0, 6)
    assert not batch.output_file_id


async def test_when_its_window_is_over_the_rest_is_written_down_as_expired(office: Office, hands: Hands) -> None:
    batch_id, run, task = await begin(office, INPUT, 3)
    await office.redis.hset(office.keys.batch(batch_id), "expires_at", int(time.time()) - 1)
    await run.ledger.renew()
    await task
    batch = await office.batch(batch_id)
    assert (batch.status, batch.failed) == (BatchStatus.EXPIRED, 6)
    assert batch.expired_at >= batch.expires_at
    assert {result["error"]["code"] for result in office.results(batch.error_file_id)} == {"batch_expired"}
    assert await hands.idle()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (b"", "empty_file"),
        (b"\n \n", "empty_file"),
        (b"%PDF-1.7\nstream", "invalid_json_line"),
        (jsonl(request(1), request(2), request(1)), "duplicate_custom_id"),
        (jsonl(request(1)) * 50_001, "too_many_tasks"),
        (b"x" * (LINE_LIMIT + 1), "line_too_long"),
    ],
)
async def test_a_file_that_is_no_batch_fails_as_a_whole(office: Office, text: bytes, code: str) -> None:
    batch = await office.run(await office.add(text))
    assert batch.status == BatchStatus.FAILED
    assert [error["code"] for error in json.loads(batch.errors)] == [code]
    assert not batch.output_file_id + batch.error_file_id
    assert await office.front.queue.load() == [Load(unfinished=0, working=0)] * 4
    await check_nothing_is_left(office, batch)


async def test_a_batch_whose_input_was_deleted_fails_and_says_so(office: Office) -> None:
    batch_id = await office.add(INPUT)
    await office.files.remove((await office.batch(batch_id)).input_file_id)
    batch = await office.run(batch_id)
    assert batch.status == BatchStatus.FAILED
    assert [error["code"] for error in json.loads(batch.errors)] == ["file_not_found"]
    assert await office.batches.add(batch.input_file_id, 60, "-", {}) is None, "and no other one can begin with it"


async def test_a_bug_fails_the_batch_and_not_for_ever(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_args: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Line, "prepare", broken)
    batch_id = await office.add(INPUT)
    running = asyncio.create_task(BatchRunner(office.front, office.batches, office.files).run())
    await until(lambda: _is(office, batch_id, BatchStatus.FAILED))
    await end(running)
    assert "a bug" not in (await office.batch(batch_id)).errors


async def _is(office: Office, batch_id: str, status: BatchStatus) -> bool:
    return (await office.batch(batch_id)).status == status


# Jobs


async def test_its_jobs_leave_half_of_the_queue_to_others_and_wait_for_room(office: Office, hands: Hands) -> None:
    """Without the halves a batch would fill queue and owner's bound, and its owner's chats were answered 429."""
    for bound, waiting, most in ((2, 0, 1), (100, 4, 2)):
        office.front.config = replace(office.front.config, queue_bound=bound, batch_window=5)
        batch_id, _, task = await begin(office, INPUT, most, owner=f"o{waiting}", waiting=waiting)
        chat = f"chat {bound}"
        assert await hands.submit(chat, bound=bound, owner=f"o{waiting}", owner_bound=waiting) == "ok"
        await hands.cancel(chat)
        seen = []
        while not task.done():  # one after the other
            await hands.credit()
            answer = await hands.queue.lease("p1")
            if isinstance(answer, list):
                (lease,) = answer
                seen.append(lease.job_id)
                token = lease.job.prompt[0] + 1
                await hands.append(lease.job_id, lease.lease_id, 0, token, end="finished", reason="length")
                office.ring(lease.job_id)
            await asyncio.sleep(0.002)
        check_results(office, await office.batch(batch_id))
        assert seen == [job_id_of(batch_id, line) for line in range(1, 6)]


async def test_a_job_that_redis_has_forgotten_is_made_again(
    office: Office, hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "LOOK_SECONDS", 0.05)
    batch_id, _, task = await begin(office, jsonl(request(7)), 1)
    job_id = job_id_of(batch_id, 1)
    await hands.redis.delete(hands.keys.job(job_id), hands.keys.tokens(job_id))
    await until(lambda: hands.field(job_id, "status"))
    await hands.credit()
    lease = await hands.lease()
    await hands.append(job_id, lease.lease_id, 0, 8, end="finished", reason="length")
    await task
    assert [text_of(result) for result in office.results((await office.batch(batch_id)).output_file_id)] == ["<8>"]


async def test_a_job_that_did_not_finish_is_an_error_with_its_status(office: Office, hands: Hands) -> None:
    batch_id, _, task = await begin(office, jsonl(request(1), request(2)), 2)
    for line in (1, 2):
        await hands.queue.stop(job_id_of(batch_id, line), (Status.CANCELLED, Status.EXPIRED)[line - 1], "by hand")
        office.ring(job_id_of(batch_id, line))
    await task
    batch = await office.batch(batch_id)
    assert batch.status == BatchStatus.COMPLETED
    shown = [result["response"] for result in office.results(batch.error_file_id)]
    assert [response["status_code"] for response in shown] == [409, 504]
    assert [response["body"]["error"]["code"] for response in shown] == ["job_cancelled", "job_expired"]
    assert [response["request_id"] for response in shown] == [job_id_of(batch_id, line) for line in (1, 2)]


# Files and lists


async def test_what_is_another_keys_is_as_unknown(office: Office) -> None:
    owner, other = ApiKey(id="a"), ApiKey(id="b")
    batch_id = await office.add(INPUT, owner="a")
    file_id = (await office.batch(batch_id)).input_file_id
    for key in (owner, NOBODY):
        assert (await find_file(office.files, file_id, key)).id == file_id
        assert (await find_batch(office.batches, batch_id, key)).id == batch_id
    strangers = [(other, file_id, batch_id), (owner, f"file-{'0' * 32}", f"batch_{'0' * 32}"), (owner, "", "")]
    strangers += [(NOBODY, f"../../{file_id}", f"{batch_id}\n"), (NOBODY, f"{file_id}/..", f"{batch_id}*")]
    for key, file, batch in strangers:
        with pytest.raises(FileUnknown, match="there is no file"):
            await find_file(office.files, file, key)
        with pytest.raises(BatchUnknown, match="there is no batch"):
            await find_batch(office.batches, batch, key)
    with pytest.raises(ValueError, match="no id of a file"):
        office.files.path(f"../{file_id}")


async def test_results_are_their_owners_and_are_kept_as_long_as_the_batch(office: Office, worker: None) -> None:
    batch = await office.run(await office.add(INPUT, owner="a"))
    await check_nothing_is_left(office, batch)
    for file_id, name in ((batch.output_file_id, "output"), (batch.error_file_id, "error")):
        file = await office.files.find(file_id)
        assert file is not None
        assert (file.owner, file.purpose, file.filename) == ("a", "batch_output", f"{batch.id}_{name}.jsonl")
        assert file.bytes == office.files.path(file_id).stat().st_size
        assert 3500_000 < await office.redis.pttl(office.keys.file(file_id)) <= 3600_000
    assert 3500_000 < await office.redis.pttl(office.keys.batch(batch.id)) <= 3600_000
    assert await office.redis.zcard(office.keys.open_batches) == 0


async def test_the_input_is_kept_as_long_as_the_batch_may_need_it(office: Office) -> None:
    file_id = await office.upload(INPUT)
    await office.batches.add(file_id, 86400, "-", {})
    assert await office.redis.pttl(office.keys.file(file_id)) > 86400_000
    file = await office.files.find(file_id)
    assert file is not None
    assert file.expires_at > file.created_at + 86400


async def test_pages_have_each_record_once_and_what_has_expired_is_left_out(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "PAGE", 2)
    ids = [await office.upload(b"x", owner="ab"[number % 2]) for number in range(9)]
    for expired in (0, 4, 7):
        await office.redis.delete(office.keys.file(ids[expired]))
    mine = [file_id for number, file_id in enumerate(ids) if number % 2 == 0 and number not in (0, 4)]
    for oldest_first, limit in ((True, 1), (False, 1), (True, 2), (False, 5)):
        found: list[str] = []
        more = True
        while more:
            page, more = await office.files.catalogue.page(
                lambda stored: stored["owner"] == "a",
                after=found[-1] if found else "",
                limit=limit,
                oldest_first=oldest_first,
            )
            assert len(page) <= limit
            found += [stored["id"] for stored in page]
        assert found == (mine if oldest_first else mine[::-1])
    assert await office.redis.zcard(office.keys.files) == 6


async def test_of_an_upload_that_breaks_off_nothing_is_left(office: Office) -> None:
    with pytest.raises(RuntimeError):
        await _break_off(office)
    assert list(office.folder.iterdir()) == []


async def _break_off(office: Office) -> None:
    async with office.files.receive() as growing:
        await growing.write(b"x" * (3 << 20))
        raise RuntimeError


async def test_a_sweep_removes_what_nobody_knows_and_only_when_it_is_old(office: Office) -> None:
    batch_id = await office.add(INPUT)
    run = await office.claim(batch_id)
    await run.ledger.begin(1)
    await run.ledger.carry_on()
    run.ledger.close()
    batch = await office.batch(batch_id)
    needed = {batch.input_file_id, batch.output, batch.error_output}
    orphans = [(await office.upload(b"x")), (await office.upload(b"y"))]
    for orphan in orphans:
        await office.files.catalogue.forget(orphan)
    for file_id in {*needed, orphans[0]}:
        os.utime(office.files.path(file_id), (0, 0))
    (office.folder / "notes.txt").write_text("an operator's")
    os.utime(office.folder / "notes.txt", (0, 0))
    await office.files.sweep({batch.output, batch.error_output})
    assert {path.name for path in office.folder.iterdir()} == {*needed, orphans[1], "notes.txt"}


# The audit


async def test_the_audit_finds_and_mends_batches_that_nobody_would_find(office: Office, worker: None) -> None:
    audit = Audit(office.store, lease_seconds=0.02, tick_seconds=0.01)
    lost, mortal = await office.add(INPUT), await office.add(INPUT)
    over = (await office.run(await office.add(INPUT))).id
    assert await problems(audit) == []
    await office.redis.zrem(office.keys.open_batches, f"-/{lost}")
    await office.redis.expire(office.keys.batch(mortal), 100)
    await office.redis.persist(office.keys.batch(over))
    await office.redis.zadd(office.keys.open_batches, {f"-/batch_{'0' * 32}": 1})
    await office.redis.persist(office.keys.file((await office.batch(over)).output_file_id))
    assert len(found := await problems(audit)) == 5, found
    await audit.repair()
    assert await problems(audit) == []
    assert {batch_id for _, batch_id in await office.batches.open()} == {lost, mortal}
    assert await office.redis.pttl(office.keys.batch(mortal)) == -1
    assert await office.redis.pttl(office.keys.batch(over)) > 0
