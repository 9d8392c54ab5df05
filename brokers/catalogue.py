"""Records of one kind in the order in which they were made: a hash for each, and a sorted set of their ids."""

from collections.abc import Callable, Mapping, Sequence

from brokers.store import Store, translated

PAGE = 100  # records read at once

Fields = Mapping[str, str]


class Catalogue:
    def __init__(self, store: Store, index: str, key: Callable[[str], str]) -> None:
        """index: the sorted set; key: of the hash of an id."""
        self._redis = store.redis
        self._index = index
        self._key = key

    @translated
    async def find(self, record_id: str) -> Fields:
        """{} if there is no such record."""
        found: Fields = await self._redis.hgetall(self._key(record_id))
        return found

    @translated
    async def page(
        self, wanted: Callable[[Fields], bool], *, after: str, limit: int, oldest_first: bool
    ) -> tuple[list[Fields], bool]:
        """Up to `limit` wanted records after the one with that id ('' for the first), and whether there are more."""
        start = 0
        if after:
            rank = await (self._redis.zrank if oldest_first else self._redis.zrevrank)(self._index, after)
            if rank is None:
                return [], False
            start = rank + 1
        found: list[Fields] = []
        while len(found) <= limit:
            ids = await self._redis.zrange(self._index, start, start + PAGE - 1, desc=not oldest_first)
            if not ids:
                break
            records = await self._records(ids)
            found += [record for record in records if wanted(record)]
            start += len(records)  # those that have expired are out of the index
        return found[:limit], len(found) > limit

    async def _records(self, ids: Sequence[str]) -> list[Fields]:
        async with self._redis.pipeline(transaction=False) as pipe:
            for record_id in ids:
                pipe.hgetall(self._key(record_id))
            found = await pipe.execute()
        if gone := [record_id for record_id, fields in zip(ids, found, strict=True) if not fields]:
            await self._redis.zrem(self._index, *gone)
        return [fields for fields in found if fields]

    @translated
    async def forget(self, record_id: str) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._key(record_id))
            pipe.zrem(self._index, record_id)
            await pipe.execute()
