"""Which compiled model the atom device loads, and when it compiles one."""

import fcntl
import json
import shutil
import threading
from pathlib import Path
from typing import Any

import optimum.rbln
import pytest
import rebel
from optimum.rbln.transformers.modeling_attention_utils import ATOM_ATTENTION_LIMITS
from rig import FLASH, WINDOW, Models, Opened, actions, prompt_of, vendors_own

from pipeline.errors import ConfigError, DeviceError
from workers.devices.atom.compiled import LONGEST_EAGER, PARTITIONS

WAITING_SECONDS = 0.3


def test_a_second_worker_compiles_nothing(
    opened: Opened, reference: Models, route: str, tmp_path: Path, compilations: list[dict[str, Any]]
) -> None:
    graphs = 5 if route == "graph" else 3  # prefill, decode of 4 and of 1; import and export
    opened(reference("llama"), cache=str(tmp_path), atom_import=route)
    assert len(compilations) == graphs
    (directory,) = (path for path in (tmp_path / "compiled").iterdir() if path.is_dir())
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    opened(reference("llama"), cache=str(tmp_path), atom_import=route).serve(1, prompt_of(20))
    assert len(compilations) == graphs
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before


@pytest.mark.parametrize(
    "change",
    [{"slots": 2}, {"context": 64}, {"atom_dtype": "float16"}, {"atom_import": "private"}, {"seed": 2}, FLASH],
    ids=["slots", "context", "dtype", "import", "weights", "flash"],
)
def test_what_changes_the_compiled_model_has_it_compiled_again(
    opened: Opened, reference: Models, tmp_path: Path, compilations: list[dict[str, Any]], change: dict[str, Any]
) -> None:
    before = {"cache": str(tmp_path), "served_name": "same", "context": 2048 if change is FLASH else 128}
    opened(reference("llama"), **before)
    compilations.clear()
    settings = {name: value for name, value in change.items() if name != "seed"}
    opened(reference("llama", change.get("seed", 1)), **before | settings)
    assert compilations


def test_a_worker_waits_for_another_that_compiles_the_same(
    opened: Opened,
    reference: Models,
    tmp_path: Path,
    compilations: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    done, directory = tmp_path / "done", tmp_path / "compiled"
    opened(reference("llama"), atom_compiled=str(done))
    compilations.clear()
    directory.mkdir()
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def finish() -> None:
            shutil.copytree(done, directory, dirs_exist_ok=True, ignore=lambda *_: [".lock"])
            fcntl.flock(lock, fcntl.LOCK_UN)

        other = threading.Timer(WAITING_SECONDS, finish)
        other.start()
        opened(reference("llama"), atom_compiled=str(directory)).serve(0, prompt_of(9))
        other.join()
    assert "compile_wait" in actions(caplog)
    assert not compilations


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_directory_of_the_vendors_own_works_by_the_private_calls_with_a_warning(
    opened: Opened, reference: Models, tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    directory = vendors_own(reference(family), tmp_path / "compiled")
    rig = opened(reference(family), atom_compiled=str(directory))
    assert (rig.device.slots, rig.device.figures["kv_import"]) == (4, "private")
    assert "compiled_elsewhere" in actions(caplog)
    rig.fill(2, prompt_of(40))
    rig.step(2)
    rig.serve(0, prompt_of(WINDOW + 1))
    rig.check(2)
    with pytest.raises(DeviceError, match="graph: the compiled model has no graph kv_import_"):
        opened(reference(family), atom_compiled=str(directory), atom_import="graph")


def test_a_directory_that_the_vendor_saved_elsewhere_works(opened: Opened, reference: Models, tmp_path: Path) -> None:
    model = optimum.rbln.RBLNLlamaForCausalLM.from_model(
        reference("llama").model,
        rbln_config={"max_seq_len": 128, "npu": "RBLN-CA22", "create_runtimes": False},
        model_save_dir=tmp_path / "first",
    )
    model.save_pretrained(tmp_path / "second")
    rig = opened(reference("llama"), slots=1, atom_compiled=str(tmp_path / "second"))
    rig.serve(0, prompt_of(40))


@pytest.mark.parametrize(("blocks", "slots"), [(3, 1), (4, 2)])
def test_the_vendors_own_choice_of_blocks_works(
    opened: Opened, reference: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocks: int, slots: int
) -> None:
    """It compiles with one block, and then makes as many as it finds room for."""
    room = staticmethod(lambda **_: blocks)
    monkeypatch.setattr(optimum.rbln.RBLNLlamaForCausalLM, "estimate_num_kvcache_blocks", room)
    options = {"max_seq_len": 2048, "kvcache_partition_len": 1024, "batch_size": 2, "attn_impl": "flash_attn"}
    directory = vendors_own(reference("llama"), tmp_path / "compiled", **options)
    rig = opened(reference("llama"), context=2048, slots=2, atom_compiled=str(directory))
    assert rig.device.slots == slots
    for slot in range(slots):
        rig.fill(slot, prompt_of(1022 + slot))
    rig.step(3)
    for slot in range(slots):
        rig.check(slot)


def test_a_directory_of_another_model_is_refused(opened: Opened, reference: Models, tmp_path: Path) -> None:
    directory = tmp_path / "compiled"
    opened(reference("llama"), atom_compiled=str(directory))
    with pytest.raises(DeviceError, match=r"was compiled from another model \(digest [0-9a-f]{32}; the served one has"):
        opened(reference("llama", 2), atom_compiled=str(directory))


def test_a_directory_with_less_context_is_refused_and_one_with_more_works(
    opened: Opened, reference: Models, tmp_path: Path
) -> None:
    directory = str(tmp_path / "compiled")
    opened(reference("llama"), atom_compiled=directory)
    with pytest.raises(DeviceError, match="KVR_CONTEXT=256: the compiled model holds 128 tokens"):
        opened(reference("llama"), atom_compiled=directory, context=256)
    rig = opened(reference("llama"), atom_compiled=directory, context=64)
    assert rig.device.max_tokens == 64
    rig.fill(0, prompt_of(62))
    rig.step(2)
    with pytest.raises(DeviceError, match="all its 64 tokens"):
        rig.step()
    rig.check(0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_compiled_model_of_four_rows_works_with_two_slots(
    opened: Opened, reference: Models, route: str, tmp_path: Path, family: str
) -> None:
    directory = str(tmp_path / "compiled")
    opened(reference(family), atom_compiled=directory, atom_import=route)
    rig = opened(reference(family), atom_compiled=directory, atom_import=route, slots=2)
    assert rig.device.slots == 2
    rig.fill(1, prompt_of(40))
    rig.step()
    rig.fill(0, prompt_of(WINDOW))
    rig.step(2)
    rig.check(0)
    rig.check(1)


@pytest.mark.parametrize(
    ("options", "context", "slots"),
    [
        ({"kvcache_num_blocks": 3}, 128, 2),  # the third is where the idle rows write
        ({"kvcache_num_blocks": 4}, 128, 4),
        ({"kvcache_num_blocks": 5, "kvcache_partition_len": 1024}, 2048, 2),
        ({"kvcache_num_blocks": 6, "kvcache_partition_len": 1024}, 2048, 2),
        ({"kvcache_num_blocks": 7, "kvcache_partition_len": 1024}, 2048, 3),
    ],
    ids=["3", "4", "5-flash", "6-flash", "7-flash"],
)
def test_fewer_blocks_than_four_rows_would_fill_make_fewer_slots(
    opened: Opened,
    reference: Models,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, int],
    context: int,
    slots: int,
) -> None:
    if "kvcache_partition_len" in options:
        options = {**options, "attn_impl": "flash_attn"}
    directory = vendors_own(reference("llama"), tmp_path / "compiled", max_seq_len=context, **options)
    rig = opened(reference("llama"), atom_compiled=str(directory), context=context)
    assert rig.device.slots == slots
    assert ("fewer_slots" in actions(caplog)) == (slots < 4)
    for slot in range(slots):
        rig.fill(slot, prompt_of(context - 10 * slot - 10))
        rig.step()
    rig.step(2)
    for slot in range(slots):
        rig.check(slot)


def test_too_few_blocks_for_a_slot_and_for_idle_rows_are_refused(
    opened: Opened, reference: Models, tmp_path: Path
) -> None:
    directory = vendors_own(reference("llama"), tmp_path / "compiled", batch_size=2, kvcache_num_blocks=1)
    with pytest.raises(DeviceError, match="has 1 KV blocks, a sequence takes 1"):
        opened(reference("llama"), atom_compiled=str(directory))


@pytest.mark.parametrize(
    ("compiled", "served", "sentence"),
    [
        ("llama", "llama-3", "the compiled model has 2 layers, this one 3"),
        ("llama-3", "llama", "the compiled model has 3 layers, this one 2"),
        ("llama", "qwen3", r"has KV caches \(4, 2, 128, 12\), which are not this model's"),
        ("llama-3", "qwen2-hybrid", "layer 1 is full_attention in the compiled model, and not in this one"),
        ("qwen2-hybrid", "llama-3", "layer 1 is sliding_attention in the compiled model, and not in this one"),
    ],
    ids=["fewer-layers", "more-layers", "head-dim", "full", "sliding"],
)
def test_a_directory_without_a_note_must_have_the_models_shape(
    opened: Opened, reference: Models, tmp_path: Path, compiled: str, served: str, sentence: str
) -> None:
    directory = vendors_own(reference(compiled), tmp_path / "compiled")
    with pytest.raises(DeviceError, match=sentence):
        opened(reference(served), atom_compiled=str(directory))


def test_caches_under_other_names_are_refused(opened: Opened, reference: Models, tmp_path: Path) -> None:
    directory = tmp_path / "compiled"
    opened(reference("llama"), atom_compiled=str(directory))
    values = json.loads((directory / "rbln_config.json").read_text())
    first, second = values["cache_metas"][:2]
    first["layer_index"], second["layer_index"] = 1, 1
    (directory / "rbln_config.json").write_text(json.dumps(values))
    with pytest.raises(DeviceError, match="not laid out as optimum-rbln"):
        opened(reference("llama"), atom_compiled=str(directory))


def test_another_vendors_class_is_refused(opened: Opened, reference: Models, tmp_path: Path) -> None:
    directory = tmp_path / "compiled"
    opened(reference("llama"), atom_compiled=str(directory))
    text = (directory / "rbln_config.json").read_text().replace("RBLNLlamaFor", "RBLNMistralFor")
    (directory / "rbln_config.json").write_text(text)
    with pytest.raises(DeviceError, match="holds a RBLNMistralForCausalLM; this device decodes RBLNLlamaForCausalLM"):
        opened(reference("llama"), atom_compiled=str(directory))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"context": 9216, "atom_partition": 2048}, "KVR_ATOM_PARTITION=2048: KVR_CONTEXT=9216 must be a multiple"),
        ({"context": 2048, "atom_partition": 512}, "KVR_ATOM_PARTITION=512: must be 0, or 1024 to 32768"),
        (
            {"context": 1024, "atom_partition": 1024},
            "KVR_ATOM_PARTITION=1024: KVR_CONTEXT=1024 must be .* at least twice",
        ),
        ({"context": 40000}, "KVR_CONTEXT=40000: .*32768"),
    ],
    ids=["no-multiple", "too-small", "one-block", "too-long"],
)
def test_a_shape_that_the_chip_cannot_have_is_refused_with_the_setting(
    opened: Opened, reference: Models, settings: dict[str, int], reason: str
) -> None:
    long = reference("llama")
    config = json.loads((long.directory / "config.json").read_text())
    assert config["max_position_embeddings"] == 16384
    with pytest.raises(ConfigError, match=reason):
        opened(long, **settings)


def test_the_limits_of_a_shape_are_the_vendors() -> None:
    limits = ATOM_ATTENTION_LIMITS
    assert limits.max_eager_seq_len == LONGEST_EAGER
    assert (limits.min_flash_partition_len, limits.max_flash_partition_len) == PARTITIONS


def test_what_else_the_vendor_refuses_ends_with_its_reason(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebel, "NPU", "RBLN-XX99")
    with pytest.raises(DeviceError, match="does not compile for RBLN-XX99: Unknown npu name"):
        opened(reference("llama"))


def test_a_compilation_that_was_killed_is_no_obstacle(
    opened: Opened, reference: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, unfinished = tmp_path / "compiled", tmp_path / "compiled" / ".unfinished"

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(rebel.RBLNCompiledModel, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(reference("llama"), atom_compiled=str(directory))
    assert unfinished.is_dir()
    (directory / "prefill.rbln").write_text("moved already, when the power went")
    (unfinished / "rbln_config.json").write_text("{")
    (unfinished / "left").write_text("from another time")
    opened(reference("llama"), atom_compiled=str(directory)).serve(0, prompt_of(20))
    assert not unfinished.exists()
    assert not (directory / "left").exists()
    assert json.loads((directory / "kvrelay.json").read_text())["model"]


def test_a_compilation_that_was_killed_while_its_files_moved_is_no_obstacle(
    opened: Opened, reference: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, rename = tmp_path / "compiled", Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.parent.name == ".unfinished" and len(list(directory.iterdir())) == 4:  # two of them have moved
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(reference("llama"), atom_compiled=str(directory))
    opened(reference("llama"), atom_compiled=str(directory)).serve(0, prompt_of(20))


def test_a_directory_with_something_else_in_it_is_not_emptied(
    opened: Opened, reference: Models, tmp_path: Path
) -> None:
    directory = tmp_path / "models"
    directory.mkdir()
    (directory / "precious").write_text("one day of compiling")
    with pytest.raises((ConfigError, DeviceError)):
        opened(reference("llama"), atom_compiled=str(directory))
    assert (directory / "precious").exists()


def test_a_directory_that_cannot_be_written_is_a_sentence(opened: Opened, reference: Models, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(DeviceError, match="nothing can be compiled into"):
        opened(reference("llama"), atom_compiled=str(tmp_path / "file" / "compiled"))


def test_a_compiled_model_that_is_there_needs_no_place_to_write(
    opened: Opened, reference: Models, tmp_path: Path
) -> None:
    directory = tmp_path / "compiled"
    opened(reference("llama"), atom_compiled=str(directory))
    (directory / ".lock").unlink()
    opened(reference("llama"), atom_compiled=str(directory)).serve(0, prompt_of(9))
    assert not (directory / ".lock").exists()


@pytest.mark.parametrize(("field", "value"), [("sliding_window", 32), ("rope_theta", 5000.0)])
def test_a_directory_without_a_note_must_have_the_models_windows_and_angles(
    opened: Opened, reference: Models, tmp_path: Path, field: str, value: float
) -> None:
    directory = vendors_own(reference("gemma3"), tmp_path / "compiled")
    text = json.loads((directory / "config.json").read_text())
    if field == "rope_theta":
        text["rope_parameters"]["full_attention"][field] = value
    else:
        text[field] = value
    (directory / "config.json").write_text(json.dumps(text))
    with pytest.raises(DeviceError, match="the compiled model is another one"):
        opened(reference("gemma3"), atom_compiled=str(directory))
