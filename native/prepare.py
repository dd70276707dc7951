"""Put the patched llama.cpp sources and their binding into a folder: find the pinned sdist, check, unpack, patch it.

Run by CMakeLists.txt at configure time: `python prepare.py DESTINATION`. Prints one sentence and exits 1 when it
cannot. The sdist of llama-cpp-python is looked for in NOTES_SDIST (the file, or a folder holding it), else
`pip download` fetches the exact version from the user's index. What was prepared once from the same sdist and
patches is left as it is. In the end the graphs at hand are compared with those that notes_graph.cpp was written for
(graphs.py); `python prepare.py DESTINATION --accept` says that they have been read.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import graphs

HERE = Path(__file__).parent
VERSION, SHA256 = (HERE / "LLAMA_CPP_PYTHON").read_text().split()
SDIST = f"llama_cpp_python-{VERSION}.tar.gz"
BINDING = (
    *("llama_cpp/__init__.py", "llama_cpp/llama_cpp.py", "llama_cpp/mtmd_cpp.py", "llama_cpp/_ctypes_extensions.py"),
    "LICENSE.md",
)
PATCHES = sorted((HERE / "patches").glob("*.patch"))


def fail(message: str) -> None:
    sys.exit(f"notes: {message}")


def find_sdist(scratch: Path) -> Path:
    """The sdist from NOTES_SDIST, else from the package index."""
    named = os.environ.get("NOTES_SDIST")
    if named:
        path = Path(named).expanduser()
        path = path / SDIST if path.is_dir() else path
        if not path.is_file():
            fail(f"NOTES_SDIST={named}: there is no {SDIST}. Unset it to download the file, or name the file itself.")
        return path
    # --no-deps --no-binary: the source distribution alone, through the user's own index and proxy settings.
    # CMAKE_ARGS would reach the metadata step of that sdist, which needs none of our options.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-binary", "llama-cpp-python", "--dest", str(scratch), f"llama-cpp-python=={VERSION}"]
    environment = {name: value for name, value in os.environ.items() if name != "CMAKE_ARGS"}
    if subprocess.run(command, env=environment).returncode:
        fail(
            f"pip could not download llama-cpp-python=={VERSION}. Download {SDIST} elsewhere and set NOTES_SDIST to it."
        )
    return scratch / SDIST


def check(sdist: Path) -> None:
    with sdist.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        fail(f"{sdist}: SHA-256 is {digest.hexdigest()}, expected {SHA256}. This is not llama-cpp-python {VERSION}.")


def unpack(sdist: Path, target: Path) -> None:
    """The folder vendor/llama.cpp of the sdist, and in it, as `llama_cpp`, the binding with its licence."""
    root = f"llama_cpp_python-{VERSION}/"
    sources = f"{root}vendor/llama.cpp/"
    binding = {root + name: f"llama_cpp/{name.rpartition('/')[2]}" for name in BINDING}
    with tarfile.open(sdist) as archive:
        for member in archive:
            if member.name in binding:
                member.name = binding[member.name]
            elif member.name.startswith(sources) and ".." not in Path(member.name).parts:
                member.name = member.name[len(sources) :]
            else:
                continue
            if hasattr(tarfile, "data_filter"):
                archive.extract(member, target, filter="data")
            else:  # Python before 3.10.12; the hash above vouches for the content
                archive.extract(member, target)


def patch(target: Path) -> None:
    import patch_ng  # not git apply: inside a git repository that exits 0 and changes nothing

    for path in PATCHES:
        patches = patch_ng.fromfile(str(path))
        if not patches or not patches.apply(strip=0, root=str(target)):
            fail(f"{path.name} does not apply to llama-cpp-python {VERSION}. Regenerate it: see native/README.md.")


def main(target: Path, accept: bool = False) -> None:
    stamp = target / ".notes-prepared"
    state = SHA256 + "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in PATCHES)
    if not (stamp.is_file() and stamp.read_text() == state):
        make(target)
        stamp.write_text(state)
    if accept:
        graphs.accept(target)
    elif why := graphs.refusal(target):
        fail(why)


def make(target: Path) -> None:
    """Unpacked and patched, in place of what was there."""
    shutil.rmtree(target, ignore_errors=True)
    scratch = target.with_name(target.name + ".download")
    scratch.mkdir(parents=True, exist_ok=True)
    sdist = find_sdist(scratch)
    check(sdist)
    unpack(sdist, target)
    patch(target)
    shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["--accept"])
