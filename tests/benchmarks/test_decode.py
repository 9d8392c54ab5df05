"""A decode step on the CPU: transformers' forward against the own one, in turns, beside the targets and what memory allows."""

import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import workers.devices.torch as torch_device
from api.pull import pull
from pipeline.config import Config
from pipeline.model import Model
from workers.devices.torch import TorchDecode, open_decode

SLOTS, THREADS, STEPS = 16, 2, 15
ROWS = (1, 4, 8, 16)
LENGTHS = (128, 1500)
TARGET_MS = {(128, 1): 25, (128, 4): 37, (128, 16): 94}  # bfloat16, two threads, prompts of 128 tokens


def opened(directory: Path, cache: Path, *, own: bool) -> TorchDecode:
    config = Config(model=str(directory), cache=str(cache), context=2048, slots=SLOTS, decode_threads=THREADS)
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(torch_device, "unknown", lambda *_: "the benchmark compares them")
        return open_decode(config, Model(directory))


def fill(device: TorchDecode, rows: int, length: int) -> None:
    for slot in range(SLOTS):
        device.evict(slot)
    noise = np.random.default_rng(0)
    for slot in range(rows):
        for index, layer in enumerate(device.geometry.layers):
            first = layer.first_token(length)
            shape = (device.geometry.kv_heads, length - first, device.geometry.head_dim)
            k = torch.from_numpy(noise.standard_normal(shape)).to(getattr(torch, device.geometry.dtype))
            bits = k.view(torch.uint8).numpy().tobytes()
            device.insert(slot, index, first, length - first, bits, bits)
        device.begin(slot, length, 1 + slot)


def milliseconds(devices: list[TorchDecode]) -> list[float]:
    """Medians, of steps in turns: whatever else the machine does, it does to both."""
    taken: list[list[float]] = [[] for _ in devices]
    for _ in range(STEPS):
        for device, times in zip(devices, taken, strict=True):
            started = time.perf_counter()
            device.step()
            times.append(1000 * (time.perf_counter() - started))
    return [statistics.median(times) for times in taken]


def matmul_milliseconds(device: TorchDecode, rows: int) -> float:
    """Of the own forward's matrices alone: what they make of the memory's speed."""
    layers = device._forward._layers
    matrices = [
        (getattr(block, name), x)
        for block in layers.blocks
        for name, x in {
            "qkv": layers._normed,
            "output": layers._attended,
            "gate_up": layers._normed,
            "down": layers._gated,
        }.items()
    ]
    taken = []
    for _ in range(STEPS):
        started = time.perf_counter()
        with torch.inference_mode():
            for matrix, x in (*matrices, (layers._head, layers._normed)):
                matrix(x, rows)
        taken.append(1000 * (time.perf_counter() - started))
    return statistics.median(taken)


def gigabytes_per_second() -> float:
    """Of memory that is only read, as weights are."""
    memory = torch.ones(1 << 25, dtype=torch.int64)
    taken = []
    for _ in range(7):
        started = time.perf_counter()
        memory.sum()
        taken.append(time.perf_counter() - started)
    return memory.nbytes / min(taken) / 1e9


@pytest.mark.benchmark
@pytest.mark.timeout(600)
def test_a_step_of_the_own_forward_beside_transformers(tmp_path: Path) -> None:
    directory = pull(Config())
    devices = [opened(directory, tmp_path, own=own) for own in (False, True)]
    loaded = devices[0]._loaded
    parts = {id(part): part.nbytes for part in (*loaded.decoder.parameters(), *loaded.head.parameters())}
    weights = sum(parts.values())  # an embedding that is the head, too, once
    bandwidth = gigabytes_per_second()
    geometry = devices[0].geometry
    print(
        f"\n{directory.name}, {geometry.dtype}, {THREADS} threads: {weights / 1e6:.0f} MB of weights, {bandwidth:.0f} GB/s"
    )
    print("tokens rows  transformers       own  times  target   own's matrices   memory")
    for length in LENGTHS:
        for rows in ROWS:
            for device in devices:
                fill(device, rows, length)
            theirs, own = milliseconds(devices)
            limit = (weights + rows * length * geometry.bytes_per_token) / bandwidth / 1e6
            target = TARGET_MS.get((length, rows), "–")
            matrices = matmul_milliseconds(devices[1], rows)
            print(
                f"{length:6} {rows:4} {theirs:10.1f} ms {own:6.1f} ms {theirs / own:6.2f} {target:>4} ms "
                f"{matrices:13.1f} ms {limit:5.0f} ms"
            )
