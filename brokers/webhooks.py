"""Webhooks that are owed: whose, where to, and when the next try is due."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from brokers.store import Store, translated

TRIES = 6
FIRST_SECONDS = (
    15.0  # from the first try to the second; each pause after it is three times as long: half an hour in all
)
JITTER = 0.3  # longer by so much at most, so that what failed together is not tried again together


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """How a job ended, and who wants to know. target: host and port of the URL; ended: milliseconds of Unix time."""

    job_id: str
    target: str
    url: str
    tries: int  # with this one
    status: str
    reason: str
    ended: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def is_last_try(self) -> bool:
        return self.tries >= TRIES


class Webhooks:
    def __init__(self, store: Store) -> None:
        self._store = store

    @translated
    async def take(self, busy: Iterable[str]) -> Webhook | None:
        """One that is due, and not for a target in `busy`. The next try of it is due in a while, unless it is closed before."""
        pause = 1000 * FIRST_SECONDS * random.uniform(1, 1 + JITTER)
        while (answer := await self._store.run("deliver", pause, TRIES, *busy)) == ["more"]:
            pass
        if not answer:
            return None
        job_id, target, url, tries, status, reason, ended, prompt, completion = answer
        return Webhook(
            job_id=job_id,
            target=target,
            url=url,
            tries=int(tries),
            status=status,
            reason=reason,
            ended=int(ended),
            prompt_tokens=int(prompt),
            completion_tokens=int(completion),
        )

    @translated
    async def close(self, webhook: Webhook, said: str) -> None:
        """It has arrived, or was given up; the job's timeline says which."""
        await self._store.run("delivered", webhook.job_id, webhook.ended, said, jobs=[webhook.job_id])
