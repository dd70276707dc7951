"""Pack a GPU build for a machine that has the GPU and nothing else: libraries, llama-server, sources, wheels, SmolLM2.

    python -m bench.gpu.pack [--out build/gpu/parts]

writes an archive in parts of at most 36 MiB; bench/gpu/unpack.sh puts it together there and runs the check.
"""

from __future__ import annotations

import argparse
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from notes_cli import config
from notes_cli.engine import native
from notes_cli.library.models import SMOLLM2

SOURCES = ("notes_cli", "prompts", "skills", "bench", "tests", "docs/results")
PART = 36 << 20  # bytes
BUILD, PYTHON = Path("build/cuda"), "3.12"  # the version of Python there
WHEELS = (  # dependencies of notes and its server, except numpy and PyYAML
    *("anyio", "click", "filelock", "gguf", "h11", "httpcore", "httpx", "jinja2", "platformdirs", "prometheus-client"),
    *("rich", "starlette", "typing-extensions", "uvicorn", "xxhash"),
)


def pack(out: Path) -> list[Path]:
    """Write the parts. Raise CalledProcessError if a wheel cannot be had, FileNotFoundError without a build."""
    folder = out.parent / "pack"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (folder / "lib").mkdir(parents=True)
    for library in sorted((BUILD / "bin").glob("lib[!c]*.so*")):
        shutil.copy2(library, folder / "lib" / library.name, follow_symlinks=True)
    shutil.copy2(BUILD / "bin" / "llama-server", folder / "lib")
    for module in Path(native.llama.__file__).parent.glob("*.py"):
        shutil.copy2(module, folder / "lib")
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder / "wheels")]
    pip += ["--python-version", PYTHON, "--only-binary", ":all:", "--platform", "manylinux2014_x86_64"]
    subprocess.run([*pip, *WHEELS], check=True)
    (folder / "source").mkdir()
    sources = subprocess.run(["git", "archive", "HEAD", *SOURCES], stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(sources)) as committed:
        committed.extractall(folder / "source")
    model = SMOLLM2.find(config.paths().models)
    if model is None:
        raise FileNotFoundError(SMOLLM2.file)
    shutil.copy2(model, folder / SMOLLM2.file)
    archive = out.parent / "pack.tar.xz"
    with lzma.open(archive, "wb", preset=1) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        tar.add(folder, arcname=".")
    parts = []
    with archive.open("rb") as whole:
        while piece := whole.read(PART):
            parts.append(out / f"part-{len(parts):02}")
            parts[-1].write_bytes(piece)
    archive.unlink()
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.pack", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu/parts"))
    for part in pack(parser.parse_args().out):
        print(f"{part}  {part.stat().st_size / (1 << 20):.1f} MiB")


if __name__ == "__main__":
    main()
