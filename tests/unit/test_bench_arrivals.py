"""When `kvrelay bench` asks."""

import asyncio
import math
from collections.abc import Iterator
from itertools import count, pairwise
from random import Random
from statistics import fmean, pstdev
from time import perf_counter

import pytest

from bench.arrivals import closed_loop, interference, open_loop, poisson
from bench.trace import Trace
from bench.workload import Request


class Server:
    """Answers each request after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.working = self.most = 0
        self.asked: list[str] = []

    async def ask(self, request: Request, due: float) -> Trace:
        sent = perf_counter()
        self.asked.append(request.prompt)
        self.working += 1
        self.most = max(self.most, self.working)
        await asyncio.sleep(self.seconds)
        self.working -= 1
        return Trace(due=due, sent=sent, asked=1, prompt_tokens=1, end=perf_counter())


def requests() -> Iterator[Request]:
    return (Request(prompt=str(number), prompt_tokens=1, output_tokens=1) for number in count())


def some(number: int) -> list[Request]:
    return [request for request, _ in zip(requests(), range(number), strict=False)]


def test_poisson_arrivals_have_their_rate_and_follow_from_the_seed() -> None:
    times = poisson(50, 5000, Random(3))
    pauses = [later - earlier for earlier, later in pairwise([0.0, *times])]
    assert fmean(pauses) == pytest.approx(1 / 50, rel=0.05)
    assert pstdev(pauses) == pytest.approx(1 / 50, rel=0.05)  # as exponential ones have it
    assert times == poisson(50, 5000, Random(3))
    assert times != poisson(50, 5000, Random(4))


def test_an_infinite_rate_is_a_burst() -> None:
    assert poisson(math.inf, 3, Random(1)) == [0.0, 0.0, 0.0]


async def test_an_open_loop_waits_for_nobody_and_counts_from_when_a_request_was_due() -> None:
    """Without the due time a client that was held up would forgive the server what it waited."""
    server, before = Server(0.1), perf_counter()
    traces = await open_loop(server.ask, some(5), [0.0, 0.01, 0.02, 0.03, 0.04])
    assert server.most == 5
    assert [round(trace.due - traces[0].due, 6) for trace in traces] == [0.0, 0.01, 0.02, 0.03, 0.04]
    assert traces[0].due >= before
    assert all(trace.sent >= trace.due and trace.e2e == trace.end - trace.due for trace in traces)


async def test_a_closed_loop_has_so_many_requests_at_once_and_no_more() -> None:
    server = Server(0.01)
    traces = await closed_loop(server.ask, some(10), 3)
    assert server.most == 3
    assert server.asked == [str(number) for number in range(10)]
    assert len(traces) == 10


@pytest.mark.parametrize("every", [0.03, 0.0])
async def test_intruders_come_until_the_streams_are_over(every: float) -> None:
    """And those that are still on their way then are waited for."""
    server = Server(0.1)
    streams, intruders = await interference(server.ask, some(8), 2, requests(), every)
    assert len(streams) == 8
    assert intruders
    assert server.most > 2
    end = max(trace.end for trace in streams)
    assert all(trace.due < end and trace.end for trace in intruders)
    pauses = [later.due - earlier.due for earlier, later in pairwise(intruders)]
    if every:
        assert pauses == [pytest.approx(every)] * len(pauses)
    else:
        assert all(later.sent >= earlier.end for earlier, later in pairwise(intruders))
