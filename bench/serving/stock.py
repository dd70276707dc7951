"""llama.cpp's own programs, of the same sdist as our library and without our patches, built once into build/stock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "native"))
import prepare  # type: ignore[import-not-found]  # noqa: E402  unpacks the sources of our library

FOLDER = ROOT / "build" / "stock"
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


def stock(name: str = "llama-server", folder: Path = FOLDER) -> Path:
    """The program of that name; built if it is not there, which takes ten minutes on two cores for the first. Raise
    CalledProcessError."""
    program, stamp = folder / "bin" / name, folder / ".sdist"
    if not (stamp.is_file() and stamp.read_text() == prepare.SHA256):
        _unpack(folder)
        stamp.write_text(prepare.SHA256)
    if not program.is_file():
        print(f"Building llama.cpp's own {name} (10 minutes on two cores, once) ...", file=sys.stderr, flush=True)
        _build(name, folder)
    return program


def _unpack(folder: Path) -> None:
    """The sources, afresh."""
    sources = folder / "llama.cpp"
    shutil.rmtree(folder, ignore_errors=True)
    scratch = folder / "download"
    scratch.mkdir(parents=True)
    sdist = prepare.find_sdist(scratch)
    prepare.check(sdist)
    prepare.unpack(sdist, sources)  # and not `prepare.patch`
    shutil.rmtree(scratch)


def _build(name: str, folder: Path) -> None:
    sources = folder / "llama.cpp"
    settings = [f"-D{name}={value}" for name, value in SETTINGS.items()]
    environment = {name: value for name, value in os.environ.items() if name not in ("CFLAGS", "CXXFLAGS")}
    with (folder / "build.log").open("w") as log:
        for command in (
            ["cmake", "-S", str(sources), "-B", str(folder), "-G", "Ninja", "-Wno-dev", *settings],
            ["cmake", "--build", str(folder), "--target", name, "-j", JOBS],
        ):
            subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, env=environment)


if __name__ == "__main__":
    print(stock())
