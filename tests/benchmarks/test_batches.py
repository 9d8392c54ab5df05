"""Batches on sim devices, one of 10,000 lines: every answer, the API's memory, and what a chat beside them has to wait."""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.acceptance.test_batches import check_answers, connect, make, request, start

BETWEEN = 0.2  # seconds between two chats
IDLE_CHATS = 150


def ttft(system: System) -> float:
    """Seconds to the first token of a chat with a prompt of 100 tokens."""
    begin = time.monotonic()
    events = system.events("/v1/completions", {"prompt": [7] * 100, "max_tokens": 4, "stream": True})
    next(event for event in events if json.loads(event["data"])["choices"][0]["text"])
    took = time.monotonic() - begin
    for _ in events:
        pass
    return took


@contextmanager
def chats(system: System) -> Iterator[list[float]]:
    """As long as it lasts, one after the other."""
    seconds: list[float] = []
    over = threading.Event()

    def chat() -> None:
        while not over.wait(BETWEEN):
            seconds.append(ttft(system))

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        yield seconds
    finally:
        over.set()
        thread.join()


def show(name: str, seconds: list[float]) -> float:
    cuts = statistics.quantiles(seconds, n=20)
    print(f"TTFT {name:18} n {len(seconds):4}   p50 {cuts[9] * 1e3:6.1f} ms   p95 {cuts[18] * 1e3:6.1f} ms")
    return cuts[18]


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("lines", "fields"), [(10_000, {}), (500, {"max_tokens": 100})], ids=["short", "long"])
def test_a_batch_beside_chats(redis_url: str, tmp_path: Path, lines: int, fields: dict[str, int]) -> None:
    """With short answers the prefill worker is busy all the time, with long ones every slot is."""
    system = make(redis_url, tmp_path, lease_seconds=5, heartbeat_seconds=1, sim_prefill_us=50, sim_step_ms=5)
    api_process = system.start("api")[0]
    system.start("prefill")
    system.start("decode")
    try:
        system.wait_ready()
        print()
        for _ in range(20):
            ttft(system)
        idle = []
        for _ in range(IDLE_CHATS):
            time.sleep(BETWEEN)
            idle.append(ttft(system))
        with connect(system) as api:
            before, most = system.memory(api_process), 0
            begin = time.monotonic()
            with chats(system) as beside:
                batch = start(api, *(request(number, **fields) for number in range(lines)))
                while (now := api.batches.retrieve(batch.id)).status not in ("completed", "failed"):
                    most = max(most, system.memory(api_process))
                    time.sleep(1)
            took = time.monotonic() - begin
            check_answers(api, now, range(lines), **fields)
        print(f"{lines} lines in {took:.0f} s, {lines / took:.0f} a second")
        print(f"memory of the API: {before >> 20} MiB before, {most >> 20} MiB at most")
        times = show("during the batch", beside) / show("idle", idle)
        print(f"p95 during is {times:.1f} × idle (target 2)")
        assert most - before < 32 << 20
        system.wait_idle()
    finally:
        system.close()
