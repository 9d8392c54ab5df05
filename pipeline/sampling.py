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
    """temperature 0 is greedy; the other defaults leave the distribution as it is. What each does is said in vLLM's words.

    presence and frequency: of what was generated; repetition: of the prompt, too. logit_bias: (token, what is added).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for token `index` of a job with this seed; the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<Q", index), key=struct.pack("<Q", seed), digest_size=8).digest()
    number: int = struct.unpack("<Q", digest)[0]
    return (number >> 11) / (1 << 53)
