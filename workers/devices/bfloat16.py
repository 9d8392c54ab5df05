"""The product of bfloat16 matrices on CPUs that have an instruction for it (AVX512_BF16): a loop in registers, for use in what
Numba compiles.

Numba has no registers of 16 lanes, and so no instruction on them. Hence the loop is made of LLVM's.

One matrix lies in panels, `[panels, pairs, 16, 2]`: 16 outputs together, each with two inputs side by side, as the instruction
takes them. The other has plain rows. Sums are float32, each in the order of its inputs, whatever else is computed with it.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

#: Outputs of a panel: the lanes of a register of 512 bits.
LANES = 16
#: Rows and panels whose sums are in registers together: 24 of 32, beside four of the panels and some of the rows.
ROWS, PANELS = 6, 4


def is_here() -> bool:
    """The CPU has it, and Numba compiles for this CPU and not for another one."""
    told_otherwise = numba.config.CPU_NAME or numba.config.CPU_FEATURES
    return not told_otherwise and bool(llvmlite.binding.get_host_cpu_features().get("avx512bf16"))


@intrinsic
def multiply(_context, weight, x, y, rows, panels, pairs, panel_bytes, x_bytes, y_bytes):  # noqa: ARG001 - types
    """y = x × weight. y: float32 `[rows, 16 × panels]`; x: bfloat16 `[rows, 2 × pairs]`; weight: bfloat16 `[panels, pairs, 16,
    2]`, each panel at an address that is divisible by 64. All three are addresses; …_bytes is from one row, or panel, to
    the next.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        weight, x, y, rows, panels, *sizes = arguments
        _Product(builder, weight, x, y, *sizes).all(rows, panels)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


class _BFloat(ir.Type):
    """LLVM's type; llvmlite has none."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_INDEX, _PAIR = ir.IntType(64), ir.IntType(32)
_ZERO = ir.Constant(_PAIR, 0)
_PAIRS, _NUMBERS = ir.VectorType(_PAIR, LANES), ir.VectorType(_BFloat(), 2 * LANES)
_SUMS = ir.VectorType(ir.FloatType(), LANES)


@dataclass(frozen=True, slots=True)
class _Product:
    """The operands of one, as LLVM has them: addresses, and bytes from a row or a panel to the next."""

    builder: Any
    weight: Any
    x: Any
    y: Any
    pairs: Any
    panel_bytes: Any
    x_bytes: Any
    y_bytes: Any

    def moved(self, address: Any, steps: Any, size: Any) -> Any:
        return self.builder.add(address, self.builder.mul(steps, size))

    def from_panel(self, panel: Any) -> "_Product":
        weight, y = self.moved(self.weight, panel, self.panel_bytes), self.moved(self.y, panel, _number(4 * LANES))
        return replace(self, weight=weight, y=y)

    def from_row(self, row: Any) -> "_Product":
        return replace(self, x=self.moved(self.x, row, self.x_bytes), y=self.moved(self.y, row, self.y_bytes))

    def all(self, rows: Any, panels: Any) -> None:
        groups = self.builder.udiv(panels, _number(PANELS))
        with cgutils.for_range(self.builder, groups, intp=_INDEX) as loop:
            self.from_panel(self.builder.mul(loop.index, _number(PANELS))).rows(rows, PANELS)
        done = self.builder.mul(groups, _number(PANELS))
        with cgutils.for_range(self.builder, self.builder.sub(panels, done), intp=_INDEX) as loop:
            self.from_panel(self.builder.add(done, loop.index)).rows(rows, 1)

    def rows(self, rows: Any, panels: int) -> None:
        """Blocks of ROWS, and one of what is left; the panels come from the cache again."""
        blocks = self.builder.udiv(rows, _number(ROWS))
        with cgutils.for_range(self.builder, blocks, intp=_INDEX) as loop:
            self.from_row(self.builder.mul(loop.index, _number(ROWS))).block(ROWS, panels)
        done = self.builder.mul(blocks, _number(ROWS))
        rest, end = self.from_row(done), self.builder.append_basic_block("end")
        switch = self.builder.switch(self.builder.sub(rows, done), end)
        for left in range(1, ROWS):
            case = self.builder.append_basic_block(f"rows.{left}")
            switch.add_case(_number(left), case)
            self.builder.position_at_end(case)
            rest.block(left, panels)
            self.builder.branch(end)
        self.builder.position_at_end(end)

    def block(self, rows: int, panels: int) -> None:
        """So many rows by so many panels, whose sums stay in registers."""
        builder = self.builder
        sums = [[cgutils.alloca_once(builder, _SUMS) for _ in range(panels)] for _ in range(rows)]
        for total in itertools.chain.from_iterable(sums):
            builder.store(ir.Constant(_SUMS, [0.0] * LANES), total)
        kind = ir.FunctionType(_SUMS, [_SUMS, _NUMBERS, _NUMBERS])
        multiply_add = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
        with cgutils.for_range(builder, self.pairs, intp=_INDEX) as loop:
            weight, x = (
                self.moved(self.weight, loop.index, _number(4 * LANES)),
                self.moved(self.x, loop.index, _number(4)),
            )
            numbers = [
                self.read(self.moved(weight, _number(panel), self.panel_bytes), _NUMBERS, 64) for panel in range(panels)
            ]
            for row, of_row in enumerate(sums):
                lanes = self.in_all_lanes(self.read(self.moved(x, _number(row), self.x_bytes), _PAIR, 4))
                for total, number in zip(of_row, numbers, strict=True):
                    builder.store(builder.call(multiply_add, [builder.load(total), lanes, number]), total)
        for row, of_row in enumerate(sums):
            y = self.moved(self.y, _number(row), self.y_bytes)
            for panel, total in enumerate(of_row):
                there = builder.inttoptr(builder.add(y, _number(4 * LANES * panel)), _SUMS.as_pointer())
                builder.store(builder.load(total), there, align=4)

    def read(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def in_all_lanes(self, pair: Any) -> Any:
        nothing = ir.Constant(_PAIRS, ir.Undefined)
        first = self.builder.insert_element(nothing, pair, _ZERO)
        everywhere = self.builder.shuffle_vector(first, nothing, ir.Constant(_PAIRS, [0] * LANES))
        return self.builder.bitcast(everywhere, _NUMBERS)


def _number(value: int) -> Any:
    return ir.Constant(_INDEX, value)
