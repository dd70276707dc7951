"""Run the tests of llama.cpp and llama-cpp-python against the patched library.

    python -m bench.upstream [--build build/zoo]     a line a test: its name, ok or FAILED, seconds

The tests come from the pinned sdist, and with the arguments that llama.cpp's tests/CMakeLists.txt gives them. What they
download is stood in for by models that are here. Exits 1 if one fails; what it printed is then under build/upstream.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "upstream"
SHIPPED = ROOT / "notes_cli" / "models" / "notes-tiny-q8_0.gguf"

# Names of targets and arguments; one thread where that can be said, for in models so small threads wait for each other.
# MODELS are those that test-llama-archs writes of itself, with small weights: these tests compare logits with a bound
# of 1e-5, which some with the large weights of `make zoo` exceed, without the patch just as well.
MODELS = WORK / "models"
TARGETS = {
    "test-batch-alloc": [],
    "test-grammar-integration": [],
    "test-grammar-parser": [],
    "test-llama-grammar": [],
    "test-state-restore-fragmented": ["-m", str(SHIPPED), "-t", "1"],
    "test-thread-safety": [
        *("-m", str(SHIPPED), "-p", "The meaning of life is"),
        *("-n", "128", "-c", "256", "-ub", "32", "-np", "4", "-t", "2"),
    ],
    "test-llama-archs": ["-s", "1"],
    "test-save-load-state": ["--models", str(MODELS), "-t", "1"],
    "test-recurrent-state-rollback": ["--models", str(MODELS), "-t", "1"],
}

# Models that llama-cpp-python's tests download: what takes the place of each, a file or a kind of tests/tiny.py.
STAND_INS: dict[str, Path | str] = {
    "tinyllamas/stories15M-q4_0.gguf": SHIPPED,
    "mamba-130m-hf.Q2_K.gguf": "mamba",
    "Falcon-H1-Tiny-90M-Instruct-Q2_K.gguf": "lfm2",
}
# Those that nothing can take the place of, and why: tests that need them are left out.
LEFT_OUT = {
    "Qwen3.5-0.8B-Q8_0.gguf": "expects that model's own words",
    "bge-small-en-v1.5-q4_k_m.gguf": "expects a model of embeddings",
}


def run(name: str, command: list[str | Path]) -> bool:
    started = time.monotonic()
    with (WORK / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=WORK)
    print(f"{'FAILED' if done.returncode else 'ok':<9}{time.monotonic() - started:6.1f} s  {name}", flush=True)
    return done.returncode == 0


def native(build: Path) -> bool:
    """Build and run the tests of llama.cpp. True if all pass."""
    subprocess.run(["cmake", "--build", build, "--target", *TARGETS], check=True, stdout=subprocess.DEVNULL)
    MODELS.mkdir(parents=True, exist_ok=True)
    programs = build / "bin"
    try:
        right = [run("models", [programs / "test-llama-archs", "-s", "1", "-o", MODELS])]
        right += [run(name, [programs / name, *arguments]) for name, arguments in TARGETS.items()]
    finally:
        for path in MODELS.glob("*.gguf"):  # nearly a gigabyte, written in seconds
            path.unlink()
    return all(right)


def binding(build: Path) -> bool:
    """Run the tests of llama-cpp-python, and its package, on the installed library. True if all pass that need no
    download."""
    from notes_cli.engine.native import LIBRARY_PATH

    sys.path[:0] = [str(WORK)]  # before a llama_cpp that is installed
    sys.path += [str(ROOT / "native"), str(ROOT / "tests")]
    import prepare
    import tiny

    sdist = prepare.find_sdist(WORK)
    prepare.check(sdist)
    with tarfile.open(sdist) as archive:
        for member in archive:
            if "/vendor/" not in member.name and ("/tests/" in member.name or "/llama_cpp/" in member.name):
                member.name = member.name.partition("/")[2]
                archive.extract(member, WORK)
    folder = WORK / "lib"  # the library under the name that the package looks for
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(LIBRARY_PATH.parent, folder)
    (folder / LIBRARY_PATH.name).rename(folder / LIBRARY_PATH.name.replace("notes-llama", "llama"))
    os.environ["LLAMA_CPP_LIB_PATH"] = str(folder)
    vendor = WORK / "vendor" / "llama.cpp"
    vendor.parent.mkdir(exist_ok=True)
    vendor.unlink(missing_ok=True)
    vendor.symlink_to(build / "llama.cpp")

    def download(repo_id: str, filename: str) -> str:
        if filename in LEFT_OUT:
            pytest.skip(LEFT_OUT[filename])
        model = STAND_INS[filename]
        return str(tiny.write_model(WORK / f"{model}.gguf", model) if isinstance(model, str) else model)

    # test_llama.py imports scipy, and does not use it
    parts = {"scipy": {"special": None}, "scipy.special": {"log_softmax": None}}
    parts["huggingface_hub"] = {"hf_hub_download": download}
    for name, members in parts.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)

    os.chdir(WORK)  # the tests name files from there
    options = ["tests", "-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(WORK)]
    return pytest.main(options) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "zoo", help="where llama.cpp's tests are built")
    build = parser.parse_args().build.resolve()
    WORK.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # or threads without a core of their own hold up the others
    return 0 if all([native(build), binding(build)]) else 1


if __name__ == "__main__":
    sys.exit(main())
