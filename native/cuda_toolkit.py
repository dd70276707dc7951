"""Makes a CUDA toolkit folder for an nvcc without cuBLAS, of links to nvcc's toolkit and to PyPI's nvidia-cublas.

    CUDAToolkit_ROOT=$(python native/cuda_toolkit.py FOLDER)

prints nvcc's own folder if it is complete, else FOLDER. Exit status 1, with the reason, if there is no nvcc.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path


def root(nvcc: str) -> tuple[Path, str]:
    """Return the folder with the compiler's bin/ and include/, and its version (13.0), from the output of a dry run,
    since `nvcc` may be a wrapper script. Raises CalledProcessError."""
    dry = subprocess.run([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=True)
    top = re.search(r"^#\$ TOP=(.*)$", dry.stderr, re.MULTILINE)
    version = re.search(
        r"release (\d+\.\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    )
    if top is None or version is None:
        raise SystemExit(f"{nvcc} does not name its toolkit. Give CMake one: CUDAToolkit_ROOT=FOLDER make cuda")
    return Path(top[1]).resolve(), version[1]


def complete(folder: Path) -> bool:
    """Return True if the toolkit has cuBLAS, header and library."""
    return bool(list(folder.glob("**/cublas_v2.h")) and list(folder.glob("**/libcublas.so")))


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    target.symlink_to(source)


def assemble(toolkit: Path, version: str, folder: Path) -> None:
    """Fill `folder` with links to everything in `toolkit`, and to the headers and libraries of the wheel nvidia-cublas
    of the same version, which pip downloads (about 400 MB). Raises CalledProcessError."""
    unpacked = folder / "cublas"
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-deps",
            "--target",
            unpacked,
            f"nvidia-cublas=={version}.*",
        ],
        check=True,
        stdout=sys.stderr,
    )
    for name in ("bin", "nvvm"):
        link(toolkit / name, folder / name)
    for source in (*toolkit.glob("include/*"), *unpacked.glob("nvidia/*/include/*")):
        link(source, folder / "include" / source.name)
    for source in (*toolkit.glob("lib64/*"), *toolkit.glob("lib/*"), *unpacked.glob("nvidia/*/lib/*")):
        link(source, folder / "lib64" / source.name)
        if ".so." in source.name:  # the linker looks for libcublas.so
            link(source, folder / "lib64" / (source.name.partition(".so.")[0] + ".so"))
    for name, target in (("include", "include"), ("lib", "lib64")):  # the paths in nvcc.profile
        link(folder / target, folder / "targets" / "x86_64-linux" / name)


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise SystemExit("There is no nvcc on the PATH. Install NVIDIA's CUDA toolkit (version 12.4 or newer).")
    toolkit, version = root(nvcc)
    if complete(toolkit):
        print(toolkit)
        return
    if not complete(folder):
        assemble(toolkit, version, folder)
    print(folder)


if __name__ == "__main__":
    main()
