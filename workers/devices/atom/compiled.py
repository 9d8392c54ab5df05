"""The compiled model: a directory as optimum-rbln writes it, loaded onto chips, or compiled first where there is none.

Beside the vendor's prefill and decode graphs lie the two of our own that import KV caches, if the compiler takes them.
`kvrelay.json` says of which model's files a directory was made, so that weights and tokens cannot be of two models.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optimum.rbln
import rebel
import torch
from optimum.rbln.configuration_utils import RBLNCompileConfig
from transformers import Gemma3ForCausalLM

from pipeline.config import Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.model import Model
from workers.devices.atom.caches import EXPORT, IMPORT, ExportGraph, ImportGraph, caches_of
from workers.devices.family import load_weights, text_config
from workers.digest import model_digest

log = logging.getLogger(__name__)

CLASSES = {
    "llama": "RBLNLlamaForCausalLM",
    "qwen2": "RBLNQwen2ForCausalLM",
    "qwen3": "RBLNQwen3ForCausalLM",
    "gemma3_text": "RBLNGemma3ForCausalLM",
}
NOTE = "kvrelay.json"
CONFIG = "rbln_config.json"  # the vendor's; moved to its place last, so that it marks a whole model
FORMAT = 1  # of what is compiled beside the vendor's graphs
LOCK, UNFINISHED = ".lock", ".unfinished"
LONGEST_EAGER = 32_768  # tokens, on ATOM; optimum-rbln 0.12 has these limits
PARTITIONS = (1_024, 32_768)


def load(config: Config, model: Model, chips: Sequence[int], npu: str) -> Any:
    """The vendor's model object, its runtimes on `chips`. npu: their name, for the compiler."""
    digest = model_digest(model.directory, config)
    directory = Path(config.atom_compiled).expanduser() if config.atom_compiled else _place(config, digest, npu)
    if not (directory / CONFIG).is_file():
        _check_options(config)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _only_one(directory):
                if not (directory / CONFIG).is_file():
                    _compile(config, model, digest, directory, npu)
        except OSError as error:
            raise DeviceError(f"nothing can be compiled into {directory}: {error}") from error
    _check_note(directory, digest)
    name = json.loads((directory / CONFIG).read_text(encoding="utf-8"))["cls_name"].removesuffix("Config")
    if name not in CLASSES.values():
        raise DeviceError(f"{directory} holds a {name}; this device decodes {', '.join(CLASSES.values())}")
    device = chips[0] if len(chips) == 1 else list(chips)
    try:
        return getattr(optimum.rbln, name).from_pretrained(
            directory, export=False, rbln_device=device, rbln_create_runtimes=True
        )
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        if "device memory" in str(error):
            remedy = "lower KVR_SLOTS or KVR_CONTEXT, or raise KVR_ATOM_CHIPS_PER_WORKER"
            raise DeviceError(f"the model and its KV cache do not fit the memory of ATOM {device}: {remedy}") from error
        raise DeviceError(f"{directory} cannot be loaded onto ATOM {device}: {_line(error)}") from error


def import_runtimes(loaded: Any) -> dict[str, Any]:
    """name → runtime of our own graphs; the vendor's loader makes runtimes of its own graphs only."""
    names = [graph.compiled_model_name for graph in loaded.rbln_config.compile_cfgs]
    return {
        name: rebel.Runtime(graph, tensor_type="pt", device=loaded.rbln_config.device_map[name])
        for name, graph in zip(names, loaded.compiled_models, strict=True)
        if name.startswith((IMPORT, EXPORT))
    }


def _place(config: Config, digest: str, npu: str) -> Path:
    """In the cache; the name says all that a compiled model depends on."""
    attention = f"flash{config.atom_partition}" if config.atom_partition else "eager"
    shape = f"{FORMAT}-{config.slots}x{config.context}-{attention}-{config.atom_dtype}-{config.atom_import}"
    where = f"{npu}x{config.atom_chips_per_worker}-rbln{optimum.rbln.__version__}-rebel{rebel.__version__}"
    return Path(config.cache).expanduser() / "compiled" / f"{config.name.replace('/', '--')}-{digest}-{shape}-{where}"


@contextmanager
def _only_one(directory: Path) -> Iterator[None]:
    """Workers that start together do not compile the same model twice."""
    with (directory / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            log.info("another worker compiles %s; waiting for it", directory, extra={"action": "compile_wait"})
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _check_note(directory: Path, digest: str) -> None:
    note = directory / NOTE
    if not note.is_file():
        log.warning(
            "%s was not compiled by kvrelay: nothing says that its weights are those of the served model",
            directory,
            extra={"action": "compiled_elsewhere"},
        )
    elif (found := json.loads(note.read_text(encoding="utf-8"))["model"]) != digest:
        raise DeviceError(f"{directory} was compiled from another model (digest {found}; the served one has {digest})")


def _compile(config: Config, model: Model, digest: str, directory: Path, npu: str) -> None:
    """In a folder of its own inside, from which the files move up when all are there."""
    unfinished = directory / UNFINISHED
    others = {path.name for path in directory.iterdir()} - {LOCK}
    if others and not unfinished.is_dir():  # else they are of a compilation that was killed
        remedy = f"holds no compiled model but other files, {min(others)} among them: name an empty directory"
        raise ConfigError("KVR_ATOM_COMPILED", directory, remedy)
    hf = text_config(model, config)
    dtype = hf.dtype or torch.float32 if config.atom_dtype == "auto" else getattr(torch, config.atom_dtype)
    network = _text_model(load_weights(model, dtype, "eager"))
    base = getattr(optimum.rbln, CLASSES[network.config.model_type])
    bases = (_WithImport, base) if config.atom_import != "private" else (base,)
    vendor = type(base.__name__, bases, {"required": config.atom_import == "graph"})  # its name finds its configuration
    shutil.rmtree(unfinished, ignore_errors=True)
    log.info("compiling %s for %s into %s", config.name, npu, directory, extra={"action": "compile"})
    try:
        vendor.from_model(network, rbln_config=_options(config, npu), model_save_dir=unfinished)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"{config.name} does not compile for {npu}: {_line(error)}") from error
    (unfinished / NOTE).write_text(json.dumps({"model": digest, "format": FORMAT}), encoding="utf-8")
    for path in sorted(unfinished.iterdir(), key=lambda path: path.name == CONFIG):
        path.rename(directory / path.name)
    unfinished.rmdir()


def _check_options(config: Config) -> None:
    """The vendor refuses the same, in words of its own settings."""
    partition, context = config.atom_partition, config.context
    if not partition and context > LONGEST_EAGER:
        remedy = f"eager attention goes up to {LONGEST_EAGER} tokens on ATOM; beyond, set KVR_ATOM_PARTITION"
        raise ConfigError("KVR_CONTEXT", context, remedy)
    if partition and not PARTITIONS[0] <= partition <= PARTITIONS[1]:
        raise ConfigError("KVR_ATOM_PARTITION", partition, "must be 0, or {} to {}".format(*PARTITIONS))
    if partition and (context % partition or context < 2 * partition):
        remedy = f"KVR_CONTEXT={context} must be a multiple of it, and at least twice as much"
        raise ConfigError("KVR_ATOM_PARTITION", partition, remedy)


def _line(error: Exception) -> str:
    """The vendor's messages are paragraphs."""
    return " ".join(str(error).split())[:400]


def _options(config: Config, npu: str) -> dict[str, Any]:
    """One block a sequence, or with flash attention blocks of a partition each; as many as all slots can fill."""
    options = {
        "batch_size": config.slots,
        "decoder_batch_sizes": sorted(
            {config.slots, 1}, reverse=True
        ),  # a job that is alone need not pay for all slots
        "max_seq_len": config.context,
        "kvcache_num_blocks": config.slots * (config.context // (config.atom_partition or config.context)),
        "npu": npu,
        "num_devices": config.atom_chips_per_worker,
        "create_runtimes": False,
    }
    if config.atom_partition:
        options |= {"attn_impl": "flash_attn", "kvcache_partition_len": config.atom_partition}
    return options


def _text_model(network: Any) -> Any:
    """Of Gemma-3 with images, only the half that reads text."""
    if network.config.model_type != "gemma3":
        return network
    with torch.device("meta"):
        text = Gemma3ForCausalLM(network.config.text_config)
    text.model, text.lm_head = network.model.language_model, network.lm_head
    text.generation_config = network.generation_config
    return text.eval()


class _WithImport:
    """What is added to a vendor's class: our graphs, compiled in the context of its own."""

    required: bool

    @classmethod
    def _update_rbln_config(cls, **arguments: Any) -> Any:
        rbln_config = super()._update_rbln_config(**arguments)
        rbln_config.set_compile_cfgs([*rbln_config.compile_cfgs, *_graphs(rbln_config)])
        return rbln_config

    @classmethod
    def _get_compile_context(cls, *arguments: Any) -> Any:
        cls._context = super()._get_compile_context(*arguments)
        return cls._context

    @classmethod
    @torch.inference_mode()
    def get_compiled_model(cls, model: Any, rbln_config: Any) -> Any:
        compiled = super().get_compiled_model(model, rbln_config=rbln_config)
        context, tensors = cls._context
        for graph in [one for one in rbln_config.compile_cfgs if one.compiled_model_name.startswith((IMPORT, EXPORT))]:
            name = graph.compiled_model_name
            try:
                compiled[name] = cls.compile(
                    ImportGraph() if name.startswith(IMPORT) else ExportGraph(),
                    graph,
                    create_runtimes=False,
                    device=None,
                    example_inputs=graph.get_dummy_inputs(fill=0, static_tensors=tensors),
                    compile_context=context,
                )
            except Exception as error:  # a closed compiler: whatever it raises, the private route may still be there
                if cls.required:
                    raise
                log.warning("no graph %s in this model: %s", name, error, extra={"action": "no_import_graph"})
                rbln_config.set_compile_cfgs([one for one in rbln_config.compile_cfgs if one is not graph])
        return compiled


def _graphs(rbln_config: Any) -> Iterator[RBLNCompileConfig]:
    for caches in caches_of(rbln_config):
        dtype = str(caches.dtype).removeprefix("torch.")
        fresh = [len(caches.layers), *caches.shape[1:]]
        past = [(name, list(caches.shape), dtype) for name in caches.names()]
        block = ("block", [1], "int16")
        yield RBLNCompileConfig(IMPORT + caches.kind, [("k", fresh, dtype), ("v", fresh, dtype), block, *past])
        yield RBLNCompileConfig(EXPORT + caches.kind, [block, *past])
