"""Graphs on a FuriosaAI RNGD, compiled by furiosa-torch. What of the vendor's package is called stands in `vendor.py`."""

import importlib.metadata
import logging
import os
import shutil
from collections.abc import Callable, Sequence

import furiosa.torch
import torch

from pipeline.errors import DeviceError
from workers.devices.rngd.prefill import Graph

CROSS_COMPILER = "aarch64-linux-gnu-gcc"

log = logging.getLogger(__name__)


def prepare(fusion: int) -> None:
    """Once a process, before anything is on a chip. fusion: processing elements that work as one device; a chip has 8."""
    register()
    furiosa.torch.set_fusion(fusion)
    furiosa.torch.config.set_cpu_fallback(False)  # else what the chip cannot do runs on the host, unseen and slow


def register() -> None:
    """What torch does by itself unless TORCH_DEVICE_BACKEND_AUTOLOAD=0, which every worker sets: see workers/__main__.py."""
    (backend,) = importlib.metadata.entry_points(group="torch.backends", name="furiosa")
    backend.load()()  # once is enough, and twice does no harm


class ChipExecutor:
    """compiled: folder of the vendor's compile cache, which may be copied to other machines; '' for the vendor's own."""

    def __init__(self, number: int, compiled: str) -> None:
        self._device = torch.device(f"furiosa:{number}")
        self._compiled = os.path.expanduser(compiled) or furiosa.torch.config.CacheConfig.default_cache_dir()

    def load(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Graph:
        with furiosa.torch.config.cache_context(root_dir=self._compiled):
            try:
                compiled = furiosa.torch.CompileModule.from_module(module, inputs, task_name=name)
            except RuntimeError as error:
                if "os error 2" in str(error) and shutil.which(CROSS_COMPILER) is None:
                    remedy = f"{CROSS_COMPILER} on PATH (Debian: gcc-aarch64-linux-gnu), or KVR_RNGD_COMPILED with it compiled"
                    raise DeviceError(f"graph {name} is not compiled yet, and that takes {remedy}") from error
                raise DeviceError(f"graph {name} does not compile: {' '.join(str(error).split())[:400]}") from error
        return compiled.to(self._device)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """furiosa's tensors cannot be pinned; the copy is under way until the event, and `tensors` must live so long."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        event = furiosa.torch.Event(self._device)
        event.record(furiosa.torch.current_stream(self._device))

        def wait(_sources: Sequence[torch.Tensor] = tensors) -> list[torch.Tensor]:
            event.synchronize()
            return copies

        return wait
