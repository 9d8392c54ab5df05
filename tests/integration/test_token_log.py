"""Many followers on one reader: each sees every entry once and in order, wherever it joins and however slowly it reads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from hands import WAIT_SECONDS, Hands, end, shown, until

from brokers.store import BLOCK_SECONDS
from brokers.token_log import BACKLOG, Entry, LogReader

SOON = BLOCK_SECONDS / 2  # sooner than a blocked read would end by itself


@pytest.fixture
async def reader(hands: Hands) -> AsyncIterator[LogReader]:
    reader = LogReader(hands.store)
    running = asyncio.create_task(reader.run())
    yield reader
    assert not running.done()
    await end(running)


class Writer:
    """Holds a job and appends token i = i."""

    def __init__(self, hands: Hands, job_id: str, lease_id: str) -> None:
        self._hands, self.job_id, self._lease_id = hands, job_id, lease_id
        self.written = 0

    async def write(self, count: int = 1, end: str = "") -> None:
        tokens = range(self.written, self.written + count)
        self.written += count
        answer = await self._hands.append(self.job_id, self._lease_id, tokens.start, *tokens, end=end, reason="length")
        assert answer == str(self.written)

    async def end(self) -> None:
        await self.write(0, end="finished")


async def writer(hands: Hands, job_id: str = "a") -> Writer:
    return Writer(hands, job_id, (await hands.leased(job_id)).lease_id)


async def all_of(reader: LogReader, job_id: str = "a", after: int = 0) -> list[Entry]:
    """Everything from `after` to the end, in the order it came."""
    entries: list[Entry] = []
    async with aclosing(reader.follow([job_id], after)) as batches, asyncio.timeout(WAIT_SECONDS):
        async for _, batch in batches:
            entries += batch
    return entries


def whole(length: int, after: int = 0) -> list[int | str]:
    return [*range(after, length), "finished"]


async def started(reader: LogReader, followers: int) -> None:
    """Until so many follow."""

    async def following() -> bool:
        return len(reader._followers) >= followers

    await until(following)


async def blocked(hands: Hands) -> int:
    """Until the reader blocks in XREAD on this test's logs; the id of its connection."""

    async def reading() -> int:
        clients = await hands.redis.client_list()
        return next((int(c["id"]) for c in clients if c["cmd"] == "xread" and "b" in c["flags"]), 0)

    found: int = await until(reading)
    return found


async def test_every_follower_sees_every_entry_once_and_in_order(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    followers = [asyncio.create_task(all_of(reader)) for _ in range(50)]
    await started(reader, 50)
    for _ in range(100):
        await log.write()
    await log.end()
    for entries in await asyncio.gather(*followers):
        assert shown(entries) == whole(100)
        assert [entry.index for entry in entries] == list(range(101))
        assert entries[7].text == "<7>"
        assert (entries[-1].end, entries[-1].reason) == ("finished", "length")


async def test_followers_of_many_jobs_get_their_own_job_each(hands: Hands, reader: LogReader) -> None:
    logs = [await writer(hands, f"job{number}") for number in range(20)]
    followers = [asyncio.create_task(all_of(reader, log.job_id)) for log in logs]
    await started(reader, 20)
    for step in range(20):
        await asyncio.gather(*(log.write() for log in logs[step:]))
    for log in logs:
        await log.end()
    assert [shown(entries) for entries in await asyncio.gather(*followers)] == [whole(log.written) for log in logs]


async def test_a_follower_may_join_at_any_time_and_from_any_index(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    followers: list[tuple[int, asyncio.Task[list[Entry]]]] = []
    for step in range(40):
        await log.write()
        for after in {0, step // 2, step, step + 1}:
            followers.append((after, asyncio.create_task(all_of(reader, after=after))))
            await asyncio.sleep(0)
    await log.end()
    for after, follower in followers:
        assert shown(await follower) == whole(40, after), after


async def test_a_follower_of_a_log_that_has_ended_gets_all_of_it(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    await log.write(5, end="finished")
    assert shown(await all_of(reader)) == whole(5)
    assert shown(await all_of(reader, after=3)) == whole(5, 3)
    assert shown(await all_of(reader, after=5)) == ["finished"]


async def test_a_log_longer_than_the_backlog_comes_whole(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    await log.write(3 * BACKLOG + 7, end="finished")
    assert shown(await all_of(reader)) == whole(3 * BACKLOG + 7)


async def test_an_index_beyond_the_end_waits_until_the_log_gets_there(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    await log.write(3)
    async with aclosing(reader.follow(["a"], after=5)) as batches:
        assert await anext(batches) == (0, [])  # a second without news
        await log.write(3, end="finished")
        entries: list[Entry] = []
        async for _, batch in batches:
            entries += batch
    assert shown(entries) == whole(6, 5)


async def test_a_follower_of_a_job_that_does_not_exist_yet_waits_for_it(hands: Hands, reader: LogReader) -> None:
    follower = asyncio.create_task(all_of(reader))
    await started(reader, 1)
    log = await writer(hands)
    await log.write(2, end="finished")
    assert shown(await follower) == whole(2)


async def test_several_logs_are_followed_as_one_each_to_its_end(hands: Hands, reader: LogReader) -> None:
    logs = [await writer(hands, job_id) for job_id in ("a", "b", "c")]
    seen: dict[int, list[Entry]] = {0: [], 1: [], 2: []}
    async with aclosing(reader.follow(["a", "b", "c"])) as batches, asyncio.timeout(WAIT_SECONDS):
        await logs[1].write(3, end="finished")
        pending = asyncio.create_task(anext(batches))
        number, entries = await pending
        seen[number] += entries
        await logs[0].write(2, end="finished")
        await logs[2].write(1, end="finished")
        async for number, entries in batches:
            seen[number] += entries
    assert [shown(seen[number]) for number in range(3)] == [whole(2), whole(3), whole(1)]


async def test_a_newcomer_does_not_wait_for_the_read_that_blocks_on_the_others(hands: Hands, reader: LogReader) -> None:
    first, second = await writer(hands, "first"), await writer(hands, "second")
    other = asyncio.create_task(all_of(reader, "first"))
    await started(reader, 1)
    await second.write(2, end="finished")
    await blocked(hands)
    async with asyncio.timeout(SOON):
        assert shown(await all_of(reader, "second")) == whole(2)
    await first.end()
    await other


async def test_a_follower_that_does_not_read_holds_nobody_up_and_gets_everything_later(
    hands: Hands, reader: LogReader
) -> None:
    count = 3 * BACKLOG
    log = await writer(hands)
    async with aclosing(reader.follow(["a"])) as slow:
        pending = asyncio.create_task(anext(slow))
        await started(reader, 1)
        await log.write()
        _, entries = await pending  # and from here on it does not read
        fast = asyncio.create_task(all_of(reader))
        for _ in range(count // 64):
            await log.write(64)
        await log.end()
        assert shown(await fast) == whole(count + 1)
        (follower,) = reader._followers
        assert len(follower.entries) < 2 * BACKLOG
        async with asyncio.timeout(WAIT_SECONDS):
            async for _, batch in slow:
                entries += batch
    assert shown(entries) == whole(count + 1)


async def test_the_reader_goes_on_when_its_connection_is_killed(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    follower = asyncio.create_task(all_of(reader))
    await started(reader, 1)
    await log.write(3)
    for _ in range(2):
        await hands.redis.client_kill_filter(_id=str(await blocked(hands)))
        await log.write(3)
    await log.end()
    assert shown(await follower) == whole(9)


async def test_a_newcomer_does_not_wait_either_once_the_reader_has_a_new_connection(
    hands: Hands, reader: LogReader
) -> None:
    first, second = await writer(hands, "first"), await writer(hands, "second")
    batches = reader.follow(["first"])
    pending = asyncio.create_task(anext(batches))
    killed = await blocked(hands)
    await hands.redis.client_kill_filter(_id=str(killed))

    async def blocked_anew() -> bool:
        return await blocked(hands) != killed

    await until(blocked_anew)
    await first.write()  # ends the read that was under way when the connection was lost
    assert shown((await pending)[1]) == [0]
    await blocked(hands)
    await second.write(2, end="finished")
    async with asyncio.timeout(SOON):
        assert shown(await all_of(reader, "second")) == whole(2)
    await batches.aclose()


async def test_a_reader_that_was_idle_for_long_serves_the_next_follower(hands: Hands, reader: LogReader) -> None:
    for job_id in ("first", "second"):
        log = await writer(hands, job_id)
        await log.write(1, end="finished")
        assert shown(await all_of(reader, job_id)) == whole(1)
        assert not reader._followers


async def test_a_follower_that_leaves_is_forgotten_and_the_others_go_on(hands: Hands, reader: LogReader) -> None:
    log = await writer(hands)
    stays, leaves = (asyncio.create_task(all_of(reader)) for _ in range(2))
    await started(reader, 2)
    await end(leaves)
    assert len(reader._followers) == 1
    await log.write(2, end="finished")
    assert shown(await stays) == whole(2)


async def test_read_answers_from_any_index_and_exists_tells_a_log_from_none(hands: Hands) -> None:
    log = await writer(hands)
    assert not await hands.log.exists("a")
    await log.write(3, end="finished")
    assert await hands.log.exists("a")
    for after in (0, 2, 3, 9):
        expected = [part for index, part in enumerate(whole(3)) if index >= after]
        assert shown(await hands.log.read("a", after)) == expected
