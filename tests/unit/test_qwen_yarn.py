"""examples/qwen_yarn.py, as `--factory` finds it: texts beyond what the model was trained on, next to transformers."""

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from tests.unit.test_torch_device import FAMILIES, prompt_of, saved
from workers.devices import open_decode, open_prefill

TRAINED, CONTEXT, NEW = 64, 250, 12


@pytest.fixture(params=["qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    config = FAMILIES[request.param].to_dict() | {"max_position_embeddings": TRAINED}
    return Model(saved(tmp_path / "model", type(FAMILIES[request.param])(**config)))


def config_for(model: Model, context: int) -> Config:
    cache = str(model.directory.parent / "cache")
    settings = {"context": context, "chunk": 16, "slots": 2, "dtype": "float32"}
    return Config(model=str(model.directory), cache=cache, **settings)


def answer(config: Config, model: Model, prompt: list[int]) -> list[int]:
    prefill = open_prefill(config, model, "examples.qwen_yarn:open_prefill")
    decode = open_decode(config, model, "examples.qwen_yarn:open_decode")
    assert decode.geometry.mismatch(prefill.geometry.fingerprint()) is None
    running, logits = prefill.begin(prompt), None
    while logits is None:
        logits = running.advance(lambda layer, *piece: decode.insert(0, layer, *piece), bool)
    tokens = [int(logits.argmax())]
    decode.begin(0, len(prompt), tokens[0])
    while len(tokens) < NEW:
        tokens.append(int(decode.step()[0].argmax()))
        decode.commit(0, tokens[-1])
    return tokens


def generated(model: Model, prompt: list[int], **rope: Any) -> list[int]:
    config = transformers.AutoConfig.from_pretrained(model.directory)
    if rope:
        config.rope_parameters = {**config.rope_parameters, **rope}
        config.max_position_embeddings = int(rope["factor"] * TRAINED)
    network = transformers.AutoModelForCausalLM.from_pretrained(model.directory, config=config, dtype=torch.float32)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = network.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return list(out[0, len(prompt) :].tolist())


def test_long_texts_are_those_of_transformers_own_yarn_and_short_contexts_stay_as_they_are(model: Model) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    for length in (20, TRAINED + 1, 230):
        prompt = prompt_of(length)
        assert answer(config_for(model, CONTEXT), model, prompt) == generated(model, prompt, **yarn)
    prompt = prompt_of(40)
    assert (
        answer(config_for(model, TRAINED), model, prompt)
        == generated(model, prompt)
        != generated(model, prompt, **yarn)
    )


def test_a_half_that_is_not_stretched_is_no_pair(model: Model) -> None:
    plain, long = config_for(model, TRAINED), config_for(model, CONTEXT)
    prefill = open_prefill(plain, model)
    decode = open_decode(long, model, "examples.qwen_yarn:open_decode")
    assert "model differs" in str(decode.geometry.mismatch(prefill.geometry.fingerprint()))
    same_files = dataclasses.replace(prefill.geometry, model=decode.geometry.model)
    assert "layer 0 differs" in str(decode.geometry.mismatch(same_files.fingerprint()))


def test_another_model_than_a_qwen_is_refused(tmp_path: Path) -> None:
    model = Model(saved(tmp_path / "model", FAMILIES["llama"]))
    with pytest.raises(DeviceError, match="is for qwen2 and qwen3, and model is llama"):
        open_prefill(config_for(model, 250), model, "examples.qwen_yarn:open_prefill")
