"""The credits of one decode worker: who may send it a KV cache, and under which name."""

from collections.abc import Sequence

from brokers.store import Store, translated


class Credits:
    """Only their decode worker adds one; `lease` takes the one with the lowest score."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker

    @translated
    async def publish(self, fresh: Sequence[str], busy: int, *, listed: Sequence[str] = ()) -> None:
        """Lists fresh credits, and wakes the prefill workers if jobs wait. busy: places in use, from which these and the listed
        ones get their scores. Of the listed ones, one that was taken meanwhile does not come back."""
        await self._store.run("offer", self._worker, busy, len(listed), *listed, *fresh)

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
