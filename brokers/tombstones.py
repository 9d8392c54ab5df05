"""The bell: ids of jobs that just ended. It only wakes holders who would have found out anyway, from renew or append."""

import asyncio
import logging
from collections.abc import Callable

from brokers.store import BLOCK_SECONDS, Store, heed_cancel, translated
from pipeline.errors import RedisAway, RedisRefused

log = logging.getLogger(__name__)


class Bell:
    def __init__(self, store: Store) -> None:
        self._store = store

    async def listen(self, rung: Callable[[str], None]) -> None:
        """Calls `rung(job id)` for every job that ends, for ever; a lost connection is made anew."""
        while True:
            try:
                await self._listen(rung)
            except (RedisAway, RedisRefused) as error:
                log.warning("the bell is silent: %s", error, extra={"action": "bell_lost"})
                await asyncio.sleep(BLOCK_SECONDS / 2)

    @translated
    async def _listen(self, rung: Callable[[str], None]) -> None:
        async with self._store.redis.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(self._store.keys.tombstones)
            while True:
                heed_cancel()
                message = await pubsub.get_message(timeout=BLOCK_SECONDS)
                if message is not None:
                    rung(message["data"])
