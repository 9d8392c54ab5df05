"""One measurement: the servers in turns, round for round, each with the same requests in the same round."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from time import perf_counter, process_time

from bench.arrivals import closed_loop, interference, open_loop, poisson
from bench.client import Client
from bench.trace import Trace
from bench.workload import Request, take
from pipeline.errors import KVRelayError


class WarmupFailed(KVRelayError):
    """The requests before those that count: the others would have failed, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intrusion:
    """Long prompts among decoding streams. every: seconds; 0: back to back."""

    requests: Iterator[Request]
    every: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """rate: of an open loop, in requests a second; 0: a closed loop of so many streams."""

    workload: Iterator[Request]
    requests: int
    warmup: int
    streams: int
    rate: float
    rounds: int
    seed: int
    intrusion: Intrusion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one server did. cpu: share of a core that the client itself took."""

    traces: Sequence[Trace]
    intruders: Sequence[Trace]
    started: float
    cpu: float


async def measure(
    plan: Plan, clients: Sequence[Client], *, allow_failures: bool, over: Callable[[Client, Round], None]
) -> None:
    """Calls `over` after each round of each server. Raises Away, WarmupFailed."""
    async with AsyncExitStack() as stack:
        for client in clients:
            await stack.enter_async_context(client)
            await client.enter()
        warmup = take(plan.workload, plan.warmup)
        if plan.intrusion and warmup:
            warmup += take(plan.intrusion.requests, 1)
        for client in clients:
            traces = await closed_loop(client.ask, warmup, plan.streams)
            failed = [trace for trace in traces if trace.failure]
            if failed and not allow_failures:
                message = f"{failed[0].failure}: {failed[0].said}"
                raise WarmupFailed(f"{len(failed)} of {len(traces)} first requests to {client.server.name}: {message}")
        for number in range(plan.rounds):
            requests = take(plan.workload, plan.requests)
            for client in clients:
                over(client, await _round(plan, client, requests, number))


async def _round(plan: Plan, client: Client, requests: Sequence[Request], number: int) -> Round:
    started, cpu = perf_counter(), process_time()
    intruders: Sequence[Trace] = ()
    if plan.intrusion:
        intrusion = plan.intrusion
        traces, intruders = await interference(client.ask, requests, plan.streams, intrusion.requests, intrusion.every)
    elif plan.rate:
        times = poisson(plan.rate, len(requests), Random(f"{plan.seed} arrivals {number}"))
        traces = await open_loop(client.ask, requests, times)
    else:
        traces = await closed_loop(client.ask, requests, plan.streams)
    used = (process_time() - cpu) / max(1e-6, perf_counter() - started)
    return Round(traces=traces, intruders=intruders, started=started, cpu=used)
