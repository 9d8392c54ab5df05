"""Who asks: the keys that requests come with, and what each may do.

Redis has the SHA-256 of each secret, never the secret. A slow hash protects words that people think up; these secrets are 192
random bits, which nobody guesses at any speed. A key is found by that hash, in a table: secrets are never compared, so there
is nothing to time.
"""

import hashlib
import secrets
import time
from dataclasses import dataclass

import msgspec

from brokers.store import Store, translated
from pipeline.errors import KVRelayError

MARK = "kvr-"  # so that a secret in a log or a repository is known for one


class NameTaken(KVRelayError):
    """There is a key of that name, or with that id, already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """id: how jobs name their owner. per_minute: requests, waiting: jobs that may wait; 0 for any number.
    created, used: milliseconds of Unix time, the latter to the minute; 0 for never."""

    id: str
    name: str = ""
    admin: bool = False
    per_minute: int = 0
    waiting: int = 0
    created: int = 0
    used: int = 0

    def sees(self, owner: str) -> bool:
        """Whether it may look at what this owner made, and cancel it."""
        return self.admin or owner == self.id


#: Who asks where there are no keys at all.
NOBODY = ApiKey(id="-", admin=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """outcome: ok | limited (the key's rate is used up) | unknown (no such key) | open (there are no keys at all).
    remaining: requests of a limited key's that may come at once."""

    outcome: str
    key: ApiKey = NOBODY
    remaining: int = 0
    next_seconds: float = 0.0  # until one may come
    full_seconds: float = 0.0  # until as many may come as after a minute's rest


class ApiKeys:
    def __init__(self, store: Store) -> None:
        self._store = store

    @translated
    async def admit(self, secret: str, *, cost: int) -> Admission:
        """Whose secret it is ('' for none), and whether the request may go on. cost: what it counts for, 1 or 0."""
        outcome, *answer = await self._store.run("admit", _digest(secret) if secret else "", cost)
        if not answer:
            return Admission(outcome=outcome)
        record, remaining, next_ms, full_ms = answer
        return Admission(
            outcome=outcome,
            key=_decode(record),
            remaining=remaining,
            next_seconds=next_ms / 1000,
            full_seconds=full_ms / 1000,
        )

    @translated
    async def create(
        self, name: str, *, admin: bool = False, per_minute: int = 0, waiting: int = 0
    ) -> tuple[ApiKey, str]:
        """(the key, its secret, which nobody will ever see again). Raises NameTaken."""
        secret = MARK + secrets.token_urlsafe(24)
        digest = _digest(secret)
        key = ApiKey(
            id=digest[:12],
            name=name,
            admin=admin,
            per_minute=per_minute,
            waiting=waiting,
            created=int(time.time() * 1000),
        )
        if not await self._store.run("grant", digest, msgspec.json.encode(key).decode()):
            raise NameTaken(f"there is a key {name} already; `kvrelay keys list` shows it")
        return key, secret

    @translated
    async def all(self) -> list[ApiKey]:
        """The oldest first."""
        records = await self._store.redis.hvals(self._store.keys.api_keys)
        return sorted((_decode(record) for record in records), key=lambda key: key.created)

    @translated
    async def revoke(self, wanted: str) -> ApiKey | None:
        """wanted: its id or its name. None if there is no such key. Its jobs go on, and only an admin sees them."""
        for digest, record in (await self._store.redis.hgetall(self._store.keys.api_keys)).items():
            key = _decode(record)
            if wanted in (key.id, key.name):
                await self._store.redis.hdel(self._store.keys.api_keys, digest)
                return key
        return None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _decode(record: str) -> ApiKey:
    return msgspec.json.decode(record, type=ApiKey)
