"""The rngd device on a CPU: furiosa-torch imports its graphs as its compiler would, and executes what it has imported.

`python -m workers prefill --factory tests.rngd.dfg:build` is a prefill worker on it.
"""

from collections.abc import Callable, Sequence

import furiosa.torch
import torch

from pipeline.config import Config
from pipeline.model import Model
from workers.devices.family import geometry, load_weights, text_config
from workers.devices.rngd.graphs import Network
from workers.devices.rngd.plan import Plan
from workers.devices.rngd.prefill import Graph, RngdPrefill
from workers.digest import model_digest


class DfgExecutor:
    def load(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Graph:
        return furiosa.torch.DfgModule.from_module(module, inputs)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies


class EagerExecutor(DfgExecutor):
    """The same modules, run by PyTorch."""

    def load(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Graph:
        return module


def build(config: Config, model: Model, executor: DfgExecutor | None = None) -> RngdPrefill:
    hf = text_config(model, config)
    return RngdPrefill(
        Network(load_weights(model, torch.bfloat16, "eager")),
        geometry(hf, torch.bfloat16, model_digest(model.directory, config)),
        executor or DfgExecutor(),
        Plan([int(width) for width in config.rngd_widths.split(",")], config.context),
        max_tokens=config.context,
        vocabulary=int(hf.vocab_size),
        progress=lambda *_: None,
    )
