"""Linear layers on the CPU. In a decode step they have few rows, and all weights of the model for them: memory is the limit.

oneDNN, which PyTorch has, is made for many rows. In bfloat16 it takes 20 ms for the 270 MB of SmolLM2's weights and one row,
on a core that can read them in 11. So where the CPU multiplies bfloat16 (AVX512_BF16) there is a loop of our own. A row's
numbers, then, do not depend on how many there are.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import numba
import torch
from numba import njit, prange
from torch.nn import Linear

from workers.devices.bfloat16 import LANES, PANELS, is_here, multiply
from workers.devices.compiled import compiled
from workers.devices.cores import Cores


class Rows:
    """Memory for the rows of a step, as Numba and as PyTorch have it."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(rows, width, dtype=dtype)
        self.array = array(self._tensor)

    def __getitem__(self, rows: int) -> torch.Tensor:
        """The first so many."""
        return self._tensor[:rows]


class Matrix(Protocol):
    def __call__(self, x: Rows, count: int) -> torch.Tensor:
        """x: `[at least count, in]`. Answers `[count, out]`, in the weights' dtype or in float32."""
        ...


def packed(modules: list[Linear], rows: int, cores: Cores) -> Matrix:
    """One linear layer, or several that have the same input as one. They lose their weights. rows: at most."""
    weights = [module.weight for module in modules]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = _bias(modules)
    drop(modules)
    return Panels(weight, bias, cores) if _fit_panels(weight, cores) else OneDNN(weight, bias, rows)


class OneDNN:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        self._bias = bias

    def __call__(self, x: Rows, count: int) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x[count], self._weight, self._bias, "none", [], "")
        return y


class Panels:
    """Weights in bfloat16, `[out / 16, in / 2, 16, 2]`: what one instruction multiplies lies together, and all of it in the
    order in which it is read. Sums are float32, and stay so."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, cores: Cores) -> None:
        size_out, size_in = weight.shape
        panels = weight.view(size_out // LANES, LANES, size_in // 2, 2).transpose(1, 2).contiguous()
        self._weight = array(panels)
        self._bias = None if bias is None else bias.float()
        self._size = size_out
        self._cores = cores

    def __call__(self, x: Rows, count: int) -> torch.Tensor:
        y = torch.empty(count, self._size)
        threads = self._cores.now
        if threads == 1:
            _multiply(self._weight, x.array, count, y.numpy())
        else:
            numba.set_num_threads(threads)  # of the calling thread, which is another one than here at first
            _multiply_together(self._weight, x.array, count, y.numpy(), threads)
        return y if self._bias is None else y.add_(self._bias)


def array(tensor: torch.Tensor) -> Any:
    """The same memory; of bfloat16, which NumPy has not, the bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def drop(modules: Iterable[Any]) -> None:
    for module in modules:
        module.weight = module.bias = None


def _bias(modules: list[Linear]) -> torch.Tensor | None:
    """Of Qwen2, Q, K and V have one; zeros where only some have."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules])


def _fit_panels(weight: torch.Tensor, cores: Cores) -> bool:
    size_out, size_in = weight.shape
    whole = size_out % LANES == 0 and size_in % 2 == 0
    return weight.dtype == torch.bfloat16 and whole and is_here() and cores.fit_loops


@compiled
def _multiply(weight: Any, x: Any, count: int, y: Any) -> None:
    _share(weight, x, count, y, 0, weight.shape[0])


@partial(compiled, parallel=True)
def _multiply_together(weight: Any, x: Any, count: int, y: Any, threads: int) -> None:
    panels = weight.shape[0]
    share = (panels + threads * PANELS - 1) // (threads * PANELS) * PANELS
    for thread in prange(threads):
        first = min(thread * share, panels)
        _share(weight, x, count, y, first, min(first + share, panels))


@njit(nogil=True)
def _share(weight: Any, x: Any, count: int, y: Any, first: int, last: int) -> None:
    """Of the panels [first, last)."""
    pairs, outputs = weight.shape[1], y.shape[1]
    panel, ahead = pairs * LANES * 4, first * LANES * 4
    multiply(
        *(weight.ctypes.data + first * panel, x.ctypes.data, y.ctypes.data + ahead),
        *(count, last - first, pairs, panel, x.shape[1] * 2, outputs * 4),
    )
