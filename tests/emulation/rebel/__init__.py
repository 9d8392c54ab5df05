"""A test double of Rebellions' closed `rebel`: enough for the real optimum-rbln to compile in name, and to run on the CPU.

It is no part of kvrelay and never installed. It can be imported only where both this folder is on PYTHONPATH and
KVR_TEST_EMULATED_NPU names the chip to pretend; its version says `emulated`, and so does every worker on it.

It stands in for what the vendor's Python asks of `rebel` (seen in optimum-rbln 0.12.0) and for the private KV calls (named
in vllm-rbln 0.11). It is strict where a chip would be: shapes, dtypes and alignment are asserted, memory that nobody wrote
holds rubbish, masked rows are multiplied all the same, a row that idles writes too. Settings, for tests of failure:

KVR_TEST_EMULATED_NPU      the chip's name, RBLN-CA22
KVR_TEST_EMULATED_CHIPS    how many there are; 2 if not said
KVR_TEST_EMULATED_FAULTS   of this list, separated by commas: `no_private` (the private calls are not there), `torn` (a private
                           write leaves its last row out), `off_by_one` (a graph's cache update lands one block further),
                           `no_graph` (a graph without a model in it does not compile), `apart` (such a graph
                           has caches of its own), `full` (no memory for a runtime),
                           `filthy` (the rubbish in memory is no numbers)
"""

import ctypes
import math
import os
import pickle
import signal
import uuid
from pathlib import Path
from typing import Any

import torch

from rebel.compile_context import CompileContext

NPU = os.environ.get("KVR_TEST_EMULATED_NPU")
if not NPU:
    raise ImportError("this is kvrelay's test double of rebel; it works only where KVR_TEST_EMULATED_NPU names a chip")
CHIPS = int(os.environ.get("KVR_TEST_EMULATED_CHIPS", "2"))
FAULTS = frozenset(filter(None, os.environ.get("KVR_TEST_EMULATED_FAULTS", "").split(",")))

RUBBISH = math.nan if "filthy" in FAULTS else 1e4

__version__ = "0.12.0+emulated"

#: Buffers of a compile context on a chip, by name: every runtime of that context shares them.
_memory: dict[tuple[str, str], dict[str, torch.Tensor]] = {}

# as a vendor's library does it: natively, behind Python's back, and to the default, which is death
ctypes.CDLL(None).signal(int(signal.SIGPIPE), None)

from rebel import ops  # noqa: E402, F401


def npu_is_available(device: int = 0) -> bool:
    return device < CHIPS


def get_npu_name(device: int = 0) -> str | None:
    return NPU if device < CHIPS else None


def device_count() -> int:
    return CHIPS


def compile(module: Any, *, npu: str | None = None, num_devices: int | None = None, **_: Any) -> "RBLNCompiledModel":
    raise NotImplementedError("optimum-rbln calls compile_from_torch")


def compile_from_torch(
    module: torch.nn.Module,
    input_info: list[tuple[str, list[int], Any]] | None = None,
    *,
    compile_context: CompileContext | None = None,
    **_: Any,
) -> "RBLNCompiledModel":
    phase = getattr(module, "phase", None)
    if phase is None and "no_graph" in FAULTS:
        raise RuntimeError("emulated: this graph does not compile")
    info = [
        (name, tuple(shape), dtype if isinstance(dtype, str) else str(dtype)) for name, shape, dtype in input_info or ()
    ]
    return RBLNCompiledModel._made(
        {
            "module": module,
            "phase": phase,
            "info": [(name, shape, dtype.removeprefix("torch.")) for name, shape, dtype in info],
            "context": compile_context.identity if compile_context else uuid.uuid4().hex,
            "multiples": {},
        }
    )


class RBLNCompiledModel:
    """What would be machine code: here the module itself, pickled."""

    def __init__(self, path: str | Path) -> None:
        self._parts = pickle.loads(Path(path).read_bytes())

    @classmethod
    def _made(cls, parts: dict[str, Any]) -> "RBLNCompiledModel":
        made = object.__new__(cls)
        made._parts = parts
        return made

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(pickle.dumps(self._parts, protocol=5))

    def get_alloc_per_chiplet_by_key(self) -> dict[str, list[list[int]]]:
        return {"Weight": [[1 << 20]]}

    def exp_get_dram_tensor_sizes(self) -> dict[str, list[list[int]]]:
        return {name: [[_empty(shape, dtype).nbytes]] for name, shape, dtype in self._parts["info"] if _is_cache(name)}

    def exp_multiply_buffer_size(self, multiples: dict[str, int]) -> None:
        self._parts["multiples"] |= multiples


class Runtime:
    """Runs a compiled model on a pretended chip. `calls` is for tests."""

    def __init__(
        self,
        compiled: RBLNCompiledModel,
        tensor_type: str = "np",
        device: int | list[int] | None = 0,
        activate_profiler: bool | None = False,
        timeout: int | None = None,
    ) -> None:
        chips = device if isinstance(device, list) else [device or 0]
        if "full" in FAULTS:
            raise RuntimeError("Lack of device memory (emulated)")
        if any(get_npu_name(chip) is None for chip in chips):
            raise RuntimeError(f"no device {device}")
        assert tensor_type == "pt"
        self._parts = compiled._parts
        apart = "apart" if "apart" in FAULTS and self._parts["phase"] is None else ""
        self._caches = _memory.setdefault((self._parts["context"] + apart, str(chips)), {})
        for name, shape, dtype in self._parts["info"]:
            if _is_cache(name) and name not in self._caches:
                blocks = shape[0] * self._parts["multiples"].get(name, 1)
                self._caches[name] = _empty((blocks, *shape[1:]), dtype).fill_(RUBBISH)
        self.calls = 0

    def __call__(self, *inputs: torch.Tensor, out: list[torch.Tensor] | None = None) -> Any:
        self.calls += 1
        expected = [entry for entry in self._parts["info"] if not _is_cache(entry[0])]
        assert len(inputs) == len(expected), (len(inputs), [name for name, _, _ in expected])
        for given, (name, shape, dtype) in zip(inputs, expected, strict=True):
            assert tuple(given.shape) == shape, f"{name}: {tuple(given.shape)} is not {shape}"
            assert str(given.dtype) == f"torch.{dtype}", f"{name}: {given.dtype} is not {dtype}"
        module = self._parts["module"]
        if self._parts["phase"] is not None:
            module.phase = self._parts["phase"]
        with torch.no_grad():
            answers = module(*inputs, *(self._caches[name] for name, _, _ in self._parts["info"] if _is_cache(name)))
        answers = answers if isinstance(answers, tuple | list) else (answers,)
        answers = [answer for answer in answers if isinstance(answer, torch.Tensor)]
        for buffer, answer in zip(out or (), answers, strict=False):
            buffer.copy_(answer)
        return answers[0] if len(answers) == 1 else answers

    # The private calls. `host` mirrors a whole cache tensor.

    def _get_kv_cache_size(self, name: str) -> int:
        return self._caches[name].nbytes

    def _fetch_kv_cache(self, host: torch.Tensor, block_idx: int, block_offset: int, size: int, name: str) -> None:
        self._mirror(host, name)[block_idx, :, block_offset : block_offset + size] = self._caches[name][
            block_idx, :, block_offset : block_offset + size
        ]

    def _update_kv_cache(self, host: torch.Tensor, block_idx: int, block_offset: int, size: int, name: str) -> None:
        mirror = self._mirror(host, name)
        size -= "torn" in FAULTS
        self._caches[name][block_idx, :, block_offset : block_offset + size] = mirror[
            block_idx, :, block_offset : block_offset + size
        ]

    def _mirror(self, host: torch.Tensor, name: str) -> torch.Tensor:
        if not self.calls:
            os.abort()  # what it is known to do before the first step
        assert host.is_contiguous()
        assert host.data_ptr() % 0x1000 == 0, "the host buffer must be aligned to 4 KiB"
        assert host.nbytes == self._caches[name].nbytes, f"{name}: the host buffer mirrors the whole cache"
        return host.view(self._caches[name].dtype).view(self._caches[name].shape)


if "no_private" in FAULTS:
    del Runtime._update_kv_cache, Runtime._fetch_kv_cache


def _is_cache(name: str) -> bool:
    return "past_key_values" in name


def _empty(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))
