"""`python -m workers validate` and `sweep`: a good device passes, and each kind of bad one is seen and named."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from tests.unit.test_rngd_device import save
from workers import sweep
from workers.devices import PrefillDevice, open_prefill
from workers.prefilled import Layer, Prefilled, differences
from workers.validate import fixture, validate

LENGTHS = [1, 17, 40]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save("gemma3", tmp_path_factory.mktemp("gemma3")))


@pytest.fixture
def config(model: Model, tmp_path: Path) -> Config:
    return Config(model=str(model.directory), cache=str(tmp_path), context=64, chunk=16, dtype="float32")


class Bad:
    """A prefill device that is the real one but for one fault, which FAULT names. Made by `build`, as a factory."""

    FAULT = ""

    def __init__(self, device: PrefillDevice) -> None:
        self.geometry, self.max_tokens, self._device = device.geometry, device.max_tokens, device

    def begin(self, tokens: Sequence[int]) -> Any:
        if len(tokens) > self.max_tokens and self.FAULT == "takes too much":
            tokens = tokens[: self.max_tokens]
        return BadPrompt(self._device.begin(tokens), self.FAULT, tokens)


class BadPrompt:
    def __init__(self, prompt: Any, fault: str, tokens: Sequence[int]) -> None:
        self._prompt, self._fault, self._tokens = prompt, fault, tokens

    def advance(self, on_layer: Callable[..., None], cancelled: Callable[[], bool]) -> Any:
        def spoiled(layer: int, start: int, tokens: int, k: Any, v: Any) -> None:
            if self._fault == "zeros" and layer == 3:
                v = bytes(memoryview(v).nbytes)
            if self._fault == "no numbers" and layer == 3:
                k = np.full(memoryview(k).nbytes // 4, np.nan, dtype=np.float32).data
            if self._fault == "looks ahead" and layer == 4:
                k = (np.frombuffer(k, dtype=np.float32) + self._tokens[-1] / 100).data
            if not (self._fault == "loses a piece" and layer == 3 and start + tokens == len(self._tokens)):
                on_layer(layer, start, tokens, k, v)

        logits = self._prompt.advance(spoiled, cancelled)
        return -logits if logits is not None and self._fault == "other logits" else logits


def build(config: Config, model: Model) -> Bad:
    return Bad(open_prefill(config, model))


FACTORY = f"{__name__}:build"


def test_a_good_device_passes_and_the_report_says_on_what(config: Config, model: Model, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    assert validate(config, model, factory="", lengths=LENGTHS, report=report) == 0
    said = json.loads(report.read_text())
    assert (said["passed"], said["oversized_refused"], said["device"], said["dtype"]) == (True, True, "cpu", "float32")
    assert {"python", "kvrelay", "torch", "transformers"} <= said["versions"].keys()
    assert len(said["digest"]) == 32
    assert [prompt["tokens"] for prompt in said["prompts"]] == LENGTHS
    assert len(said["prompts"][0]["differences"]) == 2 * 6 + 1


def test_bfloat16_passes_within_its_rounding(config: Config, model: Model) -> None:
    assert validate(replace(config, dtype="bfloat16"), model, factory="", lengths=LENGTHS, report=None) == 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("zeros", "least cosine 0.000000 (V of layer 3)"),
        ("no numbers", "least cosine -1.000000 (K of layer 3)"),
        ("other logits", "(logits)"),
        ("takes too much", "FAIL  65 tokens are refused"),
    ],
)
def test_a_bad_device_fails_and_what_is_bad_is_named(
    fault: str,
    said: str,
    config: Config,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Bad, "FAULT", fault)
    assert validate(config, model, factory=FACTORY, lengths=[17], report=None) == 1
    assert said in capsys.readouterr().out


def test_pieces_that_do_not_come_are_missed(config: Config, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bad, "FAULT", "loses a piece")
    with pytest.raises(DeviceError, match="layer 3: tokens up to 32 of 40 came"):
        validate(config, model, factory=FACTORY, lengths=[40], report=None)


def test_two_exports_of_one_model_are_compared_and_the_first_layer_that_differs_is_named(
    config: Config, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    assert sweep.export(config, model, factory="", lengths=LENGTHS, folder=a) == 0
    assert sweep.export(replace(config, chunk=64), model, factory="", lengths=LENGTHS, folder=b) == 0
    assert sweep.compare(a, b, 0.999999) == 0
    monkeypatch.setattr(Bad, "FAULT", "zeros")
    sweep.export(config, model, factory=FACTORY, lengths=LENGTHS, folder=c)
    capsys.readouterr()
    assert sweep.compare(a, c, 0.999999) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"FAIL  {length} tokens" for length in LENGTHS]
    assert all("first to differ: V of layer 3" in line for line in lines)
    with pytest.raises(FileExistsError):
        sweep.export(config, model, factory="", lengths=LENGTHS, folder=a)
    (c / "17.npz").unlink()
    with pytest.raises(DeviceError, match="holds"):
        sweep.compare(a, c, 0.9)
    about = json.loads((b / sweep.ABOUT).read_text())
    (b / sweep.ABOUT).write_text(json.dumps(about | {"digest": "another"}))
    with pytest.raises(DeviceError, match="is of model"):
        sweep.compare(a, b, 0.9)


def test_a_token_that_sees_a_later_one_is_found(
    config: Config, model: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep.causality(config, model, factory="", lengths=[1, 2, 17, 40]) == 0
    assert capsys.readouterr().out.count("PASS") == 5
    monkeypatch.setattr(Bad, "FAULT", "looks ahead")
    assert sweep.causality(config, model, factory=FACTORY, lengths=[17]) == 1
    assert "FAIL: layer 4  17 tokens, token 16 changed" in capsys.readouterr().out


def test_answers_to_other_prompts_are_not_compared() -> None:
    rows = np.zeros((1, 2, 4), dtype=np.float32)
    one = Prefilled((1, 2), (Layer(0, rows, rows),), rows[0, 0])
    for other in (
        Prefilled((1, 3), one.layers, one.logits),
        Prefilled((1, 2), (), one.logits),
        Prefilled((1, 2), (Layer(1, rows[:, 1:], rows[:, 1:]),), one.logits),
    ):
        with pytest.raises(DeviceError):
            differences(one, other)
    assert [difference.cosine for difference in differences(one, one)] == [1.0, 1.0, 1.0]


def test_a_fixture_is_the_same_everywhere() -> None:
    assert fixture(5, 300) == fixture(5, 300)
    assert fixture(3, 49152) == [28438, 34703, 41086]


def test_the_commands_of_the_documents_work(config: Config, model: Model, tmp_path: Path) -> None:
    environ = {
        "KVR_MODEL": str(model.directory),
        "KVR_CONTEXT": "64",
        "KVR_DTYPE": "float32",
        "KVR_CACHE": str(tmp_path),
    }

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "workers", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path)

    shown = run("validate", "--lengths", "1,17", "--report", "report.json")
    assert shown.returncode == 0, shown
    assert shown.stdout.count("PASS") == 3
    said = json.loads((tmp_path / "report.json").read_text())
    assert said["command"] == "python -m workers validate --lengths 1,17 --report report.json"
    for folder in ("here", "there"):
        assert run("sweep", "export", folder, "--lengths", "1,17").returncode == 0
    assert run("sweep", "compare", "here", "there").stdout.count("PASS") == 2
    assert run("sweep", "causality", "--lengths", "17").returncode == 0
    wrong = run("validate", "--lengths", "1,x")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "kvrelay validate: --lengths=1,x: must be numbers of prompt tokens, as in 1,17,128,500\n",
    )
