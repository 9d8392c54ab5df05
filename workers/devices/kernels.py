"""What a decode step on a CPU does between its matrices, compiled by Numba: each loop once over its memory, in float32.

PyTorch has an operator for each part of it, and of those a step of 30 layers makes some 500: for a few rows they cost more in
being called than in what they do. And an attention operator takes as long to begin as for 128 tokens.

Arrays of `[rows, …]` may be longer than there are rows. The dtype of weights is float32, or bfloat16, of which Numba knows only
the bits (uint16).
"""

from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload

from workers.devices.compiled import FAST, compiled

F = np.float32
LOG2_E, LN_2 = F(1.4426950408889634), F(0.6931471805599453)


@intrinsic
def _float_of(_context, _bits):
    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def _bits_of(_context, _number):
    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def wide(number: Any) -> Any:
    """float32 of a number as it is in memory."""
    raise NotImplementedError("for compiled code")


def put(array: Any, index: int, number: Any) -> None:
    """Writes a float32 as the array has them. Once in a function: with two of them Numba 0.68 mixes up their variables."""
    raise NotImplementedError("for compiled code")


@overload(wide, inline="always")
def _wide(number):
    if number == types.uint16:
        return lambda number: _float_of(np.uint32(number) << np.uint32(16))
    return lambda number: number


@overload(put, inline="always")
def _put(array, index, number):  # noqa: ARG001 - Numba compares the names with those of `put`
    if array.dtype != types.uint16:

        def write(array, index, number):
            array[index] = number

        return write

    def write_short(array, index, number):
        """To the nearest, of two as near to the even one."""
        bits = _bits_of(number)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        array[index] = np.uint16(rounded) if number == number else np.uint16(0x7FC0)  # a NaN is not

    return write_short


@njit(inline="always", fastmath=FAST)
def exp(x: Any) -> Any:
    """Of a number up to 0, to 4e-6 of it: 2^n by its bits, the rest by Taylor's series. NumPy's is not vectorized here."""
    y = max(x, F(-87.0)) * LOG2_E
    n = np.int32(y - F(0.5))
    r = (y - F(n)) * LN_2
    p = F(1 / 720)
    p = p * r + F(1 / 120)
    p = p * r + F(1 / 24)
    p = p * r + F(1 / 6)
    p = p * r + F(1 / 2)
    p = p * r + F(1)
    p = p * r + F(1)
    return p * _float_of(np.uint32(n + np.int32(127)) << np.uint32(23))


@njit(inline="always", fastmath=FAST)
def _scale_of(row: Any, eps: Any) -> Any:
    total = F(0)
    for i in range(len(row)):
        total += row[i] * row[i]
    return F(1) / np.sqrt(total / F(len(row)) + eps)


@njit(fastmath=FAST)
def _copy(row: Any, out: Any) -> None:
    for i in range(len(row)):
        put(out, i, wide(row[i]))


@compiled
def norm(x: Any, rows: int, weight: Any, eps: Any, out: Any) -> None:
    """RMSNorm. x: float32 `[rows, hidden]`; out: the same in the weights' dtype."""
    for r in range(rows):
        scale = _scale_of(x[r], eps)
        for i in range(x.shape[1]):
            put(out[r], i, x[r, i] * scale * weight[i])


@compiled
def add(x: Any, y: Any, rows: int, weight: Any, eps: Any) -> None:
    """x += y, float32 `[rows, hidden]` and the weights' dtype; through an RMSNorm if there is a weight."""
    row = np.empty(x.shape[1], F)
    for r in range(rows):
        for i in range(x.shape[1]):
            row[i] = wide(y[r, i])
        if len(weight):
            scale = _scale_of(row, eps)
            for i in range(x.shape[1]):
                x[r, i] += row[i] * scale * weight[i]
        else:
            for i in range(x.shape[1]):
                x[r, i] += row[i]


@compiled
def gate_silu(gate_up: Any, rows: int, out: Any) -> None:
    """out = silu(gate) × up. gate_up: `[rows, 2 × width]`."""
    width = out.shape[1]
    for r in range(rows):
        for i in range(width):
            gate = wide(gate_up[r, i])
            e = exp(-abs(gate))
            share = (F(1) if gate >= F(0) else e) / (F(1) + e)
            put(out[r], i, gate * share * wide(gate_up[r, width + i]))


@compiled
def gate_gelu(gate_up: Any, rows: int, out: Any) -> None:
    """out = gelu(gate) × up, with the tanh that Gemma has."""
    width = out.shape[1]
    for r in range(rows):
        for i in range(width):
            gate = wide(gate_up[r, i])
            z = F(0.7978845608028654) * (gate + F(0.044715) * gate * gate * gate)
            e = exp(F(-2) * abs(z))
            tanh = (F(1) - e) / (F(1) + e)
            tanh = tanh if z >= F(0) else -tanh
            put(out[r], i, F(0.5) * gate * (F(1) + tanh) * wide(gate_up[r, width + i]))


@compiled
def turn(
    qkv: Any,
    rows: int,
    heads: int,
    cos: Any,
    sin: Any,
    weight: Any,
    eps: Any,
    q: Any,
    k: Any,
    v: Any,
    slots: Any,
    at: Any,
) -> None:
    """Norms of the heads, RoPE, and the way into the slots.

    qkv: `[rows, heads + 2 × kv_heads, head_dim]`; cos, sin: float32 `[rows, head_dim]`; weight: of the norms, `[heads +
    kv_heads, head_dim]`, or empty. Written are q: float32 `[rows, heads, head_dim]`, and at `at[row]` k, v: `[slots, kv_heads,
    width, head_dim]`.
    """
    kv_heads, size = k.shape[1], k.shape[3]
    half = size // 2
    row, turned = np.empty(size, F), np.empty(size, F)
    for r in range(rows):
        for h in range(heads + kv_heads):
            for i in range(size):
                row[i] = wide(qkv[r, h, i])
            if len(weight):
                scale = _scale_of(row, eps)
                for i in range(size):
                    row[i] *= scale * weight[h, i]
            for i in range(half):
                turned[i] = row[i] * cos[r, i] - row[half + i] * sin[r, i]
                turned[half + i] = row[half + i] * cos[r, half + i] + row[i] * sin[r, half + i]
            if h < heads:
                q[r, h] = turned
            else:
                for i in range(size):
                    put(k[slots[r], h - heads, at[r]], i, turned[i])
        for h in range(kv_heads):
            _copy(qkv[r, heads + kv_heads + h], v[slots[r], h, at[r]])


@compiled
def attend(q: Any, k: Any, v: Any, slots: Any, seen: Any, first: int, last: int, scale: Any, out: Any) -> None:
    """Of one token a row, each to the first `seen[row]` of its slot. q: float32 `[rows, heads, head_dim]`; k, v: `[slots,
    kv_heads, width, head_dim]`; out: `[rows, heads, head_dim]`. Rows and KV heads are one sequence here, of which [first, last)
    are computed."""
    kv_heads, size = k.shape[1], k.shape[3]
    group = q.shape[1] // kv_heads
    weights, total = np.empty((group, k.shape[2]), F), np.empty(size, F)
    for pair in range(first, last):
        r, head = pair // kv_heads, pair % kv_heads
        keys, values, tokens = k[slots[r], head], v[slots[r], head], seen[r]
        for t in range(tokens):
            for g in range(group):
                query = q[r, head * group + g]
                dot = F(0)
                for i in range(size):
                    dot += query[i] * wide(keys[t, i])
                weights[g, t] = dot * scale
        for g in range(group):
            row = weights[g]
            top = row[0]
            for t in range(tokens):
                top = max(top, row[t])
            shares = F(0)
            for t in range(tokens):
                row[t] = exp(row[t] - top)
                shares += row[t]
            total[:] = F(0)
            for t in range(tokens):
                for i in range(size):
                    total[i] += row[t] * wide(values[t, i])
            for i in range(size):
                put(out[r, head * group + g], i, total[i] / shares)


@partial(compiled, parallel=True)
def attend_together(q: Any, k: Any, v: Any, slots: Any, seen: Any, scale: Any, out: Any, threads: int) -> None:
    """The same, of all rows."""
    pairs = len(slots) * k.shape[1]
    for thread in prange(threads):
        attend(q, k, v, slots, seen, pairs * thread // threads, pairs * (thread + 1) // threads, scale, out)
