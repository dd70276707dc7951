"""Run native tests and a slice of the zoo with AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m bench.sanitize [--build build/sanitize] [--models build/zoo/models]     a line a job: ok or FAILED

GCC on Linux. Exits 1 if a job fails or a sanitizer has found anything; what they printed is under BUILD/logs.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Every class of memory and every kind of rotation among them.
MODELS = {
    "llama-dense": "one cache",
    "gemma3-dense": "sliding window, two bases",
    "llama4-moe": "chunked attention, layers without positions",
    "qwen2vl-dense": "M-RoPE",
    "deepseek2-moe": "MLA",
    "deepseek32-moe": "MLA with an indexer (DSA)",
    "dots3note-moe": "DSA with a sliding window",
    "minimax-m3-moe": "keys of an indexer beside the cache (MSA)",
    "mamba-dense": "recurrent state alone",
    "lfm2-dense": "hybrid: state and cache",
    "qwen35-dense": "hybrid with M-RoPE",
    "qwen4exp-moe": "hybrid with an indexer and pools",
    "glm5-next-moe": "hybrid with an indexer",
}
COLUMNS = "^(f16|bf16|q8_0) yarn (off streams|on one)$"

FINDING = re.compile(r"runtime error: .*|ERROR: AddressSanitizer.*")
# Python does not free everything at exit, so only allocations of our own code count as leaks.
LEAK = re.compile(
    r"^(?:Direct|Indirect) leak of .*\n    #0 .*\n(?:    #\d+ .*/c\+\+/.*\n)*    #\d+ .*/native/notes_.*", re.MULTILINE
)

# Tests that do not apply to this build, with reasons.
EXCEPT = {
    "test_rpc": "compares bits with a server of another build, which has other kernels",
    "test_rotation": "renders a template, in a process of bounded memory: a sanitizer takes terabytes of it",
    "test_memory_that_runs_out": "has a malloc of its own",
    "test_limits_that_no_image_meets_are_named": "renders a template",
    "test_no_segment_fits_a_context_with_an_adapter": "renders a template",
}


def environment(build: Path) -> dict[str, str]:
    """Loads the library into an ordinary Python."""
    runtimes = [  # libstdc++ as well: AddressSanitizer looks up the exception functions at start
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libasan.so", "libstdc++.so.6")
    ]
    return os.environ | {
        "NOTES_LIBRARY": str(build / "bin"),
        "LD_PRELOAD": " ".join(runtimes),
        "OMP_NUM_THREADS": "1",
        "PYTHONMALLOC": "malloc",  # so that reading beyond a buffer of Python's is seen
        # Signals are the guard's, which leaves the handlers of others: what it says of a crash is tested, too.
        "ASAN_OPTIONS": ":".join(f"handle_{one}=0" for one in ("segv", "abort", "sigbus", "sigfpe", "sigill")),
        "LSAN_OPTIONS": "exitcode=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def run(name: str, command: list[str], build: Path) -> bool:
    """Run a job in a process; return True if it succeeded without findings."""
    started = time.monotonic()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(build), cwd=ROOT
    )
    log = build / "logs" / f"{name}.log"
    log.write_text(done.stdout)
    found = sorted({*FINDING.findall(done.stdout), *LEAK.findall(done.stdout)})
    right = done.returncode == 0 and not found and '": "wrong"' not in done.stdout
    print(f"{'ok' if right else 'FAILED':<8}{time.monotonic() - started:6.1f} s  {name}", flush=True)
    for finding in found:
        print(f"    {finding}", flush=True)
    if not right:
        print(f"    status {done.returncode}, all of it: {log}", flush=True)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "sanitize", help="where the library is built")
    parser.add_argument("--models", type=Path, default=ROOT / "build" / "zoo" / "models", help="those of the zoo")
    given = parser.parse_args()
    build = given.build.resolve()
    (build / "logs").mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-m", "pytest", "tests/engine", "--ignore", "tests/engine/test_zoo.py"]
    tests += ["tests/library/test_stored.py", "-k", " and ".join(f"not {name}" for name in EXCEPT)]
    jobs = {"tests": [*tests, "-p", "no:cacheprovider"]}  # test_zoo is the zoo once more
    for name in MODELS:
        path = str(given.models / f"{name}.gguf")
        jobs[name] = [sys.executable, "-m", "bench.zoo_model", path, "--columns", COLUMNS]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return 0 if all(list(pool.map(lambda job: run(job[0], job[1], build), jobs.items()))) else 1


if __name__ == "__main__":
    sys.exit(main())
