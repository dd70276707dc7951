"""Unpacks and patches llama.cpp: finds the pinned sdist of llama-cpp-python, checks its digest, applies the patches.

Run by CMakeLists.txt at configure time: `python prepare.py DESTINATION --patches hooks,fixes`. Prints one sentence and
exits 1 on failure. The sdist comes from NOTES_SDIST (the file or its folder), else `pip download` fetches the exact
version from the user's index. A folder prepared from the same sdist and patches is left unchanged. Finally the
unpatched graphs are compared with those that notes_graph.cpp was written for (graphs.py); `python prepare.py
DESTINATION --accept` records that they have been reviewed.
"""

from __future__ import annotations

import argparse
import filecmp
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
GROUPS = ("hooks", "fixes", "speed", "recurrent")  # folders of native/patches, in the order in which they are applied


def fail(message: str) -> None:
    sys.exit(f"notes: {message}")


def find_sdist(scratch: Path) -> Path:
    """Return the sdist from NOTES_SDIST, else from the package index."""
    named = os.environ.get("NOTES_SDIST")
    if named:
        path = Path(named).expanduser()
        path = path / SDIST if path.is_dir() else path
        if not path.is_file():
            fail(f"NOTES_SDIST={named}: there is no {SDIST}. Unset it to download the file, or name the file itself.")
        return path
    # --no-deps --no-binary: only the source distribution, through the user's index and proxy settings.
    # CMAKE_ARGS would reach the metadata step of that sdist, which must not get our options.
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
    """Unpack vendor/llama.cpp of the sdist, and into it, as `llama_cpp`, the binding with its licence."""
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
            else:  # Python before 3.10.12; the content has been checked by its digest
                archive.extract(member, target)


def patches_of(groups: str) -> list[Path]:
    """Return the patches of a comma-separated list of groups, in the order of application."""
    named = [group.strip() for group in groups.split(",") if group.strip()]
    for group in named:
        if group not in GROUPS:
            fail(f"NOTES_PATCHES={groups}: there is no group {group!r}. The groups are {', '.join(GROUPS)}.")
    if "hooks" not in named:
        fail(f"NOTES_PATCHES={groups}: without the group 'hooks' nothing of notes can be compiled. Add it.")
    return [path for group in GROUPS if group in named for path in sorted((HERE / "patches" / group).glob("*.patch"))]


def patch(target: Path, paths: list[Path]) -> None:
    import patch_ng  # not git apply: inside a git repository that exits 0 and changes nothing

    for path in paths:
        patches = patch_ng.fromfile(str(path))
        if not patches or not patches.apply(strip=0, root=str(target)):
            fail(f"{path.name} does not apply to llama-cpp-python {VERSION}. Regenerate it: see native/README.md.")


def main(target: Path, groups: str, accept: bool = False) -> None:
    paths = patches_of(groups)
    stamp = target / ".notes-prepared"
    state = SHA256 + "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in paths)
    if not (stamp.is_file() and stamp.read_text() == state):
        make(target, paths)
        stamp.write_text(state)
    if accept:
        graphs.accept(target)
    elif why := graphs.refusal(target):
        fail(why)


def make(target: Path, paths: list[Path]) -> None:
    """Unpack and patch the sources, replacing the folder."""
    scratch = target.with_name(target.name + ".download")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    sdist = find_sdist(scratch)
    check(sdist)
    made = scratch / "llama.cpp"
    unpack(sdist, made)
    graphs.record(made)
    patch(made, paths)
    set_times(made, target)
    shutil.rmtree(target, ignore_errors=True)
    made.rename(target)
    shutil.rmtree(scratch, ignore_errors=True)


def set_times(made: Path, before: Path) -> None:
    """Give files the times of equal files of `before`, and others the current time: a build compares times, and those
    in the archive are older than any object file."""
    for path in made.rglob("*"):
        old = before / path.relative_to(made)
        if path.is_file() and old.is_file() and filecmp.cmp(old, path, shallow=False):
            os.utime(path, ns=(old.stat().st_atime_ns, old.stat().st_mtime_ns))
        elif path.is_file():
            os.utime(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--patches", default=",".join(GROUPS), help="groups of native/patches, with commas")
    parser.add_argument("--accept", action="store_true", help="the graphs have been read: write GRAPHS.sha256")
    given = parser.parse_args()
    main(given.target, given.patches, given.accept)
