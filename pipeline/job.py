"""One request, as it is stored in Redis and read by workers.

Only token ids are kept of a prompt, never its text or the chat messages.
"""

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import IntEnum
from typing import Any

from pipeline.constraint import Constraint
from pipeline.sampling import SamplingParams


class Priority(IntEnum):
    """The number is that of the queue. Queue 0 is for jobs that were handed back."""

    HIGH = 1
    NORMAL = 2
    LOW = 3


QUEUES = 1 + len(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a client asked for. `prompt`: token ids. `stop`: strings that end the text and, as a rule, are not part of it."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    kind: str = "text"  # "text" or "chat": only how it is shown
    min_tokens: int = 0  # so many come before anything may end the text
    stop_tokens: tuple[int, ...] = ()  # end the text as EOS does, also where EOS is ignored
    include_stop: bool = False  # the stop string stays in the text
    logprobs: int = -1  # k ≥ 0: the logprob of each token, and the k likeliest ones
    constraint: Constraint | None = None  # what the text must be

    def encode(self) -> str:
        """JSON, so that a person with redis-cli can read it."""
        return json.dumps(_asked(self), separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> "Job":
        asked = json.loads(text)
        sampling = SamplingParams(**asked["sampling"])
        sampling = replace(sampling, logit_bias=tuple((token, bias) for token, bias in sampling.logit_bias))
        constraint = Constraint(**asked["constraint"]) if "constraint" in asked else None
        lists = {name: tuple(asked[name]) for name in ("prompt", "stop", "stop_tokens") if name in asked}
        return cls(**{**asked, **lists, "sampling": sampling, "constraint": constraint})

    def digest(self) -> str:
        """Tells a repeated submission from another one under the same id."""
        return hashlib.sha256(self.encode().encode()).hexdigest()[:32]


def _asked(record: Any) -> dict[str, Any]:
    """Its fields, without those that are at their defaults: most of them are, in most jobs."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    defaults = {field.name: field.default for field in fields(record)}
    return {
        name: _asked(value) if is_dataclass(value) else value
        for name, value in values.items()
        if value != defaults[name]
    }
