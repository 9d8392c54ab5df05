"""How the next token is drawn: the parameters, and the number that decides.

Token *i* of a job draws from a counter-based generator keyed by (seed, i), after Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3" (SC 2011); the keyed function is BLAKE2b (RFC 7693). There is no sampler state to move, so
a job that changes worker, or is replayed from its log, draws the same numbers. What is done with the number, given
logits, is in ``workers/sampler.py``.
"""

import hashlib
import struct
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0 and top_p 1 leave the distribution whole."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for token `index` of a job with this seed; the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<Q", index), key=struct.pack("<Q", seed), digest_size=8).digest()
    number: int = struct.unpack("<Q", digest)[0]
    return (number >> 11) / (1 << 53)
