"""rngd: prefill on FuriosaAI RNGD, through furiosa-torch.

- `graphs`: a decoder layer and the head as modules of fixed shape, of PyTorch alone
- `plan`: how a prompt is cut into such shapes
- `prefill`: a prompt through the graphs, wherever they run
- `chip`: where they run: on the chip

It needs furiosa-torch, in a Python environment of its own (`make env-rngd`; docs/hardware.md).
"""

import importlib.util
import json
import logging
import subprocess
import sys
from dataclasses import replace

from pipeline.config import Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.model import Model
from workers.chips import claim
from workers.devices import PrefillDevice
from workers.digest import model_digest

log = logging.getLogger(__name__)

PROBE_SECONDS = 120
#: Without a driver the SDK says that it is available, lists 64 devices, and fails in an allocation, perhaps natively. So a
#: child tries, and counts how far it gets.
PROBE = """
import json
import sys
from dataclasses import replace
from workers.devices.rngd.chip import prepare
prepare(int(sys.argv[1]))
import torch
count = 0
try:
    while True:
        torch.empty(1, device=f"furiosa:{count}")
        count += 1
except (RuntimeError, IndexError) as error:
    print(json.dumps({"count": count, "error": str(error)}))
"""


def open_prefill(config: Config, model: Model) -> PrefillDevice:
    """Raises DeviceError if the SDK or the chip is missing, ConfigError for what a chip cannot do."""
    if config.dtype == "float32":
        raise ConfigError("KVR_DTYPE", config.dtype, "the rngd device computes in bfloat16: set it, or auto")
    present = chips("rngd", config)
    import torch

    from workers.devices.family import geometry, load_weights, text_config, use_threads
    from workers.devices.rngd.chip import ChipExecutor, prepare
    from workers.devices.rngd.graphs import Network
    from workers.devices.rngd.plan import Plan
    from workers.devices.rngd.prefill import RngdPrefill

    wanted = set(present) if config.rngd_chips == "all" else set(map(int, config.rngd_chips.split(",")))
    if missing := wanted - set(present):
        raise ConfigError(
            "KVR_RNGD_CHIPS", config.rngd_chips, f"no chip {min(missing)} is here, only {sorted(present)}"
        )
    claimed = claim(config.locks, "rngd", sorted(wanted), 1)
    try:
        prepare(config.rngd_fusion)
        use_threads(config.prefill_threads)
        hf = text_config(model, config)
        return RngdPrefill(
            Network(load_weights(model, torch.bfloat16, "eager")),
            geometry(hf, torch.bfloat16, model_digest(model.directory, config)),
            ChipExecutor(claimed.numbers[0], config.rngd_compiled),
            Plan([int(width) for width in config.rngd_widths.split(",")], config.context),
            max_tokens=config.context,
            vocabulary=int(hf.vocab_size),
            progress=_log_progress,
            chips=claimed,
        )
    except BaseException:
        claimed.release()  # this process may go on, and try again
        raise


def checklist(config: Config, model: Model) -> int:
    """Proves on the chip what was inferred without one. Prints a line for each; 1 if one failed."""
    chips("rngd", config)
    from workers import checklist as shared
    from workers.devices import open_prefill as open_device
    from workers.devices.rngd.checklist import device_checks, vendor_checks
    from workers.validate import Native

    opened: list[PrefillDevice] = []
    config = replace(config, prefill_device="rngd")
    failed = shared.run(vendor_checks(lambda: open_device(config, model), opened))
    return max([failed, *(shared.run(device_checks(device, Native(model, device))) for device in opened)])


def chips(_device: str, config: Config) -> dict[int, str]:
    """Raises DeviceError if there is no RNGD in this machine, or no SDK to ask."""
    if importlib.util.find_spec("furiosa") is None or importlib.util.find_spec("furiosa.torch") is None:
        raise DeviceError(
            "the rngd device needs furiosa-torch, which this Python lacks: `make env-rngd` builds one that has it, "
            "and KVR_PREFILL_PYTHON=.venv-rngd/bin/python uses it"
        )
    command = [sys.executable, "-c", PROBE, str(config.rngd_fusion)]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise DeviceError(f"the rngd device did not answer within {PROBE_SECONDS} s of the first allocation") from None
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or [f"code {probe.returncode}"])[-1]
        raise DeviceError(f"the rngd device cannot be used: a process that tried ended ({last})")
    found = json.loads(probe.stdout.splitlines()[-1])
    if not found["count"]:
        if "librenegade.so" in probe.stderr + probe.stdout:
            raise DeviceError("the rngd device finds no driver in this machine (librenegade.so)")
        raise DeviceError(f"the rngd device finds no RNGD in this machine ({found['error']})")
    return dict.fromkeys(range(found["count"]), "RNGD")


def _log_progress(graph: str, number: int, count: int) -> None:
    log.info("compiling or loading graph %d of %d: %s", number + 1, count, graph, extra={"action": "compile"})
