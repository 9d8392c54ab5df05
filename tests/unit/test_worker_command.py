"""How a worker's process begins."""

import os
import sys

import pytest

from workers.__main__ import _with_huge_pages


def test_a_worker_that_computes_on_the_cpu_begins_again_once_with_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look at what is set it would begin again for ever; and whoever has set it knows better."""
    begun: list[list[str]] = []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "execv", lambda _program, command: begun.append(command))
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.delenv("GLIBC_TUNABLES")
    _with_huge_pages("sim")
    assert begun == []
    _with_huge_pages("cpu")
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    _with_huge_pages("cpu")
    assert begun == [sys.orig_argv]
