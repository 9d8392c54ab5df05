"""The loops between the matrices, each against PyTorch."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.geometry import Geometry, Layer
from workers.devices import forward, kernels
from workers.devices.cores import Cores
from workers.devices.forward import Attention
from workers.devices.matrices import Rows

ROWS, HEADS, KV_HEADS, SIZE, WIDTH, SLOTS = 5, 6, 2, 24, 70, 9
SEEN = np.array([1, 70, 33, 2, 64])
SLOT_OF = np.array([8, 0, 3, 4, 1])
NONE = np.float32(0)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def array(tensor: torch.Tensor) -> NDArray[np.generic]:
    return np.asarray((tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy())


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums in another order; and what was rounded to bfloat16 may fall to the other side."""
    short = found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted.float(), rtol=8e-3 if short else 2e-5, atol=1e-5)


@DTYPES
def test_norm_and_add(dtype: torch.dtype) -> None:
    x, y, weight, eps = random(ROWS, 48), random(ROWS, 48, dtype=dtype, seed=1), random(48, seed=2), np.float32(1e-5)
    out = torch.empty(ROWS, 48, dtype=dtype)
    kernels.norm(array(x), ROWS, array(weight), eps, array(out))
    close(out, (torch.nn.functional.rms_norm(x, (48,), eps=1e-5) * weight).to(dtype))
    plain = x + y.float()
    normed = x + torch.nn.functional.rms_norm(y.float(), (48,), eps=1e-5) * weight
    for wanted, through in ((plain, weight[:0]), (normed, weight)):
        total = x.clone()
        kernels.add(array(total), array(y), ROWS, array(through), eps)
        close(total, wanted)


@DTYPES
def test_gates(dtype: torch.dtype) -> None:
    gate_up = random(ROWS, 64, dtype=dtype) * 6
    gate_up[0, :4] = torch.tensor([200.0, -200.0, 0.0, -0.0])
    gate, up = gate_up.float().chunk(2, 1)
    for kernel, wanted in (
        (kernels.gate_silu, torch.nn.functional.silu(gate)),
        (kernels.gate_gelu, torch.nn.functional.gelu(gate, approximate="tanh")),
    ):
        out = torch.empty(ROWS, 32, dtype=dtype)
        kernel(array(gate_up), ROWS, array(out))
        close(out, (wanted * up).to(dtype))


@DTYPES
def test_attention_of_each_row_to_its_own_tokens_by_any_number_of_threads(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is behind a row's tokens, and in other slots, is NaN."""
    k, v = (torch.full((SLOTS, KV_HEADS, WIDTH, SIZE), torch.nan, dtype=dtype) for _ in "kv")
    query, wanted = random(ROWS, HEADS, SIZE), []
    for row, (slot, seen) in enumerate(zip(SLOT_OF.tolist(), SEEN.tolist(), strict=True)):
        k[slot, :, :seen], v[slot, :, :seen] = (
            random(KV_HEADS, seen, SIZE, dtype=dtype, seed=s) for s in (slot, 50 + slot)
        )
        ours = (part[slot, :, :seen].float().repeat_interleave(HEADS // KV_HEADS, 0) for part in (k, v))
        wanted.append(torch.nn.functional.scaled_dot_product_attention(query[row, :, None], *ours, scale=0.3)[:, 0])
    geometry = Geometry(model="m", kv_heads=KV_HEADS, head_dim=SIZE, dtype="bfloat16", layers=(Layer(),))
    layer = type("Slots", (), {"k": array(k), "v": array(v)})()
    monkeypatch.setattr(forward, "THREAD_TOKENS", 1)
    for threads in (1, 3, 16):
        out = Rows(ROWS, HEADS * SIZE, dtype)
        attention = Attention(geometry, array(query), out.array.reshape(query.shape), Cores(threads))
        attention(layer, np.float32(0.3), SLOT_OF, SEEN)
        close(out[ROWS].view(ROWS, HEADS, SIZE), torch.stack(wanted).to(dtype))


def test_a_nan_stays_one() -> None:
    """Without the look at it in rounding it would be −0, and the text like any other."""
    x = torch.full((1, 8), torch.nan)
    x.view(torch.int32)[0, 0] = 0x7FFFFFFF
    out = torch.zeros(1, 8, dtype=torch.bfloat16)
    kernels.norm(array(x), 1, array(torch.ones(8)), NONE, array(out))
    assert out.isnan().all()
    kernels.gate_silu(array(torch.full((1, 16), torch.nan)), 1, array(out))
    assert out.isnan().all()
    k = torch.full((1, 1, 4, 8), torch.nan)
    kernels.attend(
        *(array(part) for part in (random(1, 1, 8), k, k)),
        np.array([0]),
        np.array([4]),
        0,
        1,
        np.float32(1),
        array(out)[None],
    )
    assert out.isnan().all()


def test_numbers_are_rounded_to_bfloat16_as_pytorch_does() -> None:
    bits = np.arange(0x3F7F0000, 0x3F820000, 0x1000, dtype=np.uint32)
    numbers = torch.from_numpy(bits.view(np.float32))[None]
    out = torch.empty(numbers.shape, dtype=torch.bfloat16)
    one = torch.ones_like(numbers)
    total = torch.zeros_like(numbers)
    kernels.add(array(total), array(numbers), 1, array(one[0, :0]), NONE)
    assert (total == numbers).all()
    kernels.gate_gelu(array(torch.cat([one * 100, numbers / 100], 1)), 1, array(out))  # gelu(100) is 100
    assert (out == (numbers / 100 * 100).to(torch.bfloat16)).all()
