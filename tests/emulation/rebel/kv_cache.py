"""Host memory as the private KV calls want it."""

from typing import Any

import numpy as np
import torch


def aligned_tensor(size: int, dtype: Any = np.float16, alignment: int = 0x1000) -> torch.Tensor:
    wanted = size * np.dtype(dtype).itemsize
    memory = np.full(wanted + alignment, 0xFF, dtype=np.uint8)  # no numbers, in any dtype of caches
    start = -memory.ctypes.data % alignment
    return torch.from_numpy(memory[start : start + wanted].view(dtype))
