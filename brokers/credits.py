"""The credits of one decode worker: who may send it a KV cache, and under which name."""

from collections.abc import Sequence

from brokers.store import Store, translated


class Credits:
    """Only their decode worker adds one; `lease` takes the one with the lowest score."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker

    @translated
    async def publish(self, nonces: Sequence[str], busy: int) -> None:
        """Lists new credits, and wakes the prefill workers that wait for one. busy: places in use, the score."""
        async with self._store.redis.pipeline(transaction=True) as pipe:
            pipe.zadd(self._store.keys.credits, {f"{self._worker}/{nonce}": busy for nonce in nonces})
            pipe.xadd(self._store.keys.wake, {"w": "1"}, maxlen=1, approximate=False)
            await pipe.execute()

    @translated
    async def rescore(self, nonces: Sequence[str], busy: int) -> None:
        """XX: a credit that was taken meanwhile must not come back to life."""
        if nonces:
            members = {f"{self._worker}/{nonce}": busy for nonce in nonces}
            await self._store.redis.zadd(self._store.keys.credits, members, xx=True)

    @translated
    async def listed(self) -> set[str]:
        """The nonces that Redis lists for this worker."""
        mine = f"{self._worker}/"
        members: list[str] = await self._store.redis.zrange(self._store.keys.credits, 0, -1)
        return {member.removeprefix(mine) for member in members if member.startswith(mine)}

    @translated
    async def withdraw(self, nonces: Sequence[str]) -> None:
        if nonces:
            members = [f"{self._worker}/{nonce}" for nonce in nonces]
            await self._store.redis.zrem(self._store.keys.credits, *members)
