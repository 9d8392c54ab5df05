"""What py-spy saw of a process, summed up by what the time was for.

It sees threads that run or want to: waiting for a core counts, waiting for somebody else does not. And it sees Python's threads
only, not OpenMP's and ZeroMQ's.
"""

import re
from collections import Counter
from collections.abc import Sequence

WAITING = re.compile(
    r"EpollSelector\.select |_worker \(concurrent/futures/thread\.py"
)  # for work, if it is the last frame
LOOP = re.compile(r"BaseEventLoop\._run_once ")
PYTHON = "Python"  # the rest: event loops, and what we do in between

#: Group → frames, as in "Norm.__call__ (workers/devices/forward.py:98)". Of a stack, the last frame that is in one decides.
GROUPS = {
    "matmul": re.compile(r"(OneDNN|Panels)\.__call__ |Linear\.forward "),
    "attention": re.compile(r"Attention\.|LayerPanels\.attend |sdpa_attention_forward "),
    "sampling": re.compile(r".*\((workers/sampler|pipeline/(sampling|constraint))\.py"),
    "KV cache": re.compile(
        r".*\((workers/devices/slots|brokers/kv_\w+|pipeline/(frames|transfer))\.py|.*\(zmq/"
        r"|_PromptLayer\._hand_out |_bytes \(workers/devices/(torch|prompt)"
    ),
    "other layers": re.compile(r".*\((workers/devices/|transformers/)"),
    "Redis": re.compile(r".*\((brokers|redis)/"),
    "text": re.compile(r".*\((pipeline/(text|generation|vocabulary)|api/text)\.py|.*\(tokenizers/"),
    "HTTP": re.compile(r".*\((api|gunicorn|falcon)/"),
}


def group(stack: Sequence[str]) -> str | None:
    """Of one sample, outermost frame first; None: its thread had nothing to do. Frames outside an event loop say nothing: they
    are the same for all that runs in it."""
    if WAITING.match(stack[-1]):
        return None
    for frame in reversed(stack):
        if LOOP.match(frame):
            break
        for name, frames in GROUPS.items():
            if frames.match(frame):
                return name
    return PYTHON


def seconds_by_group(samples: str, rate: int) -> Counter[str]:
    """samples: py-spy's raw format, a stack and its count a line; so many of each thread a second."""
    found: Counter[str] = Counter()
    for line in samples.splitlines():
        stack, _, count = line.rpartition(" ")
        if (name := group(stack.split(";"))) is not None:
            found[name] += int(count) / rate
    return found
