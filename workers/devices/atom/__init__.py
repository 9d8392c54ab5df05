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
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers.chips import claim

if TYPE_CHECKING:
    from workers.devices.atom.decode import AtomDecode

log = logging.getLogger(__name__)


def open_decode(config: Config, model: Model) -> "AtomDecode":
    """Raises DeviceError if the SDK, the chip, or a way to import KV caches is missing."""
    present = chips("atom")
    from workers.devices.atom.compiled import load
    from workers.devices.atom.decode import AtomDecode
    from workers.devices.atom.vendor import drift

    for change in drift():
        log.warning("not as it was tested: %s", change, extra={"action": "vendor_drift"})
    wanted = range(len(present)) if config.atom_chips == "all" else map(int, config.atom_chips.split(","))
    claimed = claim(config.locks, "atom", sorted(set(wanted) & set(present)), config.atom_chips_per_worker)
    return AtomDecode(config, model, load(config, model, claimed.numbers, present[claimed.numbers[0]]), claimed)


def checklist(config: Config, model: Model) -> int:
    """Proves on the chip what was inferred without one. Prints a line for each; 1 if one failed."""
    chips("atom")
    from workers.devices.atom.checklist import run

    return run(config, model)


def chips(_device: str) -> dict[int, str]:
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
