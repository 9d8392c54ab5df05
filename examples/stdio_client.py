"""Drives one prefill worker over its stdin and stdout (docs/stdio.md). Standard library only, any Python from 3.8 on.

    KVR_MODEL=sim KVR_PREFILL_DEVICE=sim python examples/stdio_client.py 72 101 108 108 111

KVR_PREFILL_PYTHON names the Python of the worker's environment, where kvrelay is installed; this file needs none of it.
"""

import contextlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from array import array

COMMAND = (os.environ.get("KVR_PREFILL_PYTHON", sys.executable), "-m", "workers", "prefill", "--stdio")
SHARED = "/dev/shm"  # noqa: S108 - a file there is memory; mkstemp makes its name
ENDS = ("done", "cancelled", "error")


@contextlib.contextmanager
def segment(size):
    """A file that takes `size` bytes, and a map of it. It is ours: we make it, and unlink it whatever becomes of the worker."""
    descriptor, path = tempfile.mkstemp(prefix="kvr-", dir=SHARED if os.path.isdir(SHARED) else None)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # no room: an error here, not one in the middle of a prefill
        else:
            os.truncate(path, size)
        with mmap.mmap(descriptor, size) as memory:
            yield path, memory
    finally:
        os.close(descriptor)
        os.unlink(path)


class Worker:
    """A worker process. One request at a time; `send` and `receive` are there for more."""

    def __init__(self, command=COMMAND, **options):
        """options: for Popen, such as env, cwd and stderr."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(list(command), **pipes, **options)
        self.loaded = {}  # what it said of the model

    def send(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def receive(self):
        """The next event. Raises EOFError if the worker has ended; it has said why on stderr."""
        line = self.process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError(f"the worker ended with code {self.process.wait()}")
        return json.loads(line)

    def load(self):
        self.send(op="load")
        self.loaded = self.receive()
        if self.loaded["event"] == "error":
            raise RuntimeError(self.loaded["message"])
        return self.loaded

    def held(self, layer, tokens):
        """How many of a prompt's tokens a layer hands out: in a sliding layer those that the next token can still see."""
        window = self.loaded["geometry"]["layers"][layer]["window"]
        return tokens if window is None else min(tokens, window - 1)

    def size(self, tokens):
        """Bytes that a segment for so many prompt tokens needs."""
        layers = range(len(self.loaded["geometry"]["layers"]))
        held = sum(self.held(layer, tokens) for layer in layers)
        return self.loaded["kv"] + 2 * held * self.loaded["token_bytes"]

    def prefill(self, tokens, path, request_id="a"):
        """Yields an event for each part of a layer as soon as it is in the segment, and the last one, in ENDS."""
        self.send(op="prefill", id=request_id, tokens=tokens, segment=path)
        event = {"event": None}
        while event["event"] not in ENDS:
            event = self.receive()
            yield event

    def close(self):
        """Ends the worker, and answers its exit code."""
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait()


def main():
    tokens = [int(word) for word in sys.argv[1:]] or [1, 2, 3]
    worker = Worker()
    loaded = worker.load()
    print("loaded {model} on {device}: prompts of up to {max_tokens} tokens".format(**loaded))
    with segment(worker.size(len(tokens))) as (path, memory):
        came = [0] * len(loaded["geometry"]["layers"])
        for event in worker.prefill(tokens, path):
            if event["event"] == "layer":
                size = event["tokens"] * loaded["token_bytes"]
                k, v = (memory[event[side] : event[side] + size] for side in "kv")  # [kv_heads, tokens, head_dim]
                came[event["layer"]] += event["tokens"]
                print("layer {layer}: tokens from {start}, {tokens} of them:".format(**event), len(k) + len(v), "bytes")
        if event["event"] != "done":
            sys.exit(event["message"])
        assert came == [worker.held(layer, len(tokens)) for layer in range(len(came))]
        logits = array("f", memory[event["logits"] : event["logits"] + 4 * event["vocabulary"]])
        assert max(logits) == logits[event["token"]]
        print("the next token is {token}, of {vocabulary}".format(**event))
    print("the worker ended with code", worker.close())


if __name__ == "__main__":
    main()
