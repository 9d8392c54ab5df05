"""``python -m workers sweep``: what a prefill device computes for a set of prompts, kept in files, and compared later.

For chips that are not in one machine: export on each, carry the folders together, compare. The device is called as a live
worker calls it (`workers/prefilled.py`).
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers.devices import open_prefill
from workers.prefilled import Prefilled, differences
from workers.validate import fixture
from workers.versions import provenance

ABOUT = "about.json"


def export(config: Config, model: Model, *, factory: str, lengths: Sequence[int], folder: Path) -> int:
    """One .npz a prompt, and what computed it."""
    device = open_prefill(config, model, factory)
    folder.mkdir(parents=True, exist_ok=False)
    for length in lengths:
        Prefilled.by(device, fixture(length, _vocabulary(model))).save(folder / f"{length}.npz")
        print(f"{length} tokens", flush=True)
    about = provenance(config, device.geometry, factory or config.prefill_device)
    (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return 0


def compare(a: Path, b: Path, least_cosine: float) -> int:
    """Prints, for each prompt, the least cosine, the largest difference, and the first layer that differs at all; 1 if a
    cosine is below `least_cosine`. Raises DeviceError if the two are not of the same model and prompts."""
    about = [json.loads((folder / ABOUT).read_text(encoding="utf-8")) for folder in (a, b)]
    if about[0]["digest"] != about[1]["digest"]:
        raise DeviceError(f"{a} is of model {about[0]['digest']}, {b} of {about[1]['digest']}")
    names = [sorted(path.name for path in folder.glob("*.npz")) for folder in (a, b)]
    if names[0] != names[1]:
        raise DeviceError(f"{a} holds {names[0]}, {b} holds {names[1]}")
    failed = False
    for name in sorted(names[0], key=lambda name: int(name.removesuffix(".npz"))):
        one, other = Prefilled.load(a / name), Prefilled.load(b / name)
        found = differences(one, other)
        worst = min(found, key=lambda difference: difference.cosine)
        first = next((difference.what for difference in found if difference.largest), "nothing")
        bad = worst.cosine < least_cosine
        failed |= bad
        print(
            f"{'FAIL' if bad else 'PASS'}  {len(one.tokens)} tokens: first token {one.token} and {other.token}, least cosine "
            f"{worst.cosine:.6f} ({worst.what}), largest difference {max(d.largest for d in found):g}, first to differ: {first}"
        )
    return int(failed)


def causality(config: Config, model: Model, *, factory: str, lengths: Sequence[int]) -> int:
    """Changes a later token, and looks at the K and V of earlier ones: 1 if they change, for then tokens see later ones."""
    device = open_prefill(config, model, factory)
    failed = False
    for length in lengths:
        prompt = fixture(length, _vocabulary(model))
        for changed in sorted({length // 2, length - 1} - {0}):
            other = [*prompt]
            other[changed] = (prompt[changed] + 1) % _vocabulary(model)
            seen = first_layer_that_saw(Prefilled.by(device, prompt), Prefilled.by(device, other), changed)
            failed |= seen is not None
            verdict = "PASS" if seen is None else f"FAIL: layer {seen}"
            print(f"{verdict}  {length} tokens, token {changed} changed", flush=True)
    return int(failed)


def first_layer_that_saw(a: Prefilled, b: Prefilled, changed: int) -> int | None:
    """The first layer whose K or V of tokens before `changed` are not the same, bit for bit. a, b: equal up to there."""
    for index, (one, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        earlier = max(0, changed - one.first)
        for x, y in ((one.k, other.k), (one.v, other.v)):
            if not np.array_equal(x[:, :earlier], y[:, :earlier]):
                return index
    return None


def _vocabulary(model: Model) -> int:
    vocabulary = model.config.get("vocab_size")
    if vocabulary is None:
        raise DeviceError(f"{model.directory / 'config.json'} does not say its vocab_size")
    return int(vocabulary)
