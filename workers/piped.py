"""A prefill device that is a worker in another Python environment, over the pipe (docs/stdio.md)."""

import contextlib
import json
import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import IO, Any, cast

import numpy as np

from pipeline.errors import Cancelled, DeviceError
from pipeline.geometry import Geometry, Layer
from workers.devices import Logits, OnLayer
from workers.stdio import PROTOCOL

SHARED = "/dev/shm"  # noqa: S108 - a file there is memory; tempfile makes its name
ID = "prompt"  # of each request: one at a time
END_SECONDS = 60.0  # for a worker to leave, once its standard input has ended


class PipedPrefill:
    """Opens its worker's device, and ends the worker when the block is left."""

    def __init__(self, python: str, factory: str, environ: Mapping[str, str]) -> None:
        """environ: the settings of that worker. Raises DeviceError if it cannot open its device."""
        command = [python, "-m", "workers", "prefill", "--stdio", *(("--factory", factory) if factory else ())]
        try:
            self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        except OSError as error:
            raise DeviceError(f"the prefill worker does not start: {error}") from error
        self._requests, self._events = cast(IO[bytes], self._worker.stdin), cast(IO[bytes], self._worker.stdout)
        try:
            self.send(op="load")
            self._loaded = self.receive()
            if self._loaded["event"] != "loaded":
                raise DeviceError(f"the prefill worker says: {self._loaded['message']}")
            if self._loaded["protocol"] != PROTOCOL:
                raise DeviceError(f"the prefill worker speaks protocol {self._loaded['protocol']}, not {PROTOCOL}")
            layers = tuple(Layer(**layer) for layer in self._loaded["geometry"]["layers"])
            self.geometry = Geometry(**{**self._loaded["geometry"], "layers": layers})
        except BaseException:
            self.close()
            raise
        self.device = str(self._loaded["device"])
        self.max_tokens = int(self._loaded["max_tokens"])

    def begin(self, tokens: Sequence[int]) -> "PipedPrompt":
        return PipedPrompt(self, list(tokens))

    def segment_bytes(self, tokens: int) -> int:
        """That a prompt's logits and KV cache take."""
        held = sum(tokens - layer.first_token(tokens) for layer in self.geometry.layers)
        return int(self._loaded["kv"]) + 2 * held * self.geometry.token_bytes

    def send(self, **request: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it ended with is read next
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def receive(self) -> dict[str, Any]:
        """Raises DeviceError if the worker has ended; it has said why on stderr, which is ours, too."""
        line = self._events.readline()
        if not line.endswith(b"\n"):
            raise DeviceError(f"the prefill worker ended with code {self._worker.wait(END_SECONDS)}")
        return dict(json.loads(line))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # of what it did not read any more
            self._requests.close()
        self._events.close()
        try:
            self._worker.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.wait()

    def __enter__(self) -> "PipedPrefill":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class PipedPrompt:
    def __init__(self, worker: PipedPrefill, tokens: list[int]) -> None:
        self._worker, self._tokens = worker, tokens

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits:
        """The whole prompt. `cancelled` is asked after each part of a layer; raises Cancelled if the worker heeds it."""
        with _segment(self._worker.segment_bytes(len(self._tokens))) as (path, memory):
            self._worker.send(op="prefill", id=ID, tokens=self._tokens, segment=path)
            asked = False
            while (event := self._worker.receive())["event"] == "layer":
                if asked:
                    continue
                part = event["tokens"] * self._worker.geometry.token_bytes
                k, v = (memory[event[side] : event[side] + part] for side in "kv")
                try:
                    on_layer(event["layer"], event["start"], event["tokens"], k, v)
                    asked = cancelled()
                except BaseException:
                    self._stop()
                    raise
                if asked:
                    self._worker.send(op="cancel", id=ID)
            if event["event"] == "cancelled":
                raise Cancelled
            if event["event"] == "error":
                raise DeviceError(event["message"])
            return np.frombuffer(memory[event["logits"] : event["logits"] + 4 * event["vocabulary"]], dtype="<f4")

    def _stop(self) -> None:
        """So that the worker is good for the next prompt."""
        self._worker.send(op="cancel", id=ID)
        while self._worker.receive()["event"] == "layer":
            pass


@contextlib.contextmanager
def _segment(size: int) -> Iterator[tuple[str, mmap.mmap]]:
    """A file of so many bytes, and a map of it. Raises DeviceError if there is no room."""
    try:
        file = tempfile.NamedTemporaryFile(dir=SHARED, prefix="kvr-")  # noqa: SIM115 - closed below
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        raise DeviceError(f"a prompt needs {size >> 20} MiB in {SHARED}: {error.strerror}") from error
    with file, mmap.mmap(file.fileno(), size) as memory:
        yield file.name, memory
