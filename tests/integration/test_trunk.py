"""The connection that all script calls share: each call gets its own answer, or is told that there is none."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis
from hands import Hands
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from brokers.store import Store
from brokers.trunk import Trunk

CALLS = 200


@pytest.fixture
async def trunk(store: Store) -> AsyncIterator[Trunk]:
    retry = Retry(ConstantBackoff(0.01), retries=2, supported_errors=(redis.ConnectionError,))
    trunk = Trunk(store.redis.connection_pool, seconds=0.3, retry=retry)
    yield trunk
    await trunk.close()


async def echo(trunk: Trunk, number: int) -> None:
    assert await trunk.call("ECHO", f"call {number}") == f"call {number}"


async def test_any_number_of_calls_under_way_share_one_connection(trunk: Trunk) -> None:
    ids = await asyncio.gather(*(trunk.call("CLIENT", "ID") for _ in range(CALLS)))
    assert len(set(ids)) == 1


async def test_what_redis_refuses_is_told_to_the_one_who_asked(trunk: Trunk) -> None:
    answers = await asyncio.gather(
        trunk.call("ECHO", "a"), trunk.call("ECHO"), trunk.call("ECHO", "b"), return_exceptions=True
    )
    assert isinstance(answers[1], redis.ResponseError)
    assert [answers[0], answers[2]] == ["a", "b"]


async def test_calls_whose_connection_was_lost_are_made_again(trunk: Trunk, hands: Hands) -> None:
    """Without the retry, each call under way would end as if Redis were away."""
    for _ in range(5):
        lost = await trunk.call("CLIENT", "ID")
        calls = [asyncio.create_task(echo(trunk, number)) for number in range(CALLS)]
        await hands.redis.client_kill_filter(_id=str(lost))
        await asyncio.gather(*calls)
        await hands.redis.client_kill_filter(_id=str(await trunk.call("CLIENT", "ID")))  # with nothing under way
        await echo(trunk, 0)


async def test_a_connection_that_hangs_is_given_up_and_everybody_on_it_is_told(trunk: Trunk, hands: Hands) -> None:
    """Without, one whose other end is gone would be waited for by each call in turn."""
    hung = await trunk.call("CLIENT", "ID")
    await hands.redis.client_pause(2000)
    try:
        calls = (trunk.call("SET", f"{hands.keys.prefix}x", number) for number in range(10))
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 1.0)
    finally:
        await hands.redis.client_unpause()
    assert {type(answer) for answer in answers} == {redis.TimeoutError}
    assert await trunk.call("CLIENT", "ID") != hung


async def test_scripts_are_there_again_after_redis_has_forgotten_them(hands: Hands) -> None:
    assert await hands.submit("a") == "ok"
    await hands.redis.script_flush()
    assert await hands.submit("a") == "exists"
