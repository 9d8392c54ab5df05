"""A prefill device that is a worker in another Python environment, over the pipe (docs/stdio.md)."""

import json
import mmap
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from pipeline.errors import Cancelled, DeviceError
from pipeline.geometry import Geometry, Layer
from workers.devices import Logits, OnLayer

SHARED = "/dev/shm"  # noqa: S108 - a file there is memory; tempfile makes its name
ID = "prompt"  # of each request: one at a time


class PipedPrefill:
    """Opens its worker's device, and ends the worker when the block is left."""

    def __init__(self, python: str, factory: str, environ: Mapping[str, str]) -> None:
        """environ: the settings of that worker. Raises DeviceError if it cannot open its device."""
        command = [python, "-m", "workers", "prefill", "--stdio", *(("--factory", factory) if factory else ())]
        try:
            self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
        except OSError as error:
            raise DeviceError(f"the prefill worker does not start: {error}") from error
        try:
            self.send(op="load")
            self._loaded = self.receive()
            if self._loaded["event"] != "loaded":
                raise DeviceError(f"the prefill worker says: {self._loaded['message']}")
        except BaseException:
            self.close()
            raise
        layers = tuple(Layer(**layer) for layer in self._loaded["geometry"]["layers"])
        self.geometry = Geometry(**{**self._loaded["geometry"], "layers": layers})
        self.device = str(self._loaded["device"])
        self.max_tokens = int(self._loaded["max_tokens"])

    def begin(self, tokens: Sequence[int]) -> "PipedPrompt":
        return PipedPrompt(self, list(tokens))

    def segment_bytes(self, tokens: int) -> int:
        """That a prompt's logits and KV cache take."""
        held = sum(tokens - layer.first_token(tokens) for layer in self.geometry.layers)
        return int(self._loaded["kv"]) + 2 * held * self.geometry.token_bytes

    def send(self, **request: object) -> None:
        try:
            self._pipe("stdin").write(json.dumps(request).encode() + b"\n")
            self._pipe("stdin").flush()
        except BrokenPipeError:
            pass  # what it ended with is read next

    def receive(self) -> dict[str, Any]:
        """Raises DeviceError if the worker has ended; it has said why on stderr, which is ours, too."""
        line = self._pipe("stdout").readline()
        if not line:
            raise DeviceError(f"the prefill worker ended with code {self._worker.wait()}")
        return dict(json.loads(line))

    def close(self) -> None:
        for name in ("stdin", "stdout"):
            self._pipe(name).close()
        self._worker.wait()

    def __enter__(self) -> "PipedPrefill":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _pipe(self, name: str) -> Any:
        return getattr(self._worker, name)


class PipedPrompt:
    def __init__(self, worker: PipedPrefill, tokens: list[int]) -> None:
        self._worker, self._tokens = worker, tokens

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits:
        """The whole prompt. `cancelled` is asked after each part of a layer."""
        size = self._worker.segment_bytes(len(self._tokens))
        with tempfile.NamedTemporaryFile(dir=SHARED, prefix="kvr-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            with mmap.mmap(file.fileno(), size) as memory:
                self._worker.send(op="prefill", id=ID, tokens=self._tokens, segment=file.name)
                try:
                    while (event := self._worker.receive())["event"] == "layer":
                        part = event["tokens"] * self._worker.geometry.token_bytes
                        k, v = (memory[event[side] : event[side] + part] for side in "kv")
                        on_layer(event["layer"], event["start"], event["tokens"], k, v)
                        if cancelled():
                            raise Cancelled
                except BaseException:
                    self._stop()
                    raise
                if event["event"] != "done":
                    raise DeviceError(event["message"])
                logits = memory[event["logits"] : event["logits"] + 4 * event["vocabulary"]]
        return np.frombuffer(logits, dtype="<f4")

    def _stop(self) -> None:
        self._worker.send(op="cancel", id=ID)
        while self._worker.receive()["event"] == "layer":
            pass
