"""``python -m workers validate``: a prefill device alone, next to transformers' own model on the CPU.

For prompts of fixed token ids: K and V of every layer, the logits, the first token. A prompt that is too long must be
refused, and the device be good for the next one. The native model has its weights rounded as the device has them, and computes
in float32.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers.devices import Logits, PrefillDevice, open_prefill
from workers.prefilled import Difference, Layer, Prefilled, differences
from workers.versions import provenance

try:
    import torch
    from transformers import GenerationConfig

    from workers.devices.family import load_weights
except ImportError as error:
    raise DeviceError(f"the native model needs torch and transformers ({error}): pip install 'kvrelay[cpu]'") from None

#: Least cosine of K, V and logits with the native model's: float32 differs in the order of sums, bfloat16 rounds to 8 bits.
LEAST_COSINE = {"float32": 0.999999, "bfloat16": 0.995, "float16": 0.9995}
#: A first token may be another one only where the native model's lead is less than this part of its logits' deviation.
CLEAR = {"float32": 1e-3, "bfloat16": 0.15, "float16": 0.02}


def fixture(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Token ids, the same everywhere and for ever: Python promises that of `random.Random(text).random()`."""
    draw = random.Random(f"kvrelay {length} {seed}")
    return [int(draw.random() * vocabulary) for _ in range(length)]


class Native:
    """transformers' own forward."""

    def __init__(self, model: Model, device: PrefillDevice) -> None:
        dtype = getattr(torch, device.geometry.dtype)
        self._network = load_weights(
            model, dtype, "eager"
        ).float()  # rounded as the device's are, computed without rounding
        self._geometry = device.geometry
        self.vocabulary = int(self._network.config.get_text_config().vocab_size)

    def prefill(self, tokens: Sequence[int]) -> Prefilled:
        with torch.inference_mode():
            answer = self._network(torch.tensor([list(tokens)]), use_cache=True)
        layers = []
        for shape, cache in zip(self._geometry.layers, answer.past_key_values.layers, strict=True):
            first = shape.first_token(len(tokens))
            layers.append(
                Layer(first, *(side[0, :, first - len(tokens) :].numpy() for side in (cache.keys, cache.values)))
            )
        return Prefilled(tuple(tokens), tuple(layers), answer.logits[0, -1].numpy())

    def answer(self, tokens: Sequence[int], new: int) -> tuple[list[int], list[Logits]]:
        """`generate`, greedy, beyond EOS: so many new tokens, and the logits `[vocab]` that each was chosen from."""
        # in place of the model's own, which would lend it EOS and penalties
        self._network.generation_config = GenerationConfig(
            do_sample=False, max_new_tokens=new, pad_token_id=0, output_logits=True, return_dict_in_generate=True
        )
        ids = torch.tensor([list(tokens)])
        with torch.inference_mode():
            out = self._network.generate(ids, attention_mask=torch.ones_like(ids))  # all of it: 0 is a token, too
        return out.sequences[0, len(tokens) :].tolist(), [logits[0].numpy() for logits in out.logits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One prompt. lead: of the native model's first token over its second, in standard deviations of its logits.
    seconds: that the device took."""

    passed: bool
    sentence: str
    token: int
    native_token: int
    lead: float
    seconds: float
    differences: list[Difference]


def judge(device: PrefillDevice, native: Native, tokens: Sequence[int]) -> Verdict:
    dtype = device.geometry.dtype
    started = time.monotonic()
    mine = Prefilled.by(device, tokens)
    seconds = time.monotonic() - started
    wanted = native.prefill(tokens)
    found = differences(mine, wanted)
    worst = min(found, key=lambda one: one.cosine)
    lead = leads(wanted.logits)
    same = mine.token == wanted.token
    token = f"{mine.token}" if same else f"{mine.token}, not {wanted.token}"
    largest = max(one.largest for one in found)
    return Verdict(
        passed=worst.cosine >= LEAST_COSINE[dtype] and (same or lead < CLEAR[dtype]),
        sentence=f"first token {token}, least cosine {worst.cosine:.6f} ({worst.what}), largest difference {largest:g}",
        token=mine.token,
        native_token=wanted.token,
        lead=lead,
        seconds=seconds,
        differences=found,
    )


def leads(logits: Logits) -> float:
    """By how much the best is before the second, in standard deviations of all."""
    second, first = np.partition(logits, -2)[-2:]
    return float((first - second) / logits.std())


def validate(config: Config, model: Model, *, factory: str, lengths: Sequence[int], report: Path | None) -> int:
    """Prints a line for each prompt; 1 if one failed. report: where the whole result goes, as JSON."""
    device = open_prefill(config, model, factory)
    native = Native(model, device)
    results: list[dict[str, Any]] = []
    for length in lengths:
        verdict = judge(device, native, fixture(length, native.vocabulary))
        results.append({"tokens": length, **asdict(verdict)})
        print(f"{'PASS' if verdict.passed else 'FAIL'}  {length} tokens: {verdict.sentence}", flush=True)
    refused = _oversized_is_refused(device, native.vocabulary)
    print(f"{'PASS' if refused else 'FAIL'}  {device.max_tokens + 1} tokens are refused, and the next prompt is right")
    passed = refused and all(result["passed"] for result in results)
    if report is not None:
        header = provenance(config, device.geometry, factory or config.prefill_device)
        header["least_cosine"] = LEAST_COSINE[device.geometry.dtype]
        whole = {**header, "passed": passed, "oversized_refused": refused, "prompts": results}
        report.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(not passed)


def _oversized_is_refused(device: PrefillDevice, vocabulary: int) -> bool:
    before = Prefilled.by(device, fixture(9, vocabulary))
    try:
        device.begin(fixture(device.max_tokens + 1, vocabulary))
    except DeviceError:
        return differences(before, Prefilled.by(device, fixture(9, vocabulary)))[-1].largest == 0
    return False
