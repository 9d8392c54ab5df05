"""What is counted over a system's life, and how: fields of one hash, for people with redis-cli and for `/metrics`.

    field                    counts                                               by
    -----------------------  ---------------------------------------------------  --------------------------
    attempts                 leases                                               lease
    prompt_tokens            of prompts whose first token came                    append
    generation_tokens        tokens in logs                                       append
    ended:finished:<reason>  jobs that the model brought to an end                finish
    ended:<status>           other ends                                           finish
    cancels:<phase>          cancels that took effect                             stop, settle
    requeues:<cause>         returns to the line                                  requeue, revive
    ttft, queue, e2e         histograms: to the first token, in line, to the end  append, step_out, finish
    itl, transfer            histograms: between tokens, of a KV cache            decode, prefill workers
    transfer_bytes           of KV caches                                         prefill workers
    transfer_failures:<why>  void, failed                                         prefill workers
    local_fallbacks          prompts that a decode worker had to prefill itself   decode workers

A histogram has `<name>:<bound>` for what was above the bound before and not above this one, and `<name>:us`, the sum. What
happens in Redis is counted there, in the same step; workers count the rest in memory, and report it at each heartbeat.
"""

from bisect import bisect_left
from collections.abc import Mapping

#: Upper bounds in seconds, of all histograms: those that vLLM has for the time to the first token.
BOUNDS: tuple[float, ...] = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)

#: The same as fields name them, in Lua too; the last one has no bound.
BUCKETS = (*(f"{bound:g}" for bound in BOUNDS), "inf")


def bucket(seconds: float) -> str:
    return BUCKETS[bisect_left(BOUNDS, seconds)]


def histogram(counts: Mapping[str, int], name: str) -> tuple[list[int], float]:
    """How many were not above each of BUCKETS, and the sum in seconds. Counts of bounds that an earlier version had are in."""
    found = {
        float(field.removeprefix(f"{name}:")): count
        for field, count in counts.items()
        if field.startswith(f"{name}:") and not field.endswith(":us")
    }
    below = [sum(count for bound, count in found.items() if bound <= float(limit)) for limit in BUCKETS]
    return below, counts.get(f"{name}:us", 0) / 1e6
