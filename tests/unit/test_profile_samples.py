"""Which group a sample of a profile counts for, as py-spy writes its frames."""

import pytest

from tests.benchmarks.samples import PYTHON, group, seconds_by_group

COMPUTE = ["Thread.run (threading.py:982)", "_worker (concurrent/futures/thread.py:83)"]
LOOP = ["ASGIWorker.run (gunicorn/workers/gasgi.py:155)", "BaseEventLoop._run_once (asyncio/base_events.py:1922)"]
STEP = ["DecodeWorker._advance (workers/decode.py:184)", "PackedForward.logits (workers/devices/forward.py:142)"]


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (
            [
                *COMPUTE,
                *STEP,
                "Panels.__call__ (workers/devices/matrices.py:60)",
                "OpOverload.__call__ (torch/_ops.py:8)",
            ],
            "matmul",
        ),
        ([*COMPUTE, *STEP, "Attention.__call__ (workers/devices/forward.py:64)"], "attention"),
        ([*COMPUTE, *STEP, "Norm.__call__ (workers/devices/forward.py:92)"], "other layers"),
        ([*COMPUTE, *STEP, "LayerSlots.write (workers/devices/slots.py:59)"], "KV cache"),
        ([*COMPUTE, STEP[0], "Sampler.draw (workers/sampler.py:63)", "_best (workers/sampler.py:142)"], "sampling"),
        (
            [*LOOP, "LogReader.run (brokers/token_log.py:127)", "Redis.execute_command (redis/asyncio/client.py:9)"],
            "Redis",
        ),
        ([*LOOP, "Outbound._write (brokers/kv_sender.py:232)", "Socket.send (zmq/sugar/socket.py:713)"], "KV cache"),
        ([*LOOP, "ASGIProtocol._send_body (gunicorn/asgi/protocol.py:2263)", "json (json/__init__.py:1)"], "HTTP"),
        ([*LOOP, "Front.submit (api/front.py:90)", "PromptCodec.encode (api/text.py:55)"], "text"),
    ],
)
def test_the_last_frame_that_is_in_a_group_decides(frames: list[str], expected: str) -> None:
    assert group(frames) == expected


def test_what_an_event_loop_runs_in_decides_nothing() -> None:
    """Without that all of an API process would be HTTP, for gunicorn runs the loop."""
    assert group([*LOOP, "Handle._run (asyncio/events.py:80)"]) == PYTHON
    assert group(LOOP) == PYTHON


def test_a_thread_that_waits_for_work_counts_for_nothing() -> None:
    """Without that an idle process would have been busy whenever it was looked at as it fell asleep."""
    assert group([*LOOP, "EpollSelector.select (selectors.py:468)"]) is None
    assert group(COMPUTE) is None
    assert group([*COMPUTE, "_WorkItem.run (concurrent/futures/thread.py:58)"]) == PYTHON


def test_samples_become_seconds() -> None:
    raw = [
        f"{';'.join(stack)} {count}"
        for stack, count in (([*COMPUTE, *STEP], 30), (COMPUTE, 7), ([*COMPUTE, STEP[0]], 20))
    ]
    assert seconds_by_group("\n".join(raw), 100) == {"other layers": 0.3, PYTHON: 0.2}
