"""Where a model's files are, and the few facts about it that both the API and the workers need.

A model is a directory as transformers writes it: config.json, generation_config.json, tokenizer.json,
chat_template.jinja, *.safetensors. `sim` is such a directory too, without weights, and comes with this package.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.errors import ConfigError, ModelMissing

SIM = Path(__file__).parent / "sim"


def model_directory(config: Config) -> Path:
    """The directory that KVR_MODEL means; for what `kvrelay pull` fetches, the place in the cache."""
    if config.model == "sim":
        return SIM
    if (path := Path(config.model).expanduser()).is_dir():
        return path.resolve()
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", config.model):
        raise ConfigError("KVR_MODEL", config.model, "there is no such directory, and it is not a hub id")
    return Path(config.cache).expanduser() / "models" / config.model.replace("/", "--")


@dataclass(frozen=True)
class Model:
    """A model that is there."""

    directory: Path

    @classmethod
    def locate(cls, config: Config) -> "Model":
        """Raises ModelMissing if it was not fetched."""
        model = cls(model_directory(config))
        if not (model.directory / "config.json").is_file():
            raise ModelMissing(f"no model in {model.directory}: run `kvrelay pull` (or `make run`) first")
        return model

    @cached_property
    def config(self) -> dict[str, Any]:
        values = self._json("config.json")
        return {**values, **values.get("text_config", {})}

    @cached_property
    def eos(self) -> frozenset[int]:
        """Tokens that end the text, from generation_config.json, else config.json."""
        for values in (self._json("generation_config.json"), self.config):
            ids = values.get("eos_token_id")
            if ids is not None:
                return frozenset(ids if isinstance(ids, list) else [ids])
        return frozenset()

    @property
    def tokenizer_file(self) -> Path:
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ModelMissing(f"no tokenizer.json in {self.directory}: kvrelay needs a fast tokenizer")
        return path

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    @property
    def chat_template(self) -> str | None:
        """Jinja source, None if the model has none (a base model)."""
        path = self.directory / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named ones
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        return template

    def _json(self, name: str) -> dict[str, Any]:
        path = self.directory / name
        if not path.is_file():
            return {}
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return values
