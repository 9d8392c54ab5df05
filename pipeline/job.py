"""One request, as it is stored in Redis and read by workers.

Only token ids are kept of a prompt, never its text or the chat messages.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from enum import IntEnum

from pipeline.sampling import SamplingParams


class Priority(IntEnum):
    """The number is that of the queue. Queue 0 is for jobs that were handed back."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


QUEUES = 1 + len(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client asked for. `prompt`: token ids. `stop`: strings that end the text and are not part of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    kind: str = "text"  # "text" or "chat": only how it is shown

    def encode(self) -> str:
        """JSON, so that a person with redis-cli can read it."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "Job":
        fields = json.loads(text)
        job = cls(**{**fields, "sampling": SamplingParams(**fields["sampling"])})
        return replace(job, prompt=tuple(job.prompt), stop=tuple(job.stop))

    def digest(self) -> str:
        """Tells a repeated submission from another one under the same id."""
        return hashlib.sha256(self.encode().encode()).hexdigest()[:32]
