"""The atom device on the vendor's real optimum-rbln, over the emulated chip. Runs in `.venv-atom` (`make test-atom`)."""

import os
import sys
import warnings
from pathlib import Path

EMULATION = Path(__file__).parents[1] / "emulation"

os.environ["KVR_TEST_EMULATED_NPU"] = "RBLN-CA22"
os.environ["KVR_TEST_EMULATED_CHIPS"] = "64"  # devices of this process that were not collected yet keep theirs
sys.path.insert(0, str(EMULATION))

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the vendor's import warns that rebel-compiler is not installed, and rightly so
    import optimum.rbln  # noqa: F401
