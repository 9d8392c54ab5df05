"""Which workers live. Each one's hash is renewed by its keeper and expires by itself when nobody does."""

from collections.abc import Mapping

from brokers.store import Store, translated

Facts = Mapping[str, str | int | float]


class Registry:
    def __init__(self, store: Store, lifetime_seconds: float) -> None:
        """lifetime: how long a worker that says nothing counts as alive."""
        self._store = store
        self._lifetime_ms = int(lifetime_seconds * 1000)

    @translated
    async def announce(self, worker: str, facts: Facts) -> None:
        """The worker lives, and these are its facts and figures."""
        async with self._store.redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._store.keys.worker(worker), mapping=dict(facts))
            pipe.pexpire(self._store.keys.worker(worker), self._lifetime_ms)
            pipe.sadd(self._store.keys.workers, worker)
            await pipe.execute()

    @translated
    async def mark(self, worker: str, state: str) -> None:
        """Notes that a worker is stopped or wedged, without renewing its life."""
        await self._store.run("mark", worker, state)

    @translated
    async def leave(self, worker: str) -> None:
        async with self._store.redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._store.keys.worker(worker))
            pipe.srem(self._store.keys.workers, worker)
            await pipe.execute()

    @translated
    async def living(self) -> dict[str, dict[str, str]]:
        """worker id → its facts; those that are gone are forgotten."""
        workers = sorted(await self._store.redis.smembers(self._store.keys.workers))
        async with self._store.redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.hgetall(self._store.keys.worker(worker))
            found: list[dict[str, str]] = await pipe.execute()
        gone = [worker for worker, facts in zip(workers, found, strict=True) if not facts]
        if gone:
            await self._store.redis.srem(self._store.keys.workers, *gone)
        return {worker: facts for worker, facts in zip(workers, found, strict=True) if facts}
