"""When requests are sent: as time goes by (open loop), or each when the one before has its answer (closed loop)."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from time import perf_counter

from bench.trace import Trace
from bench.workload import Request

#: Sends a request that is due at a time, and answers what it took; never raises for a request that fails.
Ask = Callable[[Request, float], Awaitable[Trace]]


def poisson(rate: float, count: int, random: Random) -> list[float]:
    """Seconds from the start; at an infinite rate all at once."""
    if math.isinf(rate):
        return [0.0] * count
    at, times = 0.0, []
    for _ in range(count):
        at += random.expovariate(rate)
        times.append(at)
    return times


async def open_loop(ask: Ask, requests: Sequence[Request], times: Sequence[float]) -> list[Trace]:
    start = perf_counter()

    async def at(request: Request, due: float) -> Trace:
        await asyncio.sleep(max(0.0, due - perf_counter()))
        return await ask(request, due)

    asking = [at(request, start + seconds) for request, seconds in zip(requests, times, strict=True)]
    return await asyncio.gather(*asking)


async def closed_loop(ask: Ask, requests: Sequence[Request], streams: int) -> list[Trace]:
    waiting = iter(requests)

    async def stream() -> list[Trace]:
        return [await ask(request, perf_counter()) for request in waiting]

    return [trace for traces in await asyncio.gather(*(stream() for _ in range(streams))) for trace in traces]


async def interference(
    ask: Ask, requests: Sequence[Request], streams: int, intruders: Iterator[Request], every: float
) -> tuple[list[Trace], list[Trace]]:
    """A closed loop, and what comes between it: an intruder every so many seconds until it is over; 0: back to back."""
    start = perf_counter()
    decoding = asyncio.create_task(closed_loop(ask, requests, streams))
    intruding: list[asyncio.Future[Trace]] = []
    while not decoding.done():
        intruder = await asyncio.to_thread(next, intruders)  # to tokenize it here would hold up the streams' clocks
        due = start + every * (len(intruding) + 1) if every else perf_counter()
        await asyncio.wait({decoding}, timeout=max(0.0, due - perf_counter()))
        if decoding.done():
            break
        intruding.append(asyncio.ensure_future(ask(intruder, due)))
        if not every:
            await intruding[-1]
    return await decoding, await asyncio.gather(*intruding)
