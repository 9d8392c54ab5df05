"""The bell wakes holders of jobs that ended, also after its connection was lost. It needs a channel of its own only."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from hands import Hands, end, until

from brokers.tombstones import Bell
from pipeline.states import Status


class Ears:
    def __init__(self, hands: Hands) -> None:
        self.heard: list[str] = []
        self._hands = hands

    async def connection(self) -> set[str]:
        """Ids of the connections that listen on any channel."""
        clients = await self._hands.redis.client_list(_type="pubsub")
        return {client["id"] for client in clients}

    async def listening(self) -> bool:
        ((_, listeners),) = await self._hands.redis.pubsub_numsub(self._hands.keys.tombstones)
        return int(listeners) == 1

    async def hear(self, *job_ids: str) -> None:
        async def all_heard() -> bool:
            return len(self.heard) >= len(job_ids)

        await until(all_heard)
        assert self.heard == list(job_ids)
        self.heard.clear()


@pytest.fixture
async def ears(hands: Hands) -> AsyncIterator[Ears]:
    ears = Ears(hands)
    listener = asyncio.create_task(Bell(hands.store).listen(ears.heard.append))
    await until(ears.listening)
    yield ears
    assert not listener.done()
    await end(listener)


async def test_the_bell_rings_once_for_every_way_in_which_a_job_ends(hands: Hands, ears: Ears) -> None:
    for job_id in ("cancelled", "expired"):
        await hands.submit(job_id)
        await hands.queue.stop(job_id, Status(job_id), "why")
        await ears.hear(job_id)
    lease = await hands.leased("finished")
    await hands.append("finished", lease.lease_id, 0, 1, end="finished", reason="stop")
    await ears.hear("finished")
    await hands.cancel("finished")
    await hands.submit("last")
    await hands.cancel("last")
    await ears.hear("last")


async def test_the_bell_is_silent_while_a_job_only_moves(hands: Hands, ears: Ears) -> None:
    lease_id = await hands.decoding("moves")
    await hands.queue.release("moves", lease_id, "x")
    await hands.submit("ends")
    await hands.cancel("ends")
    await ears.hear("ends")


async def test_the_bell_rings_again_after_its_connection_was_killed(hands: Hands, ears: Ears) -> None:
    before = await ears.connection()
    await hands.redis.client_kill_filter(_type="pubsub")

    async def connected_anew() -> bool:
        return bool(await ears.connection() - before) and await ears.listening()

    await until(connected_anew)
    await hands.submit("a")
    await hands.cancel("a")
    await ears.hear("a")


async def test_a_job_of_another_model_on_the_same_redis_does_not_ring(hands: Hands, ears: Ears) -> None:
    await hands.redis.publish("kvr:{another}:tombstones", "stranger")
    await hands.submit("a")
    await hands.cancel("a")
    await ears.hear("a")
