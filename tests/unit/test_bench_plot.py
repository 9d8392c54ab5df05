"""Pictures need a library that need not be there."""

import sys
from pathlib import Path

import pytest

from bench import plot
from bench.errors import Unfit


def test_without_matplotlib_a_picture_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unfit, match=r"needs matplotlib: pip install 'kvrelay\[bench\]'"):
        plot.check(Path("picture.svg"))
