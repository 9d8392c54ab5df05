"""The life of a job, as one table.

A job waits (`queued`), a prefill worker leases it (`prefilling`), a decode worker takes it over (`decoding`), and it
ends in one of four ways. Whoever holds the lease may lose it: then the job is `queued` again for another attempt.
`cancel` and `expire` are legal in every state that is not over, which is what makes them take effect at once.

The Lua scripts get these names from here, and the diagram in docs/architecture.md is drawn from here.
"""

from enum import Enum


class Status(str, Enum):
    QUEUED = "queued"  # waits in a queue; nobody holds a lease
    PREFILLING = "prefilling"  # a prefill worker computes and sends the KV cache
    DECODING = "decoding"  # a decode worker has the KV cache and produces tokens
    FINISHED = "finished"  # the model came to an end: stop or length
    FAILED = "failed"  # given up: every attempt has its reason
    CANCELLED = "cancelled"  # somebody asked for it
    EXPIRED = "expired"  # its deadline passed

    __str__ = str.__str__


TERMINAL = frozenset({Status.FINISHED, Status.FAILED, Status.CANCELLED, Status.EXPIRED})
OPEN = frozenset(Status) - TERMINAL

_Q, _P, _D = Status.QUEUED, Status.PREFILLING, Status.DECODING

#: (from, event) → to. What is not here cannot happen.
MOVES: dict[tuple[Status, str], Status] = {
    (_Q, "lease"): _P,
    (_P, "handover"): _D,
    (_P, "release"): _Q,
    (_D, "release"): _Q,
    (_P, "finish"): Status.FINISHED,
    (_D, "finish"): Status.FINISHED,
    (_Q, "give up"): Status.FAILED,
    (_P, "give up"): Status.FAILED,
    (_D, "give up"): Status.FAILED,
    **{(status, "cancel"): Status.CANCELLED for status in (_Q, _P, _D)},
    **{(status, "expire"): Status.EXPIRED for status in (_Q, _P, _D)},
}


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    edges: dict[tuple[Status, Status], list[str]] = {}
    for (source, event), target in MOVES.items():
        edges.setdefault((source, target), []).append(event)
    lines = ["stateDiagram-v2", "    [*] --> queued: submit"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in edges.items()]
    lines += [f"    {status} --> [*]" for status in Status if status in TERMINAL]
    return "\n".join(lines)


if __name__ == "__main__":
    print(diagram())
