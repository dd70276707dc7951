"""Tests of the build: groups of patches, the size of the hooks, graphs that changed, and the pinned binding."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from notes_cli.engine import native, recurrent
from notes_cli.engine.context import Context
from notes_cli.engine.limits import ContextOptions
from notes_cli.engine.model import Model
from notes_cli.errors import EngineError, UnsupportedError

from ..conftest import MakeModel

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "native" / "patches"
MOST = 60  # lines that the hooks may add to llama.cpp


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "native"))
    return importlib.import_module("prepare")


def added(text: str) -> list[str]:
    """The lines that a patch adds, empty ones and comments too."""
    return re.findall(r"^\+(?!\+\+ ).*", text, re.MULTILINE)


def test_the_hooks_are_small() -> None:
    """Call sites alone: a kernel or a bug fix belongs to another group."""
    lines = [line for path in (PATCHES / "hooks").glob("*.patch") for line in added(path.read_text())]
    assert 0 < len(lines) <= MOST


def test_every_patch_is_in_a_group(prepare: ModuleType) -> None:
    """Each patch names its llama.cpp, the problem and the change; a fix has a reproduction."""
    assert {path.name for path in PATCHES.iterdir()} == set(prepare.GROUPS)
    assert sorted(prepare.patches_of(",".join(prepare.GROUPS))) == sorted(PATCHES.rglob("*.patch"))
    for path in PATCHES.rglob("*.patch"):
        head = path.read_text().partition("\n--- a/")[0]
        wanted = {"Target", "Problem", "Fix"} | ({"Reproduction"} if path.parent.name == "fixes" else set())
        assert wanted <= set(re.findall(r"^(\w+): ", head, re.MULTILINE)), path
        for named in re.findall(r"\b(?:bench|tests|native)/[\w/]+\.(?:py|cpp|h)\b(?!\s+of\s+commit)", head):
            assert (ROOT / named).is_file(), (path, named)


def test_groups_are_chosen_by_name(prepare: ModuleType) -> None:
    """In whatever order they are named: hooks first, on which capture builds."""
    assert {path.parent.name for path in prepare.patches_of("hooks")} == {"hooks"}
    assert [path.parent.name for path in prepare.patches_of("recurrent, hooks")] == ["hooks", "hooks", "recurrent"]
    with pytest.raises(SystemExit, match=r"no group 'sped'. The groups are hooks, fixes, speed, recurrent"):
        prepare.patches_of("hooks,sped")
    with pytest.raises(SystemExit, match="without the group 'hooks'"):
        prepare.patches_of("fixes,speed")


def test_a_file_is_new_where_its_text_is(prepare: ModuleType, tmp_path: Path) -> None:
    """Ninja compares times: a file that loses its patch must be newer than its object file."""
    made, before = tmp_path / "made", tmp_path / "before"
    texts = {"same.cpp": ("same", "same"), "other.cpp": ("plain", "patched"), "new.cpp": ("new", None)}
    for folder, at, time in ((made, 0, 1), (before, 1, 1000)):  # 1: as the archive has them
        (folder / "src").mkdir(parents=True)
        for name, versions in texts.items():
            if versions[at] is not None:
                (folder / "src" / name).write_text(versions[at])
                os.utime(folder / "src" / name, (time, time))
    prepare.set_times(made, before)
    times = {path.name: path.stat().st_mtime for path in made.rglob("*.cpp")}
    assert times["same.cpp"] == 1000 < min(times["other.cpp"], times["new.cpp"])


def test_the_library_names_its_groups(prepare: ModuleType) -> None:
    assert "hooks" in native.PATCHES and set(native.PATCHES) <= set(prepare.GROUPS)


@pytest.mark.skipif("recurrent" in native.PATCHES, reason="the library has the group")
def test_states_are_not_carried_without_the_group(make_model: MakeModel) -> None:
    """Refused with one reason, also for functions that the library lacks; the state can still be restored."""
    with Model(make_model("mamba")) as model, Context(model, ContextOptions(n_ctx=64, n_threads=1)) as context:
        why = context.supports("carry")
        assert why and "without the patch group 'recurrent'" in why
        assert context.supports("restore") is None
        assert recurrent.can_carry(context, 0, 8, 4) == why
        with pytest.raises(UnsupportedError, match="without the patch group 'recurrent'"):
            recurrent.margins(context)
        with pytest.raises(UnsupportedError), recurrent.capturing(context, 0):
            pass


@pytest.mark.skipif("fixes" in native.PATCHES, reason="the library has the group")
def test_what_llama_cpp_computes_wrongly_is_refused_without_the_fixes() -> None:
    """CogVLM always, and several sequences in one batch of some recurrent models, which may come one by one."""
    import zoo

    tokens = np.arange(4, dtype=np.int32)
    options = ContextOptions(n_ctx=64, n_threads=1, n_sequences=2, unified=True)
    with Model(zoo.zoo_model("cogvlm-dense")) as model, Context(model, options) as context:
        for operation in native.OPERATIONS:
            assert "without the patch group 'fixes'" in str(context.supports(operation))
        with pytest.raises(UnsupportedError, match="without the patch group 'fixes'"):
            context.append({0: tokens})
    for name in ("plamo2-dense", "arwkv7-dense", "rwkv6qwen2-dense"):
        with Model(zoo.zoo_model(name)) as model, Context(model, options) as context:
            with pytest.raises(UnsupportedError, match="one sequence after the other"):
                context.append({0: tokens, 1: tokens})
            context.append({0: tokens})
            context.append({1: tokens})


PREPARED = ROOT / "build" / "zoo" / "llama.cpp" / "llama_cpp"  # from the checked sdist, as `make test` prepares it
VERSION = (ROOT / "native" / "LLAMA_CPP_PYTHON").read_text().split()[0]


def run(code: str, *path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own, with these folders to import from."""
    found = os.pathsep.join([*map(str, path), *sys.path])
    environment = os.environ | variables | {"PYTHONPATH": found}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def sdist(path: Path, files: dict[str, str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"llama_cpp_python-{VERSION}/{name}")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


def test_it_is_that_of_the_pinned_sdist() -> None:
    """The modules equal those of the checked and patched sdist, and there is no other one."""
    folder = Path(importlib.import_module("notes_cli.lib").__file__ or "").parent
    modules = sorted(path.name for path in folder.glob("*.py"))
    assert modules == ["__init__.py", "_ctypes_extensions.py", "llama_cpp.py", "mtmd_cpp.py"]
    for name in modules:
        assert (folder / name).read_bytes() == (PREPARED / name).read_bytes()
    assert importlib.import_module("notes_cli.lib").__version__ == native.UPSTREAM == VERSION


def test_another_sdist_is_refused(prepare: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of that name with other bytes: its digest and the expected one are named, and nothing is unpacked."""
    path = sdist(tmp_path / prepare.SDIST, {"llama_cpp/llama_cpp.py": "import os"})
    monkeypatch.setenv("NOTES_SDIST", str(path))
    with pytest.raises(SystemExit, match=f"SHA-256 is [0-9a-f]{{64}}, expected {prepare.SHA256}"):
        prepare.make(tmp_path / "llama.cpp", [])
    assert not (tmp_path / "llama.cpp").exists()


def test_only_what_is_used_is_unpacked(prepare: ModuleType, tmp_path: Path) -> None:
    """llama.cpp and the modules that bind llama.h and mtmd.h, with their licence; nothing outside of the folder."""
    files = {name: name for name in prepare.BINDING}
    files |= dict.fromkeys(("llama_cpp/llama.py", "llama_cpp/server/app.py", "vendor/llama.cpp/../../evil"), "")
    path = sdist(tmp_path / "sdist.tar.gz", files | {"vendor/llama.cpp/src/llama.cpp": "int main() {}"})
    prepare.unpack(path, tmp_path / "to" / "llama.cpp")
    found = {each.relative_to(tmp_path / "to").as_posix() for each in (tmp_path / "to").rglob("*") if each.is_file()}
    names = ("__init__.py", "llama_cpp.py", "mtmd_cpp.py", "_ctypes_extensions.py", "LICENSE.md")
    assert found == {"llama.cpp/src/llama.cpp", *(f"llama.cpp/llama_cpp/{name}" for name in names)}


def test_a_llama_cpp_beside_notes_is_left_alone(tmp_path: Path) -> None:
    """It is not imported, its variable neither obeyed nor set, and it can be imported before or after."""
    (tmp_path / "llama_cpp").mkdir()
    (tmp_path / "llama_cpp" / "__init__.py").write_text("import os\nFOUND = os.environ.get('LLAMA_CPP_LIB_PATH')\n")
    code = """
import os, sys
before = dict(os.environ)
{}
from notes_cli.engine import native
print(native.llama.llama_max_devices() > 0, "llama_cpp" in sys.modules, dict(os.environ) == before)
import llama_cpp
print(llama_cpp.FOUND, llama_cpp.__file__)
"""
    for first, there in (("", False), ("import llama_cpp", True)):
        done = run(code.format(first), tmp_path, LLAMA_CPP_LIB_PATH="/nowhere")
        assert done.stdout.splitlines() == [f"True {there} True", f"/nowhere {tmp_path / 'llama_cpp' / '__init__.py'}"]
        assert done.stderr == ""


def test_libraries_of_another_llama_cpp_are_not_taken_for_ours(tmp_path: Path) -> None:
    """A process that has loaded a libllama and a libggml of that name still gets ours, with all they need."""
    named = "-Wl,-install_name," if sys.platform == "darwin" else "-Wl,-soname,"
    paths = []
    for name in ("libllama.so", "libggml.so", "libggml-base.so", "libggml-cpu.so"):
        paths.append(tmp_path / name)
        command = ["cc", "-shared", "-x", "c", os.devnull, named + name, "-o", str(paths[-1])]
        subprocess.run(command, check=True)
    code = f"import ctypes\nkept = [ctypes.CDLL(path) for path in {list(map(str, paths))}]\n"
    done = run(code + "from notes_cli.engine import devices\nprint(*devices.available())")
    assert "CPU" in done.stdout and done.stderr == ""


def test_no_backend_for_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that can be loaded: a sentence with the folder, and no crash at the first model."""
    names = ("ggml_backend_dev_count", "ggml_backend_dev_by_type", "ggml_backend_load_all_from_path")
    functions = {name: lambda *_: 0 for name in names}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("Library", (), functions))
    with pytest.raises(EngineError, match=r"none of the CPU backends in .* runs on this processor. Build it with"):
        native._load_backends()


LLAMA_CPP = ROOT / "build" / "zoo" / "llama.cpp"  # as `make zoo` and `make test` prepare it


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("graphs", ROOT / "native/graphs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "graphs", cache(module.graphs)
    )  # reads all sources, of which a test changes one at most
    monkeypatch.setattr(module, "LIST", shutil.copy(module.LIST, tmp_path / "GRAPHS.sha256"))
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    shutil.copytree(LLAMA_CPP / "src", folder / "src")
    shutil.copy(LLAMA_CPP / ".notes-pristine", folder)
    return folder


def change(source: Path, name: str) -> None:
    """Another version of llama.cpp has another file of that name: its digest before patching is another one."""
    pristine = source / ".notes-pristine"
    lines = [
        f"{'0' * 64}  {file}" if file == f"src/models/{name}" else f"{digest}  {file}"
        for digest, file in map(str.split, pristine.read_text().splitlines())
    ]
    assert lines != pristine.read_text().splitlines()
    pristine.write_text("\n".join(lines) + "\n")


def test_the_pinned_sources_are_those_that_were_read(graphs: ModuleType) -> None:
    """All architectures that notes_graph.cpp names are on the list."""
    assert graphs.refusal(LLAMA_CPP) == ""


def test_a_changed_graph_is_named(graphs: ModuleType, source: Path) -> None:
    """The build stops with instructions, and continues after `--accept`."""
    change(source, "qwen3.cpp")
    why = graphs.refusal(source)
    assert "src/models/qwen3.cpp has changed" in why and why.count("has changed") == 1
    assert "native/prepare.py build/llama.cpp --accept" in why and "\n" not in why
    graphs.accept(source)
    assert graphs.refusal(source) == ""


def test_a_graph_that_is_gone_or_new(graphs: ModuleType, source: Path) -> None:
    """One cannot be found; one is named by notes_graph.cpp and has not been read. One whose rows are never moved may
    change."""
    change(source, "deepseek4.cpp")
    assert graphs.refusal(source) == ""
    lines = graphs.LIST.read_text().splitlines()
    graphs.LIST.write_text("\n".join(line for line in lines if "gemma3.cpp" not in line) + "\n")
    assert "src/models/gemma3.cpp is new to the list" in graphs.refusal(source)
    (source / "src/models/llama.cpp").unlink()
    graphs.graphs.cache_clear()
    assert "llama.cpp" in graphs.refusal(source)


def test_our_own_patches_change_no_digest(graphs: ModuleType, source: Path) -> None:
    """A bug fix may be left out: files count as they were before patching."""
    path = source / "src/models/plamo2.cpp"
    graphs.record(source)
    graphs.accept(source)
    path.write_text(path.read_text() + "// patched\n")
    assert graphs.refusal(source) == ""
    graphs.record(source)
    assert "src/models/plamo2.cpp has changed" in graphs.refusal(source)
