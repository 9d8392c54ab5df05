"""Linear layers for a few rows, in each way that a CPU may have them, against PyTorch's in float64."""

from pathlib import Path

import numba
import pytest
import torch
from torch.nn import Linear

from workers.devices.bfloat16 import is_here
from workers.devices.compiled import _folder
from workers.devices.cores import Cores
from workers.devices.matrices import Matrix, OneDNN, Panels, Rows, packed

MOST = 20
COUNTS = (1, 2, 5, 6, 7, 12, 17, 20)  # rows are computed six at a time
SHAPES = [(16, 16), (64, 16), (80, 24), (304, 48), (960, 576)]  # out, in; panels are of 16, four at a time

bfloat16 = pytest.mark.skipif(not is_here(), reason="this CPU cannot multiply bfloat16")


@pytest.fixture(params=[1, 2])
def cores(request: pytest.FixtureRequest) -> Cores:
    return Cores(request.param)


def layer(size_out: int, size_in: int, dtype: torch.dtype = torch.bfloat16, *, bias: bool = False) -> Linear:
    torch.manual_seed(size_out)
    return Linear(size_in, size_out, bias=bias).to(dtype)


def rows(width: int, dtype: torch.dtype = torch.bfloat16) -> Rows:
    memory = Rows(MOST, width, dtype)
    memory[MOST].copy_(torch.randn(MOST, width, generator=torch.Generator().manual_seed(1)))
    return memory


@torch.inference_mode()
def check(layers: list[Linear], kind: type[Matrix], cores: Cores) -> None:
    x = rows(layers[0].in_features, layers[0].weight.dtype)
    wanted = torch.cat([each.double()(x[MOST].double()) for each in layers], 1)
    for each in layers:
        each.to(x[1].dtype)
    matrix = packed(layers, MOST, cores)
    assert type(matrix) is kind
    tolerance = 1e-2 if kind is OneDNN and x[1].dtype == torch.bfloat16 else 1e-5
    for count in COUNTS:
        torch.full((count, wanted.shape[1]), torch.nan)  # what the memory of the next answer holds, then
        torch.testing.assert_close(matrix(x, count).double(), wanted[:count], rtol=tolerance, atol=tolerance)


@bfloat16
@pytest.mark.parametrize("shape", SHAPES)
def test_products_in_bfloat16(cores: Cores, shape: tuple[int, int]) -> None:
    check([layer(*shape)], Panels, cores)


@bfloat16
def test_layers_of_one_input_with_and_without_a_bias(cores: Cores) -> None:
    check([layer(32, 48, bias=True), layer(64, 48), layer(16, 48, bias=True)], Panels, cores)


@pytest.mark.parametrize(
    ("shape", "dtype"), [pytest.param((99, 48), torch.bfloat16, marks=bfloat16), ((64, 48), torch.float32)]
)
def test_what_does_not_fit_panels_is_onednns(cores: Cores, shape: tuple[int, int], dtype: torch.dtype) -> None:
    check([layer(*shape, dtype, bias=True)], OneDNN, cores)


@bfloat16
@torch.inference_mode()
def test_a_row_has_the_same_numbers_whatever_is_computed_with_it(cores: Cores) -> None:
    """oneDNN does not promise that. So an answer in bfloat16 does not depend on its neighbours."""
    x, matrix = rows(576), packed([layer(960, 576)], MOST, cores)
    together = matrix(x, MOST)
    for row in range(MOST):
        alone = Rows(1, 576, torch.bfloat16)
        alone[1].copy_(x[MOST][row])
        assert torch.equal(matrix(alone, 1)[0], together[row])


@bfloat16
@torch.inference_mode()
def test_a_row_of_nan_is_alone_with_it(cores: Cores) -> None:
    x, matrix = rows(48), packed([layer(64, 48)], MOST, cores)
    wanted = matrix(x, MOST)
    x[MOST][3] = torch.nan
    y = matrix(x, MOST)
    assert y[3].isnan().all()
    y[3] = wanted[3]
    assert torch.equal(y, wanted)


@bfloat16
def test_a_numba_that_compiles_for_another_cpu_has_no_such_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM would end the process."""
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert type(packed([layer(64, 48)], MOST, Cores(1))) is OneDNN


def test_compiled_code_is_kept_for_just_these_sources(tmp_path: Path) -> None:
    """Numba itself would go on with what a function called before somebody changed that."""
    (tmp_path / "loop.py").write_text("a")
    before = _folder(tmp_path)
    assert _folder(tmp_path) == before
    (tmp_path / "loop.py").write_text("b")
    assert _folder(tmp_path) != before
