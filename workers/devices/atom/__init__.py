"""atom: decode on Rebellions ATOM, through optimum-rbln.

The vendor's own decoding graphs run; ours are the block tables, and the way in for a KV cache that another chip computed:

- `compiled`: the compiled model, from its directory, or compiled here
- `caches`: what lies where in ATOM's memory, and the routes by which a KV cache gets there
- `decode`: the slots, and the step
- `vendor`: what of the vendor's packages is called
- `checklist`: what only a chip can prove

It needs optimum-rbln and rebel-compiler, in a Python environment of their own (`make env-atom`; docs/hardware.md).
"""

import importlib.util
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.model import Model
from workers.chips import claim
from workers.devices.atom.vendor import CALLS
from workers.devices.drift import drift

if TYPE_CHECKING:
    from workers.devices.atom.decode import AtomDecode

log = logging.getLogger(__name__)


def open_decode(config: Config, model: Model) -> "AtomDecode":
    """Raises DeviceError if the SDK, the chip, or a way to import KV caches is missing."""
    present = chips("atom", config)
    for change in drift(CALLS):
        log.warning("not as it was tested: %s", change, extra={"action": "vendor_drift"})
    try:
        from workers.devices.atom.compiled import load
        from workers.devices.atom.decode import AtomDecode
    except (ImportError, AttributeError) as error:
        raise DeviceError(f"optimum-rbln or rebel lacks what is called of it: {error}") from error

    wanted = set(present) if config.atom_chips == "all" else set(map(int, config.atom_chips.split(",")))
    if missing := wanted - set(present):
        raise ConfigError("KVR_ATOM_CHIPS", config.atom_chips, f"no chip {min(missing)} is here, only {_list(present)}")
    claimed = claim(config.locks, "atom", sorted(wanted), config.atom_chips_per_worker)
    try:
        return AtomDecode(config, model, load(config, model, claimed.numbers, present[claimed.numbers[0]]), claimed)
    except BaseException:
        claimed.release()  # this process may go on, and try again
        raise


def checklist(config: Config, model: Model) -> int:
    """Proves on the chip what was inferred without one. Prints a line for each; 1 if one failed."""
    chips("atom", config)
    try:
        from workers.devices.atom.checklist import run
    except (ImportError, AttributeError) as error:
        print("FAIL  the vendor's calls are those that were tested:", "; ".join(drift(CALLS)) or error)
        return 1
    return run(config, model)


def chips(_device: str, _config: Config) -> dict[int, str]:
    """Raises DeviceError if there is no ATOM in this machine, or no SDK to ask."""
    if importlib.util.find_spec("optimum") is None or importlib.util.find_spec("optimum.rbln") is None:
        raise DeviceError(
            "the atom device needs optimum-rbln, which this Python lacks: `make env-atom` builds one that has it, "
            "and KVR_DECODE_PYTHON=.venv-atom/bin/python uses it"
        )
    try:
        import rebel
    except ImportError as error:
        raise DeviceError(
            f"the atom device needs rebel-compiler ({error}): Rebellions' own package index has it, see docs/hardware.md"
        ) from error
    found = {number: rebel.get_npu_name(number) for number in range(rebel.device_count())}
    if not found:
        raise DeviceError("the atom device finds no ATOM in this machine; `rbln-smi` lists what the driver sees")
    return found


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
