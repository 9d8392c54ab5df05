"""What becomes of a worker when one of its parts fails."""

import asyncio

import pytest

from pipeline.config import Config
from pipeline.errors import RedisRefused
from workers.station import Station


async def spawned(station: Station, error: Exception) -> None:
    async def part() -> None:
        raise error

    station.spawn(part())
    async with asyncio.timeout(5):
        while station._tasks:
            await asyncio.sleep(0)


async def test_a_part_that_fails_unexpectedly_ends_the_worker_as_failed(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    station = Station("decode", config, "sim")
    await spawned(station, KeyError("a bug"))
    assert station.draining.is_set()
    assert station.failed
    assert "a part of" in caplog.text
    await station.leave()
    station.vitals.close()


async def test_what_redis_did_not_take_ends_no_worker(config: Config) -> None:
    station = Station("decode", config, "sim")
    await spawned(station, RedisRefused("out of memory"))
    assert not station.draining.is_set()
    assert not station.failed
    await station.leave()
    station.vitals.close()
