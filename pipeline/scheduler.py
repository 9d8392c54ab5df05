"""What a decode worker has room for: slots, waiting places, and the credits that promise them.

Capacity = slots + waiting. Each unit of it is in exactly one state:

    owed ──publish──▶ listed ──OPEN──▶ arriving ──handover──▶ waiting ──admit──▶ running ──▶ owed
                        └─void─▶ owed      └─dropped─▶ owed

`waiting` places let the next prefill and transfer overlap this decode, also with one slot. Time comes in as an argument.
"""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class Scheduler(Generic[S]):
    """S: what runs in a slot. No I/O; the decode loop asks and acts."""

    def __init__(self, *, slots: int, waiting: int) -> None:
        self.slots = slots
        self.capacity = slots + waiting
        self.listed: dict[str, float | None] = {}  # nonce → when it was first seen missing from Redis
        self.arriving: set[str] = set()
        self.waiting: deque[S] = deque()
        self.running: dict[int, S] = {}

    @property
    def busy(self) -> int:
        """Places in use: the score of this worker's credits, so that the emptiest worker is fed first."""
        return len(self.arriving) + len(self.waiting) + len(self.running)

    @property
    def owed(self) -> int:
        """Credits to publish now."""
        return self.capacity - self.busy - len(self.listed)

    def publish(self, nonce: str) -> None:
        self.listed[nonce] = None

    def open(self, nonce: str) -> bool:
        """Uses the credit up. False: it is not (or no longer) one of ours."""
        if nonce not in self.listed:
            return False
        del self.listed[nonce]
        self.arriving.add(nonce)
        return True

    def drop(self, nonce: str) -> None:
        """The transfer came to nothing."""
        self.arriving.discard(nonce)

    def arrived(self, nonce: str, sequence: S) -> None:
        """The KV cache is whole and the job is ours: it waits for a slot."""
        self.arriving.remove(nonce)
        self.waiting.append(sequence)

    def admit(self) -> list[tuple[int, S]]:
        """Moves waiting sequences into free slots, the lowest slot first, so that a batch stays dense."""
        free = sorted(set(range(self.slots)) - self.running.keys())
        admitted = []
        while self.waiting and free:
            slot = free.pop(0)
            self.running[slot] = self.waiting.popleft()
            admitted.append((slot, self.running[slot]))
        return admitted

    def remove(self, sequence: S) -> int | None:
        """Forgets a sequence wherever it is; answers the slot to evict, None if it had none."""
        for slot, other in self.running.items():
            if other == sequence:
                del self.running[slot]
                return slot
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        return None

    def audit(self, in_redis: set[str], now: float, open_seconds: float) -> list[str]:
        """Compares with the credits that Redis lists for this worker; answers those to take out of the list.

        A credit that is gone from Redis for `open_seconds` without an OPEN was lost on the way: it is void, its place
        is owed again.
        """
        for nonce, missing_since in list(self.listed.items()):
            if nonce in in_redis:
                self.listed[nonce] = None
            elif missing_since is None:
                self.listed[nonce] = now
            elif now - missing_since >= open_seconds:
                del self.listed[nonce]
        return sorted(in_redis - self.listed.keys())
