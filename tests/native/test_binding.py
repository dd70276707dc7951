"""Tests that the binding in notes_cli/lib is the pinned one, and coexists with a user's llama-cpp-python."""

from __future__ import annotations

import ctypes
import importlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

from notes_cli.engine import native
from notes_cli.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
PREPARED = ROOT / "build" / "zoo" / "llama.cpp" / "llama_cpp"  # from the checked sdist, as `make test` prepares it
VERSION = (ROOT / "native" / "LLAMA_CPP_PYTHON").read_text().split()[0]


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "native"))
    return importlib.import_module("prepare")


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
    functions = {"ggml_backend_dev_count": lambda: 0, "ggml_backend_load_all_from_path": lambda _: None}
    monkeypatch.setattr(ctypes, "CDLL", lambda _: type("Library", (), functions))
    with pytest.raises(EngineError, match=r"none of the CPU backends in .* runs on this processor. Build it with"):
        native._load_backends()
