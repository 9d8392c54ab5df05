"""How an atom worker starts, or says in a sentence why it does not: in child processes, as people meet it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from pipeline.model import SIM
from workers.devices.atom.vendor import CALLS
from workers.devices.drift import drift

TOP = Path(__file__).parents[2]
EMULATED = {"PYTHONPATH": str(TOP / "tests" / "emulation"), "KVR_TEST_EMULATED_NPU": "RBLN-CA22"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **{"vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return folder


def run(llama: Path, folder: Path, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("KVR_", "PYTHON"))}
    settings = {"KVR_MODEL": str(llama), "KVR_CONTEXT": "256", "KVR_SLOTS": "2", "KVR_DECODE_DEVICE": "atom"}
    settings |= {"KVR_LOCKS": str(folder), "KVR_CACHE": str(folder), "KVR_DTYPE": "float32"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=TOP, env=inherited | settings | environ, capture_output=True, text=True
    )


def sentence(finished: "subprocess.CompletedProcess[str]") -> str:
    """What the worker said at its end: one line, with an exit code, and no traceback."""
    assert finished.returncode == 1, finished
    assert "Traceback" not in finished.stderr
    (line,) = [line for line in finished.stderr.splitlines() if line.startswith("kvrelay ")]
    assert finished.stderr.splitlines()[-1] == line
    return line


START = ("-m", "workers", "decode")


def test_without_rebel_a_worker_says_where_it_comes_from(llama: Path, tmp_path: Path) -> None:
    said = sentence(run(llama, tmp_path, *START))
    assert said == (
        "kvrelay decode: the atom device needs rebel-compiler (No module named 'rebel'): "
        "Rebellions' own package index has it, see docs/hardware.md"
    )


def test_without_optimum_rbln_a_worker_says_how_to_get_it(llama: Path, tmp_path: Path) -> None:
    hide = "import importlib.util as u; find = u.find_spec\n"
    hide += "u.find_spec = lambda name, *rest: None if name.startswith('optimum') else find(name, *rest)\n"
    (tmp_path / "sitecustomize.py").write_text(hide)
    said = sentence(run(llama, tmp_path, *START, PYTHONPATH=str(tmp_path)))
    assert said.startswith(
        "kvrelay decode: the atom device needs optimum-rbln, which this Python lacks: `make env-atom`"
    )


def test_without_a_chip_a_worker_says_so(llama: Path, tmp_path: Path) -> None:
    said = sentence(run(llama, tmp_path, *START, **EMULATED, KVR_TEST_EMULATED_CHIPS="0"))
    assert said == (
        "kvrelay decode: the atom device finds no ATOM in this machine; `rbln-smi` lists what the driver sees"
    )


def test_without_a_way_to_import_a_worker_says_why_and_what_would_do(llama: Path, tmp_path: Path) -> None:
    said = sentence(run(llama, tmp_path, *START, **EMULATED, KVR_TEST_EMULATED_FAULTS="no_private,off_by_one"))
    assert "graph: K of layer 0, slot 0, is not what was written there" in said
    assert "private: rebel's runtime has no _update_kv_cache any more" in said
    assert "KVR_FALLBACK=local" in said


def test_without_room_on_the_chip_a_worker_says_so(llama: Path, tmp_path: Path) -> None:
    assert "do not fit the memory of ATOM 0: lower KVR_SLOTS or KVR_CONTEXT" in sentence(
        run(llama, tmp_path, *START, **EMULATED, KVR_TEST_EMULATED_FAULTS="full")
    )


def test_a_compiler_that_does_not_take_our_graphs_leaves_the_private_route(llama: Path, tmp_path: Path) -> None:
    show = "import sys; from pipeline.config import Config; from pipeline.model import Model\n"
    show += "from workers.devices import open_decode; config = Config.from_env()\n"
    show += "print(open_decode(config, Model.locate(config)).figures['kv_import'])"
    faulty = run(llama, tmp_path, "-c", show, **EMULATED, KVR_TEST_EMULATED_FAULTS="no_graph")
    assert faulty.stdout.splitlines()[-1] == "private", faulty
    wanted = run(llama, tmp_path, *START, **EMULATED, KVR_TEST_EMULATED_FAULTS="no_graph", KVR_ATOM_IMPORT="graph")
    assert "does not compile for RBLN-CA22: emulated: this graph does not compile" in sentence(wanted)


def test_a_peer_that_goes_away_does_not_kill_a_worker_with_the_vendor_s_library(llama: Path, tmp_path: Path) -> None:
    write = "import os, sys; from pipeline.config import Config; from pipeline.model import Model\n"
    write += "from workers.devices import open_decode; config = Config.from_env()\n"
    write += "open_decode(config, Model.locate(config)) if sys.argv[1] == 'open' else __import__('rebel')\n"
    write += "reader, writer = os.pipe(); os.close(reader)\n"
    write += "try: os.write(writer, b'x')\nexcept BrokenPipeError: print('alive')"
    assert run(llama, tmp_path, "-c", write, "import", **EMULATED).returncode == -signal.SIGPIPE
    assert run(llama, tmp_path, "-c", write, "open", **EMULATED).stdout.splitlines()[-1] == "alive"


def test_the_checklist_passes_on_the_emulated_chip_and_fails_where_a_fault_is(llama: Path, tmp_path: Path) -> None:
    good = run(llama, tmp_path, "-m", "workers", "checklist", "atom", **EMULATED)
    assert good.returncode == 0, good
    verdicts = [line.split()[0] for line in good.stdout.splitlines()]
    assert len(verdicts) > 10
    assert set(verdicts) == {"PASS"}
    torn = run(llama, tmp_path, "-m", "workers", "checklist", "atom", **EMULATED, KVR_TEST_EMULATED_FAULTS="torn")
    assert torn.returncode == 1
    (failed,) = [line for line in torn.stdout.splitlines() if line.startswith("FAIL")]
    assert failed.startswith("FAIL  route private gives back what it wrote")


def test_the_vendor_s_calls_are_those_that_were_recorded() -> None:
    assert drift(CALLS) == []


def test_a_vendor_s_call_that_changed_or_went_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import rebel

    monkeypatch.delattr(rebel, "device_count")
    call = next(call for call in CALLS if call.endswith(".from_pretrained"))
    monkeypatch.setitem(CALLS, call, "model_id")
    assert drift(CALLS) == [
        f"{call.partition(':')[2]} takes (model_id export rbln_config kwargs), and took (model_id)",
        "device_count is gone from rebel",
    ]


def test_the_emulated_rebel_cannot_be_imported_by_accident(llama: Path, tmp_path: Path) -> None:
    only_path = {"PYTHONPATH": EMULATED["PYTHONPATH"]}
    assert "test double" in sentence(run(llama, tmp_path, *START, **only_path))
    assert run(llama, tmp_path, "-c", "import rebel", **only_path).returncode == 1
    show = "import importlib.metadata as m; print([str(f) for f in m.files('kvrelay') if 'rebel' in str(f)])"
    assert run(llama, tmp_path, "-c", show).stdout.strip() == "[]"
