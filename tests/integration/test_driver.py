"""What the Redis driver must not do to us: mix up replies when a call is cancelled."""

import asyncio
import random
from functools import partial

import pytest
from hands import until

from brokers.store import Store

CALLS, AT_ONCE = 10_000, 64


@pytest.mark.parametrize(("by", "turns"), [("the pool", 4), ("the trunk", 1)])
async def test_ten_thousand_cancelled_calls_leave_every_other_reply_with_its_caller(
    store: Store, by: str, turns: int
) -> None:
    """R6. With a connection that goes back to the pool with a reply in it, the next caller would get it; on the trunk that all
    scripts share, everybody behind one who has left would get the answer of the one before."""
    echo = store.redis.echo if by == "the pool" else partial(store.trunk.call, "ECHO")
    draw = random.Random(5)
    wrong: list[tuple[str, str]] = []
    cancelled = answered = 0

    async def ask(number: int) -> None:
        nonlocal answered
        answer = await echo(f"call {number}")
        answered += 1
        if answer != f"call {number}":
            wrong.append((f"call {number}", answer))

    for start in range(0, CALLS, AT_ONCE):
        calls = [asyncio.create_task(ask(number)) for number in range(start, start + AT_ONCE)]
        await asyncio.sleep(0)  # all have asked
        for call in draw.sample(calls, AT_ONCE // 2):
            for _ in range(draw.randrange(turns)):
                await asyncio.sleep(0)
            cancelled += call.cancel()
        await until(lambda calls=calls: _done(calls))
    assert wrong == []
    assert cancelled > CALLS / 50, "they were cancelled under way"
    assert answered > CALLS / 3


async def _done(calls: list[asyncio.Task[None]]) -> bool:
    return all(call.done() for call in calls)
