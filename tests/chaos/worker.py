"""A worker with one fault in it: ``python -m tests.chaos.worker prefill`` is ``python -m workers prefill``, but at a named step
it kills itself, stops, waits or raises. The production code has no hook: methods are wrapped from here.

KVR_TEST_FAULT is `<step>[#<nth time>]=<action>`, as in `layer#3=kill`. Steps, in the order of a job's life:

    leased  opened  layer  sent  drawn  logged  committed    in a prefill worker
    credit  taken  part  arrived  handed  inserted  stepped  written  finished    in a decode worker

Actions: kill (SIGKILL), stop (SIGSTOP), term (SIGTERM), hold=<seconds> (the interpreter lock, as a device call may),
wait=<seconds>, raise; and of a KV frame at `sent`: flip (one byte), drop, twice.
KVR_TEST_CUTS is the share of KV frames at which the connection is cut and made anew, as in 0.01.
KVR_TEST_PROXY, host:port, is where a prefill worker connects instead of to the decode worker that it means.
"""

import asyncio
import ctypes
import functools
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from brokers import kv_sender
from brokers.credits import Credits
from brokers.kv_receiver import KVReceiver
from brokers.queue import JobQueue
from brokers.token_log import TokenLog
from pipeline.errors import DeviceError
from workers.__main__ import main
from workers.decode import DecodeWorker

STEP, _, ACTION = os.environ.get("KVR_TEST_FAULT", "").partition("=")
STEP, _, NTH = STEP.partition("#")
CUTS = float(os.environ.get("KVR_TEST_CUTS", 0))
PROXY = os.environ.get("KVR_TEST_PROXY", "")
_times = itertools.count(1)


def reached(step: str) -> float:
    """Seconds to wait, for those who can wait in their own way."""
    if step != STEP or next(_times) != int(NTH or 1):
        return 0.0
    kind, _, amount = ACTION.partition("=")
    print(f"fault at {step}: {ACTION}", file=sys.stderr, flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "hold":
        ctypes.PyDLL(None).usleep(int(float(amount) * 1e6))  # PyDLL keeps the interpreter lock
    elif kind == "raise":
        raise DeviceError("a fault of the test")
    return float(amount) if kind == "wait" else 0.0


def wrap(
    owner: type, name: str, *, before: str = "", after: str = "", when: Callable[..., bool] = lambda *_: True
) -> None:
    """when(answer or None, *arguments): whether this call is the step."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    async def asynchronous(self: Any, *arguments: Any, **named: Any) -> Any:
        if before and when(None, *arguments):
            await asyncio.sleep(reached(before))
        answer = await inner(self, *arguments, **named)
        if after and when(answer, *arguments):
            await asyncio.sleep(reached(after))
        return answer

    @functools.wraps(inner)
    def synchronous(self: Any, *arguments: Any, **named: Any) -> Any:
        if before and when(None, *arguments):
            time.sleep(reached(before))
        answer = inner(self, *arguments, **named)
        if after and when(answer, *arguments):
            time.sleep(reached(after))
        return answer

    setattr(owner, name, asynchronous if asyncio.iscoroutinefunction(inner) else synchronous)


def wrap_wire() -> None:
    """The frames on their way: `sent`."""
    inner = kv_sender._Link.send

    async def send(self: Any, message: Any, tensor: memoryview | None = None) -> None:
        times = 1
        if tensor is not None and ACTION not in ("flip", "drop", "twice"):
            await asyncio.sleep(reached("sent"))
        elif tensor is not None and STEP == "sent" and next(_times) == int(NTH or 1):
            print(f"fault at sent: {ACTION}", file=sys.stderr, flush=True)
            times = {"flip": 1, "drop": 0, "twice": 2}[ACTION]
            if ACTION == "flip":
                spoiled = bytearray(tensor)
                spoiled[len(spoiled) // 2] ^= 1
                tensor = memoryview(bytes(spoiled))
        if CUTS and random.random() < CUTS:
            self._socket.disconnect(self.endpoint)  # what libzmq has not sent is lost
            self._socket.connect(self.endpoint)
        for _ in range(times):
            await inner(self, message, tensor)

    kv_sender._Link.send = send  # type: ignore[method-assign]


def _ends(_answer: Any, batch: Any) -> bool:
    return any(append.end for append in batch)


def install() -> None:
    if sys.argv[1] == "prefill":
        wrap(JobQueue, "lease", after="leased", when=lambda answer, *_: isinstance(answer, list))
        wrap(kv_sender.KVSender, "open", after="opened")
        wrap(kv_sender.Outbound, "put", before="layer")
        wrap_wire()
        wrap(TokenLog, "append", before="drawn", after="logged")
        wrap(kv_sender.Outbound, "commit", after="committed")
    else:
        wrap(Credits, "publish", after="credit", when=lambda _, fresh, *__: bool(fresh))
        wrap(DecodeWorker, "take", after="taken")
        wrap(
            KVReceiver,
            "_receive",
            before="part",
            when=lambda _, frames: len(frames) == 3,
        )
        wrap(DecodeWorker, "arrived", before="arrived")
        wrap(JobQueue, "handover", after="handed")
        wrap(DecodeWorker, "_insert", after="inserted")
        wrap(DecodeWorker, "_settle", before="stepped", when=lambda _, step: bool(step.emissions))
        wrap(TokenLog, "append", after="written")
        wrap(TokenLog, "append", after="finished", when=_ends)
    if PROXY:
        link = kv_sender._Link.__init__

        def through_the_proxy(self: Any, context: Any, _endpoint: str, *rest: Any) -> None:
            link(self, context, f"tcp://{PROXY}", *rest)

        kv_sender._Link.__init__ = through_the_proxy  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    sys.exit(main())
