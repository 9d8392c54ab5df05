"""The credits of one decode worker: who may send it a KV cache, and under which name."""

from collections.abc import Sequence

from brokers.store import Store, translated


class Credits:
    """Only their decode worker adds one; `lease` takes the one with the lowest score.

    A score is the number of places that are in use when the credit's turn comes: so the emptiest worker is fed first, also when
    several jobs are given out before it hears of any. In a worker's usual life none has to change: whoever is taken was the
    lowest, and the place that becomes free gets the score below the others.
    """

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._scores: dict[str, int] = {}  # as Redis has them

    @translated
    async def publish(self, fresh: Sequence[str], busy: int, *, listed: Sequence[str] = ()) -> None:
        """Lists fresh credits, and wakes the prefill workers if jobs wait. busy: places in use. Of the listed ones, one that
        was taken meanwhile does not come back."""
        free = set(range(busy, busy + len(listed) + len(fresh)))
        kept = {nonce: self._scores[nonce] for nonce in listed if self._scores.get(nonce) in free}
        changed = [nonce for nonce in listed if nonce not in kept]
        scores = dict(zip([*changed, *fresh], sorted(free - set(kept.values())), strict=True))
        if scores:
            pairs = [part for nonce, score in scores.items() for part in (score, f"{self._worker}/{nonce}")]
            await self._store.run("offer", len(changed), *pairs)
        self._scores = kept | scores

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
