"""Every graph that the rngd device builds, imported by the vendor's compiler and executed on the CPU, next to eager PyTorch."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from furiosa.torch import dryrun

from api.pull import pull
from pipeline.config import Config
from pipeline.model import SIM, Model
from tests.evidence import keep
from tests.rngd.dfg import DfgExecutor, EagerExecutor, build
from tests.unit.test_torch_device import FAMILIES, prompt_of
from workers.devices.rngd.chip import register
from workers.devices.rngd.prefill import RngdPrefill

pytestmark = pytest.mark.timeout(1800)

CONTEXT = 64
#: bfloat16 has 8 bits of mantissa; sums in another order differ by some of the last one. Of values up to 20, and up to 120.
SMALL_BOUND, REAL_BOUND = 0.016, 0.75
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
EVIDENCE = "rngd-graphs"
LENGTHS = (1, 15, 16, 20, 33, 40, 64)


def saved(config: transformers.PreTrainedConfig, path: Path) -> Path:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return path


def both(directory: Path, **settings: Any) -> tuple[RngdPrefill, RngdPrefill]:
    config = Config(model=str(directory), **settings)
    return build(config, Model(directory), DfgExecutor()), build(config, Model(directory), EagerExecutor())


def prefilled(device: RngdPrefill, prompt: list[int]) -> tuple[list[torch.Tensor], np.ndarray]:
    """K and V of every piece, and the logits."""
    tensors: list[torch.Tensor] = []

    def on_layer(_layer: int, _start: int, _tokens: int, *kv: memoryview) -> None:
        tensors.extend(torch.frombuffer(bytearray(buffer), dtype=torch.bfloat16).float() for buffer in kv)

    running, logits = device.begin(prompt), None
    while logits is None:
        logits = running.advance(on_layer, bool)
    return tensors, logits


def difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    assert len(a) == len(b)
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_of_a_small_model_equal_eager_bit_for_bit(family: str, tmp_path: Path) -> None:
    dfg, eager = both(saved(FAMILIES[family], tmp_path), context=CONTEXT, rngd_widths="16,32")
    assert len(dfg.graphs) >= 4, "both widths, with and without a past"
    for length in LENGTHS:
        prompt = prompt_of(length)
        (kv, logits), (kv_eager, logits_eager) = prefilled(dfg, prompt), prefilled(eager, prompt)
        assert difference(kv, kv_eager) == 0
        assert np.array_equal(logits, logits_eager)
    keep(EVIDENCE, f"{family}, small, imported", graphs=sorted(dfg.graphs), lengths=LENGTHS, difference=0)


def test_graphs_of_a_wider_model_equal_eager_but_for_the_order_of_sums(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        **{"vocab_size": 300, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2},
        **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048},
    )
    dfg, eager = both(saved(config, tmp_path), context=1024, rngd_widths="512")
    prompt = prompt_of(700)
    (kv, logits), (kv_eager, logits_eager) = prefilled(dfg, prompt), prefilled(eager, prompt)
    found = difference(kv, kv_eager)
    assert found <= SMALL_BOUND
    assert logits.argmax() == logits_eager.argmax()
    keep(EVIDENCE, "llama, 512 wide, imported", lengths=[700], difference=found, bound=SMALL_BOUND)


def test_smollm2_s_real_weights_give_eager_s_first_token_at_width_128() -> None:
    directory = pull(Config())
    dfg, eager = both(directory, context=128, rngd_widths="128")
    found = []
    for text in ([504, 3575, 282, 4649, 314], prompt_of(100)):
        (kv, logits), (kv_eager, logits_eager) = prefilled(dfg, text), prefilled(eager, text)
        assert logits.argmax() == logits_eager.argmax()
        found.append(difference(kv, kv_eager))
    assert max(found) <= REAL_BOUND
    keep(EVIDENCE, "SmolLM2-135M, real weights, imported", lengths=[5, 100], difference=max(found), bound=REAL_BOUND)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_operator_of_a_layer_compiles_for_the_chip(family: str, tmp_path: Path) -> None:
    if shutil.which(CROSS_COMPILER) is None:
        pytest.skip(f"no {CROSS_COMPILER} on PATH (Debian: gcc-aarch64-linux-gnu): nothing can be compiled for RNGD")
    register()
    _, device = both(saved(FAMILIES[family], tmp_path), context=128, rngd_widths="128")
    network = device.network
    for kind in sorted(set(network.kinds)):
        h = torch.zeros((1, 128, network.embed.embedding_dim), dtype=torch.bfloat16)
        angles = network.angles(kind, h, torch.arange(128)[None])
        weights = network.weights(network.kinds.index(kind))
        graph = network.layer_graph(kind, has_past=False)
        result = dryrun.dryrun(graph, h, *angles, network.mask(kind, 0, 128, 0), *weights, verbose=False)
        failed = [one for one in result.reports if str(one.report.status).endswith((".FAIL", ".ERROR"))]
        assert not failed, failed
        keep(EVIDENCE, f"{family}, a layer of {kind}, compiled", operators=result.statistics.compile_success, failed=0)
