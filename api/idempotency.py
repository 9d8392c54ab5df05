"""``Idempotency-Key``: a request that may come again is one job, however often it comes, also when that job is over.

Owner and key name the job, so tenants who chose the same key have jobs of their own. The digest of the body tells a repeat
from another request under a key that was used before. It lasts as long as the job's record.
"""

import hashlib
import json
import re
import uuid
from dataclasses import dataclass
from typing import Annotated

import msgspec
from falcon.asgi import Request
from msgspec import Meta

from pipeline.errors import InvalidRequest
from pipeline.sampling import MAX_SEED

HEADER = "Idempotency-Key"
FORM = "[!-~]{1,255}"  # what a header can carry on any way; a UUID has 36
#: As OpenAPI shows it.
AGAIN = {HEADER: Annotated[str, Meta(pattern=f"^{FORM}$")]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Of the jobs of a request, before they are made. digest: '' if it will not come again."""

    owner: str
    name: str
    digest: str = ""

    def job_ids(self, count: int) -> list[str]:
        return [job_id_of(self.owner, self.name, number) for number in range(count)]

    @property
    def seed(self) -> int:
        """For a request that names none: the same whenever its jobs are made anew."""
        return seed_of(job_id_of(self.owner, self.name, 0))

    @property
    def may_come_again(self) -> bool:
        """Then a client that leaves cancels nothing."""
        return bool(self.digest)


def identify(req: Request, body: bytes) -> Identity:
    """body: known to be JSON. Raises InvalidRequest for a key that is none."""
    key, owner = req.get_header(HEADER), req.context.key.id
    if key is None:
        return Identity(owner=owner, name=uuid.uuid4().hex)
    if not re.fullmatch(FORM, key):
        raise InvalidRequest(HEADER, "must be 1 to 255 visible ASCII characters, as in a UUID")
    return Identity(owner=owner, name=key, digest=digest_of(body))


def job_id_of(owner: str, idempotency_key: str, number: int) -> str:
    """number: of a request that makes several jobs."""
    name = json.dumps([owner, idempotency_key, number])
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def seed_of(job_id: str) -> int:
    return int.from_bytes(hashlib.sha256(job_id.encode()).digest()[:8]) & MAX_SEED


def digest_of(body: bytes) -> str:
    """The same for bodies that differ in the order of fields, in spaces or in escapes only."""
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:32]
